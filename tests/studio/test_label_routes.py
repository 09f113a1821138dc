"""Judging: what is asked in which order, what a vote is, that it is kept once, undone, exported and imported."""

import json
import random
import threading

import pytest
from sqlalchemy import select
from studio_clients import Clients, pairs
from test_run_routes import HOSTILE

from tether.store.database.schema import label_audits, votes
from tether.studio.label_records import shown_order
from tether.studio.label_store import CastVote


def cast(client, queue: int, choice="left", uid: str | None = None, **changes):
    """Vote on what comes next; (item, reply)."""
    item = client.get(f"/api/label/queues/{queue}/next").json()["item"]
    body = {"client_uid": uid or f"u{item['id']}-{id(client)}", "item_id": item["id"], "order": item["order"]}
    return item, client.post("/api/label/votes", json=body | {"choice": choice, "seconds": 1.5} | changes)


def records(client, queue: int, form: str = "pairs") -> list[dict]:
    reply = client.get(f"/api/label/queues/{queue}/export?format={form}")
    assert reply.status_code == 200
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_queue_is_asked_to_its_end(clients: Clients):
    queue = clients.queue(records=pairs(3))
    for done in range(3):
        told = clients.owner.get(f"/api/label/queues/{queue}/next").json()
        assert (told["done"], told["remaining"]) == (done, 3 - done) and told["queue"]["name"] == "which is better"
        assert told["item"]["prompt"] == [{"role": "user", "content": f"q{done}"}]
        assert cast(clients.owner, queue)[1].status_code == 200
    assert clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"] is None
    [row] = clients.owner.get("/api/label/queues").json()["queues"]
    assert (row["items"], row["done"], row["remaining"], row["votes"]) == (3, 3, 0, 3)


def test_answers_are_shown_in_the_order_that_is_recorded(clients: Clients):
    queue = clients.queue(records=pairs(12))
    shown = []
    for number in range(12):
        item = clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]
        again = clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]
        assert item == again, "looking again does not shuffle again"
        assert set(item["answers"][0]) == {"text", "ended"}
        texts = [f"good {number}", f"bad {number}"]
        shown.append([texts.index(answer["text"]) for answer in item["answers"]])
        cast(clients.owner, queue)
    assert [0, 1] in shown and [1, 0] in shown
    kept = clients.app.state.studio.labels.standing_votes(queue)
    assert [vote.order for vote in kept] == shown


def test_a_page_may_show_the_answers_in_another_order(clients: Clients):
    queue = clients.queue(records=pairs(6))
    for number in range(6):
        item = clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]
        turned = item["answers"][::-1]
        choice = "left" if turned[0]["text"].startswith("good") else "right"
        body = {"client_uid": f"turned-{number}", "item_id": item["id"], "order": item["order"][::-1]}
        assert clients.owner.post("/api/label/votes", json=body | {"choice": choice}).status_code == 200
    assert {row["chosen"] for row in records(clients.owner, queue)} == {f"good {number}" for number in range(6)}


def test_nothing_that_an_annotator_can_see_tells_which_answer_is_whose(clients: Clients):
    """Own places are those of two models, or of the chosen answer: who sees them is not blind."""
    mine = [clients.queue(records=pairs(40), name=name) for name in ("one", "other")]
    ann = clients.annotator()
    [person] = [row["id"] for row in clients.owner.get("/api/raters").json()["raters"] if row["name"] == "ann"]
    swaps = []
    for queue in mine:
        for _ in range(40):
            item = ann.get(f"/api/label/queues/{queue}/next").json()["item"]
            assert item["order"] == [0, 1], "the same whatever stands where"
            own = [0 if answer["text"].startswith("good") else 1 for answer in item["answers"]]
            swaps.append(own == shown_order("", item["id"], person, 2))
            cast(ann, queue)
    assert True in swaps and False in swaps, "without the queue's key the shuffle is not to be computed"
    keys = [clients.app.state.studio.labels.queue(queue).meta["shuffle_key"] for queue in mine]
    assert len(set(keys)) == 2
    for path in ("/api/label/queues", *(f"/api/label/queues/{queue}/next" for queue in mine)):
        assert not any(key in ann.get(path).text for key in keys)


def test_a_choice_means_the_answer_that_stood_there(clients: Clients):
    queue = clients.queue(records=pairs(8))
    for _ in range(8):
        item = clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]
        good_is_left = item["answers"][0]["text"].startswith("good")
        cast(clients.owner, queue, "left" if good_is_left else "right")
    exported = records(clients.owner, queue)
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in exported] == [
        (f"q{n}", f"good {n}", f"bad {n}") for n in range(8)
    ]


def test_a_vote_sent_twice_is_there_once(clients: Clients):
    queue = clients.queue(records=pairs(2))
    item, first = cast(clients.owner, queue, "left", uid="same")
    body = {"client_uid": "same", "item_id": item["id"], "order": item["order"], "choice": "left", "seconds": 1.5}
    again = clients.owner.post("/api/label/votes", json=body)
    assert first.status_code == again.status_code == 200 and first.json() == again.json()
    assert len(clients.app.state.studio.labels.standing_votes(queue)) == 1
    other = clients.annotator(queue).post("/api/label/votes", json=body)
    assert other.status_code == 409, "a uid is one person's"


def test_the_same_vote_sent_by_many_at_once_is_there_once(clients: Clients):
    queue = clients.queue(records=pairs(1))
    item = clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]
    body = {"client_uid": "same", "item_id": item["id"], "order": item["order"], "choice": "left"}
    replies = []
    threads = [
        threading.Thread(
            target=lambda n: replies.append(clients.owner.post("/api/label/votes", json=body | n)), args=(extra,)
        )
        for extra in [{}] * 4 + [{"client_uid": f"other{n}"} for n in range(4)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clients.app.state.studio.labels.standing_votes(queue)) == 1
    assert {reply.status_code for reply in replies} <= {200, 409}
    assert len({reply.json()["id"] for reply in replies if reply.status_code == 200}) == 1


def test_a_second_vote_on_an_item_needs_an_undo_first(clients: Clients):
    queue = clients.queue(records=pairs(2))
    item, _ = cast(clients.owner, queue)
    body = {"client_uid": "new", "item_id": item["id"], "order": item["order"], "choice": "right"}
    assert clients.owner.post("/api/label/votes", json=body).status_code == 409
    assert clients.owner.post("/api/label/votes/undo", json={}).json() == {"item_id": item["id"]}
    assert clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]["id"] == item["id"]
    assert clients.owner.post("/api/label/votes", json=body).status_code == 200
    assert [vote.choice for vote in clients.app.state.studio.labels.standing_votes(queue)] == ["right"]


def test_undo_goes_back_vote_by_vote_and_only_over_one_s_own(clients: Clients):
    queue = clients.queue(records=pairs(3))
    other = clients.annotator(queue)
    mine = [cast(clients.owner, queue)[0]["id"] for _ in range(2)]
    cast(other, queue)
    undone = [clients.owner.post("/api/label/votes/undo").json()["item_id"] for _ in range(3)]
    assert undone == [mine[1], mine[0], None]
    assert len(clients.app.state.studio.labels.standing_votes(queue)) == 1, "the other's vote stands"


def test_every_change_leaves_an_audit(clients: Clients):
    queue = clients.queue(records=pairs(1))
    cast(clients.annotator(queue), queue)
    cast(clients.owner, queue)
    clients.owner.post("/api/label/votes/undo")
    engine = clients.app.state.studio.opened.engine
    with engine.connect() as connection:
        actions = connection.execute(select(label_audits.c.action).order_by(label_audits.c.id)).scalars().all()
        undone = connection.execute(select(votes.c.undone).order_by(votes.c.id)).scalars().all()
    assert actions == ["add-queue", "fill", "add-rater", "vote", "vote", "undo"]
    assert undone == [False, True], "an undone vote is still there"


@pytest.mark.parametrize(
    "changes",
    [
        {"choice": "up"},
        {"choice": [0, 1]},
        {"order": [0, 0]},
        {"order": [0]},
        {"order": []},
        {"client_uid": "a b"},
        {"client_uid": ""},
        {"seconds": -1},
        {"item_id": -1},
        {"extra": 1},
    ],
)
def test_a_vote_that_makes_no_sense_is_422_and_not_kept(plain: Clients, changes):
    queue = plain.queue(records=pairs(1))
    assert cast(plain.owner, queue, **changes)[1].status_code == 422
    assert plain.app.state.studio.labels.standing_votes(queue) == []


def test_rankings_are_places_as_shown_best_first(clients: Clients):
    answers = ["w", "x", "y", "z"]
    queue = clients.queue("ranking", [{"prompt": "p", "answers": answers}])
    item, reply = cast(clients.owner, queue, [2, 0, 3, 1])
    assert reply.status_code == 200
    best_first = [item["answers"][place]["text"] for place in (2, 0, 3, 1)]
    [row] = records(clients.owner, queue, "rankings")
    assert sorted(answers, key=lambda text: row["ranks"][answers.index(text)]) == best_first
    pairs_of_it = records(clients.owner, queue, "pairs")
    assert len(pairs_of_it) == 6
    assert all(best_first.index(one["chosen"]) < best_first.index(one["rejected"]) for one in pairs_of_it)
    clients.owner.post("/api/label/votes/undo")
    assert cast(clients.owner, queue, [0, 1, 2, 2], uid="bad")[1].status_code == 422
    assert cast(clients.owner, queue, "skip", uid="skip")[1].status_code == 200
    assert records(clients.owner, queue, "rankings") == []


def test_demonstrations_are_written_or_skipped(clients: Clients):
    queue = clients.queue("demonstration", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    assert cast(clients.owner, queue, "skip")[1].status_code == 200, "a text like any other"
    assert cast(clients.owner, queue, "", skip=True)[1].status_code == 200
    assert cast(clients.owner, queue, "  ")[1].status_code == 422
    [row] = records(clients.owner, queue, "messages")
    assert row["messages"] == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "skip"}]


def test_only_a_majority_makes_a_pair(clients: Clients):
    queue = clients.queue(records=pairs(2))
    people = [clients.annotator(queue, f"r{n}") for n in range(3)]
    for number, person in enumerate(people):
        for item in range(2):
            shown = person.get(f"/api/label/queues/{queue}/next").json()["item"]
            good_is_left = shown["answers"][0]["text"].startswith("good")
            wants_good = number != 2 if item == 0 else number == 0
            choice = "tie" if item == 1 and number == 2 else "left" if wants_good == good_is_left else "right"
            assert cast(person, queue, choice)[1].status_code == 200
    [row] = records(clients.owner, queue)
    assert row["chosen"] == "good 0" and len(row["votes"]) == 3, "two of three; one to one and a tie is nothing"
    told = clients.owner.get(f"/api/label/queues/{queue}/agreement").json()
    # Item 0: good good bad. Item 1: good bad tie. n = 6; unlike ordered pairs 4/2 + 6/2 over 6; totals 3 2 1: 22/30.
    assert told["alpha"] == pytest.approx(1 - (5 / 6) / (22 / 30)) and told["raters"][0]["name"] == "r0"


def test_hidden_repeats_come_later_and_look_like_any_other(clients: Clients):
    queue = clients.queue(records=pairs(20), repeats=0.2)
    seen = []
    while item := clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]:
        assert set(item) == {"id", "kind", "prompt", "answers", "order"}
        seen.append(item["prompt"][0]["content"])
        cast(clients.owner, queue, "tie")
    again = {text for text in seen if seen.count(text) == 2}
    assert len(seen) == 24 and len(again) == 4
    for text in again:
        first, second = [place for place, one in enumerate(seen) if one == text]
        assert second - first > 5
    told = clients.owner.get(f"/api/label/queues/{queue}/agreement").json()
    assert told["consistency"] == 1.0 and told["repeats"] == 4


def test_a_queue_is_filled_from_what_a_run_kept(clients: Clients):
    queue = clients.queue()
    reply = clients.owner.post(f"/api/label/queues/{queue}/fill", json={"from": "run", "run": 1, "count": 4})
    assert reply.json() == {"added": 4, "repeats": 0}
    items = clients.app.state.studio.labels.items(queue)
    first = items[0].answers
    assert {answer["source"]["step"] for answer in first} == {0, 5}, "answers far apart in training come first"
    assert first[0]["text"] != first[1]["text"] and first[0]["source"]["run"] == "demo/ppo"


def test_the_pairs_that_the_reward_is_least_sure_of_come_first(plain: Clients, tmp_path):
    from tether.studio.queue_items import QueueAnswer, pair_items

    asked = ({"role": "user", "content": "q"},)
    answers = [QueueAnswer("p", asked, f"t{n}", score, "r", n, 0) for n, score in enumerate([0.0, 5.0, 5.1, 9.0])]
    [item, *_] = pair_items(answers, 3, uncertain=True)
    assert [answer["text"] for answer in item.answers] == ["t1", "t2"]


def test_what_is_exported_can_be_imported(clients: Clients):
    queue = clients.queue(records=pairs(3))
    for _ in range(3):
        cast(clients.owner, queue)
    text = clients.owner.get(f"/api/label/queues/{queue}/export").text
    other = clients.queue(name="copy")
    reply = clients.owner.post(f"/api/label/queues/{other}/import", json={"text": text})
    assert reply.json() == {"items": 3, "votes": 3}
    columns = ("prompt", "chosen", "rejected")
    before, after = records(clients.owner, queue), records(clients.owner, other)
    assert [[row[name] for name in columns] for row in before] == [[row[name] for name in columns] for row in after]
    assert clients.owner.get(f"/api/label/queues/{other}/next").json()["item"] is not None, "a person may judge as well"


@pytest.mark.parametrize(
    "body",
    [
        {"text": "not json"},
        {"text": "[1]"},
        {"records": [{"prompt": "p"}]},
        {"records": [{"chosen": "a", "rejected": "b"}]},
        {"records": [{"prompt": "p", "chosen": "", "rejected": "b"}]},
        {"records": [{"prompt": "p", "answers": ["a", "b", "c"]}]},
        {"records": []},
    ],
)
def test_records_that_cannot_be_asked_are_told_and_none_is_taken(plain: Clients, body):
    queue = plain.queue()
    for subcommand, extra in (("import", {}), ("fill", {"from": "file"})):
        reply = plain.owner.post(f"/api/label/queues/{queue}/{subcommand}", json=body | extra)
        assert reply.status_code in (400, 422) and reply.json()["error"]
    assert plain.app.state.studio.labels.items(queue) == []


def test_half_a_character_in_a_body_is_refused_with_a_sentence(clients: Clients):
    half = "half \ud800"
    queue = clients.queue()
    bodies = {
        "/api/label/queues": {"name": half},
        f"/api/label/queues/{queue}/fill": {
            "from": "file",
            "records": [{"prompt": half, "chosen": half, "rejected": "b"}],
        },
        "/api/raters": {"name": half},
    }
    for address, body in bodies.items():
        reply = clients.owner.post(address, content=json.dumps(body).encode("ascii"))
        assert reply.status_code == 422 and reply.json()["error"]


@pytest.mark.parametrize("text", [text for text in HOSTILE if "\ud800" not in text])
def test_hostile_texts_come_back_as_they_went_in(clients: Clients, text):
    record = {"prompt": text, "chosen": f"{text} a", "rejected": f"{text} b", "category": text}
    queue = clients.queue(records=[record], name=text)
    told = clients.owner.get(f"/api/label/queues/{queue}/next").json()
    assert told["item"]["prompt"][0]["content"] == text and told["queue"]["name"] == text
    assert sorted(answer["text"] for answer in told["item"]["answers"]) == [f"{text} a", f"{text} b"]
    cast(clients.owner, queue)
    assert records(clients.owner, queue)[0]["prompt"] == text
    rater = clients.owner.post("/api/raters", json={"name": text}).json()
    assert rater["name"] == text and clients.with_token(rater["token"]).get("/api/me").json()["name"] == text


def test_a_token_is_told_once_and_kept_as_a_hash(clients: Clients):
    made = clients.owner.post("/api/raters", json={"name": "ann"}).json()
    assert made["link"].endswith("/#token=" + made["token"]) and len(made["token"]) >= 40
    assert made["token"] not in clients.owner.get("/api/raters").text
    browser = clients.logged_in(made["token"])
    assert browser.get("/api/me").json() == browser.get("/api/me").json() | {"role": "annotator", "name": "ann"}


def test_the_shuffle_is_fair_and_the_same_each_time():
    assert shown_order("k", 3, 4, 5) == shown_order("k", 3, 4, 5)
    assert sorted(shown_order("k", 3, 4, 9)) == list(range(9))
    assert any(shown_order("k", item, 4, 2) != shown_order("another", item, 4, 2) for item in range(20))
    lefts = sum(shown_order("k", item, 1, 2) == [0, 1] for item in range(2000))
    assert 900 < lefts < 1100


# -- votes that arrive together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_votes_kept_together_are_kept_as_they_would_be_one_by_one(clients: Clients, seed):
    draw = random.Random(seed)
    labels = clients.app.state.studio.labels
    people = [labels.add_rater(labels.owner(), f"r{n}", "annotator", None)[0] for n in range(3)]
    told = []
    for together in (False, True):
        queue = clients.queue(records=pairs(4), name=f"q{together}")
        first = labels.items(queue)[0].id
        draw.seed(seed)
        vote = [
            CastVote(
                f"{together}{uid}",
                first + draw.randrange(5),  # the fifth is no item of this queue
                draw.choice([[0, 1], [1, 0], [0, 0]]),
                draw.choice(["left", "right", "tie", "up"]),
            )
            for uid in range(12)
        ]
        sent = [(draw.choice(people), draw.choice(vote)) for _ in range(20)]  # some come twice, or from another
        if together:
            results = [result for start in range(0, 20, 7) for result in labels.vote_together(sent[start : start + 7])]
        else:
            results = [labels.vote_together([one])[0] for one in sent]
        statuses = [getattr(result, "status_code", 200) for result in results]
        key = labels.queue(queue).meta["shuffle_key"]
        kept = [
            (vote.item_id - first, vote.rater_id, as_sent(key, vote), vote.choice)
            for vote in labels.standing_votes(queue)
        ]
        told.append((statuses, kept))
    assert told[0] == told[1] and 200 in told[0][0] and {404, 409, 422} & set(told[0][0])


def as_sent(key: str, vote) -> list[int]:
    """A vote's order in the places that were shown."""
    given = shown_order(key, vote.item_id, vote.rater_id, len(vote.order))
    return [given.index(own) for own in vote.order]
