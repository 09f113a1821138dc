"""Export a run's model, rollouts and metrics, and write the model card. Each file is written atomically.

The model card is README.md with the hub's front matter. It holds names, settings and numbers from the run's records.
Paths are reduced to their last part, and URLs are left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from tether import __version__
from tether.config.control_recipe import ControlRecipe
from tether.errors import ConfigError, StorageError, UsageError
from tether.files import check_saved, read_plain_json, recover
from tether.reports.run_table import open_for, rollout_as_json
from tether.store.database.journal import is_being_recorded
from tether.store.database.schema import without_infinities
from tether.store.find import run_config
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun

# -- the model card -----------------------------------------------------------------------------------------------

CARD = "README.md"
METHODS = {
    "sft": "supervised fine-tuning on demonstrations",
    "reward": "comparisons of answers, as a reward model",
    "dpo": "direct preference optimization",
    "ppo": "Proximal Policy Optimization",
    "grpo": "group-relative policy optimization",
    "rloo": "REINFORCE with a leave-one-out baseline",
    "reinforce": "the policy gradient (REINFORCE)",
    "trpo": "trust region policy optimization",
}
CONTROL_SECTIONS = ("environment", "network", "rollout", "optimizer")  # and the algorithm's own
SECTIONS = ("roles", "optimizer", "rollout", "kl", "data", "reward")  # and the method's own
LEFT_OUT = {"parts", "train", "held_out", "columns", "options", "micro_batch_tokens", "backbone_cache", "critic_init"}
SHOWN = ("score", "held_out/score", "accuracy", "held_out/accuracy", "loss", "held_out/loss", "kl_ref_k3", "entropy")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MAX_CHAIN = 16


@dataclass(frozen=True)
class CardFacts:
    """What is exported. `step` is the step that the metrics are taken from; None for the last."""

    kind: str  # model, adapters, reward, reward-adapters, policy (of an environment)
    dtype: str | None = None
    step: int | None = None
    licence: str | None = None
    repository: str | None = None  # OWNER/NAME on the hub


def write_card(folder: Path, summary: RunSummary, run: RecordedRun, facts: CardFacts) -> None:
    """Write README.md into the folder."""
    (folder / CARD).write_text(card_text(summary, run, facts), encoding="utf-8")


def card_text(summary: RunSummary, run: RecordedRun, facts: CardFacts) -> str:
    """The text of the card."""
    chain = base_models(str(summary.config.get("model", {}).get("path", "")))
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(summary, facts, chain[-1]), sort_keys=False)}---",
        f"# {facts.repository.rpartition('/')[2] if facts.repository else summary.name}",
        _opening(summary, facts, chain),
        "\n".join(["## Use", "", *_usage(facts)]),
        "\n".join(["## Results", "", *_results(summary, run, facts)]),
        "\n".join(["## Training", "", *_training(summary)]),
    ]
    return "\n\n".join(parts) + "\n"


def base_models(path: str) -> list[str]:
    """The models that this one was trained from, nearest first: runs by folder name, then the original model."""
    chain: list[str] = []
    while len(chain) < MAX_CHAIN:
        config = run_config(path) if path else {}
        if not config:
            return [*chain, _base_name(path)]
        folder = Path(path)
        chain.append((folder.parent if folder.name in ("model", "best") else folder).name)
        path = str(config.get("model", {}).get("path", ""))
    return chain


def _base_name(path: str) -> str:
    """A hub id or a known name unchanged; the last part of a folder."""
    if HUB_ID.fullmatch(path) and not Path(path).exists():
        return path
    return Path(path).name or "unknown"


def _front_matter(summary: RunSummary, facts: CardFacts, base: str) -> dict[str, Any]:
    front: dict[str, Any] = {"license": facts.licence or base_licence(base) or "other"}
    if facts.kind == "policy":
        tags = ["tether", str(summary.config["algorithm"]), str(summary.config["environment"]["id"])]
        return front | {"library_name": "tether", "pipeline_tag": "reinforcement-learning", "tags": tags}
    if HUB_ID.fullmatch(base):  # the hub rejects a base model that is not an id
        front["base_model"] = base
    front["library_name"] = "peft" if facts.kind.endswith("adapters") else "transformers"
    front["pipeline_tag"] = "text-classification" if facts.kind.startswith("reward") else "text-generation"
    tags = ["tether", "rlhf", summary.method, *(["reward-model"] if facts.kind.startswith("reward") else [])]
    return front | {"tags": tags}


def base_licence(base: str) -> str | None:
    """The licence of a model that Tether knows by name."""
    from tether.hub.catalog import EMBEDDED

    return EMBEDDED[base].licence.lower() if base in EMBEDDED else None


def _opening(summary: RunSummary, facts: CardFacts, chain: list[str]) -> str:
    what = METHODS.get(summary.method, summary.method)
    if facts.kind == "policy":
        environment, algorithm = summary.config["environment"]["id"], METHODS[summary.config["algorithm"]]
        taken = f"{summary.steps_done} of {summary.steps_target} iterations"
        return f"A policy for gymnasium's environment `{environment}`, trained with {algorithm}, {taken}."
    through = f" by way of {', '.join(f'`{name}`' for name in reversed(chain[:-1]))}" if chain[:-1] else ""
    step = summary.steps_done if facts.step is None else facts.step + 1
    text = f"Trained from `{chain[-1]}`{through} with {what}, {step} of {summary.steps_target} steps"
    form = {"adapters": ", saved as LoRA adapters", "reward-adapters": ", saved as LoRA adapters"}.get(facts.kind, "")
    stored = f", weights in {facts.dtype}" if facts.dtype else ""
    note = "" if facts.licence or base_licence(chain[-1]) else " The licence of the base model applies; state it above."
    return f"{text}{form}{stored}.{note}"


def _usage(facts: CardFacts) -> Iterator[str]:
    name = facts.repository or "THIS_FOLDER"
    yield "```python"
    if facts.kind == "model":
        yield "from transformers import pipeline"
        yield ""
        yield f'chat = pipeline("text-generation", "{name}")'
        yield 'print(chat([{"role": "user", "content": "Hello"}], max_new_tokens=128)[0]["generated_text"][-1])'
    elif facts.kind == "reward":
        yield "import torch"
        yield "from transformers import AutoModelForSequenceClassification, AutoTokenizer"
        yield ""
        yield f'model = AutoModelForSequenceClassification.from_pretrained("{name}")'
        yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
        yield 'talk = [{"role": "user", "content": "Hello"}]'
        yield "ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)"
        yield 'ids += [*tokenizer.encode("Hello to you.", add_special_tokens=False), tokenizer.eos_token_id]'
        yield "score = model(torch.tensor([ids])).logits[0, 0]  # read at the end token"
        yield "print(score)  # plus the bias in scalar_head.json, which is the same for every answer"
    elif facts.kind == "policy":
        yield "from tether.control.saved import SavedPolicy"
        yield ""
        yield f'policy = SavedPolicy("{name}")'
        yield "action = policy(observation)  # the mean, or the most likely choice"
    else:
        loader = "AutoPeftModelForSequenceClassification" if "reward" in facts.kind else "AutoPeftModelForCausalLM"
        yield f"from peft import {loader}"
        yield ""
        yield f'model = {loader}.from_pretrained("{name}")'
    yield "```"


def _results(summary: RunSummary, run: RecordedRun, facts: CardFacts) -> Iterator[str]:
    rows = [row for row in run.metrics if facts.step is None or row["step"] <= facts.step]
    found = {name: _last(rows, name) for name in (*SHOWN, *_held_out(rows))}
    start = {name: next((row[f"start/{name}"] for row in rows if f"start/{name}" in row), None) for name in found}
    intervals = _intervals(summary.folder, facts)
    shown = {name: value for name, value in found.items() if value is not None}
    if not shown:
        yield "The run recorded no metric that says how good the model is."
        return
    yield "| metric | before training | this model |"
    yield "|---|---|---|"
    for name, value in shown.items():
        before = start[name]
        interval = f" ({intervals[name][0]:.3g} to {intervals[name][1]:.3g})" if name in intervals else ""
        yield f"| {name} | {'' if before is None else f'{before:.4g}'} | {value:.4g}{interval} |"
    if intervals:
        yield "\nIn brackets: the 95 % interval."


def _held_out(rows: list[Mapping[str, float]]) -> list[str]:
    names = {name for row in rows for name in row if name.startswith("held_out/")}
    return sorted(names - set(SHOWN))


def _last(rows: list[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return values[-1] if values else None


def _intervals(folder: Path, facts: CardFacts) -> dict[str, tuple[float, float]]:
    """The confidence intervals in the report of a finished reward model."""
    try:
        report = read_plain_json(folder / "report.json")
        low, high = report["accuracy_interval"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"held_out/accuracy": (float(low), float(high))} if facts.step is None else {}


def _training(summary: RunSummary) -> Iterator[str]:
    config = summary.config
    data = config.get("data", {})
    task = config.get("task", {})
    named = {"training data": data.get("train"), "held-out data": data.get("held_out"), "prompts": task.get("prompts")}
    named["task"] = None if task.get("prompts") else task.get("name")
    for what, value in named.items():
        if value:
            yield f"- {what}: {', '.join(f'`{_short(one)}`' for one in ([value] if isinstance(value, str) else value))}"
    parts = config.get("reward", {}).get("parts") or ()
    if parts:
        yield f"- reward: {', '.join(_part(part) for part in parts)}"
    yield f"- seed: {config.get('run', {}).get('seed')}"
    yield f"- made with: Tether {__version__}"
    yield ""
    yield "| setting | value |"
    yield "|---|---|"
    for key, value in _settings(config, summary.method):
        yield f"| `{key}` | {value} |"


def _part(part: Mapping[str, Any]) -> str:
    of = part.get("path") or part.get("function")
    named = f" `{_short(of)}`" if isinstance(of, str) else ""
    return f"{part.get('kind')}{named}, weight {part.get('weight', 1.0)}"


def _settings(config: Mapping[str, Any], method: str) -> Iterator[tuple[str, str]]:
    if method == ControlRecipe.method:
        sections = (*CONTROL_SECTIONS, str(config["algorithm"]))
    else:
        yield "model.dtype", str(config.get("model", {}).get("dtype"))
        sections = (*SECTIONS, method)
    for section in dict.fromkeys(sections):
        values = config.get(section)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if key not in LEFT_OUT and isinstance(value, bool | int | float | str) and not _is_idle(config, key):
                yield f"{section}.{key}", _short(value) if isinstance(value, str) else str(value)


def _is_idle(config: Mapping[str, Any], key: str) -> bool:
    """Whether a setting belongs to a mode that the run does not use."""
    mode = config.get("roles", {}).get("mode")
    return (key.startswith("lora_") and mode != "lora") or (key == "trainable_layers" and mode != "shared_backbone")


def _short(text: Any) -> str:
    """The last part of a path; "(an address)" for a URL."""
    said = str(text)
    if "://" in said:
        return "(an address)"
    return re.split(r"[/\\]", said.rstrip("/\\"))[-1] if ("/" in said or "\\" in said) else said


# -- exported files -----------------------------------------------------------------------------------------------


def export(options: argparse.Namespace) -> int:
    """Write the files that the options name, and print their paths."""
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        wanted = _targets(options, summary, run)
        written: dict[str, str] = {}
        try:
            if model := wanted.get("model"):
                written["model"] = str(copy_model(summary, model, best=options.best))
                write_card(model, summary, run, _facts(summary, run, model, options))
            if rollouts := wanted.get("rollouts"):
                written["rollouts"] = str(write_rollouts(run, rollouts, options.step or list(run.rollout_steps)))
            if metrics := wanted.get("metrics"):
                written["metrics"] = str(write_metrics(run, metrics))
        except OSError as error:
            raise StorageError(f"cannot export to {error.filename or options.to}: {error.strerror or error}") from error
    if options.json:
        print(json.dumps(written))
    else:
        for what, where in written.items():
            print(f"{what}: {where}")
    return 0


def _targets(options: argparse.Namespace, summary: RunSummary, run: RecordedRun) -> dict[str, Path]:
    named = {name: getattr(options, name) for name in ("model", "rollouts", "metrics")}
    targets = {name: Path(value).expanduser() for name, value in named.items() if value}
    if options.to:
        folder = Path(options.to).expanduser()
        has_model = (summary.folder / ("best" if options.best else "model")).is_dir()
        everything = {"metrics": "metrics.csv"} | ({"model": "model"} if has_model else {})
        everything |= {"rollouts": "rollouts.jsonl"} if run.rollout_steps else {}
        targets = {name: folder / value for name, value in everything.items()} | targets
    if not targets:
        raise UsageError("say what to export: --model DIR, --rollouts FILE, --metrics FILE, or --to DIR for all three")
    for step in options.step or ():
        if step not in run.rollout_steps:
            raise UsageError(f"--step: the answers of step {step} were not kept")
    if "rollouts" in targets and not run.rollout_steps:
        raise UsageError(f"--rollouts: no answers of {run.name} were kept; --metrics FILE writes its metrics")
    for name in ("rollouts", "metrics"):
        if name in targets and os.path.lexists(targets[name]) and not options.force:
            raise UsageError(
                f"--{name}: {targets[name]} exists already; name a new file, or add --force to overwrite it"
            )
    return targets


def _facts(summary: RunSummary, run: RecordedRun, folder: Path, options: argparse.Namespace) -> CardFacts:
    if summary.method == ControlRecipe.method:
        return CardFacts("policy", licence=options.license)
    kind = "adapters" if (folder / "adapter_config.json").is_file() else "model"
    if summary.method == "reward":
        kind = "reward" if kind == "model" else "reward-adapters"
    return CardFacts(kind, step=best_step(run) if options.best else None, licence=options.license)


def best_step(run: RecordedRun) -> int | None:
    """The first step with the best held-out score; None if there was no evaluation."""
    scored = [(row["held_out/score"], -row["step"]) for row in run.metrics if "held_out/score" in row]
    return int(-max(scored)[1]) if scored else None


def model_folder(summary: RunSummary, *, best: bool = False) -> Path:
    """The folder of a run's last or best model."""
    source = summary.folder / ("best" if best else "model")
    if not is_being_recorded(summary.folder):
        recover(source)
    if not source.is_dir():
        raise ConfigError(
            f"{summary.name} has no model in {source}: it is not finished, or had run.save set to false; "
            "--checkpoint -1 takes it from the newest checkpoint"
            if not best
            else f"{summary.name} has no {source}: it had no held-out evaluation, or its score never improved"
        )
    check_saved(source)
    for path in (source, *source.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # a copy would hold a file from elsewhere
            raise ConfigError(
                f"{path} is a link or not a plain file, and a saved model holds only plain files: remove it, or "
                "replace the link by its target"
            )
    return source


def copy_model(summary: RunSummary, target: Path, *, best: bool = False) -> Path:
    """Copy a run's model, or its adapters if it trained LoRA, to a folder that must not exist."""
    source = model_folder(summary, best=best)
    if target.exists():
        raise UsageError(f"--model: {target} exists already; name a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copytree(source, beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def write_metrics(run: RecordedRun, target: Path) -> Path:
    """Write one row per step; in CSV, values that are missing or not finite are empty."""
    kind = _kind(target, "--metrics", ("csv", "jsonl"))
    with _beside(target) as path, path.open("w", encoding="utf-8", newline="") as file:
        if kind == "jsonl":
            file.writelines(_lines(dict(row) for row in run.metrics))
        else:
            write_table(file, run.metrics)
    return target


def write_table(file: TextIO, rows: Sequence[Mapping[str, float]]) -> None:
    """Write metrics as CSV, one row per step; values that are missing or not finite are empty."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    table = csv.writer(file)
    table.writerow(csv_cell(name) for name in names)
    for row in rows:
        table.writerow(value if (value := row.get(name)) == value else None for name in names)


def csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet reads as a formula: a text that looks like one gets an apostrophe in front.

    Numbers are unchanged, including negative ones.
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # spreadsheets accept the full-width forms too


def write_rollouts(run: RecordedRun, target: Path, steps: list[int]) -> Path:
    """Write one row per rollout, every token column as a list. One step is in memory at a time."""
    kind = _kind(target, "--rollouts", ("parquet", "jsonl"))
    write: Callable[[Path, RecordedRun, list[int]], None] = _write_parquet if kind == "parquet" else _write_jsonl
    with _beside(target) as path:
        write(path, run, steps)
    return target


def _write_jsonl(path: Path, run: RecordedRun, steps: list[int]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for step in steps:
            file.writelines(_lines(rollout_as_json(rollout) for rollout in run.rollouts(step)))


def _write_parquet(path: Path, run: RecordedRun, steps: list[int]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            "--rollouts: .parquet needs the package pyarrow: pip install 'tether-rl[parquet]', or write .jsonl"
        ) from None
    schema = _parquet_schema(pa, run, steps)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for step in steps:
            rows = [_for_parquet(rollout_as_json(rollout)) for rollout in run.rollouts(step)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _parquet_schema(pa: Any, run: RecordedRun, steps: list[int]) -> Any:
    """The column types; token columns keep their stored precision."""
    first = run.rollouts(steps[0])[0] if steps else None
    kinds = {"step": pa.int64(), "sample": pa.int64(), "group_id": pa.int64(), "sample_id": pa.int64()}
    kinds["policy_version"] = pa.int64()
    kinds |= {"score": pa.float64(), "temperature": pa.float64(), "final_value": pa.float64()}
    token_kinds = {"int32": pa.int32(), "float32": pa.float32(), "bool": pa.bool_()}
    fields = []
    for name in rollout_as_json(first) if first is not None else ():
        column = None if first is None else first.kl if name == "kl" else first.columns.get(name)
        if column is not None:
            fields.append(pa.field(name, pa.list_(token_kinds[str(column.dtype)])))
        elif name == "piece":
            fields.append(pa.field(name, pa.list_(pa.string())))
        else:
            fields.append(pa.field(name, kinds.get(name, pa.string())))
    return pa.schema(fields)


def _for_parquet(row: dict[str, Any]) -> dict[str, Any]:
    """Parts as JSON, and texts without lone surrogates, which Parquet does not accept."""
    row["parts"] = json.dumps(without_infinities(row["parts"]))
    row["piece"] = [_whole(piece) for piece in row["piece"]]
    return {name: _whole(value) if isinstance(value, str) else value for name, value in row.items()}


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(without_infinities(row), allow_nan=False) + "\n" for row in rows)


def _kind(target: Path, option: str, known: tuple[str, ...]) -> str:
    kind = target.suffix.removeprefix(".").lower()
    if kind not in known:
        raise UsageError(f"{option}: {target} must end in .{' or .'.join(known)}")
    return kind


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A temporary path to write to, which is renamed to the target on success."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield path
        path.replace(target)
    finally:
        path.unlink(missing_ok=True)
