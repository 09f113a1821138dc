"""Simulate iterations of a cluster: answers of different lengths, slots, ranks, stragglers, failures and lag.

The time of a decode step and of a pass comes from `timing.py`. An iteration is simulated answer by answer: samplers
decode with continuous batching, each trainer passes its own rows, and an optimizer step waits for the slowest. All that
is random comes from one seed, so a simulation can be repeated.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from tether.errors import UsageError
from tether.plan.machine import Machine
from tether.plan.timing import Decoder, Pace, PassCosts, RowSums, reading_seconds

REFILL = 16  # freed slots are refilled once a sixteenth of them is free


@dataclass(frozen=True)
class LengthModel:
    """How long answers are, in tokens."""

    kind: Literal["fixed", "geometric", "lognormal"]
    mean: float
    longest: int
    spread: float = 1.0  # standard deviation of the logarithm

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """`count` lengths between 1 and `longest`."""
        if self.kind == "fixed":
            return [min(self.longest, max(1, round(self.mean)))] * count
        if self.kind == "geometric":
            stop = math.log1p(-1.0 / self.mean) if self.mean > 1 else -math.inf
            raw = (math.ceil(math.log(1.0 - rng.random()) / stop) if stop > -math.inf else 1.0 for _ in range(count))
        else:
            middle = math.log(self.mean) - self.spread**2 / 2
            raw = (rng.lognormvariate(middle, self.spread) for _ in range(count))
        return [min(self.longest, max(1, round(each))) for each in raw]


@dataclass(frozen=True)
class Trouble:
    """What goes wrong."""

    straggler_share: float = 0.0  # probability that a device is slow in a step
    straggler_factor: float = 1.0  # how slow
    failures_per_hour: float = 0.0  # of each sampling GPU
    recovery: float = 60.0  # seconds until the lost answers are asked for again

    def slowness(self, rng: random.Random) -> float:
        """The factor of one device in one step."""
        return self.straggler_factor if rng.random() < self.straggler_share else 1.0


@dataclass(frozen=True)
class ClusterJob:
    """All that the simulator reads: one iteration's work, and the devices that do it."""

    machine: Machine
    pace: Pace
    decoder: Decoder
    passes: PassCosts
    rows: int
    samples: int  # answers to one prompt, which share the reading of it
    prompt_tokens: float
    lengths: LengthModel
    minibatch: int  # rows of an optimizer step
    micro_batch_tokens: int  # tokens of one forward and backward pass
    trainers: int
    samplers: int  # 0: the trainers sample, in turns
    trainer_tensor: int = 1  # GPUs that pass a row together
    sampler_tensor: int = 1  # GPUs that decode together
    slots: int = 1024  # answers that one sampler decodes at once
    lag: int = 0
    partial: bool = False  # answers go on across weight updates, so that no sampler waits for its last ones
    gather: float = 0.0  # seconds to gather the weights for one micro-batch; hidden behind its pass where it is shorter
    exposed: float = 0.0  # seconds of communication in one forward pass that nothing hides: of layers that are split
    sync: float = 0.0  # seconds of communication and of the optimizer in one step
    handover: float = 0.0  # seconds until the samplers have new weights
    trouble: Trouble = field(default_factory=Trouble)

    def __post_init__(self) -> None:
        for name in ("rows", "samples", "minibatch", "micro_batch_tokens", "trainers", "slots"):
            if getattr(self, name) < 1:
                raise UsageError(f"a simulation needs {name} of at least 1, not {getattr(self, name)}")
        if self.lag < 0 or self.samplers < 0:
            raise UsageError("lag and the number of samplers cannot be below 0")

    @property
    def replicas(self) -> int:
        """Engines that decode independently."""
        return max(1, (self.samplers or self.trainers) // self.sampler_tensor)

    @property
    def groups(self) -> int:
        """Trainers that pass different rows."""
        return max(1, self.trainers // self.trainer_tensor)

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.trainers + self.samplers


@dataclass(frozen=True)
class Decoded:
    """The work of one sampler."""

    seconds: float
    tokens: int
    ends: tuple[tuple[float, int], ...] = ()  # (when, length) of each answer, in order


@dataclass(frozen=True)
class Iteration:
    """Seconds of the phases of one iteration, and its tokens."""

    rollout: float
    scores: float
    evaluation: float
    update: float
    handover: float
    answers: int  # tokens asked for
    decoded: int  # tokens sampled, including lost ones
    lost: int  # tokens sampled by workers that failed
    trained: int  # tokens in the rows of the update, prompts included

    @property
    def training(self) -> float:
        """Seconds of the trainers."""
        return self.scores + self.evaluation + self.update


@dataclass(frozen=True)
class Simulated:
    """The iterations of one simulation and when each ended."""

    job: ClusterJob
    iterations: tuple[Iteration, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of the last iteration."""
        return self.ends[-1]

    @property
    def step_seconds(self) -> float:
        """Mean seconds between the ends of two iterations, once the pipeline is full."""
        first = min(self.job.lag, len(self.ends) - 2)
        if first < 0:
            return self.ends[0]
        return (self.ends[-1] - self.ends[first]) / (len(self.ends) - 1 - first)

    def mean(self, phase: str) -> float:
        """The mean of a phase's seconds, or of a number of tokens."""
        return fmean(getattr(each, phase) for each in self.iterations)


def simulate(job: ClusterJob, steps: int = 8, seed: int = 0) -> Simulated:
    """Simulate `steps` iterations."""
    if steps < 1:
        raise UsageError(f"--steps {steps}: simulate at least 1 iteration")
    iterations = [one_iteration(job, random.Random(f"{seed}/{step}")) for step in range(steps)]  # noqa: S311
    return Simulated(job, tuple(iterations), tuple(timeline(job, iterations)))


def timeline(job: ClusterJob, iterations: Sequence[Iteration]) -> list[float]:
    """When the training of each iteration ends.

    The rollouts of step s come from version s - lag. Training waits for its rollouts; sampling waits for its version.
    """
    sampled = 0.0
    ends: list[float] = []
    for step, each in enumerate(iterations):
        trained = ends[-1] if ends else 0.0
        if not job.samplers:
            ends.append(trained + each.handover + each.rollout + each.training)
            continue
        version = step - job.lag
        ready = ends[version - 1] + each.handover if version >= 1 else 0.0
        sampled = max(sampled, ready) + each.rollout
        ends.append(max(trained, sampled) + each.training)
    return ends


def one_iteration(job: ClusterJob, rng: random.Random) -> Iteration:
    """Sample, score, evaluate and train once."""
    lengths = job.lengths.draw(job.rows, rng)
    rollout, decoded, lost = _rollout(job, lengths, rng)
    slow = [job.trouble.slowness(rng) for _ in range(job.groups)]
    rows = [(job.prompt_tokens + length, length) for length in lengths]
    rng.shuffle(rows)
    dealt = [_rows(job, rows[group :: job.groups]) for group in range(job.groups)]
    scores = max(_scores(job, part) * factor for part, factor in zip(dealt, slow, strict=True))
    evaluation = max(_evaluation(job, part) * factor for part, factor in zip(dealt, slow, strict=True))
    update = sum(
        _slowest(job, rows[start : start + job.minibatch], slow) + job.passes.epochs * job.sync
        for start in range(0, len(rows), job.minibatch)
    )
    trained = round(sum(tokens for tokens, _ in rows))
    return Iteration(rollout, scores, evaluation, update, job.handover, sum(lengths), decoded, lost, trained)


# -- trainers ---------------------------------------------------------------------------------------------------------


def _rows(job: ClusterJob, rows: Sequence[tuple[float, int]]) -> RowSums:
    tokens = sum(length for length, _ in rows)
    passes = math.ceil(tokens / job.micro_batch_tokens)
    return RowSums(tokens, sum(length**2 for length, _ in rows), sum(answer for _, answer in rows), passes)


def _scores(job: ClusterJob, rows: RowSums) -> float:
    own = job.passes.scores(rows, job.machine, job.pace)
    return _with_communication(job, own, job.passes.rewards * rows.passes)


def _evaluation(job: ClusterJob, rows: RowSums) -> float:
    own = job.passes.evaluation(rows, job.machine, job.pace)
    models = int(job.passes.policy) + bool(job.passes.critic) + int(job.passes.reference)
    return _with_communication(job, own, models * rows.passes)


def _slowest(job: ClusterJob, rows: Sequence[tuple[float, int]], slow: Sequence[float]) -> float:
    """Seconds of one optimizer step's passes, over all epochs: every trainer waits for the slowest."""
    longest = 0.0
    models = int(job.passes.policy) + bool(job.passes.critic)
    for group, factor in enumerate(slow):
        own = _rows(job, rows[group :: job.groups])
        update = job.passes.update(own, job.machine, job.pace)
        gathers = job.passes.epochs * models * 3 * own.passes  # forward, backward, and the sum of gradients
        longest = max(longest, factor * _with_communication(job, update, gathers))
    return longest


def _with_communication(job: ClusterJob, seconds: float, passes: float) -> float:
    """Seconds of passes on the GPUs of a group, with their communication."""
    return max(seconds / job.trainer_tensor, passes * job.gather) + passes * job.exposed


# -- samplers ---------------------------------------------------------------------------------------------------------


def _rollout(job: ClusterJob, lengths: Sequence[int], rng: random.Random) -> tuple[float, int, int]:
    """`(seconds, tokens sampled, tokens lost)` of all samplers; answers to one prompt stay together."""
    shares: list[list[int]] = [[] for _ in range(job.replicas)]
    for place, start in enumerate(range(0, len(lengths), job.samples)):
        shares[place % job.replicas] += lengths[start : start + job.samples]
    slow = [job.trouble.slowness(rng) for _ in shares]
    work = [streamed(job, share) if job.partial else decode(job, share) for share in shares]
    seconds = [each.seconds * factor for each, factor in zip(work, slow, strict=True)]
    lost = 0
    for place, each in enumerate(work):
        at = _failure(job, seconds[place], rng)
        if at is None:
            continue
        unfinished = [length for when, length in each.ends if when * slow[place] > at]
        lost += round(each.tokens * at / seconds[place]) - sum(n for when, n in each.ends if when * slow[place] <= at)
        seconds[place] = at
        again = decode(job, unfinished).seconds
        helper = min((n for n in range(len(work)) if n != place), key=lambda n: seconds[n], default=place)
        seconds[helper] = max(seconds[helper], at + job.trouble.recovery) + again
    tokens = sum(each.tokens for each in work)
    return max(seconds) + job.pace.call, tokens + max(0, lost), max(0, lost)


def _failure(job: ClusterJob, seconds: float, rng: random.Random) -> float | None:
    """When a sampler fails during that time, if it does."""
    rate = job.trouble.failures_per_hour * job.sampler_tensor / 3600.0
    if not rate or not seconds:
        return None
    at = rng.expovariate(rate)
    return at if at < seconds else None


def _reading(job: ClusterJob, rows: int) -> float:
    tokens = rows * job.prompt_tokens / job.samples
    return reading_seconds(job.passes.shape, tokens, job.prompt_tokens, job.machine, job.pace, job.sampler_tensor)


def reading_of(job: ClusterJob) -> float:
    """Seconds in which each sampler reads its prompts."""
    return _reading(job, -(-job.rows // job.replicas))


def decode(job: ClusterJob, lengths: Sequence[int]) -> Decoded:
    """Decode answers of these lengths on one sampler, with continuous batching."""
    queue = list(reversed(lengths))
    slots = min(job.slots, len(queue))
    live: list[int] = []  # a heap of the steps at which answers end
    sizes: dict[int, list[int]] = {}  # lengths of the answers that end there
    ends: list[tuple[float, int]] = []
    now, seconds, context = 0, 0.0, 0.0
    while queue or live:
        free = slots - len(live)
        if queue and (not live or free * REFILL >= slots):
            admitted = [queue.pop() for _ in range(min(free, len(queue)))]
            for length in admitted:
                heapq.heappush(live, now + length)
                sizes.setdefault(now + length, []).append(length)
            context += len(admitted) * job.prompt_tokens
            seconds += _reading(job, len(admitted))
        steps = live[0] - now
        middle = context + len(live) * steps / 2
        seconds += steps * job.decoder.step(job.machine, job.pace, len(live), middle, job.sampler_tensor)
        context += len(live) * steps
        now += steps
        while live and live[0] == now:
            heapq.heappop(live)
        for length in sizes.pop(now):
            ends.append((seconds, length))
            context -= job.prompt_tokens + length
    return Decoded(seconds, sum(lengths), tuple(ends))


def streamed(job: ClusterJob, lengths: Sequence[int]) -> Decoded:
    """Decode answers on one sampler whose slots stay full: other answers take the places of ended ones."""
    if not lengths:
        return Decoded(0.0, 0)
    tokens = sum(lengths)
    slots = min(job.slots, len(lengths))
    context = slots * (job.prompt_tokens + sum(length**2 for length in lengths) / tokens / 2)
    step = job.decoder.step(job.machine, job.pace, slots, context, job.sampler_tensor)
    seconds = tokens / slots * step + _reading(job, len(lengths))
    return Decoded(seconds, tokens, tuple((seconds * (n + 1) / len(lengths), each) for n, each in enumerate(lengths)))
