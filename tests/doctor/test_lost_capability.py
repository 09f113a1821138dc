"""The audit of lost capability, on changes that were written down by hand, and the run report's table of them."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic import synthetic

from tether.doctor.findings import Finding, Healthy, TooLittle
from tether.doctor.lost_capability import lost_capability
from tether.reports.capability_table import EVENT, CapabilityChange, capability_table, changes_of
from tether.reports.report import ReportContent, render_html, render_markdown
from tether.reports.run_report import capability_finding
from tether.store.recorded import Event, RecordedRun


def change(difference: float, low: float, high: float, *, better: str = "lower", **other) -> CapabilityChange:
    """A metric that was 1 at the start; `low` and `high` are the widened interval."""
    given = {"name": "bits_per_byte", "label": "bits per byte", "margin": 0.05, "judged": True, "count": 64, **other}
    start, end = (1.0, 0.9, 1.1), (1.0 + difference, 0.9 + difference, 1.1 + difference)
    return CapabilityChange(
        **given, better=better, start=start, end=end, difference=(difference, low, high), adjusted=(low, high)
    )


def run_with(*changes: CapabilityChange) -> RecordedRun:
    data = {"changes": [each.as_json() for each in changes]}
    return dataclasses.replace(synthetic(), events=[Event(0.0, EVENT, "", 23, data)])


def test_a_loss_beyond_the_margin_with_an_interval_that_leaves_out_zero_is_found():
    found = lost_capability(run_with(change(0.1, 0.06, 0.14), change(0.0, -0.1, 0.1, name="x", label="other")))
    assert isinstance(found, Finding)
    assert (found.audit, found.severity, found.metric) == ("capability-loss", "warning", "suite/bits_per_byte")
    went = "bits per byte went from 1.00 [0.90, 1.10] to 1.10 [1.00, 1.20], a difference of 0.10 [0.06, 0.14] (lower is"
    assert went in found.saw
    assert "Bonferroni correction for 2 metrics" in found.saw and "other" not in found.saw
    assert [cure.partition(":")[0] for cure in found.change[:3]] == ["kl.coef", "optimizer.policy_lr", "ptx.data"]


def test_a_loss_of_more_than_four_margins_is_an_alarm_and_comes_first():
    small, large = change(0.1, 0.06, 0.14), change(-0.5, -0.7, -0.3, better="higher", name="a", label="arithmetic")
    found = lost_capability(run_with(small, large))
    assert isinstance(found, Finding) and found.severity == "alarm" and found.metric == "suite/a"
    assert found.saw.startswith("arithmetic went from 1.00 [0.90, 1.10] to 0.50")


@pytest.mark.parametrize(
    "harmless",
    [
        change(0.1, -0.01, 0.2),  # large, and perhaps chance
        change(0.04, 0.03, 0.05),  # certain, and small
        change(-0.5, -0.6, -0.4),  # better
        change(0.5, 0.4, 0.6, better="higher"),  # better
        change(-0.2, -0.4, 0.01, better="higher"),
    ],
)
def test_a_harmless_change_is_no_finding(harmless):
    verdict = lost_capability(run_with(harmless))
    assert isinstance(verdict, Healthy) and verdict.saw.startswith("1 metrics of the suite")


def test_without_a_suite_there_is_too_little():
    assert isinstance(lost_capability(synthetic()), TooLittle)
    assert isinstance(lost_capability(run_with(change(0.5, 0.4, 0.6, judged=False))), TooLittle)
    broken = dataclasses.replace(synthetic(), events=[Event(0.0, EVENT, "", 1, {"changes": [{"name": "x"}]})])
    assert changes_of(broken) == [] and isinstance(lost_capability(broken), TooLittle)


def test_the_report_has_a_table_and_a_finding():
    lost, kept = change(0.1, 0.06, 0.14), change(0.0, -0.1, 0.1, name="x", label="other <x>")
    content = ReportContent(
        "A run", tables=(capability_table([lost, kept]),), findings=(capability_finding([lost, kept]),)
    )
    page, text = render_html(content), render_markdown(content).text
    for shown in ("What it forgot", "0.10 [0.06, 0.14]", "1.00 [0.90, 1.10]", "The policy lost capability."):
        assert shown in page and shown in text.replace("\\", "")
    assert "other &lt;x&gt;" in page and page.count("<td>loss</td>") == 1
    assert capability_finding([kept]).level == "good" and capability_finding([lost]).level == "warning"
