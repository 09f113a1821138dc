"""Every RL algorithm on one task, from one seed: a table and overlaid curves in docs/algorithms.md.

    python benchmarks/algorithms.py [--only NAME ...] [--json]
    python benchmarks/algorithms.py --real [...]      a real model on three tasks: see algorithms_real.py

A two-layer byte-level model learns, from random weights, to answer with characters of the requested kind. All
algorithms start from the same weights and see the same prompts in the same order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from algorithms_real import real_lab

from tether.config.load import load_recipe
from tether.config.recipes import RLRecipe
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl

ROOT = Path(__file__).resolve().parent.parent
TARGET, LIMIT = 0.9, 60.0
COMMON = ["--run.seed", "0", "--run.steps", "200", "--kl.apply_to", "none", "--rollout.max_new_tokens", "8"]
GROUPS = ["--rollout.prompts_per_step", "16", "--rollout.samples_per_prompt", "4"]
FIXED = ["--grpo.aggregation.over", "fixed", "--grpo.aggregation.fixed_length", "8"]
REUSE = ["--grpo.epochs", "4"]  # with one pass every ratio is 1, and a ratio's variants are all the same
DAPO = ["--grpo.clip_range_high", "0.28", "--grpo.aggregation.over", "token", "--rollout.dynamic_sampling_rounds", "3"]
RATES = ["--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3"]

VARIANTS: dict[str, tuple[str, list[str]]] = {
    "PPO, clip": ("ppo", RATES),
    "PPO, adaptive KL penalty": ("ppo", [*RATES, "--ppo.objective", "kl_penalty", "--ppo.penalty.target", "0.05"]),
    "PPO, fixed KL penalty": ("ppo", [*RATES, "--ppo.objective", "kl_penalty", "--ppo.penalty.adaptive", "false"]),
    # Without a clip nothing else limits the ratio, so the update stops once the KL to the old policy is too large.
    "PPO, n-step": ("ppo", [*RATES, "--ppo.n_steps", "3"]),
    "PPO, two lambdas": ("ppo", [*RATES, "--ppo.critic_lam", "1.0"]),
    "PPO, unclipped": ("ppo", [*RATES, "--ppo.objective", "unclipped", "--ppo.target_kl", "0.05"]),
    "REINFORCE, total return": ("reinforce", [*RATES, "--reinforce.weighting", "total"]),
    "REINFORCE, reward to go": ("reinforce", [*RATES, "--reinforce.weighting", "to_go"]),
    "REINFORCE, baselined": ("reinforce", [*RATES, "--reinforce.weighting", "baselined"]),
    "REINFORCE, advantage": ("reinforce", [*RATES, "--reinforce.weighting", "advantage"]),
    "REINFORCE, n-step": ("reinforce", [*RATES, "--reinforce.weighting", "n_step", "--reinforce.n_steps", "5"]),
    "REINFORCE, batch mean": ("reinforce", [*RATES, "--reinforce.baseline", "batch_mean"]),
    "REINFORCE, moving average": ("reinforce", [*RATES, "--reinforce.baseline", "moving_average"]),
    "RLOO": ("rloo", [*RATES, *GROUPS]),
    "GRPO": ("grpo", [*RATES, *GROUPS]),
    "GRPO, without std": ("grpo", [*RATES, *GROUPS, "--grpo.scale_by_std", "false"]),
    "GRPO, over tokens": ("grpo", [*RATES, *GROUPS, "--grpo.aggregation.over", "token"]),
    "GRPO, fixed length": ("grpo", [*RATES, *GROUPS, *FIXED]),
    "Dr. GRPO": ("grpo", [*RATES, *GROUPS, "--grpo.scale_by_std", "false", *FIXED]),
    "DAPO": ("grpo", [*RATES, *GROUPS, *DAPO]),
    "GSPO": ("grpo", [*RATES, *GROUPS, *REUSE, "--grpo.objective", "gspo"]),
    "CISPO": ("grpo", [*RATES, *GROUPS, *REUSE, "--grpo.objective", "cispo", "--grpo.aggregation.over", "token"]),
    "TRPO": ("trpo", [*RATES, "--trpo.max_kl", "0.1", "--trpo.damping", "0.01", "--trpo.cg_iterations", "5"]),
}


def learn(method: str, flags: list[str]) -> list[tuple[float, float]]:
    """`(CPU seconds, score)` after each step, until the mean of three steps reaches the target or the time limit."""
    recipe = load_recipe(method, None, [*COMMON, *flags])
    assert isinstance(recipe, RLRecipe)
    parts = build_rl(recipe, load_policy(recipe))
    began, curve = time.process_time(), []
    for result in train_rl(parts, stop=lambda: time.process_time() - began > LIMIT):
        curve.append((time.process_time() - began, result.metrics["score"]))
        if len(curve) >= 3 and sum(score for _, score in curve[-3:]) / 3 >= TARGET + 0.03:
            break
    return curve


def reached(curve: list[tuple[float, float]]) -> tuple[int, float] | None:
    """The step and second at which the mean of three steps first reached the target."""
    for index in range(2, len(curve)):
        if sum(score for _, score in curve[index - 2 : index + 1]) / 3 >= TARGET:
            return index + 1, curve[index][0]
    return None


def table(curves: dict[str, list[tuple[float, float]]]) -> str:
    """The results in Markdown."""
    lines = ["| algorithm | best score of 3 steps | steps to 0.90 | CPU seconds to 0.90 |", "|---|---|---|---|"]
    for name, curve in curves.items():
        best = max(sum(s for _, s in curve[i - 2 : i + 1]) / 3 for i in range(2, len(curve)))
        found = reached(curve)
        steps, seconds = (str(found[0]), f"{found[1]:.1f}") if found else ("not reached", f"> {LIMIT:.0f}")
        lines.append(f"| {name} | {best:.3f} | {steps} | {seconds} |")
    return "\n".join(lines)


def plot(curves: dict[str, list[tuple[float, float]]], target: Path) -> None:
    """The curves, overlaid, by iteration."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"PPO": "-", "REINFORCE": "--", "RLOO": "-.", "GRPO": ":", "TRPO": "-"}
    figure, axes = plt.subplots(figsize=(9, 6), dpi=130)
    colours = itertools.cycle(plt.get_cmap("tab20").colors)  # pyright: ignore[reportAttributeAccessIssue]
    for (name, curve), colour in zip(curves.items(), colours, strict=False):
        style = styles.get(name.split(",")[0], "-.")
        axes.plot([score for _, score in curve], style, label=name, color=colour, linewidth=1.8)
    axes.axhline(TARGET, color="grey", linewidth=0.8)
    axes.set(xlabel="iteration (64 answers each)", ylabel="mean score (maximum 1)", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=6.5, frameon=False, ncols=2, loc="lower right")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    """Run, print, and write the documentation's table and picture."""
    if "--real" in sys.argv[1:]:
        real_lab(VARIANTS, [word for word in sys.argv[1:] if word != "--real"])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is so small that a second thread slows it down
    curves = {}
    for name in options.only:
        curves[name] = learn(*VARIANTS[name])
        found = reached(curves[name])
        missed = f"not reached in {len(curves[name])} steps"
        outcome = f"0.90 after {found[0]} steps, {found[1]:.1f} s" if found else missed
        print(f"{name}: {outcome}", flush=True)
    print("\n" + table(curves))
    if list(curves) == list(VARIANTS):
        plot(curves, ROOT / "docs" / "algorithms.png")
        page = ROOT / "docs" / "algorithms.md"
        head, _, rest = page.read_text().partition("<!-- table -->\n")
        _, _, tail = rest.partition("<!-- end of table -->\n")
        page.write_text(f"{head}<!-- table -->\n{table(curves)}\n<!-- end of table -->\n{tail}")
    if options.json:
        print(json.dumps({name: {"reached": reached(curve), "curve": curve} for name, curve in curves.items()}))


if __name__ == "__main__":
    main()
