"""Hostile names, values, addresses, rows and tables: none becomes a flag, a path, a formula, a leak or gigabytes."""

import csv
import io
import json
import struct
import zlib

import pytest

from tether.config.load import as_flags, load_recipe, read_flags
from tether.errors import ConfigError, StorageError
from tether.redact import redact, redact_url
from tether.reports.export_data import write_table
from tether.store.database.open import is_inside, workspace_at
from tether.store.recorded import decode_rollout, rollout_head_of

VALUES = [
    "--run.directory=/x",
    "--run.directory",
    "--",
    "-",
    "=",
    "--run.name=../../x",
    "--store.url=sqlite:////x.db",
    "--json",
    "--help",
    "x --run.directory=/x",
    "x\n--run.directory=/x",
    "'--run.directory=/x'",
    '"--run.directory=/x"',
    "[--run.directory=/x]",
    "{run.directory: /x}",
    "$(id)",
    "`id`",
    ";id",
    "\t--run.directory=/x",
    "\u2013\u2013run.directory=/x",
]
KEYS = ["run.note", "run.group", "model.path", "run.save", "task.prompts", "reward.parts", "run.tags"]


@pytest.mark.parametrize("value", VALUES, ids=ascii)
@pytest.mark.parametrize("key", KEYS)
def test_no_value_sets_another_key(key: str, value: str, tmp_path):
    flags = as_flags({key: value, "run.directory": str(tmp_path)})
    assert len(flags) == 2
    try:
        recipe = load_recipe("ppo", None, flags)
    except ConfigError as error:
        assert key in str(error)
        return
    assert recipe.run.directory == str(tmp_path) and recipe.store.url is None and recipe.run.name is None


@pytest.mark.parametrize(
    "key",
    [
        "run.directory=/x",
        "a=b",
        "--run.directory",
        "-x",
        " run.note",
        "run.note ",
        "run note",
        "",
        ".",
        "a..b",
        "a\nb",
        "é",
    ],
    ids=ascii,
)
def test_no_key_is_a_flag_with_a_value(key: str):
    with pytest.raises(ConfigError, match="is not a setting"):
        as_flags({key: "x"})


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "x\udfff"], ids=ascii)
def test_what_no_command_line_takes_is_told(value: str):
    with pytest.raises(ConfigError, match=r"run\.note"):
        as_flags({"run.note": value})


OUT = [
    "..",
    "../x",
    "a/..",
    "a/../../x",
    "/",
    "/etc",
    "//x",
    "",
    ".",
    "./a",
    "a/.",
    "a//b",
    "a/",
    "\0",
    "a\0",
    "..\\x",
    "a\\..\\..\\x",
    "C:\\x",
]


@pytest.mark.parametrize("name", OUT, ids=ascii)
def test_no_name_leads_out_of_the_workspace(name: str, tmp_path):
    assert not is_inside(name)
    with pytest.raises(ConfigError):
        workspace_at(tmp_path).folder(name)


@pytest.mark.parametrize("name", ["a", "a/b", "a..b", "...", "a b", "-x", "--x", "é", "a.b/c-d_e"], ids=ascii)
def test_ordinary_names_stay(name: str, tmp_path):
    folder = workspace_at(tmp_path).folder(name)
    assert folder.resolve().is_relative_to(tmp_path.resolve())


SECRET = "s3cr3t-s3cr3t"
FORMS = [
    f"postgresql://u:{SECRET}@h/d",
    f"postgres://u:{SECRET}@h/d",
    f"postgresql+psycopg://u:{SECRET}@h:5432/d?x=1",
    f"postgresql://:{SECRET}@h/d",
    f"postgresql://u%40x:{SECRET}@h/d",
    f"postgresql://u@x:{SECRET}@h/d",
    f"postgresql://u:%20{SECRET}%40@h/d",
    f"postgresql://u:{SECRET}/x@h/d",
    f"postgresql://u:{SECRET}?x@h/d",
    f"postgresql://u:{SECRET}#x@h/d",
    f"postgresql://u:{SECRET}:x@h/d",
    f"postgresql://u@h/d?password={SECRET}",
    f"postgresql://u@h/d?a=1&password={SECRET}",
    f"postgresql://u@h/d?password={SECRET}&a=1",
    f"postgresql://u@h/d?PassWord={SECRET}",
    f"postgresql://u@h/d?%70assword={SECRET}",
    f"postgresql://u@h/d?+password={SECRET}",
    f"postgresql://u@h/d?password=x&password={SECRET}",
    f"postgresql://u@h/d?sslpassword={SECRET}",
    f"postgresql://u@h/d?passfile={SECRET}",
    f"https://h/x?token={SECRET}",
    f"https://h/x?X-Amz-Signature={SECRET}",
    f"https://h/x?access_token={SECRET}",
    f"https://h/x?api-key={SECRET}",
]


@pytest.mark.parametrize("url", FORMS)
def test_no_form_of_an_address_keeps_its_secret(url: str, monkeypatch):
    monkeypatch.setattr("tether.redact._known", set())
    assert SECRET not in redact_url(url)
    for text in (url, f"cannot open {url}: refused", f"('{url}',)", f'{{"url": "{url}"}}'):
        assert SECRET not in redact(text), text


def row(header: object, rest: bytes = b"", size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return bytes([2]) + zlib.compress(struct.pack("<I", len(text) if size is None else size) + text + rest)


HEAD = {"length": 1, "columns": ["token"], "prompt_id": "p", "prompt": "", "completion": "", "temperature": 1.0}
HEAD |= {"pieces": [""], "parts": {}, "final_value": 0.0}
ROWS = {
    "empty": b"",
    "version": b"\x07xxxx",
    "not zlib": b"\x02" + b"x" * 100,
    "cut": row(HEAD, b"\0" * 4)[:-6],
    "list": row([]),
    "null": row(None),
    "number": row(1),
    "text": row("x"),
    "no keys": row({}),
    "negative": row(HEAD | {"length": -1}),
    "huge": row(HEAD | {"length": 2**62}),
    "fraction": row(HEAD | {"length": 1.5}),
    "true": row(HEAD | {"length": True}),
    "unknown column": row(HEAD | {"columns": ["x"]}),
    "columns null": row(HEAD | {"columns": None}),
    "column is a list": row(HEAD | {"columns": [["token"]]}),
    "too short": row(HEAD | {"length": 1000}),
    "size beyond": row(HEAD, size=2**31),
    "size zero": row(HEAD, size=0),
    "deep": bytes([2]) + zlib.compress(struct.pack("<I", 200_000) + b"[" * 100_000 + b"]" * 100_000),
    "top_logprobs": row(HEAD | {"top_logprobs": {"x": "y"}}, b"\0" * 4),
    "top_logprobs list": row(HEAD | {"top_logprobs": [1]}, b"\0" * 4),
}


@pytest.mark.parametrize("content", ROWS.values(), ids=ROWS)
def test_a_damaged_row_is_one_sentence(content: bytes):
    fields = {"step": 0, "row": 0, "group_id": 0, "sample_id": 0, "finish": "stop", "score": 0.0}
    with pytest.raises(StorageError, match="damaged"):
        decode_rollout(content, **fields)
    try:
        assert isinstance(rollout_head_of(content), dict)
    except StorageError as error:
        assert "damaged" in str(error)


FORMULAS = [
    "=1",
    "+1",
    "-1",
    "@x",
    "\t=1",
    "\r=1",
    "\n=1",
    "＝1",
    "＋1",
    "－1",
    "＠x",
    "=cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1)",
]


@pytest.mark.parametrize("name", FORMULAS, ids=ascii)
def test_no_cell_is_a_formula(name: str):
    text = io.StringIO(newline="")
    write_table(text, [{"step": 0, name: -1.5}])
    head, numbers = csv.reader(io.StringIO(text.getvalue(), newline=""))
    assert not any(cell.startswith(tuple("=+-@\t\r\n＝＋－＠")) for cell in head)
    assert sorted(numbers) == ["-1.5", "0"]


def test_flags_are_read_back_as_they_were_given():
    from tether.config.load import Keys
    from tether.config.recipes import RECIPES

    keys = Keys(RECIPES["ppo"])
    for value in VALUES:
        given = read_flags(keys, as_flags({"run.note": value}))
        assert list(given) == ["run.note"]
