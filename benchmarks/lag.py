"""What a rollout lag costs in learning, and what it gains in time: the tables in docs/asynchronous.md.

    python benchmarks/lag.py [--lags 0 1 2 4] [--seeds 5] [--steps 40] [--skip-learning] [--skip-time] [--json]

Learning: PPO on a tiny model, lag 0, 1, 2 and 4, with and without the importance weight, several seeds. Time: an engine
that only waits and answers from a script, beside real updates; a step is compared with the longer of the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tether.config.load import load_recipe
from tether.config.recipes import RLRecipe
from tether.models.load import LoadedModel
from tether.protocols import PendingRollouts, RolloutEngine, Sampling
from tether.rollout.scripted import ScriptedEngine
from tether.train.build import build_rl, load_policy
from tether.train.rl import RLParts, train_rl
from tether.types import Prompt, Rollout

TASK = ["--kl.apply_to", "none", "--rollout.prompts_per_step", "32", "--rollout.max_new_tokens", "8"]
TASK += ["--ppo.minibatch_size", "32", "--ppo.epochs", "4"]
RATES = ["--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3"]
LAGS, CAP = (0, 1, 2, 4), "2"
T_97_5 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # Student's t, by number of seeds


def parts_of(*flags: str) -> RLParts:
    """The parts of a run on the toy task."""
    recipe = load_recipe("ppo", None, [*TASK, *RATES, *flags])
    assert isinstance(recipe, RLRecipe)
    return build_rl(recipe, load_policy(recipe))


# -- learning ---------------------------------------------------------------------------------------------------------


def curve(lag: int, corrected: bool, seed: int, steps: int) -> list[dict[str, float]]:
    """The metrics of each step."""
    flags = ["--rollout.lag", str(lag), "--run.seed", str(seed), "--run.steps", str(steps)]
    flags += ["--rollout.importance_sampling_cap", CAP] if corrected else []
    return [result.metrics for result in train_rl(parts_of(*flags))]


def interval(values: Sequence[float]) -> str:
    """The mean, and half of its 95 % confidence interval over seeds."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = T_97_5.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def learning(lags: Sequence[int], seeds: int, steps: int) -> tuple[str, dict[str, list[list[float]]]]:
    """A table in Markdown, and the scores by setting, seed and step."""
    marks = [round(steps * part) for part in (0.25, 0.5, 0.75, 1.0)]
    lines = ["| lag | weight | " + " | ".join(f"step {mark}" for mark in marks) + " | log-prob diff | capped |"]
    lines.append("|---" * (len(marks) + 4) + "|")
    scores: dict[str, list[list[float]]] = {}
    for lag in lags:
        for corrected in (False, True) if lag else (False,):
            runs = [curve(lag, corrected, seed, steps) for seed in range(seeds)]
            found = [[row["score"] for row in run] for run in runs]
            scores[f"lag {lag}{', corrected' if corrected else ''}"] = found
            cells = [interval([statistics.mean(run[mark - 5 : mark]) for run in found]) for mark in marks]
            gap = statistics.mean(row["logprob_diff"] for run in runs for row in run)
            capped = statistics.mean(row.get("importance/truncated", 0.0) for run in runs for row in run)
            shown = f"{capped:.1%}" if corrected else "-"
            lines.append(f"| {lag} | {'yes' if corrected else 'no'} | {' | '.join(cells)} | {gap:.3f} | {shown} |")
            print(lines[-1], flush=True)
    return "\n".join(lines), scores


# -- time -------------------------------------------------------------------------------------------------------------


class WaitingEngine(RolloutEngine):
    """Waits, as for a sampler elsewhere, and answers from a script."""

    def __init__(self, policy: LoadedModel, seconds: float) -> None:
        self.seconds = seconds
        tokenizer: Any = policy.tokenizer
        self.script = ScriptedEngine(tokenizer, lambda prompt, sample: prompt.id[:4] + "abcd"[sample % 4])
        self.thread = ThreadPoolExecutor(1)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """The script's answers, at once."""
        self.script.policy_version = self.policy_version
        return self.script.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> PendingRollouts:
        """The script's answers, after the wait; one request after the other."""
        rollouts = self.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

        def wait() -> list[Rollout]:
            time.sleep(self.seconds)
            return rollouts

        return self.thread.submit(wait).result


class BlockingEngine(WaitingEngine):
    """The same, while training waits."""

    submit = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """The script's answers, after the wait."""
        time.sleep(self.seconds)
        return super().generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)


def per_step(
    engine: Callable[[LoadedModel, float], RolloutEngine], lag: int, seconds: float, steps: int
) -> tuple[float, float]:
    """Means over steps: seconds of a step, and of its work after the rollouts are there."""
    recipe = load_recipe("ppo", None, [*TASK, *RATES, "--rollout.lag", str(lag), "--run.steps", str(steps)])
    assert isinstance(recipe, RLRecipe)
    policy = load_policy(recipe)
    parts = dataclasses.replace(build_rl(recipe, policy), engine=engine(policy, seconds))
    ends, work = [time.perf_counter()], []
    for result in train_rl(parts):
        ends.append(time.perf_counter())
        work.append(result.metrics["seconds/step"] - result.metrics["seconds/rollout"])
    # Not those before the queue is full, nor the last ones, for which nothing is asked.
    counted = slice(lag + 2, steps - lag)
    took = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.mean(took[counted]), statistics.mean(work[counted])


def timing(steps: int) -> str:
    """A table in Markdown of whole steps against the longer of rollout and update."""
    lines = ["| rollout, of the update | lag | rollout | update | step | step / longer |", "|---|---|---|---|---|---|"]
    _, update = per_step(WaitingEngine, 1, 0.0, steps)
    for share in (0.5, 1.0, 2.0):
        seconds = share * update
        for lag in (0, 1, 2):
            whole, work = per_step(WaitingEngine if lag else BlockingEngine, lag, seconds, steps)
            ratio = whole / max(seconds, work)
            cells = [f"{share:g}x", str(lag), *(f"{1e3 * each:.0f} ms" for each in (seconds, work, whole))]
            lines.append(f"| {' | '.join(cells)} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--lags", type=int, nargs="*", default=LAGS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip-learning", action="store_true")
    parser.add_argument("--skip-time", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.skip_time:
        print("\n" + timing(options.steps))
    if not options.skip_learning:
        table, scores = learning(options.lags, options.seeds, options.steps)
        print("\n" + table)
        if options.json:
            print(json.dumps(scores))


if __name__ == "__main__":
    main()
