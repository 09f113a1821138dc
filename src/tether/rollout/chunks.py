"""Sampling a step's prompts in chunks, each of which is sampled by one rank.

A sample's tokens depend on the seed, the prompt's id and the sample's index. The last bits of its log-probs depend on
which sequences are decoded together. A chunk is a set of prompts that is always decoded together, so its rollouts have
the same bits on whichever rank they are sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tether.learner.ranks import ONE, Codec, Packed, Ranks
from tether.protocols import AsyncRolloutEngine, PendingRollouts, RolloutEngine, Sampling
from tether.rollout.native import check_rollouts
from tether.types import Prompt, Rollout

COLUMNS = ("token_ids", "response_mask", "behavior_logprobs", "untruncated_logprobs")
TEXTS = ("group_id", "sample_id", "completion", "finish", "policy_version")


def in_chunks(engine: RolloutEngine, size: int) -> RolloutEngine:
    """The engine, sampling `size` prompts at a time; itself where `size` is 0."""
    return chunked(engine, size) if size else engine


def chunked(engine: RolloutEngine, size: int, ranks: Ranks = ONE, *, everywhere: bool = False) -> ChunkedEngine:
    """A `ChunkedEngine`, which can be asked ahead where the engine can."""
    kind = AsyncChunkedEngine if isinstance(engine, AsyncRolloutEngine) else ChunkedEngine
    return kind(engine, size, ranks, everywhere=everywhere)


class ChunkedEngine(RolloutEngine):
    """Deals chunks of `size` prompts over ranks and gathers the rollouts; with `size` 0 all prompts are one chunk.

    With `everywhere` every rank samples every chunk: for an engine that leaves states behind which training reads.
    """

    def __init__(self, engine: RolloutEngine, size: int, ranks: Ranks = ONE, *, everywhere: bool = False) -> None:
        self.engine, self.size, self.ranks, self.everywhere = engine, size, ranks, everywhere

    @property
    def notices(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The engine's own."""
        return self.engine.notices

    @property
    def cache_bytes(self) -> int:
        """The engine's own."""
        return self.engine.cache_bytes

    def release(self) -> None:
        """Free the engine's cache."""
        self.engine.release()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """The rollouts of all prompts, on every rank."""
        self.engine.policy_version = self.policy_version
        chunks = chunks_of(prompts, self.size)

        def sample_own() -> list[tuple[int, list[Rollout]]]:
            found: list[tuple[int, list[Rollout]]] = []
            for number, places in enumerate(chunks):
                if self.everywhere or self.ranks.runs(number):
                    chunk = [prompts[place] for place in places]
                    rollouts = self.engine.generate(chunk, sampling, samples_per_prompt=samples_per_prompt, seed=seed)
                    check_rollouts(self.engine, rollouts, chunk, samples_per_prompt)
                    found.append((number, numbered(rollouts, places, samples_per_prompt)))
            return found

        ranks = ONE if self.everywhere else self.ranks
        with self.ranks.gathered():
            sampled = ranks.merged(sample_own, rollouts_codec(prompts))
        return _in_order(sampled)


class AsyncChunkedEngine(ChunkedEngine):
    """The same over an engine that samples elsewhere. The rank that asks gets all chunks."""

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> PendingRollouts:
        """Ask for every chunk."""
        engine: Any = self.engine
        engine.policy_version = self.policy_version
        asked: list[tuple[list[int], list[Prompt], PendingRollouts]] = []
        for places in chunks_of(prompts, self.size):
            chunk = [prompts[place] for place in places]
            result = engine.submit(chunk, sampling, samples_per_prompt=samples_per_prompt, seed=seed)
            asked.append((places, chunk, result))

        def wait() -> list[Rollout]:
            found: list[list[Rollout]] = []
            for places, chunk, result in asked:
                rollouts = result()
                check_rollouts(engine, rollouts, chunk, samples_per_prompt)
                found.append(numbered(rollouts, places, samples_per_prompt))
            return _in_order(found)

        return wait


def _in_order(chunks: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    """All rollouts in the order of the step's prompts; the sort is stable, so samples of a prompt stay in order."""
    return sorted((rollout for chunk in chunks for rollout in chunk), key=lambda rollout: rollout.group_id)


def chunks_of(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Places of the prompts in chunks of `size`; all places of one id are in one chunk.

    An engine gives a prompt that occurs twice in a call further samples. In two calls it would give the same ones.
    """
    by_id: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_id.setdefault(prompt.id, []).append(place)
    chunks: list[list[int]] = []
    for places in by_id.values():
        if not chunks or (size and len(chunks[-1]) >= size):
            chunks.append([])
        chunks[-1] += places
    return [sorted(chunk) for chunk in chunks]


def numbered(rollouts: Sequence[Rollout], places: Sequence[int], samples_per_prompt: int) -> list[Rollout]:
    """A chunk's rollouts with the place of their prompt in the whole step as `group_id`."""
    return [
        dataclasses.replace(rollout, group_id=places[index // samples_per_prompt])
        for index, rollout in enumerate(rollouts)
    ]


def rollouts_codec(prompts: Sequence[Prompt]) -> Codec[list[Rollout]]:
    """Rollouts without their prompts, which every rank has."""

    def pack(rollouts: list[Rollout]) -> Packed:
        texts = [[getattr(rollout, name) for name in TEXTS] for rollout in rollouts]
        return texts, {
            f"{place}/{name}": getattr(rollout, name) for place, rollout in enumerate(rollouts) for name in COLUMNS
        }

    def unpack(texts: list[list[Any]], columns: dict[str, Tensor]) -> list[Rollout]:
        found: list[Rollout] = []
        for place, values in enumerate(texts):
            named: dict[str, Any] = dict(zip(TEXTS, values, strict=True))
            named |= {name: columns[f"{place}/{name}"] for name in COLUMNS}
            found.append(Rollout(prompt=prompts[named["group_id"]], **named))
        return found

    return Codec(pack, unpack)
