"""Policy and critic as two perceptrons, in the shape that the learner trains; and the policy in numpy, to sample."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tether.config.control_recipe import NetworkSettings
from tether.models.roles import TokenEvaluation
from tether.ops.distributions import Categorical, DiagonalGaussian
from tether.protocols import Distribution
from tether.types import Sequences, TokenOutputs

Array = NDArray[Any]
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def perceptron(inputs: int, outputs: int, settings: NetworkSettings, *, gain: float) -> nn.Sequential:
    """Linear layers with orthogonal weights: gain sqrt(2) for the hidden ones, `gain` for the last; biases 0."""
    layers: list[nn.Module] = []
    widths = [inputs, *settings.hidden]
    for before, after in pairwise(widths):
        layers += [_linear(before, after, math.sqrt(2.0)), ACTIVATIONS[settings.activation]()]
    return nn.Sequential(*layers, _linear(widths[-1], outputs, gain))


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ControlModel(nn.Module):
    """A policy over actions and a critic, apart. The policy is Gaussian with a learned deviation, or categorical.

    `actions` is the number of dimensions of a Gaussian policy, or of choices of a categorical one.
    """

    def __init__(self, observations: int, actions: int, settings: NetworkSettings, *, continuous: bool) -> None:
        super().__init__()
        self.activation = settings.activation
        self.policy = perceptron(observations, actions, settings, gain=0.01)
        self.log_std = nn.Parameter(torch.full((actions,), settings.log_std)) if continuous else None
        self.critic = perceptron(observations, 1, settings, gain=1.0)
        self.policy_learns = True

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The policy's parameters and the critic's."""
        deviation = [] if self.log_std is None else [self.log_std]
        return {"policy": [*self.policy.parameters(), *deviation], "critic": list(self.critic.parameters())}

    def train_only(self, groups: tuple[str, ...]) -> None:
        """Skip the policy's gradients where only the critic is trained."""
        self.policy_learns = "policy" in groups

    def distribution(self, observations: Tensor) -> Distribution:
        """The policy in N states (N, O)."""
        outputs = self.policy(observations)
        if self.log_std is None:
            return Categorical(torch.log_softmax(outputs, dim=1))
        return DiagonalGaussian(outputs, self.log_std)

    def values(self, observations: Tensor) -> Tensor:
        """(N,) of N states."""
        return self.critic(observations)[:, 0]

    def forward(self, batch: Sequences) -> TokenOutputs:
        """Log-probabilities of the actions taken, entropies and values."""
        assert batch.observations is not None
        states, shape = batch.observations.flatten(0, 1), batch.response_mask.shape
        with torch.set_grad_enabled(self.policy_learns and torch.is_grad_enabled()):
            policy = self.distribution(states)
            logprobs = policy.logprobs(batch.tokens.flatten(0, 1))
            entropy = policy.entropy()
        return TokenOutputs(logprobs.view(shape), entropy.view(shape), self.values(states).view(shape))

    def distributions(self, batch: Sequences) -> Distribution:
        """The policy in each state of the batch."""
        assert batch.observations is not None
        return self.distribution(batch.observations[batch.response_mask])

    def present(self) -> AbstractContextManager[None]:
        """It is where it is."""
        return nullcontext()

    @torch.no_grad()
    def evaluate(self, batch: Sequences, *, ahead: bool = False, top_tokens: int = 0) -> TokenEvaluation:
        """What `forward` gives, without gradients."""
        del ahead, top_tokens
        found = self(batch)
        return TokenEvaluation(found.logprobs, None, found.values, None, found.entropy)


class NumpyPolicy:
    """The policy for sampling: a product of small matrices costs numpy a fraction of what it costs torch.

    It reads the model's own weights, which change in place, so it never needs to be made again.
    """

    def __init__(self, model: ControlModel) -> None:
        linear = [layer for layer in model.policy if isinstance(layer, nn.Linear)]
        self.layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in linear]
        self.activation = np.tanh if model.activation == "tanh" else lambda x: np.maximum(x, 0.0)
        self.log_std = None if model.log_std is None else model.log_std.detach().numpy()

    def outputs(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        """(N, actions) means or logits."""
        hidden, last = observations, len(self.layers) - 1
        for place, (weight, bias) in enumerate(self.layers):
            hidden = hidden @ weight + bias
            if place < last:
                hidden = self.activation(hidden)
        return hidden

    def noise(self, generator: np.random.Generator, steps: int, copies: int) -> NDArray[np.float32]:
        """The random numbers of a whole rollout, (steps, copies, actions)."""
        shape = (steps, copies, self.layers[-1][1].shape[0])
        if self.log_std is None:
            return generator.gumbel(size=shape).astype(np.float32)
        return generator.standard_normal(shape, dtype=np.float32)

    def sample(self, observations: NDArray[np.float32], noise: NDArray[np.float32]) -> Array:
        """One action for each state: mean + deviation * noise, or the largest of logits + Gumbel noise."""
        outputs = self.outputs(observations)
        if self.log_std is None:
            return (outputs + noise).argmax(axis=1)
        return outputs + np.exp(self.log_std) * noise

    def mode(self, observations: NDArray[np.float32]) -> Array:
        """The mean, or the most likely choice."""
        outputs = self.outputs(observations)
        return outputs.argmax(axis=1) if self.log_std is None else outputs

    def logprobs(self, observations: NDArray[np.float32], actions: Array) -> NDArray[np.float32]:
        """(S,) of actions taken in S states."""
        outputs = torch.from_numpy(self.outputs(observations))
        taken = torch.from_numpy(actions)
        if self.log_std is None:
            return Categorical(torch.log_softmax(outputs, dim=1)).logprobs(taken).numpy()
        return DiagonalGaussian(outputs, torch.from_numpy(self.log_std)).logprobs(taken).numpy()
