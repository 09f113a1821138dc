"""Advantages from several answers to one prompt."""

from typing import Any

from conformance.families.case import Case, Draw, Family


def rloo() -> Family:
    """Leave one out."""
    draw = Draw("rloo")

    def case(name: str, why: str, scores: list[float], groups: list[int], expected: list[float] | None = None) -> Case:
        inputs = {"scores": scores, "group_ids": groups}
        return Case(name, why, "leave_one_out", inputs, None if expected is None else {"advantages": expected})

    return Family(
        "rloo",
        "The baseline of an answer is the mean of the other answers to its prompt, without its own score.",
        [
            case("three answers", "Others: 4, 3.5, 1.5.", [1.0, 2.0, 6.0], [0, 0, 0], [-3.0, -1.5, 4.5]),
            case("two answers", "Each is the other's baseline.", [0.25, 1.0], [7, 7], [-0.75, 0.75]),
            case(
                "groups interleaved",
                "Group 0 is (1, 3), group 1 is (10, 20): they never mix.",
                [1.0, 10.0, 3.0, 20.0],
                [0, 1, 0, 1],
                [-2.0, -10.0, 2.0, 10.0],
            ),
            case("all equal", "Nothing to prefer.", [0.5, 0.5, 0.5], [0, 0, 0], [0.0, 0.0, 0.0]),
            case("four answers, two prompts", "Random scores.", draw.row(8, -2, 2), [0, 0, 0, 0, 1, 1, 1, 1]),
            case(
                "groups of different size",
                "Two, three and four answers.",
                draw.row(9, -2, 2),
                [2, 0, 1, 0, 1, 2, 1, 2, 2],
            ),
        ],
    )


def grpo() -> Family:
    """The group's z-score, or only its centring."""
    draw = Draw("grpo")
    settings = ((False, False), (True, False), (True, True))

    def case(name: str, why: str, scores: list[float], groups: list[int], how: tuple[bool, bool, float], **more: Any):
        scale, unbiased, epsilon = how
        inputs = {
            "scores": scores,
            "group_ids": groups,
            "scale_by_std": scale,
            "unbiased": unbiased,
            "epsilon": epsilon,
        }
        return Case(name, why, "group_advantages", inputs, **more)

    one_two_three = [1.0, 2.0, 3.0]
    root = 1.224744871391589  # 1 / sqrt(2/3)
    cases = [
        case(
            "centred, by hand",
            "Mean 2.",
            one_two_three,
            [0] * 3,
            (False, False, 1e-4),
            expected={"advantages": [-1.0, 0.0, 1.0]},
        ),
        case(
            "population std, by hand",
            "std = sqrt(2/3): 1 / 0.8165.",
            one_two_three,
            [0] * 3,
            (True, False, 0.0),
            expected={"advantages": [-root, 0.0, root]},
        ),
        case(
            "sample std, by hand",
            "std = 1.",
            one_two_three,
            [0] * 3,
            (True, True, 0.0),
            expected={"advantages": [-1.0, 0.0, 1.0]},
        ),
        case(
            "epsilon stands beside the std",
            "1 / (1 + 1) = 0.5. Under the root it would be 1 / sqrt(2).",
            one_two_three,
            [0] * 3,
            (True, True, 1.0),
            expected={"advantages": [-0.5, 0.0, 0.5]},
        ),
        case(
            "a constant group",
            "0 / (0 + epsilon) = 0: no answer was better, so nothing is learned, and nothing blows up.",
            [0.5, 0.5, 0.5, 1.0, 0.0],
            [0, 0, 0, 1, 1],
            (True, False, 1e-4),
            expected={"advantages": [0.0, 0.0, 0.0, 0.9998000399920016, -0.9998000399920016]},
            exact=True,
        ),
        case(
            "groups interleaved, centred",
            "Group 0 has mean 2, group 1 has mean 15.",
            [1.0, 10.0, 3.0, 20.0],
            [0, 1, 0, 1],
            (False, False, 1e-4),
            expected={"advantages": [-1.0, -5.0, 1.0, 5.0]},
        ),
    ]
    for scale, unbiased in settings:
        label = ("sample std" if unbiased else "population std") if scale else "centred"
        cases.append(
            case(
                f"{label}, two groups", "Random scores.", draw.row(8, -2, 2), [0] * 4 + [1] * 4, (scale, unbiased, 1e-4)
            )
        )
        groups = [2, 0, 1, 0, 1, 2, 1, 2, 2]
        cases.append(
            case(
                f"{label}, groups of different size",
                "Two to four answers.",
                draw.row(9, -2, 2),
                groups,
                (scale, unbiased, 1e-4),
            )
        )
    about = "Scores are centred on their own group and, if asked, divided by its deviation; equal scores give zero."
    return Family("grpo", about, cases)


FAMILIES = [rloo, grpo]
