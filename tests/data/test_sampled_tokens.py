"""Records that hold the sampled tokens give rows of exactly those tokens, with the end token where there was one."""

import json
from pathlib import Path

import pytest

from tether.data.examples import read_demonstrations, read_rankings
from tether.data.records import tokenizer_digest
from tether.data.rows import RowEncoder
from tether.errors import DataError
from tether.models.load import load_causal_lm


@pytest.fixture(scope="module")
def loaded():
    return load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)


def encoder(loaded, **changes) -> tuple[RowEncoder, list[str]]:
    told: list[str] = []
    settings = {"max_length": 64, "notify": told.append} | changes
    return RowEncoder(loaded.tokenizer, loaded.end_id, settings.pop("max_length"), **settings), told


def write(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def sampled(loaded, **changes) -> dict:
    """A ranking whose first answer's ids are not those that its text would be encoded as."""
    spelt = [ids for ids in range(300) if ids < len(loaded.tokenizer)][:3]
    record = {
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
        "answers": ["ab", "c"],
        "ranks": [1, 0],
        "ended": [False, True],
        "prompt_token_ids": [5, 6, 7, 8],
        "token_ids": [spelt, [9, loaded.end_id]],
        "tokenizer": tokenizer_digest(loaded.tokenizer),
    }
    return record | changes


def test_rows_are_the_sampled_tokens_with_the_end_token_iff_the_answer_ended(loaded, tmp_path):
    encode, told = encoder(loaded)
    [ranking] = read_rankings(write(tmp_path / "r.jsonl", sampled(loaded)), encode)
    assert [row.tokens.tolist() for row in ranking.rows] == [[5, 6, 7, 8, 0, 1, 2], [5, 6, 7, 8, 9, loaded.end_id]]
    assert [row.prompt_length for row in ranking.rows] == [4, 4] and ranking.ranks == (1, 0) and told == []


def test_pairs_and_demonstrations_hold_their_tokens_as_well(loaded, tmp_path):
    encode, _ = encoder(loaded)
    known = {name: sampled(loaded)[name] for name in ("prompt", "prompt_token_ids", "tokenizer")}
    pair = known | {
        "chosen": "c",
        "rejected": "ab",
        "chosen_token_ids": [9, loaded.end_id],
        "rejected_token_ids": [1, 2],
    }
    [ranking] = read_rankings(write(tmp_path / "p.jsonl", pair | {"rejected_ended": False}), encode)
    assert [row.tokens.tolist()[4:] for row in ranking.rows] == [[9, loaded.end_id], [1, 2]]
    one = known | {"completion": "ab", "token_ids": [[1, 2]], "ended": False}
    [row] = read_demonstrations(write(tmp_path / "d.jsonl", one), encode)
    assert row.tokens.tolist() == [5, 6, 7, 8, 1, 2]


def test_a_demonstration_that_was_cut_off_gets_no_end_token(loaded, tmp_path):
    encode, _ = encoder(loaded)
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ab"}]
    rows = read_demonstrations(
        write(tmp_path / "d.jsonl", {"messages": turns}, {"messages": turns, "ended": False}), encode
    )
    assert rows[0].tokens.tolist() == [*rows[1].tokens.tolist(), loaded.end_id]


def test_ids_of_another_tokenizer_are_not_read_and_that_is_told(loaded, tmp_path):
    encode, told = encoder(loaded)
    path = write(tmp_path / "r.jsonl", sampled(loaded, tokenizer="0" * 32))
    [ranking] = read_rankings(path, encode)
    without = {name: value for name, value in sampled(loaded).items() if not name.endswith("token_ids")}
    [plain] = read_rankings(write(tmp_path / "plain.jsonl", without), encode)
    assert [row.tokens.tolist() for row in ranking.rows] == [row.tokens.tolist() for row in plain.rows]
    assert len(told) == 1 and "1 records hold token ids of another tokenizer" in told[0]


def test_tokens_that_do_not_fit_are_cut_as_text_is(loaded, tmp_path):
    encode, _ = encoder(loaded, max_length=12)
    long = sampled(loaded, answers=["one\ntwo", "c"], token_ids=[[1] * 20, [9, loaded.end_id]], prompt="Q")
    [ranking] = read_rankings(write(tmp_path / "r.jsonl", long), encode)
    assert max(len(row.tokens) for row in ranking.rows) <= 12


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_ids": [[1]]}, "must hold 2 lists"),
        ({"token_ids": [[1], []]}, r"token_ids\[1\]"),
        ({"token_ids": [[1], [-1]]}, r"token_ids\[1\]"),
        ({"token_ids": [[1], ["x"]]}, r"token_ids\[1\]"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids"),
        ({"token_ids": [[1], [10**6]]}, "not in the tokenizer"),
        ({"ended": [True]}, "'ended' must be a list of 2"),
    ],
)
def test_ids_that_make_no_sense_are_refused_by_name(loaded, tmp_path, changes, told):
    encode, _ = encoder(loaded)
    with pytest.raises(DataError, match=told):
        read_rankings(write(tmp_path / "r.jsonl", sampled(loaded, **changes)), encode)
