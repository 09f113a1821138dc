"""Which settings a sweep runs: every combination, one key at a time, or what a sampler draws.

A setting is a mapping of varied keys to values. In a study of one key at a time, setting 0 is the recipe itself.
Drawn settings come in waves of `WAVE`: a wave depends on the results of earlier waves and on the seed, never on which
trial was first. So the number of jobs and a kill change nothing.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.config.sweep_settings import DEFAULT_BUDGET, SAMPLED, SweepSettings
from tether.errors import ConfigError
from tether.seeds import derive_seed
from tether.sweeps.variation import AnyRecipe, Variation, check_values, in_words, value_in

Values = Mapping[str, Any]
MAX_SETTINGS = 2000
WAVE = 4  # settings that a sampler draws before it looks at results again
MAX_DRAWS = 200  # for one setting that is new and that the recipe accepts
NEEDS_OPTUNA = (
    "--sampler {sampler} needs Optuna: pip install 'tether-rl[sweep]'; or list values, or points such as "
    "0.01..0.3:log:5, and take --sampler grid"
)


def chosen_sampler(settings: SweepSettings, variations: Sequence[Variation]) -> str:
    """The sampler, by default grid where everything is listed; raises ConfigError where the ranges do not fit it."""
    open_ranges = [variation for variation in variations if variation.is_range]
    sampler = settings.sampler or ("random" if open_ranges or settings.budget is not None else "grid")
    if sampler in SAMPLED:
        _optuna(sampler)
        return sampler
    for variation in open_ranges:
        raise ConfigError(
            f"--vary {variation.key}={variation.spread}: {sampler} needs to know how many points: write "
            f"{variation.spread}:5, or take --sampler random"
        )
    return sampler


def budget_of(settings: SweepSettings, sampler: str) -> int | None:
    """How many settings are drawn; None where all are known."""
    return (settings.budget or DEFAULT_BUDGET) if sampler in SAMPLED else None


def listed_settings(recipe: AnyRecipe, variations: Sequence[Variation], sampler: str) -> list[dict[str, Any]]:
    """The settings of grid and of one-at-a-time, each accepted by the recipe; none for the other samplers."""
    if sampler in SAMPLED:
        return []
    if sampler == "grid":
        many = math.prod(len(variation.values) for variation in variations)
        if many > MAX_SETTINGS:
            raise ConfigError(
                f"the grid has {many:,} settings, above {MAX_SETTINGS:,}: list fewer values, or take --sampler random "
                "with a --budget"
            )
        keys = [variation.key for variation in variations]
        found = [dict(zip(keys, row, strict=True)) for row in itertools.product(*(each.values for each in variations))]
    else:
        found = [{variation.key: value_in(recipe, variation.key) for variation in variations}]
        found += [
            {**found[0], variation.key: value}
            for variation in variations
            for value in variation.values
            if value != found[0][variation.key]
        ]
        if len(found) == 1:
            raise ConfigError("every listed value is the recipe's own: list other values as well")
    for values in found:
        check_values(recipe, values)
    return found


# -- drawn settings -----------------------------------------------------------------------------------------------


def _optuna(sampler: str) -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(NEEDS_OPTUNA.format(sampler=sampler)) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def draw_settings(
    recipe: AnyRecipe,
    variations: Sequence[Variation],
    sampler: str,
    before: Sequence[Values],
    value_of: Callable[[int], float | None],
    count: int,
    seed: int,
) -> list[dict[str, Any]]:
    """The next settings, up to `count`: fewer where every combination has been drawn.

    `before` are those drawn so far, and `value_of` gives the value of each, higher for better; None where all its
    seeds diverged, which counts as the worst value so far.
    """
    optuna = _optuna(sampler)
    space = {variation.key: _distribution(optuna, variation) for variation in variations}
    study = _study(optuna, sampler, derive_seed(seed, f"sweep/{sampler}/{len(before)}") % 2**32)
    known = [value for place in range(len(before)) if (value := value_of(place)) is not None]
    worst = min(known, default=0.0)
    for place, values in enumerate(before):
        value = value_of(place)
        params = {each.key: _encoded(each, values[each.key]) for each in variations}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=space, value=worst if value is None else value)
        )
    found: list[dict[str, Any]] = []
    reasons: set[str] = set()
    for _ in range(MAX_DRAWS):
        if len(found) == count:
            break
        trial = study.ask(space)
        values = {each.key: _decoded(each, trial.params[each.key]) for each in variations}
        if values not in [*map(dict, before), *found]:
            try:
                check_values(recipe, values)
                found.append(values)
                continue
            except ConfigError as error:
                reasons.add(str(error))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    if not found and not before:
        raise ConfigError(f"the recipe rejects every setting that was drawn: {min(reasons)}")
    return found


def _study(optuna: Any, sampler: str, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna marks options that it may still change
        if sampler == "random":
            chosen = optuna.samplers.RandomSampler(seed=seed)
        else:
            chosen = optuna.samplers.TPESampler(seed=seed, n_startup_trials=2 * WAVE, constant_liar=True)
        return optuna.create_study(sampler=chosen, direction="maximize")


def _distribution(optuna: Any, variation: Variation) -> Any:
    if not variation.is_range:  # by place: a choice of Optuna's cannot be a list
        return optuna.distributions.CategoricalDistribution(tuple(range(len(variation.values))))
    kind = "IntDistribution" if variation.whole else "FloatDistribution"
    return getattr(optuna.distributions, kind)(variation.low, variation.high, log=variation.log)


def _encoded(variation: Variation, value: Any) -> Any:
    return value if variation.is_range else variation.values.index(value)


def _decoded(variation: Variation, drawn: Any) -> Any:
    return drawn if variation.is_range else variation.values[drawn]


def differing(values: Values, base: Values) -> str:
    """The part of a setting that differs from another, in words."""
    return in_words({key: value for key, value in values.items() if value != base.get(key)})
