"""What every test may rely on: small numbers of threads, no model hub, and stores to write to.

Stores are SQLite always, and PostgreSQL where TETHER_TEST_POSTGRES names one or a server's programs are here.
"""

import atexit
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from not_tested import Skip, last_line
from sqlalchemy import create_engine, text

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A user's folder of the tests' own, which allows the modules that tests name from folders which they do not run in.
_USER = Path(tempfile.mkdtemp(prefix="tether-user-"))
_ALLOWED = "user_functions, case_reward, drawing_reward, sick_tasks, draw, threaded_engine"
(_USER / "config.yaml").write_text(f"allow: [{_ALLOWED}]\n")
os.environ["TETHER_CONFIG"] = str(_USER)
atexit.register(shutil.rmtree, _USER, ignore_errors=True)

# transformers imports Triton through torch, before any test of a kernel can ask for its interpreter.
if importlib.util.find_spec("triton") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# Debian and Ubuntu keep the programs of a PostgreSQL server off PATH.
if not shutil.which("initdb") and (servers := sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))):
    os.environ["PATH"] += f"{os.pathsep}{servers[-1].parent}"

# Skipped tests, and files that were skipped as they were imported. Under xdist both workers collect all files and the
# controller is told of one file for each reason, so workers hand their own list over.
SKIPPED: dict[str, Skip] = {}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped and report.nodeid:
        _note_skip(report, whole_file=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _note_skip(report, whole_file=False)


def _note_skip(report: pytest.CollectReport | pytest.TestReport, whole_file: bool) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    SKIPPED[report.nodeid] = Skip(report.nodeid, reason, whole_file)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    for skipped, reason in getattr(node, "workeroutput", {}).get("skipped_files", ()):
        SKIPPED[skipped] = Skip(skipped, reason, whole_file=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session):
    worker = hasattr(session.config, "workeroutput")
    if worker:
        files = [(skip.node, skip.reason) for skip in SKIPPED.values() if skip.whole_file]
        session.config.workeroutput["skipped_files"] = files
    result = yield
    if not worker and session.testscollected and not session.config.option.collectonly:
        session.config.pluginmanager.get_plugin("terminalreporter").write_line(last_line(SKIPPED.values()))
    return result


def _as_user() -> dict:
    """PostgreSQL refuses to run as root."""
    return {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The address of a server; a throw-away one on a socket of its own where none is named."""
    if given := os.environ.get("TETHER_TEST_POSTGRES"):
        yield given
        return
    pytest.importorskip("psycopg", reason="PostgreSQL is not tested: the package psycopg is not installed")
    if not shutil.which("initdb") or not shutil.which("postgres"):
        pytest.skip("PostgreSQL is not tested: set TETHER_TEST_POSTGRES, or install a server")
    folder = Path(tempfile.mkdtemp(prefix="tether-pg-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, **_as_user())
    data, quiet = folder / "data", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    command = ["initdb", "-D", str(data), "-U", "tether", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
    subprocess.run(command, check=True, **quiet, **_as_user())
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
    server = subprocess.Popen(["postgres", "-D", str(data), *options], **quiet, **_as_user())
    url = f"postgresql+psycopg://tether@/postgres?host={folder}"
    try:
        _wait_for(url)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str) -> None:
    for _ in range(200):
        try:
            with create_engine(url).connect():
                return
        except Exception:
            time.sleep(0.05)
    pytest.skip("PostgreSQL is not tested: the server did not start")


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The URL of an empty store; None for the workspace's own SQLite file."""
    if request.param == "sqlite":
        yield None
        return
    server = request.getfixturevalue("postgres_server")
    name = f"tether_{uuid.uuid4().hex[:12]}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield admin.url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()
