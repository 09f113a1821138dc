"""Where a reward stands: the KL on every sampled token, the score on the last one."""

from conformance.oracle.grids import Grid, Mask, Row, sampled_columns


def token_rewards(scores: Row, kl: Grid, mask: Mask, kl_coef: float) -> dict[str, Grid]:
    """r_t = -kl_coef * kl_t on sampled tokens, + score where t is the row's last sampled token; 0 elsewhere."""
    rewards: Grid = []
    for score, row_kl, mask_row in zip(scores, kl, mask, strict=True):
        row = [0.0] * len(mask_row)
        columns = sampled_columns(mask_row)
        for t in columns:
            row[t] = -kl_coef * row_kl[t]
        if columns:
            row[columns[-1]] += score
        rewards.append(row)
    return {"rewards": rewards}


def missing_eos_penalty(scores: Row, truncated: list[bool], penalty: float | None) -> dict[str, Row]:
    """The penalty stands in place of the score where the answer never ended; None changes nothing."""
    if penalty is None:
        return {"scores": list(scores)}
    return {"scores": [penalty if never_ended else s for s, never_ended in zip(scores, truncated, strict=True)]}
