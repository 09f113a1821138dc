"""Over-optimisation in words, on curves whose answer is known."""

import math
import random

import pytest

from tether.reports.run_report import judge_overoptimisation

Curve = list[tuple[float, float]]


def rise(u: float) -> float:
    return 1.0 - math.exp(-3.0 * u)


TRUE = {
    "keeps pace": lambda u: 0.1 + 0.6 * rise(u),
    "falls behind": lambda u: 0.1 + 2.4 * u * (1.0 - u),
    "plateau": lambda u: 0.1 + 0.5 * min(1.0, 4.0 * u),
    "never follows": lambda u: 0.3,
    "noise only": lambda u: 0.3,
    "comes apart": lambda u: 0.1 + 2.4 * u * (1.0 - u),
}


def curves(
    kind: str, *, count: int = 41, noise: float = 0.02, seed: int = 0, scale: float = 3.0
) -> tuple[Curve, Curve]:
    draw = random.Random(seed)
    parts = [place / (count - 1) for place in range(count)]
    proxies = {"noise only": lambda u: 0.0, "comes apart": lambda u: 4.0 * u * (1.0 - u)}
    proxy = [(float(place), scale * proxies.get(kind, rise)(u)) for place, u in enumerate(parts)]
    true = [(float(place), TRUE[kind](u)) for place, u in enumerate(parts)]
    return (
        [(step, value + draw.gauss(0, scale * noise)) for step, value in proxy],
        [(step, value + draw.gauss(0, noise)) for step, value in true],
    )


GOLDEN = {
    "keeps pace": ("good", "The true score kept pace with the proxy."),
    "falls behind": ("warning", "The true score fell behind the proxy: the policy is over-optimised."),
    "plateau": ("note", "The true score began to fall behind the proxy: it levelled off"),
    "never follows": ("warning", "The true score fell behind the proxy: it never followed."),
    "noise only": ("note", "Neither score moved by more than its noise"),
    "comes apart": ("warning", "Both scores fell, so this is not over-optimisation"),
}


@pytest.mark.parametrize("kind", GOLDEN)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_verdict(kind, noise):
    level, words = GOLDEN[kind]
    found = judge_overoptimisation(*curves(kind, noise=noise))
    assert (found.level, found.text[: len(words)]) == (level, words)


def test_the_whole_of_the_words():
    assert judge_overoptimisation(*curves("keeps pace", noise=0.0)).text == (
        "The true score kept pace with the proxy. The true score rose from 0.14 at step 0 to 0.67; the proxy went from "
        "0.21 at step 0 to 2.84. The true score ends near its peak (a change counts from 0.053)."
    )
    assert judge_overoptimisation(*curves("falls behind", noise=0.0)).text == (
        "The true score fell behind the proxy: the policy is over-optimised. The true score fell, smoothed, from its "
        "peak of 0.70 at step 20 to 0.16 at step 40, a loss of 0.54 (a change counts from 0.054), while the proxy kept "
        "rising, from 2.33 at step 20 to 2.84. The best model is near step 20: stop there, raise the KL coefficient, "
        "or improve the reward model."
    )


@pytest.mark.parametrize("kind", ["keeps pace", "noise only"])
def test_luck_rarely_raises_an_alarm(kind):
    found = [
        judge_overoptimisation(*curves(kind, count=count, noise=0.05, seed=seed)).level
        for count in (12, 20, 40)
        for seed in range(100)
    ]
    assert found.count("warning") <= 6


@pytest.mark.parametrize("count", [12, 20, 40, 200])
def test_a_fall_is_seen_through_noise(count):
    found = [judge_overoptimisation(*curves("falls behind", count=count, noise=0.05, seed=seed)) for seed in range(50)]
    assert sum("over-optimised" in finding.text for finding in found) >= 48


def test_both_levelling_off_is_keeping_pace():
    curve = [(float(step), min(step, 15) / 15.0) for step in range(41)]
    found = judge_overoptimisation([(step, 5.0 * value - 1.0) for step, value in curve], curve)
    assert found.level == "good"


def test_scale_and_shift_do_not_matter():
    for kind in GOLDEN:
        proxy, true = curves(kind)
        moved = [(step, 1000.0 * value - 50.0) for step, value in proxy], [(step, value / 50.0) for step, value in true]
        assert judge_overoptimisation(*moved).level == judge_overoptimisation(proxy, true).level


def test_curves_need_not_share_their_steps():
    proxy, true = curves("falls behind", count=81)
    found = judge_overoptimisation(proxy, true[::8])
    assert found.level == "warning" and "kept rising" in found.text


def test_too_little_data():
    proxy, true = curves("falls behind")
    for pair in (([], []), (proxy, true[:5]), (proxy[:3], true), (proxy, [(step, math.nan) for step, _ in true])):
        found = judge_overoptimisation(*pair)
        assert found.level == "note" and found.text.startswith("Too little data")
    apart = judge_overoptimisation(proxy, [(step + 1000.0, value) for step, value in true])
    assert apart.level == "note" and "same steps" in apart.text


def test_missing_values_and_order_do_not_matter():
    proxy, true = curves("falls behind")
    broken = [*reversed(true), (17.0, math.nan), (99.0, math.inf)]
    assert judge_overoptimisation([*proxy, (3.0, math.nan)][::-1], broken) == judge_overoptimisation(proxy, true)


def test_the_peak_and_the_end_are_named():
    found = judge_overoptimisation(*curves("falls behind"))
    assert "at step 20" in found.text or "at step 19" in found.text or "at step 21" in found.text
    assert "at step 40" in found.text
