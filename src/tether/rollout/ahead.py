"""Rollouts that are asked for some steps ahead (`rollout.lag`).

The rollouts of step s are sampled with the weights that step max(0, s - lag) began with. The lag is fixed, so a run
can be repeated. A step asks for the rollouts of the step `lag` later, and then takes its own. With lag 0 these are the
same.

An engine with `submit` samples elsewhere while this process trains. Any other engine samples when it is asked: the
result is the same, and no time is gained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from tether.errors import DataError
from tether.learner.ranks import ONE, Packed, Ranks
from tether.protocols import AsyncRolloutEngine, PendingRollouts, RolloutEngine, Sampling
from tether.rollout.chunks import numbered, rollouts_codec
from tether.rollout.native import check_rollouts
from tether.types import Prompt, Rollout


@dataclass(frozen=True)
class RolloutRequest:
    """What decides the rollouts of a step, beside the weights."""

    step: int
    prompts: Sequence[Prompt]
    sampling: Sampling
    samples_per_prompt: int
    seed: int

    def digest(self) -> str:
        """A digest by which a later process knows the same request again."""
        prompts = [[each.id, each.messages, each.tools, dict(each.template_kwargs)] for each in self.prompts]
        content = [prompts, asdict(self.sampling), self.samples_per_prompt, self.seed]
        text = json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__)
        return hashlib.sha256(text.encode()).hexdigest()


class AskedRollouts:
    """The rollouts of a request, which may still be sampled; `version` is that of the weights that sample them.

    Without `everywhere` only rank 0 has them, and the other ranks get them from it.
    """

    def __init__(
        self, request: RolloutRequest, version: int, result: PendingRollouts, *, everywhere: bool = True
    ) -> None:
        self.request, self.version, self.everywhere = request, version, everywhere
        self._result = result
        self._rollouts: list[Rollout] | None = None

    def wait(self) -> list[Rollout]:
        """The rollouts, once they are there."""
        if self._rollouts is None:
            self._rollouts = self._result()
        return self._rollouts


class RolloutQueue:
    """The rollouts of the coming steps that were asked for."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self._asked: dict[int, AskedRollouts] = {}

    def take(
        self,
        step: int,
        steps: int,
        request: Callable[[int], RolloutRequest],
        engine: RolloutEngine,
        ranks: Ranks = ONE,
    ) -> list[Rollout]:
        """The rollouts of `step`, after asking for those of the next `lag` of `steps` steps."""
        engine.policy_version = step
        for later in range(step, max(step, min(step + self.lag, steps - 1)) + 1):
            if later not in self._asked:
                self._asked[later] = self._ask(engine, request(later), ranks)
        asked = self._asked.pop(step)
        codec = rollouts_codec(asked.request.prompts)
        rollouts = asked.wait() if asked.everywhere else ranks.first(asked.wait, codec)
        return [replace(rollout, step=step) for rollout in rollouts]

    def _ask(self, engine: RolloutEngine, request: RolloutRequest, ranks: Ranks) -> AskedRollouts:
        version = engine.policy_version
        words: dict[str, Any] = {"samples_per_prompt": request.samples_per_prompt, "seed": request.seed}
        if not (self.lag and isinstance(engine, AsyncRolloutEngine)):
            rollouts = self._checked(
                engine, request, version, engine.generate(request.prompts, request.sampling, **words)
            )
            return AskedRollouts(request, version, lambda: rollouts)
        if ranks.index:
            return AskedRollouts(request, version, _only_on_rank_0, everywhere=False)
        result = engine.submit(request.prompts, request.sampling, **words)
        return AskedRollouts(
            request,
            version,
            lambda: self._checked(engine, request, version, result()),
            everywhere=ranks.count == 1,
        )

    def _checked(
        self, engine: RolloutEngine, request: RolloutRequest, version: int, rollouts: list[Rollout]
    ) -> list[Rollout]:
        check_rollouts(engine, rollouts, request.prompts, request.samples_per_prompt)
        if not self.lag:
            return rollouts
        for place, rollout in enumerate(rollouts):
            if rollout.policy_version != version:
                raise DataError(
                    f"engine: rollout {place} of {type(engine).__name__} for step {request.step} has policy_version "
                    f"{rollout.policy_version}, and it was asked for with version {version}: sample it with the "
                    "weights at the time of asking, and write the policy_version of that time on it"
                )
        return numbered(rollouts, range(len(request.prompts)), request.samples_per_prompt)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> Packed:
        """What was asked for, as JSON and tensors. Waits for what is still being sampled."""
        values: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for step, asked in self._asked.items():
            texts, columns = rollouts_codec(asked.request.prompts).pack(asked.wait())
            values[str(step)] = {"version": asked.version, "request": asked.request.digest(), "rollouts": texts}
            tensors |= {f"{step}/{name}": column for name, column in columns.items()}
        return {"lag": self.lag, "asked": values}, tensors

    def restore(
        self, values: Mapping[str, Any], tensors: Mapping[str, Tensor], request: Callable[[int], RolloutRequest]
    ) -> str | None:
        """Take back what `state` gave. A sentence where a fork asks for other rollouts, which drops all of these."""
        self._asked.clear()
        if not values["asked"]:
            return None
        steps = sorted(map(int, values["asked"]))
        dropped = f"The checkpoint holds answers for steps {steps[0]} to {steps[-1]}, which are dropped"
        now = f"step {steps[0]} asks for new ones with its own weights."
        if values["lag"] != self.lag:
            return f"{dropped}: rollout.lag was {values['lag']} and is {self.lag}. Instead {now}"
        for step in steps:
            saved, asked = values["asked"][str(step)], request(step)
            if saved["request"] != asked.digest():
                self._asked.clear()
                return f"{dropped}: the prompts, the seed or the settings of rollout changed. Instead {now}"
            columns = {name.partition("/")[2]: tensors[name] for name in tensors if name.startswith(f"{step}/")}
            rollouts = rollouts_codec(asked.prompts).unpack(saved["rollouts"], columns)
            self._asked[step] = AskedRollouts(asked, saved["version"], lambda rollouts=rollouts: rollouts)
        return None


def _only_on_rank_0() -> list[Rollout]:
    raise AssertionError("rollouts were waited for on a rank that did not ask for them")


def staleness(rollouts: Sequence[Rollout], step: int) -> float:
    """The mean number of steps between the policy that sampled and the policy of `step`."""
    return sum(step - rollout.policy_version for rollout in rollouts) / max(len(rollouts), 1)


def lag_notices(lag: int, engine: RolloutEngine, cap: float | None) -> tuple[str, ...]:
    """What a user of `rollout.lag` should know before the first step."""
    if not lag:
        return ()
    notices: tuple[str, ...] = ()
    if not isinstance(engine, AsyncRolloutEngine):
        notices += (
            f"rollout.lag is {lag}, and the engine samples in this process: the results are those of asynchronous "
            "training, and no time is gained.",
        )
    if cap is None:
        notices += (
            f"rollout.lag is {lag} without rollout.importance_sampling_cap: answers of older policies are trained on "
            "without a correction.",
        )
    return notices
