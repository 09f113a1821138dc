"""`tether runs`, `show`, `report` and `export`: what they print, what they write, and what they refuse."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from recording import Recording, synthetic

from tether.cli import main
from tether.store.database.records import RecordSource


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch) -> Path:
    """A workspace with one run of six steps, two answers each."""
    monkeypatch.delenv("TETHER_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    recording = Recording(tmp_path, name="demo/ppo", steps=6, sources=[RecordSource("model", "tiny-bytes")])
    recording.recorder.event("started", "from \x1b[31mthe beginning")
    for step in range(6):
        rows = [synthetic(step, row, completion=f"answer {step} \x1b[2J\nnext") for row in range(2)]
        metrics = {"score": step / 10, "kl_ref_k3": 0.5, "entropy": math.nan if step == 3 else 2.0}
        recording.recorder.record(step, metrics, rows)
    recording.recorder.close("done")
    model = recording.folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return tmp_path


def out(capsys, *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    captured = capsys.readouterr()
    assert "\x1b[2J" not in captured.out and "\x1b[31m" not in captured.out, "a model cannot write to the terminal"
    return captured.out if code == 0 else captured.err


def as_json(capsys, *words: str):
    return json.loads(out(capsys, *words, "--json"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_runs_lists_each_with_its_state_steps_score_and_origin(workspace, capsys):
    header, row = out(capsys, "runs").splitlines()
    assert header.split() == ["run", "method", "state", "steps", "score", "KL", "age", "came", "from"]
    assert row.split()[:6] == ["demo/ppo", "ppo", "done", "6/6", "0.5", "0.5"] and row.rstrip().endswith("tiny-bytes")
    [run] = as_json(capsys, "runs")
    assert run["latest"]["score"] == 0.5 and run["lineage"][0]["source"] == "tiny-bytes"


def test_an_empty_workspace_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TETHER_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    assert "--workspace" in out(capsys, "runs", code=2)


def test_show_tells_a_run_in_short(workspace, capsys):
    shown = out(capsys, "show", "demo/ppo")
    for words in ("6 of 6 steps", "tiny-bytes", "metrics of step 5", "entropy", "started", "6 steps, 0 to 5"):
        assert words in shown
    assert as_json(capsys, "show", "runs/demo/ppo")["metrics"]["score"] == 0.5


def test_show_lists_the_answers_of_a_step(workspace, capsys):
    shown = out(capsys, "show", "demo/ppo", "--step", "2")
    assert "answer 2" in shown and shown.count("question") == 2
    assert [sample["sample"] for sample in as_json(capsys, "show", "demo/ppo", "--step", "-1")["samples"]] == [0, 1]


def test_show_has_a_row_a_token_with_its_numbers(workspace, capsys):
    shown = out(capsys, "show", "demo/ppo", "--step", "2", "--sample", "1")
    rollout = synthetic(2, 1)
    rows = [line.split() for line in shown.splitlines() if line.strip()[:1].isdigit()]
    assert [row[1] for row in rows] == ["t2", "t3", "t4", "t5"], "the answer's tokens, and not the prompt's"
    names = ("behavior_logprob", "old_logprob", "ref_logprob", None, "value", "reward", "advantage", "return", "ratio")
    for place, row in enumerate(rows, start=2):
        for name, cell in zip(names, row[2:], strict=False):
            expected = rollout.kl[place] if name is None else rollout.columns[name][place]
            assert float(cell) == pytest.approx(float(expected), abs=5e-5)
        assert ("clipped" in row) == bool(rollout.columns["clipped"][place])
    sample = as_json(capsys, "show", "demo/ppo", "--step", "2", "--sample", "1")
    assert sample["advantage"] == rollout.columns["advantage"].tolist() and sample["piece"][2] == "t2"


def test_tokens_are_coloured_by_advantage(workspace, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert main(["show", "demo/ppo", "--step", "2", "--sample", "1"]) == 0
    shown = capsys.readouterr().out
    advantages = synthetic(2, 1).answer("advantage")
    best, worst = int(advantages.argmax()) + 2, int(advantages.argmin()) + 2

    def colour(place: int) -> tuple[int, int]:
        code = shown.split(f"mt{place}")[0].rpartition("38;2;")[2]
        red, green, *_ = map(int, code.split(";"))
        return red, green

    assert advantages.max() > 0 > advantages.min()
    assert colour(best)[1] > colour(best)[0] and colour(worst)[0] > colour(worst)[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "demo/pppo"], "did you mean demo/ppo"),
        (["show", "demo/ppo", "--step", "77"], "nearest kept steps are 5"),
        (["show", "demo/ppo", "--step", "1", "--sample", "9"], "samples 0 to 1"),
        (["export", "demo/ppo"], "say what to export"),
        (["export", "demo/ppo", "--metrics", "x.xml"], "must end in .csv or .jsonl"),
        (["export", "demo/ppo", "--rollouts", "x.jsonl", "--step", "77"], "step 77"),
        (["export", "demo/ppo", "--model", "x", "--best"], "best"),
        (["export", "demo/ppo", "--model", "runs"], "exists already"),
    ],
)
def test_what_cannot_be_shown_is_told_with_the_repair(workspace, capsys, words, told):
    assert told in out(capsys, *words, code=2)


def test_report_writes_a_page_with_the_run_curves(workspace, capsys):
    page = Path(as_json(capsys, "report", "demo/ppo")["report"])
    text = page.read_text()
    assert page == Path("runs/demo/ppo/report.html") and "Run demo/ppo" in text and "\x1b" not in text
    assert "Some values were not finite" in text and "<svg" in text and "answer 0" in text and "answer 5" in text
    elsewhere = as_json(capsys, "report", "demo/ppo", "--to", "elsewhere")["report"]
    assert Path(elsewhere).is_file() and (workspace / "elsewhere" / "report.md").is_file()


def test_export_writes_metrics_as_a_table_and_as_lines(workspace, capsys):
    out(capsys, "export", "demo/ppo", "--metrics", "m.csv")
    with Path("m.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["score"]) for row in rows] == [step / 10 for step in range(6)]
    assert rows[3]["entropy"] == "" and rows[4]["entropy"] == "2.0"
    out(capsys, "export", "demo/ppo", "--metrics", "m.jsonl")
    lines = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    assert lines[3] == {"step": 3, "score": 0.3, "kl_ref_k3": 0.5, "entropy": None}


def test_export_writes_rollouts_with_exact_numbers(workspace, capsys):
    pq = pytest.importorskip("pyarrow.parquet")
    out(
        capsys, "export", "demo/ppo", "--rollouts", "r.parquet", "--rollouts", "r.parquet", "--step", "1", "--step", "4"
    )
    out(capsys, "export", "demo/ppo", "--rollouts", "r.jsonl")
    table = pq.read_table("r.parquet").to_pylist()
    lines = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    assert [(row["step"], row["sample"]) for row in table] == [(1, 0), (1, 1), (4, 0), (4, 1)] and len(lines) == 12
    for row in (table[3], lines[9]):
        expected = synthetic(4, 1)
        assert row["advantage"] == expected.columns["advantage"].tolist() and row["kl"] == expected.kl.tolist()
        assert row["token"] == expected.columns["token"].tolist() and row["completion"].startswith("answer 4")


def test_export_copies_the_model_and_everything_at_once(workspace, capsys):
    written = as_json(capsys, "export", "demo/ppo", "--to", "all")
    assert set(written) == {"model", "rollouts", "metrics"} and Path("all/model/config.json").is_file()
    assert not list(workspace.glob("all/.*")), "nothing half-written is left"


@pytest.mark.parametrize(("option", "file"), [("--metrics", "m.csv"), ("--rollouts", "r.jsonl")])
def test_export_overwrites_a_file_only_with_force(workspace, capsys, option, file):
    Path(file).write_text("mine")
    told = out(capsys, "export", "demo/ppo", option, file, "--model", "copy", code=2)
    assert f"{option}: {file} exists already" in told and "--force" in told
    assert Path(file).read_text() == "mine" and not Path("copy").exists(), "nothing is written"
    out(capsys, "export", "demo/ppo", option, file, "--force")
    assert "answer" in Path(file).read_text() or "score" in Path(file).read_text()


def test_export_to_a_folder_keeps_the_metrics_that_are_there(workspace, capsys):
    Path("all").mkdir()
    Path("all/metrics.csv").write_text("mine")
    assert "--metrics: all/metrics.csv exists already" in out(capsys, "export", "demo/ppo", "--to", "all", code=2)
    assert [path.name for path in Path("all").iterdir()] == ["metrics.csv"]
    out(capsys, "export", "demo/ppo", "--to", "all", "--force")
    assert Path("all/metrics.csv").read_text().startswith("step,")


def test_the_verbs_need_no_torch(workspace):
    script = (
        "import sys; from tether.cli import main; assert main(['runs']) == 0; assert main(['show', 'demo/ppo', "
        "'--step', '1', '--sample', '0']) == 0; assert 'torch' not in sys.modules and 'alembic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=workspace)
