"""Records from every format: the same records come out, and a broken line 3 is named with its file and field."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.data.examples import RowEncoder, read_demonstrations, read_rankings
from tether.data.prompts import read_prompts
from tether.data.records import read_records
from tether.errors import DataError
from tether.hub.tiny_model import END_ID, tiny_tokenizer

ENDINGS = ("jsonl", "json", "csv", "parquet")
GOOD = {"prompt": "say a", "completion": "a"}


def write(folder: Path, ending: str, records: list[dict[str, Any]]) -> str:
    """The records as a file of that kind; the third is on line 3 (the second of CSV, which has a header)."""
    path = folder / f"records.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif ending == "json":
        path.write_text("[" + ",\n".join(json.dumps(record) for record in records) + "]\n")
    elif ending == "csv":
        names = list(dict.fromkeys(name for record in records for name in record))
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for record in records:
                cells = [record.get(name, "") for name in names]
                writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])
    else:
        parquet.write_table(arrow.Table.from_pylist(records), path)
    return str(path)


def third(ending: str, bad: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of which the one on line (or row) 3 is bad."""
    return [GOOD, bad, GOOD] if ending == "csv" else [GOOD, GOOD, bad, GOOD]


def encoder(max_length: int = 200) -> RowEncoder:
    return RowEncoder(tiny_tokenizer(), END_ID, max_length)


def refusal(path: str, read=read_demonstrations) -> str:
    with pytest.raises(DataError) as error:
        read(path, encoder())
    return str(error.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_gives_the_same_records(tmp_path: Path, ending: str):
    chat = [
        {"role": "user", "content": "hé, 你好?\nsecond line"},
        {"role": "assistant", "content": 'it\'s "here", see'},
    ]
    path = write(tmp_path, ending, [{"messages": chat, "note": "x"}, {"messages": chat, "note": "y"}])
    records = read_records(path)
    assert [record.messages("messages") for record in records] == [tuple(chat)] * 2
    assert [record.text("note") for record in records] == ["x", "y"]
    assert len(read_demonstrations(path, encoder())) == 2


@pytest.mark.parametrize("ending", ENDINGS)
def test_rankings_from_every_format(tmp_path: Path, ending: str):
    path = write(tmp_path, ending, [{"prompt": "q", "answers": ["a", "b", "c"], "ranks": [1, 0, 1]}] * 2)
    assert [ranking.ranks for ranking in read_rankings(path, encoder())] == [(1, 0, 1)] * 2


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_answer_that_was_cut_off_gets_no_end(tmp_path: Path, ending: str):
    record = {"prompt": "q", "chosen": "yes", "rejected": "no", "rejected_ended": False}
    [ranking] = read_rankings(write(tmp_path, ending, [record]), encoder())
    assert [int(row.tokens[-1]) == END_ID for row in ranking.rows] == [True, False]
    path = write(tmp_path, ending, [record | {"rejected_ended": "5"}])
    assert "field 'rejected_ended' must be true or false" in refusal(path, read_rankings)


# -- a broken line 3

BROKEN = {
    "jsonl": ('{"prompt": "a", "completion": "b"}\n' * 2 + '{"prompt": "a", "completion": "b}\n', "near field"),
    "json": ('[{"prompt": "a", "completion": "b"},\n\n{"prompt": "a", "completion": b},\n{}]', "near field"),
    "csv": ('prompt,completion\na,b\na,"b"c\na,b\n', "in field"),
}


@pytest.mark.parametrize("ending", BROKEN)
def test_broken_syntax_on_line_3(tmp_path: Path, ending: str):
    text, near = BROKEN[ending]
    path = tmp_path / f"bad.{ending}"
    path.write_text(text)
    said = refusal(str(path))
    assert said.startswith(f"{path}, line 3: ") and f"{near} 'completion'" in said


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompt": "say a", "completion": ""}, "field 'completion'"),
        ({"prompt": "say a", "completion": " "}, "field 'completion' must be a non-empty text, not ' '"),
        ({"prompt": "", "completion": "a"}, "field 'prompt'"),
        ({"prompt": "say a", "completion": None}, "field 'completion'"),
    ],
)
def test_an_empty_text_on_line_3(tmp_path: Path, ending: str, bad: dict[str, Any], said: str):
    bad = {name: "" if value is None and ending == "csv" else value for name, value in bad.items()}
    path = write(tmp_path, ending, third(ending, bad))
    where = "row 3" if ending == "parquet" else "line 3"
    assert refusal(path).startswith(f"{path}, {where}: {said}")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_missing_field_on_line_3(tmp_path: Path, ending: str):
    path = write(tmp_path, ending, third(ending, {"prompt": "say a"}))
    if ending == "csv":
        Path(path).write_text("prompt,completion\nsay a,a\nsay a\nsay a,a\n")
    said = refusal(path)
    where = "row 3" if ending == "parquet" else "line 3"
    assert said.startswith(f"{path}, {where}: field 'completion' is ") and ("missing" in said or "empty" in said)


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_a_wrong_type_on_line_3(tmp_path: Path, ending: str):
    path = write(tmp_path, ending, third(ending, {"prompt": "say a", "completion": 7}))
    assert refusal(path).startswith(f"{path}, line 3: field 'completion' must be a non-empty text, not 7")


def test_a_wrong_type_on_line_3_of_csv(tmp_path: Path):
    path = tmp_path / "bad.csv"
    path.write_text('prompt,answers,ranks\nq,"[""a"", ""b""]",\nq,"[""a"", 5]",\n')
    assert refusal(str(path), read_rankings).startswith(f"{path}, line 3: field 'answers' must be a list of texts")
    path.write_text('prompt,answers,ranks\nq,"[""a"", ""b""]",\nq,"[""a"", ""b""]",best first\n')
    assert refusal(str(path), read_rankings).startswith(f"{path}, line 3: field 'ranks' must hold JSON text")


def test_a_wrong_type_on_row_3_of_parquet(tmp_path: Path):
    good = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    bad = [{"role": "user", "content": None}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path, "parquet", [{"messages": messages} for messages in (good, good, bad)])
    assert refusal(path).startswith(f"{path}, row 3: field 'messages[0]' must be")
    numbers = tmp_path / "numbers.parquet"
    parquet.write_table(arrow.table({"prompt": ["q"] * 3, "completion": [1, 2, 3]}), numbers)
    assert "row 1: field 'completion' must be a non-empty text" in refusal(str(numbers))


def test_broken_text_on_row_3_of_parquet(tmp_path: Path):
    path = tmp_path / "bad.parquet"
    texts = arrow.array([b"a", b"a", b"\xff"], arrow.binary()).cast(arrow.string(), safe=False)
    parquet.write_table(arrow.table({"prompt": ["q"] * 3, "completion": texts}), path)
    assert refusal(str(path)).startswith(f"{path}, row 3: field 'completion' is not UTF-8")


# -- each format's own traps


def test_lines_of_csv_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "long.csv"
    path.write_text('prompt,completion\r\n"one\ntwo\nthree",a\r\n\r\nq,\r\n', newline="")
    assert refusal(str(path)).startswith(f"{path}, line 6: field 'completion' is empty")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt,completion\nq,a,b\n", "line 2: the row has 3 cells and the header names 2 fields, the last of them"),
        ("prompt,prompt\nq,a\n", "line 1: the header names field 'prompt' more than once"),
        ("prompt,\nq,a\n", "line 1: column 2 of the header has no name"),
        ('prompt,completion\nq,a\n"q,a\nq,a\n', "line 3: not valid CSV in field 'prompt'"),
        ("prompt,completion\n", "the file has no records"),
    ],
)
def test_csv_that_is_no_table(tmp_path: Path, text: str, said: str):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert said in refusal(str(path))


def test_a_long_cell_and_a_prompt_of_messages_in_csv(tmp_path: Path):
    path = tmp_path / "long.csv"
    path.write_text('prompt,answer\n"[{""role"": ""user"", ""content"": ""hi""}]",4\n[{not json,\n' + "x" * 200_000)
    prompts = read_prompts(str(path))
    assert prompts[0].messages == ({"role": "user", "content": "hi"},) and prompts[0].answer == "4"
    assert prompts[1].messages[0]["content"] == "[{not json" and prompts[1].answer is None
    assert len(prompts[2].messages[0]["content"]) == 200_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}', "line 1: a .json file holds one list"),
        ("[]", "no records"),
        ('[\n{"prompt": "a"}\n{"prompt": "a"}]', "line 3: expected a comma"),
        ('[\n{"prompt": "a"},\n]', "line 3: a comma that no record follows"),
        ('[{"prompt": "a"}\n] x', "line 2: something follows"),
        ('[\n\n{"prompt": "a",\n\n"completion": }]', "line 5: not valid JSON"),
        ('[\n{"prompt": "a"},\n5]', "line 3: a record must be an object"),
        ('[{"prompt": "a"}', "expected a comma or ]"),
        ("[", "line 1: not valid JSON"),
    ],
)
def test_json_that_is_no_list_of_records(tmp_path: Path, text: str, said: str):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert said in refusal(str(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "prompt": "b"}', "field 'prompt' is given more than once"),
        ('{"prompt": "a"} {"prompt": "b"}', "more than one value"),
        ("[" * 100_000, "not JSON that can be read"),
        ('{"prompt": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ('{"prompt": "\\ud800", "completion": "a"}', "field 'prompt' holds \\ud800, which is half of a character"),
    ],
)
def test_odd_lines_of_jsonl(tmp_path: Path, line: str, said: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    assert f"{path}, line 3: {said}" in refusal(str(path))


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\n").encode() * 2 + b'{"prompt": "\xff"}\n')
    assert f"{path}, line 3: not UTF-8 text" in refusal(str(path)) and "near field 'prompt'" in refusal(str(path))


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1).filter(lambda text: text.strip()))
def test_any_text_survives_jsonl_and_json(tmp_path_factory, text: str):
    folder = tmp_path_factory.mktemp("any")
    for ending, body in (("jsonl", "{}\n{}\n"), ("json", "[{},{}]")):
        path = folder / f"any.{ending}"
        record = json.dumps({"prompt": text}, ensure_ascii=False)
        path.write_bytes(body.replace("{}", record).encode())
        assert [found.text("prompt") for found in read_records(str(path))] == [text, text]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_not_there(tmp_path: Path, ending: str):
    assert "there is no such file" in refusal(str(tmp_path / f"none.{ending}"))


def test_other_files_are_refused(tmp_path: Path):
    assert "unknown file ending '.txt'; records are read from .jsonl, .json, .csv, .parquet" in refusal("a.txt")
    (tmp_path / "folder.jsonl").mkdir()
    assert "this is a folder" in refusal(str(tmp_path / "folder.jsonl"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    assert "not a Parquet file that can be read" in refusal(str(tmp_path / "bad.parquet"))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path, "parquet", [GOOD])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'tether-rl[parquet]'" in refusal(path)


def test_prompts_keep_their_other_fields(tmp_path: Path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    records = [{"id": 7, "prompt": "q", "answer": 4, "topic": "sums"}, {"messages": chat}]
    first, second = read_prompts(write(tmp_path, "jsonl", records))
    assert (first.id, first.answer, first.meta) == ("7", "4", {"topic": "sums"})
    assert (second.id, second.messages, second.meta) == ("1", (chat[0],), {"completion": "a"})
