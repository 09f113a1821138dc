"""The locks agree with what they were made from, hold a hash for everything, and are what `make setup` installs."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
CI = ("ci-triton.txt", "ci-node.txt", "ci-reasoning.txt", "ci-lm-eval.txt")
FILES = ("torch.txt", "dev.txt", "cuda.txt", "docs.txt", "extras.txt", *CI, "tools.txt")


def load(name: str):
    sys.path.insert(0, str(LOCKS))
    try:
        spec = importlib.util.spec_from_file_location(f"locks_{name}", LOCKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(LOCKS))


def blocks(name: str) -> dict[str, str]:
    return load("lock").read_blocks((LOCKS / name).read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", FILES)
def test_every_locked_package_has_one_version_and_hashes(name: str):
    found = blocks(name)
    assert found
    for head, block in found.items():
        assert re.match(r"[a-z0-9-]+==[0-9][^\s]*( ; .+)?$", head), head
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), head
    text = (LOCKS / name).read_text()
    assert "://" not in text and "index-url" not in text and "file:" not in text


def test_the_locks_were_made_from_what_is_there():
    digest = load("lock").inputs_digest()
    for name in FILES:
        assert f"# inputs sha256:{digest}" in (LOCKS / name).read_text(), (
            f"locks/{name} was made from other inputs: run `make lock`"
        )


def test_exact_versions_and_direct_dependencies_are_in_the_locks():
    files = ("torch.txt", "dev.txt", "docs.txt", "extras.txt")
    locked = {head.partition(" ;")[0] for name in files for head in blocks(name)}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] not in "#"]
    missing = [pin for pin in pins if f"{normal(pin.partition('==')[0])}=={pin.partition('==')[2]}" not in locked]
    assert not missing, f"constraints.txt has other versions than locks/: {missing}; run `make lock`"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for each in project["optional-dependencies"].values() for line in each)]
    names = {normal(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in wanted} - {"tether-rl"}
    assert names <= {head.partition("==")[0] for head in locked}


def test_what_is_installed_is_what_is_locked():
    """Every package that is locked for this Python and installed has the locked version."""
    locked: dict[str, set[str]] = {}
    for name in ("torch.txt", "dev.txt"):
        for head in blocks(name):
            package, _, version = head.partition(" ;")[0].partition("==")
            locked.setdefault(package, set()).add(version)
    there = {normal(one.metadata["Name"]): one.version.partition("+")[0] for one in distributions()}
    other = {name: there[name] for name in locked if name in there and there[name] not in locked[name]}
    assert not other, f"run `make setup`: {other}"


def test_a_cpu_build_of_torch_is_allowed_beside_the_registry_s():
    [block] = blocks("torch.txt").values()
    listed = [line.split() for line in (LOCKS / "other-builds.txt").read_text().splitlines() if line[0] != "#"]
    assert listed and all(sha256 in block for _, sha256, _ in listed)
    assert block.count("--hash=") > len(listed)


def test_a_file_that_was_changed_is_not_installed(tmp_path: Path):
    """pip itself, on a wheel of ours that is not the one that was locked."""
    import zipfile

    wheel = tmp_path / "locked_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("locked_thing.py", "changed = True\n")
        archive.writestr(
            "locked_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: locked-thing\nVersion: 1.0\n"
        )
        archive.writestr(
            "locked_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("locked_thing-1.0.dist-info/RECORD", "")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"locked-thing==1.0 --hash=sha256:{'0' * 64}\n")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={tmp_path}"]
    words += [
        "--require-hashes",
        "--no-deps",
        "--only-binary",
        ":all:",
        f"--target={tmp_path / 'out'}",
        "-r",
        str(lock),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "HASH" in done.stderr.upper() and not (tmp_path / "out").exists()


def test_setup_installs_by_the_locks_alone():
    made = (ROOT / "Makefile").read_text()
    [rule] = re.findall(r"^\$\(STAMP\):.*?(?=^\S)", made, flags=re.MULTILINE | re.DOTALL)
    assert "--require-hashes --no-deps --only-binary :all:" in made
    for line in rule.splitlines():
        assert "pip install" not in line or "--no-deps --no-build-isolation -e ." in line, line
    assert rule.count("$(LOCKED)") == 4


def test_the_bill_of_materials_names_everything_with_its_licence():
    bill = load("sbom").bill()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["name"]: part for part in bill["components"]}
    refs = {part["bom-ref"] for part in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {"torch", "transformers", "numpy", "uplot", "demo-data"} <= set(parts)
    assert all(edge["ref"] in refs and set(edge["dependsOn"]) <= refs for edge in bill["dependencies"])
    assert parts["numpy"]["externalReferences"][0]["hashes"] and parts["uplot"]["licenses"]
    json.dumps(bill)


def test_the_licences_page_has_every_locked_package():
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| ([^ ]+) \| [^|]+ \|$", page, flags=re.MULTILINE))
    for name in ("torch.txt", "dev.txt"):
        for head in blocks(name):
            package, _, version = head.partition(" ;")[0].partition("==")
            if " ;" not in head:
                assert rows.get(package) == version, f"{package} {version}: run `make licences`"
    assert "not stated" not in page
    for place in re.findall(r"`(src/[^`]+)`", page):
        assert (ROOT / place).exists()
    vendor = ROOT / "src" / "tether" / "studio" / "static" / "vendor"
    assert all((folder / "LICENSE").is_file() for folder in vendor.iterdir())


def test_an_audit_without_data_says_so_with_an_exit_code_of_its_own(tmp_path: Path):
    fake = tmp_path / "pip-audit"
    answers = {
        "nothing": ("", 1, 3),
        "unknown": (json.dumps({"dependencies": [{"name": "x", "skip_reason": "not found"}]}), 0, 3),
        "clean": (json.dumps({"dependencies": [{"name": "x", "version": "1", "vulns": []}]}), 0, 0),
        "hole": (
            json.dumps(
                {"dependencies": [{"name": "x", "version": "1", "vulns": [{"id": "V-1", "fix_versions": ["2"]}]}]}
            ),
            1,
            1,
        ),
    }
    for said, code, wanted in answers.values():
        fake.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
        fake.chmod(0o755)
        words = [sys.executable, str(LOCKS / "audit.py"), "--pip-audit", str(fake)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == wanted, (said, done.stderr)
        assert ("could not be reached" in done.stderr) == (wanted == 3)
