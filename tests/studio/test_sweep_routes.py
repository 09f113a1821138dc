"""What the page reads of sweeps."""

import sys
from pathlib import Path

import pytest
from studio_clients import Clients, settings

sys.path.append(str(Path(__file__).parents[1] / "sweeps"))  # sweep_folders.py

from sweep_folders import make_sweep

from tether.store.database.open import workspace_at
from tether.studio.app import create_app


@pytest.fixture
def swept(tmp_path: Path, monkeypatch) -> Clients:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    make_sweep(tmp_path)
    return Clients(create_app(workspace_at(tmp_path / "runs"), settings()))


def test_sweeps_are_listed_with_their_best_setting(swept: Clients):
    [sweep] = swept.owner.get("/api/sweeps").json()["sweeps"]
    assert (sweep["name"], sweep["trials"], sweep["ended"]) == ("study", 18, 18)
    assert sweep["best"]["words"] == "ppo.clip_range 0.2, ppo.epochs 2"
    assert sweep["best"]["interval"]["mean"] == pytest.approx(0.84375)


def test_a_sweep_has_its_settings_effects_curves_and_runs(swept: Clients):
    sweep = swept.owner.get("/api/sweeps/study").json()
    order = [(row["values"]["ppo.clip_range"], row["values"]["ppo.epochs"]) for row in sweep["settings"]]
    assert order[:3] == [("0.2", "2"), ("0.2", "1"), ("0.4", "2")] and order[5] == ("0.1", "1")
    runs = {run["id"]: run["name"] for run in swept.owner.get("/api/runs").json()["runs"]}
    assert [runs[each["run"]] for each in sweep["settings"][0]["runs"]] == [
        f"study/003-seed{seed}" for seed in range(3)
    ]
    clip, epochs = sweep["effects"]
    assert [each["best"] for each in clip["values"]] == [False, True, False] and epochs["own"] == "4"
    first = sweep["curves"][0]
    assert first["setting"] == 3 and first["steps"] == list(range(8))
    assert first["mean"][7] == pytest.approx(0.9) and first["low"][7] < first["mean"][7] < first["high"][7]


def test_one_that_is_not_there_is_404_and_a_damaged_one_hides_no_other(swept: Clients, tmp_path: Path):
    for name in ("nothing", "..", "%2e%2e", "study%2f000-seed0"):
        assert swept.owner.get(f"/api/sweeps/{name}").status_code == 404
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "sweep.json").write_text("{}")
    sweeps = swept.owner.get("/api/sweeps").json()["sweeps"]
    assert {each["name"]: "error" in each for each in sweeps} == {"broken": True, "study": False}
    assert swept.owner.get("/api/sweeps/broken").status_code == 400


def test_only_the_owner_sees_sweeps(swept: Clients):
    assert swept.stranger().get("/api/sweeps").status_code == 401
    assert swept.annotator().get("/api/sweeps").status_code == 403
