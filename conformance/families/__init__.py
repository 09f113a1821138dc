"""The families of cases, in the order in which a PPO run meets what they guard."""

from conformance.families import (
    advantages,
    aggregation,
    controllers,
    distributions,
    estimators,
    group_variants,
    groups,
    layout,
    objectives,
    preferences,
    ratios,
    rewards,
    statistics,
    whole_steps,
)
from conformance.families.case import Case, Family

__all__ = ["Case", "Family", "all_families"]

_CHAPTERS = (
    layout,
    statistics,
    distributions,
    rewards,
    advantages,
    estimators,
    groups,
    group_variants,
    objectives,
    ratios,
    aggregation,
    controllers,
    preferences,
    whole_steps,
)


def all_families() -> list[Family]:
    """Every family, built afresh: the same numbers every time."""
    return [build() for chapter in _CHAPTERS for build in chapter.FAMILIES]
