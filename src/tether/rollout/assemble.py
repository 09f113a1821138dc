"""From sampled ids to a Rollout: the one place that knows how its columns line up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tether.data.chat import Encoder
from tether.errors import ConfigError, DataError
from tether.types import Finish, Prompt, Rollout


class Tokenizer(Encoder, Protocol):
    """What an engine asks of a tokenizer."""

    @property
    def eos_token_id(self) -> int | None:
        """The end token."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """The text of the ids."""
        ...


def assemble_rollout(
    prompt: Prompt,
    *,
    group_id: int,
    sample_id: int,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    behavior: Tensor,
    untruncated: Tensor,
    completion: str,
    finish: Finish,
    policy_version: int,
) -> Rollout:
    """`behavior` and `untruncated` are (answer length,) log-probs; every column of the result has the whole length.

    The mask is made from the two lengths, so an end token (or a padding token that the policy really sampled) is
    trained like any other.
    """
    head, tail = len(prompt_ids), len(answer_ids)

    def column(answer: Tensor) -> Tensor:
        return torch.cat((torch.zeros(head), answer.float()))

    return Rollout(
        prompt=prompt,
        group_id=group_id,
        sample_id=sample_id,
        token_ids=torch.tensor([*prompt_ids, *answer_ids], dtype=torch.int64),
        response_mask=torch.arange(head + tail) >= head,
        behavior_logprobs=column(behavior),
        untruncated_logprobs=column(untruncated),
        completion=completion,
        finish=finish,
        policy_version=policy_version,
    )


def check_request(prompts: Sequence[Prompt], samples_per_prompt: int) -> None:
    """Raise on a request that no engine can answer well."""
    if not prompts:
        raise DataError("prompts is empty: give the engine at least one prompt")
    if samples_per_prompt < 1:
        raise ConfigError(f"samples_per_prompt is {samples_per_prompt}: it must be at least 1")
