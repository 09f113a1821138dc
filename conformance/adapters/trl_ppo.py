"""TRL 1.12.0's PPO (`trl.experimental.ppo`) behind the conformance contract. TRL is not a dependency of Tether.

Run it where TRL is installed: `tether conformance --target conformance.adapters.trl_ppo:adapter`.

Where TRL has a function, it is called (`masked_mean`, `masked_var`, `masked_whiten`, `first_true_indices`,
`selective_log_softmax`). The rest of TRL's mathematics are expressions inside `PPOTrainer.train`; they are restated
here one by one, each under the names TRL gives its tensors, and the comment says which step of `train` it mirrors.
What TRL's PPO does not offer is not claimed.

TRL keeps prompts left-padded and answers right-padded, so that all answers of a batch start in one column and have no
gaps. Its masks come from the answer's length (`sequence_lengths`, the index of the last real token). Cases in another
layout are not claimed where TRL's expressions depend on it.
"""

from typing import Any

import torch
from trl.experimental.ppo.ppo_trainer import (  # pyright: ignore[reportMissingImports]
    INVALID_LOGPROB,
    masked_mean,
    masked_var,
    masked_whiten,
)
from trl.experimental.utils import first_true_indices  # pyright: ignore[reportMissingImports]
from trl.trainer.utils import selective_log_softmax  # pyright: ignore[reportMissingImports]

from tether.conformance.adapter import Grid, Mask, Row, Unsupported

PAD, REAL = 0, 1


class Answers:
    """The part of a batch that TRL works on: the columns from the first answer token on, and TRL's two masks."""

    def __init__(self, mask: Mask) -> None:
        starts = {row.index(True) if True in row else -1 for row in mask}
        self.start = starts.pop()
        lengths = [sum(row) for row in mask]
        blocks = all(all(row[self.start : self.start + n]) for row, n in zip(mask, lengths, strict=True))
        if starts or self.start < 0 or not blocks:
            raise Unsupported("TRL's answers all start in one column and have no gaps")
        self.prompt_width = self.start
        width = len(mask[0]) - self.start
        response_idxs = torch.arange(width).repeat(len(mask), 1)
        self.sequence_lengths = torch.tensor(lengths) - 1
        # PPOTrainer.train: `padding_mask` is True after the last real token, `padding_mask_p1` one place later.
        self.padding_mask = response_idxs > self.sequence_lengths.unsqueeze(1)
        self.padding_mask_p1 = response_idxs > (self.sequence_lengths + 1).unsqueeze(1)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The answer columns of a (B,T) tensor."""
        return tensor[:, self.start :]

    def back(self, tensor: torch.Tensor, prompt: float | None) -> list[list[Any]]:
        """A (B,answer) tensor as (B,T) lists, with `prompt` standing on the prompt's columns."""
        return [[prompt] * self.prompt_width + row for row in tensor.tolist()]


class TrlPpo:
    """TRL's PPO in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def _tensor(self, x: Any, requires_grad: bool = False) -> torch.Tensor:
        return torch.tensor(x, dtype=self.dtype, requires_grad=requires_grad)

    # -- masks and statistics -------------------------------------------------------------------------------------
    def position_ids(self, attention_mask: Mask) -> dict[str, Any]:
        """`forward` and `get_reward`: an exclusive cumulative sum."""
        mask = torch.tensor(attention_mask)
        return {"positions": mask.cumsum(1) - mask.long()}

    def response_mask(
        self, prompt_lengths: list[int], response_lengths: list[int], width: int, side: str
    ) -> dict[str, Any]:
        """`train`: the attention mask and the answer's length are read off the token ids, by the first pad token."""
        rows = []
        for prompt, response in zip(prompt_lengths, response_lengths, strict=True):
            padding = [PAD] * (width - prompt - response)
            real = [REAL] * (prompt + response)
            rows.append(padding + real if side == "left" else real + padding)
        starts = {
            (width - response if side == "left" else prompt)
            for prompt, response in zip(prompt_lengths, response_lengths, strict=True)
        }
        if len(starts) > 1:
            raise Unsupported("TRL's answers all start in one column and have no gaps")
        context_length = starts.pop()
        query_responses = torch.tensor(rows)
        attention_mask = query_responses != PAD
        responses = query_responses[:, context_length:]
        sequence_lengths = first_true_indices(responses == PAD) - 1
        response_idxs = torch.arange(responses.shape[1]).repeat(responses.shape[0], 1)
        padding_mask = response_idxs > sequence_lengths.unsqueeze(1)
        prompt_part = torch.zeros(len(rows), context_length, dtype=torch.bool)
        return {"mask": torch.cat((prompt_part, ~padding_mask), 1), "attention_mask": attention_mask}

    def masked_mean(self, x: Grid, mask: Mask) -> dict[str, Any]:
        """TRL's own function."""
        return {"mean": masked_mean(self._tensor(x), torch.tensor(mask))}

    def masked_variance(self, x: Grid, mask: Mask, unbiased: bool) -> dict[str, Any]:
        """TRL's own function."""
        return {"variance": masked_var(self._tensor(x), torch.tensor(mask), unbiased)}

    def whiten(self, x: Grid, mask: Mask, shift_mean: bool, unbiased: bool, epsilon: float) -> dict[str, Any]:
        """TRL's own function; the sample variance and the 1e-8 under the root are fixed in it."""
        if not unbiased or epsilon != 1e-8:
            raise Unsupported("masked_whiten has the sample variance and epsilon 1e-8 only")
        return {"whitened": masked_whiten(self._tensor(x), torch.tensor(mask), shift_mean)}

    # -- log-probabilities and KL ---------------------------------------------------------------------------------
    def token_logprobs(self, logits: list[Grid], tokens: list[list[int]], temperature: float) -> dict[str, Any]:
        """`train`, in the minibatch loop: logits[:, context_length - 1 : -1] divided by (temperature + 1e-7)."""
        scaled = self._tensor(logits)[:, :-1] / (temperature + 1e-7)
        logprobs = selective_log_softmax(scaled, torch.tensor(tokens)[:, 1:])
        prob_dist = torch.nn.functional.softmax(scaled, dim=-1)
        entropy = torch.logsumexp(scaled, dim=-1) - torch.sum(prob_dist * scaled, dim=-1)
        return {
            name: [[None, *row] for row in x.tolist()] for name, x in (("logprobs", logprobs), ("entropy", entropy))
        }

    def kl_estimate(self, logprobs: Grid, other_logprobs: Grid, estimator: str) -> dict[str, Any]:
        """`train`, step 4 (k1 and k3, policy against reference); k2 is the `approxkl` statistic, before its mean."""
        logr = self._tensor(other_logprobs) - self._tensor(logprobs)
        kl = {"k1": -logr, "k2": 0.5 * logr**2, "k3": (logr.exp() - 1) - logr}
        return {"kl": kl[estimator]}

    # -- rewards and advantages -----------------------------------------------------------------------------------
    def missing_eos_penalty(self, scores: Row, truncated: list[bool], penalty: float | None) -> dict[str, Any]:
        """`train`, response processing 3: `missing_eos_penalty` is subtracted from the score."""
        if penalty is not None and any(truncated):
            raise Unsupported("missing_eos_penalty is subtracted from the score, it does not replace it")
        return {"scores": self._tensor(scores)}

    def token_rewards(self, scores: Row, kl: Grid, mask: Mask, kl_coef: float) -> dict[str, Any]:
        """`train`, step 4. Both log-probs are INVALID_LOGPROB on padding, so the KL is 0 there."""
        answers = Answers(mask)
        rewards = -kl_coef * torch.masked_fill(answers.of(self._tensor(kl)), answers.padding_mask, 0)
        sequence_lengths_p1 = answers.sequence_lengths + 1
        actual_start = torch.arange(rewards.size(0))
        actual_end = torch.where(sequence_lengths_p1 < rewards.size(1), sequence_lengths_p1, answers.sequence_lengths)
        rewards[actual_start, actual_end] += self._tensor(scores)
        return {"rewards": answers.back(rewards, prompt=0.0)}

    def gae(
        self, rewards: Grid, values: Grid, mask: Mask, gamma: float, lam: float, final_values: Row | None
    ) -> dict[str, Any]:
        """`train`, step 6, before whitening. Values are zeroed by `padding_mask_p1`; rewards are 0 on padding."""
        if final_values is not None:
            raise Unsupported("TRL does not bootstrap an answer that was cut off")
        answers = Answers(mask)
        masked_rewards = torch.masked_fill(answers.of(self._tensor(rewards)), answers.padding_mask, 0)
        masked_values = torch.masked_fill(answers.of(self._tensor(values)), answers.padding_mask_p1, 0)
        lastgaelam: Any = 0
        advantages_reversed = []
        gen_length = masked_rewards.shape[1]
        for t in reversed(range(gen_length)):
            nextvalues = masked_values[:, t + 1] if t < gen_length - 1 else 0.0
            delta = masked_rewards[:, t] + gamma * nextvalues - masked_values[:, t]
            lastgaelam = delta + gamma * lam * lastgaelam
            advantages_reversed.append(lastgaelam)
        advantages = torch.stack(advantages_reversed[::-1], dim=1)
        returns = advantages + masked_values
        return {"advantages": answers.back(advantages, None), "returns": answers.back(returns, None)}

    # -- losses ---------------------------------------------------------------------------------------------------
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
        """`train`, `pg_losses`, `pg_losses2`, `pg_loss_max` and `pg_clipfrac`; one `cliprange` for both sides."""
        if dual_clip is not None or clip_low != clip_high:
            raise Unsupported("TRL's PPO has one symmetric cliprange and no dual clip")
        sampled = torch.tensor(mask)
        new = self._tensor(logprobs, requires_grad=True)
        new_logprobs = torch.masked_fill(new, ~sampled, INVALID_LOGPROB)
        mb_logprobs = torch.masked_fill(self._tensor(old_logprobs), ~sampled, INVALID_LOGPROB)
        mb_advantage = torch.masked_fill(self._tensor(advantages), ~sampled, 0)
        ratio = torch.exp(new_logprobs - mb_logprobs)
        pg_losses = -mb_advantage * ratio
        pg_losses2 = -mb_advantage * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
        pg_loss_max = torch.max(pg_losses, pg_losses2)
        (grad,) = torch.autograd.grad(pg_loss_max.sum(), new)
        # TRL counts in float32 whatever the dtype; that is not what this case is about.
        clipped = masked_mean((pg_losses2 > pg_losses).to(self.dtype), sampled)
        return {"loss": pg_loss_max.detach(), "grad": grad, "clipped": clipped}

    def value_loss(self, values: Grid, old_values: Grid, returns: Grid, clip: float | None) -> dict[str, Any]:
        """`train`, `vf_losses1`, `vf_losses2` and the half of their maximum, before the mean."""
        if clip is None:
            raise Unsupported("TRL's value loss is always clipped by cliprange_value")
        vpred = self._tensor(values, requires_grad=True)
        mb_values, mb_return = self._tensor(old_values), self._tensor(returns)
        vpredclipped = torch.clamp(vpred, mb_values - clip, mb_values + clip)
        vf_loss_max = torch.max(torch.square(vpred - mb_return), torch.square(vpredclipped - mb_return))
        loss = 0.5 * vf_loss_max
        (grad,) = torch.autograd.grad(loss.sum(), vpred)
        return {"loss": loss.detach(), "grad": grad}

    def aggregate(
        self,
        losses: Grid,
        mask: Mask,
        mode: str,
        fixed_length: int | None,  # noqa: ARG002 - the contract's name; TRL has no such mode
    ) -> dict[str, Any]:
        """`pg_loss`: TRL's masked_mean over the micro-batch's tokens."""
        if mode != "token":
            raise Unsupported("TRL's PPO averages over tokens only")
        return {"loss": masked_mean(self._tensor(losses), torch.tensor(mask))}

    def aggregate_micro_batches(
        self, losses: Grid, mask: Mask, mode: str, fixed_length: int | None, micro_batches: list[list[int]]
    ) -> dict[str, Any]:
        """`train`: each micro-batch's masked_mean goes to `accelerator.backward`, which divides it by their number."""
        if len({len(rows) for rows in micro_batches}) > 1:
            raise Unsupported("TRL's micro-batches all have per_device_train_batch_size rows")
        parts = [
            self.aggregate([losses[b] for b in rows], [mask[b] for b in rows], mode, fixed_length)["loss"]
            for rows in micro_batches
        ]
        return {"loss": sum(part / len(micro_batches) for part in parts)}


def adapter(dtype: str) -> TrlPpo:
    """TRL's PPO functions in `dtype`."""
    return TrlPpo({"float32": torch.float32, "float64": torch.float64}[dtype])
