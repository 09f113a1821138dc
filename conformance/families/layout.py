"""Where things are: padding sides, the end token, answers that never ended, answers that were cut off."""

from conformance.families.case import Case, Draw, Family, mask


def padding_sides() -> Family:
    """Positions and masks on both sides of the padding."""
    lengths = {"prompt_lengths": [2, 3], "response_lengths": [3, 1], "width": 6}
    cases = [
        Case(
            "positions, left padding",
            "Two padded places come first, so the three real tokens are at 0, 1, 2.",
            "position_ids",
            {"attention_mask": mask("..xxx", "xxxxx")},
            {"positions": [[None, None, 0, 1, 2], [0, 1, 2, 3, 4]]},
        ),
        Case(
            "positions, right padding",
            "Padding after the last real token does not move the ones before it.",
            "position_ids",
            {"attention_mask": mask("xxx..", "x....")},
            {"positions": [[0, 1, 2, None, None], [0, None, None, None, None]]},
        ),
        Case(
            "positions, both sides",
            "One padded place before and one after: the middle still counts from 0.",
            "position_ids",
            {"attention_mask": mask(".xxx.", "..x..")},
            {"positions": [[None, 0, 1, 2, None], [None, None, 0, None, None]]},
        ),
        Case(
            "masks, right padding",
            "Row 0: prompt at 0-1, answer at 2-4. Row 1: prompt at 0-2, answer at 3.",
            "response_mask",
            {**lengths, "side": "right"},
            {"mask": mask("..xxx.", "...x.."), "attention_mask": mask("xxxxx.", "xxxx..")},
        ),
        Case(
            "masks, left padding",
            "Each row ends in the last column: row 0 starts at 6 - 5 = 1, row 1 at 6 - 4 = 2.",
            "response_mask",
            {**lengths, "side": "left"},
            {"mask": mask("...xxx", ".....x"), "attention_mask": mask(".xxxxx", "..xxxx")},
        ),
    ]
    draw = Draw("padding_sides")
    for side in ("left", "right"):
        prompts, responses = draw.integers(4, 1, 4), draw.integers(4, 1, 4)
        inputs = {"prompt_lengths": prompts, "response_lengths": responses, "width": 9, "side": side}
        cases.append(Case(f"four rows, {side}", "Different lengths in one batch.", "response_mask", inputs))
        equal = {"prompt_lengths": [3, 3, 3], "response_lengths": [4, 1, 2], "width": 7, "side": side}
        cases.append(Case(f"equal prompts, {side}", "Prompts of one length.", "response_mask", equal))
        bare = {"prompt_lengths": [2, 0], "response_lengths": [0, 3], "width": 4, "side": side}
        cases.append(Case(f"an empty half, {side}", "No answer at all; no prompt at all.", "response_mask", bare))
    about = "Masks come from lengths and positions start at the first real token, whichever side is padded."
    return Family("padding_sides", about, cases)


def end_token_position() -> Family:
    """The end token is sampled, scored and learned; what follows it is none of these."""
    rows = mask("..xxx..", "..xxxxx", "..x....")
    draw = Draw("end_token_position")
    return Family(
        "end_token_position",
        "The end token is a sampled token: it is in the mask, carries the score, is learned, and the episode ends at "
        "it. Deriving the mask from token ids loses it when the padding has the same id.",
        [
            Case(
                "in the mask",
                "An answer of 3 tokens, end token included, after a prompt of 2: columns 2-4; the end token is at 4.",
                "response_mask",
                {"prompt_lengths": [2, 2], "response_lengths": [3, 5], "width": 7, "side": "right"},
                {"mask": mask("..xxx..", "..xxxxx"), "attention_mask": mask("xxxxx..", "xxxxxxx")},
            ),
            Case(
                "carries the score",
                "Without KL the only reward is the score, on the end tokens at columns 4, 6 and 2.",
                "token_rewards",
                {"scores": [1.5, -0.5, 2.0], "kl": draw.grid(rows, 0, 1), "mask": rows, "kl_coef": 0.0},
                {"rewards": [[0, 0, 0, 0, 1.5, 0, 0], [0, 0, 0, 0, 0, 0, -0.5], [0, 0, 2.0, 0, 0, 0, 0]]},
            ),
            Case(
                "is learned",
                "The end token's log-prob -6 counts: (1 + 2 + 6) / 3 = 3. Without it the loss would be 1.5.",
                "sft_loss",
                {"logprobs": [[-9.0, -1.0, -2.0, -6.0, -9.0]], "mask": mask(".xxx.")},
                {"loss": 3.0},
            ),
            Case(
                "ends the episode",
                "gamma = lambda = 1: every advantage is score - V = 1 - 0.5. The 1000 is not a next value.",
                "gae",
                {
                    "rewards": [[0.0, 0.0, 1.0, 0.0]],
                    "values": [[0.5, 0.5, 0.5, 1000.0]],
                    "mask": mask("xxx."),
                    "gamma": 1.0,
                    "lam": 1.0,
                    "final_values": None,
                },
                {"advantages": [[0.5, 0.5, 0.5, None]], "returns": [[1.0, 1.0, 1.0, None]]},
            ),
            Case(
                "an answer of one token",
                "The first sampled token is the end token: its advantage is score - V.",
                "td_residuals",
                {
                    "rewards": draw.grid(rows, -1, 1),
                    "values": draw.grid(rows, -1, 1),
                    "mask": rows,
                    "gamma": 0.9,
                    "final_values": None,
                },
            ),
            Case(
                "reward to go stops there",
                "Rewards after the end token are not earned.",
                "reward_to_go",
                {"rewards": draw.grid(rows, -1, 1), "mask": rows, "gamma": 0.9},
            ),
            Case(
                "counts in the mean",
                "The loss of the end token is one of the batch's token losses.",
                "aggregate",
                {"losses": draw.grid(rows, -2, 2), "mask": rows, "mode": "token", "fixed_length": None},
            ),
        ],
    )


def missing_end_token() -> Family:
    """A fixed score for answers that never ended."""
    rows = mask("xxx", "xx.", "xxx")

    def penalised(name: str, why: str, scores: list[float], truncated: str, penalty: float | None, result: list[float]):
        inputs = {"scores": scores, "truncated": mask(truncated)[0], "penalty": penalty}
        return Case(name, why, "missing_eos_penalty", inputs, {"scores": result})

    return Family(
        "missing_end_token",
        "An answer that never ended gets the penalty in place of its score, not added to it; all others keep theirs.",
        [
            penalised("one of three", "Only row 1 never ended.", [0.7, 0.2, 1.5], ".x.", -1.0, [0.7, -1.0, 1.5]),
            penalised("no penalty", "None changes nothing.", [0.7, 0.2, 1.5], ".x.", None, [0.7, 0.2, 1.5]),
            penalised("a penalty of zero", "Zero is a number, not an absence.", [0.7, 0.2], ".x", 0.0, [0.7, 0.0]),
            penalised("replaces a worse score", "-3 becomes -1: a replacement.", [-3.0, 4.0], "xx", -1.0, [-1.0, -1.0]),
            penalised("nobody was cut off", "All ended.", [0.25, -0.5], "..", -1.0, [0.25, -0.5]),
            Case(
                "then placed",
                "The penalty is a score like any other: it stands on the row's last token.",
                "token_rewards",
                {"scores": [-1.0, 0.3, -1.0], "kl": [[0.1, 0.2, 0.3]] * 3, "mask": rows, "kl_coef": 0.1},
            ),
        ],
    )


def truncation() -> Family:
    """Answers cut off by the length limit: the value of what would have come next closes the row."""
    draw = Draw("truncation")
    layouts = {
        "right padding": mask("xxxx..", "xxxxxx", "xx...."),
        "left padding": mask("..xxxx", "xxxxxx", "....xx"),
        "with gaps": mask("xx..xx", ".x.xx.", "x.xxxx"),
    }
    cases = [
        Case(
            "one token, cut off",
            "delta = r + gamma * final - V = 1 + 0.5 * 4 - 2 = 1.",
            "td_residuals",
            {"rewards": [[1.0]], "values": [[2.0]], "mask": mask("x"), "gamma": 0.5, "final_values": [4.0]},
            {"residuals": [[1.0]]},
        ),
        Case(
            "two tokens, only one row cut off",
            "Row 0: delta1 = 0 + 2 - 1 = 1, delta0 = 0 + 1 - 1 = 0, so A = (1, 1). Row 1 ended: A1 = -1, A0 = -1.",
            "gae",
            {
                "rewards": [[0.0, 0.0], [0.0, 0.0]],
                "values": [[1.0, 1.0], [1.0, 1.0]],
                "mask": mask("xx", "xx"),
                "gamma": 1.0,
                "lam": 1.0,
                "final_values": [2.0, 0.0],
            },
            {"advantages": [[1.0, 1.0], [-1.0, -1.0]], "returns": [[2.0, 2.0], [0.0, 0.0]]},
        ),
        Case(
            "n-step closes with the final value",
            "n = 2 from the last token: one step remains, r + gamma * final - V = 1 + 0.5 * 6 - 3 = 1; from the one "
            "before: 2 + 0.5 * 1 + 0.25 * 6 - 1 = 3.",
            "n_step",
            {
                "rewards": [[2.0, 1.0]],
                "values": [[1.0, 3.0]],
                "mask": mask("xx"),
                "gamma": 0.5,
                "n": 2,
                "final_values": [6.0],
            },
            {"advantages": [[3.0, 1.0]]},
        ),
    ]
    for layout, rows in layouts.items():
        base = {"rewards": draw.grid(rows, -1, 1), "values": draw.grid(rows, -1, 1), "mask": rows, "gamma": 0.95}
        finals = [draw.number(-1, 1), 0.0, draw.number(-1, 1)]
        why = "Rows 0 and 2 were cut off and bootstrap; row 1 ended and does not."
        cases.append(Case(f"gae, {layout}", why, "gae", {**base, "lam": 0.9, "final_values": finals}))
        cases.append(Case(f"n-step, {layout}", why, "n_step", {**base, "n": 3, "final_values": finals}))
    return Family(
        "truncation",
        "Where an answer was cut off by the length limit, the value after its last token closes the sum; where it "
        "ended, nothing does.",
        cases,
    )


FAMILIES = [padding_sides, end_token_position, missing_end_token, truncation]
