"""Log-probabilities, entropy and KL of categorical distributions, from logits."""

import math

from conformance.oracle.grids import Grid, Row


def log_softmax(logits: Row) -> Row:
    """log p_i = z_i - log sum_j exp(z_j), with the largest z taken out so that exp cannot overflow."""
    largest = max(logits)
    log_total = largest + math.log(math.fsum(math.exp(z - largest) for z in logits))
    return [z - log_total for z in logits]


def token_logprobs(
    logits: list[Grid], tokens: list[list[int]], temperature: float
) -> dict[str, list[list[float | None]]]:
    """With p = softmax(logits[b][t-1] / temperature): log p[token t] and H = -sum p log p, both about token t.

    Column 0 is undefined: no token stands before it to predict it.
    """
    logprobs: list[list[float | None]] = []
    entropies: list[list[float | None]] = []
    for row_logits, row_tokens in zip(logits, tokens, strict=True):
        row_logprobs: list[float | None] = [None]
        row_entropies: list[float | None] = [None]
        for t in range(1, len(row_tokens)):
            log_p = log_softmax([z / temperature for z in row_logits[t - 1]])
            row_logprobs.append(log_p[row_tokens[t]])
            row_entropies.append(-math.fsum(math.exp(lp) * lp for lp in log_p))
        logprobs.append(row_logprobs)
        entropies.append(row_entropies)
    return {"logprobs": logprobs, "entropy": entropies}


LARGEST_EXPONENT = 20.0  # a ratio's exponent goes no higher, so that float32 (which ends at exp(88.7)) can hold it


def estimate_kl(log_p: float, log_q: float, estimator: str) -> float:
    """One token drawn from p. With d = log p - log q: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (never negative).

    k3 takes d no lower than -20.
    """
    d = log_p - log_q
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        d = max(d, -LARGEST_EXPONENT)
        return math.expm1(-d) + d
    raise ValueError(f"estimator must be k1, k2 or k3, not {estimator!r}")


def kl_estimate(logprobs: Grid, other_logprobs: Grid, estimator: str) -> dict[str, Grid]:
    """The estimate of KL(p || q) on every token."""
    return {
        "kl": [
            [estimate_kl(log_p, log_q, estimator) for log_p, log_q in zip(row, other_row, strict=True)]
            for row, other_row in zip(logprobs, other_logprobs, strict=True)
        ]
    }


def exact_kl(logits: Grid, other_logits: Grid) -> dict[str, Row]:
    """KL(p || q) = sum_i p_i (log p_i - log q_i)."""
    kls: Row = []
    for row, other_row in zip(logits, other_logits, strict=True):
        log_p, log_q = log_softmax(row), log_softmax(other_row)
        kls.append(math.fsum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True)))
    return {"kl": kls}
