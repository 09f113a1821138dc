"""Variants of GRPO from scores to the loss: Dr. GRPO and DAPO, the penalty on long answers, and refilled groups."""

from typing import Any

from conformance.families.case import MILD_GARBAGE, Case, Draw, Family, mask

LN2 = 0.6931471805599453
ROWS = mask(".xxxx.", ".xx...", ".xxx..", ".x....", ".xxxxx", ".xx.xx")
GROUPS = [0, 0, 0, 1, 1, 1]


def _batch(draw: Draw, scores: list[float]) -> dict[str, Any]:
    old = draw.grid(ROWS, -2.5, -0.3, MILD_GARBAGE)
    new = [
        [x if sampled else MILD_GARBAGE[t % 4] for t, (x, sampled) in enumerate(zip(row, where, strict=True))]
        for row, where in zip(draw.near(old, 0.5), ROWS, strict=True)
    ]
    return {"logprobs": new, "old_logprobs": old, "mask": ROWS, "scores": scores, "group_ids": GROUPS}


def _two(differences: list[list[float]], scores: list[float]) -> dict[str, Any]:
    """Two answers to one prompt, of two tokens and of one; old log-probs are 0."""
    inputs = {"logprobs": differences, "old_logprobs": [[0.0, 0.0], [0.0, 0.0]], "mask": mask("xx", "x.")}
    return {**inputs, "scores": scores, "group_ids": [0, 0]}


def dr_grpo() -> Family:
    """No division by the deviation, none by an answer's length."""
    draw = Draw("dr_grpo")

    def by_hand(
        name: str,
        why: str,
        inputs: dict[str, Any],
        advantages: list[float],
        loss: float,
        grad: list[list[float | None]],
    ) -> Case:
        clip = {"clip_low": 0.2, "clip_high": 0.2, "fixed_length": 4}
        return Case(name, why, "dr_grpo", {**inputs, **clip}, {"advantages": advantages, "loss": loss, "grad": grad})

    cases = [
        by_hand(
            "on policy",
            "A = 1 and -1; (-1 - 1 + 1) / (2 * 4).",
            _two([[0.0, 0.0], [0.0, 5.0]], [3.0, 1.0]),
            [1.0, -1.0],
            -0.125,
            [[-0.125, -0.125], [0.125, None]],
        ),
        by_hand(
            "the clip",
            "r = 2: -1.2 and a constant; -1; and 2 on the other answer: (-1.2 - 1 + 2) / 8.",
            _two([[LN2, 0.0], [LN2, 5.0]], [3.0, 1.0]),
            [1.0, -1.0],
            -0.025,
            [[0.0, -0.125], [0.25, None]],
        ),
        by_hand(
            "twice the spread, twice the step",
            "A = 2 and -2: the deviation divides nothing.",
            _two([[0.0, 0.0], [0.0, 5.0]], [5.0, 1.0]),
            [2.0, -2.0],
            -0.25,
            [[-0.25, -0.25], [0.25, None]],
        ),
        by_hand(
            "no spread",
            "Equal scores teach nothing.",
            _two([[LN2, 0.0], [0.0, 5.0]], [0.5, 0.5]),
            [0.0, 0.0],
            0.0,
            [[0.0, 0.0], [0.0, None]],
        ),
    ]
    cases[-1] = Case(**{**vars(cases[-1]), "exact": True})
    for length, low, high in ((6, 0.2, 0.2), (6, 0.2, 0.28), (16, 0.1, 0.1), (1, 0.3, 0.3)):
        inputs = {**_batch(draw, draw.row(6, -1, 2)), "clip_low": low, "clip_high": high, "fixed_length": length}
        why = "Two prompts; the size is rows * length, whatever the answers' own lengths."
        cases.append(Case(f"two groups, length {length}, {low} and {high}", why, "dr_grpo", inputs))
    about = (
        "The advantage is the score minus the group's mean, and the sum over tokens is divided by a fixed length: no "
        "deviation, no length of an answer enters."
    )
    return Family("dr_grpo", about, cases)


def overlong() -> Family:
    """The soft punishment of answers near the limit."""

    def case(name: str, why: str, lengths: list[int], limits: tuple[int, int], penalties: list[float]) -> Case:
        inputs = {"lengths": lengths, "max_length": limits[0], "buffer": limits[1]}
        return Case(name, why, "overlong_penalty", inputs, {"penalties": penalties})

    return Family(
        "overlong",
        "The penalty grows in a straight line from 0 at max_length - buffer to -1 at max_length, and stays there.",
        [
            case("before the buffer", "Not a token of it is used.", [0, 1, 40, 80], (100, 20), [0.0, 0.0, 0.0, 0.0]),
            case("the first token of it", "-1 / 20.", [81], (100, 20), [-0.05]),
            case("the middle", "-10 / 20.", [90], (100, 20), [-0.5]),
            case("the limit", "-20 / 20.", [100], (100, 20), [-1.0]),
            case("beyond", "No more than -1.", [101, 200], (100, 20), [-1.0, -1.0]),
            case("a buffer of one", "A step.", [9, 10], (10, 1), [0.0, -1.0]),
            case("the whole length", "From the first token on.", [0, 25, 50], (50, 50), [0.0, -0.5, -1.0]),
            case("a batch", "Each by its own length.", [8, 5, 7, 4], (8, 4), [-1.0, -0.25, -0.75, 0.0]),
        ],
    )


def dapo() -> Family:
    """Clip-higher, the mean over tokens, the z-score of the shaped score."""
    draw = Draw("dapo")
    plain = {"clip_low": 0.2, "clip_high": 0.28, "max_length": 100, "buffer": 20, "penalty": 1.0}
    plain["epsilon"] = 0.585786437626905  # 2 - sqrt(2)

    def by_hand(
        name: str,
        why: str,
        inputs: dict[str, Any],
        advantages: list[float],
        loss: float,
        grad: list[list[float | None]],
    ) -> Case:
        return Case(name, why, "dapo", {**plain, **inputs}, {"advantages": advantages, "loss": loss, "grad": grad})

    a = 0.5  # (3 - 2) / (sqrt(2) + epsilon): the sample deviation of two scores that are 2 apart, and the epsilon above
    cases = [
        by_hand(
            "over tokens",
            "(-a - a + a) / 3 tokens; a mean of row means would be 0.",
            _two([[0.0, 0.0], [0.0, 5.0]], [3.0, 1.0]),
            [a, -a],
            -a / 3,
            [[-a / 3, -a / 3], [a / 3, None]],
        ),
        by_hand(
            "clip higher",
            "r = 2: 1.28 a, a constant; below 0.8 the pull stays: 0.5 a.",
            _two([[LN2, -LN2], [0.0, 5.0]], [3.0, 1.0]),
            [a, -a],
            -0.78 * a / 3,
            [[0.0, -0.5 * a / 3], [a / 3, None]],
        ),
        by_hand(
            "an overlong answer",
            "The first has 2 of 2 tokens: 3 - 2 * 1 = 1 against 1, and no spread is left.",
            {**_two([[0.0, 0.0], [0.0, 5.0]], [3.0, 1.0]), "max_length": 2, "buffer": 1, "penalty": 2.0},
            [0.0, 0.0],
            0.0,
            [[0.0, 0.0], [0.0, None]],
        ),
        by_hand(
            "the penalty decides",
            "Scores 1 and 1; the longer one loses 2: -a and a.",
            {**_two([[0.0, 0.0], [0.0, 5.0]], [1.0, 1.0]), "max_length": 2, "buffer": 1, "penalty": 2.0},
            [-a, a],
            a / 3,
            [[a / 3, a / 3], [-a / 3, None]],
        ),
    ]
    cases[2] = Case(**{**vars(cases[2]), "exact": True})
    for limit, buffer, penalty, high in ((100, 20, 1.0, 0.28), (6, 4, 1.0, 0.28), (5, 3, 0.5, 0.2), (6, 6, 2.0, 0.4)):
        inputs = {**_batch(draw, draw.row(6, -1, 2)), "clip_low": 0.2, "clip_high": high, "epsilon": 1e-4}
        inputs |= {"max_length": limit, "buffer": buffer, "penalty": penalty}
        why = "Two prompts with answers of one to five tokens."
        cases.append(Case(f"two groups, limit {limit}, buffer {buffer}", why, "dapo", inputs))
    about = (
        "DAPO from scores to the loss: the overlong penalty is part of the score before the group compares it, the "
        "upper clip is wider, and every token counts alike."
    )
    return Family("dapo", about, cases)


def dynamic_sampling() -> Family:
    """Groups without spread give way."""

    def case(
        name: str,
        why: str,
        groups: list[list[float]],
        rounds: list[list[list[float]]],
        chosen: list[list[int]],
        missing: list[int],
    ) -> Case:
        inputs = {"groups": groups, "rounds": rounds}
        return Case(name, why, "dynamic_sampling", inputs, {"chosen": chosen, "missing": missing}, exact=True)

    mixed, solved, failed = [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]
    return Family(
        "dynamic_sampling",
        "A group whose answers all have one score gives its place to the next one that has spread; the others stay.",
        [
            case("all have spread", "Nothing is asked for.", [mixed, mixed], [], [[0, 0], [0, 1]], [0]),
            case("one is solved", "Place 1 is taken.", [mixed, solved], [[mixed]], [[0, 0], [1, 0]], [1, 0]),
            case("one failed", "0 for all is no spread either.", [failed, mixed], [[mixed]], [[1, 0], [0, 1]], [1, 0]),
            case(
                "candidates without spread are passed over",
                "Candidate 1 takes the first place.",
                [solved, failed, mixed],
                [[solved, mixed]],
                [[1, 1], [0, 1], [0, 2]],
                [2, 1],
            ),
            case(
                "two rounds",
                "The second fills what the first left.",
                [solved, failed, solved],
                [[failed, mixed, solved], [mixed, mixed]],
                [[1, 1], [2, 0], [2, 1]],
                [3, 2, 0],
            ),
            case(
                "the rounds end",
                "What is still flat stays as it was.",
                [solved, failed],
                [[solved, solved], [failed, failed]],
                [[0, 0], [0, 1]],
                [2, 2, 2],
            ),
            case(
                "more candidates than places",
                "The first one with spread; the other is not needed.",
                [solved, mixed],
                [[mixed, mixed]],
                [[1, 0], [0, 1]],
                [1, 0],
            ),
            case(
                "close scores are spread",
                "They differ, by however little.",
                [[0.5, 0.5, 0.5], [0.5, 0.5, 0.50390625]],
                [[[0.25, 0.25, 0.25]]],
                [[0, 0], [0, 1]],
                [1, 1],
            ),
            case("negative scores", "Only differences count.", [[-1.0, -1.0], [-1.0, 0.0]], [], [[0, 0], [0, 1]], [1]),
        ],
    )


FAMILIES = [dr_grpo, overlong, dapo, dynamic_sampling]
