"""The runs that the doctor is tested on: healthy ones, and ones made ill in one known way each."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RunToRecord:
    """A run by its recipe and flags. `diseases` are the audits that must speak; a healthy run has none.

    `{data}` in a flag is a folder with records of the task, `{sft}` a model that was first trained on them.
    """

    name: str
    method: str
    recipe: str | None
    flags: tuple[str, ...]
    diseases: tuple[str, ...] = ()
    engine: str = "native"  # or rounded: one whose log-probs are coarse


def tiny(method: str, name: str, *flags: str, seed: int = 0, steps: int = 40) -> RunToRecord:
    """One of the tiny recipes with changes."""
    given = (*flags, "--run.seed", str(seed), "--run.steps", str(steps))
    return RunToRecord(name, method, f"recipes/tiny-{method}.yaml", given)


def supervised(method: str, name: str, *flags: str, seed: int = 0) -> RunToRecord:
    """SFT, a reward model or DPO on the tiny task's own records."""
    kind = "demonstrations" if method == "sft" else "preferences"
    given = (
        *("--data.train", f"{{data}}/train_{kind}.jsonl", "--data.held_out", f"{{data}}/held_out_{kind}.jsonl"),
        *("--optimizer.policy_lr", "1e-3", "--optimizer.critic_lr", "1e-3", "--model.device", "cpu"),
        *("--run.seed", str(seed), "--run.steps", "40", *flags),
    )
    return RunToRecord(name, method, None, given)


GENTLE = ("--optimizer.policy_lr", "1e-3", "--optimizer.critic_lr", "1e-3", "--optimizer.schedule", "linear")
"""Rates at which the tiny task is learned without coming apart: the recipes' own are in a hurry."""
WITH_KL = ("--kl.apply_to", "reward", "--kl.coef", "0.02")
SMALL = ("--rollout.prompts_per_step", "32", "--ppo.minibatch_size", "16", "--ppo.epochs", "2")
HASTY = ("--optimizer.policy_lr", "1e-2")
EVALUATED = ("--evaluation.every", "1")
LONGER = ("--rollout.max_new_tokens", "24")


def reward(function: str) -> tuple[str, ...]:
    """The flag that puts a reward of `sick_tasks` in place of the task's."""
    return ("--reward.parts", f"[{{kind: function, name: sick, function: 'sick_tasks:{function}'}}]")


KINDS = {
    "ppo": lambda name, seed: tiny("ppo", name, *GENTLE, seed=seed),
    "ppo-kl": lambda name, seed: tiny("ppo", name, *GENTLE, *WITH_KL, seed=seed),
    "ppo-small": lambda name, seed: tiny("ppo", name, *GENTLE, *WITH_KL, *SMALL, seed=seed),
    "ppo-head": lambda name, seed: tiny("ppo", name, *GENTLE, "--roles.critic", "head", seed=seed),
    "ppo-held-out": lambda name, seed: tiny("ppo", name, *GENTLE, *WITH_KL, "--evaluation.every", "4", seed=seed),
    "ppo-ending": lambda name, seed: tiny("ppo", name, *GENTLE, *WITH_KL, *LONGER, *reward("ended_soon"), seed=seed),
    "ppo-penalty": lambda name, seed: tiny("ppo", name, *GENTLE, "--ppo.objective", "kl_penalty", seed=seed),
    "grpo": lambda name, seed: tiny("grpo", name, *GENTLE, seed=seed),
    "grpo-kl": lambda name, seed: tiny("grpo", name, *GENTLE, "--kl.apply_to", "loss", "--kl.coef", "0.02", seed=seed),
    "rloo": lambda name, seed: tiny("rloo", name, seed=seed),
    "reinforce": lambda name, seed: tiny("reinforce", name, seed=seed),
    "trpo": lambda name, seed: tiny("trpo", name, seed=seed, steps=20),
    "sft": lambda name, seed: supervised("sft", name, seed=seed),
    "reward": lambda name, seed: supervised("reward", name, seed=seed),
    "dpo": lambda name, seed: supervised("dpo", name, seed=seed),
}
"""Runs that learn, one of each kind."""

SEEDS = {"ppo": 4, "grpo": 3, "rloo": 3, "reinforce": 3, "sft": 3, "reward": 3}  # of the others 2
FRESH = ("ppo", "ppo-kl", "ppo-head", "ppo-ending", "grpo", "rloo", "reinforce", "sft", "reward", "dpo")

HEALTHY = (
    *(make(f"healthy-{kind}-{seed}", seed) for kind, make in KINDS.items() for seed in range(SEEDS.get(kind, 2))),
    *(KINDS[kind](f"healthy-{kind}-{seed}", seed) for kind in FRESH for seed in (10, 11)),
)
"""Thresholds were set on the even seeds below 10; the odd ones were looked at once, and 10 and 11 after that."""

FROM_SFT = ("--model.path", "{sft}")


def sick(
    diseases: str, name: str, *flags: str, steps: int = 24, engine: str = "native", method: str = "ppo"
) -> RunToRecord:
    """A tiny run with a disease, or several."""
    run = tiny(method, f"sick-{name}", *flags, steps=steps)
    return replace(run, diseases=tuple(diseases.split()), engine=engine)


def proxy(function: str) -> tuple[str, ...]:
    """A proxy to train on, and the task's own score to look at only."""
    part = f"{{kind: function, name: proxy, function: 'sick_tasks:{function}'}}"
    return ("--reward.parts", f"[{part}, {{kind: task, name: 'true', weight: 0}}]")


SCOLDED = (
    *reward("scolded"),
    *("--reinforce.weighting", "to_go", "--reinforce.whiten_advantages", "false", "--optimizer.policy_lr", "1e-4"),
)
"""Every answer is marked down, so that every sampled token becomes less likely."""
NOISE = ("--task.name", "sick_tasks:NeverRight")

SICK = (
    sick("rollout-mismatch", "coarse-engine", *GENTLE, *WITH_KL, engine="rounded"),
    sick("negative-kl", "top-k", *FROM_SFT, *WITH_KL, *SCOLDED, "--rollout.top_k", "1", method="reinforce"),
    sick(
        "kl-runaway", "no-tether", *FROM_SFT, "--kl.apply_to", "reward", "--kl.coef", "0", *reward("one_letter"), *HASTY
    ),
    sick("entropy-collapse", "far-too-fast", "--optimizer.policy_lr", "0.1", "--ppo.epochs", "8"),
    sick("repetition mode-collapse", "one-letter", *LONGER, *reward("one_letter"), "--optimizer.policy_lr", "1e-2"),
    sick(
        "length never-ends",
        "longer-is-better",
        *FROM_SFT,
        "--rollout.max_new_tokens",
        "32",
        *reward("longest"),
        steps=30,
    ),
    sick("over-optimisation", "wrong-proxy", *FROM_SFT, *proxy("other_than_asked"), steps=30),
    sick(
        "held-out few-prompts", "two-prompts", *FROM_SFT, "--task.name", "sick_tasks:TwoPrompts", *EVALUATED, steps=30
    ),
    sick("score-collapse", "entropy-bonus", *GENTLE, *FROM_SFT, "--ppo.entropy_coef", "1"),
    sick("flat-scores", "constant-reward", *GENTLE, *reward("constant")),
    sick("critic", "critic-asleep", *GENTLE, "--optimizer.critic_lr", "0", steps=40),
    sick("critic-rate", "critic-too-fast", *GENTLE, "--optimizer.critic_lr", "0.3"),
    sick("dominated-advantages", "rare-prize", *GENTLE, *reward("rare_prize")),
    sick("clip", "clip-binds", *HASTY, *NOISE, "--ppo.epochs", "8", "--ppo.minibatch_size", "16", steps=16),
    sick("clip", "clip-idle", "--optimizer.policy_lr", "1e-7"),
    sick("early-stop", "stops-early", "--ppo.target_kl", "1e-5"),
    sick("gradient-spikes", "score-spikes", *GENTLE, *reward("spiky"), "--ppo.whiten_advantages", "false"),
    sick("never-ends", "cut-short", *FROM_SFT, "--optimizer.policy_lr", "1e-6", "--rollout.max_new_tokens", "4"),
    sick("reward-failures", "scores-missing", *GENTLE, *reward("often_missing"), "--reward.max_failure_rate", "0.5"),
    sick("not-training", "rate-zero", "--optimizer.policy_lr", "0"),
    sick("not-training", "adapters-asleep", "--roles.mode", "lora", "--optimizer.policy_lr", "0", steps=12),
)

RUNS = (*HEALTHY, *SICK)
