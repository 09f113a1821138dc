"""The files that a contributor meets first: what they name is there, and CI runs what they say."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "docs/releasing.md",
    ".github/PULL_REQUEST_TEMPLATE.md",
)
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_commands_to_targets(page: str):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing, f"{page} links to {missing}"
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|&& |^)make ([a-z]+)", text, flags=re.MULTILINE))
    assert named <= targets, f"{page} names {sorted(named - targets)}, which the Makefile does not have"


def test_the_workflow_runs_what_ci_runs_without_secrets():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    workflow = yaml.safe_load(text)
    [job] = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert workflow["permissions"] == {"contents": "read"} and "secrets" not in text
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[a-z-]+@v\d+(\.\d+)*", action) for action in used)


def test_ci_checks_and_tests():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make check", "make test", ".ci/install"} <= {line.strip() for line in commands}
    for name in ("run", "install"):
        assert (ROOT / ".ci" / name).stat().st_mode & 0o111, f".ci/{name} cannot be run"


def test_hooks_are_local_and_run_the_project_s_own_programs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)
    assert {shlex.split(hook["entry"])[0] for hook in hooks} == {".venv/bin/ruff", "make"}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_are_what_github_reads(form: Path):
    asked = yaml.safe_load(form.read_text())
    assert asked["name"] and asked["description"]
    questions = [part for part in asked["body"] if part["type"] != "markdown"]
    names = [part["id"] for part in questions]
    assert len(set(names)) == len(names) and all(part["attributes"]["label"] for part in questions)
    assert any(part.get("validations", {}).get("required") for part in questions)


def test_there_is_a_form_for_each_kind_of_issue():
    assert [form.stem for form in FORMS] == ["bug", "feature", "wrong_result"]


def test_benchmarks_and_tools_name_folders_that_exist():
    """They extend the search path by folders of the tests, which no import check sees."""
    found = 0
    for file in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        for folder in re.findall(r'parents\[\d\] / ("[^)\n]+")', file.read_text(encoding="utf-8")):
            parts = re.findall(r'"([^"]+)"', folder)
            if parts[0] in ("tests", "docs", "src", "benchmarks", "recipes"):
                found += 1
                assert ROOT.joinpath(*parts[:2]).exists(), f"{file.relative_to(ROOT)} names {'/'.join(parts[:2])}"
    assert found >= 10
