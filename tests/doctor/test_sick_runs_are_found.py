"""Every disease is found in a real tiny run that was given it, and what is said of it can be acted on."""

import re
from pathlib import Path

import pytest
from recipes_of_runs import SICK, RunToRecord
from stored_runs import read_recorded

from tether.config.recipes import RECIPES
from tether.config.schema import describe, sections
from tether.doctor.doctor import AUDITS, Doctor, with_measures
from tether.doctor.findings import SEVERITIES, Finding

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
FINDINGS = [(run, finding) for run in SICK for finding in Doctor().examine(read_recorded(run.name))]
ONLY_MADE_UP = {
    "not-finite",
    "staleness",
    "capability-loss",
}  # no recorded run has one; see test_causes.py and test_lost_capability.py


@pytest.mark.parametrize("run", SICK, ids=lambda run: run.name)
def test_the_disease_that_a_run_was_given_is_found(run: RunToRecord):
    found = {finding.audit for finding in Doctor().examine(read_recorded(run.name))}
    assert set(run.diseases) <= found


def test_every_audit_has_a_real_run_with_its_disease():
    assert {disease for run in SICK for disease in run.diseases} == {audit.name for audit in AUDITS} - ONLY_MADE_UP


@pytest.mark.parametrize(("run", "finding"), FINDINGS, ids=lambda value: getattr(value, "name", None) or value.audit)
def test_a_finding_says_what_it_saw_with_numbers_why_and_what_to_change(run: RunToRecord, finding: Finding):
    recorded = with_measures(read_recorded(run.name))
    assert re.search(r"\d", finding.saw)
    assert finding.why and finding.change and finding.title
    assert finding.severity in SEVERITIES
    steps = [int(row["step"]) for row in recorded.metrics]
    assert steps[0] <= finding.first_step <= finding.last_step <= steps[-1]
    assert any(finding.metric in row for row in recorded.metrics), f"{finding.metric} has no curve to be placed on"


@pytest.mark.parametrize(("run", "finding"), FINDINGS, ids=lambda value: getattr(value, "name", None) or value.audit)
def test_the_keys_that_a_finding_names_are_keys_of_that_method(run: RunToRecord, finding: Finding):
    recipe = RECIPES[run.method]
    known = {leaf.key for leaf in describe(recipe)} | set(sections(recipe))
    named = [key for text in finding.change for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)]
    unknown = [key for key in named if key not in known and key.split(".")[0] != "docs"]
    other_methods = {"trpo", "ppo"} - {run.method}
    assert not [key for key in unknown if key.split(".")[0] not in other_methods]
    assert named or "see" in " ".join(finding.change)


@pytest.mark.parametrize("audit", AUDITS, ids=lambda audit: audit.name)
def test_the_guide_has_a_section_for_every_audit(audit):
    assert f"### {audit.name}\n" in GUIDE


def test_the_tokens_on_which_sampler_and_trainer_differ_are_named():
    run = read_recorded("sick-coarse-engine")
    finding = next(found for found in Doctor().examine(run) if found.audit == "rollout-mismatch")
    assert len(finding.examples) == 5
    assert all(re.search(r"sample \d+, token \d+ '.*': sampler .* trainer ", text) for text in finding.examples)


def test_repeated_answers_are_shown():
    finding = next(f for f in Doctor().examine(read_recorded("sick-one-letter")) if f.audit == "repetition")
    assert any("eeee" in text for text in finding.examples)
