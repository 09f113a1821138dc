"""Who hears of the tokens that sampler and trainer disagree about."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tether.config.load import load_recipe
from tether.protocols import RolloutEngine, StepOutcome
from tether.train.build import build_rl, load_policy
from tether.train.hooks import LogprobMismatch, worst_tokens
from tether.train.rl import train_rl
from tether.types import Experience


def experience(sampler: list[list[float]]) -> Experience:
    """Two rows of four tokens, the second padded on the left; the trainer says -1 of every sampled token."""
    mask = torch.tensor([[False, True, True, True], [False, False, True, True]])
    zeros, said = torch.zeros(2, 4), torch.tensor(sampler)
    return Experience(
        tokens=torch.arange(8).view(2, 4),
        attention_mask=torch.tensor([[True] * 4, [False, True, True, True]]),
        response_mask=mask,
        behavior_logprobs=said,
        untruncated_logprobs=said,
        scores=torch.zeros(2),
        group_ids=torch.zeros(2, dtype=torch.long),
        truncated=torch.zeros(2, dtype=torch.bool),
        old_logprobs=zeros - 1.0,
        ref_logprobs=None,
        values=None,
        final_values=None,
        rewards=zeros,
        advantages=zeros,
        returns=None,
    )


def test_the_worst_tokens_come_first_with_both_numbers_and_padding_is_not_counted():
    found = worst_tokens(experience([[50.0, -1.0, -1.25, -1.0], [50.0, 50.0, -1.0, -3.0]]), 2)
    assert [(t.row, t.place, t.token, t.sampler, t.trainer) for t in found] == [
        (1, 2, 7, -3.0, -1.0),
        (0, 2, 2, -1.25, -1.0),
    ]
    assert found[0].gap == 2.0


def test_only_what_is_worse_than_before_is_told():
    told: list[tuple[str, dict]] = []
    mismatch = LogprobMismatch()

    def event(kind: str, text: str, *, step: int, data: dict) -> None:
        assert (kind, step) == ("logprob_mismatch", 7)
        told.append((text, data))

    mismatch.begin(SimpleNamespace(event=event, token_text=lambda tokens: list(map(str, tokens))))

    def see(gap: float) -> int:
        row = [0.0, -1.0 - gap, -1.0, -1.0]
        mismatch.after_step(StepOutcome(7, {}, experience=experience([row, [0.0, 0.0, -1.0, -1.0]])))
        return len(told)

    assert see(0.001) == 0  # rounding in float32 is no news
    assert see(0.5) == 1
    assert see(0.25) == 1
    assert see(0.75) == 2
    assert "sample 0, token 1 '1', sampler -1.75, trainer -1" in told[1][0]
    assert told[1][1]["tokens"][0]["sampler"] == -1.75
    assert len(told[1][1]["tokens"]) == 5


class Counting(RolloutEngine):
    """An engine that counts how often its memory was asked back, and when."""

    def __init__(self, engine, log):
        self.engine, self.log, self.policy_version = engine, log, 0

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        self.log.append("generate")
        return self.engine.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)

    def release(self):
        self.log.append("release")


def test_the_engine_hands_its_memory_back_before_anything_is_evaluated():
    flags = ["--run.steps", "2", "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "2"]
    recipe = load_recipe("ppo", None, flags)
    log: list[str] = []
    parts = build_rl(recipe, load_policy(recipe))
    parts = dataclasses.replace(parts, engine=Counting(parts.engine, log))
    results = list(train_rl(parts, heartbeat=lambda words: log.append(words.partition(",")[0])))
    assert log[:6] == ["rollout", "generate", "release", "scores", "evaluation", "update"]
    metrics = results[0].metrics
    phases = sum(metrics[f"seconds/{name}"] for name in ("rollout", "scores", "evaluation", "update"))
    assert metrics["seconds/step"] == pytest.approx(phases)


def test_the_general_way_can_be_asked_for_and_samples_the_same():
    flags = ["--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "6", "--run.steps", "1"]
    found = []
    for engine in ("auto", "transformers"):
        recipe = load_recipe("ppo", None, [*flags, "--rollout.engine", engine])
        parts = build_rl(recipe, load_policy(recipe))
        found.append(next(iter(train_rl(parts))).rollouts)
        assert ("rollout.engine asks for it" in " ".join(parts.engine.notices)) == (engine == "transformers")
    assert [rollout.completion for rollout in found[0]] == [rollout.completion for rollout in found[1]]
