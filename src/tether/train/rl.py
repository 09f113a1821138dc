"""Reinforcement learning from rollouts: one loop for every algorithm, its timers and its per-token statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tether.algorithms.algorithm import Algorithm, Coefficients, Controllers, ExtraGradient, TokenObjective
from tether.algorithms.objectives import GSPO, Clip, PolicyObjective
from tether.data.examples import DataOrder
from tether.data.rows import Collated, collate
from tether.device_transfer import brought
from tether.errors import Diverged
from tether.learner.batching import evaluate_tokens
from tether.learner.learner import Learner
from tether.learner.ranks import ONE, Codec, Ranks
from tether.mask_cache import true_positions
from tether.models.roles import Roles
from tether.models.shared_backbone import SharedBackbone
from tether.ops.kl import log_ratio
from tether.protocols import RewardFn, RolloutEngine, Sampling, StepOutcome
from tether.rewards.scoring import failure_errors, part_metrics, score_rollouts
from tether.rollout.ahead import RolloutQueue, RolloutRequest, staleness
from tether.rollout.native import check_rollouts
from tether.seeds import derive_seed
from tether.train.dynamic_sampling import refill
from tether.types import (
    EvaluatedBatch,
    Experience,
    Loss,
    Metrics,
    Prompt,
    Rollout,
    Score,
    TokenBatch,
    TokenOutputs,
    extend,
)

Heartbeat = Callable[[str], None]
"""Called as a phase starts, with its name, such as `rollout, step 12`."""


@dataclass(frozen=True)
class RLParts:
    """The independent parts of a run."""

    algorithm: Algorithm
    roles: Roles
    learner: Learner
    engine: RolloutEngine
    reward: RewardFn
    prompts: DataOrder[Prompt]
    sampling: Sampling
    prompts_per_step: int
    samples_per_prompt: int
    max_failure_rate: float
    max_skipped: int
    pad_id: int
    seed: int
    steps: int
    ptx: Callable[[int], ExtraGradient] | None = None  # for an iteration, what is mixed into each of its steps
    held_out: Sequence[Prompt] = ()
    evaluate_every: int = 0
    shared: SharedBackbone | None = None  # layers that remember what they were run on
    top_logprobs: int = 0  # most probable tokens to keep beside each sampled one
    top_logprobs_every: int = 1  # in steps; 0: never
    queue: RolloutQueue = field(default_factory=RolloutQueue)  # what was asked for, ahead of the step that takes it
    dynamic_sampling_rounds: int = 0  # further rounds of sampling in place of groups without spread
    reference_digest: str = ""  # of the weights of a reference other than the policy at the start
    exact: bool = False  # `model.numerics`: every step compares the sampler's and the trainer's log-probs


@dataclass(frozen=True, kw_only=True)
class StepResult(StepOutcome):
    """The outcome of one iteration, and the KL controllers after it."""

    experience: Experience  # pyright: ignore[reportGeneralTypeIssues] (by keyword, so it needs no default)
    ratios: Tensor  # pyright: ignore[reportGeneralTypeIssues]
    controllers: Controllers


def _nothing(_: str) -> None:
    """Ignore the phase."""


def train_rl(
    parts: RLParts,
    *,
    start: int = 0,
    controllers: Controllers | None = None,
    stop: Callable[[], bool] = lambda: False,
    heartbeat: Heartbeat = _nothing,
) -> Iterator[StepResult]:
    """Sample, score, evaluate, compute advantages, update; repeat. Ends early, between steps, once `stop()` is true.

    To resume a run, pass the number of steps it had taken and the controllers after them.
    """
    controllers = controllers or parts.algorithm.controllers
    for step in range(start, parts.steps):
        parts.learner.check_progress(parts.max_skipped)
        if stop():
            return
        parts.learner.set_progress((step + 0.5) / parts.steps)  # its middle: no step has rate 0
        if parts.shared is not None:
            parts.shared.clear()  # an iteration owes nothing to the ones before it, so that any may be the first
        before = evaluate_held_out(parts) if step == 0 and parts.evaluate_every else {}
        result = rl_step(parts, step, controllers, heartbeat)
        controllers = result.controllers
        after = evaluate_held_out(parts) if _evaluates(parts, step) else {}
        result.metrics.update({f"start/{name}": value for name, value in before.items()} | after)
        yield result
    parts.learner.check_progress(parts.max_skipped)


def _evaluates(parts: RLParts, step: int) -> bool:
    return bool(parts.evaluate_every) and ((step + 1) % parts.evaluate_every == 0 or step + 1 == parts.steps)


def evaluate_held_out(parts: RLParts) -> dict[str, float]:
    """Scores and lengths of answers to held-out prompts, always with the same random numbers.

    Scores that are missing or not finite are left out; where every one is, there is no mean.
    """
    if not parts.held_out:
        return {}
    rollouts = parts.engine.generate(
        parts.held_out, parts.sampling, samples_per_prompt=1, seed=derive_seed(parts.seed, "held-out")
    )
    check_rollouts(parts.engine, rollouts, parts.held_out, 1)
    scores = score(parts, rollouts)
    usable = [score.value for score in scores if score.usable]
    return {
        **({"held_out/score": sum(usable) / len(usable)} if usable else {}),
        "held_out/length": sum(rollout.response_length for rollout in rollouts) / len(rollouts),
        "held_out/ended": sum(rollout.finish == "stop" for rollout in rollouts) / len(rollouts),
    }


SCORES = Codec[list[Score]](
    lambda scores: ([[score.value, dict(score.parts), score.valid, score.error] for score in scores], {}),
    lambda value, _: [Score(*score) for score in value],
)


def score(parts: RLParts, rollouts: Sequence[Rollout]) -> list[Score]:
    """One score for each rollout. With several ranks the reward runs on rank 0 alone."""
    return parts.learner.ranks.first(
        lambda: score_rollouts(parts.reward, rollouts, max_failure_rate=parts.max_failure_rate), SCORES
    )


def rl_step(parts: RLParts, step: int, controllers: Controllers, heartbeat: Heartbeat = _nothing) -> StepResult:
    """One iteration: rollout, scores, evaluation, update."""
    algorithm, learner, phases = parts.algorithm, parts.learner, Timers(parts.learner.device)
    coefficients = controllers.coefficients()

    def begin(phase: str) -> None:
        heartbeat(f"{phase}, step {step}")
        phases.begin(phase)

    begin("rollout")
    rollouts = parts.queue.take(step, parts.steps, partial(rollout_request, parts), parts.engine, learner.ranks)
    phases.hold_beside(parts.engine.cache_bytes)
    parts.engine.release()
    begin("scores")
    scores = score(parts, rollouts)
    refills: dict[str, float] = {}
    if parts.dynamic_sampling_rounds:
        again = partial(sample_again, parts, step, begin)
        rounds = parts.dynamic_sampling_rounds
        rollouts, scores, refills = refill((rollouts, scores), again, prompts=parts.prompts, step=step, rounds=rounds)
    made = collate(
        rollouts,
        scores,
        pad_id=parts.pad_id,
        temperature=parts.sampling.temperature,
        need_groups=algorithm.needs_groups,
    )
    warming = algorithm.warmup_at(step) is not None
    with learner.training_only("critic") if warming else nullcontext():
        begin("evaluation")
        evaluated = evaluate_batch(parts, step, made.batch)
        begin("update")
        experience, sums = algorithm.advantages(evaluated, coefficients.reference, coefficients.baseline)
        stats = TokenStats(experience, learner.ranks)
        objective = algorithm.objective_at(step, coefficients)
        sums.merge(update(parts, step, stats, objective))
    compared = check_exact(parts, step, evaluated, stats) if parts.exact else {}
    metrics = sums.values() | made.dropped | part_metrics(scores) | refills
    metrics |= step_metrics(parts, step, made, coefficients)
    metrics |= phases.metrics() | compared
    if warming:  # the policy has not moved, so the controllers have nothing to react to
        metrics["critic_warmup"] = 1.0
    else:
        controllers = controllers.after(
            kl_reference=metrics.get("kl_ref_k3"),
            approx_kl=metrics.get("approx_kl_after"),
            samples=len(made.batch),
            mean_return=metrics.get("mean_return"),
        )
    return StepResult(
        step,
        metrics,
        experience=experience,
        rollouts=made.rollouts,
        scores=made.scores,
        ratios=stats.ratios(),
        clipped=stats.clipped(objective),
        reward_errors=tuple(failure_errors(scores)),
        controllers=controllers,
    )


def check_exact(parts: RLParts, step: int, evaluated: EvaluatedBatch, stats: TokenStats) -> dict[str, float]:
    """How many log-probs were compared, and how many differ in any bit, which ends the run.

    Compared are old and sampler, where the policy was evaluated, and old and new in the update's first pass, before the
    policy has moved. The two are one where the sampler's log-probs were taken for old.
    """
    compared, unequal = stats.first_pass()
    if parts.queue.lag == 0:
        unequal += int(((evaluated.old_logprobs != evaluated.untruncated_logprobs) & evaluated.response_mask).sum())
        evaluated_too = evaluated.entropy is not None
        compared = int(evaluated.response_mask.sum()) if evaluated_too else compared
    if unequal:
        raise Diverged(
            f"model.numerics is exact, and {unequal} log-probs of step {step} differ between sampler and trainer: the "
            "processor's library does not keep one order of sums here. Nothing of this step was recorded; set "
            "model.numerics to fast"
        )
    return {"logprob_compared": float(compared), "logprob_unequal": 0.0}


def rollout_request(parts: RLParts, step: int) -> RolloutRequest:
    """What step `step` asks the engine for."""
    prompts = parts.prompts.take(step * parts.prompts_per_step, parts.prompts_per_step)
    seed = derive_seed(parts.seed, "rollout", step)
    return RolloutRequest(step, prompts, parts.sampling, parts.samples_per_prompt, seed)


def evaluate_batch(parts: RLParts, step: int, batch: TokenBatch) -> EvaluatedBatch:
    """The log-probs, values and entropy of the roles, before the update of `step`."""
    learner, every = parts.learner, parts.top_logprobs_every
    return evaluate_tokens(
        batch,
        parts.roles,
        minibatch_size=parts.algorithm.minibatch_size,
        micro_batch_tokens=learner.micro_batch_tokens,
        device=learner.device,
        shrink_micro_batch=learner.shrink_micro_batch,
        top_tokens=parts.top_logprobs if every and step % every == 0 else 0,
        ranks=learner.ranks,
        elsewhere=learner.elsewhere,
    )


def step_metrics(parts: RLParts, step: int, made: Collated, coefficients: Coefficients) -> dict[str, float]:
    """The coefficients of a step, its numbers of tokens and, with a lag, how old its answers are."""
    metrics = {"kl_coef": coefficients.reference} if parts.algorithm.needs_reference else {}
    metrics |= {"penalty_coef": coefficients.old} if coefficients.old else {}
    counted = {"learned": made.batch.attention_mask, "sampled": made.batch.response_mask}
    metrics |= {f"tokens/{name}": float(mask.sum()) for name, mask in counted.items()}
    return metrics | ({"staleness": staleness(made.rollouts, step)} if parts.queue.lag else {})


def sample_again(
    parts: RLParts, step: int, begin: Callable[[str], None], prompts: Sequence[Prompt], number: int
) -> tuple[list[Rollout], list[Score]]:
    """The answers of a further round of dynamic sampling, and their scores."""
    begin("rollout")
    rollouts = parts.engine.generate(
        prompts,
        parts.sampling,
        samples_per_prompt=parts.samples_per_prompt,
        seed=derive_seed(parts.seed, "rollout", step, number),
    )
    check_rollouts(parts.engine, rollouts, prompts, parts.samples_per_prompt)
    parts.engine.release()
    begin("scores")
    rollouts = [replace(rollout, step=step) for rollout in rollouts]
    return rollouts, score(parts, rollouts)


def update(parts: RLParts, step: int, stats: TokenStats, objective: TokenObjective) -> Metrics:
    """Learn from the experience of one iteration, and collect `stats`. Critic warm-up mixes in no PTX gradient."""
    generator = torch.Generator().manual_seed(derive_seed(parts.seed, "minibatches", step))
    warming = parts.algorithm.warmup_at(step) is not None
    extra = parts.ptx(step) if parts.ptx is not None and not warming else None
    update_rule = parts.algorithm.update_at(step)
    return update_rule(parts.learner, stats.experience, stats.watching(objective), generator, extra)


GIB = 2**30


class Timers:
    """Seconds and, on CUDA, peak memory of consecutive phases: each starts where the one before it ends.

    A phase that is entered again adds to its seconds.

    Starting a phase resets the peak statistics of the device. To measure an iteration from outside, read `memory/...`
    in its metrics, not `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._began = self._phase_began = 0.0
        self._name: str | None = None
        self._beside = 0
        self._found: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """End the current phase, and start another."""
        self._end()
        if self._name is None:
            self._began = self._phase_began
        self._name = name
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def hold_beside(self, size: int) -> None:
        """Add device memory that torch does not allocate, in bytes, to the current phase."""
        self._beside = size

    def _end(self) -> None:
        now = time.perf_counter()
        if self._name is not None:
            seconds = f"seconds/{self._name}"
            self._found[seconds] = self._found.get(seconds, 0.0) + now - self._phase_began
            if self._device is not None:
                held = torch.cuda.max_memory_allocated(self._device) + self._beside
                memory = f"memory/{self._name}"
                self._found[memory] = max(self._found.get(memory, 0.0), held / GIB)
        self._phase_began = now
        self._beside = 0

    def metrics(self) -> dict[str, float]:
        """End the last phase; seconds and peak GiB of each, and the GiB still allocated (`memory/kept`)."""
        self._end()
        self._name = None
        self._found["seconds/step"] = self._phase_began - self._began
        if self._device is not None:
            self._found["memory/kept"] = torch.cuda.memory_allocated(self._device) / GIB
        return self._found


@dataclass(frozen=True, kw_only=True)
class NumberedExperience(Experience):
    """Experience whose rows have a number, so that a micro-batch can be traced back to the batch."""

    places: Tensor  # (B,) int64


SEEN = Codec[tuple[Tensor, Tensor]](
    lambda seen: (None, {"rows": seen[0], "logprobs": seen[1]}),
    lambda _, columns: (columns["rows"], columns["logprobs"]),
)


class TokenStats:
    """The log-prob of each token in the last pass of the update over it; the old log-prob where there was no pass.

    A pass comes before the optimizer step of its gradient, so these are the values that the token was last learned
    with, not those after the last step: these would cost one more forward pass.
    """

    def __init__(self, experience: Experience, ranks: Ranks = ONE) -> None:
        self.ranks = ranks
        self.passes = 0  # over a batch, on any rank
        places = torch.arange(len(experience))
        self.experience = extend(experience, NumberedExperience, places=places)
        self._first: list[Tensor] = []  # (2,) tokens of each micro-batch of the first pass: all, and those unequal
        self._seen: list[tuple[int, Tensor, Tensor, Tensor]] = []  # pass, rows, masks and log-probs, on their device
        self._logprobs = experience.old_logprobs.clone()  # (B, T) without those

    def watching(self, objective: TokenObjective) -> TokenObjective:
        """The objective, whose calls are recorded here."""
        return _Watched(objective, self)

    def take(self, outputs: TokenOutputs, batch: NumberedExperience) -> None:
        """Record the log-probs of a micro-batch; they stay on the device until they are read."""
        self._seen.append((self.passes, batch.places, batch.response_mask, outputs.logprobs.detach()))
        if self.passes == 1:
            mask = batch.response_mask
            self._first.append(torch.stack((mask.sum(), ((outputs.logprobs != batch.old_logprobs) & mask).sum())))

    def first_pass(self) -> tuple[int, int]:
        """Tokens of the update's first pass over a batch, and those whose log-prob was not the old one to the bit."""
        counts = torch.stack(self._first).sum(dim=0).tolist() if self._first else (0, 0)
        return int(counts[0]), int(counts[1])

    @property
    def logprobs(self) -> Tensor:
        """(B, T) log-probs of the last passes."""

        def seen_here() -> list[tuple[int, tuple[Tensor, Tensor]]]:
            rows = brought([places for _, places, _, _ in self._seen])
            answers = brought(
                [found.flatten().index_select(0, true_positions(mask)) for _, _, mask, found in self._seen]
            )
            return list(zip((each[0] for each in self._seen), zip(rows, answers, strict=True), strict=True))

        for rows, found in self.ranks.merged(seen_here, SEEN):
            seen = self._logprobs[rows]  # wider than the micro-batch, which is trimmed; the masks pick the same tokens
            seen[self.experience.response_mask[rows]] = found.to(seen.dtype)
            self._logprobs[rows] = seen
        self._seen.clear()
        return self._logprobs

    def ratios(self) -> Tensor:
        """(B, T) new / old, bounded as in the loss; 1 off the answers."""
        difference = log_ratio(self.logprobs, self.experience.old_logprobs)
        return difference.masked_fill(~self.experience.response_mask, 0.0).exp()

    def clipped(self, objective: TokenObjective) -> Tensor | None:
        """(B, T) bool, whether the clip had removed the token's gradient; None where the objective has no clip."""
        surrogate = objective.surrogate if isinstance(objective, PolicyObjective) else None
        if not isinstance(surrogate, Clip | GSPO):
            return None
        return surrogate.cases(self.logprobs, self.experience).clipped & self.experience.response_mask


@dataclass(frozen=True)
class _Watched:
    objective: TokenObjective
    stats: TokenStats

    def size(self, batch: Experience) -> float:
        """The size of the objective; the learner asks for it once in each pass over a batch."""
        self.stats.passes += 1
        return self.objective.size(batch)

    def __call__(self, outputs: TokenOutputs, batch: Experience) -> Loss:
        """The loss of the objective."""
        if isinstance(batch, NumberedExperience):
            self.stats.take(outputs, batch)
        return self.objective(outputs, batch)
