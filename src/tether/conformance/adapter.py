"""The contract between the conformance suite and an implementation.

An adapter is any object whose methods have the names and meanings below; missing methods are skipped and listed as not
claimed. Every argument is plain Python: floats, bools, strings, None and nested lists, so that an adapter for any
framework, or for any language with Python bindings, needs only a few lines per method. Results are plain Python too
(numbers or nested lists; anything with `.tolist()` is converted). Where a result has no defined value (padding), the
trace holds `null` and the runner skips it.

`x[b][t]` is about token t of row b. `mask[b][t]` is True where the policy sampled the token and it is trained on. A
method raises `Unsupported` for an argument that it does not offer (a mode, an option): the case then counts as not
claimed, and the report names it. A result that a method leaves out of its dict is not claimed either; the others are
compared.

Make an adapter with `factory(dtype)`, where `dtype` is "float32" or "float64": `--target package.module:factory`.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

Row: TypeAlias = list[float]
Grid: TypeAlias = list[list[float]]
Mask: TypeAlias = list[list[bool]]


class Unsupported(Exception):  # noqa: N818 - a valid answer, not an error
    """The implementation does not offer what this case needs."""


class Adapter(Protocol):
    """Every method that an implementation may claim. The docstrings name the results; `(B,T)` is a grid."""

    # -- masks and statistics -------------------------------------------------------------------------------------
    def position_ids(self, attention_mask: Mask) -> dict[str, Any]:
        """`positions` (B,T): 0 at each row's first real token, counting up over real tokens; undefined on padding."""
        ...

    def response_mask(
        self, prompt_lengths: list[int], response_lengths: list[int], width: int, side: str
    ) -> dict[str, Any]:
        """`mask` and `attention_mask` (B,T) of rows [prompt, response] padded to `width` on `side` ("left"|"right")."""
        ...

    def masked_mean(self, x: Grid, mask: Mask) -> dict[str, Any]:
        """`mean`: over True places."""
        ...

    def masked_variance(self, x: Grid, mask: Mask, unbiased: bool) -> dict[str, Any]:
        """`variance`: over True places, divided by n, or by n - 1 if `unbiased`."""
        ...

    def whiten(self, x: Grid, mask: Mask, shift_mean: bool, unbiased: bool, epsilon: float) -> dict[str, Any]:
        """`whitened` (B,T): (x - m) / sqrt(var + epsilon), plus m again unless `shift_mean`. Undefined off the mask."""
        ...

    # -- log-probabilities ----------------------------------------------------------------------------------------
    def token_logprobs(self, logits: list[Grid], tokens: list[list[int]], temperature: float) -> dict[str, Any]:
        """`logprobs` and `entropy` (B,T), natural log, of softmax(logits / temperature).

        `logits[b][t]` is the model's output *at* token t, that is, for token t + 1; the results are about token t,
        so column 0 is undefined and column t uses logits[b][t-1].
        """
        ...

    # -- KL -------------------------------------------------------------------------------------------------------
    def kl_estimate(self, logprobs: Grid, other_logprobs: Grid, estimator: str) -> dict[str, Any]:
        """`kl` (B,T): per-token estimate of KL(p || q), tokens drawn from p = `logprobs`, q = `other_logprobs`.

        With d = log p - log q: "k1" is d, "k2" is d^2 / 2, "k3" is exp(-d) - 1 + d.
        """
        ...

    def exact_kl(self, logits: Grid, other_logits: Grid) -> dict[str, Any]:
        """`kl` (N,): KL(softmax(logits[i]) || softmax(other_logits[i]))."""
        ...

    # -- rewards --------------------------------------------------------------------------------------------------
    def token_rewards(self, scores: Row, kl: Grid, mask: Mask, kl_coef: float) -> dict[str, Any]:
        """`rewards` (B,T): -kl_coef * kl on True tokens, plus the row's score on its last True token; 0 elsewhere."""
        ...

    def missing_eos_penalty(self, scores: Row, truncated: list[bool], penalty: float | None) -> dict[str, Any]:
        """`scores` (B,): the score, or `penalty` in its place where the answer has no end token; None: no change."""
        ...

    # -- returns and advantages -----------------------------------------------------------------------------------
    # Time runs over sampled tokens only: between two sampled tokens with others between them (tool output), one step
    # passes, and the state after the first is the state before the second. After a row's last sampled token the
    # value is `final_values[b]` where given (an answer cut off), else 0. Results are undefined off the mask.
    def total_return(self, rewards: Grid, mask: Mask, gamma: float) -> dict[str, Any]:
        """`returns` (B,T): sum over k of gamma^k r_k from the row's first sampled token, the same on every token."""
        ...

    def reward_to_go(self, rewards: Grid, mask: Mask, gamma: float) -> dict[str, Any]:
        """`returns` (B,T): G_t = r_t + gamma * G_(t+1)."""
        ...

    def td_residuals(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, final_values: Row | None
    ) -> dict[str, Any]:
        """`residuals` (B,T): r_t + gamma * V_(t+1) - V_t."""
        ...

    def n_step(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, n: int, final_values: Row | None
    ) -> dict[str, Any]:
        """`advantages` (B,T): sum_{k<n} gamma^k r_(t+k) + gamma^n V_(t+n) - V_t, cut off at the row's end.

        Where fewer than n steps remain (m < n), the sum has m terms and gamma^m * final value closes it.
        """
        ...

    def gae(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, lam: float, final_values: Row | None
    ) -> dict[str, Any]:
        """`advantages` and `returns` (B,T): A_t = delta_t + gamma * lam * A_(t+1); returns = A + V."""
        ...

    def n_step_returns(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, n: int, final_values: Row | None
    ) -> dict[str, Any]:
        """`advantages` (B,T) as in `n_step`; `returns` (B,T), the critic's targets: advantages + values."""
        ...

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
        """`advantages` (B,T) of GAE(gamma, lam); `returns` (B,T), the critic's targets: GAE(gamma, critic_lam) + V."""
        ...

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
        """`lambdas` (B,): 1 - 1 / (alpha * True tokens of the row), at least 0; `advantages` (B,T) of GAE with the
        row's lambda; `returns` as in `decoupled_gae`.
        """
        ...

    def batch_mean_weights(self, rewards: Grid, mask: Mask, gamma: float, weighting: str) -> dict[str, Any]:
        """`baseline`: the mean, over rows with a True token, of the row's total return; `weights` (B,T): the "total" or
        "to_go" weight minus it.
        """
        ...

    def moving_average(self, decay: float, means: Row) -> dict[str, Any]:
        """`baselines`: before each step and after the last. The first is 0; each other one is the mean of the earlier
        `means`, of which the latest has weight 1, the one before decay, the one before that decay^2.
        """
        ...

    def reinforce_weights(
        self, rewards: Grid, values: Grid | None, mask: Mask, gamma: float, lam: float, weighting: str
    ) -> dict[str, Any]:
        """`weights` (B,T) on grad log pi.

        "total": total return; "to_go": reward to go; "baselined": reward to go minus V_t; "advantage": GAE(gamma, lam).
        """
        ...

    def group_advantages(
        self, scores: Row, group_ids: list[int], scale_by_std: bool, unbiased: bool, epsilon: float
    ) -> dict[str, Any]:
        """`advantages` (B,): s - group mean, divided by (group std + epsilon) if `scale_by_std`."""
        ...

    def leave_one_out(self, scores: Row, group_ids: list[int]) -> dict[str, Any]:
        """`advantages` (B,): s minus the mean of the *other* scores of its group."""
        ...

    # -- objectives: per-token losses (to be minimized) and their gradient by the new log-probs, both (B,T) ---------
    # The exponent of r, and that of k3, is clamped at 20 from above; beyond it they are constants, with gradient 0.
    def reinforce_loss(self, logprobs: Grid, advantages: Grid) -> dict[str, Any]:
        """`loss`, `grad`: -A log pi."""
        ...

    def unclipped_loss(self, logprobs: Grid, old_logprobs: Grid, advantages: Grid) -> dict[str, Any]:
        """`loss`, `grad`: -r A with r = exp(logprobs - old_logprobs)."""
        ...

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
        """`loss`, `grad`: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); the gradient is 0 where the clip binds.

        With `dual_clip` c > 1, where A < 0: -max(min(...), c A). Also four fractions of the True tokens, by the sign
        of A and the side on which r lies strictly outside [1 - clip_low, 1 + clip_high]: `positive_high`,
        `positive_low`, `negative_high`, `negative_low`; and `clipped`: the fraction of True tokens whose gradient the
        clip (or the dual clip) removed. A = 0 counts in none of them. `loss` and `grad` are undefined off the mask.
        """
        ...

    def gspo_loss(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        advantages: Row,
        mask: Mask,
        clip_low: float,
        clip_high: float,
    ) -> dict[str, Any]:
        """One ratio for a row: s = exp(mean over True tokens of logprobs - old_logprobs), `ratios` (B,).

        `loss` (B,): -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), A (B,); `grad` (B,T): of the sum of `loss`;
        `clipped`: the fraction of rows whose gradient the clip removed.
        """
        ...

    def cispo_loss(
        self,
        logprobs: Grid,
        old_logprobs: Grid,
        advantages: Grid,
        mask: Mask,
        clip_low: float,
        clip_high: float,
    ) -> dict[str, Any]:
        """`loss`, `grad`: -w A log pi with w = clip(r, 1 - clip_low, 1 + clip_high) taken as a constant.

        `clipped`: the fraction of True tokens with w != r. `loss` and `grad` are undefined off the mask.
        """
        ...

    def kl_penalty_loss(
        self, logprobs: Grid, old_logprobs: Grid, advantages: Grid, beta: float, estimator: str
    ) -> dict[str, Any]:
        """`loss`, `grad`: -r A + beta * k(old || new), k the estimator of KL(old || new) on the sampled token.

        With d = old - new: "k1" d, "k2" d^2 / 2, "k3" exp(-d) - 1 + d; the gradient is the estimator's own derivative.
        """
        ...

    def value_loss(self, values: Grid, old_values: Grid, returns: Grid, clip: float | None) -> dict[str, Any]:
        """`loss`, `grad` (by values): (v - R)^2 / 2; with `clip`, the larger of that and the same at
        old + clamp(v - old, -clip, clip), whose gradient is 0 where the clamped branch is strictly larger and binds.
        """
        ...

    # -- aggregation ----------------------------------------------------------------------------------------------
    def aggregate(self, losses: Grid, mask: Mask, mode: str, fixed_length: int | None) -> dict[str, Any]:
        """`loss`: "token": sum over True / number of True; "sequence": mean over rows of each row's mean,
        rows without a True token not counted; "fixed": sum over True / (rows * fixed_length).
        """
        ...

    def aggregate_micro_batches(
        self, losses: Grid, mask: Mask, mode: str, fixed_length: int | None, micro_batches: list[list[int]]
    ) -> dict[str, Any]:
        """`loss`: of the whole batch, by gradient accumulation over the given row sets; equals `aggregate`."""
        ...

    # -- groups of answers, from scores to the loss: `advantages` (B,), `loss`, `grad` (B,T) by the new log-probs ------
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
        """A = score - group mean; the clip loss of every True token, summed and divided by rows * fixed_length."""
        ...

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
        """s = score + penalty * `overlong_penalty` of the row's True tokens; A = (s - group mean) / (group std, n - 1,
        + epsilon); the clip loss of every True token, summed and divided by the number of True tokens.
        """
        ...

    def overlong_penalty(self, lengths: list[int], max_length: int, buffer: int) -> dict[str, Any]:
        """`penalties` (B,): 0 up to max_length - buffer tokens, (max_length - buffer - length) / buffer up to
        max_length, -1 beyond.
        """
        ...

    def dynamic_sampling(self, groups: Grid, rounds: list[Grid]) -> dict[str, Any]:
        """`groups[place]` and `rounds[r][candidate]` are the scores of one group's answers.

        In each round, the first place whose scores are all equal takes the first candidate whose scores are not, and so
        on. `chosen`: [round, candidate] of each place, with round 0 for a place that keeps its group; `missing`: the
        number of places with equal scores before each round and after the last.
        """
        ...

    # -- updates --------------------------------------------------------------------------------------------------
    def early_stop(self, minibatches: list[dict[str, Any]], limit: float) -> dict[str, Any]:
        """`steps`, `stopped`, `kl`: minibatches (`logprobs`, `old_logprobs`, `mask`) are visited in order.

        Before each step the estimate of KL(old || new), the mean of k3 over True tokens, is measured; above `limit`
        the step is not taken and the update ends. `kl` lists the measured values, including the rejected step's.
        """
        ...

    def adaptive_kl(self, coef: float, target: float, kls: Row) -> dict[str, Any]:
        """`coefs`: after each measured KL, by the PPO paper: below target / 1.5 halve, above target * 1.5 double."""
        ...

    def proportional_kl(
        self, coef: float, target: float, horizon: float, kls: Row, counts: list[int]
    ) -> dict[str, Any]:
        """`coefs`: after each; coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon (count: samples seen)."""
        ...

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
        """`loss`, `margin` (N,) from sequence log-probs: margin = beta * ((chosen - ref) - (rejected - ref)),
        loss = -(1 - e) log sigmoid(margin) - e log sigmoid(-margin).
        """
        ...

    def pairwise_loss(self, chosen: Row, rejected: Row) -> dict[str, Any]:
        """`loss`: the mean of -log sigmoid(chosen - rejected)."""
        ...

    def kwise_loss(self, scores: Row, ranks: list[int], group_ids: list[int]) -> dict[str, Any]:
        """`loss`: for each prompt the mean of -log sigmoid(s_i - s_j) over its pairs with rank_i < rank_j (1 is best),
        then the mean over prompts that have such a pair.
        """
        ...

    def sft_loss(self, logprobs: Grid, mask: Mask) -> dict[str, Any]:
        """`loss`: the mean of -log pi over True tokens."""
        ...

    # -- whole steps ----------------------------------------------------------------------------------------------
    def ppo_trace(self, setup: dict[str, Any]) -> dict[str, Any]:
        """A whole PPO update of a two-parameter policy.

        The policy at feature x picks 1 with probability sigmoid(theta[0] + theta[1] * x), else 0. `setup` holds:
        `theta` [2], `ref_theta` [2], `features` (B,T), `actions` (B,T) of 0/1, `mask` (B,T), `scores` (B,), `values`
        (B,T) (the old values, fixed), `kl_coef`, `gamma`, `lam`, `whiten_advantages` (mean removed, population
        variance, epsilon 1e-8), `clip_low`, `clip_high`, `entropy_coef`, `learning_rate` (plain gradient descent),
        and `minibatches`: row lists, in the order in which they are visited (all epochs).

        Per token: KL to the reference is k1 of the old policy; rewards as in `token_rewards`; advantages as in `gae`
        over the whole batch, then whitened over the whole batch; loss of a minibatch = mean over its True tokens of
        the clip loss minus entropy_coef times the exact entropy. Results: `old_logprobs`, `rewards`, `advantages`
        (B,T, undefined off the mask), and for each minibatch `losses` (before the step), `thetas` (after the step) and
        `clipped` (the fraction of its True tokens whose gradient the clip removed).
        """
        ...

    def conjugate_gradient(self, matrix: Grid, vector: Row, iterations: int) -> dict[str, Any]:
        """`solution`: conjugate gradient for matrix @ x = vector from x = 0 after at most `iterations`."""
        ...

    def trpo_step(self, setup: dict[str, Any]) -> dict[str, Any]:
        """A whole TRPO step of the same two-parameter policy.

        `setup`: `theta`, `features`, `actions`, `mask`, `advantages` (B,T), `max_kl`, `damping`, `backtrack`
        (the factor), `max_backtracks`, `cg_iterations`. Surrogate L = mean over True tokens of r A; KL = mean over True
        tokens of the exact KL(old || new). g = grad L; F = Hessian of KL at theta; s solves (F + damping I) s = g;
        full step = s * sqrt(2 max_kl / (s^T (F + damping I) s)). Fractions 1, backtrack, ..., backtrack^max_backtracks
        are tried; the first with L(new) > L(old) and KL <= max_kl is taken, else theta stays (as it does where g = 0).
        Results: `gradient` [2], `direction` [2] (s), `theta` [2], `kl` and `surrogate_after` (of that theta),
        `surrogate_before`, `accepted`, `fraction` (0 if none).
        """
        ...
