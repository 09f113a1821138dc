"""A Studio over a small workspace, on each database."""

from pathlib import Path

import pytest
from studio_clients import Clients, record_run, settings

from tether.store.database.open import Workspace, workspace_at
from tether.studio.app import create_app


@pytest.fixture
def workspace(tmp_path: Path, store_url) -> Workspace:
    """A workspace with one run of six steps, on each database."""
    record_run(tmp_path, store_url)
    return workspace_at(tmp_path / "runs", store_url)


@pytest.fixture
def clients(workspace: Workspace) -> Clients:
    return Clients(create_app(workspace, settings()))


@pytest.fixture
def plain(tmp_path: Path, monkeypatch) -> Clients:
    """The same on SQLite alone, for what no database has a part in."""
    monkeypatch.delenv("TETHER_STORE", raising=False)
    record_run(tmp_path)
    return Clients(create_app(workspace_at(tmp_path / "runs"), settings()))


@pytest.fixture(scope="module")
def browser():
    """One browser for the tests of a file; playwright is asked for here, where a test that needs it can be skipped."""
    from studio_browser import a_browser

    with a_browser() as found:
        yield found


@pytest.fixture
def visitor(browser, served):
    """A person with a page open on the file's own server; whatever the page complained of fails the test."""
    from studio_browser import Visitor

    found = Visitor(browser, served)
    yield found
    faults = found.faults
    found.close()
    assert not faults, faults
