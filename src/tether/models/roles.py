"""Who is policy, reference, critic and reward, and what they share.

The learner trains an `ActorCritic`; the loop asks `Roles` to evaluate a batch. Neither knows whether the roles are four
models, adapters on one trunk, or a shared trunk with parts of their own: that is decided here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.models.forward import OutputLayer, hidden_states, trunk_of
from tether.models.heads import ScalarHead, ScalarModel
from tether.types import Sequences, TokenOutputs


@dataclass(frozen=True)
class Evaluation:
    """What the roles say of a micro-batch, without gradients."""

    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    values: Tensor | None  # (B, T)
    final_values: Tensor | None  # (B,)


class ActorCritic(nn.Module):
    """The policy, and a critic where the algorithm needs one: a model of its own, or a head on the policy's trunk."""

    def __init__(self, policy: PreTrainedModel, critic: ScalarModel | ScalarHead | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.output = OutputLayer.of(policy)

    def forward(self, batch: Sequences) -> TokenOutputs:
        """Log-probs, entropy and values on the batch's response tokens; one pass of each trunk."""
        hidden = hidden_states(trunk_of(self.policy), batch)
        logprobs, entropy = self.output.logprobs(hidden, batch)
        values = None
        if self.critic is not None:
            head, states = self._critic_states(hidden, batch)
            values = head.values(states, batch)
        return TokenOutputs(logprobs, entropy, values)

    def evaluate(self, batch: Sequences) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`(logprobs, values, final_values)`: what `forward` gives, and the value after the last token."""
        hidden = hidden_states(trunk_of(self.policy), batch)
        logprobs, _ = self.output.logprobs(hidden, batch)
        if self.critic is None:
            return logprobs, None, None
        head, states = self._critic_states(hidden, batch)
        return logprobs, head.values(states, batch), head.at_end(states, batch)

    def _critic_states(self, hidden: Tensor, batch: Sequences) -> tuple[ScalarHead, Tensor]:
        if isinstance(self.critic, ScalarHead):
            return self.critic, hidden
        assert self.critic is not None
        return self.critic.head, self.critic.hidden(batch)

    def distributions(self, batch: Sequences) -> Tensor:
        """(N, V) whole log-distributions at the batch's response tokens."""
        return self.output.distributions(hidden_states(trunk_of(self.policy), batch), batch)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The policy's parameters, and the critic's own (a head on the shared trunk owns only the head)."""
        groups = {"policy": [p for p in self.policy.parameters() if p.requires_grad]}
        if self.critic is not None:
            groups["critic"] = [p for p in self.critic.parameters() if p.requires_grad]
        return groups


class ReferencePolicy:
    """The policy before any RL: frozen."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.requires_grad_(False)
        self.output = OutputLayer.of(model)

    def logprobs(self, batch: Sequences) -> Tensor:
        """(B, T)."""
        return self.output.logprobs(hidden_states(trunk_of(self.model), batch), batch)[0]


@dataclass(frozen=True)
class Roles:
    """The roles as separate models, with the critic perhaps a head on the policy's trunk."""

    actor: ActorCritic
    reference: ReferencePolicy | None

    @classmethod
    def separate(
        cls,
        policy: PreTrainedModel,
        *,
        critic: str | None,
        with_reference: bool,
        seed: int,
        head_deviation: float = 0.0,
    ) -> Roles:
        """`critic` is None, "head" or "separate"; reference and critic start as copies of the policy.

        A value head starts at zero, so that the first advantages are the rewards themselves.
        """
        reference = ReferencePolicy(copy.deepcopy(policy)) if with_reference else None
        value: ScalarModel | ScalarHead | None = None
        if critic == "separate":
            value = ScalarModel.from_policy(policy, group="critic", deviation=head_deviation, seed=seed)
        elif critic == "head":
            like = OutputLayer.of(policy).weight
            value = ScalarHead(like.shape[1], deviation=head_deviation, seed=seed, like=like)
        return cls(ActorCritic(policy, value), reference)

    @torch.no_grad()
    def evaluate(self, batch: Sequences) -> Evaluation:
        """What each role says of a micro-batch."""
        old, values, final_values = self.actor.evaluate(batch)
        reference = self.reference.logprobs(batch) if self.reference is not None else None
        return Evaluation(old, reference, values, final_values)
