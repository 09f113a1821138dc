"""A tiny model, prompts of different lengths, and a plain forward pass to compare the engine with."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tether.models.load import LoadedModel, load_causal_lm
from tether.protocols import Sampling
from tether.types import Prompt, Rollout


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """Shared by all tests of this folder, which leave it as they found it. Its logits are made uneven on purpose."""
    model = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    with torch.no_grad():
        model.model.lm_head.weight.mul_(8.0)
    return model


@pytest.fixture(scope="session")
def exact(loaded: LoadedModel) -> LoadedModel:
    """The same model in float64, where rounding is too small for batching to move a draw over a boundary."""
    return dataclasses.replace(loaded, model=copy.deepcopy(loaded.model).double())


@pytest.fixture
def prompts() -> list[Prompt]:
    texts = ["a", "hello there", "of middling", "a much longer prompt than the others", "hi", "xyz" * 9, "seven!!"]
    return [Prompt.from_text(f"prompt {i}", text) for i, text in enumerate(texts)]


def plain_logprobs(model: torch.nn.Module, rollout: Rollout, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(T,) behaviour and untruncated log-probs by teacher forcing: one row, no cache, no padding, double precision."""
    tokens = rollout.token_ids[None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].double()
    whole = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    kept = whole.exp()
    for row in kept if sampling.temperature else []:
        if sampling.top_k:
            row[row < row.sort(descending=True).values[sampling.top_k - 1]] = 0.0
        if sampling.top_p < 1.0:
            ranked = row.sort(descending=True)
            reached = (ranked.values.cumsum(0) / row.sum() >= sampling.top_p).nonzero()
            count = int(reached[0]) + 1 if len(reached) else len(row)  # the fewest ids that hold top_p of the mass
            row[ranked.indices[count:]] = 0.0
    behavior = (kept / kept.sum(-1, keepdim=True)).log()
    columns = []
    for table in (behavior, whole):
        column = torch.zeros(tokens.shape[1], dtype=torch.float64)
        column[1:] = table.gather(-1, tokens[0, 1:, None])[:, 0]
        columns.append(column.masked_fill(~rollout.response_mask, 0.0))
    return columns[0], columns[1]


@pytest.fixture
def assert_matches_plain_forward():
    """A check that the engine's log-probs are those of a plain forward pass, to 1e-5."""

    def check(model: torch.nn.Module, rollouts: list[Rollout], sampling: Sampling) -> None:
        assert rollouts
        for rollout in rollouts:
            behavior, untruncated = plain_logprobs(model, rollout, sampling)
            assert math.isfinite(float(behavior.sum())), "a token outside the truncated distribution was drawn"
            assert torch.allclose(rollout.behavior_logprobs.double(), behavior, atol=1e-5, rtol=0)
            assert torch.allclose(rollout.untruncated_logprobs.double(), untruncated, atol=1e-5, rtol=0)

    return check


@pytest.fixture
def assert_same_rollouts():
    """A check that two sets of rollouts, in any order, are the same samples."""

    def by_name(rollouts: list[Rollout]) -> dict[tuple[str, int], Rollout]:
        return {(rollout.prompt.id, rollout.sample_id): rollout for rollout in rollouts}

    def check(some: list[Rollout], others: list[Rollout]) -> None:
        assert some and by_name(some).keys() == by_name(others).keys()
        for name, a in by_name(some).items():
            b = by_name(others)[name]
            assert torch.equal(a.token_ids, b.token_ids), name
            assert (a.completion, a.finish) == (b.completion, b.finish)
            assert torch.allclose(a.behavior_logprobs, b.behavior_logprobs, atol=1e-5)

    return check
