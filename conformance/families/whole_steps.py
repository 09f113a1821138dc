"""Whole updates of a policy with two parameters, and the solver behind the trust region."""

from typing import Any

from conformance.families.case import MILD_GARBAGE, Case, Draw, Family, mask

WHOLE = 1e-4  # a whole trace runs through exp, log, whitening and several steps: float32 keeps about five digits


def _random_setup(draw: Draw, rows: list[list[bool]], **changes: Any) -> dict[str, Any]:
    width = len(rows[0])
    setup: dict[str, Any] = {
        "theta": draw.row(2, -0.6, 0.6),
        "ref_theta": draw.row(2, -0.6, 0.6),
        "features": draw.grid(rows, -1.5, 1.5, MILD_GARBAGE),
        "actions": [draw.integers(width, 0, 1) for _ in rows],
        "mask": rows,
        "scores": draw.row(len(rows), -1, 2),
        "values": draw.grid(rows, -0.5, 0.5),
        "kl_coef": 0.1,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_advantages": True,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "entropy_coef": 0.01,
        "learning_rate": 0.5,
        "minibatches": [[0, 1], [2, 3], [0, 3], [1, 2]],
    }
    return {**setup, **changes}


def ppo_trace() -> Family:
    """Rewards, advantages, losses, clip fractions and parameters of a whole update."""
    draw = Draw("ppo_trace")
    right = mask(".xxx.", ".xxxx", ".x...", ".xx..")
    left = mask("..xxx", ".xxxx", "....x", "...xx")
    gaps = mask("xx.xx", "x..xx", ".x.x.", "xxxxx")
    one = {"theta": [0.0, 0.0], "ref_theta": [0.0, 0.0], "features": [[1.0]], "actions": [[1]], "mask": [[True]]}
    one |= {"scores": [1.0], "values": [[0.0]], "kl_coef": 0.1, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
    one |= {"clip_low": 0.2, "clip_high": 0.2, "entropy_coef": 0.0, "learning_rate": 0.1, "minibatches": [[0]]}
    referred = {**one, "theta": [1.0, 0.0], "features": [[0.0]], "kl_coef": 0.5}

    def case(name: str, why: str, rows: list[list[bool]], **changes: Any) -> Case:
        why += " A whole trace, hence 1e-4 in float32."
        return Case(name, why, "ppo_trace", {"setup": _random_setup(draw, rows, **changes)}, float32=WHOLE)

    cases = [
        Case(
            "one token, by hand",
            "p = 1/2 and A = 1: loss -1; gradient -1 * (1 - 1/2) * (1, x = 1) = (-0.5, -0.5); theta moves by +0.05.",
            "ppo_trace",
            {"setup": one},
            {
                "old_logprobs": [[-0.6931471805599453]],
                "rewards": [[1.0]],
                "advantages": [[1.0]],
                "losses": [-1.0],
                "thetas": [[0.05, 0.05]],
                "clipped": [0.0],
            },
        ),
        Case(
            "the reference in the reward, by hand",
            "Old log-prob log sigmoid(1) = -0.31326, reference log 1/2: k1 = 0.37989, so the reward is "
            "1 - 0.5 * 0.37989 = 0.81006, and so is the advantage; the loss is its negative; the gradient is "
            "-0.81006 * (1 - sigmoid(1)) in theta0 and 0 in theta1 (x = 0): theta0 = 1 + 0.1 * 0.81006 * 0.26894.",
            "ppo_trace",
            {"setup": referred},
            {
                "old_logprobs": [[-0.31326168751822286]],
                "rewards": [[0.8100572534791388]],
                "advantages": [[0.8100572534791388]],
                "losses": [-0.8100572534791388],
                "thetas": [[1.0217857949141753, 0.0]],
                "clipped": [0.0],
            },
        ),
        case("right padding", "Two epochs of two minibatches.", right),
        case("left padding", "The same shapes on the other side.", left),
        case("tool output between", "Advantages carry across the gaps.", gaps),
        case("no whitening", "Advantages as they are.", right, whiten_advantages=False),
        case("large steps, so that the clip binds", "Learning rate 4.", right, learning_rate=4.0, entropy_coef=0.0),
        case("asymmetric clip, discount", "0.1 below, 0.3 above.", left, clip_low=0.1, clip_high=0.3, gamma=0.9),
        case("strong KL, strong entropy", "Both coefficients matter.", right, kl_coef=0.8, entropy_coef=0.3),
        case("minibatches of one row", "Eight steps.", gaps, minibatches=[[0], [1], [2], [3], [3], [0], [2], [1]]),
    ]
    about = (
        "A whole update, end to end: KL, rewards, advantages, whitening over the batch (not the minibatch), the clip, "
        "the entropy and the step, with the old policy fixed while the new one moves."
    )
    return Family("ppo_trace", about, cases)


def trpo() -> Family:
    """A natural-gradient step with a hard KL limit and a line search."""
    draw = Draw("trpo")
    rows = mask(".xxx.", ".xxxx", ".x...")

    def setup(**changes: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "theta": draw.row(2, -0.5, 0.5),
            "features": draw.grid(rows, -1.5, 1.5, MILD_GARBAGE),
            "actions": [draw.integers(5, 0, 1) for _ in rows],
            "mask": rows,
            "advantages": draw.grid(rows, -1.5, 1.5),
            "max_kl": 0.01,
            "damping": 0.1,
            "backtrack": 0.5,
            "max_backtracks": 8,
            "cg_iterations": 10,
        }
        return {**base, **changes}

    def case(name: str, why: str, **changes: Any) -> Case:
        why += " Conjugate gradient and a line search, hence 1e-4 in float32."
        return Case(name, why, "trpo_step", {"setup": setup(**changes)}, float32=WHOLE)

    single = {"theta": [0.0, 0.0], "features": [[0.0]], "actions": [[1]], "mask": [[True]], "advantages": [[1.0]]}
    single |= {"max_kl": 0.01, "damping": 0.25, "backtrack": 0.5, "max_backtracks": 5, "cg_iterations": 5}
    downhill = {"theta": [2.0, 0.3], "actions": [[0] * 5] * 3, "advantages": draw.grid(rows, 0.3, 1.5)}
    downhill |= {"max_kl": 0.05, "damping": 0.001}
    saturating = {"theta": [0.98, -0.69], "features": [[-1.6, 1.2, 0.1, -0.3]], "actions": [[0, 1, 1, 0]]}
    saturating |= {"mask": [[True] * 4], "advantages": [[-1.3, 1.1, -0.9, 1.2]], "max_kl": 0.5, "damping": 0.01}
    saturating |= {"backtrack": 0.5, "cg_iterations": 10}
    cases = [
        Case(
            "one token, by hand",
            "p = 1/2: g = (1/2, 0); F + 1/4 = diag(1/2, 1/4), so s = (1, 0) and s^T F s = 1/2: full step "
            "sqrt(0.02 / 0.5) = 0.2. L = sigmoid(0.2) / (1/2) = 1 + tanh(0.1); KL = log cosh(0.1) = 0.00499 <= 0.01.",
            "trpo_step",
            {"setup": single},
            {
                "gradient": [0.5, 0.0],
                "direction": [1.0, 0.0],
                "theta": [0.2, 0.0],
                "kl": 0.004991688821646447,
                "surrogate_before": 1.0,
                "surrogate_after": 1.0996679946249558,
                "accepted": True,
                "fraction": 1.0,
            },
        ),
        Case(
            "nothing to gain",
            "All advantages are 0: no direction improves, theta stays and nothing is divided by zero.",
            "trpo_step",
            {"setup": {**single, "advantages": [[0.0]], "theta": [0.25, 0.5]}},
            {
                "gradient": [0.0, 0.0],
                "direction": [0.0, 0.0],
                "theta": [0.25, 0.5],
                "kl": 0.0,
                "surrogate_before": 0.0,
                "surrogate_after": 0.0,
                "accepted": False,
                "fraction": 0.0,
            },
            exact=True,
        ),
        case("the full step", "Damping keeps the step inside the limit."),
        case("a small limit", "The same rule at a tenth of the radius.", max_kl=0.001),
        case("one round of conjugate gradient", "Not solved: s is along the gradient.", cg_iterations=1),
        case("the KL refuses the full step", "From p near 1 the curvature grows on the way down.", **downhill),
        case("backtracks of 0.9", "A gentler factor needs more of them.", **downhill, backtrack=0.9),
        case(
            "refused",
            "The full step is too far and no backtrack is allowed: theta stays.",
            **downhill,
            max_backtracks=0,
        ),
        Case(
            "the surrogate refuses the full step",
            "The KL of the full step is half the limit, but the surrogate falls below where it started.",
            "trpo_step",
            {"setup": {**saturating, "max_backtracks": 6}},
            float32=WHOLE,
        ),
        Case(
            "the surrogate refuses, and no backtrack is left",
            "The same with no backtracks: theta stays although the KL would allow the step.",
            "trpo_step",
            {"setup": {**saturating, "max_backtracks": 0}},
            float32=WHOLE,
        ),
    ]
    about = (
        "TRPO's step: the damped natural gradient, scaled to the KL limit, backtracked until the surrogate improves "
        "and the exact KL(old || new) holds; else nothing moves."
    )
    return Family("trpo", about, cases)


def conjugate_gradient() -> Family:
    """The solver on its own."""
    draw = Draw("conjugate_gradient")
    diagonal = {"matrix": [[2.0, 0.0], [0.0, 4.0]], "vector": [2.0, 4.0]}

    def positive_definite(n: int) -> list[list[float]]:
        root = draw.full_grid(n, n, -1, 1)
        return [
            [round(sum(root[i][k] * root[j][k] for k in range(n)) + (2.0 if i == j else 0.0), 4) for j in range(n)]
            for i in range(n)
        ]

    cases = [
        Case(
            "solved in two",
            "x = (1, 1).",
            "conjugate_gradient",
            {**diagonal, "iterations": 2},
            {"solution": [1.0, 1.0]},
        ),
        Case(
            "after one",
            "a = r.r / r.Ar = 20 / 72: x = (20/36, 40/36).",
            "conjugate_gradient",
            {**diagonal, "iterations": 1},
            {"solution": [0.5555555555555556, 1.1111111111111112]},
        ),
        Case(
            "the identity",
            "One round is enough, and the rest must not divide 0 by 0.",
            "conjugate_gradient",
            {"matrix": [[1.0, 0.0], [0.0, 1.0]], "vector": [3.0, -4.0], "iterations": 10},
            {"solution": [3.0, -4.0]},
            exact=True,
        ),
        Case(
            "nothing to solve",
            "The right-hand side is 0: so is x.",
            "conjugate_gradient",
            {**diagonal, "vector": [0.0, 0.0], "iterations": 5},
            {"solution": [0.0, 0.0]},
            exact=True,
        ),
        Case(
            "no rounds", "x starts at 0.", "conjugate_gradient", {**diagonal, "iterations": 0}, {"solution": [0.0, 0.0]}
        ),
    ]
    for n in (3, 5):
        matrix, vector = positive_definite(n), draw.row(n, -1, 1)
        for iterations in (1, 2, n, 2 * n):
            inputs = {"matrix": matrix, "vector": vector, "iterations": iterations}
            why = "Solved." if iterations >= n else "A partial solution is defined too."
            cases.append(Case(f"{n} unknowns, {iterations} rounds", why, "conjugate_gradient", inputs, float32=2e-5))
    about = "Conjugate gradient from zero: exact after n rounds, defined after fewer, and still after more."
    return Family("conjugate_gradient", about, cases)


FAMILIES = [ppo_trace, trpo, conjugate_gradient]
