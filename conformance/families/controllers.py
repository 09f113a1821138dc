"""When an update stops, and how the KL coefficient moves."""

from typing import Any

from conformance.families.case import MILD_GARBAGE, Case, Draw, Family, mask


def early_stop() -> Family:
    """Stop before the step whose measured KL is above the limit."""
    draw = Draw("early_stop")
    same = {"logprobs": [[-1.0, -2.0]], "old_logprobs": [[-1.0, -2.0]], "mask": mask("xx")}
    one_apart = {"logprobs": [[-2.0, -7.0]], "old_logprobs": [[-1.0, 5.0]], "mask": mask("x.")}
    balanced = {"logprobs": [[-2.0, -1.0]], "old_logprobs": [[-1.0, -2.0]], "mask": mask("xx")}
    rising = {"logprobs": [[-0.5, -1.5]], "old_logprobs": [[-1.0, -2.0]], "mask": mask("xx")}

    def minibatch(distance: float) -> dict[str, Any]:
        rows = mask(".xxx", ".xx.", "xxxx")
        old = draw.grid(rows, -2, -0.4, MILD_GARBAGE)
        return {"logprobs": draw.near(old, distance), "old_logprobs": old, "mask": rows}

    cases = [
        Case(
            "the second step is refused",
            "First KL 0: taken. Then d = old - new = 1, k3 = 1/e = 0.368 > 0.2: refused; the third is never visited.",
            "early_stop",
            {"minibatches": [same, one_apart, same], "limit": 0.2},
            {"steps": 1, "stopped": True, "kl": [0.0, 0.36787944117144233]},
        ),
        Case(
            "under the limit",
            "The same minibatches with a limit of 0.5: all three steps.",
            "early_stop",
            {"minibatches": [same, one_apart, same], "limit": 0.5},
            {"steps": 3, "stopped": False, "kl": [0.0, 0.36787944117144233, 0.0]},
        ),
        Case(
            "differences that cancel",
            "d = (1, -1): their mean is 0 but k3 = (1/e + e - 2) / 2 = 0.543 > 0.3.",
            "early_stop",
            {"minibatches": [balanced], "limit": 0.3},
            {"steps": 0, "stopped": True, "kl": [0.5430806348152437]},
        ),
        Case(
            "log-probs that rose",
            "d = old - new = -1/2 twice: k3 = exp(0.5) - 1.5 = 0.149 > 0.1. A mean of old - new is negative here.",
            "early_stop",
            {"minibatches": [rising], "limit": 0.1},
            {"steps": 0, "stopped": True, "kl": [0.14872127070012819]},
        ),
        Case(
            "growing distance",
            "Padding is not measured.",
            "early_stop",
            {"minibatches": [minibatch(d) for d in (0.1, 0.3, 0.9, 1.5)], "limit": 0.08},
        ),
        Case(
            "never",
            "Small distances, far below the limit.",
            "early_stop",
            {"minibatches": [minibatch(0.2) for _ in range(3)], "limit": 0.1},
        ),
    ]
    about = (
        "The update stops before the step whose KL(old || new), the mean of k3 over sampled tokens, is above the "
        "limit. A signed mean has the wrong sign or cancels."
    )
    return Family("early_stop", about, cases)


def adaptive_kl() -> Family:
    """The PPO paper's rule."""
    draw = Draw("adaptive_kl")
    sequence = [draw.number(0.001, 0.06) for _ in range(8)]
    return Family(
        "adaptive_kl",
        "The coefficient doubles far above the target, halves far below it, and stays between; it is carried along.",
        [
            Case(
                "down, stay, up, up",
                "target 0.02: 0.01 < 0.0133 halves; 0.02 stays; 0.04 > 0.03 doubles, twice.",
                "adaptive_kl",
                {"coef": 1.0, "target": 0.02, "kls": [0.01, 0.02, 0.04, 0.5]},
                {"coefs": [0.5, 0.5, 1.0, 2.0]},
            ),
            Case(
                "the band",
                "0.75 and 1.4 lie between 1 / 1.5 and 1.5; 0.6 and 1.6 do not.",
                "adaptive_kl",
                {"coef": 0.25, "target": 1.0, "kls": [0.75, 1.4, 0.6, 1.6]},
                {"coefs": [0.25, 0.25, 0.125, 0.25]},
            ),
            Case(
                "a negative sample",
                "Far below the target: halve.",
                "adaptive_kl",
                {"coef": 0.5, "target": 0.1, "kls": [-0.2, 0.0]},
                {"coefs": [0.25, 0.125]},
            ),
            Case(
                "a sequence",
                "The state is the coefficient.",
                "adaptive_kl",
                {"coef": 0.3, "target": 0.02, "kls": sequence},
            ),
        ],
    )


def proportional_kl() -> Family:
    """The rule of the first RLHF paper on language models."""
    draw = Draw("proportional_kl")
    kls = draw.row(6, 1.0, 12.0)
    return Family(
        "proportional_kl",
        "The coefficient moves by the clipped relative error, weighted by the samples seen over the horizon.",
        [
            Case(
                "far above",
                "The error 12/6 - 1 = 1 is clipped to 0.2: 0.2 * (1 + 0.2 * 256 / 10000) = 0.201024.",
                "proportional_kl",
                {"coef": 0.2, "target": 6.0, "horizon": 10000.0, "kls": [12.0], "counts": [256]},
                {"coefs": [0.201024]},
            ),
            Case(
                "far below, then inside",
                "-0.2 * 100/1000 = -0.02: 0.98; then 6.6/6 - 1 = 0.1: 0.98 * (1 + 0.1 * 0.1) = 0.9898.",
                "proportional_kl",
                {"coef": 1.0, "target": 6.0, "horizon": 1000.0, "kls": [0.0, 6.6], "counts": [100, 100]},
                {"coefs": [0.98, 0.9898]},
            ),
            Case(
                "on target",
                "No error, no change.",
                "proportional_kl",
                {"coef": 0.5, "target": 4.0, "horizon": 100.0, "kls": [4.0], "counts": [64]},
                {"coefs": [0.5]},
            ),
            Case(
                "a sequence",
                "Counts differ from batch to batch.",
                "proportional_kl",
                {"coef": 0.15, "target": 6.0, "horizon": 2000.0, "kls": kls, "counts": [64, 64, 128, 32, 256, 64]},
            ),
        ],
    )


FAMILIES = [early_stop, adaptive_kl, proportional_kl]
