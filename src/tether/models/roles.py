"""Who is policy, reference, critic and reward.

The learner trains an `ActorCritic`; the loop asks `Roles` to evaluate a batch. Neither knows whether the roles are four
models, adapters on one base, or tops on a shared backbone: that is decided in `sharing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.device_transfer import sent
from tether.models import acceleration
from tether.models.backbones import Backbone
from tether.models.cpu_offload import Waiting
from tether.models.forward import OutputLayer
from tether.models.heads import ScalarHead, ScalarModel
from tether.models.sharing import Separate, Sharing, trainable
from tether.ops.aggregation import true_places, true_rows
from tether.ops.logprobs import places_before, places_of
from tether.ops.masks import last_places
from tether.ops.packing import packing_of, rows_of
from tether.ops.top_logprobs import top_tokens
from tether.tensor_cache import tensor_cached
from tether.types import BatchT, Sequences, TokenOutputs


@dataclass(frozen=True)
class TokenEvaluation:
    """What the roles say of a micro-batch, without gradients."""

    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    values: Tensor | None  # (B, T)
    final_values: Tensor | None  # (B,)
    entropy: Tensor  # (B, T)
    top_tokens: Tensor | None = None  # (B, T, K) int32
    top_logprobs: Tensor | None = None  # (B, T, K)


@tensor_cached
def states_read(batch: Sequences) -> Tensor:
    """(B, T) whose hidden states the roles read: those before a response token, and each row's last.

    The same for every role and pass, so that a pass in training repeats an earlier evaluation to the bit.
    """
    return places_before(batch.response_mask) | last_places(batch.attention_mask)


def onto(batch: BatchT, device: torch.device | str) -> BatchT:
    """The batch on a device, where nothing that the roles will ask of its masks makes the host wait.

    Sizes of what is computed depend on the masks, and reading one off a device stops the host until all that was
    asked of the device before is done. So the answers are found here, while the batch is on the host.
    """
    moved = batch.to(device)
    if moved.tokens.device != batch.tokens.device:
        prefetch(moved, batch)
    return moved


def prefetch(moved: Sequences, batch: Sequences) -> None:
    """Answer of `moved`, which is `batch` elsewhere, what will be asked of its masks."""
    device = moved.tokens.device
    packing, wanted = packing_of(batch.attention_mask), states_read(batch)
    there = sent(wanted, device)
    packing_of.set(moved.attention_mask, packing.to(device))
    states_read.set(moved, there)
    rows_of.set(there, packing.rows(wanted).to(device))
    ends = last_places(batch.attention_mask)  # what a reward model reads
    ends_there = sent(ends, device)
    last_places.set(moved.attention_mask, ends_there)
    rows_of.set(ends_there, packing.rows(ends).to(device))
    places_of.set(moved.response_mask, sent(places_of(batch.response_mask), device))
    for count in (true_places, true_rows):
        count.set(moved.response_mask, count(batch.response_mask))


@dataclass(frozen=True)
class Ahead:
    """A pass that was made before it is asked for."""

    batch: Sequences
    versions: list[int]
    policy_learns: bool  # whether its graph reaches the policy
    outputs: TokenOutputs

    def holds_for(self, batch: Sequences, model: ActorCritic) -> bool:
        """Whether it is a pass over this very batch with the parameters as they are now."""
        return (
            batch.temperature == self.batch.temperature
            and self.policy_learns == model.policy_learns
            and torch.equal(batch.tokens, self.batch.tokens)
            and torch.equal(batch.attention_mask, self.batch.attention_mask)
            and torch.equal(batch.response_mask, self.batch.response_mask)
            and self.versions == _versions(model)
        )


def _versions(model: nn.Module) -> list[int]:
    """How often each parameter has been changed in place."""
    return [parameter._version for parameter in model.parameters()]


class ActorCritic(nn.Module):
    """The policy, and a critic where the algorithm needs one: a separate model, or a head on the policy's backbone."""

    def __init__(
        self, policy: PreTrainedModel, backbone: Backbone | None = None, critic: ScalarModel | ScalarHead | None = None
    ) -> None:
        super().__init__()
        self.policy = policy
        self.backbone = backbone if backbone is not None else Separate(policy).policy_backbone()
        self.critic = critic
        self.output = OutputLayer.of(policy)
        self.policy_learns = True
        self._ahead: Ahead | None = None

    def train_only(self, groups: Sequence[str]) -> None:
        """From now on only these of the parameter groups learn: without the policy no graph is kept for its pass.

        A value head then reads the backbone's states as constants, so that its loss cannot move the backbone.
        """
        self.policy_learns = "policy" in groups

    def forward(self, batch: Sequences) -> TokenOutputs:
        """Log-probs, entropy and values on the batch's response tokens; one pass of each backbone."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.holds_for(batch, self):
            return ahead.outputs
        return self._pass(batch)[1]

    def evaluate(self, batch: Sequences, *, ahead: bool = False, top_tokens: int = 0) -> TokenEvaluation:
        """What `forward` gives, the value after the last token, and at each place the `top_tokens` tokens, so many.

        With `ahead` the pass is kept with its graph, for a `forward` on the same batch while no parameter has changed:
        where a batch is one micro-batch, the first step's pass is the one that found its old log-probs.
        """
        with torch.set_grad_enabled(ahead):
            hidden, outputs, final_values = self._pass(batch)
        if ahead:
            self._ahead = Ahead(batch, _versions(self), self.policy_learns, outputs)
        seen = self._top_tokens(hidden, batch, outputs.logprobs, top_tokens) if top_tokens else (None, None)
        return TokenEvaluation(
            old_logprobs=outputs.logprobs.detach(),
            ref_logprobs=None,
            values=None if outputs.values is None else outputs.values.detach(),
            final_values=None if final_values is None else final_values.detach(),
            entropy=outputs.entropy.detach(),
            top_tokens=seen[0],
            top_logprobs=seen[1],
        )

    def _top_tokens(self, hidden: Tensor, batch: Sequences, logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        options = self.output.options(batch.temperature)
        given = (hidden, self.output.weight, batch.tokens, logprobs, batch.response_mask, count)
        chunk = acceleration.chunk_elements(hidden, self.output.weight, self.output.softcap)
        return top_tokens(*given, **options, chunk_elements=chunk)

    def forget_ahead(self) -> None:
        """Let a kept pass go: its memory is wanted."""
        self._ahead = None

    def _pass(self, batch: Sequences) -> tuple[Tensor, TokenOutputs, Tensor | None]:
        """(B, T, H) the policy's hidden states, what `forward` gives, and the value after each row's last token."""
        with torch.set_grad_enabled(self.policy_learns and torch.is_grad_enabled()):
            hidden = self.backbone(batch, states_read(batch))
            logprobs, entropy = self.output.logprobs(hidden, batch)
        if self.critic is None:
            return hidden, TokenOutputs(logprobs, entropy, None), None
        head, states = self._critic_states(hidden, batch)
        return hidden, TokenOutputs(logprobs, entropy, head.values(states, batch)), head.at_end(states, batch)

    def _critic_states(self, hidden: Tensor, batch: Sequences) -> tuple[ScalarHead, Tensor]:
        if isinstance(self.critic, ScalarHead):
            return self.critic, hidden
        assert self.critic is not None
        return self.critic.head, self.critic.backbone(batch, states_read(batch))

    def distributions(self, batch: Sequences) -> Tensor:
        """(N, V) whole log-distributions at the batch's response tokens."""
        return self.output.distributions(self.backbone.plain(batch), batch)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The policy's parameters, and the critic's own (a head on the shared backbone owns only the head)."""
        groups = {"policy": trainable(self.policy)}
        if self.critic is not None:
            groups["critic"] = trainable(self.critic)
        return groups


class ReferencePolicy:
    """The policy before any RL: frozen."""

    def __init__(self, backbone: Backbone, output: OutputLayer) -> None:
        self.backbone = backbone
        self.output = output
        self.waiting: Waiting | None = None

    def wait(self) -> None:
        """From now on stay in host memory, but for visits; the backbone has to stand alone."""
        tied = self.output.weight is self.backbone.model.get_input_embeddings().weight
        alone = nn.ModuleDict({"backbone": self.backbone})
        if not tied:  # an output layer of its own waits as well
            alone["output"] = nn.ParameterList([p for p in (self.output.weight, self.output.bias) if p is not None])
        self.waiting = Waiting(alone)

    def logprobs(self, batch: Sequences) -> Tensor:
        """(B, T)."""
        with self.present():
            return self.output.logprobs(self.backbone(batch, states_read(batch)), batch)[0]

    def present(self) -> AbstractContextManager[None]:
        """On the device, for as long as this is entered."""
        return nullcontext() if self.waiting is None else self.waiting.visit()


@dataclass(frozen=True)
class Roles:
    """The roles of a run."""

    actor: ActorCritic
    reference: ReferencePolicy | None

    @classmethod
    def build(
        cls,
        sharing: Sharing,
        *,
        critic: Literal["head", "separate"] | None,
        with_reference: bool,
        seed: int,
        start_critic_from: ScalarModel | None = None,
        offload_reference: bool = False,
    ) -> Roles:
        """The policy and what the algorithm needs beside it.

        A value head starts at zero, so that the first advantages are the rewards themselves. `start_critic_from`, a
        reward model loaded through `sharing`, becomes the separate critic. With `offload_reference` a reference
        with weights of its own waits in host memory.
        """
        reference = ReferencePolicy(*sharing.reference()) if with_reference else None
        if reference is not None and offload_reference and isinstance(sharing, Separate):
            reference.wait()
        value: ScalarModel | ScalarHead | None = None
        if critic == "head":
            assert start_critic_from is None, "a reward model's head means nothing on the policy's backbone"
            value = ScalarHead.like_output(sharing.policy, deviation=0.0, seed=seed)
        elif critic == "separate" and start_critic_from is not None:
            value = start_critic_from
        elif critic == "separate":
            head = ScalarHead.like_output(sharing.policy, deviation=0.0, seed=seed)
            value = ScalarModel(sharing.scalar_backbone(seed), head, "critic")
        return cls(ActorCritic(sharing.policy, sharing.policy_backbone(), value), reference)

    def present(self) -> AbstractContextManager[None]:
        """All roles on the device, for as long as this is entered: asked for once, a reference comes in once."""
        return nullcontext() if self.reference is None else self.reference.present()

    @torch.no_grad()
    def evaluate(self, batch: Sequences, *, ahead: bool = False, top_tokens: int = 0) -> TokenEvaluation:
        """What each role says of a micro-batch; `ahead` and `top_tokens` as for the actor."""
        found = self.actor.evaluate(batch, ahead=ahead, top_tokens=top_tokens)
        reference = self.reference.logprobs(batch) if self.reference is not None else None
        return replace(found, ref_logprobs=reference)
