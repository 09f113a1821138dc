"""An answer to a conversation as it is being written, for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from tether.data.chat import prompt_token_ids
from tether.errors import DataError
from tether.models.load import LoadedModel
from tether.ops.sampling import check_sampling
from tether.protocols import Sampling
from tether.rollout.token_stream import Token, growing_text, stream_tokens
from tether.types import Message, Prompt

__all__ = ["Token", "as_prompt", "growing_text", "stream_answer"]


def stream_answer(loaded: LoadedModel, prompt: Prompt, sampling: Sampling, seed: int, turn: Lock) -> Iterator[Token]:
    """The answer that the engine gives for this seed, token by token; `turn` as for `stream_tokens`."""
    check_sampling(sampling)
    ids = prompt_token_ids(loaded.tokenizer, prompt)
    if len(ids) + sampling.max_new_tokens > loaded.context_length:
        raise DataError(
            f"the conversation has {len(ids)} tokens, and with an answer of {sampling.max_new_tokens} exceeds the "
            f"model's context of {loaded.context_length}: start over, or allow fewer tokens"
        )
    yield from stream_tokens(loaded, ids, sampling, seed, turn, name=prompt.id)


def as_prompt(turns: Sequence[dict[str, Any]], name: str) -> Prompt:
    """A conversation as a prompt."""
    return Prompt(name, tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns))
