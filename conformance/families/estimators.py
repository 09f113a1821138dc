"""Estimators beside GAE: n-step returns, lambdas for the critic and by length, and baselines without a critic."""

from typing import Any

from conformance.families.case import Case, Draw, Family, mask

ONE = mask("xxx")
GAPS = mask(".xx.xx", "xxx...", ".x..xx")
GOLDEN: dict[str, Any] = {"rewards": [[0.0, 0.0, 1.0]], "values": [[0.5, 0.6, 0.7]], "mask": ONE, "gamma": 0.9}
# One-step residuals 0.04, 0.03, 0.3; Monte Carlo 0.31, 0.3, 0.3.


def _random(draw: Draw, final: bool) -> dict[str, Any]:
    inputs = {"rewards": draw.grid(GAPS, -1, 1), "values": draw.grid(GAPS, -1, 1), "mask": GAPS}
    return {**inputs, "gamma": 0.95, "final_values": draw.row(3, -1, 1) if final else None}


def n_step_returns() -> Family:
    """The n-step advantage with the critic's target."""
    draw = Draw("n_step_returns")

    def by_hand(
        name: str, why: str, n: int, final: float | None, advantages: list[float], returns: list[float]
    ) -> Case:
        inputs = {**GOLDEN, "n": n, "final_values": None if final is None else [final]}
        return Case(name, why, "n_step_returns", inputs, {"advantages": [advantages], "returns": [returns]})

    monte_carlo = ([0.31, 0.3, 0.3], [0.81, 0.9, 1.0])
    cases = [
        by_hand("n = 1", "The residuals; V + delta = 0.9 V'.", 1, None, [0.04, 0.03, 0.3], [0.54, 0.63, 1.0]),
        by_hand(
            "n = 2", "0.81 * 0.7 - 0.5 = 0.067; 0.9 - 0.6; 1 - 0.7.", 2, None, [0.067, 0.3, 0.3], [0.567, 0.9, 1.0]
        ),
        by_hand("n = 3, the length", "0.81 - 0.5; 0.9 - 0.6; 1 - 0.7: Monte Carlo.", 3, None, *monte_carlo),
        by_hand("n beyond the length", "Nothing more to collect: Monte Carlo.", 99, None, *monte_carlo),
        by_hand(
            "n = 2, cut off",
            "The value 2 closes what is left: 0.9 + 0.81 * 2 - 0.6; 1 + 0.9 * 2 - 0.7.",
            2,
            2.0,
            [0.067, 1.92, 2.1],
            [0.567, 2.52, 2.8],
        ),
        by_hand("n = 1, cut off", "Only the last step sees it.", 1, 2.0, [0.04, 0.03, 2.1], [0.54, 0.63, 2.8]),
    ]
    for n in (1, 2, 3, 7):
        inputs = {**_random(draw, final=n != 2), "n": n}
        cases.append(Case(f"gaps, n = {n}", "Steps are sampled tokens.", "n_step_returns", inputs))
    about = "The n-step advantage collects n rewards and closes with a value; the critic's target is advantage + value."
    return Family("n_step_returns", about, cases)


def decoupled_gae() -> Family:
    """A lambda for the policy, another for the critic."""
    draw = Draw("decoupled_gae")

    def by_hand(
        name: str,
        why: str,
        lams: tuple[float, float],
        final: float | None,
        advantages: list[float],
        returns: list[float],
    ) -> Case:
        inputs = {**GOLDEN, "lam": lams[0], "critic_lam": lams[1]}
        inputs["final_values"] = None if final is None else [final]
        return Case(name, why, "decoupled_gae", inputs, {"advantages": [advantages], "returns": [returns]})

    eight = [0.21712, 0.246, 0.3]  # 0.03 + 0.72 * 0.3; 0.04 + 0.72 * 0.246
    cases = [
        by_hand("0.8 and 1", "The critic learns the discounted reward.", (0.8, 1.0), None, eight, [0.81, 0.9, 1.0]),
        by_hand("0.8 and 0", "The critic learns r + 0.9 V'.", (0.8, 0.0), None, eight, [0.54, 0.63, 1.0]),
        by_hand("0 and 1", "Residuals for the policy.", (0.0, 1.0), None, [0.04, 0.03, 0.3], [0.81, 0.9, 1.0]),
        by_hand("1 and 0", "Monte Carlo for the policy.", (1.0, 0.0), None, [0.31, 0.3, 0.3], [0.54, 0.63, 1.0]),
        by_hand("equal", "GAE and A + V.", (0.8, 0.8), None, eight, [0.71712, 0.846, 1.0]),
        by_hand(
            "cut off",
            "2.1; 0.03 + 0.72 * 2.1; 0.04 + 0.72 * 1.542; returns 2.8, 0.9 * 2.8, 0.81 * 2.8.",
            (0.8, 1.0),
            2.0,
            [1.15024, 1.542, 2.1],
            [2.268, 2.52, 2.8],
        ),
    ]
    for lam, critic_lam in ((0.95, 1.0), (0.5, 0.9), (1.0, 0.3), (0.7, 0.7)):
        inputs = {**_random(draw, final=lam > 0.6), "lam": lam, "critic_lam": critic_lam}
        cases.append(Case(f"gaps, {lam} and {critic_lam}", "Both skip gaps.", "decoupled_gae", inputs))
    about = "The policy's advantages use one lambda and the critic's targets another; neither touches the other's."
    return Family("decoupled_gae", about, cases)


def length_adaptive_gae() -> Family:
    """A lambda for each answer, from its length."""
    draw = Draw("length_adaptive_gae")

    def by_hand(
        name: str, why: str, row: str, alpha: float, lam: float, advantages: list[float | None], returns: float
    ) -> Case:
        where = mask(row)
        last = max(t for t, sampled in enumerate(where[0]) if sampled)
        inputs = {
            "rewards": [[1.0 if t == last else 0.0 if sampled else 777.0 for t, sampled in enumerate(where[0])]],
            "values": [[0.0 if sampled else -1000.0 for sampled in where[0]]],
            "mask": where,
            "gamma": 1.0,
            "alpha": alpha,
            "critic_lam": 1.0,
            "final_values": None,
        }
        expected = {"lambdas": [lam], "advantages": [advantages]}
        expected["returns"] = [[None if a is None else returns for a in advantages]]
        return Case(name, why, "length_adaptive_gae", inputs, expected)

    cases = [
        by_hand("four tokens", "1 - 1 / (0.5 * 4) = 0.5.", "xxxx", 0.5, 0.5, [0.125, 0.25, 0.5, 1.0], 1.0),
        by_hand("two tokens", "1 - 1 / (0.5 * 2) = 0: the residuals.", "xx", 0.5, 0.0, [0.0, 1.0], 1.0),
        by_hand("one token", "1 - 1 / 0.5 = -1 is below 0.", "x", 0.5, 0.0, [1.0], 1.0),
        by_hand("below zero", "1 - 1 / (0.25 * 2) = -1 would alternate.", "xx", 0.25, 0.0, [0.0, 1.0], 1.0),
        by_hand("alpha 2", "1 - 1 / (2 * 2) = 0.75.", "xx", 2.0, 0.75, [0.75, 1.0], 1.0),
        by_hand(
            "padding and gaps are not length",
            "Four sampled tokens of seven.",
            ".xx.xx.",
            0.5,
            0.5,
            [None, 0.125, 0.25, None, 0.5, 1.0, None],
            1.0,
        ),
    ]
    for alpha, critic_lam in ((0.6, 1.0), (1.5, 1.0), (4.0, 0.9)):
        inputs = {**_random(draw, final=alpha < 2), "alpha": alpha, "critic_lam": critic_lam}
        why = "Rows of four and three tokens: each has its own lambda."
        cases.append(Case(f"three answers, alpha {alpha}", why, "length_adaptive_gae", inputs))
    about = "An answer of l sampled tokens has the lambda 1 - 1 / (alpha l), at least 0; the critic keeps its own."
    return Family("length_adaptive_gae", about, cases)


def batch_mean() -> Family:
    """The mean return of the batch as a baseline."""
    draw = Draw("batch_mean")
    uneven = {"rewards": [[0.0, 0.0, 3.0], [0.5, 0.5, 777.0]], "mask": mask("xxx", "xx.")}

    def by_hand(
        name: str, why: str, inputs: dict[str, Any], baseline: float, weights: list[list[float | None]]
    ) -> Case:
        return Case(name, why, "batch_mean_weights", inputs, {"baseline": baseline, "weights": weights})

    cases = [
        by_hand(
            "total",
            "Returns 3 and 1: the mean over answers is 2. Over tokens it would be 2.2.",
            {**uneven, "gamma": 1.0, "weighting": "total"},
            2.0,
            [[1.0, 1.0, 1.0], [-1.0, -1.0, None]],
        ),
        by_hand(
            "to go",
            "The baseline is still of whole answers: 0.5 - 2 on the last token of the second.",
            {**uneven, "gamma": 1.0, "weighting": "to_go"},
            2.0,
            [[1.0, 1.0, 1.0], [-1.0, -1.5, None]],
        ),
        by_hand(
            "discounted",
            "0.25 * 3 = 0.75 and 0.5 + 0.25 = 0.75.",
            {**uneven, "gamma": 0.5, "weighting": "to_go"},
            0.75,
            [[0.0, 0.75, 2.25], [0.0, -0.25, None]],
        ),
        by_hand(
            "one answer",
            "It is its own mean.",
            {"rewards": [[1.0, 1.0]], "mask": mask("xx"), "gamma": 1.0, "weighting": "total"},
            2.0,
            [[0.0, 0.0]],
        ),
        by_hand(
            "a row without sampled tokens",
            "It is no answer: (4 + 2) / 2.",
            {"rewards": [[4.0, 777.0], [1000.0, -777.0], [1.0, 1.0]], "mask": mask("x.", "..", "xx")}
            | {"gamma": 1.0, "weighting": "total"},
            3.0,
            [[1.0, None], [None, None], [-1.0, -1.0]],
        ),
    ]
    for weighting in ("total", "to_go"):
        for gamma in (1.0, 0.9):
            inputs = {"rewards": draw.grid(GAPS, -1, 1), "mask": GAPS, "gamma": gamma, "weighting": weighting}
            cases.append(Case(f"gaps, {weighting}, gamma {gamma}", "Random rewards.", "batch_mean_weights", inputs))
    about = "One number is subtracted from every weight: the mean over answers of their whole returns."
    return Family("batch_mean", about, cases)


def moving_average() -> Family:
    """A baseline from earlier steps."""
    draw = Draw("moving_average")

    def by_hand(name: str, why: str, decay: float, means: list[float], baselines: list[float]) -> Case:
        inputs = {"decay": decay, "means": means}
        return Case(name, why, "moving_average", inputs, {"baselines": baselines})

    cases = [
        by_hand(
            "decay 0.5",
            "1; (0.5 * 1 + 3) / 1.5; (0.25 * 1 + 0.5 * 3 + 2) / 1.75.",
            0.5,
            [1.0, 3.0, 2.0],
            [0.0, 1.0, 2.3333333333333335, 2.142857142857143],
        ),
        by_hand("decay 0", "The last step alone.", 0.0, [1.0, 3.0, -2.0], [0.0, 1.0, 3.0, -2.0]),
        by_hand("a constant", "Its own average from the first step on.", 0.9, [2.0] * 4, [0.0, 2.0, 2.0, 2.0, 2.0]),
        by_hand("one step", "Before it nothing is known.", 0.9, [5.0], [0.0, 5.0]),
        by_hand("no step", "The start.", 0.9, [], [0.0]),
        by_hand("signs", "(0.5 * -1 + 1) / 1.5.", 0.5, [-1.0, 1.0], [0.0, -1.0, 0.3333333333333333]),
    ]
    for decay in (0.3, 0.9, 0.99):
        inputs = {"decay": decay, "means": draw.row(8, -2, 2)}
        cases.append(Case(f"eight steps, decay {decay}", "Random means.", "moving_average", inputs))
    about = "The baseline of a step is the weighted mean of earlier steps alone, without the bias of a start at 0."
    return Family("moving_average", about, cases)


FAMILIES = [n_step_returns, decoupled_gae, length_adaptive_gae, batch_mean, moving_average]
