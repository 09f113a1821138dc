"""The last line of a test run groups what was skipped by what it needs, in one process and in two."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from not_tested import NEEDS, Skip, last_line, need_of

TESTS = Path(__file__).parent
CHROMIUM = "Skipped: Chromium is not installed: apt-get install chromium"


def test_skips_are_grouped_by_what_they_need_the_largest_group_first():
    skips = [
        Skip("a.py::one", "Skipped: needs a CUDA device"),
        Skip("b.py::one", CHROMIUM),
        Skip("b.py::two", CHROMIUM),
        Skip("c.py::one", "Skipped: there is no CUDA device here"),
        Skip("d.py::one", CHROMIUM),
    ]
    assert last_line(skips) == (
        "Not tested: 3 tests need Chromium (apt-get install chromium); 2 tests need a CUDA device."
    )


def test_files_whose_tests_were_never_collected_come_first_and_are_counted_as_files():
    triton = "Skipped: Triton is not installed"
    skips = [
        *(Skip(f"a.py::{number}", CHROMIUM) for number in range(9)),
        Skip("k.py", triton, whole_file=True),
        Skip("l.py", triton, whole_file=True),
        Skip("l.py::one", triton),
    ]
    assert last_line(skips).startswith("Not tested: 2 whole test files and 1 test need Triton (")
    assert "locks/ci-triton.txt); 9 tests need Chromium" in last_line(skips)


def test_a_node_is_counted_once():
    assert last_line([Skip("a.py::one", CHROMIUM)] * 2).startswith("Not tested: 1 test needs Chromium (")


def test_a_reason_that_is_not_known_is_repeated():
    assert last_line([Skip("a.py::one", "Skipped: it rains")]) == 'Not tested: 1 test was skipped: "it rains".'


def test_a_run_without_skips_says_so():
    assert last_line([]) == "Not tested: nothing; no test was skipped."


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("PostgreSQL is not tested: the package psycopg is not installed", "psycopg"),
        ("PostgreSQL is not tested: set TETHER_TEST_POSTGRES, or install a server", "PostgreSQL"),
        ("PostgreSQL is not tested: its programs are not on PATH", "PostgreSQL"),
        ("the interpreter of Triton before 3.7 needs numpy before 2.4", "Triton"),
        ("the extra `reasoning` is not installed", "reasoning-gym"),
        ("the extra `lm-eval` is not installed", "lm-eval"),
        ("caddy is not installed: apt-get install caddy", "Caddy"),
        ("a small disk needs root to be mounted", "the right to mount a small disk"),
    ],
)
def test_the_reasons_that_tests_give_are_known(reason: str, name: str):
    assert need_of(f"Skipped: {reason}").name == name


def test_every_lock_that_a_command_names_is_there():
    named = [word for need in NEEDS for word in need.install.split() if word.startswith("locks/")]
    assert named and all((TESTS.parent / name).is_file() for name in named)


@pytest.mark.parametrize("processes", [0, 2])
def test_the_last_line_of_a_run_counts_tests_and_files(tmp_path: Path, processes: int):
    """pytest itself, with the hooks of these tests: xdist tells its controller of one file for each reason."""
    for name in ("conftest.py", "not_tested.py"):
        shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "no_triton.py").write_text(
        "import pytest\ndef leave():\n    pytest.skip('Triton is not installed', allow_module_level=True)\n"
    )
    for name in ("test_k.py", "test_l.py"):
        (tmp_path / name).write_text("from no_triton import leave\nleave()\n")
    (tmp_path / "test_m.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_cuda(n):\n    pytest.skip('needs a CUDA device')\n"
        "def test_here():\n    pass\n"
        "@pytest.mark.xfail(strict=True)\n"
        "def test_that_is_expected_to_fail():\n    raise AssertionError\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(processes), "--rootdir=."]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("Not tested: 2 whole test files need Triton ("), done.stdout
    assert last.endswith("; 3 tests need a CUDA device."), done.stdout
