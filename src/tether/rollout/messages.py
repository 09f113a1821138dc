"""What a run and its rollout workers tell each other, over HTTP with a bearer token. Version 1:

POST /model     JSON: which model to load, and how to sample from it (`ModelToLoad`)
POST /weights   safetensors: the trained weights, with their policy version and digest; or JSON with the name of a file
POST /generate  JSON: prompts, sampling, seed, policy version, digest -> safetensors: the rollouts, with both again

A worker answers 409 where it holds no model or other weights than were asked for, and the run sends them again. 422 is
an error that would occur on every worker. Any other failure is retried on another worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tether.data.chat import prompt_token_ids
from tether.errors import ConfigError, DataError, Diverged, StorageError, TetherError
from tether.files import digest_of
from tether.protocols import Sampling
from tether.rollout.weights import Snapshot
from tether.types import Prompt, Rollout

ERRORS = {error.__name__: error for error in (ConfigError, DataError, Diverged, StorageError)}
"""Errors that a worker reports by name, and the run raises again."""


@dataclass(frozen=True)
class ModelToLoad:
    """A model as the run loaded it, and how the run would sample from it in its own process."""

    path: str
    dtype: str
    seed: int
    attention: str
    quantize: str
    roles: Mapping[str, Any]  # the recipe's section, by which adapters are added
    roles_seed: int
    max_num_seqs: int | str
    general: bool  # `rollout.engine: transformers`
    exact: bool  # `model.numerics: exact`
    threads: int  # rounding depends on it

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {name: dict(value) if name == "roles" else value for name, value in vars(self).items()}

    def digest(self) -> str:
        """By which a worker is asked whether it holds this model."""
        return digest_of(self.record())

    @classmethod
    def read(cls, record: Any) -> ModelToLoad:
        """From JSON; ValueError where a value is missing or of another type."""
        kinds = {"path": str, "dtype": str, "seed": int, "attention": str, "quantize": str, "roles": dict}
        kinds |= {"roles_seed": int, "max_num_seqs": (int, str), "general": bool, "exact": bool}
        kinds |= {"threads": int}
        if not isinstance(record, dict) or record.keys() != kinds.keys():
            raise ValueError(f"a model is described by {', '.join(kinds)}")
        if wrong := [name for name, kind in kinds.items() if not isinstance(record[name], cast(Any, kind))]:
            raise ValueError(f"{wrong[0]} of the model has the wrong type")
        return cls(**record)


@dataclass(frozen=True)
class ChunkRequest:
    """Prompts that are sampled together. All places of a prompt id are in one chunk."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    samples_per_prompt: int
    seed: int

    def record(self) -> dict[str, Any]:
        """As JSON; a prompt's answer and its record's other columns are for the reward alone."""
        kept = ("id", "messages", "as_messages", "tools", "template_kwargs")
        prompts = [{name: getattr(prompt, name) for name in kept} for prompt in self.prompts]
        sampling = dataclasses.asdict(self.sampling)
        return {
            "prompts": prompts,
            "sampling": sampling,
            "samples_per_prompt": self.samples_per_prompt,
            "seed": self.seed,
        }

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ChunkRequest:
        """From JSON; ValueError where it is incomplete."""
        try:
            prompts = [
                Prompt(**{**each, "messages": tuple(each["messages"]), "tools": tuple(each["tools"])})
                for each in record["prompts"]
            ]
            sampling = dict(record["sampling"])
            sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
            return cls(tuple(prompts), Sampling(**sampling), int(record["samples_per_prompt"]), int(record["seed"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the request is incomplete ({error})") from error


def pack_rollouts(rollouts: Sequence[Rollout]) -> tuple[list[list[Any]], dict[str, Tensor]]:
    """Rollouts without their prompts: JSON and columns, end to end."""
    texts = [
        [
            *(rollout.group_id, rollout.sample_id, rollout.completion, rollout.finish, rollout.policy_version),
            *(len(rollout.token_ids), int(rollout.response_mask.sum())),
        ]
        for rollout in rollouts
    ]
    names = ("token_ids", "behavior_logprobs", "untruncated_logprobs")
    return texts, {name: torch.cat([getattr(rollout, name) for rollout in rollouts]) for name in names}


def unpack_rollouts(texts: Any, columns: Mapping[str, Tensor], prompts: Sequence[Prompt]) -> list[Rollout]:
    """What `pack_rollouts` was given; ValueError where columns and lengths disagree."""
    try:
        lengths = [int(each[5]) for each in texts]
        cut = {name: column.split(lengths) for name, column in columns.items()}
        return [
            Rollout(
                prompt=prompts[group],
                group_id=group,
                sample_id=sample,
                token_ids=cut["token_ids"][place],
                response_mask=torch.arange(length) >= length - answered,
                behavior_logprobs=cut["behavior_logprobs"][place],
                untruncated_logprobs=cut["untruncated_logprobs"][place],
                completion=completion,
                finish=finish,
                policy_version=version,
            )
            for place, (group, sample, completion, finish, version, length, answered) in enumerate(texts)
        ]
    except (KeyError, IndexError, TypeError, RuntimeError) as error:
        raise ValueError(f"the rollouts are damaged ({error})") from error


def check_prompts(rollouts: Sequence[Rollout], prompt_ids: Sequence[Sequence[int]], worker: str) -> None:
    """Raise where a worker read prompts as other tokens than the run does."""
    for rollout in rollouts:
        ids = prompt_ids[rollout.group_id]
        if rollout.token_ids[~rollout.response_mask].tolist() != list(ids):
            raise DataError(
                f"{worker} reads prompt {rollout.prompt.id!r} as other tokens than the run does: its tokenizer or its "
                "chat template is another one; start it with the model folder of the run"
            )


def prompt_ids_of(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """The tokens of each prompt, as every engine encodes them."""
    return [prompt_token_ids(tokenizer, prompt) for prompt in prompts]


class WorkerGone(Exception):  # noqa: N818 (its state, not a fault of ours)
    """A worker cannot be reached, or failed in a way that another one may not."""


class Sampler:
    """One worker, as the pool sees it. A thread of the pool makes all calls."""

    name: str

    def connect(self) -> None:
        """Start it, or see whether it is up; WorkerGone where it is not."""
        raise NotImplementedError

    def sample(self, request: ChunkRequest, snapshot: Snapshot) -> list[Rollout]:
        """Rollouts by these weights, `group_id` being the place in the chunk.

        Raises WorkerGone where another worker should be asked, and a TetherError where all would fail.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End it, where the run started it."""


def error_from(record: Any, worker: str) -> TetherError:
    """The error that a worker reported."""
    record = record if isinstance(record, dict) else {}
    kind = ERRORS.get(str(record.get("kind")), DataError)
    return kind(f"{worker}: {record.get('error', 'it refused the request without saying why')}")
