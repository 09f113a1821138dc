"""Returns and advantages, with masks, gaps and every special case."""

from typing import Any

from conformance.families.case import Case, Draw, Family, mask

LAYOUTS = {
    "full": mask("xxxxx", "xxxxx"),
    "right padding": mask("xxxx..", "xx....", "xxxxxx"),
    "left padding": mask("..xxxx", "....xx", "xxxxxx"),
    "both sides": mask(".xxxx.", "..xx..", "...xxx"),
}
GAPS = {
    "one gap": mask("xx..xx", "x.xxx."),
    "two gaps": mask(".x.xx..x", "xx.x...x"),
    "a gap after the prompt": mask("..x..xx", "...x.x."),
}


def _random_inputs(draw: Draw, rows: list[list[bool]], **more: Any) -> dict[str, Any]:
    return {"rewards": draw.grid(rows, -1, 1), "values": draw.grid(rows, -1.5, 1.5), "mask": rows, **more}


def gae() -> Family:
    """The general case."""
    draw = Draw("gae")
    cases = [
        Case(
            "three tokens by hand",
            "gamma = lambda = 1/2. delta = (1 + 0.5 - 1, 2 + 1 - 1, 4 - 2) = (0.5, 2, 2). A2 = 2, A1 = 2 + 2/4 = 2.5, "
            "A0 = 0.5 + 2.5/4 = 1.125; returns = A + V.",
            "gae",
            {
                "rewards": [[1.0, 2.0, 4.0]],
                "values": [[1.0, 1.0, 2.0]],
                "mask": mask("xxx"),
                "gamma": 0.5,
                "lam": 0.5,
                "final_values": None,
            },
            {"advantages": [[1.125, 2.5, 2.0]], "returns": [[2.125, 3.5, 4.0]]},
        ),
        Case(
            "padding is not a next value",
            "The same row, padded on both sides with large numbers.",
            "gae",
            {
                "rewards": [[1000.0, 1.0, 2.0, 4.0, -1000.0]],
                "values": [[777.0, 1.0, 1.0, 2.0, 1000.0]],
                "mask": mask(".xxx."),
                "gamma": 0.5,
                "lam": 0.5,
                "final_values": None,
            },
            {"advantages": [[None, 1.125, 2.5, 2.0, None]], "returns": [[None, 2.125, 3.5, 4.0, None]]},
        ),
    ]
    for layout, rows in LAYOUTS.items():
        for gamma, lam in ((1.0, 0.95), (0.97, 0.9)):
            inputs = _random_inputs(draw, rows, gamma=gamma, lam=lam, final_values=None)
            name = f"gamma {gamma}, lambda {lam}, {layout}"
            cases.append(Case(name, "Random rewards and values.", "gae", inputs))
    return Family(
        "gae", "Generalised advantage estimation over sampled tokens, row by row, ending at each row's end.", cases
    )


def gae_special_cases() -> Family:
    """Where GAE must equal something simpler."""
    draw = Draw("gae_special_cases")
    rows = mask("xxxxx.", ".xxx..", "xxxxxx")
    common = _random_inputs(draw, rows, gamma=0.9, final_values=None)
    undiscounted = {**common, "gamma": 1.0}
    small = {"rewards": [[1.0, 2.0, 4.0]], "values": [[2.0, 1.0, 3.0]], "mask": mask("xxx"), "final_values": None}
    cases = [
        Case(
            "lambda 0 by hand",
            "delta = (1 + 1 - 2, 2 + 3 - 1, 4 - 3) = (0, 4, 1) with gamma = 1.",
            "gae",
            {**small, "gamma": 1.0, "lam": 0.0},
            {"advantages": [[0.0, 4.0, 1.0]], "returns": [[2.0, 5.0, 4.0]]},
        ),
        Case(
            "lambda 1 by hand",
            "Rewards to go (7, 6, 4) minus values (2, 1, 3); the returns are the rewards to go.",
            "gae",
            {**small, "gamma": 1.0, "lam": 1.0},
            {"advantages": [[5.0, 5.0, 1.0]], "returns": [[7.0, 6.0, 4.0]]},
        ),
        Case(
            "gamma 0 by hand",
            "No future: A = r - V = (-1, 1, 1).",
            "gae",
            {**small, "gamma": 0.0, "lam": 0.95},
            {"advantages": [[-1.0, 1.0, 1.0]], "returns": [[1.0, 2.0, 4.0]]},
        ),
        Case(
            "two steps by hand",
            "gamma = 1/2: 1 + 1 + 3/4 - 2 = 0.75; 2 + 2 - 1 = 3 (two steps remain, nothing after them); 4 - 3 = 1.",
            "n_step",
            {**small, "gamma": 0.5, "n": 2},
            {"advantages": [[0.75, 3.0, 1.0]]},
        ),
        Case(
            "one token",
            "A = r - V = 3 - 1 whatever gamma and lambda are.",
            "gae",
            {"rewards": [[3.0, 1000.0]], "values": [[1.0, 1000.0]], "mask": mask("x."), "gamma": 0.9, "lam": 0.8}
            | {"final_values": None},
            {"advantages": [[2.0, None]], "returns": [[3.0, None]]},
        ),
        Case("lambda 0", "Equals the TD residuals of the next case.", "gae", {**common, "lam": 0.0}),
        Case("TD residuals", "r + gamma V' - V.", "td_residuals", common),
        Case("lambda 1", "Equals reward to go minus value.", "gae", {**common, "lam": 1.0}),
        Case("lambda 1, gamma 1", "Monte Carlo without discount.", "gae", {**undiscounted, "lam": 1.0}),
        Case("gamma 0", "Equals reward minus value.", "gae", {**common, "gamma": 0.0, "lam": 0.7}),
    ]
    for n in (1, 2, 3, 20):
        why = {1: "One step is the TD residual.", 20: "More steps than tokens is Monte Carlo."}.get(n, "n-step.")
        cases.append(Case(f"n-step, n = {n}", why, "n_step", {**common, "n": n}))
    about = (
        "Lambda 0 is the TD residual, lambda 1 is Monte Carlo minus the value, gamma 0 sees one reward; n-step between."
    )
    return Family("gae_special_cases", about, cases)


def gae_across_gaps() -> Family:
    """Tool output between sampled tokens: one step passes, and the values of unsampled tokens are never used."""
    draw = Draw("gae_across_gaps")
    across = {
        "rewards": [[0.0, 1000.0, 1000.0, 1.0]],
        "values": [[0.5, -1000.0, 777.0, 0.9]],
        "mask": mask("x..x"),
        "final_values": None,
    }
    cases = [
        Case(
            "the sign before a tool call",
            "A0 = 0 + V(next sampled) - V0 = 0.9 - 0.5 = +0.4. Taking the gap's value as 0 would give -0.5.",
            "gae",
            {**across, "gamma": 1.0, "lam": 0.0},
            {"advantages": [[0.4, None, None, 0.1]], "returns": [[0.9, None, None, 1.0]]},
        ),
        Case(
            "the trace crosses the gap",
            "A3 = 1 - 0.9 = 0.1; A0 = 0.4 + 0.5 * 0.1 = 0.45: lambda counts one step over the gap, not three.",
            "gae",
            {**across, "gamma": 1.0, "lam": 0.5},
            {"advantages": [[0.45, None, None, 0.1]], "returns": [[0.95, None, None, 1.0]]},
        ),
        Case(
            "one discount over a long gap",
            "G0 = 0 + 0.5 * 8 = 4. Three discounts would give 1.",
            "reward_to_go",
            {"rewards": [[0.0, 777.0, 777.0, 8.0]], "mask": mask("x..x"), "gamma": 0.5},
            {"returns": [[4.0, None, None, 8.0]]},
        ),
        Case(
            "residuals across a gap",
            "delta0 = 0 + 0.5 * 0.9 - 0.5 = -0.05; delta3 = 1 - 0.9 = 0.1.",
            "td_residuals",
            {**across, "gamma": 0.5},
            {"residuals": [[-0.05, None, None, 0.1]]},
        ),
    ]
    for layout, rows in GAPS.items():
        inputs = _random_inputs(draw, rows, gamma=0.95, lam=0.9, final_values=None)
        cases.append(Case(f"gae, {layout}", "Garbage stands in the gaps.", "gae", inputs))
        inputs = _random_inputs(draw, rows, gamma=0.9, n=2, final_values=None)
        cases.append(Case(f"two steps, {layout}", "n counts sampled tokens.", "n_step", inputs))
    rows = GAPS["two gaps"]
    inputs = {"rewards": draw.grid(rows, -1, 1), "mask": rows, "gamma": 0.9}
    cases.append(Case("total return, two gaps", "gamma^k counts sampled tokens.", "total_return", inputs))
    about = (
        "Between two sampled tokens with tool output between them one step passes: GAE carries across. Zeroing the "
        "gap's values flips the sign of the advantage before a tool call."
    )
    return Family("gae_across_gaps", about, cases)


def returns() -> Family:
    """Total return and reward to go."""
    draw = Draw("returns")
    halves = {"rewards": [[1.0, 2.0, 4.0, 1000.0]], "mask": mask("xxx."), "gamma": 0.5}
    cases = [
        Case(
            "total, by hand",
            "1 + 2/2 + 4/4 = 3 on every token.",
            "total_return",
            halves,
            {"returns": [[3.0, 3.0, 3.0, None]]},
        ),
        Case(
            "to go, by hand",
            "4; 2 + 4/2 = 4; 1 + 4/2 = 3.",
            "reward_to_go",
            halves,
            {"returns": [[3.0, 4.0, 4.0, None]]},
        ),
        Case(
            "the discount starts at the first sampled token",
            "After a prompt of two: 1 + 0.5 * 2 = 2, not 0.25 + 0.25.",
            "total_return",
            {"rewards": [[777.0, 777.0, 1.0, 2.0]], "mask": mask("..xx"), "gamma": 0.5},
            {"returns": [[None, None, 2.0, 2.0]]},
        ),
        Case(
            "gamma 0",
            "Only the reward of the token itself.",
            "reward_to_go",
            {"rewards": [[1.0, 2.0, 3.0]], "mask": mask("xxx"), "gamma": 0.0},
            {"returns": [[1.0, 2.0, 3.0]]},
        ),
    ]
    for layout, rows in LAYOUTS.items():
        for method in ("total_return", "reward_to_go"):
            inputs = {"rewards": draw.grid(rows, -1, 1), "mask": rows, "gamma": 0.93}
            cases.append(Case(f"{method}, {layout}", "Random rewards.", method, inputs))
    return Family(
        "returns",
        "A reward reaches every token before it, discounted once per sampled token, and no token after it.",
        cases,
    )


def reinforce_weightings() -> Family:
    """The four weights on grad log pi."""
    draw = Draw("reinforce_weightings")
    hand = {"rewards": [[0.0, 0.0, 2.0]], "values": [[1.0, 0.5, 1.5]], "mask": mask("xxx"), "gamma": 0.5, "lam": 0.0}
    cases = [
        Case(
            "total, by hand",
            "2 / 4 on every token.",
            "reinforce_weights",
            {**hand, "weighting": "total"},
            {"weights": [[0.5, 0.5, 0.5]]},
        ),
        Case(
            "to go, by hand",
            "2/4, 2/2, 2.",
            "reinforce_weights",
            {**hand, "weighting": "to_go"},
            {"weights": [[0.5, 1.0, 2.0]]},
        ),
        Case(
            "baselined, by hand",
            "To go minus V. Reward minus value would be -1, -0.5, 0.5.",
            "reinforce_weights",
            {**hand, "weighting": "baselined"},
            {"weights": [[-0.5, 0.5, 0.5]]},
        ),
        Case(
            "advantage, by hand",
            "lambda 0: 0.25 - 1, 0.75 - 0.5, 2 - 1.5.",
            "reinforce_weights",
            {**hand, "weighting": "advantage"},
            {"weights": [[-0.75, 0.25, 0.5]]},
        ),
    ]
    rows = mask("xxxx.", ".xxxx", "x..xx")
    for weighting in ("total", "to_go", "baselined", "advantage"):
        inputs = _random_inputs(draw, rows, gamma=0.95, lam=0.9, weighting=weighting)
        cases.append(Case(f"{weighting}, padding and a gap", "Random numbers.", "reinforce_weights", inputs))
    for weighting in ("total", "to_go"):
        inputs = {**_random_inputs(draw, rows, gamma=1.0, lam=1.0, weighting=weighting), "values": None}
        cases.append(Case(f"{weighting}, no critic", "These two need no values.", "reinforce_weights", inputs))
    return Family(
        "reinforce_weightings",
        "Each choice of the weight on grad log pi is what it is called; reward minus value is not an advantage.",
        cases,
    )


FAMILIES = [gae, gae_special_cases, gae_across_gaps, returns, reinforce_weightings]
