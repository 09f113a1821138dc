"""What the page reads of runs: lists, curves, findings, answers and tokens, as the store has them."""

import csv
import io
import json

import numpy as np
import pytest
from recording import Recording, synthetic
from studio_clients import Clients, record_run, settings

from tether.config import RECIPES
from tether.doctor.doctor import AUDITS
from tether.store.database.open import workspace_at
from tether.studio.app import create_app
from tether.studio.metric_cache import MetricCache, MetricSeries, shown_series

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "\u2028\u2029</script><!--",
    "\x00\x01\x1b[2J",
    "half \ud800 a character",
    "\U0001f600 ‮ right to left",
    "{{7*7}} ${7*7} %s %n",
    "'; DROP TABLE runs; --",
    "a\r\nevent: run\r\ndata: {}\r\n\r\n",
]


def strict(reply) -> dict:
    """The JSON of an answer, in which NaN would be an error."""
    assert reply.status_code == 200, reply.text
    return json.loads(reply.content.decode("ascii"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_runs_are_listed_with_their_last_numbers_and_a_spark(clients: Clients):
    [run] = strict(clients.owner.get("/api/runs"))["runs"]
    assert run["name"] == "demo/ppo" and run["state"] == "done" and (run["step"], run["steps"]) == (6, 6)
    assert run["latest"] == {"score": 0.5, "kl_ref_k3": 0.5}
    assert run["spark"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_run_has_its_settings_events_and_what_was_kept(clients: Clients):
    run = strict(clients.owner.get("/api/runs/1"))
    assert run["config"]["model"]["path"] == "tiny-bytes" and run["rollout_steps"] == [0, 1, 2, 3, 4, 5]
    assert [event["text"] for event in run["events"]] == ["from the beginning"]
    assert run["metric_names"] == ["entropy", "kl_ref_k3", "score"]


@pytest.mark.parametrize("address", ["/api/runs/99", "/api/runs/1/rollouts?step=77", "/api/runs/1/rollouts/2/9"])
def test_what_is_not_there_is_404_with_a_sentence(clients: Clients, address):
    reply = clients.owner.get(address)
    assert reply.status_code == 404 and reply.json()["error"]


@pytest.mark.parametrize(
    "address", ["/api/runs/x", "/api/runs/-1", f"/api/runs/{10**30}", "/api/runs/1/rollouts?sort=x"]
)
def test_what_makes_no_sense_is_422(clients: Clients, address):
    assert clients.owner.get(address).status_code == 422


def test_curves_are_exact_where_they_are_short_and_null_where_not_finite(clients: Clients):
    series = strict(clients.owner.get("/api/runs/1/metrics?names=score,entropy,nothing"))["series"]
    assert series["score"] == {"steps": [0, 1, 2, 3, 4, 5], "values": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]}
    assert series["entropy"]["values"] == [2.0, 2.0, 2.0, None, 2.0, 2.0] and "nothing" not in series


def test_long_curves_keep_every_spike():
    values = np.zeros(10)
    values[7], values[2] = 100.0, np.nan
    shown = shown_series(MetricSeries(np.arange(10) * 3, values), 5)
    assert shown["steps"] == [3, 9, 15, 21, 27], "the last step of each bucket of two"
    assert shown["high"] == [0, 0, 0, 100, 0] and shown["low"] == [0, 0, 0, 0, 0] and shown["values"][3] == 50.0
    nothing = shown_series(MetricSeries(np.arange(4), np.full(4, np.nan)), 2)
    assert nothing["values"] == [None, None] and nothing["low"] == [None, None]


def test_the_table_of_metrics_has_a_row_a_step(clients: Clients):
    reply = clients.owner.get("/api/runs/1/metrics.csv")
    rows = list(csv.DictReader(io.StringIO(reply.text)))
    assert [float(row["score"]) for row in rows] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5] and rows[3]["entropy"] == ""
    assert 'filename="demo-ppo-metrics.csv"' in reply.headers["content-disposition"]


def test_new_steps_are_read_and_steps_taken_again_replace_the_old(tmp_path, store_url):
    recording = Recording(tmp_path, store_url, steps=9)
    recording.steps(0, 1, 2)
    assert recording.recorder.flush()
    clients = Clients(create_app(workspace_at(tmp_path / "runs", store_url), settings()))

    def scores() -> list[float]:
        return strict(clients.owner.get("/api/runs/1/metrics"))["series"]["score"]["values"]

    assert scores() == pytest.approx([0.0, 0.1, 0.2])
    recording.steps(3)
    assert recording.recorder.flush() and scores() == pytest.approx([0.0, 0.1, 0.2, 0.3])
    recording.recorder.rewind(1)
    recording.recorder.record(1, {"score": 9.0})
    recording.recorder.record(2, {"score": 8.0})
    recording.recorder.record(3, {"score": 7.0})
    assert recording.recorder.flush() and scores() == pytest.approx([0.0, 9.0, 8.0, 7.0])
    recording.recorder.close("done")


def test_only_new_steps_are_read_from_the_database(plain: Clients, monkeypatch):
    import tether.studio.metric_cache as module

    cache = MetricCache(plain.app.state.studio.opened)
    asked: list[tuple[int, int]] = []
    read = module._new_rows
    monkeypatch.setattr(module, "_new_rows", lambda *words: asked.append(words[2]) or read(*words))
    assert len(cache.series(1, ["score"])["score"].steps) == 6 and len(cache.series(1, ["score"])["score"].steps) == 6
    assert asked == [(-1, 5)], "once for the score, and never for the others"
    assert set(cache.series(1)) == {"score", "entropy", "kl_ref_k3"} and asked == 2 * [(-1, 5)]


def test_the_doctor_findings_are_those_of_the_command_line(clients: Clients):
    told = strict(clients.owner.get("/api/runs/1/findings"))
    assert set(told) == {"findings", "healthy", "too_little"}
    assert len(told["findings"]) + len(told["healthy"]) + len(told["too_little"]) == len(AUDITS)


def test_answers_are_sorted_searched_and_cut(clients: Clients):
    def rows(query: str) -> list[int]:
        return [row["row"] for row in strict(clients.owner.get(f"/api/runs/1/rollouts?{query}"))["rollouts"]]

    assert rows("step=2") == [0, 1] and rows("step=2&sort=score") == [1, 0] and rows("step=2&limit=1&offset=1") == [1]
    assert rows("step=2&q=QUESTION%201") == [1] and rows("step=2&truncated=1") == [] and rows("truncated=0") == [0, 1]
    kl = [float(synthetic(2, row).kl.sum()) for row in (0, 1)]
    assert rows("step=2&sort=kl") == sorted((0, 1), key=lambda row: -kl[row])
    listed = strict(clients.owner.get("/api/runs/1/rollouts?step=2"))
    assert listed["total"] == 2 and listed["rollouts"][0]["length"] == 4
    assert listed["rollouts"][1]["clipped"] == int(synthetic(2, 1).answer("clipped").sum())


def test_an_answer_has_every_column_as_it_was_stored(clients: Clients):
    page, stored = strict(clients.owner.get("/api/runs/1/rollouts/2/1")), synthetic(2, 1)
    assert page["pieces"] == stored.pieces and page["response"] == [False, False, True, True, True, True]
    assert page["columns"]["kl"] == pytest.approx(stored.kl.tolist(), abs=1e-7)
    for name in ("advantage", "value", "ratio", "old_logprob", "return"):
        assert page["columns"][name] == pytest.approx(stored.columns[name].tolist(), abs=1e-7)
    assert page["columns"]["clipped"] == stored.columns["clipped"].tolist()


def test_a_prompt_is_followed_through_training(clients: Clients):
    steps = strict(clients.owner.get("/api/runs/1/prompts/p1"))["steps"]
    assert [(one["step"], one["row"]) for one in steps] == [(step, 1) for step in range(6)]
    assert steps[4]["completion"] == "answer 4 1"
    assert strict(clients.owner.get("/api/runs/1/prompts/none"))["steps"] == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_arrive_as_they_were_written(tmp_path, monkeypatch, text):
    monkeypatch.delenv("TETHER_STORE", raising=False)
    record_run(tmp_path, completion=text, event=text, steps=1)
    clients = Clients(create_app(workspace_at(tmp_path / "runs"), settings()))
    assert strict(clients.owner.get("/api/runs/1/rollouts/0/0"))["completion"] == text
    assert strict(clients.owner.get("/api/runs/1"))["events"][0]["text"] == text
    reply = clients.owner.get("/api/runs/1/rollouts?step=0")
    assert reply.headers["content-type"] == "application/json" and strict(reply)["rollouts"][0]["completion"] == text


def test_the_form_of_a_recipe_has_every_field_with_its_help(plain: Clients):
    fields = {field["key"]: field for field in strict(plain.owner.get("/api/schema/ppo"))["fields"]}
    assert fields["ppo.clip_range"]["default"] == 0.2 and fields["kl.apply_to"]["choices"] == ["reward", "loss", "none"]
    assert all(field["description"] for field in fields.values())
    needed = {field["key"]: field for field in strict(plain.owner.get("/api/schema/sft"))["fields"]}["data.train"]
    assert needed["required"] and needed["default"] is None
    assert [one["name"] for one in strict(plain.owner.get("/api/methods"))["methods"]] == list(RECIPES)
    assert plain.owner.get("/api/schema/nothing").status_code == 404


def test_notes_tags_and_groups_are_changed_and_listed(clients: Clients):
    run = clients.owner.get("/api/runs").json()["runs"][0]["id"]
    said = {"note": HOSTILE[0], "tags": ["kl", "kl", "small"], "group": "sweep"}
    assert strict(clients.owner.post(f"/api/runs/{run}/notes", json=said))["tags"] == ["kl", "small"]
    assert strict(clients.owner.post(f"/api/runs/{run}/notes", json={"group": "other"}))["note"] == HOSTILE[0]
    [listed] = strict(clients.owner.get("/api/runs"))["runs"]
    assert (listed["note"], listed["tags"], listed["group"]) == (HOSTILE[0], ["kl", "small"], "other")
    for wrong in ({"tags": ["two words"]}, {"note": "x" * 10_001}, {"title": "x"}):
        assert clients.owner.post(f"/api/runs/{run}/notes", json=wrong).status_code in (400, 422)
    assert clients.owner.post("/api/runs/99/notes", json={}).status_code == 404
    queue = clients.queue()
    assert clients.annotator(queue).post(f"/api/runs/{run}/notes", json=said).status_code == 403


def test_settings_of_runs_side_by_side(plain: Clients, tmp_path):
    recording = Recording(tmp_path, name="other", steps=1, config={"method": "ppo", "run": {"seed": 8}})
    recording.recorder.close("done")
    ids = {run["name"]: run["id"] for run in plain.owner.get("/api/runs").json()["runs"]}
    words = f"{ids['demo/ppo']},{ids['other']}"
    found = strict(plain.owner.get("/api/diff", params={"runs": words}))
    assert [run["name"] for run in found["runs"]] == ["demo/ppo", "other"]
    assert {"key": "run.seed", "values": [7, 8]} in found["settings"]
    assert {"key": "model.path", "values": ["tiny-bytes", "(not a setting)"]} in found["settings"]
    for wrong in ("", "1", "1,1", "1,x", ",".join("1" * 13)):
        assert plain.owner.get("/api/diff", params={"runs": wrong}).status_code == 422
    assert plain.owner.get("/api/diff", params={"runs": "1,99"}).status_code == 404
