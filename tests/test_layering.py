"""Rules that hold over every file of src/tether: see docs/architecture.md."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import tether

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tether"
FILES = sorted(SOURCE.rglob("*.py"))

# A package may import only packages above it in this list.
ORDER = [
    *("config", "types", "protocols", "ops", "mask_cache", "accel", "data", "hub", "models", "store", "reports"),
    *("learner", "algorithms", "rollout", "rewards", "evaluation", "doctor", "plan", "train", "distributed"),
    *("control", "sweeps", "api", "scale"),
    *("studio", "pipeline", "demo", "server", "commands", "cli"),
]
ABOVE = {name: set(ORDER[:place]) for place, name in enumerate(ORDER)}
ABOVE["conformance"] = set(ORDER[: ORDER.index("train")])  # whatever training is made of, and no training
ABOVE["commands"] |= {"conformance"}
ABOVE["__main__"] = {"cli"}
# These stand on nothing; __init__ holds the version.
FOR_ALL = {"errors", "files", "processes", "progress", "rate_limit", "redact", "seeds"}
FOR_ALL |= {"device_transfer", "gathering", "user_code", "http_client", "http_server", "__init__"}
ABOVE |= {name: set() for name in FOR_ALL}
ABOVE["__init__"] = {"api"}  # for type checkers; at run time it is imported when it is first used

# What can run code on being read.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_CALLS = {"eval", "exec"}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def package_of(file: Path) -> str:
    """The package of tether that a file is in: src/tether/ops/kl.py is in ops, src/tether/cli.py is cli."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones made absolute; `from a import b` gives a.b."""
    package = ["tether", *file.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_packages(file: Path) -> Iterator[tuple[int, str]]:
    """(line, package of tether) of every import from within tether."""
    for line, name in imports(file):
        first, *rest = name.split(".")
        if first == "tether":
            inner = rest[0] if rest else "__init__"
            known = (SOURCE / inner).is_dir() or (SOURCE / f"{inner}.py").is_file()
            yield line, inner if known or inner in ABOVE else "__init__"  # such as tether.__version__


def each_file() -> list:
    return [pytest.param(file, id=str(file.relative_to(SOURCE))) for file in FILES]


@pytest.mark.parametrize("file", each_file())
def test_a_package_imports_only_packages_above_it(file: Path):
    package = package_of(file)
    assert package in ABOVE, f"{package} has no place in the order: give it one here and in docs/architecture.md"
    allowed = ABOVE[package] | FOR_ALL | {package}
    wrong = [f"line {line} imports tether.{name}" for line, name in imported_packages(file) if name not in allowed]
    assert not wrong, f"{file.relative_to(ROOT)}: {'; '.join(wrong)}. {package} may import only {sorted(allowed)}"


def test_no_files_import_each_other_in_a_circle():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "import_graph.py"), "--check"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("file", each_file())
def test_accel_is_imported_in_one_file(file: Path):
    """So that the package can be removed: see tests/accel/test_without_accel.py."""
    if package_of(file) == "accel" or file == SOURCE / "models" / "acceleration.py":
        return
    wrong = [f"line {line}" for line, name in imported_packages(file) if name == "accel"]
    assert not wrong, f"{file.relative_to(ROOT)}: {wrong}: import from tether.models.acceleration"


@pytest.mark.parametrize("file", each_file())
def test_process_groups_are_the_business_of_one_package(file: Path):
    """So that one process runs without them: see tests/distributed/test_launch.py."""
    wrong = [f"line {line}" for line, name in imports(file) if name.startswith("torch.distributed")]
    assert not wrong or package_of(file) == "distributed", f"{file.relative_to(ROOT)}: {wrong}: use tether.distributed"


@pytest.mark.parametrize("file", each_file())
def test_nothing_is_unpickled_or_evaluated(file: Path):
    wrong = [f"line {line} imports {name}" for line, name in imports(file) if name.split(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            wrong.append(f"line {node.lineno} calls {node.func.id}")
    assert not wrong, f"{file.relative_to(ROOT)}: {'; '.join(wrong)}"


@pytest.mark.parametrize("file", each_file())
def test_no_code_of_a_model_is_trusted_and_no_pickle_is_read(file: Path):
    wrong = []
    for node in ast.walk(tree_of(file)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if node.func.attr in ("from_pretrained", "from_config"):
            given = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
            if not (given and isinstance(given[0], ast.Constant) and given[0].value is False):
                wrong.append(f"line {node.lineno}: {node.func.attr} without trust_remote_code=False")
        elif (owner, node.func.attr) in (("torch", "load"), ("np", "load"), ("numpy", "load"), ("hub", "load")):
            wrong.append(f"line {node.lineno}: {owner}.load reads pickles")
    assert not wrong, f"{file.relative_to(ROOT)}: {'; '.join(wrong)}"


@pytest.mark.parametrize("file", each_file())
def test_python_is_started_without_the_working_folder(file: Path):
    wrong = [
        f"line {node.lineno}"
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Attribute) and node.attr == "executable" and package_of(file) != "processes"
    ]
    assert not wrong, f"{file.relative_to(ROOT)}: {wrong}: start Python by tether.processes.python"


def test_the_package_itself_imports_nothing():
    """`python -m tether` reads it while the working folder, which may hold a `typing.py`, is on the search path."""
    body = tree_of(SOURCE / "__init__.py").body
    assert not [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("file", each_file())
def test_every_module_says_what_it_is(file: Path):
    assert ast.get_docstring(tree_of(file)), f"{file.relative_to(ROOT)} needs a docstring"


def test_config_imports_no_torch():
    heavy = {"torch", "transformers", "numpy", "peft"}
    quick = [file for file in FILES if package_of(file) in ("config", "errors", "cli", "__init__", "__main__")]
    wrong = [f"{file.name}:{line}" for file in quick for line, name in imports(file) if name.split(".")[0] in heavy]
    assert not wrong, f"--help must stay instant: {wrong}"


def test_the_version_is_said_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"] and "version" not in project
    assert version("tether-rl") == tether.__version__, "run `make setup`"


def test_the_changelog_has_a_section_for_this_version():
    sections = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert sections[:2] == ["Unreleased", tether.__version__]


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in wanted} - {project["name"]}
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    missing = sorted(name for name in names if name not in explained)
    assert not missing, f"say in docs/dependencies.md why these are here: {missing}"


def test_the_rules_would_catch_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "ops").mkdir()
    (tmp_path / "train").mkdir()
    file = tmp_path / "ops" / "bad.py"
    file.write_text("from ..train import rl\nfrom tether import train\nimport pickle\n")
    assert [name for _, name in imported_packages(file)] == ["train", "train"]
    assert (3, "pickle") in list(imports(file))
