"""What an owner does with items: structured records in and out, gold, assignment, filters, exclusion, sampling."""

import json
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine
from sqlalchemy import text as sql
from studio_clients import Clients, pairs, settings
from test_label_routes import cast, records
from test_openapi import starts_nothing

from tether.data.records import tokenizer_digest
from tether.models.load import load_causal_lm
from tether.store.database.open import MIGRATIONS, workspace_at
from tether.studio.app import create_app
from tether.studio.import_export import consensus
from tether.studio.launcher import Launcher
from tether.studio.queue_items import carry_out
from tether.studio.vote_training import ppo_recipe, reward_recipe

ASKED = '[{"role": "user", "content": "p"}]'
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi?"}]


def ranked(count: int = 5, **changes) -> dict:
    """A ranking with all that was sampled."""
    record = {
        "prompt": CHAT,
        "answers": [f"answer {n}" for n in range(count)],
        "ended": [n % 2 == 0 for n in range(count)],
        "token_ids": [[n + 1, n + 2] for n in range(count)],
        "prompt_token_ids": [9, 8, 7],
        "tokenizer": "ab" * 16,
        "tags": ["hard"],
        "tools": [{"name": "search"}],
    }
    return record | changes


def listed(client, queue: int, **query) -> list[dict]:
    return client.get(f"/api/label/queues/{queue}/items", params=query).json()["items"]


def vote_for(client, queue: int, wanted: str, **changes) -> None:
    """Vote on the next pair for the answer that begins so."""
    item = client.get(f"/api/label/queues/{queue}/next").json()["item"]
    side = "left" if item["answers"][0]["text"].startswith(wanted) else "right"
    body = {"client_uid": f"v{item['id']}-{id(client)}", "item_id": item["id"], "order": item["order"], "choice": side}
    assert client.post("/api/label/votes", json=body | changes).status_code == 200


# -- records ------------------------------------------------------------------------------------------------------


def test_a_ranking_is_one_record_with_ends_ties_and_tokens_as_they_were(clients: Clients):
    queue = clients.queue("ranking", [ranked()])
    item, reply = cast(clients.owner, queue, [4, [0, 2], 3, 1])
    assert reply.status_code == 200, reply.text
    assert {answer["ended"] for answer in item["answers"]} == {True, False}
    assert set(item) == {"id", "kind", "prompt", "answers", "order"}, "no ids, no tags, nothing of where it is from"
    [row] = records(clients.owner, queue, "rankings")
    for name in ("prompt", "answers", "ended", "token_ids", "prompt_token_ids", "tokenizer", "tags", "tools"):
        assert row[name] == ranked()[name]
    places = {4: 0, 0: 1, 2: 1, 3: 2, 1: 3}  # shown place -> rank
    shown = [int(answer["text"].removeprefix("answer ")) for answer in item["answers"]]  # own places
    assert row["ranks"] == [places[shown.index(own)] for own in range(5)]
    assert len(records(clients.owner, queue, "pairs")) == 9, "ten pairs, of which one ties"
    [best] = records(clients.owner, queue, "messages")
    own = shown[4]
    assert best["messages"] == [*CHAT, {"role": "assistant", "content": f"answer {own}"}]
    assert best["ended"] == (own % 2 == 0) and best["token_ids"] == [ranked()["token_ids"][own]]


@pytest.mark.parametrize("form", ["rankings", "votes"])
@pytest.mark.parametrize("kind", ["ranking", "pair"])
def test_what_is_exported_is_imported_and_exported_as_it_was(plain: Clients, kind: str, form: str):
    count = 5 if kind == "ranking" else 2
    some = [ranked(count), ranked(count, prompt="plain", tags=[]), ranked(count, tokenizer=None)]
    queue = plain.queue(kind, some)
    people = [plain.annotator(queue, name) for name in ("ann", "bob")]
    for number, person in enumerate(people):
        rated = [{"overall": 1 + place} for place in range(count)]
        shown = person.get(f"/api/label/queues/{queue}/next").json()["item"]["answers"]
        side = "left" if shown[0]["text"] == "answer 0" else "right"  # both prefer the same: a majority is exported
        cast(person, queue, [3, [1, 0], 2, 4] if kind == "ranking" else side, comment="why", ratings=rated)
        cast(person, queue, [0, 1, 2, 3, 4] if kind == "ranking" else "both_bad" if number else "tie")
        cast(person, queue, "skip")
    before = records(plain.owner, queue, form)
    other = plain.queue(kind, name="copy")
    text = "".join(json.dumps(row) + "\n" for row in before)
    assert plain.owner.post(f"/api/label/queues/{other}/import", json={"text": text}).status_code == 200
    after = records(plain.owner, other, form)
    passing = {"item", "votes", "created", "comments"} | ({"ratings"} if form == "rankings" else set())

    def kept(rows: list[dict]) -> list[str]:
        return sorted(json.dumps({k: v for k, v in row.items() if k not in passing}, sort_keys=True) for row in rows)

    assert kept(after) == kept(before)
    assert len(before) == (6 if form == "votes" else 2 if kind == "ranking" else len(before))


def test_several_rankings_amount_to_one_by_borda_s_count():
    assert consensus([[0, 1, 2]]) == [0, 1, 2]
    assert consensus([[0, 1, 2], [1, 0, 2]]) == [0, 0, 1], "two that are for each other tie"
    assert consensus([[0, 0], [0, 1]]) == [0, 1], "a tie gives way"
    assert consensus([[0, 1], [1, 0], [1, 0]]) == [1, 0], "of a pair the majority"


def test_the_prompts_of_held_out_items_are_in_no_training_record(plain: Clients, monkeypatch):
    monkeypatch.setattr(Launcher, "python", starts_nothing)
    queue = plain.queue()
    same = [
        {"prompt": f"q{n % 5}", "chosen": f"good {n}", "rejected": f"bad {n}", "rejected_ended": False}
        for n in range(20)
    ]
    plain.owner.post(f"/api/label/queues/{queue}/import", json={"records": same})
    told = plain.owner.post("/api/train", json={"queue_id": queue, "name": "t", "held_out": 0.3}).json()
    folder = plain.app.state.studio.opened.workspace.directory / "t" / "data"
    parts = [
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("train.jsonl", "held_out.jsonl")
    ]
    train, out = ({row["prompt"] for row in part} for part in parts)
    assert out and train and not train & out and told["examples"] == len(parts[0])
    assert all(row["ended"] == [True, False] and row["ranks"] == [0, 1] for row in parts[0])


# -- gold, exclusion ----------------------------------------------------------------------------------------------


def test_gold_items_flag_who_gets_them_wrong_and_are_shown_as_any_other(clients: Clients):
    queue = clients.queue(records=pairs(6))
    items = listed(clients.owner, queue)
    for item in items[:3]:
        reply = clients.owner.post(f"/api/label/items/{item['id']}/gold", json={"ranks": [0, 1]})
        assert reply.status_code == 200
    good, careless = clients.annotator(queue, "good"), clients.annotator(queue, "careless")
    seen = good.get(f"/api/label/queues/{queue}/next").text
    assert "gold" not in seen and "source" not in seen
    for person, wanted in ((good, "good"), (careless, "bad")):
        for _ in range(6):
            vote_for(person, queue, wanted)
    told = clients.owner.get(f"/api/label/queues/{queue}/agreement").json()["raters"]
    assert [(one["name"], one["gold"]) for one in told] == [
        ("good", {"votes": 3, "accuracy": 1.0, "flagged": False}),
        ("careless", {"votes": 3, "accuracy": 0.0, "flagged": True}),
    ]
    assert records(clients.owner, queue) == [], "one says so and the other the opposite"
    [rater] = [one["id"] for one in told if one["name"] == "careless"]
    assert clients.owner.post(f"/api/raters/{rater}", json={"excluded": True}).json()["excluded"]
    exported = records(clients.owner, queue)
    assert [row["chosen"] for row in exported] == ["good 3", "good 4", "good 5"], "gold items are no data"
    assert all(row["rater"] == "good" for row in records(clients.owner, queue, "votes"))
    assert clients.owner.get(f"/api/train/curve?queue={queue}").json()["votes"] == 3


@pytest.mark.parametrize(
    ("address", "body", "status"),
    [
        ("label/items/1/gold", {"ranks": [0]}, 422),
        ("label/items/1/gold", {"ranks": [0, 1, 2]}, 422),
        ("label/items/1/gold", {"ranks": [0, -1]}, 422),
        ("label/items/99/gold", {"ranks": [0, 1]}, 404),
        ("label/items/1/tags", {"tags": ["x" * 100]}, 422),
        ("label/items/99/tags", {"tags": []}, 404),
        ("label/queues/1/assign", {"raters": [99]}, 404),
        ("label/queues/1/assign", {"items": [99]}, 404),
        ("label/queues/99/assign", {}, 404),
        ("raters/99", {"excluded": True}, 404),
        ("label/queues/1", {"axes": ["style"]}, 422),
    ],
)
def test_what_makes_no_sense_is_refused_and_annotators_may_do_none_of_it(plain: Clients, address, body, status):
    plain.queue(records=pairs(1))
    reply = plain.owner.post(f"/api/{address}", json=body)
    assert reply.status_code == status and reply.json()["error"]
    assert plain.annotator(1).post(f"/api/{address}", json=body).status_code == 403
    assert plain.annotator(1).get("/api/label/queues/1/items").status_code == 403


@pytest.mark.parametrize(
    "changes",
    [
        {"ratings": [{"overall": 8}, {}]},
        {"ratings": [{"overall": 0}, {}]},
        {"ratings": [{"style": 3}, {}]},
        {"ratings": [{"overall": 3}]},
        {"comment": "x" * 5001},
        {"choice": [[0, 1]]},
    ],
)
def test_ratings_and_comments_that_make_no_sense_are_refused(plain: Clients, changes):
    queue = plain.queue(records=pairs(1))
    assert cast(plain.owner, queue, **changes)[1].status_code == 422
    assert plain.app.state.studio.labels.standing_votes(queue) == []


@pytest.mark.parametrize("choice", [[[0, 0], 1, 2], [[0, 1]], [[0, 1], [2], [3]], [["x"], 1, 2], [[[0]], 1, 2]])
def test_a_ranking_with_ties_names_every_place_once(plain: Clients, choice):
    queue = plain.queue("ranking", [{"prompt": "p", "answers": ["a", "b", "c"]}])
    assert cast(plain.owner, queue, choice)[1].status_code == 422


# -- who judges what ----------------------------------------------------------------------------------------------


def test_items_are_shared_out_in_turn_and_others_are_not_asked_them(clients: Clients):
    queue = clients.queue(records=pairs(6))
    people = [clients.annotator(queue, f"p{n}") for n in range(3)]
    ids = [one["id"] for one in clients.owner.get("/api/raters").json()["raters"] if one["name"].startswith("p")]
    body = {"raters": ids[:2], "each": 1}
    assert clients.owner.post(f"/api/label/queues/{queue}/assign", json=body).json() == {"items": 6}
    left = [person.get(f"/api/label/queues/{queue}/next").json() for person in people]
    assert [one["remaining"] for one in left] == [3, 3, 0] and left[2]["item"] is None
    assert left[0]["item"]["id"] != left[1]["item"]["id"]
    stolen = {"client_uid": "x", "item_id": left[1]["item"]["id"], "order": [0, 1], "choice": "left"}
    assert people[0].post("/api/label/votes", json=stolen).status_code == 409
    assert [one["remaining"] for one in clients.owner.get("/api/label/queues").json()["queues"]] == [0]
    for _ in range(3):
        vote_for(people[0], queue, "good")
    assert len(listed(clients.owner, queue, status="done")) == 3
    assert len(listed(clients.owner, queue, rater=ids[1])) == 3
    assert clients.owner.post(f"/api/label/queues/{queue}/assign", json={}).json() == {"items": 6}
    assert people[2].get(f"/api/label/queues/{queue}/next").json()["remaining"] == 6


def test_an_item_with_enough_votes_is_asked_no_more_but_gold_is_of_everyone(clients: Clients):
    queue = clients.queue(records=pairs(3))
    clients.owner.post(f"/api/label/queues/{queue}", json={"votes_per_item": 2})
    gold = listed(clients.owner, queue)[2]["id"]
    clients.owner.post(f"/api/label/items/{gold}/gold", json={"ranks": [0, 1]})
    people = [clients.annotator(queue, f"p{n}") for n in range(3)]
    asked = []
    for person in people:
        seen = []
        while item := person.get(f"/api/label/queues/{queue}/next").json()["item"]:
            seen.append(item["id"])
            cast(person, queue, uid=f"{len(asked)}-{item['id']}")
        asked.append(seen)
    assert [len(seen) for seen in asked] == [3, 3, 1] and asked[2] == [gold]


def test_items_are_found_by_status_person_disagreement_tag_and_text(clients: Clients):
    some = [one | {"tags": ["first"] if n == 0 else ["other"]} for n, one in enumerate(pairs(3))]
    queue = clients.queue(records=some)
    ann, bob = clients.annotator(queue, "ann"), clients.annotator(queue, "bob")
    vote_for(ann, queue, "good", comment="Rather Kind", ratings=[{"overall": 7}, {"accuracy": 1}])
    vote_for(bob, queue, "bad")
    vote_for(ann, queue, "good")

    def found(**query) -> list[str]:
        return [row["prompt"][0]["content"] for row in listed(clients.owner, queue, **query)]

    assert found() == ["q0", "q1", "q2"] and found(status="open") == ["q2"] and found(status="done") == ["q0", "q1"]
    assert found(disagreement=True) == ["q0"] and found(tag="first") == ["q0"] and found(text="rather k") == ["q0"]
    assert found(text="BAD 1") == ["q1"] and found(gold="yes") == [] and found(limit=1, offset=1) == ["q1"]
    [bob_id] = [one["id"] for one in clients.owner.get("/api/raters").json()["raters"] if one["name"] == "bob"]
    assert found(rater=bob_id) == ["q0"]
    told = listed(clients.owner, queue)[0]["votes"][0]
    assert told["rater"] == "ann" and told["comment"] == "Rather Kind" and told["ranks"] == [0, 1]
    assert {json.dumps(one) for one in told["ratings"]} == {'{"overall": 7}', '{"accuracy": 1}'}
    exported = records(clients.owner, queue, "votes")
    assert exported[0]["comment"] == "Rather Kind" and exported[0]["ratings"] == told["ratings"]
    item = listed(clients.owner, queue)[1]["id"]
    clients.owner.post(f"/api/label/items/{item}/tags", json={"tags": ["new", "new"]})
    assert found(tag="new") == ["q1"]


# -- sampling -----------------------------------------------------------------------------------------------------


def test_a_queue_is_filled_with_what_any_model_says_to_any_prompts(clients: Clients, tmp_path, monkeypatch, store_url):
    if store_url is not None:
        monkeypatch.setenv("TETHER_STORE", store_url)
    words: list[str] = []

    def noted(launcher, name, kind, given):
        words.extend(given)
        return starts_nothing(launcher, name, kind, given)

    monkeypatch.setattr(Launcher, "python", noted)
    queue = clients.queue("ranking")
    body = {"from": "model", "model": "tiny-bytes", "answers": 3, "max_new_tokens": 8, "seed": 3, "count": 2}
    body |= {"records": [{"prompt": CHAT, "tags": ["mine"]}, {"prompt": "two"}, {"prompt": "three"}]}
    assert clients.owner.post(f"/api/label/queues/{queue}/fill", json=body).json()["job"] == "0"
    assert carry_out(json.loads(Path(words[-1]).read_text())) == 2
    items = clients.app.state.studio.labels.items(queue)
    loaded = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    assert [len(item.answers) for item in items] == [3, 3] and items[0].prompt == CHAT
    assert items[0].meta["tokenizer"] == tokenizer_digest(loaded.tokenizer) and items[0].meta["tags"] == ["mine"]
    for answer in (answer for item in items for answer in item.answers):
        assert answer["source"] == {"model": "tiny-bytes"} and 1 <= len(answer["ids"]) <= 8
        assert answer["ended"] == (answer["ids"][-1] == loaded.end_id)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": None}, "model"),
        ({"records": []}, "prompts"),
        ({"records": [{"chosen": "x"}]}, "record 1"),
        ({"answers": 1}, "answers"),
    ],
)
def test_sampling_that_cannot_start_says_why(plain: Clients, changes, told):
    queue = plain.queue()
    body = {"from": "model", "model": "tiny-bytes", "records": [{"prompt": "p"}]} | changes
    reply = plain.owner.post(f"/api/label/queues/{queue}/fill", json=body)
    assert reply.status_code in (400, 422) and told in reply.json()["error"]
    assert plain.owner.get("/api/jobs").json() == {"jobs": []}


# -- demonstrations -----------------------------------------------------------------------------------------------


def test_demonstrations_are_trained_on_with_their_conversations(plain: Clients, monkeypatch):
    monkeypatch.setattr(Launcher, "python", starts_nothing)
    asked = [{"prompt": [CHAT[0], {"role": "user", "content": f"q{n}"}]} for n in range(6)]
    queue = plain.queue("demonstration", asked)
    few = plain.owner.post("/api/train/demonstrations", json={"queue_id": queue})
    assert few.status_code == 400 and "0 demonstrations" in few.json()["error"]
    for n in range(6):
        cast(plain.owner, queue, f"a{n}", comment="mine")
    told = plain.owner.post("/api/train/demonstrations", json={"queue_id": queue, "name": "d", "steps": 7}).json()
    folder = plain.app.state.studio.opened.workspace.directory / "d"
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    assert told["examples"] == len(rows) == 5 and told["sft_run"] == "d/sft"
    assert rows[0]["messages"] == [CHAT[0], {"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]
    recipe = json.loads((folder / "data" / "sft.yaml").read_text())
    assert recipe["run"]["steps"] == 7 and recipe["optimizer"]["policy_lr"] == 1e-5
    assert json.loads((folder / "sft" / "votes.json").read_text())["queue"] == queue
    pairs_queue = plain.queue(records=pairs(1))
    assert plain.owner.post("/api/train/demonstrations", json={"queue_id": pairs_queue}).status_code == 422


# -- recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "rate"), [("separate", 1e-5), ("lora", 1e-4), ("shared_backbone", 5e-4)])
def test_rates_suit_the_mode_and_the_mode_stays(mode: str, rate: float):
    config = {
        "method": "ppo",
        "roles": {"mode": mode, "critic": "separate", "critic_init": "old", "trainable_layers": 3},
    }
    config |= {"optimizer": {"policy_lr": 0.7, "critic_lr": 0.9, "micro_batch_tokens": 77}}
    config |= {
        "reward": {
            "missing_eos_penalty": -2.0,
            "parts": [{"kind": "ended"}, {"kind": "model", "path": "old", "weight": 3.0}],
        }
    }
    reward = reward_recipe(config, "m", {}, {})
    assert reward["optimizer"]["critic_lr"] == rate and reward["optimizer"]["micro_batch_tokens"] == 77
    assert reward["roles"] == {"mode": mode, "trainable_layers": 3}
    assert reward_recipe(config, "m", {"roles.mode": "shared_backbone"}, {})["optimizer"]["critic_lr"] == 5e-4
    policy = ppo_recipe(config, "m", {}, "new", "p.jsonl")
    assert policy["optimizer"] == config["optimizer"] and policy["roles"]["critic_init"] == "new"
    shared = {} if mode == "separate" else {"shared": True}
    new = {"kind": "model", "path": "new", "weight": 3.0} | shared
    assert policy["reward"] == {"missing_eos_penalty": -2.0, "parts": [{"kind": "ended"}, new]}


# -- the tables of before -----------------------------------------------------------------------------------------


def test_votes_of_before_are_kept_by_the_migration(tmp_path, store_url):
    workspace = workspace_at(tmp_path / "runs", store_url)
    (tmp_path / "runs").mkdir()
    bare = create_engine(workspace.url)
    with bare.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        rows = {
            "queues": (77, workspace.key, '"old"', "pair", '""', "{}", 1.0, True),
            "raters": (77, workspace.key, '"ann"', "annotator", None, 77, 1.0),
            "items": (
                77,
                77,
                "pair",
                '[{"role": "user", "content": "p"}]',
                '[{"text": "a"}, {"text": "b"}]',
                "{}",
                None,
                0.0,
            ),
            "votes": (77, "u", 77, 77, "[1, 0]", '"left"', 2.0, 1.0, False),
        }
        for table, values in rows.items():
            places = ", ".join(f":v{place}" for place in range(len(values)))
            given = {f"v{place}": value for place, value in enumerate(values)}
            connection.execute(sql(f"INSERT INTO {table} VALUES ({places})"), given)
    bare.dispose()
    clients = Clients(create_app(workspace, settings()))
    [row] = records(clients.owner, 77)
    assert (row["prompt"], row["chosen"], row["rejected"], row["chosen_ended"]) == ("p", "b", "a", True)
    [item] = listed(clients.owner, 77)
    assert item["gold"] is None and item["votes"][0]["comment"] is None and not item["votes"][0]["excluded"]
