"""Every shape that people bring is understood, and trained on for two steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from shape_files import FILES, ShapeFile, write_all

from tether.cli import main
from tether.config.base import ReadSettings
from tether.config.load import load_recipe
from tether.data.examples import parse_rankings, read_demonstrations, read_rankings
from tether.data.prompts import read_prompts
from tether.data.rows import RowEncoder
from tether.errors import DataError
from tether.hub.tiny_model import END_ID, tiny_model, tiny_tokenizer
from tether.train.build import load_policy
from tether.train.training import build_training

CHAT = (
    "{% if tools %}[tools]{% for t in tools %}{{ t['function']['name'] }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}"
    "{{ c['function']['name'] }}({{ c['function']['arguments'] | tojson }}){% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if no_think %}-{% endif %}{% endif %}"
)
TINY = ("--model.device", "cpu", "--run.steps", "2", "--optimizer.policy_lr", "1e-3")
FEW = ("--rollout.prompts_per_step", "2", "--rollout.max_new_tokens", "3", "--reward.parts", "[{kind: ended}]")
SIZES = {"sft": ("--sft.batch_size", "2"), "reward": ("--reward.batch_size", "2"), "dpo": ("--dpo.batch_size", "2")}


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    write_all(folder)
    tiny_model(0).save_pretrained(folder / "chat-model")
    chat_tokenizer().save_pretrained(folder / "chat-model")
    return folder


def model_for(file: ShapeFile, folder: Path) -> str:
    return str(folder / "chat-model") if file.needs_template else "tiny-bytes"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_two_steps_on_every_shape(folder: Path, file: ShapeFile):
    source = file.source(folder)
    where = (
        ("--task.prompts", source, *FEW) if file.method not in SIZES else ("--data.train", source, *SIZES[file.method])
    )
    recipe = load_recipe(file.method, None, [*TINY, *where, *file.flags, "--model.path", model_for(file, folder)])
    training = build_training(recipe, load_policy(recipe))
    metrics = [taken.metrics for taken in training.steps(0, lambda: False, lambda words: None)]
    assert len(metrics) == 2
    assert all(
        math.isfinite(row["grad_norm/policy" if file.method != "reward" else "grad_norm/reward"]) for row in metrics
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_tether_data_understands_every_shape(folder: Path, file: ShapeFile, capsys):
    words = [file.source(folder), "--method", file.method, *file.flags, "--model", model_for(file, folder)]
    assert main(["data", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["shapes"]) == [file.shape] and found["used"] and found["examples"]
    if file.method in SIZES:
        said = ["".join(piece["text"] for piece in row["pieces"] if piece["trained"]) for row in found["examples"][0]]
        assert all(text.endswith("<|end|>") for text in said)
    assert main(["data", *words]) == 0
    text = capsys.readouterr().out
    assert "[[" in text and "]]" in text and file.shape in text


def test_the_method_is_told_from_the_columns(folder: Path, capsys):
    for file in FILES:
        if file.method == "grpo" or file.flags or file.needs_template or "implicit" in file.name or "only" in file.name:
            continue
        assert main(["data", file.source(folder), "--model", "tiny-bytes", "--json"]) == 0
        guessed = json.loads(capsys.readouterr().out)["method"]
        family = {"dpo": "reward"}.get(file.method, file.method)
        if not file.name.startswith(("kto", "sharegpt-prompts", "alpaca-prompts")):  # which are good for more than one
            assert guessed == family, file.name


# -- what a shape means -------------------------------------------------------------------------------------------


def written(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def parts(row) -> list[tuple[str, bool]]:
    """(text, whether it is learned) of a row, piece by piece."""
    decode, mask = tiny_tokenizer().decode, row.response_mask.tolist()
    out: list[tuple[str, bool]] = []
    for token, learned in zip(row.tokens.tolist(), mask, strict=True):
        text = decode([token])
        if out and out[-1][1] == learned:
            out[-1] = (out[-1][0] + text, learned)
        else:
            out.append((text, learned))
    return out


def encoder(tokenizer=None, **options) -> RowEncoder:
    return RowEncoder(tokenizer or chat_tokenizer(), END_ID, 500, notify=lambda text: None, **options)


TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def test_all_assistant_turns_or_the_last(tmp_path: Path):
    path = written(tmp_path / "m.jsonl", {"messages": TALK})
    [last] = read_demonstrations(path, encoder())
    [every] = read_demonstrations(path, encoder(turns="all"))
    assert last.tokens.tolist() == every.tokens.tolist()
    assert parts(last) == [
        ("[user]a<|end|>\n[assistant]b<|end|>\n[user]c<|end|>\n[assistant]", False),
        ("d<|end|>", True),
    ]
    assert parts(every) == [
        ("[user]a<|end|>\n[assistant]", False),
        ("b<|end|>", True),
        ("\n[user]c<|end|>\n[assistant]", False),
        ("d<|end|>", True),
    ]
    [plain] = read_demonstrations(path, encoder(tiny_tokenizer(), turns="all"))
    assert parts(plain) == [("a\n", False), ("b", True), ("\nc", False), ("d<|end|>", True)]


def test_a_template_that_rewrites_earlier_turns_is_refused_for_all_turns(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + CHAT
    path = written(tmp_path / "m.jsonl", {"messages": TALK})
    assert len(read_demonstrations(path, encoder(tokenizer))) == 1
    with pytest.raises(DataError, match=r"set data\.assistant_turns last"):
        read_demonstrations(path, encoder(tokenizer, turns="all"))


def test_tool_calls_are_learned_and_their_results_are_not(folder: Path):
    [first, *_] = read_rankings(str(folder / "tool-pairs.parquet"), encoder())
    assert parts(first.rows[0]) == [
        ("[tools]weather<|end|>[user]Rain in Oslo?<|end|>\n[assistant]", False),
        ('weather({"city": "Oslo"})<|end|>', True),
        ("\n[tool]rain<|end|>\n[assistant]", False),
        ("Yes.<|end|>", True),
    ]


def test_a_template_that_leaves_tools_out_is_refused(folder: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="which the model's chat template leaves out"):
        read_demonstrations(str(folder / "tools.jsonl"), encoder(tokenizer))
    with pytest.raises(DataError, match="has tools: use a model whose chat template supports tools"):
        read_demonstrations(str(folder / "tools.jsonl"), encoder(tiny_tokenizer()))
    with pytest.raises(DataError, match="use a model whose chat template supports tools"):
        read_rankings(str(folder / "tool-pairs.parquet"), encoder(tiny_tokenizer()))


def test_system_prompt_and_template_options(tmp_path: Path):
    other = {"messages": [{"role": "system", "content": "own"}, *TALK[:2]]}
    path = written(tmp_path / "m.jsonl", {"prompt": "a", "completion": "b"}, other)
    settings = ReadSettings(system_prompt="be brief", chat_template_kwargs={"no_think": True})
    rows = read_demonstrations(path, encoder(), settings)
    assert [parts(row)[0][0] for row in rows] == [
        "[system]be brief<|end|>\n[user]a<|end|>\n[assistant]-",
        "[system]own<|end|>\n[user]a<|end|>\n[assistant]-",
    ]
    assert read_prompts(path, settings)[0].template_kwargs == {"no_think": True}


def test_columns_are_kept_by_their_own_names(tmp_path: Path):
    path = written(tmp_path / "p.jsonl", {"question": "1 + 1?", "solution": 2, "level": {"n": 3}, "id": 7})
    [prompt] = read_prompts(path, ReadSettings(columns={"prompt": "question", "answer": "solution"}))
    assert (prompt.id, prompt.answer, prompt.messages[0]["content"]) == ("7", "2", "1 + 1?")
    assert prompt.meta == {"question": "1 + 1?", "solution": 2, "level": {"n": 3}}
    with pytest.raises(DataError, match=r"field 'problem' \(data.columns says that it is prompt\) is missing"):
        read_prompts(path, ReadSettings(columns={"prompt": "problem"}))
    with pytest.raises(DataError, match=r"set data.columns, such as \{prompt: question\}"):
        read_prompts(path)


def test_labels(tmp_path: Path):
    records = [{"prompt": "a", "completion": "x", "label": True}, {"prompt": "a", "completion": "y", "label": False}]
    path = written(tmp_path / "k.jsonl", *records, {"prompt": "b", "completion": "z", "label": True})
    assert len(read_demonstrations(path, encoder())) == 2
    parsed = parse_rankings(path)
    assert [each.ranks for each in parsed.examples] == [(0, 1)] and sum(parsed.dropped.values()) == 1
    with pytest.raises(DataError, match="none of the 1 records can be trained on"):
        parse_rankings(written(tmp_path / "one.jsonl", records[0]))


def test_pairs_that_are_equal_are_dropped_and_counted(tmp_path: Path):
    path = written(
        tmp_path / "p.jsonl",
        {"prompt": "a", "chosen": "x", "rejected": "x"},
        {"prompt": "a", "chosen": "x", "rejected": "y"},
    )
    parsed = parse_rankings(path)
    assert len(parsed.examples) == 1 and parsed.dropped == {"pairs whose answers are equal": 1}


def test_an_implied_prompt_ends_with_a_word(tmp_path: Path):
    path = written(tmp_path / "p.jsonl", {"chosen": "The sky is blue.", "rejected": "The sky is black."})
    [each] = parse_rankings(path).examples
    assert (each.prompt.messages[0]["content"], each.answers) == ("The sky is", (" blue.", " black."))
    with pytest.raises(DataError, match="no beginning in common"):
        parse_rankings(written(tmp_path / "q.jsonl", {"chosen": "yes", "rejected": "no"}))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, *TALK[:2]]},
            "content that is not text, such as an image",
        ),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            "must be {from: human or gpt or system or tool, value: text}",
        ),
        ({"messages": TALK[:1]}, "must end with an answer of role assistant"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "set data.columns {completion: chosen}"),
    ],
)
def test_what_is_no_demonstration_is_said(tmp_path: Path, record: dict, said: str):
    with pytest.raises(DataError) as error:
        read_demonstrations(written(tmp_path / "m.jsonl", record), encoder())
    assert said in str(error.value) and str(error.value).startswith(f"{tmp_path}/m.jsonl, line 1")


def test_rows_that_are_too_long_can_be_dropped(tmp_path: Path):
    told: list[str] = []
    encode = RowEncoder(tiny_tokenizer(), END_ID, 20, overlong="drop", notify=told.append)
    path = written(tmp_path / "d.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 30})
    assert len(read_demonstrations(path, encode)) == 1
    assert told == [f"{path}: dropped 1: too long for data.max_length"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--columns", "prompt"], "--columns: expected FIELD=COLUMN"),
        (["--columns", "promt=question"], "--columns names promt, which is not a field that Tether reads"),
        ([], "set data.columns, such as {prompt: question}"),
    ],
)
def test_tether_data_says_in_a_line_what_is_wrong(tmp_path: Path, capsys, words: list[str], said: str):
    assert main(["data", written(tmp_path / "q.jsonl", {"question": "a"}), "--model", "tiny-bytes", *words]) in (2, 5)
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
