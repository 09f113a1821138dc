"""Where the score and the KL stand."""

from conformance.families.case import Case, Draw, Family, mask

LAYOUTS = {
    "right padding": mask("..xxx..", "..xxxxx", "..xx..."),
    "left padding": mask("...xxxx", ".....xx", "..xxxxx"),
    "both sides": mask(".xxx...", "..xxxx.", "...x..."),
    "gaps at the end": mask("xx.xx..", ".xx.x..", "xxx...."),
}


def reward_placement() -> Family:
    """The score stands on the last sampled token."""
    draw = Draw("reward_placement")
    cases = [
        Case(
            "right padding",
            "The last sampled token is column 2, not column -1.",
            "token_rewards",
            {"scores": [2.0], "kl": [[0.0, 0.0, 0.0, 1000.0, 1000.0]], "mask": mask(".xx.."), "kl_coef": 0.1},
            {"rewards": [[0.0, 0.0, 2.0, 0.0, 0.0]]},
        ),
        Case(
            "left padding",
            "Here the last sampled token is the last column.",
            "token_rewards",
            {"scores": [2.0], "kl": [[1000.0, 1000.0, 0.0, 0.0]], "mask": mask("..xx"), "kl_coef": 0.1},
            {"rewards": [[0.0, 0.0, 0.0, 2.0]]},
        ),
        Case(
            "paid once",
            "A score of 1 is paid on one token of the row, not on each of three.",
            "token_rewards",
            {"scores": [1.0, -1.0], "kl": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], "mask": mask("xxx", "xxx")}
            | {"kl_coef": 0.5},
            {"rewards": [[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]},
        ),
        Case(
            "tool output after the last sampled token",
            "Columns 3 and 4 were not sampled: the score stands on column 2.",
            "token_rewards",
            {"scores": [3.0], "kl": [[0.5, 1000.0, 0.25, 1000.0, 1000.0]], "mask": mask("x.x.."), "kl_coef": 1.0},
            {"rewards": [[-0.5, 0.0, 2.75, 0.0, 0.0]]},
        ),
        Case(
            "full rows",
            "Where nothing is padded the last sampled token is the last column.",
            "token_rewards",
            {"scores": [0.5, 1.5], "kl": [[0.0, 0.0], [0.0, 0.0]], "mask": mask("xx", "xx"), "kl_coef": 0.1},
            {"rewards": [[0.0, 0.5], [0.0, 1.5]]},
        ),
    ]
    for layout, rows in LAYOUTS.items():
        inputs = {"scores": draw.row(3, -2, 2), "kl": draw.grid(rows, -0.5, 0.5), "mask": rows, "kl_coef": 0.2}
        cases.append(Case(f"with KL, {layout}", "Score and KL together.", "token_rewards", inputs))
    about = "The score belongs on each answer's last sampled token, once; never on column -1 and never on every token."
    return Family("reward_placement", about, cases)


def kl_placement() -> Family:
    """The KL penalty stands on every sampled token, with a minus sign."""
    draw = Draw("kl_placement")
    cases = [
        Case(
            "minus sign",
            "-0.5 * (1, 2, -1) = (-0.5, -1, 0.5): distance costs, and a negative sample pays back.",
            "token_rewards",
            {"scores": [0.0], "kl": [[1.0, 2.0, -1.0]], "mask": mask("xxx"), "kl_coef": 0.5},
            {"rewards": [[-0.5, -1.0, 0.5]]},
        ),
        Case(
            "on the last token too",
            "The last token has both: 1 - 0.1 * 2 = 0.8.",
            "token_rewards",
            {"scores": [1.0], "kl": [[1.0, 2.0]], "mask": mask("xx"), "kl_coef": 0.1},
            {"rewards": [[-0.1, 0.8]]},
        ),
        Case(
            "nothing off the mask",
            "Prompt, tool output and padding pay no KL, whatever stands there.",
            "token_rewards",
            {"scores": [0.0], "kl": [[1000.0, 1.0, 777.0, 1.0, -1000.0]], "mask": mask(".x.x."), "kl_coef": 1.0},
            {"rewards": [[0.0, -1.0, 0.0, -1.0, 0.0]]},
        ),
        Case(
            "coefficient zero",
            "Only the score is left.",
            "token_rewards",
            {"scores": [0.5, -0.5], "kl": [[3.0, 4.0], [5.0, 6.0]], "mask": mask("xx", "xx"), "kl_coef": 0.0},
            {"rewards": [[0.0, 0.5], [0.0, -0.5]]},
        ),
    ]
    for layout, rows in LAYOUTS.items():
        inputs = {"scores": [0.0] * 3, "kl": draw.grid(rows, -0.5, 0.5), "mask": rows, "kl_coef": 0.15}
        cases.append(Case(f"no score, {layout}", "The KL alone, token by token.", "token_rewards", inputs))
    return Family(
        "kl_placement", "The KL is subtracted on every sampled token, the last one included, and nowhere else.", cases
    )


FAMILIES = [reward_placement, kl_placement]
