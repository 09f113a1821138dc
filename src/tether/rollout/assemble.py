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


def check_rollouts(
    engine: object, rollouts: Sequence[Rollout], prompts: Sequence[Prompt], samples_per_prompt: int
) -> None:
    """Raise where an engine's rollouts break its protocol: `samples_per_prompt` for each prompt, in order."""
    name, number = type(engine).__name__, len(prompts) * samples_per_prompt
    if len(rollouts) != number:
        raise DataError(
            f"engine: {name} gave {len(rollouts)} rollouts for {len(prompts)} prompts with {samples_per_prompt} "
            f"samples each: it must give {number}"
        )
    groups: set[int] = set()
    for place, rollout in enumerate(rollouts):
        where = f"engine: rollout {place} of {name}"
        prompt, sample = prompts[place // samples_per_prompt], place % samples_per_prompt
        if rollout.prompt.id != prompt.id:
            raise DataError(
                f"{where} answers prompt {rollout.prompt.id!r}, and prompt {prompt.id!r} was asked there: give the "
                "samples of one prompt side by side, in the order of the prompts"
            )
        first = rollouts[place - sample].group_id
        if rollout.group_id != first or (sample == 0 and first in groups):
            raise DataError(
                f"{where} has group_id {rollout.group_id}: the samples of one prompt share one that no other prompt has"
            )
        groups.add(first)
        _check_columns(rollout, where)


def _check_columns(rollout: Rollout, where: str) -> None:
    length = len(rollout.token_ids)
    for name in ("token_ids", "response_mask", "behavior_logprobs", "untruncated_logprobs"):
        column: Tensor = getattr(rollout, name)
        if column.shape != (length,) or column.device.type != "cpu":
            raise DataError(
                f"{where} has {name} of shape {tuple(column.shape)} on {column.device}: every column has one value a "
                f"token, here {length}, on the CPU (tether.rollout.assemble.assemble_rollout makes them)"
            )
    if not length or bool(rollout.response_mask[0]):
        raise DataError(f"{where} has no prompt token: the policy cannot sample the first token of a row")


def check_request(prompts: Sequence[Prompt], samples_per_prompt: int) -> None:
    """Raise on a request that no engine can answer well."""
    if not prompts:
        raise DataError("prompts is empty: give the engine at least one prompt")
    if samples_per_prompt < 1:
        raise ConfigError(f"samples_per_prompt is {samples_per_prompt}: it must be at least 1")
