"""One learner for every method: the gradient of a sum over micro-batches, divided by a size known beforehand.

Learning-rate schedules are functions of progress and hold no state. `LearnerSettings` says how gradients become steps:
learning rates, clipping and the optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tether.errors import Diverged
from tether.learner.adamw import HALF, MixedAdamW, cannot_overflow
from tether.learner.batching import (
    BatchPart,
    Elsewhere,
    Parts,
    count_parts,
    free_cache,
    is_out_of_memory,
    smaller_budget,
    step_within_memory,
    within_memory,
)
from tether.learner.gradients import (
    FINDINGS,
    Fault,
    NonfiniteTensor,
    Unread,
    clip,
    find_all,
    in_columns,
    loss_of,
    read_all,
)
from tether.learner.learner_state import (
    LearnerState,
    capture,
    check,
    hyperparameters,
    kind,
    parameter_names,
    put_back,
)
from tether.learner.norms import read_norms
from tether.learner.ranks import METRICS, ONE, Ranks
from tether.models.acceleration import release_cuda_graphs
from tether.protocols import Objective, TrainedModel
from tether.types import Metrics, Sequences

Schedule = Literal["constant", "linear", "cosine"]


def lr_factor(schedule: Schedule, progress: float, warmup: float) -> float:
    """What the base rate is multiplied by at `progress` in [0, 1] of the run.

    Rises linearly over the first `warmup` of the run, then: 1; or (1 - p) linearly to 0; or (1 + cos(pi p)) / 2, where
    p is the progress through what follows the warm-up.
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    through = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 0.0
    return 1.0 - through if schedule == "linear" else (1.0 + math.cos(math.pi * through)) / 2.0


@dataclass(frozen=True)
class LearnerSettings:
    """How gradients become steps; rates are by parameter group."""

    rates: dict[str, float]
    micro_batch_tokens: int
    max_grad_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    master_weights: Literal["auto", "fp32", "none"] = (
        "auto"  # fp32 copies of weights in half precision; auto keeps them
    )
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    seed: int = 0  # of how 8-bit state is rounded

    def adamw(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimiser, unless the learner is given another; one pass over each parameter where the device can."""
        parameters = [parameter for group in parameter_groups for parameter in group["params"]]
        options: dict[str, Any] = {
            "betas": self.betas,
            "eps": self.epsilon,
            "weight_decay": self.weight_decay,
            "fused": {parameter.device.type for parameter in parameters} <= {"cpu", "cuda"},
        }
        master_weights = self.master_weights != "none" and any(parameter.dtype in HALF for parameter in parameters)
        if not master_weights and self.optimizer == "adamw":
            return torch.optim.AdamW(parameter_groups, **options)
        return MixedAdamW(
            parameter_groups,
            master_weights=master_weights,
            eight_bit=self.optimizer == "adamw_8bit",
            seed=self.seed,
            **options,
        )


class Learner:
    """Holds the optimiser. `backward` adds up a gradient, `step` applies it, `discard` throws it away.

    The sum that an objective returns is divided by its size over the *whole* step, so that splitting into micro-batches
    never changes the gradient. What is not finite, be it an output, a loss, a gradient or the optimiser's own result,
    makes `step` skip the update, count it and call `on_fault`; weights and optimiser stay as they were, to the bit.

    When memory runs out, `micro_batch_tokens` is halved for the rest of the run and the gradient of the current step is
    gathered again from the beginning, so that it is the one that smaller micro-batches would have given.
    """

    def __init__(
        self,
        model: TrainedModel,
        settings: LearnerSettings,
        device: torch.device | str = "cpu",
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
        ranks: Ranks = ONE,
    ) -> None:
        self.model = model
        self.settings = settings
        self.device = torch.device(device)
        self.groups = model.parameter_groups()
        missing = sorted(self.groups.keys() - settings.rates.keys())
        assert not missing, f"no learning rate for the parameter groups {missing}"
        parameter_groups = [
            {"params": parameters, "lr": settings.rates[name], "name": name} for name, parameters in self.groups.items()
        ]
        self.optimizer = make_optimizer(parameter_groups) if make_optimizer else settings.adamw(parameter_groups)
        self.named = parameter_names(model, self.groups)
        self._kinds = {name: kind(parameter) for name, parameter in self.named.items()}
        self._trained = tuple(self.groups)  # the groups that learn now
        self.micro_batch_tokens = settings.micro_batch_tokens
        self.ranks = ranks
        self.elsewhere: Elsewhere | None = None  # called with each micro-batch that another rank runs
        self._parts = Parts(self.device, lambda number: self.elsewhere is not None or self.ranks.runs(number))
        self.skipped_in_a_row = 0
        self.on_fault: Callable[[Fault], None] = lambda fault: None  # noqa: ARG005
        self._start = hyperparameters(self.optimizer)
        self._largest_norm = 0.0  # of any gradient that a step was taken with
        self._out_of_memory = 0  # times since they were last reported
        self._gathered: list[tuple[Sequences, Objective[Any, Any]]] = []  # since the last step
        self._added = 0  # of these, how many are in the gradient
        self._findings: list[NonfiniteTensor] = []
        self._unread: list[Unread] = []  # micro-batches whose finite-check has not been read yet
        self._unread_batches = 0  # batches since the finite-check was last read, on any rank
        self._part_done = _nothing

    def hold(self, shares: Mapping[str, nn.Parameter], spans: Mapping[str, tuple[int, int]]) -> None:
        """Step these in place of the whole parameters of the same names; before the first step.

        `spans` say where in the whole parameter a share begins, and how many numbers that has.
        """
        names = {parameter: name for name, parameter in self.named.items()}
        self.groups = {group: [shares[names[p]] for p in parameters] for group, parameters in self.groups.items()}
        self.named = {name: shares[name] for name in self.named}
        rates = {group["name"]: group["lr"] for group in self.optimizer.param_groups}
        self.optimizer = self.settings.adamw(
            [{"params": parameters, "lr": rates[name], "name": name} for name, parameters in self.groups.items()]
        )
        if isinstance(self.optimizer, MixedAdamW):
            self.optimizer.spans = {share: spans[name] for name, share in shares.items()}

    @contextmanager
    def training_only(self, *names: str) -> Iterator[None]:
        """While entered, gather and step these groups alone; the others keep their weights and optimiser state.

        A model with a method `train_only` is informed, so that it can skip what only the other groups' gradients need.
        """
        unknown = [name for name in names if name not in self.groups]
        assert not unknown and not self._gathered, f"no groups {unknown}, or a gradient was gathered before"
        before, self._trained = self._trained, names
        set_trained = getattr(self.model, "train_only", lambda groups: None)  # noqa: ARG005
        set_trained(names)
        try:
            yield
        finally:
            self._trained = before
            set_trained(before)

    # -- gathering a gradient -----------------------------------------------------------------------------------------

    def micro_batches(self, batch: Sequences) -> Iterator[Any]:
        """The batch in parts that fit in memory, trimmed of needless padding, on the learner's device."""
        return (part.micro for part in Parts(self.device).of(batch, self.micro_batch_tokens))

    def begin(self, batch: Sequences) -> None:
        """Copy the first part of the next batch for `backward` to the device, if there is room."""
        try:
            self._parts.begin(batch, self.micro_batch_tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise

    @property
    def finite(self) -> bool:
        """Whether all that was gathered since the last step is finite so far; the device is waited for."""
        if self._unread_batches:
            found = self.ranks.merged(lambda: read_all(self._unread), FINDINGS)
            self._findings += sorted(found, key=lambda finding: finding.batch)
            self._unread.clear()
            self._unread_batches = 0
        return not self._findings

    def backward(self, batch: Sequences, objective: Objective[Any, Any]) -> Metrics:
        """Add the gradient of `objective` over the whole of `batch`, and report what it measured."""
        self._gathered.append((batch, objective))
        return within_memory(self._gather, self._start_again)

    @torch.no_grad()
    def measure(self, batch: Sequences, objective: Objective[Any, Any]) -> Metrics:
        """What `objective` metrics over `batch`, without a gradient."""
        return within_memory(
            lambda: self._sum(batch, objective, lambda loss, outputs, part: None),  # noqa: ARG005
            lambda: self.shrink_micro_batch([batch]),
        )

    def _gather(self) -> Metrics:
        """Add the gradient of what is not in it yet; what is reported is of the last batch."""
        metrics = Metrics()
        for batch, objective in self._gathered[self._added :]:
            self._unread_batches += 1
            pieces = partial(count_parts, [batch], self.micro_batch_tokens)
            metrics = self._sum(batch, objective, self._add_gradient, self.ranks.summed([*self.named.values()], pieces))
            for name in self.groups.keys() - set(self._trained):
                for parameter in self.groups[name]:
                    parameter.grad = None
            self._added += 1
        return metrics

    def _start_again(self) -> None:
        """Throw the partial gradient away and make room for another try."""
        self.optimizer.zero_grad(set_to_none=True)
        self._clear_findings()
        self._added = 0
        self.shrink_micro_batch([batch for batch, _ in self._gathered])

    def shrink_micro_batch(self, batches: Sequence[Sequences]) -> int:
        """Make the micro-batches of these batches smaller, for good, and free what can be freed.

        Old log-probs that were evaluated in larger micro-batches may then differ from the first step's by rounding.
        """
        release = getattr(self.model, "release_ahead", None)  # a pass computed ahead uses memory as well
        if callable(release):
            release()
        release_cuda_graphs()
        free_cache(self.device)
        self.micro_batch_tokens = smaller_budget(batches, self.micro_batch_tokens)
        self._out_of_memory += 1
        return self.micro_batch_tokens

    def _sum(
        self,
        batch: Sequences,
        objective: Objective[Any, Any],
        consume: Callable[[Tensor, Any, BatchPart], None],
        adding: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None),  # noqa: B008 (holds no state)
    ) -> Metrics:
        """Run this rank's micro-batches; the metrics are those of all ranks, added in the order of micro-batches."""
        size = objective.size(batch)
        if not size > 0:
            raise ValueError("the batch is empty: it has no token, sequence or pair to learn from")

        def run_own() -> list[tuple[int, tuple[Metrics, Tensor]]]:
            seen: list[tuple[int, tuple[Metrics, Tensor]]] = []
            with adding as self._part_done:
                for part in self._parts.of(batch, self.micro_batch_tokens):
                    if not self.ranks.runs(part.number):
                        assert self.elsewhere is not None
                        self.elsewhere(part.micro)
                        continue
                    outputs = self.model(part.micro)
                    loss = loss_of(objective, outputs, part.micro)
                    consume(loss.total / size, outputs, part)
                    seen.append((part.number, (loss.metrics, loss.total.detach())))
                if self.ranks.fills(count_parts([batch], self.micro_batch_tokens)):
                    self._repeat_last(batch, objective)
            self._part_done = _nothing  # it holds the sums
            return seen

        metrics = Metrics()
        total = torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        for measured, loss in self.ranks.merged(run_own, METRICS):
            metrics.merge(measured)
            total += loss.to(self.device)
        metrics.add("loss", total, size)
        return metrics

    def _repeat_last(self, batch: Sequences, objective: Objective[Any, Any]) -> None:
        """Run the last micro-batch, which another rank runs as well, and learn nothing from it."""
        number = count_parts([batch], self.micro_batch_tokens) - 1
        (last,) = Parts(self.device, lambda other: other == number).of(batch, self.micro_batch_tokens)
        loss = loss_of(objective, self.model(last.micro), last.micro).total
        if loss.requires_grad:
            (loss * 0.0).backward()

    def _add_gradient(self, loss: Tensor, outputs: Any, part: BatchPart) -> None:
        """Add the gradient now and ask later whether it was one: a device is not waited for in the middle of a step."""
        self._unread.append(Unread.of(loss, outputs, part, self._added))
        loss.backward()
        self._part_done()

    # -- taking a step ------------------------------------------------------------------------------------------------

    def step(self) -> Metrics:
        """Clip each group's gradient, take the optimiser's step, clear the gradient.

        Groups are clipped apart: a separate critic whose loss is large must not shrink the policy's step. (A value head
        on the policy's backbone sends its gradient through the backbone, which is the policy's group.)
        """
        if not self.finite:
            return self.skip("an output or the loss is not finite")
        sizes = read_norms(self._norms())
        if not all(map(math.isfinite, sizes.values())):
            gradients = {f"gradient of {name}": p.grad for name, p in self.named.items() if p.grad is not None}
            self._find_in(gradients)
            return self.skip("the gradient or its norm is not finite")
        if not self._apply(sizes):
            return self.skip("the optimiser's result is not finite")
        metrics = self._end_step(skipped=False)
        for name, size in sizes.items():
            metrics.add(f"grad_norm/{name}", size)
        return metrics

    def _norms(self) -> dict[str, Tensor]:
        return self.ranks.norms({name: self.groups[name] for name in self._trained}, self.device)

    def _apply(self, sizes: dict[str, float]) -> bool:
        """Clip and take the optimiser's step; False if its result was not finite, and all is as it was before."""
        largest, limit = self._largest_norm, self.settings.max_grad_norm
        for name, size in sizes.items():
            if limit is not None:
                clip([p.grad for p in self.groups[name] if p.grad is not None], size, limit)
            largest = max(largest, size if limit is None else min(size, limit))
        certain = self.ranks.all_agree(cannot_overflow(self.optimizer, largest))
        before = None if certain else self._capture(copy=True)
        step_within_memory(self.optimizer)
        if before is not None:
            self._find_in(self._capture(copy=False).tensors)
            if not self.finite:
                put_back(before, self.named, self.optimizer, self._start)
                return False
        self._largest_norm = largest
        self.ranks.stepped()
        return True

    def _find_in(self, tensors: Mapping[str, Tensor]) -> None:
        """Note what is not finite, on any rank that has a part of these tensors."""
        if not self.ranks.sharded:
            self._findings += find_all(tensors)
            return
        self._findings += self.ranks.merged(lambda: [(self.ranks.index, each) for each in find_all(tensors)], FINDINGS)

    def skip(self, reason: str) -> Metrics:
        """Leave the update out: hand what was gathered for it to `on_fault`, count it, throw the gradient away."""
        norms = read_norms(self._norms())
        batches = tuple(batch for batch, _ in self._gathered)
        return self._leave_out(Fault(reason, tuple(self._findings), batches, norms, self.micro_batch_tokens))

    def skip_if_nonfinite(self, batch: Sequences) -> Metrics | None:
        """None where all that is learned from `batch` is finite; else the update is left out, and this is its report.

        Call it before a batch is cut into steps: baselines and whitening spread one bad number over all of them.
        """
        findings = in_columns(batch)
        if not findings:
            return None
        names = ", ".join(finding.tensor for finding in findings)
        return self._leave_out(Fault(f"not finite: {names}", tuple(findings), (batch,), {}, self.micro_batch_tokens))

    def _leave_out(self, fault: Fault) -> Metrics:
        self.on_fault(fault)
        return self._end_step(skipped=True)

    def _end_step(self, *, skipped: bool) -> Metrics:
        metrics = Metrics()
        metrics.count("steps", float(not skipped))
        metrics.count("skipped_steps", float(skipped))
        if self._out_of_memory:
            metrics.count("out_of_memory", float(self._out_of_memory))
        if self.micro_batch_tokens != self.settings.micro_batch_tokens:
            metrics.add("micro_batch_tokens", float(self.micro_batch_tokens))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self._out_of_memory = 0
        self.discard()
        return metrics

    def discard(self) -> None:
        """Throw the gathered gradient away."""
        self.optimizer.zero_grad(set_to_none=True)
        self._gathered.clear()
        self._clear_findings()
        self._added = 0

    def _clear_findings(self) -> None:
        self._findings.clear()
        self._unread.clear()
        self._unread_batches = 0

    def check_progress(self, limit: int) -> None:
        """Raise `Diverged` where this many updates in a row were skipped."""
        if self.skipped_in_a_row >= limit:
            raise Diverged(
                f"{self.skipped_in_a_row} updates in a row were skipped for what is not finite: lower "
                "optimizer.policy_lr or optimizer.critic_lr, or look at the rewards and the data"
            )

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self, *, copy: bool = False) -> LearnerState:
        """The whole state between two steps, to resume from.

        The tensors are the learner's own, which the next step changes; with `copy` they are clones on the CPU, to be
        written while training goes on.
        """
        assert not self._gathered, "a gathered gradient is not part of the state: take a step, or discard it"
        return self.ranks.stored(self._capture(copy=copy))

    def _capture(self, *, copy: bool) -> LearnerState:
        counters = {
            "micro_batch_tokens": {"start": self.settings.micro_batch_tokens, "now": self.micro_batch_tokens},
            "skipped_in_a_row": self.skipped_in_a_row,
            "largest_norm": self._largest_norm,
            "out_of_memory": self._out_of_memory,
        }
        return capture(self.named, self.optimizer, copy=copy, start=self._start, counters=counters)

    def load_state(self, state: LearnerState) -> None:
        """Become the learner whose `state` this is, bit for bit; nothing is changed where it does not belong here.

        A setting that differs from the one which the state began with (a fork) is kept.
        """
        check(state, self._kinds, self.optimizer)
        put_back(self.ranks.held(state), self.named, self.optimizer, self._start)
        self.ranks.stepped()
        numbers = state.numbers
        if numbers["micro_batch_tokens"]["start"] == self.settings.micro_batch_tokens:
            self.micro_batch_tokens = int(numbers["micro_batch_tokens"]["now"])
        self.skipped_in_a_row = int(numbers["skipped_in_a_row"])
        self._largest_norm = float(numbers["largest_norm"])
        self._out_of_memory = int(numbers["out_of_memory"])
        self.discard()

    # -- rates and vectors --------------------------------------------------------------------------------------------

    def set_progress(self, progress: float) -> None:
        """Set the rates for this point in [0, 1] of the run."""
        factor = lr_factor(self.settings.schedule, progress, self.settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rates[group["name"]] * factor

    def flat_gradient(self, group: str) -> Tensor:
        """(P,) the gathered gradient of one group; a parameter that took no part counts as 0."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.groups[group]])

    def flat_parameters(self, group: str) -> Tensor:
        """(P,) a copy of one group's parameters."""
        return torch.cat([p.detach().reshape(-1) for p in self.groups[group]])

    def set_flat_parameters(self, group: str, vector: Tensor) -> None:
        """Write a vector from `flat_parameters` back."""
        start = 0
        with torch.no_grad():
            for parameter in self.groups[group]:
                parameter.copy_(vector[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()


def _nothing() -> None:
    pass
