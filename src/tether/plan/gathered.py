"""The memory of one of several ranks that share weights (`distributed.shard`): see distributed/fsdp.py.

A rank holds 1/S of weights, gradients and optimizer state, where S ranks share a copy. Around each pass it gathers
more. With E the bytes of what stands beside a role's layers (embeddings, the output layer, norms) and L those of one
layer:

- Sampling gathers the whole policy, and copies one unit of it at a time out of the buffer it arrives in.
- A forward pass holds E and one L. Two buffers exist where one unit follows another: E + 3 L, or 2 E + L at the first.
- A backward pass holds E and two L, as the next layer arrives while one is at work, and four L of gradients: as they
  are, side by side to be sent (twice, as the last ones wait), and received. E of weights and E of gradients stay to the
  end for each role that is trained whole; there they are sent and received too.
- With several copies (`hybrid`) and `exact`, what is sent is put in another order first: one more L, or E. The part of
  the sum that a rank adds up is held beside the share that it gathers.

Without shares (`none`) a rank adds up gradients in buffers: one that it sends and one that it receives, and with
`exact` its part of the sums. See distributed/sums.py.
"""

from __future__ import annotations

from tether.config.recipes import Recipe
from tether.learner.ranks import GRADIENT_BUFFER
from tether.plan.workload import Shape, Work


def gathered(
    recipe: Recipe, shape: Shape, critic: Shape, work: Work, width: int, shards: int, copies: int
) -> dict[str, int]:
    """Bytes that each phase gathers, beyond a rank's share."""
    layer = max(shape.layer, critic.layer) * width
    beside = [(shape.parameters - shape.layers * shape.layer) * width]
    if work.critic == "separate":
        beside.append((critic.backbone - critic.layers * critic.layer) * width)
    most = max(beside)
    forward = max(2 * most + layer, most + 3 * layer)
    trained = recipe.roles.mode == "separate"
    stays = sum(beside) if trained else max(beside)
    backward = stays * (2 if trained else 1) + most * (1 if trained else 0) + (6 if trained else 2) * layer
    if copies > 1 and recipe.distributed.reduction == "exact" and trained:
        sums = shape.parameters + (critic.backbone if work.critic == "separate" else 0)
        backward += max(most, layer) + sums * width // (shards * copies)
    return {
        "rollout": shape.parameters * width + most,
        "evaluation": forward,
        "update": max(forward, backward),
    }


def summing(recipe: Recipe, gradients: int, width: int, ranks: int) -> int:
    """Bytes to add up whole gradients over ranks, beside the gradients."""
    buffers = 2 * min(gradients, GRADIENT_BUFFER * width)
    return buffers + (gradients // ranks if recipe.distributed.reduction == "exact" else 0)
