"""Log-probabilities, entropy, and the estimators of KL."""

from typing import Any

from conformance.families.case import Case, Draw, Family

LN2, LN3 = 0.6931471805599453, 1.0986122886681098


def _logits_case(draw: Draw, name: str, why: str, temperature: float, vocabulary: int, spread: float) -> Case:
    logits = [draw.full_grid(4, vocabulary, -spread, spread) for _ in range(2)]
    tokens = [draw.integers(4, 0, vocabulary - 1) for _ in range(2)]
    return Case(name, why, "token_logprobs", {"logits": logits, "tokens": tokens, "temperature": temperature})


def logprobs_temperature() -> Family:
    """log pi(token t | before t) at the sampling temperature."""
    draw = Draw("logprobs_temperature")
    quarter: dict[str, Any] = {"logits": [[[0.0, LN3], [0.0, LN3], [5.0, -5.0]]], "tokens": [[1, 0, 1]]}
    cases = [
        Case(
            "temperature 1, by hand",
            "softmax(0, log 3) = (1/4, 3/4). Token 1 is 0: log 1/4; token 2 is 1: log 3/4. The last logits predict "
            "nothing. Each entropy is log 4 - 0.75 log 3.",
            "token_logprobs",
            {**quarter, "temperature": 1.0},
            {
                "logprobs": [[None, -1.3862943611198906, -0.2876820724517809]],
                "entropy": [[None, 0.5623351446188083, 0.5623351446188083]],
            },
        ),
        Case(
            "temperature 1/2, by hand",
            "softmax(0, 2 log 3) = (1/10, 9/10): colder is sharper. Entropy log 10 - 0.9 log 9.",
            "token_logprobs",
            {**quarter, "temperature": 0.5},
            {
                "logprobs": [[None, -2.302585092994046, -0.10536051565782628]],
                "entropy": [[None, 0.3250829733914482, 0.3250829733914482]],
            },
        ),
        Case(
            "the shift by one",
            "Column 1 reads the logits at column 0, (0, 40): token 1 is certain there (about -4e-18, entropy about "
            "2e-16); the logits at column 1 would give -40.",
            "token_logprobs",
            {"logits": [[[0.0, 40.0], [40.0, 0.0]]], "tokens": [[0, 1]], "temperature": 1.0},
            {"logprobs": [[None, 0.0]], "entropy": [[None, 0.0]]},
        ),
        Case(
            "large logits",
            "(1001, 1000) is (1, 0) after the largest is taken out: log sigmoid(1). A plain exp overflows. 1e-4 in "
            "float32, which keeps four decimals of numbers near 1000.",
            "token_logprobs",
            {"logits": [[[1001.0, 1000.0], [0.0, 0.0]]], "tokens": [[0, 0]], "temperature": 1.0},
            {"logprobs": [[None, -0.31326168751822286]], "entropy": [[None, 0.5822031088882179]]},
            float32=1e-4,
            exact=True,
        ),
    ]
    for temperature in (0.5, 0.7, 1.0, 1.3, 2.0):
        name, why = f"temperature {temperature}", "Logits are divided by the temperature before the softmax."
        cases.append(_logits_case(draw, name, why, temperature, vocabulary=5, spread=2.0))
    about = "Log-probs are of the sampled token, from the logits one place before it, at the sampling temperature."
    return Family("logprobs_temperature", about, cases)


def entropy() -> Family:
    """The entropy of the whole distribution, and that it enters the loss."""
    draw = Draw("entropy")
    flat = [[[2.0] * 4, [0.0] * 4]]
    bare = {"ref_theta": [0.0, 0.0], "theta": [0.0, 0.0], "features": [[1.0]], "actions": [[1]], "mask": [[True]]}
    settings = {"scores": [0.0], "values": [[0.0]], "kl_coef": 0.1, "gamma": 1.0, "lam": 1.0, "clip_low": 0.2}
    settings |= {"clip_high": 0.2, "whiten_advantages": False, "learning_rate": 1.0, "minibatches": [[0]]}
    # theta = (1, 0): z = 1, p = 0.731058578630..., H = 0.582203108888..., dH/dz = -z p (1 - p) = -0.196611933241...
    cases = [
        Case(
            "uniform over four",
            "log 4, whatever the constant and the temperature.",
            "token_logprobs",
            {"logits": flat, "tokens": [[0, 3]], "temperature": 0.7},
            {"logprobs": [[None, -1.3862943611198906]], "entropy": [[None, 1.3862943611198906]]},
        ),
        Case(
            "three quarters and a quarter",
            "log 4 - 0.75 log 3 = 0.5623.",
            "token_logprobs",
            {"logits": [[[LN3, 0.0], [0.0, 0.0]]], "tokens": [[0, 0]], "temperature": 1.0},
            {"logprobs": [[None, -0.2876820724517809]], "entropy": [[None, 0.5623351446188083]]},
        ),
        Case(
            "it enters the loss",
            "No advantage and no KL, so the loss is -0.5 H(sigmoid(1)) = -0.2911, and theta moves by "
            "0.5 * dH/dz = -0.5 * 1 * p (1 - p) = -0.0983 in both parameters (the feature is 1).",
            "ppo_trace",
            {"setup": {**bare, **settings, "theta": [1.0, 0.0], "ref_theta": [1.0, 0.0], "entropy_coef": 0.5}},
            {"losses": [-0.29110155444410896], "thetas": [[0.9016940333796285, -0.0983059666203715]], "clipped": [0.0]},
        ),
        Case(
            "at its maximum it pulls nowhere",
            "p = 1/2: the loss is -0.5 log 2 and theta stays.",
            "ppo_trace",
            {"setup": {**bare, **settings, "entropy_coef": 0.5}},
            {"losses": [-0.34657359027997264], "thetas": [[0.0, 0.0]], "clipped": [0.0]},
        ),
    ]
    for vocabulary in (2, 3, 6):
        why = "-sum p log p over the vocabulary, not -log p of the sampled token."
        cases.append(_logits_case(draw, f"vocabulary of {vocabulary}", why, 1.0, vocabulary, spread=2.5))
    cases.append(_logits_case(draw, "nearly certain", "Sharp distributions stay finite.", 0.3, 4, spread=4.0))
    about = "Entropy is the whole distribution's, at the sampling temperature, and the bonus really enters the loss."
    return Family("entropy", about, cases)


def kl_estimators() -> Family:
    """k1, k2, k3 and the exact KL."""
    draw = Draw("kl_estimators")
    apart = {"logprobs": [[-1.0, -2.0, -1.5]], "other_logprobs": [[-2.0, -1.0, -1.5]]}
    cases = [
        Case(
            "k1 by hand",
            "d = log p - log q = (1, -1, 0). The other sign is KL of something else.",
            "kl_estimate",
            {**apart, "estimator": "k1"},
            {"kl": [[1.0, -1.0, 0.0]]},
        ),
        Case("k2 by hand", "d^2 / 2.", "kl_estimate", {**apart, "estimator": "k2"}, {"kl": [[0.5, 0.5, 0.0]]}),
        Case(
            "k3 by hand",
            "exp(-1) - 1 + 1 = 1/e; exp(1) - 1 - 1 = e - 2; 0. Never negative.",
            "kl_estimate",
            {**apart, "estimator": "k3"},
            {"kl": [[0.36787944117144233, 0.718281828459045, 0.0]]},
        ),
        Case(
            "exact, by hand",
            "p = (1/2, 1/2), q = (3/4, 1/4): log(2/3)/2 + log(2)/2 = log(4/3)/2. The other way round it is "
            "0.75 log(3/2) + 0.25 log(1/2) = 0.1308.",
            "exact_kl",
            {"logits": [[0.0, 0.0], [LN3, 0.0]], "other_logits": [[LN3, 0.0], [0.0, 0.0]]},
            {"kl": [0.14384103622589045, 0.13081203594113697]},
        ),
        Case(
            "exact KL to itself",
            "0, and adding a constant to all logits changes nothing.",
            "exact_kl",
            {"logits": [[1.0, 2.0, -1.0]], "other_logits": [[4.0, 5.0, 2.0]]},
            {"kl": [0.0]},
        ),
    ]
    for estimator in ("k1", "k2", "k3"):
        logprobs = draw.full_grid(2, 5, -3, -0.2)
        inputs = {"logprobs": logprobs, "other_logprobs": draw.near(logprobs, 0.6), "estimator": estimator}
        cases.append(Case(f"{estimator}, random", "Two near policies.", "kl_estimate", inputs))
    inputs = {"logprobs": [[-1.25, -0.5]], "other_logprobs": [[-1.25, -0.5]]}
    for estimator in ("k1", "k3"):
        case_inputs = {**inputs, "estimator": estimator}
        cases.append(
            Case(f"{estimator}, same policy", "No distance.", "kl_estimate", case_inputs, {"kl": [[0.0, 0.0]]})
        )
    for vocabulary in (2, 5):
        inputs = {"logits": draw.full_grid(3, vocabulary, -2, 2), "other_logits": draw.full_grid(3, vocabulary, -2, 2)}
        cases.append(Case(f"exact, vocabulary of {vocabulary}", "Random logits.", "exact_kl", inputs))
    about = "Each estimator of KL(p || q) has its own formula and one sign: tokens come from p, d = log p - log q."
    return Family("kl_estimators", about, cases)


FAMILIES = [logprobs_temperature, entropy, kl_estimators]
