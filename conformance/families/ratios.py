"""Ratios other than PPO's: one for a whole answer (GSPO), and one that is only a weight (CISPO)."""

import math
from typing import Any

from conformance.families.case import MILD_GARBAGE, Case, Draw, Family, mask

LN2 = 0.6931471805599453
ROOT = 1.4142135623730951  # exp(log(2) / 2)


def _near(draw: Draw, rows: list[list[bool]], distance: float) -> tuple[list[list[float]], list[list[float]]]:
    """`(new, old)` log-probs, with mild garbage off the mask."""
    old = draw.grid(rows, -2.5, -0.3, MILD_GARBAGE)
    moved = draw.near(old, distance)
    new = [
        [x if sampled else MILD_GARBAGE[t % 4] for t, (x, sampled) in enumerate(zip(row, where, strict=True))]
        for row, where in zip(moved, rows, strict=True)
    ]
    return new, old


def gspo() -> Family:
    """The ratio of a whole answer, to the power 1 / length."""
    draw = Draw("gspo")

    def by_hand(
        name: str,
        why: str,
        differences: list[float],
        advantage: float,
        s: float,
        loss: float,
        grad: float,
        clipped: float = 0.0,
    ) -> Case:
        """Old log-probs are 0, so that the new ones are the log-ratios; `grad` is that of each token."""
        inputs = {"logprobs": [differences], "old_logprobs": [[0.0] * len(differences)], "advantages": [advantage]}
        inputs |= {"mask": [[True] * len(differences)], "clip_low": 0.2, "clip_high": 0.2}
        expected = {"ratios": [s], "loss": [loss], "grad": [[grad] * len(differences)], "clipped": clipped}
        return Case(name, why, "gspo_loss", inputs, expected)

    e20 = 485165195.4097903
    cases = [
        by_hand(
            "on policy", "s = 1: loss -A, and each of two tokens has half of -A.", [0.0, 0.0], 3.0, 1.0, -3.0, -1.5
        ),
        by_hand("tokens that cancel", "2 * 1/2: s = 1, though both tokens moved.", [LN2, -LN2], 1.0, 1.0, -1.0, -0.5),
        by_hand("A > 0, above", "s = sqrt(2): min(s, 1.2) = 1.2, a constant.", [LN2, 0.0], 1.0, ROOT, -1.2, 0.0, 1.0),
        by_hand("A < 0, above", "min(-s, -1.2) = -s.", [LN2, 0.0], -1.0, ROOT, ROOT, ROOT / 2),
        by_hand("A > 0, below", "s = 1/2: the pull stays.", [-LN2, -LN2], 1.0, 0.5, -0.5, -0.25),
        by_hand("A < 0, below", "min(-1/2, -0.8) = -0.8.", [-LN2, -LN2], -1.0, 0.5, 0.8, 0.0, 1.0),
        by_hand("one token, A < 0", "PPO's clip: r = 2, -2.", [LN2], -1.0, 2.0, 2.0, 2.0),
        by_hand("one token, A > 0", "PPO's clip: 1.2.", [LN2], 1.0, 2.0, -1.2, 0.0, 1.0),
        by_hand("A = 0", "Nothing to gain or lose.", [LN2, 0.0], 0.0, ROOT, 0.0, 0.0),
        by_hand("far above, A > 0", "A constant: no 0 times infinity.", [1e4, 1e4], 1.0, e20, -1.2, 0.0, 1.0),
        by_hand("far above, A < 0", "The exponent of s stops at 20.", [1e4, 1e4], -1.0, e20, e20, 0.0),
    ]
    rows = mask(".xxxx.", ".xx...", ".xx.xx")
    for low, high in ((0.2, 0.2), (0.05, 0.1)):
        new, old = _near(draw, rows, 0.6)
        inputs = {"logprobs": new, "old_logprobs": old, "advantages": draw.row(3, -2, 2), "mask": rows}
        why = "The mean is over a row's sampled tokens; garbage stands elsewhere."
        cases.append(Case(f"gaps, {low} and {high}", why, "gspo_loss", {**inputs, "clip_low": low, "clip_high": high}))
    about = (
        "The clip acts on one ratio for a whole answer, the geometric mean of its tokens' ratios: the gradient of an "
        "answer is kept or removed as a whole."
    )
    return Family("gspo", about, cases)


def cispo() -> Family:
    """The clipped ratio as a weight without a gradient."""
    draw = Draw("cispo")

    def by_hand(
        name: str, why: str, log_ratio: float, advantage: float, low: float, loss: float, grad: float, clipped: float
    ) -> Case:
        """One token of new log-prob -0.5, range [1 - low, 1.28]."""
        inputs: dict[str, Any] = {"logprobs": [[-0.5]], "old_logprobs": [[-0.5 - log_ratio]]}
        inputs |= {"advantages": [[advantage]], "mask": [[True]], "clip_low": low, "clip_high": 0.28}
        return Case(name, why, "cispo_loss", inputs, {"loss": [[loss]], "grad": [[grad]], "clipped": clipped})

    cases = [
        by_hand("on policy", "r = 1: -A log pi.", 0.0, 2.0, 0.2, 1.0, -2.0, 0.0),
        by_hand("A > 0, above", "w = 1.28, and the token still learns.", LN2, 1.0, 0.2, 0.64, -1.28, 1.0),
        by_hand("A < 0, above", "w = 1.28 here too: PPO would weigh it 2.", LN2, -1.0, 0.2, -0.64, 1.28, 1.0),
        by_hand("A > 0, below", "w = 0.8.", -LN2, 1.0, 0.2, 0.4, -0.8, 1.0),
        by_hand("A < 0, below", "w = 0.8: PPO would remove it.", -LN2, -1.0, 0.2, -0.4, 0.8, 1.0),
        by_hand("no lower bound", "clip_low = 1: w = r = 1/2.", -LN2, -1.0, 1.0, -0.25, 0.5, 0.0),
        by_hand("A = 0", "Nothing to gain or lose; the weight is clipped all the same.", LN2, 0.0, 0.2, 0.0, 0.0, 1.0),
        by_hand("far above", "A constant weight: no infinity.", 1e4, 1.0, 0.2, 0.64, -1.28, 1.0),
        by_hand("far below", "w = 0 without a lower bound.", -1e4, 1.0, 2.0, 0.0, 0.0, 0.0),
    ]
    edges = [0.79, 0.81, 1.27, 1.29]
    for sign, label in ((1.0, "A > 0"), (-1.0, "A < 0")):
        inputs = {
            "logprobs": [[round(math.log(ratio) - 1.0, 12) for ratio in edges]],
            "old_logprobs": [[-1.0] * 4],
            "advantages": [[sign * 1.5] * 4],
            "mask": [[True] * 4],
            "clip_low": 0.2,
            "clip_high": 0.28,
        }
        cases.append(Case(f"both boundaries, {label}", "Just inside and just outside.", "cispo_loss", inputs))
    rows = mask(".xxxx.", ".xx...", ".xxxxx")
    new, old = _near(draw, rows, 0.6)
    inputs = {"logprobs": new, "old_logprobs": old, "advantages": draw.grid(rows, -2, 2), "mask": rows}
    inputs |= {"clip_low": 0.2, "clip_high": 0.2}
    cases.append(Case("a masked batch", "Garbage off the mask.", "cispo_loss", inputs))
    about = (
        "The clipped ratio is a weight without a gradient of its own: it bounds a token's step and removes no token."
    )
    return Family("cispo", about, cases)


FAMILIES = [gspo, cispo]
