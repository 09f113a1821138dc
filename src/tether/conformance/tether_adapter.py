"""The adapter for Tether itself: runs the functions, objectives and update rules that training uses."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tether.algorithms.estimators import GAE, NStep, PolicyGradientWeights
from tether.algorithms.objectives import DPOObjective, RewardModelObjective, SFTObjective
from tether.conformance.adapter import Grid, Mask, Row
from tether.conformance.group_steps import cispo_loss, dynamic_sampling, grpo_step, gspo_loss
from tether.conformance.two_parameters import early_stop, ppo_trace, trpo_step
from tether.ops import advantages, kl, logprobs, losses, masks, trust_region
from tether.ops.advantages import MovingAverage
from tether.ops.losses import Aggregation
from tether.protocols import AdvantageEstimator
from tether.types import PairBatch, RankedBatch, ScoreOutputs, Sequences, TokenOutputs


def adapter(dtype: str) -> TetherAdapter:
    """The adapter in "float32" or "float64"."""
    return TetherAdapter(getattr(torch, dtype))


class TetherAdapter:
    """See `tether.conformance.adapter.Adapter` for the meaning of each method."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def floats(self, values: Any, *, gradient: bool = False) -> Tensor:
        """A tensor in the adapter's precision."""
        return torch.tensor(values, dtype=self.dtype, requires_grad=gradient)

    def final(self, values: Row | None) -> Tensor | None:
        """Final values, where there are any."""
        return None if values is None else self.floats(values)

    def with_gradient(self, losses: Tensor, by: Tensor) -> dict[str, Any]:
        """Per-token losses and their gradient."""
        (gradient,) = torch.autograd.grad(losses.sum(), by)
        return {"loss": losses.detach(), "grad": gradient}

    # -- masks and statistics -------------------------------------------------------------------------------------
    def position_ids(self, attention_mask: Mask) -> dict[str, Any]:
        return {"positions": masks.position_ids(torch.tensor(attention_mask))}

    def response_mask(
        self, prompt_lengths: list[int], response_lengths: list[int], width: int, side: Any
    ) -> dict[str, Any]:
        lengths = torch.tensor(prompt_lengths), torch.tensor(response_lengths)
        attention, response = masks.masks_from_lengths(*lengths, width, side)
        return {"mask": response, "attention_mask": attention}

    def masked_mean(self, x: Grid, mask: Mask) -> dict[str, Any]:
        return {"mean": masks.masked_mean(self.floats(x), torch.tensor(mask))}

    def masked_variance(self, x: Grid, mask: Mask, unbiased: bool) -> dict[str, Any]:
        return {"variance": masks.masked_variance(self.floats(x), torch.tensor(mask), unbiased=unbiased)}

    def whiten(self, x: Grid, mask: Mask, shift_mean: bool, unbiased: bool, epsilon: float) -> dict[str, Any]:
        options = {"shift_mean": shift_mean, "unbiased": unbiased, "epsilon": epsilon}
        return {"whitened": masks.whiten(self.floats(x), torch.tensor(mask), **options)}

    # -- log-probabilities and KL ---------------------------------------------------------------------------------
    def token_logprobs(self, logits: list[Grid], tokens: list[list[int]], temperature: float) -> dict[str, Any]:
        hidden, ids = self.floats(logits), torch.tensor(tokens)
        everywhere = torch.ones_like(ids, dtype=torch.bool)
        everywhere[:, 0] = False
        identity = torch.eye(hidden.shape[-1], dtype=self.dtype)  # the hidden states already are the logits
        found, entropy = logprobs.token_logprobs(
            hidden, identity, ids, everywhere, temperature=temperature, chunk_elements=2 * hidden.shape[-1]
        )
        return {"logprobs": found, "entropy": entropy}

    def kl_estimate(self, logprobs: Grid, other_logprobs: Grid, estimator: Any) -> dict[str, Any]:
        return {"kl": kl.kl_estimate(self.floats(logprobs), self.floats(other_logprobs), estimator)}

    def exact_kl(self, logits: Grid, other_logits: Grid) -> dict[str, Any]:
        p, q = (torch.log_softmax(self.floats(x), dim=-1) for x in (logits, other_logits))
        return {"kl": kl.exact_kl(p, q)}

    # -- rewards --------------------------------------------------------------------------------------------------
    def token_rewards(self, scores: Row, kl: Grid, mask: Mask, kl_coef: float) -> dict[str, Any]:
        paid = advantages.token_rewards(self.floats(scores), self.floats(kl), torch.tensor(mask), kl_coef=kl_coef)
        return {"rewards": paid}

    def missing_eos_penalty(self, scores: Row, truncated: list[bool], penalty: float | None) -> dict[str, Any]:
        return {"scores": advantages.missing_eos_penalty(self.floats(scores), torch.tensor(truncated), penalty)}

    # -- returns and advantages -----------------------------------------------------------------------------------
    def total_return(self, rewards: Grid, mask: Mask, gamma: float) -> dict[str, Any]:
        return {"returns": advantages.total_return(self.floats(rewards), torch.tensor(mask), gamma=gamma)}

    def reward_to_go(self, rewards: Grid, mask: Mask, gamma: float) -> dict[str, Any]:
        return {"returns": advantages.reward_to_go(self.floats(rewards), torch.tensor(mask), gamma=gamma)}

    def td_residuals(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, final_values: Row | None
    ) -> dict[str, Any]:
        found = advantages.td_residuals(
            self.floats(rewards),
            self.floats(values),
            torch.tensor(mask),
            gamma=gamma,
            final_values=self.final(final_values),
        )
        return {"residuals": found}

    def n_step(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, n: int, final_values: Row | None
    ) -> dict[str, Any]:
        found = advantages.n_step(
            self.floats(rewards),
            self.floats(values),
            torch.tensor(mask),
            gamma=gamma,
            n=n,
            final_values=self.final(final_values),
        )
        return {"advantages": found}

    def gae(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, lam: float, final_values: Row | None
    ) -> dict[str, Any]:
        found, returns = advantages.gae(
            self.floats(rewards),
            self.floats(values),
            torch.tensor(mask),
            gamma=gamma,
            lam=lam,
            final_values=self.final(final_values),
        )
        return {"advantages": found, "returns": returns}

    def n_step_returns(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, n: int, final_values: Row | None
    ) -> dict[str, Any]:
        return self.estimated(NStep(gamma, n), rewards, values, mask, final_values)

    def decoupled_gae(
        self,
        rewards: Grid,
        values: Grid,
        mask: Mask,
        gamma: float,
        lam: float,
        critic_lam: float,
        final_values: Row | None,
    ) -> dict[str, Any]:
        return self.estimated(GAE(gamma, lam, critic_lam), rewards, values, mask, final_values)

    def length_adaptive_gae(
        self,
        rewards: Grid,
        values: Grid,
        mask: Mask,
        gamma: float,
        alpha: float,
        critic_lam: float,
        final_values: Row | None,
    ) -> dict[str, Any]:
        lambdas = advantages.length_adaptive_lambda(torch.tensor(mask), alpha=alpha, dtype=self.dtype)
        estimate = GAE(gamma, 0.95, critic_lam, lam_alpha=alpha)
        return {"lambdas": lambdas} | self.estimated(estimate, rewards, values, mask, final_values)

    def estimated(
        self, estimate: AdvantageEstimator, rewards: Grid, values: Grid, mask: Mask, final_values: Row | None
    ) -> dict[str, Any]:
        """The advantages and returns of an estimator that reads values."""
        columns = {"values": self.floats(values), "final_values": self.final(final_values)}
        rows = torch.zeros(len(rewards))
        found, returns = estimate(self.floats(rewards), torch.tensor(mask), group_ids=rows, **columns)
        return {"advantages": found, "returns": returns}

    def batch_mean_weights(self, rewards: Grid, mask: Mask, gamma: float, weighting: Any) -> dict[str, Any]:
        weights, sampled = self.reinforce_weights(rewards, None, mask, gamma, 1.0, weighting), torch.tensor(mask)
        baseline = advantages.mean_return(weights["weights"], sampled)
        return {"baseline": baseline, "weights": advantages.less_baseline(weights["weights"], sampled, baseline)}

    def moving_average(self, decay: float, means: Row) -> dict[str, Any]:
        average, found = MovingAverage(decay), [0.0]
        for mean in means:
            average = average.after(mean)
            found.append(average.value)
        return {"baselines": found}

    def reinforce_weights(
        self, rewards: Grid, values: Grid | None, mask: Mask, gamma: float, lam: float, weighting: Any
    ) -> dict[str, Any]:
        estimate = PolicyGradientWeights(weighting, gamma, lam)
        weights, _ = estimate(
            self.floats(rewards),
            torch.tensor(mask),
            values=None if values is None else self.floats(values),
            final_values=None,
            group_ids=torch.zeros(len(rewards)),
        )
        return {"weights": weights}

    def group_advantages(
        self, scores: Row, group_ids: list[int], scale_by_std: bool, unbiased: bool, epsilon: float
    ) -> dict[str, Any]:
        options = {"scale_by_std": scale_by_std, "unbiased": unbiased, "epsilon": epsilon}
        return {"advantages": advantages.group_advantages(self.floats(scores), torch.tensor(group_ids), **options)}

    def leave_one_out(self, scores: Row, group_ids: list[int]) -> dict[str, Any]:
        return {"advantages": advantages.leave_one_out(self.floats(scores), torch.tensor(group_ids))}

    # -- objectives -----------------------------------------------------------------------------------------------
    def reinforce_loss(self, logprobs: Grid, advantages: Grid) -> dict[str, Any]:
        new = self.floats(logprobs, gradient=True)
        return self.with_gradient(losses.reinforce_loss(new, self.floats(advantages)), new)

    def unclipped_loss(self, logprobs: Grid, old_logprobs: Grid, advantages: Grid) -> dict[str, Any]:
        new = self.floats(logprobs, gradient=True)
        per_token = losses.unclipped_loss(new, self.floats(old_logprobs), self.floats(advantages))
        return self.with_gradient(per_token, new)

    def clip_loss(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        advantages: Grid,
        mask: Mask,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None,
    ) -> dict[str, Any]:
        new, sampled = self.floats(logprobs, gradient=True), torch.tensor(mask)
        columns = new, self.floats(old_logprobs), self.floats(advantages)
        options = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        cases = losses.clip_cases(*columns, **options)
        fractions = {
            case.name: masks.masked_mean(getattr(cases, case.name).to(self.dtype), sampled)
            for case in dataclasses.fields(cases)
        }
        return self.with_gradient(losses.clip_loss(*columns, **options), new) | fractions

    def gspo_loss(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        advantages: Row,
        mask: Mask,
        clip_low: float,
        clip_high: float,
    ) -> dict[str, Any]:
        return gspo_loss(self.dtype, logprobs, old_logprobs, advantages, mask, clip_low, clip_high)

    def cispo_loss(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        advantages: Grid,
        mask: Mask,
        clip_low: float,
        clip_high: float,
    ) -> dict[str, Any]:
        return cispo_loss(self.dtype, logprobs, old_logprobs, advantages, mask, clip_low, clip_high)

    def kl_penalty_loss(
        self, logprobs: Grid, old_logprobs: Grid, advantages: Grid, beta: float, estimator: Any
    ) -> dict[str, Any]:
        new = self.floats(logprobs, gradient=True)
        per_token = losses.kl_penalty_loss(
            new, self.floats(old_logprobs), self.floats(advantages), beta=beta, estimator=estimator
        )
        return self.with_gradient(per_token, new)

    def value_loss(self, values: Grid, old_values: Grid, returns: Grid, clip: float | None) -> dict[str, Any]:
        new = self.floats(values, gradient=True)
        return self.with_gradient(losses.value_loss(new, self.floats(old_values), self.floats(returns), clip=clip), new)

    # -- aggregation and updates ----------------------------------------------------------------------------------
    def aggregate(self, losses: Grid, mask: Mask, mode: Any, fixed_length: int | None) -> dict[str, Any]:
        mean, sampled = Aggregation(mode, fixed_length), torch.tensor(mask)
        return {"loss": mean.total(self.floats(losses), sampled) / mean.size(sampled)}

    def aggregate_micro_batches(
        self, losses: Grid, mask: Mask, mode: Any, fixed_length: int | None, micro_batches: list[list[int]]
    ) -> dict[str, Any]:
        mean, sampled, values = Aggregation(mode, fixed_length), torch.tensor(mask), self.floats(losses)
        size = mean.size(sampled)
        parts = [mean.total(values[rows], sampled[rows]) / size for rows in micro_batches]
        return {"loss": torch.stack(parts).sum()}

    # -- groups of answers ----------------------------------------------------------------------------------------
    def dr_grpo(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        mask: Mask,
        scores: Row,
        group_ids: list[int],
        clip_low: float,
        clip_high: float,
        fixed_length: int,
    ) -> dict[str, Any]:
        settings: dict[str, Any] = {"scale_by_std": False, "clip_range": clip_low, "clip_range_high": clip_high}
        settings["aggregation"] = {"over": "fixed", "fixed_length": fixed_length}
        return grpo_step(self.dtype, {"grpo": settings}, logprobs, old_logprobs, mask, scores, group_ids)

    def dapo(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        mask: Mask,
        scores: Row,
        group_ids: list[int],
        clip_low: float,
        clip_high: float,
        epsilon: float,
        max_length: int,
        buffer: int,
        penalty: float,
    ) -> dict[str, Any]:
        settings: dict[str, Any] = {"std_epsilon": epsilon, "clip_range": clip_low, "clip_range_high": clip_high}
        settings["aggregation"] = {"over": "token"}
        recipe: dict[str, Any] = {"grpo": settings, "reward": {"overlong_buffer": buffer, "overlong_penalty": penalty}}
        recipe["rollout"] = {"samples_per_prompt": 2, "max_new_tokens": max_length}
        return grpo_step(self.dtype, recipe, logprobs, old_logprobs, mask, scores, group_ids)

    def overlong_penalty(self, lengths: list[int], max_length: int, buffer: int) -> dict[str, Any]:
        return {"penalties": advantages.overlong_penalty(torch.tensor(lengths), max_length=max_length, buffer=buffer)}

    def dynamic_sampling(self, groups: list[Row], rounds: list[list[Row]]) -> dict[str, Any]:
        return dynamic_sampling(groups, rounds)

    def early_stop(self, minibatches: list[dict[str, Any]], limit: float) -> dict[str, Any]:
        return early_stop(minibatches, limit, self.dtype)

    def adaptive_kl(self, coef: float, target: float, kls: Row) -> dict[str, Any]:
        return {"coefs": _follow(kl.AdaptiveKL(coef, target), kls, [1] * len(kls))}

    def proportional_kl(
        self, coef: float, target: float, horizon: float, kls: Row, counts: list[int]
    ) -> dict[str, Any]:
        return {"coefs": _follow(kl.ProportionalKL(coef, target, horizon), kls, counts)}

    # -- preferences and supervised -------------------------------------------------------------------------------
    def dpo_loss(
        self,
        chosen: Row,
        rejected: Row,
        ref_chosen: Row,
        ref_rejected: Row,
        beta: float,
        label_smoothing: float,
    ) -> dict[str, Any]:
        objective = DPOObjective(beta, label_smoothing)
        losses, margins = [], []
        for numbers in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
            # One pair, the rejected answer first: sequences of two tokens, of which the last was sampled.
            new, ref = self.floats([numbers[1::-1]]).T, self.floats([numbers[:1:-1]]).T
            batch = PairBatch(
                **self.rows(2), pair_ids=torch.zeros(2), chosen=torch.tensor([False, True]), ref_logprobs=self.last(ref)
            )
            loss = objective(TokenOutputs(self.last(new), self.last(new)), batch)
            losses.append(float(loss.total / objective.size(batch)))
            margins.append(loss.metrics.mean("margin"))
        return {"loss": losses, "margin": margins}

    def rows(self, count: int) -> dict[str, Any]:
        """`count` sequences of two tokens, of which the last was sampled."""
        ones = torch.ones(count, 2, dtype=torch.bool)
        response = torch.tensor([[False, True]]).repeat(count, 1)
        return {"tokens": ones.long(), "attention_mask": ones, "response_mask": response}

    def last(self, column: Tensor) -> Tensor:
        """(B, 1) numbers on the last of two tokens, with arbitrary values on the other."""
        return torch.cat([torch.full_like(column, 1e3), column], dim=1)

    def ranked(self, scores: Tensor, ranks: list[int], group_ids: list[int]) -> Tensor:
        """The reward model's mean loss over prompts."""
        objective = RewardModelObjective()
        batch = RankedBatch(**self.rows(len(ranks)), ranks=torch.tensor(ranks), group_ids=torch.tensor(group_ids))
        return objective(ScoreOutputs(scores), batch).total / objective.size(batch)

    def pairwise_loss(self, chosen: Row, rejected: Row) -> dict[str, Any]:
        pairs = range(len(chosen))
        scores = self.floats([*chosen, *rejected])
        return {"loss": self.ranked(scores, [0] * len(pairs) + [1] * len(pairs), [*pairs, *pairs])}

    def kwise_loss(self, scores: Row, ranks: list[int], group_ids: list[int]) -> dict[str, Any]:
        return {"loss": self.ranked(self.floats(scores), ranks, group_ids)}

    def sft_loss(self, logprobs: Grid, mask: Mask) -> dict[str, Any]:
        objective, sampled, new = SFTObjective(), torch.tensor(mask), self.floats(logprobs)
        batch = Sequences(tokens=sampled.long(), attention_mask=sampled, response_mask=sampled)
        return {"loss": objective(TokenOutputs(new, new), batch).total / objective.size(batch)}

    # -- whole steps ----------------------------------------------------------------------------------------------
    def conjugate_gradient(self, matrix: Grid, vector: Row, iterations: int) -> dict[str, Any]:
        known = self.floats(matrix)
        solution = trust_region.conjugate_gradient(lambda x: known @ x, self.floats(vector), iterations=iterations)
        return {"solution": solution}

    def ppo_trace(self, setup: dict[str, Any]) -> dict[str, Any]:
        return ppo_trace(setup, self.dtype)

    def trpo_step(self, setup: dict[str, Any]) -> dict[str, Any]:
        return trpo_step(setup, self.dtype)


def _follow(controller: kl.KLController, kls: Row, counts: list[int]) -> Row:
    coefs: Row = []
    for measured, count in zip(kls, counts, strict=True):
        controller = controller.after(measured, count)
        coefs.append(controller.coef)
    return coefs
