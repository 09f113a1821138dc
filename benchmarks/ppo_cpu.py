"""One PPO iteration on a CPU against TRL 1.12's PPOTrainer: same shapes, threads and machine, interleaved.

    python benchmarks/ppo_cpu.py [--trl-python PYTHON] [--iterations 2] [--modes separate shared_backbone] [--apart]
        [--json]

32 prompts x (32 + 32) tokens, four epochs, one optimizer step per epoch, the shape of SmolLM2-135M with random weights,
fp32. Whole iterations are timed: rollouts, reward model, reference, values and update. Iterations of a mode and of TRL
alternate; the first of each is not counted, and the best of the others is reported. TRL runs in an interpreter with
`trl==1.12.0`, the last release with PPO; without one, only Tether is timed. With `--json` the last line has the ratios;
`ratio` is that of `separate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
import time
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from smollm_shape import matrix_rate, smollm2

from tether.config.load import load_recipe
from tether.models.backbones import ScalarHead, own_top
from tether.models.load import LoadedModel
from tether.models.scalar_models import ScalarModel
from tether.models.shared_backbone import TopBackbone
from tether.models.sharing import Separate
from tether.rewards.model import RewardModelReward
from tether.train.build import build_rl
from tether.train.rl import RLParts, rl_step

PEER = Path(__file__).with_name("peer_trl_ppo.py")
TRL = "TRL 1.12"


class Turn(NamedTuple):
    """Seconds of a whole iteration, and of its rollouts."""

    seconds: float
    rollout: float


def iteration_parts(mode: str, options: argparse.Namespace) -> RLParts:
    """A PPO run whose four roles use `mode`."""
    flags = {
        "roles.mode": mode,
        "roles.trainable_layers": options.trainable_layers,
        "task.name": "smollm_shape:RandomPrompts",
        "task.options": {"count": options.batch * 8, "length": options.prompt},
        "rollout.prompts_per_step": options.batch,
        "rollout.max_new_tokens": options.response,
        "rollout.max_num_seqs": options.batch,
        "ppo.epochs": options.epochs,
        "ppo.minibatch_size": options.batch,
        "optimizer.policy_lr": 1e-6,
        "optimizer.critic_lr": 1e-6,
        "optimizer.micro_batch_tokens": options.micro_batch_tokens,
    }
    recipe: Any = load_recipe("ppo", None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])
    loaded = smollm2(random=True)
    parts = build_rl(recipe, loaded)
    return dataclasses.replace(parts, reward=reward_model(parts, loaded, options))


def reward_model(parts: RLParts, loaded: LoadedModel, options: argparse.Namespace) -> RewardModelReward:
    """A reward model of the same shape: a separate one, or top layers on the shared backbone."""
    policy, backbone = parts.roles.actor.policy, parts.roles.actor.backbone
    if isinstance(backbone, TopBackbone):
        own = TopBackbone(own_top(backbone.model, backbone.shared.depth), backbone.shared)
    else:
        own = Separate(policy).scalar_backbone(0)
    head = ScalarHead.like_output(policy, deviation=0.04, seed=0)
    model = ScalarModel(own, head, "reward").requires_grad_(False)
    return RewardModelReward(model, dataclasses.replace(loaded, model=own.model), options.micro_batch_tokens)


def tether_turns(mode: str, options: argparse.Namespace) -> Generator[Turn]:
    """Yield one iteration after another."""
    parts = iteration_parts(mode, options)
    controllers = parts.algorithm.controllers
    for step in count():
        result = rl_step(parts, step, controllers)
        controllers = result.controllers
        assert result.metrics["response_length"] == options.response
        yield Turn(result.metrics["seconds/step"], result.metrics["seconds/rollout"])


def peer_turns(options: argparse.Namespace) -> Generator[Turn]:
    """The same for TRL's trainer, in its interpreter, which waits for a line before each iteration."""
    command = [options.trl_python, str(PEER)]
    for name in ("batch", "prompt", "response", "epochs", "threads", "iterations"):
        command += [f"--{name}", str(getattr(options, name))]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=complaints) as peer,
    ):
        assert peer.stdin is not None and peer.stdout is not None
        for _ in range(options.iterations + 1):
            peer.stdin.write("go\n")
            peer.stdin.flush()
            told = next((line for line in peer.stdout if line.startswith('{"seconds"')), None)
            if told is None:
                complaints.seek(0)
                raise SystemExit(f"the peer failed:\n{complaints.read()[-4000:]}")
            yield Turn(**json.loads(told))


def side_by_side(mode: str, options: argparse.Namespace) -> dict[str, list[Turn]]:
    """The iterations of one mode and of TRL, interleaved or one after the other; the first of each is not counted."""
    contenders = {mode: tether_turns(mode, options)}
    contenders |= {TRL: peer_turns(options)} if options.trl_python else {}
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    rounds = range(options.iterations + 1)
    order = [name for name in contenders for _ in rounds] if options.apart else [*contenders] * len(rounds)
    for name in order:
        turns[name].append(next(contenders[name]))
        if options.apart and len(turns[name]) == len(rounds):
            contenders[name].close()  # free its memory for the next
    return turns


def main() -> None:
    """Time them in turn and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--top-layers", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=2, help="timed iterations, after one warm-up")
    parser.add_argument(
        "--modes", nargs="+", default=["separate", "shared_backbone"], choices=["separate", "lora", "shared_backbone"]
    )
    parser.add_argument("--trl-python", help="an interpreter with trl==1.12.0")
    parser.add_argument("--apart", action="store_true", help="do not interleave: with separate, both need over 24 GiB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rate = matrix_rate()
    began = time.perf_counter()
    found = {mode: side_by_side(mode, options) for mode in options.modes}
    print(
        f"{options.batch} prompts x ({options.prompt} + {options.response}) tokens, {options.epochs} epochs, "
        f"SmolLM2-135M shape, fp32, {options.threads} threads, {rate:.0f} to {matrix_rate():.0f} GFLOP/s, "
        f"{time.perf_counter() - began:.0f} s in total"
    )
    ratios: dict[str, float] = {}
    for mode, sides in found.items():
        for name, taken in sides.items():
            best, rollout = min(taken[1:]), min(turn.rollout for turn in taken[1:])
            ratios |= {mode: min(sides[TRL][1:]).seconds / best.seconds} if name != TRL and TRL in sides else {}
            beside = f"{ratios[mode]:5.2f}x" if name in ratios else ""
            each = " ".join(f"{turn.seconds:.1f}" for turn in taken)
            print(f"{name:10s} {best.seconds:6.1f} s (rollouts {rollout:4.1f}) {beside:6s}  all: {each}")
    if options.json:
        print(json.dumps({"ratio": ratios.get("separate"), "ratios": ratios, "gflops": rate, "seconds": found}))


if __name__ == "__main__":
    main()
