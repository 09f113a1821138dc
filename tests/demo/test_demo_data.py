"""The demo's data: enough of it, well formed, and the three sets apart from one another."""

import json
import re
from collections import Counter
from importlib.resources import files
from itertools import combinations

import pytest

from tether.demo.rule import MAX_CLOSE_WORDS, SYSTEM, parts_of

DATA = files("tether.demo") / "data"
FIELDS = {
    "prompts": {"id", "prompt", "topic", "keywords", "expected"},
    "held_out": {"id", "prompt", "topic", "keywords", "expected"},
    "demonstrations": {"prompt", "completion", "topic"},  # once taken out of `messages`
}
AT_LEAST = {"prompts": 340, "held_out": 96, "demonstrations": 170}
PLAIN = re.compile(r"[A-Za-z0-9 .,:?!'-]+")  # no markdown, no line breaks, no curly quotes or dashes
# A stem that any friendly opening or closing contains would call an empty answer on topic.
TOO_COMMON = {
    *("and", "are", "but", "can", "for", "get", "have", "how", "not", "that", "the", "this", "use", "what", "you"),
    *("ask", "course", "enjoy", "fun", "glad", "good", "great", "happy", "help", "hope", "love", "luck", "please"),
    *("question", "sure", "thank", "welcome", "wonderful"),
}


def rows_of(name: str) -> list[dict]:
    """A file's records; those with `messages` as prompt and completion."""
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "messages" in row:
            system, prompt, completion = row.pop("messages")
            assert [system["role"], prompt["role"], completion["role"]] == ["system", "user", "assistant"]
            assert system == SYSTEM
            row |= {"prompt": prompt["content"], "completion": completion["content"]}
    return rows


ROWS = {name: rows_of(name) for name in FIELDS}

each_file = pytest.mark.parametrize("name", FIELDS)
each_prompt_file = pytest.mark.parametrize("name", ["prompts", "held_out"])


def tokens(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def jaccard(one: str, other: str) -> float:
    a, b = set(tokens(one)), set(tokens(other))
    return len(a & b) / len(a | b)


@each_file
def test_there_is_enough_on_every_topic(name: str):
    assert len(ROWS[name]) >= AT_LEAST[name]
    topics = Counter(row["topic"] for row in ROWS[name])
    assert set(topics) == {row["topic"] for row in ROWS["prompts"]}
    assert len(topics) >= 17
    assert min(topics.values()) >= len(ROWS[name]) // len(topics) - 2


@each_file
def test_every_row_has_its_fields_and_nothing_else(name: str):
    for row in ROWS[name]:
        assert set(row) == FIELDS[name], row
        texts = [value for field, value in row.items() if field not in ("keywords", "expected")]
        assert all(isinstance(text, str) and text and text == text.strip() for text in texts), row


@each_file
def test_text_is_plain_ascii(name: str):
    raw = (DATA / f"{name}.jsonl").read_bytes()
    assert raw.decode("utf-8").isascii()
    assert raw.endswith(b"\n") and b"\r" not in raw
    for row in ROWS[name]:
        for field in {"prompt", "completion"} & set(row):
            assert PLAIN.fullmatch(row[field]), row[field]
            assert "  " not in row[field], row[field]


@each_file
def test_prompts_are_short_and_finished(name: str):
    for row in ROWS[name]:
        assert 4 <= len(row["prompt"].split()) <= 18, row["prompt"]
        assert row["prompt"][0].isupper() and row["prompt"][-1] in ".?", row["prompt"]


@each_prompt_file
def test_keywords_are_lowercase_stems(name: str):
    for row in ROWS[name]:
        words = row["keywords"]
        assert isinstance(words, list) and 2 <= len(words) <= 6, row
        assert all(re.fullmatch(r"[a-z]{3,}", word) and word not in TOO_COMMON for word in words), row
        # A stem that begins with another of the same row adds nothing.
        assert not [pair for pair in combinations(sorted(words), 2) if pair[1].startswith(pair[0])], row


@each_prompt_file
def test_expected_words_are_what_an_answer_adds_to_the_question(name: str):
    for row in ROWS[name]:
        words, asked = row["expected"], tokens(row["prompt"])
        assert len(words) >= 3 and words == sorted(set(words)), row
        assert all(re.fullmatch(r"[a-z0-9]+", word) and word not in TOO_COMMON for word in words), row
        assert not [word for word in words if any(each.startswith(word) for each in asked)], row


def test_ids_are_unique():
    ids = [row["id"] for name in ("prompts", "held_out") for row in ROWS[name]]
    assert len(set(ids)) == len(ids)


def test_no_prompt_is_there_twice():
    prompts = Counter(" ".join(tokens(row["prompt"])) for rows in ROWS.values() for row in rows)
    assert [prompt for prompt, count in prompts.items() if count > 1] == []


def test_no_two_prompts_are_nearly_the_same():
    """Within a file or across files; so held_out in particular shares nothing with what is trained on."""
    prompts = [row["prompt"] for rows in ROWS.values() for row in rows]
    assert [pair for pair in combinations(prompts, 2) if jaccard(*pair) >= 0.8] == []


def test_completions_are_one_to_three_finished_sentences():
    completions = [row["completion"] for row in ROWS["demonstrations"]]
    for text in completions:
        assert 9 <= len(text.split()) <= 31, (len(text.split()), text)
        assert text[0].isupper() and text[-1] in ".!", text
        assert 1 <= len(re.findall(r"[.!?](?= |$)", text)) <= 3, text
    assert len({" ".join(tokens(text)) for text in completions}) == len(completions)
    lengths = [len(text.split()) for text in completions]
    assert max(lengths) - min(lengths) >= 15, "lengths should vary"


def test_the_rule_knows_nearly_every_warm_close():
    closes = [row["completion"] for row in ROWS["demonstrations"] if row["completion"].endswith("!")]
    warm = [text for text in closes if parts_of(text, ended=True, keywords=())["warm"]]
    assert len(warm) >= 0.9 * len(closes), sorted(set(closes) - set(warm))


def test_about_half_of_the_completions_are_friendly():
    completions = [row["completion"] for row in ROWS["demonstrations"]]
    friendly = [text for text in completions if text.endswith("!")]
    assert 0.45 <= len(friendly) / len(completions) <= 0.55
    for text in friendly:  # they close with a short sentence, and only there is an exclamation mark
        assert text.count("!") == 1 and len(re.split(r"(?<=[.!?]) ", text)[-1].split()) <= MAX_CLOSE_WORDS + 2, text
        assert parts_of(text, ended=True, keywords=())["sound"], text
