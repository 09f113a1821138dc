"""Policy, reference, critic and reward: the roles of a run. How they share weights is in `sharing.py`.

Roles share nothing, are LoRA adapters on one base, or are top layers on a shared backbone. The learner trains an
`ActorCritic` and the loop asks `Roles` to evaluate a batch; neither depends on how the roles share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.device_transfer import sent, tensor_cached
from tether.gathering import with_weights
from tether.mask_cache import fill_attention, fill_response, last_tokens, packed_rows, packing_of, true_positions
from tether.models import acceleration
from tether.models.backbones import (
    Backbone,
    CpuOffload,
    OutputLayer,
    ScalarHead,
)
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Separate, Sharing
from tether.ops.logprobs import mask_before, top_tokens
from tether.types import BatchT, Sequences, TokenBatch, TokenOutputs


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class TokenEvaluation:
    """The roles' outputs for a micro-batch, without gradients."""

    old_logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    values: Tensor | None  # (B, T)
    final_values: Tensor | None  # (B,)
    entropy: Tensor | None  # (B, T); None where no pass of the policy was needed
    top_tokens: Tensor | None = None  # (B, T, K) int32
    top_logprobs: Tensor | None = None  # (B, T, K)


@tensor_cached
def states_read(batch: Sequences) -> Tensor:
    """(B, T) whose hidden states the roles read: those before a response token, and each row's last.

    The same for every role and pass, so that a pass in training repeats an earlier evaluation to the bit.
    """
    return mask_before(batch.response_mask) | last_tokens(batch.attention_mask)


def onto(batch: BatchT, device: torch.device | str) -> BatchT:
    """The batch on a device, with its masks' positions and counts cached.

    Tensor sizes depend on the masks, and reading one off a device makes the host wait for all queued work. They are
    therefore computed here, while the batch is on the host.
    """
    moved = batch.to(device)
    if moved.tokens.device != batch.tokens.device:
        prefetch(moved, batch)
    return moved


def prefetch(moved: Sequences, batch: Sequences) -> None:
    """Fill the mask cache for `moved`, the copy of `batch` on a device."""
    device = moved.tokens.device
    wanted = states_read(batch)
    there = sent(wanted, device)
    states_read.set(moved, there)
    packed_rows.set(there, packing_of(batch.attention_mask).rows(wanted).to(device))
    fill_attention(batch.attention_mask, moved.attention_mask)
    fill_response(batch.response_mask, moved.response_mask)


@dataclass(frozen=True)
class Ahead:
    """A forward pass computed before it is needed."""

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
        """`forward`'s outputs, the value after the last token, and the `top_tokens` most likely tokens everywhere.

        With `ahead` the pass is kept with its graph, for a `forward` on the same batch while no parameter has changed:
        where a batch is one micro-batch, the first step's pass is the one that found its old log-probs.
        """
        with torch.set_grad_enabled(ahead):
            hidden, outputs, final_values = self._pass(batch)
        if ahead:
            self._ahead = Ahead(batch, _versions(self), self.policy_learns, outputs)
        given = hidden, batch, outputs.logprobs, top_tokens
        seen = with_weights(self.backbone.model, self._top_tokens, *given) if top_tokens else (None, None)
        return TokenEvaluation(
            old_logprobs=outputs.logprobs.detach(),
            ref_logprobs=None,
            values=None if outputs.values is None else outputs.values.detach(),
            final_values=None if final_values is None else final_values.detach(),
            entropy=outputs.entropy.detach(),
            top_tokens=seen[0],
            top_logprobs=seen[1],
        )

    def be_exact(self) -> None:
        """From now on compute the policy by the exact pass (`model.numerics`); the critic's own layers stay as fast."""
        self.backbone.be_exact()
        self.output = replace(self.output, exact=True)

    @torch.no_grad()
    def values(self, batch: Sequences) -> tuple[Tensor | None, Tensor | None]:
        """(B, T) and (B,), the value before each response token and after the last one, without the output layer."""
        if self.critic is None:
            return None, None
        hidden = torch.empty(0)
        if isinstance(self.critic, ScalarHead):
            hidden = with_weights(self.backbone.model, self.backbone, batch, states_read(batch))
        return self._values(hidden, batch)

    def _values(self, hidden: Tensor, batch: Sequences) -> tuple[Tensor, Tensor]:
        head, states = self._critic_states(hidden, batch)
        return with_weights(head, lambda x: (head.values(x, batch), head.at_end(x, batch)), states)

    def _top_tokens(self, hidden: Tensor, batch: Sequences, logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        options = self.output.options(batch.temperature)
        given = (hidden, self.output.weight, batch.tokens, logprobs, batch.response_mask, count)
        chunk = acceleration.FUSED_CHUNK_ELEMENTS if self.output.kernels(hidden) else None
        positions = true_positions(batch.response_mask)
        return top_tokens(*given, **options, chunk_elements=chunk, positions=positions)

    def release_ahead(self) -> None:
        """Release a pass computed ahead, to free its memory."""
        self._ahead = None

    def _pass(self, batch: Sequences) -> tuple[Tensor, TokenOutputs, Tensor | None]:
        """(B, T, H) the policy's hidden states, what `forward` gives, and the value after each row's last token."""
        with torch.set_grad_enabled(self.policy_learns and torch.is_grad_enabled()):
            hidden, logprobs, entropy = with_weights(self.backbone.model, self._policy_pass, batch)
        if self.critic is None:
            return hidden, TokenOutputs(logprobs, entropy, None), None
        values, final = self._values(hidden, batch)
        return hidden, TokenOutputs(logprobs, entropy, values), final

    def _policy_pass(self, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.backbone(batch, states_read(batch))
        return hidden, *self.output.logprobs(hidden, batch)

    def _critic_states(self, hidden: Tensor, batch: Sequences) -> tuple[ScalarHead, Tensor]:
        if isinstance(self.critic, ScalarHead):
            return self.critic, hidden
        assert self.critic is not None
        return self.critic.head, self.critic.states(batch, states_read(batch))

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
    """The frozen policy that the KL is to: by default the policy before RL."""

    def __init__(self, backbone: Backbone, output: OutputLayer) -> None:
        self.backbone = backbone
        self.output = output
        self.offload: CpuOffload | None = None

    def be_exact(self) -> None:
        """From now on run by the exact pass (`model.numerics`)."""
        self.backbone.be_exact()
        self.output = replace(self.output, exact=True)

    def wait(self) -> None:
        """Keep the weights in host memory between passes; the backbone must share no tensors."""
        tied = self.output.weight is self.backbone.model.get_input_embeddings().weight
        alone = nn.ModuleDict({"backbone": self.backbone})
        if not tied:  # an untied output layer is offloaded too
            alone["output"] = nn.ParameterList([p for p in (self.output.weight, self.output.bias) if p is not None])
        self.offload = CpuOffload(alone)

    def logprobs(self, batch: Sequences) -> Tensor:
        """(B, T)."""
        with self.present():
            return with_weights(self.backbone.model, self._pass, batch)

    def _pass(self, batch: Sequences) -> Tensor:
        return self.output.logprobs(self.backbone(batch, states_read(batch)), batch)[0]

    def present(self) -> AbstractContextManager[None]:
        """A context in which the reference is on the device."""
        return nullcontext() if self.offload is None else self.offload.on_device()


@dataclass(frozen=True)
class Roles:
    """The roles of a run.

    Where the exact pass samples and trains the policy, the sampler's log-probs are those that training would find.
    With `known_logprobs` they are taken, and no pass of the policy is made for them.
    """

    actor: ActorCritic
    reference: ReferencePolicy | None
    known_logprobs: bool = False

    def exact(self, *, known_logprobs: bool) -> Roles:
        """The same roles, from now on by the exact pass; a ConfigError where it does not compute the model."""
        self.actor.be_exact()
        if self.reference is not None:
            self.reference.be_exact()
        return replace(self, known_logprobs=known_logprobs)

    @classmethod
    def build(
        cls,
        sharing: Sharing,
        *,
        critic: Literal["head", "separate"] | None,
        with_reference: bool,
        seed: int,
        reference_from: tuple[Backbone, OutputLayer] | None = None,
        start_critic_from: ScalarModel | None = None,
        offload_reference: bool = False,
    ) -> Roles:
        """The policy and what the algorithm needs beside it.

        A value head starts at zero, so that the first advantages are the rewards themselves. `start_critic_from`, a
        reward model loaded through `sharing`, becomes the separate critic. `reference_from` is a reference other than
        the policy as it was loaded. With `offload_reference` a reference with weights of its own waits in host memory.
        """
        reference = ReferencePolicy(*(reference_from or sharing.reference())) if with_reference else None
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
        """A context in which all roles are on the device; an offloaded reference is copied once."""
        return nullcontext() if self.reference is None else self.reference.present()

    @torch.no_grad()
    def evaluate(self, batch: Sequences, *, ahead: bool = False, top_tokens: int = 0) -> TokenEvaluation:
        """Evaluate a micro-batch under each role; `ahead` and `top_tokens` as for the actor.

        A pass that is kept for training costs nothing here, and most likely tokens need one: then the policy is
        evaluated even where its log-probs are known.
        """
        if self.known_logprobs and isinstance(batch, TokenBatch) and not ahead and not top_tokens:
            known = batch.untruncated_logprobs.masked_fill(~batch.response_mask, 0.0)
            values, final_values = self.actor.values(batch)
            found = TokenEvaluation(known, None, values, final_values, entropy=None)
        else:
            found = self.actor.evaluate(batch, ahead=ahead, top_tokens=top_tokens)
        reference = self.reference.logprobs(batch) if self.reference is not None else None
        return replace(found, ref_logprobs=reference)
