"""Use a Python function as a reward, in this process or in worker processes.

A function of texts and columns, and every function in a worker process, gets rollouts as plain data; a worker turns
them back for functions of whole rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

import torch

from tether.config.rewards import FunctionPart
from tether.errors import ConfigError, DataError
from tether.protocols import RewardFn
from tether.rewards.calling import AWAITED_AT_ONCE, Caller, CallError, Outcome, Signature, read_signature
from tether.rewards.pool import LostError, WorkerPool
from tether.rewards.resolve import check_code, resolve
from tether.rewards.scoring import CALL_SECONDS, TENSORS, CodeReward, private_copies, score_of
from tether.seeds import derive_seed
from tether.types import Message, Prompt, Rollout, Score
from tether.user_code import apart

ASYNC_GRACE = 5.0  # extra seconds for an async function that does not react to cancellation


class FunctionReward:
    """Scores rollouts with a function. A failure concerns only the rollouts of the failed call.

    A function of one answer that raises fails for that answer. A batch function that raises fails for that batch; if it
    scored nothing at all, the run ends.

    `function` is an object that a program passes; without it the part's name is resolved.
    """

    def __init__(
        self,
        part: FunctionPart,
        *,
        field: str,
        seed: int,
        limit: float = CALL_SECONDS,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.part, self.field, self.seed = part.function, part, field, seed
        self.pool: WorkerPool | None = None
        self._caller: Caller | None = None
        if function is not None:
            self.name = part.label
            self._call_here(function, limit)
            return
        check_code(part.function, field)
        if part.workers or part.timeout_seconds is not None:
            setup = {"function": part.function, "field": field, "takes": part.takes}
            self.pool = WorkerPool(setup, max(part.workers, 1), part.timeout_seconds)
            told = self.pool.describe()["signature"]
            self.signature = Signature(**{**told, "names": tuple(told["names"]), "required": tuple(told["required"])})
            if self.signature.awaited:
                self.pool.grace = ASYNC_GRACE
        else:
            with apart():
                function = resolve(part.function, field)
            self._call_here(function, limit)
        self._check_settings()

    def _call_here(self, function: Any, limit: float) -> None:
        """Call the function in this process."""
        self.signature = read_signature(function, self.part.takes, self.name, self.field)
        self._caller = Caller(function, self.signature, limit=limit, what=self.name)

    def limit_to(self, seconds: float) -> None:
        """Set the time limit for a call in this process; 0 means no limit."""
        if self._caller is not None:
            self._caller.limit = seconds

    def _check_settings(self) -> None:
        takes = self.signature.takes
        if takes == "text" and self.part.batch_size is not None:
            raise ConfigError(
                f"{self.field}: {self.name} takes one answer per call: batch_size is for trl and rollouts"
            )
        if takes != "text" and self.part.workers > 1 and self.part.batch_size is None:
            raise ConfigError(
                f"{self.field}: {self.name} takes all answers of a step in one call, so workers: {self.part.workers} "
                "would leave all but one idle: set batch_size, the answers in one call"
            )

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise where the function needs a column that no record has."""
        if not prompts:
            return
        known = dict.fromkeys(str(name) for prompt in prompts for name in prompt.meta)
        for name in self.signature.columns():
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"columns there: {', '.join(known) or 'none'}"
                raise ConfigError(f"{self.field}: {self.name} takes {name!r}, and no record has such a column ({hint})")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout, in order."""
        batches = self._batches(rollouts)
        outcomes = self._asked(batches) if self.pool is not None else [self._called(batch) for batch in batches]
        flat = [outcome for batch in outcomes for outcome in batch]
        if self.signature.takes != "text" and flat and all(outcome.raised for outcome in flat):
            raise DataError(f"{self.name} raised {flat[0].error}")
        return [score_of(outcome) for outcome in flat]

    def _batches(self, rollouts: Sequence[Rollout]) -> list[Sequence[Rollout]]:
        """The rollouts of one call, or of one request to a worker, independent of the number of workers."""
        size = self.part.batch_size or max(len(rollouts), 1)
        if self.signature.takes == "text" and self.pool is not None:
            size = AWAITED_AT_ONCE if self.signature.awaited else 1
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]

    def _called(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        assert self._caller is not None
        with apart():
            return self._outcomes(self._caller, rollouts)

    def _outcomes(self, caller: Caller, rollouts: Sequence[Rollout]) -> list[Outcome]:
        try:
            if self.signature.takes == "rollouts":
                return caller.outcomes([], private_copies(rollouts))
            return caller.outcomes([sample_of(rollout, self.signature) for rollout in rollouts])
        except CallError as error:
            raise DataError(f"{self.name} {error}") from error

    def _asked(self, batches: Sequence[Sequence[Rollout]]) -> list[list[Outcome]]:
        assert self.pool is not None
        try:
            replies = self.pool.map([self._request(batch) for batch in batches])
        except TypeError as error:  # from json.dumps
            raise DataError(
                f"{self.name} runs in its own process, and a column of the records cannot be sent there as JSON "
                f"({error}): leave it out of the function's parameters, or run the function without workers and "
                "timeout_seconds"
            ) from error
        return [self._read(reply, len(batch)) for reply, batch in zip(replies, batches, strict=True)]

    def _request(self, batch: Sequence[Rollout]) -> Mapping[str, Any]:
        plain = plain_rollout if self.signature.takes == "rollouts" else sample_of
        first = batch[0]
        seed = derive_seed(self.seed, first.prompt.id, first.sample_id, first.trained_in)
        return {"seed": seed, "samples": [plain(rollout, self.signature) for rollout in batch]}

    def _read(self, reply: Mapping[str, Any] | LostError, number: int) -> list[Outcome]:
        if isinstance(reply, LostError):
            return [Outcome(None, reply.reason, reply.text)] * number
        if "failed" in reply:
            raise DataError(f"{self.name} {reply['failed']}")
        return [Outcome(**outcome) for outcome in reply["outcomes"]]


def named_reward(reference: str, field: str, seed: int = 0) -> FunctionReward:
    """The reward function that a recipe's `field` names, called by its signature."""
    return FunctionReward(FunctionPart(kind="function", function=reference), field=field, seed=seed)


def in_limits(reward: RewardFn | None, name: str, seconds: float) -> RewardFn | None:
    """The reward with a time limit for its calls in this process."""
    if isinstance(reward, FunctionReward | CodeReward):
        reward.limit_to(seconds)
        return reward
    return None if reward is None else CodeReward(reward, name, seconds)


# -- rollouts as plain data ------------------------------------------------------------------------------------------


def sample_of(rollout: Rollout, signature: Signature) -> dict[str, Any]:
    """The sample that a function of this signature gets (`tether.rewards.calling` lists the keys)."""
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
        "step": rollout.trained_in,
        "columns": {str(name): value for name, value in prompt.meta.items() if signature.wants(str(name))},
    }


def holds_messages(prompt: Prompt) -> bool:
    """Whether a prompt was given as messages, or could only have been given as messages."""
    return prompt.as_messages or [message["role"] for message in prompt.messages] != ["user"]


def plain_rollout(rollout: Rollout, signature: Signature) -> dict[str, Any]:
    """A whole rollout as JSON values. A float32 is restored exactly from its decimal text."""
    rest = {"group_id": rollout.group_id, "sample_id": rollout.sample_id, "policy_version": rollout.policy_version}
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
        policy_version=plain["policy_version"],
        step=plain["step"],
        **{name: torch.tensor(plain[name], dtype=dtype) for name, dtype in TENSORS.items()},
    )
