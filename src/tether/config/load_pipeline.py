"""Read the file of a pipeline: each stage like the recipe of its method, with errors that name file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import yaml

from tether.config.base import Settings
from tether.config.load import (
    Given,
    Keys,
    RecipeReader,
    flag_pairs,
    raise_if_any,
    read_flags,
    recipe_with,
)
from tether.config.pipeline_recipe import POLICY, STAGE, STAGES, Pipeline, PipelineSettings, Stage
from tether.config.read_yaml import RecipeLoader, in_one_line, kind_of, line_of, read_mapping
from tether.config.schema import defaults
from tether.errors import ConfigError

LISTS = ("stages", "each_round")
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
OWN = ("run.name", "run.directory", "store.url")  # keys that the pipeline sets for its stages
PAGE = "pipelines.md"


class WrittenStage(NamedTuple):
    """A stage as the file has it: its method, and its keys with their places."""

    name: str
    method: str
    given: dict[str, Given]
    where: str


def load_pipeline(path: str, flags: Sequence[str] = ()) -> Pipeline:
    """The pipeline of a file, with flags: `--rounds 2`, or `--STAGE.section.key VALUE` for a key of a stage."""
    loader, top = read_mapping(path)
    try:
        written = _read(loader, top, path)
    except yaml.YAMLError as error:
        raise ConfigError(in_one_line(error, path)) from error
    finally:
        loader.dispose()
    own, lists, has_truth = written
    names = [stage.name for stages in lists.values() for stage in stages]
    own_flags, stage_flags = _split(flags, names)
    keys = Keys(PipelineSettings, PAGE)
    own |= read_flags(keys, own_flags)
    settings = recipe_with(PipelineSettings, defaults(PipelineSettings), own, keys, path)
    task = {key: value for key, value in own.items() if key.startswith("task.")}
    built: dict[str, tuple[Stage, ...]] = {}
    earlier = settings.policy is not None
    for key in LISTS:
        made: list[Stage] = []
        for stage in lists[key]:
            made.append(_stage(stage, stage_flags.get(stage.name, []), task, path, policy_before=earlier))
            earlier = earlier or made[-1].makes == "policy"
        built[key] = tuple(made)
    if not built["stages"] and not built["each_round"]:
        raise ConfigError(f"{path} has no stages: list them under `stages:` (once) and `each_round:` (in every round)")
    return Pipeline(settings, built["stages"], built["each_round"], has_truth)


def pipeline_from_record(record: Mapping[str, Any]) -> Pipeline:
    """The pipeline that a folder stores. Raises ValueError where it is invalid."""
    own = {name: value for name, value in record.items() if name not in ("method", "has_truth", *LISTS)}
    settings = PipelineSettings.model_validate_json(json.dumps(own), strict=True)
    lists: dict[str, tuple[Stage, ...]] = {}
    for key in LISTS:
        stages: list[Stage] = []
        for name, stage in record[key].items():
            rest = {field: value for field, value in stage.items() if field != "method"}
            stages.append(Stage(name, STAGES[stage["method"]].model_validate_json(json.dumps(rest), strict=True)))
        lists[key] = tuple(stages)
    return Pipeline(settings, lists["stages"], lists["each_round"], bool(record["has_truth"]))


def _read(
    loader: RecipeLoader, top: yaml.MappingNode | None, path: str
) -> tuple[dict[str, Given], dict[str, list[WrittenStage]], bool]:
    """(the pipeline's own keys, the stages by list, whether there is a section `truth`)."""
    reader = RecipeReader(Keys(PipelineSettings, PAGE), loader, path)
    lists: dict[str, list[WrittenStage]] = {key: [] for key in LISTS}
    names: dict[str, int] = {}
    rest: list[tuple[yaml.Node, yaml.Node]] = []
    for key_node, node in top.value if top is not None else ():
        key = str(loader.construct_plain(key_node))
        if key not in LISTS or lists[key]:
            rest.append((key_node, node))
        elif isinstance(node, yaml.MappingNode):
            lists[key] = list(_stages(loader, node, path, names))
        elif node.tag != "tag:yaml.org,2002:null":
            raise ConfigError(
                f"{key} in {path}, line {line_of(key_node)}: expected stages by name, got {kind_of(node)}"
            )
    has_truth = any(str(loader.construct_plain(key_node)) == "truth" for key_node, _ in rest)
    if top is not None:
        reader.read(yaml.MappingNode(top.tag, rest, top.start_mark, top.end_mark))
    raise_if_any(reader.problems)
    return reader.given, lists, has_truth


def _stages(loader: RecipeLoader, node: yaml.MappingNode, path: str, names: dict[str, int]) -> Iterator[WrittenStage]:
    own = set(Keys(PipelineSettings).leaves) | set(Keys(PipelineSettings).sections) | {POLICY, *LISTS}
    for key_node, stage in node.value:
        name, line = str(loader.construct_plain(key_node)), line_of(key_node)
        where = f"{path}, line {line}"
        if not NAME.fullmatch(name) or name in own:
            why = "it is a key of pipelines" if name in own else "use lower-case letters, digits and _"
            raise ConfigError(f"{name} in {where} cannot be the name of a stage: {why}")
        if name in names:
            raise ConfigError(f"stage {name} is given twice in {path}, lines {names[name]} and {line}: rename one")
        names[name] = line
        if not isinstance(stage, yaml.MappingNode):
            raise ConfigError(f"stage {name} in {where}: expected a mapping with `method:`, got {kind_of(stage)}")
        method = _method(loader, stage, name, where)
        reader = RecipeReader(Keys(STAGES[method], PAGE if method in EXTRA else ""), loader, path)
        reader.read(stage)
        raise_if_any(f"stage {name}: {problem}" for problem in reader.problems)
        yield WrittenStage(name, method, reader.given, where)


EXTRA = ("collect", "best_of_n", "rejection_sampling")


def _method(loader: RecipeLoader, stage: yaml.MappingNode, name: str, where: str) -> str:
    for key, value in stage.value:
        if loader.construct_plain(key) == "method":
            method = str(loader.construct_plain(value))
            if method in STAGES:
                return method
            close = get_close_matches(method, STAGES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(STAGES)}"
            raise ConfigError(
                f"stage {name}: unknown method {method} in {where.rpartition(',')[0]}, line {line_of(key)}: {hint}"
            )
    raise ConfigError(f"stage {name} in {where} has no method: add `method:`, one of {', '.join(STAGES)}")


def _split(flags: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(the pipeline's own flags, the flags of each stage without its name)."""
    own: list[str] = []
    of_stage: dict[str, list[str]] = {name: [] for name in names}
    for flag, text in flag_pairs(flags):
        first, _, rest = flag.removeprefix("--").partition(".")
        word = f"--{rest}" if first in of_stage and rest else flag
        target = of_stage[first] if first in of_stage and rest else own
        target.append(word if text is None else f"{word}={text}")
    return own, of_stage


def _stage(
    written: WrittenStage, flags: Sequence[str], task: Mapping[str, Given], path: str, *, policy_before: bool
) -> Stage:
    """The stage's settings: defaults, the pipeline's task where it has none, the file, flags."""
    kind: type[Settings] = STAGES[written.method]
    keys = Keys(kind, PAGE if written.method in EXTRA else "")
    try:
        given = dict(written.given) | read_flags(keys, flags)
        for key in OWN:
            if key in given:
                raise ConfigError(f"{key} in {given[key].where} is set by the pipeline: remove it")
        if "task" in keys.sections and not any(key.startswith("task.") for key in given):
            given |= task
        if "model.path" not in given and policy_before:
            given["model.path"] = Given(f"{STAGE}{POLICY}", written.where)
        return Stage(written.name, recipe_with(kind, defaults(kind), given, keys, path))
    except ConfigError as error:
        lines = str(error).split("\n")
        raise ConfigError("\n".join(f"stage {written.name}: {line}" for line in lines)) from error
