"""Every RL algorithm on a real model and three verifiable tasks: curves with intervals, time, KL per point of score.

    python benchmarks/algorithms.py --real [--only NAME ...] [--seeds N] [--steps N] [--out FOLDER]
    python benchmarks/algorithms.py --real --tiny          the same on a tiny model, in minutes on a CPU

All algorithms start from the same weights and get the same prompts, seeds and number of answers. Each run is an
ordinary run in FOLDER: what is finished is not repeated, and what was killed is resumed. The table and the picture are
written to FOLDER from the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tether.config.load import load_recipe
from tether.config.recipes import Recipe
from tether.errors import Stopped
from tether.evaluation.suite.arithmetic import problems
from tether.progress import say
from tether.store.folder import RunFolder, is_run, run_path
from tether.store.read import open_workspace, read_run
from tether.store.recorded import RecordedRun
from tether.train.run import Watch, interruptions, train_watched

PROMPTS = 256
END_PART = 0.1  # of the steps: the start and the end of a curve
STUDENT_T = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 %, by n - 1

Variants = Mapping[str, tuple[str, list[str]]]


@dataclass(frozen=True)
class LabTask:
    """Prompts that a rule can check: records, and the part of the reward that checks them."""

    records: Sequence[Mapping[str, str]]
    reward: Mapping[str, object]


def lab_tasks() -> dict[str, LabTask]:
    """Arithmetic, a form that is asked for, and sorting; the same prompts for every algorithm and seed."""
    draw = random.Random(0)
    sums = [{"prompt": f"{each.question} Answer with the number only.", "answer": str(each.result)}
            for each in problems(PROMPTS, 1)]  # fmt: skip
    things = [f"a {colour} {thing}" for colour in ("red", "blue", "green", "small", "large", "old", "new", "round")
              for thing in ("ball", "house", "car", "book", "hat", "cup", "boat", "lamp")]  # fmt: skip
    forms = [{"prompt": f'Describe {thing} as a JSON object with the keys "name" and "use".'} for thing in things]
    numbers = [draw.sample(range(1, 100), 4) for _ in range(PROMPTS)]
    sorting = [{"prompt": f"Sort these numbers: {' '.join(map(str, row))}. Answer with the numbers only.",
                "answer": " ".join(map(str, sorted(row)))} for row in numbers]  # fmt: skip
    return {
        "arithmetic": LabTask(sums, {"kind": "numeric"}),
        "json": LabTask(forms, {"kind": "json", "keys": ["name", "use"], "fenced": True}),
        "sorting": LabTask(sorting, {"kind": "exact"}),
    }


def recipe_of(variant: tuple[str, list[str]], task: str, seed: int, name: str, options: argparse.Namespace) -> Recipe:
    """The recipe of one run; only what the algorithm is differs between runs of a task and seed."""
    method, flags = variant
    out = Path(options.out)
    own = ["--model.path", "tiny-bytes" if options.tiny else "smollm2-135m", "--run.name", name]
    rate = "3e-3" if options.tiny else "1e-5"
    own += ["--run.directory", str(out), "--run.steps", str(options.steps), "--run.seed", str(seed)]
    own += ["--optimizer.policy_lr", rate, "--optimizer.critic_lr", rate, "--kl.coef", "0.01", "--run.save", "false"]
    own += ["--task.prompts", str(out / f"{task}.jsonl"), "--reward.parts", json.dumps([lab_tasks()[task].reward])]
    size = ("2", "2", "6") if options.tiny else ("16", "4", "32")
    own += ["--rollout.prompts_per_step", size[0], "--rollout.samples_per_prompt", size[1]]
    given = {flag.partition("=")[0] for flag in own if flag.startswith("--")}
    kept = [
        pair for flag, value in zip(flags[::2], flags[1::2], strict=True) if flag not in given for pair in (flag, value)
    ]
    return load_recipe(method, None, [*kept, *own, "--rollout.max_new_tokens", size[2]])


def train(recipe: Recipe, name: str) -> None:
    """Train, or resume, one run; raises `Stopped` after a checkpoint on Ctrl-C."""
    folder = run_path(recipe)
    resume = is_run(folder) and not RunFolder(folder).is_free
    say(f"{name}{': resumed' if resume else ''}")
    with interruptions() as stop:
        done = train_watched(recipe, Watch(), Console(quiet=True), stop=stop, resume=resume)
    if not done.finished:
        raise Stopped(f"stopped in {name}; the same command goes on from there")


@dataclass(frozen=True)
class SeedResult:
    """One run: its scores by step, what it gained, its KL to the start, and its seconds."""

    scores: tuple[float, ...]
    gain: float
    kl: float
    seconds: float

    @property
    def end(self) -> float:
        """The mean score over the last steps."""
        return statistics.fmean(self.scores[-span(self.scores) :])


def span(values: Sequence[float]) -> int:
    """The number of steps that are the start, or the end, of a curve."""
    return max(1, round(END_PART * len(values)))


def seed_result(run: RecordedRun) -> SeedResult:
    """What a run recorded."""
    scores, kl = run.column("score")[1], run.column("kl_ref_k3")[1]
    count = span(scores)
    gain = statistics.fmean(scores[-count:]) - statistics.fmean(scores[:count])
    last_kl = statistics.fmean(kl[-count:]) if kl else math.nan
    return SeedResult(tuple(scores), gain, last_kl, sum(run.column("seconds/step")[1]))


def with_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the half width of its 95 % interval by Student's t; infinite for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    t = STUDENT_T[min(len(values), len(STUDENT_T)) - 1]
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


def cell(values: Sequence[float]) -> str:
    """`0.62 ± 0.05`."""
    mean, half = with_interval(values)
    return f"{mean:.3f} ± {half:.3f}" if math.isfinite(half) else f"{mean:.3f}"


Results = dict[tuple[str, str], list[SeedResult]]


def table(results: Results) -> str:
    """One row for each task and algorithm, in Markdown."""
    lines = [
        "| task | algorithm | seeds | score at the end | gain | seconds | KL to the start | KL per point of score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, name), seeds in results.items():
        gains, kls = [each.gain for each in seeds], [each.kl for each in seeds]
        spent = statistics.fmean(kls) / statistics.fmean(gains) if statistics.fmean(gains) > 0 else math.nan
        cells = [cell([each.end for each in seeds]), cell(gains), cell([each.seconds for each in seeds]), cell(kls)]
        shown = "no gain" if math.isnan(spent) else f"{spent:.2f}"
        lines.append(f"| {task} | {name} | {len(seeds)} | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


def plot(results: Results, target: Path) -> None:
    """A panel for each task: the mean curve of each algorithm over seeds, with its interval."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(task for task, _ in results))
    names = list(dict.fromkeys(name for _, name in results))
    figure, panels = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 5), dpi=110, squeeze=False)
    colours = plt.get_cmap("tab20").colors  # pyright: ignore[reportAttributeAccessIssue]
    for (task, name), seeds in results.items():
        axes, colour = panels[0][tasks.index(task)], colours[names.index(name) % 20]
        steps = range(min(len(each.scores) for each in seeds))
        points = [with_interval([each.scores[step] for each in seeds]) for step in steps]
        axes.plot(steps, [mean for mean, _ in points], label=name, color=colour, linewidth=1.4)
        if len(seeds) > 1:
            low, high = ([mean + sign * half for mean, half in points] for sign in (-1, 1))
            axes.fill_between(steps, low, high, color=colour, alpha=0.08, linewidth=0)
        axes.set(title=task, xlabel="step", ylabel="mean score")
    panels[0][-1].legend(fontsize=6, frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def real_lab(variants: Variants, words: Sequence[str]) -> None:
    """Train what is missing, then write the table and the picture from all runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=list(variants), choices=list(variants))
    parser.add_argument("--tasks", nargs="*", default=list(lab_tasks()), choices=list(lab_tasks()))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of each run (100; 4 with --tiny)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny batches, for a CPU")
    parser.add_argument("--out", help="the folder of the runs (runs/algorithms-real, or runs/algorithms-tiny)")
    options = parser.parse_args(words)
    options.steps = options.steps or (4 if options.tiny else 100)
    out = Path(options.out or f"runs/algorithms-{'tiny' if options.tiny else 'real'}")
    options.out = str(out)
    out.mkdir(parents=True, exist_ok=True)
    for task, made in lab_tasks().items():
        (out / f"{task}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made.records))
    results: Results = {}
    for task in options.tasks:
        for name in options.only:
            places = [
                f"{task}/{name.lower().replace(',', '').replace(' ', '-')}/{seed}" for seed in range(options.seeds)
            ]
            for seed, place in enumerate(places):
                train(recipe_of(variants[name], task, seed, place, options), place)
            with open_workspace(str(out)) as opened:
                results[task, name] = [seed_result(read_run(opened, place)) for place in places]
    (out / "table.md").write_text(table(results) + "\n")
    plot(results, out / "curves.png")
    print(f"{table(results)}\n\n{out / 'table.md'}\n{out / 'curves.png'}")
