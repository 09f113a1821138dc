"""The oracle: every method of the conformance contract in plain Python floats, one scalar at a time.

It is written from the equations and shares no code with the library: no torch, no numpy, no import from `tether`. It
is slow on purpose, so that each line can be held against the mathematics. Undefined places of a result are None.

The module itself has the shape of an adapter: its functions are the contract's methods. `adapter` is its factory.
"""

from types import ModuleType

from conformance.oracle.advantages import (
    gae,
    group_advantages,
    leave_one_out,
    n_step,
    reinforce_weights,
    reward_to_go,
    td_residuals,
    total_return,
)
from conformance.oracle.aggregation import aggregate, aggregate_micro_batches, sft_loss
from conformance.oracle.baselines import (
    batch_mean_weights,
    decoupled_gae,
    length_adaptive_gae,
    moving_average,
    n_step_returns,
)
from conformance.oracle.group_variants import (
    cispo_loss,
    dapo,
    dr_grpo,
    dynamic_sampling,
    gspo_loss,
    overlong_penalty,
)
from conformance.oracle.masks import masked_mean, masked_variance, position_ids, response_mask, whiten
from conformance.oracle.objectives import clip_loss, kl_penalty_loss, reinforce_loss, unclipped_loss, value_loss
from conformance.oracle.ppo_update import ppo_trace
from conformance.oracle.preferences import dpo_loss, kwise_loss, pairwise_loss
from conformance.oracle.probabilities import exact_kl, kl_estimate, token_logprobs
from conformance.oracle.rewards import missing_eos_penalty, token_rewards
from conformance.oracle.trust_region import conjugate_gradient, trpo_step
from conformance.oracle.updates import adaptive_kl, early_stop, proportional_kl

__all__ = [
    "adapter",
    "adaptive_kl",
    "aggregate",
    "aggregate_micro_batches",
    "batch_mean_weights",
    "cispo_loss",
    "clip_loss",
    "conjugate_gradient",
    "dapo",
    "decoupled_gae",
    "dpo_loss",
    "dr_grpo",
    "dynamic_sampling",
    "early_stop",
    "exact_kl",
    "gae",
    "group_advantages",
    "gspo_loss",
    "kl_estimate",
    "kl_penalty_loss",
    "kwise_loss",
    "leave_one_out",
    "length_adaptive_gae",
    "masked_mean",
    "masked_variance",
    "missing_eos_penalty",
    "moving_average",
    "n_step",
    "n_step_returns",
    "overlong_penalty",
    "pairwise_loss",
    "position_ids",
    "ppo_trace",
    "proportional_kl",
    "reinforce_loss",
    "reinforce_weights",
    "response_mask",
    "reward_to_go",
    "sft_loss",
    "td_residuals",
    "token_logprobs",
    "token_rewards",
    "total_return",
    "trpo_step",
    "unclipped_loss",
    "value_loss",
    "whiten",
]


def adapter(dtype: str) -> ModuleType:
    """The oracle as an adapter. Plain floats are float64 whatever is asked, which is at least as good."""
    import conformance.oracle

    assert dtype in ("float32", "float64")
    return conformance.oracle
