"""From token losses to one number, in one piece or in micro-batches, padded or not."""

from typing import Any

from conformance import oracle
from conformance.families.case import GARBAGE, MILD_GARBAGE, Case, Draw, Family, mask

UNEVEN = mask("xxxx..", "x.....", ".xxx.x", "xx....")
MODES: tuple[tuple[str, int | None], ...] = (("token", None), ("sequence", None), ("fixed", 8))


def aggregation() -> Family:
    """Token, sequence and fixed-length means."""
    draw = Draw("aggregation")
    two_rows = {"losses": [[1.0, 1.0, 1.0], [5.0, 777.0, 1000.0]], "mask": mask("xxx", "x..")}
    cases = [
        Case(
            "token, by hand",
            "(1 + 1 + 1 + 5) / 4 tokens.",
            "aggregate",
            {**two_rows, "mode": "token", "fixed_length": None},
            {"loss": 2.0},
        ),
        Case(
            "sequence, by hand",
            "Row means 1 and 5: (1 + 5) / 2 rows.",
            "aggregate",
            {**two_rows, "mode": "sequence", "fixed_length": None},
            {"loss": 3.0},
        ),
        Case(
            "fixed, by hand",
            "8 / (2 rows * 10).",
            "aggregate",
            {**two_rows, "mode": "fixed", "fixed_length": 10},
            {"loss": 0.4},
        ),
        Case(
            "sequence, a row without sampled tokens",
            "It has no mean and is not counted: (2 + 4) / 2.",
            "aggregate",
            {"losses": [[2.0, 777.0], [1000.0, -777.0], [3.0, 5.0]], "mask": mask("x.", "..", "xx")}
            | {"mode": "sequence", "fixed_length": None},
            {"loss": 3.0},
        ),
    ]
    for mode, fixed_length in MODES:
        for layout, rows in (("right padding and a gap", UNEVEN), ("left padding", mask("..xxxx", ".....x", "...xxx"))):
            inputs = {"losses": draw.grid(rows, -2, 2), "mask": rows, "mode": mode, "fixed_length": fixed_length}
            cases.append(Case(f"{mode}, {layout}", "Garbage off the mask.", "aggregate", inputs))
    about = (
        "Each mode divides by its own size: sampled tokens, rows, or rows times a fixed length. Padding counts in none."
    )
    return Family("aggregation", about, cases)


def micro_batches() -> Family:
    """Gradient accumulation never changes the loss."""
    draw = Draw("micro_batches")
    uneven = {"losses": [[1.0, 1.0, 1.0], [5.0, 777.0, 1000.0]], "mask": mask("xxx", "x.."), "fixed_length": None}
    cases = [
        Case(
            "tokens, by hand",
            "3/4 + 5/4 = 2: each part is divided by the whole batch's 4 tokens. The mean of the means would be 3.",
            "aggregate_micro_batches",
            {**uneven, "mode": "token", "micro_batches": [[0], [1]]},
            {"loss": 2.0},
        ),
        Case(
            "sequences, by hand",
            "Row means 1, 5, 3 in parts of 1 and 2 rows: (1 + 5 + 3) / 3 = 3; the mean of the means would be 2.5.",
            "aggregate_micro_batches",
            {"losses": [[1.0], [5.0], [3.0]], "mask": mask("x", "x", "x"), "fixed_length": None}
            | {"mode": "sequence", "micro_batches": [[0], [1, 2]]},
            {"loss": 3.0},
        ),
        Case(
            "one micro-batch",
            "No accumulation at all: (1 + 1 + 1 + 5) / 4.",
            "aggregate_micro_batches",
            {**uneven, "mode": "token", "micro_batches": [[0, 1]]},
            {"loss": 2.0},
        ),
    ]
    splits = {"row by row": [[0], [1], [2], [3]], "unequal parts": [[2], [0, 1, 3]], "shuffled": [[3, 0], [2, 1]]}
    for mode, fixed_length in MODES:
        losses = draw.grid(UNEVEN, -2, 2)
        for split, parts in splits.items():
            inputs = {"losses": losses, "mask": UNEVEN, "mode": mode, "fixed_length": fixed_length}
            why = "The same loss as in one piece, whatever the split."
            cases.append(Case(f"{mode}, {split}", why, "aggregate_micro_batches", {**inputs, "micro_batches": parts}))
    about = (
        "Micro-batching never changes the loss: each part is divided by the size of the whole batch, not by its own."
    )
    return Family("micro_batches", about, cases)


def _padded(grid: list[list[Any]], left: int, right: int, filler: tuple[Any, ...]) -> list[list[Any]]:
    """Every row with more places before and after it."""
    return [
        [filler[(b + k) % len(filler)] for k in range(left)]
        + row
        + [filler[(2 * b + k) % len(filler)] for k in range(right)]
        for b, row in enumerate(grid)
    ]


def _reshaped(contents: dict[str, Any], order: list[int], left: int, right: int, off_mask: Any) -> dict[str, Any]:
    """The same rows in another order and with more padding; one-per-row lists follow, single numbers stay."""

    def place(key: str, item: Any) -> Any:
        if not isinstance(item, list):
            return item
        rows = [item[b] for b in order]
        if not isinstance(rows[0], list):
            return rows
        filler = {"mask": (False,), "logprobs": MILD_GARBAGE, "old_logprobs": MILD_GARBAGE[1:]}.get(key, off_mask)
        return _padded(rows, left, right, filler)

    return {key: place(key, item) for key, item in contents.items()}


def padding_invariance() -> Family:
    """The same content, padded and ordered in other ways, gives the same numbers."""
    draw = Draw("padding_invariance")
    rows = mask(".xxxx", ".xx.x", "xxx..")
    old = draw.grid(rows, -2, -0.5, MILD_GARBAGE)
    contents: dict[str, dict[str, Any]] = {
        "gae": {"rewards": draw.grid(rows, -1, 1), "values": draw.grid(rows, -1, 1), "mask": rows, "gamma": 0.95}
        | {"lam": 0.9, "final_values": [0.5, 0.0, -0.25]},
        "whiten": {"x": draw.grid(rows, -1, 2), "mask": rows, "shift_mean": True, "unbiased": True, "epsilon": 1e-8},
        "token_rewards": {"scores": draw.row(3, -1, 1), "kl": draw.grid(rows, -0.5, 0.5), "mask": rows, "kl_coef": 0.1},
        "aggregate": {"losses": draw.grid(rows, -1, 1), "mask": rows, "mode": "token", "fixed_length": None},
        "clip_loss": {"logprobs": draw.near(old, 0.4), "old_logprobs": old, "advantages": draw.grid(rows, -1, 1)}
        | {"mask": rows, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    }
    shapes = {
        "as it is": ([0, 1, 2], 0, 0),
        "more padding on the right": ([0, 1, 2], 0, 3),
        "more padding on the left": ([0, 1, 2], 2, 0),
        "both sides, rows reordered": ([2, 0, 1], 1, 2),
    }
    cases: list[Case] = []
    for method, inputs in contents.items():
        plain = getattr(oracle, method)(**inputs)
        for shape, (order, left, right) in shapes.items():
            reshaped = _reshaped(inputs, order, left, right, GARBAGE)
            off_mask = (0.0,) if method == "token_rewards" else (None,)
            moved = _reshaped(plain, order, left, right, off_mask)
            assert getattr(oracle, method)(**reshaped) == moved, (
                f"the oracle itself depends on padding: {method}, {shape}"
            )
            cases.append(Case(f"{method}, {shape}", "The same numbers in every shape.", method, reshaped))
    about = "Padding a batch further, on either side, or reordering its rows changes no number of it."
    return Family("padding_invariance", about, cases)


FAMILIES = [aggregation, micro_batches, padding_invariance]
