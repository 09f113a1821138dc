"""States that sampling leaves for a shared backbone: what the backbone would have found, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tether.data.rows import attention_mask, pad_right
from tether.models.backbones import backbone_of
from tether.models.load import LoadedModel
from tether.models.shared_backbone import SharedBackbone
from tether.protocols import Sampling
from tether.rollout.native import NativeEngine
from tether.types import Prompt, Rollout, Sequences


def batch_of(rollouts: list[Rollout]) -> Sequences:
    tokens = [rollout.token_ids for rollout in rollouts]
    mask = attention_mask(tokens)
    return Sequences(tokens=pad_right(tokens, 0), attention_mask=mask, response_mask=mask)


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("samples", [1, 3])
def test_the_backbone_finds_nothing_left_to_run(exact: LoadedModel, prompts: list[Prompt], slots: int, samples: int):
    backbone = backbone_of(exact.model)
    kept, own = SharedBackbone(backbone, depth=1), SharedBackbone(backbone, depth=1)
    sampling = Sampling(6, stop_token_ids=tuple(range(100, 130)))  # answers of many lengths
    engine = NativeEngine(exact, max_num_seqs=slots, states_for=kept)
    rollouts = engine.generate(prompts, sampling, samples_per_prompt=samples, seed=3)
    assert {rollout.finish for rollout in rollouts} == {"stop", "length"}
    batch = batch_of(rollouts)
    ours, theirs = kept.states(batch), own.states(batch)
    assert kept.rows_run == 0
    assert own.rows_run == len(rollouts)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # the model's own norms round to float32


@pytest.mark.parametrize("slots", [2, 64])
def test_the_answers_are_the_same_with_and_without(exact: LoadedModel, prompts: list[Prompt], slots: int):
    sampling = Sampling(12, stop_token_ids=tuple(range(100, 140)))
    found = []
    for keeper in (None, SharedBackbone(backbone_of(exact.model), depth=1)):
        engine = NativeEngine(exact, max_num_seqs=slots, states_for=keeper)
        found.append(engine.generate(prompts, sampling, samples_per_prompt=2, seed=3))
    for plain, traced in zip(*found, strict=True):
        assert torch.equal(plain.token_ids, traced.token_ids)
        torch.testing.assert_close(plain.behavior_logprobs, traced.behavior_logprobs)


def test_a_prompt_that_fills_the_context_still_fits(loaded: LoadedModel):
    room = loaded.context_length - 8
    prompt = Prompt.from_text("long", "x" * room)
    kept = SharedBackbone(backbone_of(loaded.model), depth=1)
    [rollout] = NativeEngine(loaded, states_for=kept).generate([prompt], Sampling(8), samples_per_prompt=1, seed=0)
    kept.states(batch_of([rollout]))
    assert kept.rows_run == 0
