"""Votes given in a browser, and the reward model's training rows: the sampled tokens, ranked together, ends kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from studio_browser import Served, Visitor, expect, serving
from test_openapi import starts_nothing

from tether.cli import main
from tether.config.load import load_recipe
from tether.store.database.open import workspace_at
from tether.store.read import list_runs, open_workspace, read_rollouts
from tether.store.recorded import StoredRollout
from tether.studio.launcher import Launcher
from tether.train.build import build_supervised, load_policy

SYSTEM = "Answer in **one** word."
PROMPTS = 6
ANSWERS = 5


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": f"Which is number {number}?"},
    ]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of a run that sampled five answers to each conversation; some ended, most were cut off."""
    root = tmp_path_factory.mktemp("votes")
    lines = [json.dumps({"id": str(number), "prompt": conversation(number)}) for number in range(PROMPTS)]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    parts = '[{"kind": "length", "unit": "characters", "min": 2, "max": 9, "weight": 2.0}]'
    words = ["train", "ppo", "--task.prompts", str(root / "prompts.jsonl"), "--reward.parts", parts]
    words += [
        "--run.directory",
        str(root / "runs"),
        "--run.name",
        "policy",
        "--run.steps",
        "1",
        "--model.device",
        "cpu",
    ]
    words += ["--rollout.prompts_per_step", str(PROMPTS), "--rollout.samples_per_prompt", str(ANSWERS)]
    words += ["--rollout.max_new_tokens", "24", "--run.seed", "4", "--model.device", "cpu"]
    words += ["--roles.mode", "shared_backbone", "--roles.trainable_layers", "1"]
    assert main([*words, "--json"]) == 0
    return root / "runs"


@pytest.fixture(scope="module")
def served(sampled: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "python", starts_nothing)
        with serving(workspace_at(sampled, None)) as found:
            yield found


def kept_rollouts(workspace: Path) -> list[StoredRollout]:
    with open_workspace(workspace) as opened:
        [run] = [run for run in list_runs(opened) if run.name == "policy"]
        return read_rollouts(opened, run.id, 0)


def rows_of(workspace: Path, name: str) -> tuple[Any, list[dict]]:
    """The rankings that the reward model's own training would take its steps on, and the records they are of."""
    recipe = load_recipe("reward", str(workspace / name / "data" / "reward.yaml"), [])
    parts = build_supervised(recipe, load_policy(recipe))
    data = workspace / name / "data"
    records = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    return parts, records


def test_rankings_of_five_become_rows_of_the_sampled_tokens(visitor: Visitor, served: Served, sampled: Path):
    rollouts = kept_rollouts(sampled)
    finishes = {rollout.completion: rollout.finish for rollout in rollouts}
    assert set(finishes.values()) == {"stop", "length"}, "the fixture must have both"
    made = served.api("POST", "label/queues", json={"name": "five", "kind": "ranking", "axes": ["overall"]})["id"]
    body = {"from": "run", "run": served.run_id("policy"), "answers": ANSWERS, "count": PROMPTS}
    assert served.api("POST", f"label/queues/{made}/fill", json=body)["added"] == PROMPTS

    page = visitor.go(f"#/label/{made}")
    for _ in range(PROMPTS):
        expect(page.locator(".prompt > div")).to_have_count(4)
        expect(page.locator(".prompt .turn-system strong")).to_have_text("one")
        cut = page.locator(".ranking .cut").count()
        item = page.locator("#page").get_attribute("data-item")
        asked = next(row for row in served.api("GET", f"label/queues/{made}/items")["items"] if str(row["id"]) == item)
        assert cut == sum(finishes[answer["text"]] == "length" for answer in asked["answers"])
        visitor.press("3", "1", "=", "5", "2")  # 1 ties with 3; 4 is left, and last
        visitor.press("Enter")
        page.wait_for_selector(f"#page:not([data-item='{item}'])")
    expect(page.locator(".task")).to_contain_text("All done")

    told = served.api("POST", "train", json={"queue_id": made, "name": "five", "held_out": 0.0})
    assert told["examples"] == PROMPTS and told["pairs"] == PROMPTS * 9
    parts, records = rows_of(sampled, "five")
    by_tokens = {tuple(rollout.columns["token"].tolist()): rollout for rollout in rollouts}
    rankings = parts.examples.take(0, PROMPTS)
    assert len(rankings) == len(records) == PROMPTS
    end = load_policy(load_recipe("reward", str(sampled / "five" / "data" / "reward.yaml"), [])).end_id
    for ranking in rankings:
        assert len(ranking.rows) == ANSWERS and sorted(ranking.ranks) == [0, 0, 1, 2, 3]
        prompts = set()
        for row in ranking.rows:
            rollout = by_tokens[tuple(row.tokens.tolist())]  # the very tokens that were sampled
            prompts.add(rollout.prompt_id)
            assert (row.tokens[-1] == end) == (rollout.finish == "stop")
            assert row.prompt_length == int((~rollout.columns["response"]).sum())
        assert len(prompts) == 1
    batch = parts.collate(rankings)
    assert sorted(map(len, batch.row_groups())) == [ANSWERS] * PROMPTS, "a prompt's answers never leave each other"


def test_pairs_of_a_conversation_become_rows_of_the_sampled_tokens(visitor: Visitor, served: Served, sampled: Path):
    rollouts = kept_rollouts(sampled)
    made = served.api("POST", "label/queues", json={"name": "two", "kind": "pair"})["id"]
    served.api("POST", f"label/queues/{made}/fill", json={"from": "run", "run": served.run_id("policy"), "count": 6})
    page = visitor.go(f"#/label/{made}")
    for key in ("ArrowLeft", "ArrowRight", "1", "2", "ArrowLeft", "t"):
        item = page.locator("#page").get_attribute("data-item")
        expect(page.locator(".prompt .turn-system")).to_contain_text("Answer in one word.")
        visitor.press(key)
        page.wait_for_selector(f"#page:not([data-item='{item}'])")
    votes = served.api("GET", f"label/queues/{made}/items")["items"]
    served.api("POST", "train", json={"queue_id": made, "name": "two", "held_out": 0.0})
    parts, records = rows_of(sampled, "two")
    assert len(records) == 5, "a tie says nothing"
    by_tokens = {tuple(rollout.columns["token"].tolist()): rollout for rollout in rollouts}
    said = {tuple(answer["text"] for answer in row["answers"]): row["votes"][0]["ranks"] for row in votes}
    for ranking in parts.examples.take(0, 5):
        texts = tuple(by_tokens[tuple(row.tokens.tolist())].completion for row in ranking.rows)
        assert list(ranking.ranks) == said[texts]


def test_the_trainings_keep_the_source_run_s_roles_parts_and_base(served: Served, sampled: Path):
    made = served.api("POST", "label/queues", json={"name": "kept", "kind": "pair"})["id"]
    body = {"from": "run", "run": served.run_id("policy"), "count": PROMPTS}
    served.api("POST", f"label/queues/{made}/fill", json=body)
    for number in range(PROMPTS):
        item = served.api("GET", f"label/queues/{made}/next")["item"]
        vote = {"client_uid": f"kept-{number}", "item_id": item["id"], "order": item["order"], "choice": "left"}
        served.api("POST", "label/votes", json=vote)
    served.api("POST", "train", json={"queue_id": made, "name": "kept", "held_out": 0.0})
    reward = json.loads((sampled / "kept" / "data" / "reward.yaml").read_text())
    policy = json.loads((sampled / "kept" / "data" / "ppo.yaml").read_text())
    for recipe in (reward, policy):
        assert recipe["model"]["path"] == str((sampled / "policy" / "model").resolve())
        assert (recipe["roles"]["mode"], recipe["roles"]["trainable_layers"]) == ("shared_backbone", 1)
    assert reward["optimizer"]["critic_lr"] == 5e-4, "a rate for top layers"
    model, length = policy["reward"]["parts"]
    assert model["kind"] == "model" and model["shared"] and length["kind"] == "length" and length["weight"] == 2.0
    assert policy["task"]["prompts"].endswith("prompts.jsonl")


def test_ratings_and_a_comment_are_given_with_the_keyboard_alone(visitor: Visitor, served: Served):
    body = {"name": "rated", "kind": "pair", "axes": ["overall", "accuracy"]}
    made = served.api("POST", "label/queues", json=body)["id"]
    records = [
        {"prompt": f"q{n}", "chosen": "# Good\n\n* a\n* b\n\n```py\nx = 1\n```", "rejected": "bad"} for n in (0, 1)
    ]
    served.api("POST", f"label/queues/{made}/fill", json={"from": "file", "records": records})
    page = visitor.go(f"#/label/{made}")
    good = page.locator(".side", has_text="Good")
    expect(good.locator("li")).to_have_text(["a", "b"])
    expect(good.locator("pre code")).to_have_text("x = 1")
    visitor.press("m")
    expect(good.locator(".text")).to_contain_text("# Good")
    visitor.press("m")
    visitor.press("r", "6", "7", "2", "ArrowRight", "ArrowRight", "Escape")
    visitor.press("w")
    page.keyboard.type("clear and 1 short")
    visitor.press("Escape")
    item = page.locator("#page").get_attribute("data-item")
    visitor.press("ArrowRight")
    page.wait_for_selector(f"#page:not([data-item='{item}'])")
    [row] = [row for row in served.api("GET", f"label/queues/{made}/items")["items"] if str(row["id"]) == item]
    [vote] = row["votes"]
    assert vote["comment"] == "clear and 1 short"
    given = [{"overall": 6, "accuracy": 7}, {"overall": 2, "accuracy": 2}]
    assert sorted(vote["ratings"], key=lambda one: -one["overall"]) == given
    assert vote["ranks"][vote["ratings"].index(given[1])] == 0, "the right one was shown second"
