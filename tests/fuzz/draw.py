"""Random recipes that the schema accepts: every key may get a value, drawn by its type or from a list of small ones."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tether.config.load import load_recipe
from tether.config.recipes import RECIPES, Recipe
from tether.config.schema import REQUIRED, Leaf, describe, union_members
from tether.errors import ConfigError

HERE = Path(__file__).parent
METHODS = ("ppo", "ppo", "ppo", *RECIPES)  # PPO has most to choose from
FEW = (1, 2, 3, 4, 8)
FLOATS = (0.0, 1e-6, 0.01, 0.1, 0.5, 0.9, 1.0, 2.0, 10.0)
WHOLE = (0, 1, 2, 3, 5)
PARTS = (
    {"kind": "task"},
    {"kind": "length", "min": 1, "max": 6, "unit": "characters"},
    {"kind": "length", "target": 3, "falloff": 2},
    {"kind": "regex", "pattern": "[a-z]"},
    {"kind": "json"},
    {"kind": "exact", "extract": "last_line"},
    {"kind": "numeric"},
    {"kind": "math"},
    {"kind": "ended"},
    {"kind": "function", "function": "draw:share_of_letters", "takes": "text"},
    {"kind": "function", "function": "draw:no_such_function"},
    {"kind": "model", "path": "{reward}"},
    {"kind": "model", "path": "{reward}", "shared": True},
)
# Keys whose values are names of things, or must stay small for a run of seconds.
VALUES: dict[str, tuple[Any, ...]] = {
    "model.attention": ("auto", "sdpa", "eager"),
    "model.dtype": ("auto", "float32"),
    "model.quantize": (*["none"] * 20, "4bit"),
    "rollout.prompts_per_step": (1, 2, 3, 4),
    "rollout.samples_per_prompt": (1, 2, 3),
    "rollout.max_new_tokens": (1, 2, 2, 5, 5, 8, 8, 300),
    "rollout.workers": (0, 0, 1, 2),
    "rollout.weights_dir": (None, "{folder}/weights"),
    "rollout.hedge_seconds": (0.01, 60.0),
    "rollout.worker_timeout": (60.0, 1800.0),
    "rollout.worker_patience": (60.0, 120.0),
    "rollout.stop_token_ids": ([], [10], list(range(0, 250, 3)), [100_000]),
    "rollout.max_num_seqs": ("auto", 1, 3),
    "roles.lora_targets": ("all-linear", "q_proj,v_proj", "no_such_layer"),
    "roles.trainable_layers": (1, 1, 1, 2),
    "roles.critic_init": (None, "{reward}"),
    "kl.reference": ("start", "start", "tiny-bytes", "{reward}"),
    "roles.backbone_cache": (None, "{folder}/states"),
    "optimizer.micro_batch_tokens": (1, 20, 64, 8192),
    "optimizer.betas": ([0.9, 0.95], [0.0, 0.0], [0.9, 0.999]),
    "data.train": ("{data}",),
    "data.held_out": (None, "{data}"),
    "data.max_length": (4, 24, 200, 1024),
    "data.max_prompt_length": (None, None, 12, 200),
    "reward.center_on": (None, "{demonstrations}"),
    "ptx.data": (None, "{demonstrations}"),
    "ptx.max_length": (4, 24, 200),
    "run.seed": (0, 1, 7, 12345),
    "run.max_skipped": (1, 10),
    "run.hang_timeout": (0.0, 600.0),  # above what a case may take: the watchdog ends its whole process
    "store.trackers": ([], [], ["tensorboard"]),
    "evaluation.prompts": (1, 2),
}
# Values that are accepted only beside each other.
TOGETHER: dict[str, tuple[dict[str, Any], ...]] = {
    "reinforce": (
        {"reinforce.weighting": "n_step", "reinforce.n_steps": 2},
        {"reinforce.weighting": "total", "reinforce.baseline": "batch_mean"},
        {"reinforce.weighting": "to_go", "reinforce.baseline": "moving_average"},
    ),
    "grpo": ({"grpo.objective": "gspo", "grpo.aggregation.over": "sequence"}, {"grpo.objective": "cispo"}),
}
KEPT = ("run.name", "run.directory", "run.steps", "run.save", "model.path", "model.device", "store.url", "task.")


def share_of_letters(prompt: Any, completion: str, answer: str | None) -> float:
    """A reward function of a user's own."""
    return sum(letter.isalpha() for letter in completion) / max(len(completion), 1)


@dataclass(frozen=True)
class Case:
    """One drawn recipe: the method and its flags, with places in braces."""

    number: int
    method: str
    flags: dict[str, Any]

    def words(self, places: dict[str, str]) -> list[str]:
        """The flags as they stand on a command line."""
        return [f"--{key}={_text(value, places)}" for key, value in self.flags.items()]

    def recipe(self, places: dict[str, str]) -> Recipe:
        """The recipe; raises ConfigError where the schema refuses it."""
        return load_recipe(self.method, None, self.words(places))


def _text(value: Any, places: dict[str, str]) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", place)
    return text


def start(method: str) -> dict[str, Any]:
    """What every case has: a tiny model on the CPU, two steps, little of everything."""
    flags: dict[str, Any] = {"model.device": "cpu", "run.steps": 2, "roles.trainable_layers": 1, "roles.lora_rank": 2}
    keys = {leaf.key for leaf in describe(RECIPES[method])}
    small = {
        "data.train": "{data}",
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 6,
        "evaluation.prompts": 2,
        f"{method}.minibatch_size": 4,
        f"{method}.epochs": 2,
        f"{method}.batch_size": 4,
        "ptx.batch_size": 2,
        "run.doctor_every": 1,
    }
    flags |= {key: value for key, value in small.items() if key in keys}
    if method in ("sft", "reward", "dpo", "rloo"):  # whose epochs mean something else
        flags.pop(f"{method}.epochs", None)
    return flags


def candidates(leaf: Leaf, draw: random.Random) -> list[Any]:
    """A few values of the leaf's type, in random order; none where its values are names that nobody can guess."""
    if leaf.key in VALUES:
        return draw.sample(VALUES[leaf.key], len(VALUES[leaf.key]))
    if leaf.key == "reward.parts":
        parts = [
            part | {"weight": draw.choice((1.0, -0.5, 0.0))} for part in draw.sample(PARTS, draw.choice((1, 2, 3)))
        ]
        return [[part | {"name": f"part{place}"} for place, part in enumerate(parts)], []]
    found: list[Any] = []
    for kind in union_members(leaf.annotation):
        if kind is bool:
            found += [True, False]
        elif kind is type(None):
            found.append(None)
        elif get_origin(kind) is Literal:
            found += get_args(kind)
        elif kind is int:
            found += FEW if leaf.key.endswith(("_size", "epochs", "keep")) else WHOLE
        elif kind is float:
            found += FLOATS
    return draw.sample(found, len(found))


def draw_case(number: int, places: dict[str, str]) -> Case:
    """The case of this number: keys in random order, each kept where the schema accepts it beside those before."""
    draw = random.Random(number)
    method = draw.choice(METHODS)
    case = Case(number, method, start(method))
    leaves = [leaf for leaf in describe(RECIPES[method]) if not leaf.key.startswith(KEPT)]
    share = draw.choice((0.1, 0.25, 0.5))
    if method in TOGETHER and draw.random() < 0.5:
        case = Case(number, method, case.flags | draw.choice(TOGETHER[method]))
    elif draw.random() < 0.25:
        length = {f"{method}.aggregation.over": "fixed", f"{method}.aggregation.fixed_length": draw.choice((1, 8))}
        if all(any(leaf.key == key for leaf in leaves) for key in length):
            case = Case(number, method, case.flags | length)
    for leaf in draw.sample(leaves, len(leaves)):
        if draw.random() > share and leaf.default is not REQUIRED:
            continue
        for value in candidates(leaf, draw)[:3]:
            changed = Case(number, method, case.flags | {leaf.key: value})
            try:
                changed.recipe(places)
            except ConfigError:
                continue
            case = changed
            break
    case.recipe(places)
    return case
