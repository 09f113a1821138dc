"""Train the tiny runs that the doctor is tested on, and keep what they recorded in `recorded.zip`.

Run it from the root of the repository, for all runs or for some of them by name:

    OMP_NUM_THREADS=1 python tests/doctor/record_runs.py [NAME ...]
    python tests/doctor/record_runs.py --copy NAME FOLDER      a run that was trained elsewhere, without rollouts

`NAME.json` in the archive has the recipe, every metric of every step (a list for each metric, to six digits) and, of
the first and the last step, some of the rollouts with their token columns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]  # sick_tasks

from recipes_of_runs import RUNS, RunToRecord  # noqa: E402
from stored_runs import from_json, keep_recorded  # noqa: E402

from tether.config.load import load_recipe  # noqa: E402
from tether.config.recipes import RLRecipe  # noqa: E402
from tether.doctor.answer_metrics import step_measures  # noqa: E402
from tether.models.save import save_model  # noqa: E402
from tether.protocols import RolloutEngine  # noqa: E402
from tether.reports.capability_table import EVENT  # noqa: E402
from tether.store.read import open_workspace, read_run, workspace_of  # noqa: E402
from tether.train.build import build_rl, build_supervised, load_policy  # noqa: E402
from tether.train.rl import RLParts, StepResult, train_rl  # noqa: E402
from tether.train.supervised import train_supervised  # noqa: E402
from tether.types import Experience, Rollout  # noqa: E402

ROWS_KEPT = 16
DIGITS = 6


class CoarseEngine(RolloutEngine):
    """An engine of low precision: its log-probs are told to the nearest quarter."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.policy_version = engine, 0

    def generate(self, *args: Any, **kwargs: Any) -> list[Rollout]:
        """The engine's rollouts, told coarsely."""
        self.engine.policy_version = self.policy_version
        return [coarse(rollout) for rollout in self.engine.generate(*args, **kwargs)]


def coarse(rollout: Rollout) -> Rollout:
    """A rollout with its log-probs to the nearest quarter."""
    said = (rollout.untruncated_logprobs * 4.0).round() / 4.0
    return dataclasses.replace(rollout, behavior_logprobs=said, untruncated_logprobs=said)


def main(words: Sequence[str]) -> None:
    """Record the runs named, or all; or copy one that was trained elsewhere."""
    if words[:1] == ["--copy"]:
        _, name, folder = words
        write(copied(name, Path(folder)))
        return
    for run in RUNS:
        if not words or run.name in words:
            write(record(run))


def write(recorded: dict[str, Any]) -> None:
    """Keep a run in the archive."""
    text = json.dumps(recorded, separators=(",", ":"), allow_nan=False) + "\n"
    keep_recorded(recorded["name"], text)
    print(f"{recorded['name']}: {len(recorded['metrics']['step'])} steps, {len(text) / 1e3:.0f} kB", flush=True)


def record(run: RunToRecord) -> dict[str, Any]:
    """Train one run and gather what it says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_records(Path(folder))
        if "{sft}" in " ".join(run.flags):
            train_first(data)
        flags = [word.replace("{data}", str(data)).replace("{sft}", str(data / "sft")) for word in run.flags]
        recipe = load_recipe(run.method, run.recipe, flags)
        policy = load_policy(recipe)
        if isinstance(recipe, RLRecipe):
            metrics, rollouts = train_and_listen(build_rl(recipe, policy), policy.tokenizer, run.engine)
        else:
            supervised = train_supervised(build_supervised(recipe, policy))
            metrics, rollouts = [{"step": float(step)} | found for step, found in supervised], []
    config = json.loads(json.dumps({"method": run.method, **recipe.model_dump(mode="json")}).replace(folder, "data"))
    return {"name": run.name, "method": run.method, "config": config, "metrics": columns(metrics), "rollouts": rollouts}


def train_first(data: Path) -> None:
    """A model that knows the task, which a run can then start from and fall from."""
    flags = f"--data.train {data}/train_demonstrations.jsonl --optimizer.policy_lr 5e-3 --run.steps 150".split()
    recipe = load_recipe("sft", None, [*flags, "--model.device", "cpu"])
    policy = load_policy(recipe)
    for _ in train_supervised(build_supervised(recipe, policy)):
        pass
    save_model(policy.model, policy.tokenizer, data / "sft")


def train_and_listen(
    parts: RLParts, tokenizer: Any, engine: str
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """The metrics of every step, and rollouts of the first and the last."""
    if engine == "rounded":
        parts = dataclasses.replace(parts, engine=CoarseEngine(parts.engine))
    metrics, kept = list[dict[str, float]](), list[dict[str, Any]]()
    for result in train_rl(parts):
        rollouts = list(stored(result, tokenizer))
        metrics.append({"step": float(result.step)} | step_measures(list(map(from_json, rollouts))) | result.metrics)
        if result.step in (0, parts.steps - 1):
            kept += rollouts[:ROWS_KEPT]
    return metrics, kept


def stored(result: StepResult, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The rollouts of a step that were learned from, as plain values."""
    for row, rollout in enumerate(result.rollouts):
        first, length = int(rollout.response_mask.int().argmax()), len(rollout.token_ids)
        yield {
            "step": result.step,
            "row": row,
            "prompt_id": rollout.prompt.id,
            "group_id": rollout.group_id,
            "sample_id": rollout.sample_id,
            "prompt_text": rollout.prompt.messages[-1]["content"],
            "completion": rollout.completion,
            "finish": rollout.finish,
            "score": rounded(float(result.experience.scores[row])),
            "temperature": result.experience.temperature,
            "prompt_tokens": first,
            "columns": answer_columns(result.experience, row, slice(first, length)),
            "pieces": [tokenizer.decode([int(token)]) for token in rollout.token_ids[first:]],
        }


def answer_columns(experience: Experience, row: int, answer: slice) -> dict[str, list[float]]:
    """The token columns over the answer alone: all of them are 0 on the prompt, but for the tokens."""
    found = {
        "token": experience.tokens,
        "untruncated_logprob": experience.untruncated_logprobs,
        "old_logprob": experience.old_logprobs,
        "ref_logprob": experience.ref_logprobs,
        "advantage": experience.advantages,
    }
    return {
        name: [rounded(value) for value in tensor[row, answer].tolist()]
        for name, tensor in found.items()
        if tensor is not None
    }


def columns(metrics: Sequence[dict[str, float]]) -> dict[str, list[float | str | None]]:
    """A list for each metric, as long as the run: null where a step has none, and "nan" where it was not finite."""
    names = dict.fromkeys(name for row in metrics for name in row if not name.startswith("seconds/"))
    return {
        name: [
            None if name not in row else rounded(row[name]) if math.isfinite(row[name]) else "nan" for row in metrics
        ]
        for name in names
    }


def rounded(value: float) -> float:
    """To six digits; a whole number as one, which is shorter."""
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def write_records(folder: Path) -> Path:
    """Demonstrations and preferences for the task of the tiny recipes: eight characters of the kind asked for."""
    letters = {"lower": "abcdefghijklmnopqrstuvwxyz", "UPPER": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "12345": "0123456789"}
    draw = random.Random(0)

    def answer(kind: str) -> str:
        return "".join(draw.choice(letters[kind]) for _ in range(8))

    for split, variants in (("train", range(12)), ("held_out", range(12, 16))):
        asked = [(kind, f"{variant:x} {kind}:") for variant in variants for kind in letters for _ in range(4)]
        shown = [{"prompt": prompt, "completion": answer(kind)} for kind, prompt in asked]
        ranked = [
            {"prompt": prompt, "chosen": answer(kind), "rejected": answer(draw.choice(sorted(set(letters) - {kind})))}
            for kind, prompt in asked
        ]
        for name, records in ((f"{split}_demonstrations", shown), (f"{split}_preferences", ranked)):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def copied(name: str, folder: Path) -> dict[str, Any]:
    """What a run that was trained elsewhere has in its workspace; answers and most events are left behind."""
    with open_workspace(workspace_of(str(folder))) as opened:
        run = read_run(opened, str(folder))
    metrics = [dict(row) for row in run.metrics]
    told = [{"step": event.step, "data": event.data} for event in run.events if event.kind == EVENT]
    recorded = {"name": name, "method": run.method, "config": run.config, "metrics": columns(metrics), "rollouts": []}
    return recorded | {"capability": told}


if __name__ == "__main__":
    main(sys.argv[1:])
