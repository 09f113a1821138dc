"""Means, variances and whitening over sampled tokens only."""

from conformance.families.case import Case, Draw, Family, mask

LAYOUTS = {
    "right padding": mask("xxxx..", "xx....", "xxxxx."),
    "left padding": mask("..xxxx", "....xx", ".xxxxx"),
    "gaps": mask("x.xx.x", "..xx.x", ".x...x"),
}


def statistics() -> Family:
    """Mean and variance."""
    draw = Draw("statistics")
    one_two_three = {"x": [[1.0, 1000.0, 2.0], [-1000.0, 3.0, 777.0]], "mask": mask("x.x", ".x.")}
    cases = [
        Case("mean of 1, 2, 3", "(1 + 2 + 3) / 3 = 2.", "masked_mean", one_two_three, {"mean": 2.0}),
        Case(
            "population variance of 1, 2, 3",
            "(1 + 0 + 1) / 3 = 2/3.",
            "masked_variance",
            {**one_two_three, "unbiased": False},
            {"variance": 0.6666666666666666},
        ),
        Case(
            "sample variance of 1, 2, 3",
            "(1 + 0 + 1) / 2 = 1.",
            "masked_variance",
            {**one_two_three, "unbiased": True},
            {"variance": 1.0},
        ),
        Case(
            "mean over tokens, not over rows",
            "Rows of 3 and 1 tokens: (1 + 1 + 1 + 5) / 4 = 2; the mean of the row means would be 3.",
            "masked_mean",
            {"x": [[1.0, 1.0, 1.0], [5.0, 777.0, 777.0]], "mask": mask("xxx", "x..")},
            {"mean": 2.0},
        ),
        Case(
            "one token",
            "A single number is its own mean.",
            "masked_mean",
            {"x": [[1000.0, -0.75]], "mask": mask(".x")},
            {"mean": -0.75},
        ),
    ]
    for layout, rows in LAYOUTS.items():
        x = draw.grid(rows, -2, 3)
        why = "Random numbers, garbage off the mask."
        cases.append(Case(f"mean, {layout}", why, "masked_mean", {"x": x, "mask": rows}))
        for unbiased in (False, True):
            inputs = {"x": x, "mask": rows, "unbiased": unbiased}
            label = "sample" if unbiased else "population"
            cases.append(Case(f"{label} variance, {layout}", why, "masked_variance", inputs))
    return Family("statistics", "Means and variances are over sampled tokens only; padding never enters.", cases)


def whitening() -> Family:
    """Whitening with the mean removed (advantages) and kept (rewards)."""
    draw = Draw("whitening")
    choice = {"unbiased": False, "epsilon": 0.0}
    cases = [
        Case(
            "mean removed",
            "1 and 5: m = 3, var = 4, so (1 - 3) / 2 = -1 and +1.",
            "whiten",
            {"x": [[1.0, 1000.0, 5.0]], "mask": mask("x.x"), "shift_mean": True, **choice},
            {"whitened": [[-1.0, None, 1.0]]},
        ),
        Case(
            "mean kept",
            "The same with the mean put back: -1 + 3 = 2 and 1 + 3 = 4.",
            "whiten",
            {"x": [[1.0, 1000.0, 5.0]], "mask": mask("x.x"), "shift_mean": False, **choice},
            {"whitened": [[2.0, None, 4.0]]},
        ),
        Case(
            "epsilon stands under the root",
            "var + epsilon = 4 + 5 = 9: (1 - 3) / 3. Beside the root it would be -2 / 7.",
            "whiten",
            {"x": [[1.0, 5.0]], "mask": mask("xx"), "shift_mean": True, "unbiased": False, "epsilon": 5.0},
            {"whitened": [[-0.6666666666666666, 0.6666666666666666]]},
        ),
        Case(
            "one statistic for the whole batch",
            "Rows (0, 2) and (4, 6): m = 3, var = 5 over all four; row by row it would be -1, 1, -1, 1. 3 / sqrt(5).",
            "whiten",
            {"x": [[0.0, 2.0], [4.0, 6.0]], "mask": mask("xx", "xx"), "shift_mean": True, **choice},
            {
                "whitened": [
                    [-1.3416407864998738, -0.4472135954999579],
                    [0.4472135954999579, 1.3416407864998738],
                ]
            },
        ),
        Case(
            "a constant stays still",
            "Nothing varies: 0 / sqrt(0 + 1e-8) = 0.",
            "whiten",
            {"x": [[0.5, 0.5], [0.5, 777.0]], "mask": mask("xx", "x."), "shift_mean": True, "unbiased": False}
            | {"epsilon": 1e-8},
            {"whitened": [[0.0, 0.0], [0.0, None]]},
            exact=True,
        ),
    ]
    for layout, rows in LAYOUTS.items():
        x = draw.grid(rows, -2, 3)
        for shift_mean in (True, False):
            label = "mean removed" if shift_mean else "mean kept"
            for unbiased in (True, False):
                spread = "sample" if unbiased else "population"
                inputs = {"x": x, "mask": rows, "shift_mean": shift_mean, "unbiased": unbiased, "epsilon": 1e-8}
                why = "Garbage off the mask would swamp both moments."
                cases.append(Case(f"{label}, {spread} variance, {layout}", why, "whiten", inputs))
    about = (
        "Whitening uses the moments of sampled tokens over the whole batch; rewards keep their mean, advantages do not."
    )
    return Family("whitening", about, cases)


FAMILIES = [statistics, whitening]
