"""Rollouts as plain data, for functions that take texts and columns and for worker processes; and back again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch

from tether.errors import DataError
from tether.rewards.signature import Signature
from tether.types import Message, Prompt, Rollout

TENSORS = {"token_ids": torch.int64, "response_mask": torch.bool}
TENSORS |= {"behavior_logprobs": torch.float32, "untruncated_logprobs": torch.float32}


def sample_of(rollout: Rollout, signature: Signature) -> dict[str, Any]:
    """What a function of this signature may be told of a rollout (`tether.rewards.calling` lists the keys)."""
    prompt = rollout.prompt
    with_ids = signature.takes == "trl" and any(map(signature.wants, ("completion_ids", "completions_ids")))
    return {
        "prompt": prompt.messages[-1]["content"],
        "messages": [dict(message) for message in prompt.messages],
        "completion": rollout.completion,
        "answer": prompt.answer,
        "id": prompt.id,
        "finish": rollout.finish,
        "as_messages": holds_messages(prompt),
        "completion_ids": rollout.token_ids[rollout.response_mask].tolist() if with_ids else [],
        "step": rollout.policy_version,
        "columns": {str(name): value for name, value in prompt.meta.items() if signature.wants(str(name))},
    }


def holds_messages(prompt: Prompt) -> bool:
    """Whether a prompt was given as messages; one that a text cannot hold must have been."""
    return prompt.as_messages or [message["role"] for message in prompt.messages] != ["user"]


def plain_rollout(rollout: Rollout, signature: Signature) -> dict[str, Any]:
    """All of a rollout as JSON can hold it. A float32 survives being written as a decimal number."""
    rest = {"group_id": rollout.group_id, "sample_id": rollout.sample_id}
    return sample_of(rollout, signature) | rest | {name: getattr(rollout, name).tolist() for name in TENSORS}


def rollout_from(plain: dict[str, Any]) -> Rollout:
    """The rollout that `plain_rollout` wrote."""
    prompt = Prompt(
        plain["id"],
        tuple(cast(list[Message], plain["messages"])),
        plain["answer"],
        plain["columns"],
        plain["as_messages"],
    )
    return Rollout(
        prompt=prompt,
        group_id=plain["group_id"],
        sample_id=plain["sample_id"],
        completion=plain["completion"],
        finish=plain["finish"],
        policy_version=plain["step"],
        **{name: torch.tensor(plain[name], dtype=dtype) for name, dtype in TENSORS.items()},
    )


def private_copies(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Rollouts that a user's code may sort, edit and write into without changing the run."""
    copies: list[Rollout] = []
    for rollout in rollouts:
        try:
            prompt = copy.deepcopy(rollout.prompt)
        except Exception as error:  # a task may put anything into `meta`
            raise DataError(
                f"prompt {rollout.prompt.id!r} holds what cannot be copied ({type(error).__name__}: {error}): keep "
                "plain data in its meta"
            ) from error
        tensors = {name: getattr(rollout, name).clone() for name in TENSORS}
        copies.append(dataclasses.replace(rollout, prompt=prompt, **tensors))
    return copies
