"""DPO, pairs, rankings, and the supervised loss."""

from conformance.families.case import MILD_GARBAGE, Case, Draw, Family, mask

LN2 = 0.6931471805599453
LOSS_AT_1 = 0.31326168751822286  # -log sigmoid(1) = log(1 + 1/e)
LOSS_AT_MINUS_1 = 1.3132616875182228  # the same plus 1
LOSS_AT_2 = 0.1269280110429726  # -log sigmoid(2)


def dpo() -> Family:
    """Direct preference optimisation."""
    draw = Draw("dpo")

    def case(
        name: str,
        why: str,
        numbers: tuple[list[float], ...],
        beta: float,
        smoothing: float,
        expected: dict[str, list[float]] | None = None,
    ) -> Case:
        names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
        inputs = dict(zip(names, numbers, strict=True)) | {"beta": beta, "label_smoothing": smoothing}
        return Case(name, why, "dpo_loss", inputs, expected)

    cases = [
        case(
            "at the reference",
            "No move yet: margin 0, loss log 2.",
            ([-5.0], [-6.0], [-5.0], [-6.0]),
            0.1,
            0.0,
            expected={"loss": [LN2], "margin": [0.0]},
        ),
        case(
            "one apart, both ways",
            "0.1 * ((-10 + 15) - (-20 + 15)) = 1: log(1 + 1/e); and the same pair the wrong way round.",
            ([-10.0, -20.0], [-20.0, -10.0], [-15.0, -15.0], [-15.0, -15.0]),
            0.1,
            0.0,
            expected={"loss": [LOSS_AT_1, LOSS_AT_MINUS_1], "margin": [1.0, -1.0]},
        ),
        case(
            "the reference counts",
            "0.5 * ((-4 + 3) - (-4 + 5)) = -1: equal log-probs, but the reference liked the rejected one less.",
            ([-4.0], [-4.0], [-3.0], [-5.0]),
            0.5,
            0.0,
            expected={"loss": [LOSS_AT_MINUS_1], "margin": [-1.0]},
        ),
        case(
            "label smoothing",
            "0.9 * 0.31326 + 0.1 * 1.31326 = 0.41326.",
            ([-10.0], [-20.0], [-15.0], [-15.0]),
            0.1,
            0.1,
            expected={"loss": [0.41326168751822284], "margin": [1.0]},
        ),
    ]
    for beta, smoothing in ((0.1, 0.0), (0.5, 0.0), (0.2, 0.15)):
        numbers = tuple(draw.row(4, -12, -2) for _ in range(4))
        why = "Random sequence log-probs; float32 keeps six digits of differences of numbers near 10."
        cases.append(case(f"random, beta {beta}, smoothing {smoothing}", why, numbers, beta, smoothing))
    about = "The margin is of log-ratios to the reference, scaled by beta; smoothing mixes in the flipped label."
    return Family("dpo", about, cases)


def pairwise() -> Family:
    """The Bradley-Terry loss of the reward model."""
    draw = Draw("pairwise")
    return Family(
        "pairwise",
        "The reward model's loss is -log sigmoid of the score difference, chosen minus rejected, finite at both ends.",
        [
            Case("equal scores", "log 2.", "pairwise_loss", {"chosen": [0.5], "rejected": [0.5]}, {"loss": LN2}),
            Case(
                "right and wrong",
                "(0.31326 + 1.31326) / 2.",
                "pairwise_loss",
                {"chosen": [2.0, 0.0], "rejected": [1.0, 1.0]},
                {"loss": 0.8132616875182228},
            ),
            Case(
                "far apart",
                "-log sigmoid(-200) = 200 and -log sigmoid(200) = 0: mean 100. A plain log(sigmoid) is infinite.",
                "pairwise_loss",
                {"chosen": [-100.0, 100.0], "rejected": [100.0, -100.0]},
                {"loss": 100.0},
            ),
            Case(
                "random", "Six pairs.", "pairwise_loss", {"chosen": draw.row(6, -1, 3), "rejected": draw.row(6, -2, 2)}
            ),
        ],
    )


def kwise() -> Family:
    """Rankings: every prompt is one example, however many answers were ranked."""
    draw = Draw("kwise")
    pair = {"chosen": [1.25], "rejected": [0.5]}
    cases = [
        Case(
            "three answers",
            "Differences 1, 1, 2: (0.31326 + 0.31326 + 0.12693) / 3.",
            "kwise_loss",
            {"scores": [2.0, 1.0, 0.0], "ranks": [1, 2, 3], "group_ids": [0, 0, 0]},
            {"loss": 0.25115046202647277},
        ),
        Case(
            "a prompt is one example",
            "Prompt 0 has one pair with loss log 2, prompt 1 three: (0.69315 + 0.25115) / 2. Over all four pairs at "
            "once it would be 0.36165.",
            "kwise_loss",
            {"scores": [0.5, 0.5, 2.0, 1.0, 0.0], "ranks": [1, 2, 1, 2, 3], "group_ids": [0, 0, 1, 1, 1]},
            {"loss": 0.472148821293209},
        ),
        Case(
            "ties make no pair",
            "Ranks 1, 2, 2: only the pairs (0, 1) and (0, 2), differences 1 and 2: (0.31326 + 0.12693) / 2.",
            "kwise_loss",
            {"scores": [2.0, 1.0, 0.0], "ranks": [1, 2, 2], "group_ids": [0, 0, 0]},
            {"loss": 0.22009484928059774},
        ),
        Case(
            "a prompt of ties is not counted",
            "Prompt 3 has no pair: the mean is over prompt 5 alone, log(1 + 1/e).",
            "kwise_loss",
            {"scores": [9.0, -9.0, 1.0, 0.0], "ranks": [1, 1, 1, 2], "group_ids": [3, 3, 5, 5]},
            {"loss": LOSS_AT_1},
        ),
        Case(
            "K = 2 as a pair",
            "The pairwise loss of the next case.",
            "kwise_loss",
            {"scores": [0.5, 1.25], "ranks": [2, 1], "group_ids": [0, 0]},
        ),
        Case("the same pair", "Equals the case before.", "pairwise_loss", pair),
    ]
    for k in range(3, 10):
        inputs = {"scores": draw.row(2 * k, -1.5, 1.5), "ranks": draw.shuffled(list(range(1, k + 1)))}
        inputs["ranks"] += [*draw.integers(k - 1, 1, 4), 5]
        inputs["group_ids"] = [0] * k + [1] * k
        cases.append(Case(f"K = {k}", "One strict ranking and one with ties.", "kwise_loss", inputs))
    about = "All pairs of one prompt are one example: averaged within the prompt, then over prompts. Ties make no pair."
    return Family("kwise", about, cases)


def sft() -> Family:
    """The supervised loss."""
    draw = Draw("sft")
    cases = [
        Case(
            "by hand",
            "(1 + 2 + 6) / 3 over the batch; the mean of the row means would be 3.75.",
            "sft_loss",
            {"logprobs": [[-1.0, -2.0, 5.0], [-6.0, -7.0, -9.0]], "mask": mask("xx.", "x..")},
            {"loss": 3.0},
        ),
        Case(
            "the prompt is not learned",
            "Only the two answer tokens: (0.5 + 1.5) / 2.",
            "sft_loss",
            {"logprobs": [[-9.0, -9.0, -0.5, -1.5]], "mask": mask("..xx")},
            {"loss": 1.0},
        ),
    ]
    for layout, rows in (
        ("right padding", mask("..xxx.", "..x...", "..xxxx")),
        ("left padding", mask("...xxx", ".....x", "..xxxx")),
        ("several turns", mask(".xx.xx", "xx..x.")),
    ):
        inputs = {"logprobs": draw.grid(rows, -3, -0.1, MILD_GARBAGE), "mask": rows}
        cases.append(Case(layout, "The mean over trained tokens.", "sft_loss", inputs))
    return Family(
        "sft", "The supervised loss is the mean over trained tokens: no prompt, no padding, no row weighting.", cases
    )


FAMILIES = [dpo, pairwise, kwise, sft]
