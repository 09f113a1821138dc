"""The losses: the clip and its four cases, the dual clip, the clipped value loss, and the plain ones."""

import math
from typing import Any

from conformance.families.case import MILD_GARBAGE, Case, Draw, Family, mask

LN2 = 0.6931471805599453
LN5 = 1.6094379124341003
NO_FRACTIONS = {"positive_high": 0.0, "positive_low": 0.0, "negative_high": 0.0, "negative_low": 0.0, "clipped": 0.0}


def _at_ratios(
    ratios: list[float], advantages: list[float], low: float, high: float, dual: float | None = None
) -> dict[str, Any]:
    """One row whose old log-probs are -1, so that the new ones are log(ratio) - 1."""
    return {
        "logprobs": [[round(math.log(ratio) - 1.0, 12) for ratio in ratios]],
        "old_logprobs": [[-1.0] * len(ratios)],
        "advantages": [advantages],
        "mask": [[True] * len(ratios)],
        "clip_low": low,
        "clip_high": high,
        "dual_clip": dual,
    }


def _by_hand(
    name: str, why: str, log_ratio: float, advantage: float, loss: float, grad: float, **fractions: float
) -> Case:
    """One token at a ratio of 2 or 1/2, range 0.2 on both sides."""
    inputs = _at_ratios([1.0], [advantage], 0.2, 0.2)
    inputs |= {"logprobs": [[log_ratio]], "old_logprobs": [[0.0]]}
    return Case(name, why, "clip_loss", inputs, {"loss": [[loss]], "grad": [[grad]], **NO_FRACTIONS, **fractions})


def _random_batch(draw: Draw, low: float, high: float, dual: float | None, distance: float = 0.5) -> dict[str, Any]:
    rows = mask(".xxxx.", ".xx...", ".xxxxx")
    old = draw.grid(rows, -2.5, -0.3, MILD_GARBAGE)
    new = [
        [x if is_sampled else MILD_GARBAGE[t % 4] for t, (x, is_sampled) in enumerate(zip(row, row_mask, strict=True))]
        for row, row_mask in zip(draw.near(old, distance), rows, strict=True)
    ]
    batch = {"logprobs": new, "old_logprobs": old, "advantages": draw.grid(rows, -2, 2), "mask": rows}
    return {**batch, "clip_low": low, "clip_high": high, "dual_clip": dual}


def clip_cases() -> Family:
    """Sign of the advantage x side of the clip."""
    draw = Draw("clip_cases")
    cases = [
        _by_hand("A > 0, above", "min(2, 1.2) = 1.2, a constant.", LN2, 1.0, -1.2, 0.0, positive_high=1.0, clipped=1.0),
        _by_hand("A > 0, below", "min(0.5, 0.8) = 0.5: the pull stays.", -LN2, 1.0, -0.5, -0.5, positive_low=1.0),
        _by_hand("A < 0, above", "min(-2, -1.2) = -2: no bound, on purpose.", LN2, -1.0, 2.0, 2.0, negative_high=1.0),
        _by_hand("A < 0, below", "min(-0.5, -0.8) = -0.8.", -LN2, -1.0, 0.8, 0.0, negative_low=1.0, clipped=1.0),
        _by_hand("on policy, A > 0", "r = 1: loss -A, gradient -A.", 0.0, 3.0, -3.0, -3.0),
        _by_hand("on policy, A < 0", "r = 1: loss -A, gradient -A.", 0.0, -3.0, 3.0, 3.0),
        _by_hand("A = 0, above", "Nothing to gain or lose; counted nowhere.", LN2, 0.0, 0.0, 0.0),
        _by_hand("A = 0, below", "Nothing to gain or lose; counted nowhere.", -LN2, 0.0, 0.0, 0.0),
        _by_hand("A < 0, far above", "r = 5: min(-5, -1.2) = -5.", LN5, -1.0, 5.0, 5.0, negative_high=1.0),
    ]
    edges = [0.79, 0.81, 1.19, 1.21]
    asymmetric = [0.79, 0.81, 1.27, 1.29]
    for sign, label in ((1.0, "A > 0"), (-1.0, "A < 0")):
        inputs = _at_ratios(edges, [sign * 1.5] * 4, 0.2, 0.2)
        cases.append(
            Case(f"both boundaries, {label}", "Just inside and just outside of 0.8 and 1.2.", "clip_loss", inputs)
        )
        inputs = _at_ratios(asymmetric, [sign * 1.5] * 4, 0.2, 0.28)
        cases.append(Case(f"asymmetric range, {label}", "0.8 below and 1.28 above.", "clip_loss", inputs))
    inputs = _at_ratios([2.0, 0.5, 2.0, 0.5, 1.1], [1.0, 1.0, -1.0, -1.0, 1.0], 0.2, 0.2)
    cases.append(
        Case("all four at once", "One token of each kind and one inside: 0.2 each, 0.4 clipped.", "clip_loss", inputs)
    )
    why = "Fractions are of sampled tokens; garbage stands elsewhere."
    cases.append(Case("a masked batch", why, "clip_loss", _random_batch(draw, 0.2, 0.2, None)))
    cases.append(Case("a masked batch, narrow", why, "clip_loss", _random_batch(draw, 0.1, 0.1, None)))
    cases.append(Case("a masked batch, asymmetric", why, "clip_loss", _random_batch(draw, 0.1, 0.3, None)))
    about = (
        "The pessimistic minimum in all four cases of sign and side: the clip only ever removes an incentive, and a "
        "bad action above the range is punished without bound."
    )
    return Family("clip_cases", about, cases)


def dual_clip() -> Family:
    """A floor under the objective where the advantage is negative."""
    draw = Draw("dual_clip")

    def single(name: str, why: str, log_ratio: float, advantage: float, loss: float, grad: float, **fractions: float):
        inputs = _at_ratios([1.0], [advantage], 0.2, 0.2, 3.0)
        inputs |= {"logprobs": [[log_ratio]], "old_logprobs": [[0.0]]}
        return Case(name, why, "clip_loss", inputs, {"loss": [[loss]], "grad": [[grad]], **NO_FRACTIONS, **fractions})

    high = {"negative_high": 1.0}
    cases = [
        single("A < 0, beyond c", "max(-5, -3) = -3, a constant.", LN5, -1.0, 3.0, 0.0, clipped=1.0, **high),
        single("A < 0, between", "r = 2 < 3: max(-2, -3) = -2.", LN2, -1.0, 2.0, 2.0, **high),
        single("A > 0, beyond c", "Only for A < 0: min(5, 1.2).", LN5, 1.0, -1.2, 0.0, positive_high=1.0, clipped=1.0),
        single("A < 0, below", "The plain clip: -0.8.", -LN2, -1.0, 0.8, 0.0, negative_low=1.0, clipped=1.0),
    ]
    inputs = _at_ratios([1.9, 2.1, 2.9, 0.7], [-1.0, -2.0, -0.5, -1.0], 0.2, 0.2, 2.0)
    cases.append(Case("around c = 2", "Just below and just above.", "clip_loss", inputs))
    for dual in (1.4, 3.0):
        inputs = _random_batch(draw, 0.2, 0.2, dual, distance=1.2)
        cases.append(Case(f"a masked batch, c = {dual}", "Both clips at work.", "clip_loss", inputs))
    return Family("dual_clip", "The dual clip bounds the loss at -c A where A < 0 and r > c, and nowhere else.", cases)


def value_clip() -> Family:
    """The clipped value loss."""
    draw = Draw("value_clip")

    def single(
        name: str, why: str, numbers: tuple[float, float, float, float | None], loss: float, grad: float
    ) -> Case:
        value, old, target, clip = numbers
        inputs = {"values": [[value]], "old_values": [[old]], "returns": [[target]], "clip": clip}
        return Case(name, why, "value_loss", inputs, {"loss": [[loss]], "grad": [[grad]]})

    cases = [
        single("no clip", "(3 - 1)^2 / 2 = 2; gradient 3 - 1.", (3.0, 0.0, 1.0, None), 2.0, 2.0),
        single("inside the range", "(0.1 - 1)^2 / 2.", (0.1, 0.0, 1.0, 0.2), 0.405, -0.9),
        single(
            "moved too far towards the target", "0.5 against (0.2 - 2)^2 / 2 = 1.62.", (1.0, 0.0, 2.0, 0.2), 1.62, 0.0
        ),
        single("moved past the target", "0.5 against (0.2 - 0)^2 / 2 = 0.02.", (1.0, 0.0, 0.0, 0.2), 0.5, 1.0),
        single(
            "downwards, too far", "(-1 + 2)^2 / 2 = 0.5 against (-0.2 + 2)^2 / 2.", (-1.0, 0.0, -2.0, 0.2), 1.62, 0.0
        ),
        single(
            "away from the target", "(-1 - 2)^2 / 2 = 4.5 against (-0.2 - 2)^2 / 2.", (-1.0, 0.0, 2.0, 0.2), 4.5, -3.0
        ),
    ]
    for clip in (None, 0.2, 0.5):
        old = draw.full_grid(3, 5, -1, 1)
        inputs = {
            "values": draw.near(old, 0.8),
            "old_values": old,
            "returns": draw.full_grid(3, 5, -2, 2),
            "clip": clip,
        }
        cases.append(Case(f"random, clip {clip}", "Every kind of token.", "value_loss", inputs))
    about = "The value loss is the larger of the plain and the clamped square, halved; a binding clamp has no gradient."
    return Family("value_clip", about, cases)


def policy_losses() -> Family:
    """REINFORCE, the unclipped surrogate, and the KL penalty."""
    draw = Draw("policy_losses")
    double = {"logprobs": [[LN2]], "old_logprobs": [[0.0]], "advantages": [[1.5]]}
    cases = [
        Case(
            "reinforce, by hand",
            "-A log pi = -2 * -0.5 = 1; gradient -A. A cut graph would give 0.",
            "reinforce_loss",
            {"logprobs": [[-0.5, -1.0]], "advantages": [[2.0, -3.0]]},
            {"loss": [[1.0, -3.0]], "grad": [[-2.0, 3.0]]},
        ),
        Case(
            "unclipped, by hand",
            "r = 2: -r A = -3, and so is the gradient.",
            "unclipped_loss",
            double,
            {"loss": [[-3.0]], "grad": [[-3.0]]},
        ),
        Case(
            "k1 penalty, by hand",
            "d = old - new = -log 2: -3 + 2 * -log 2; gradient -3 - 2.",
            "kl_penalty_loss",
            {**double, "beta": 2.0, "estimator": "k1"},
            {"loss": [[-4.386294361119891]], "grad": [[-5.0]]},
        ),
        Case(
            "k2 penalty, by hand",
            "-3 + 2 * (log 2)^2 / 2; gradient -3 - 2 d = -3 + 2 log 2.",
            "kl_penalty_loss",
            {**double, "beta": 2.0, "estimator": "k2"},
            {"loss": [[-2.519546986081799]], "grad": [[-1.6137056388801094]]},
        ),
        Case(
            "k3 penalty, by hand",
            "-3 + 2 (2 - 1 - log 2); gradient -3 + 2 (r - 1) = -1.",
            "kl_penalty_loss",
            {**double, "beta": 2.0, "estimator": "k3"},
            {"loss": [[-2.386294361119891]], "grad": [[-1.0]]},
        ),
    ]
    old = draw.full_grid(2, 4, -2.5, -0.2)
    batch = {"logprobs": draw.near(old, 0.5), "old_logprobs": old, "advantages": draw.full_grid(2, 4, -2, 2)}
    plain = {"logprobs": batch["logprobs"], "advantages": batch["advantages"]}
    cases.append(Case("reinforce, random", "Token by token.", "reinforce_loss", plain))
    cases.append(Case("unclipped, random", "Token by token.", "unclipped_loss", batch))
    for estimator in ("k1", "k2", "k3"):
        inputs = {**batch, "beta": 0.7, "estimator": estimator}
        cases.append(Case(f"{estimator} penalty, random", "Token by token.", "kl_penalty_loss", inputs))
    cases.append(
        Case(
            "no penalty",
            "beta = 0 is the unclipped loss.",
            "kl_penalty_loss",
            {**batch, "beta": 0.0, "estimator": "k3"},
        )
    )
    about = "The plain objectives and their gradients: the penalty is KL(old || new), differentiated as it stands."
    return Family("policy_losses", about, cases)


def large_ratios() -> Family:
    """Log-ratios whose exponential float32, or even float64, cannot hold."""
    e20, k3_bound = 485165195.4097903, 485165174.4097903  # exp(20), and exp(20) - 1 - 20

    def clip_at(log_ratio: float, advantage: float, dual: float | None, loss: float, why: str, **fractions: float):
        bound = f", c = {dual:g}" if dual is not None else ""
        name = f"clip, log r = {log_ratio:g}, A = {advantage:g}{bound}"
        inputs = _at_ratios([1.0], [advantage], 0.2, 0.2, dual) | {"logprobs": [[log_ratio]], "old_logprobs": [[0.0]]}
        return Case(name, why, "clip_loss", inputs, {"loss": [[loss]], "grad": [[0.0]], **NO_FRACTIONS, **fractions})

    high, low = {"positive_high": 1.0, "clipped": 1.0}, {"negative_low": 1.0, "clipped": 1.0}
    cases = [
        clip_at(x, 1.0, None, -1.2, "min(r, 1.2) = 1.2, a constant: 0 times infinity would be NaN.", **high)
        for x in (50.0, 100.0, 1e4)
    ]
    cases += [
        clip_at(-1e4, 1.0, None, 0.0, "r = 0 to every digit: loss and gradient are 0.", positive_low=1.0),
        clip_at(-1e4, -1.0, None, 0.8, "min(-0, -0.8) = -0.8, a constant.", **low),
        clip_at(1e4, -1.0, 3.0, 3.0, "max(-r, -3) = -3, a constant.", negative_high=1.0, clipped=1.0),
        clip_at(1e4, 0.0, None, 0.0, "A = 0: nothing to gain or lose."),
        clip_at(100.0, -1.0, None, e20, "No clip bounds this; the exponent stops at 20.", negative_high=1.0),
        clip_at(1e4, -2.0, None, 2 * e20, "The same, twice A.", negative_high=1.0),
    ]
    far = {"logprobs": [[100.0, 1e4, -1e4]], "old_logprobs": [[0.0, 0.0, 0.0]], "advantages": [[1.0, -2.0, 1.0]]}
    flat = {"grad": [[0.0, 0.0, 0.0]]}
    cases.append(
        Case("unclipped", "r stops at exp(20).", "unclipped_loss", far, {"loss": [[-e20, 2 * e20, 0.0]]} | flat)
    )
    penalty = {**far, "advantages": [[0.0, 0.0, 0.0]], "beta": 0.5}
    cases.append(
        Case(
            "k3 penalty",
            "d = old - new: k3 stops at d = -20, and grows like d on the other side, with gradient -0.5 (1 - 0).",
            "kl_penalty_loss",
            {**penalty, "estimator": "k3"},
            {"loss": [[k3_bound / 2, k3_bound / 2, 4999.5]], "grad": [[0.0, 0.0, -0.5]]},
        )
    )
    apart = {"logprobs": [[-1e4, 0.0, -100.0]], "other_logprobs": [[0.0, -1e4, 0.0]], "estimator": "k3"}
    why = "exp(-d) - 1 + d with d no lower than -20; for d = 1e4 it is d - 1."
    cases.append(Case("k3", why, "kl_estimate", apart, {"kl": [[k3_bound, 9999.0, k3_bound]]}))
    draw = Draw("large_ratios")
    rows = mask(".xxxxx", "xxxx..")
    wide = {"old_logprobs": draw.grid(rows, -3, -1), "advantages": draw.grid(rows, -2, 2), "mask": rows}
    wide["logprobs"] = draw.grid(rows, -60, 60)
    for dual in (None, 3.0):
        clip = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual}
        cases.append(Case(f"a masked batch, dual clip {dual}", "Up to 60 nats apart.", "clip_loss", {**wide, **clip}))
    about = (
        "A ratio's exponent is clamped at 20 from above, so that losses and gradients are finite whatever the policies "
        "say; where the clip binds, the gradient is 0 and not NaN."
    )
    return Family("large_ratios", about, cases)


FAMILIES = [clip_cases, dual_clip, value_clip, policy_losses, large_ratios]
