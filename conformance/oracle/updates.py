"""When to stop an update, and how the KL coefficient follows the measured KL."""

from typing import Any

from conformance.oracle.grids import Row, true_places
from conformance.oracle.masks import mean
from conformance.oracle.probabilities import estimate_kl


def early_stop(minibatches: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    """Before each step: KL(old || new) ~ mean over True of k3, tokens drawn from old. Above the limit, stop."""
    steps = 0
    measured: Row = []
    for minibatch in minibatches:
        places = true_places(minibatch["mask"])
        old, new = minibatch["old_logprobs"], minibatch["logprobs"]
        measured.append(mean([estimate_kl(old[b][t], new[b][t], "k3") for b, t in places]))
        if measured[-1] > limit:
            return {"steps": steps, "stopped": True, "kl": measured}
        steps += 1
    return {"steps": steps, "stopped": False, "kl": measured}


def adaptive_kl(coef: float, target: float, kls: Row) -> dict[str, Row]:
    """beta <- beta / 2 where kl < target / 1.5; beta <- 2 beta where kl > 1.5 target (Schulman et al. 2017, sec. 4)."""
    coefs: Row = []
    for kl in kls:
        if kl < target / 1.5:
            coef = coef / 2
        elif kl > target * 1.5:
            coef = coef * 2
        coefs.append(coef)
    return {"coefs": coefs}


def proportional_kl(coef: float, target: float, horizon: float, kls: Row, counts: list[int]) -> dict[str, Row]:
    """beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * count / horizon) (Ziegler et al. 2019, sec. 2.2)."""
    coefs: Row = []
    for kl, count in zip(kls, counts, strict=True):
        error = min(max(kl / target - 1, -0.2), 0.2)
        coef = coef * (1 + error * count / horizon)
        coefs.append(coef)
    return {"coefs": coefs}
