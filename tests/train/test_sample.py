"""`tether sample`: records that trainers and annotators read, continued where they stopped."""

import json
from pathlib import Path

import pytest

from tether.cli import main
from tether.data.examples import RowEncoder, read_rankings
from tether.errors import DataError
from tether.evaluation.sample_answers import pair_records, ranking_record, sample_answers, unique_prompts
from tether.hub.tiny_model import END_ID
from tether.models.load import LoadedModel, load_causal_lm
from tether.protocols import Sampling
from tether.types import Message, Prompt, Score


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}], "answer": "1"},
        {"prompt": "two", "id": "b"},
        {"prompt": "x" * 300},
        {"prompt": "three", "id": "b"},
        {"prompt": "four"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def count_letters(rollouts):
    return [Score(float(len(rollout.completion))) for rollout in rollouts]


def sample(*words: str, code: int = 0) -> None:
    given = ["--max-new-tokens", "8", "--device", "cpu", "--seed", "3"]
    assert main(["sample", "tiny-bytes", *words, *given]) == code


def test_answers_depend_on_the_prompt_and_not_on_the_batch(tiny: LoadedModel):
    asked = [Prompt.from_text(str(n), f"question {n}") for n in range(5)]
    sampling = Sampling(8, 1.0)
    together = [s.rollouts for s in sample_answers(tiny, asked, 3, sampling, 1)]
    apart = [s.rollouts for s in sample_answers(tiny, asked[2:], 3, sampling, 1, batch_answers=3)]
    texts = [[rollout.completion for rollout in rollouts] for rollouts in (*together[2:], *apart)]
    assert texts[:3] == texts[3:] and len({text for answers in texts[:3] for text in answers}) > 3


def test_prompts_of_one_id_are_told_apart():
    named = unique_prompts([Prompt.from_text(id, "x") for id in ("a", "a", "a#2", "a", "b")])
    assert len({prompt.id for prompt in named}) == 5 and named[0].id == "a"


def test_a_prompt_that_does_not_fit_is_skipped_or_an_error(tiny: LoadedModel):
    long, skipped, seen = Prompt.from_text("long", "x" * 300), [], []
    found = list(
        sample_answers(
            tiny,
            [long, Prompt.from_text("s", "y")],
            2,
            Sampling(4),
            0,
            lambda done, of: seen.append((done, of)),
            skip=lambda prompt, reason: skipped.append((prompt.id, reason)),
        )
    )
    assert len(found) == 1 and skipped[0][0] == "long" and "context of 256" in skipped[0][1] and seen == [(2, 2)]
    with pytest.raises(DataError, match="context"):
        list(sample_answers(tiny, [long], 2, Sampling(4), 0))


def test_unranked_answers_are_never_taken_for_a_preference(tiny: LoadedModel, tmp_path: Path):
    [sampled] = sample_answers(tiny, [Prompt.from_text("a", "hello")], 4, Sampling(8, 1.0), 0)
    record = ranking_record(sampled)
    assert record is not None and record["ranks"] == [0, 0, 0, 0]
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match="all answers tie"):
        read_rankings(str(file), RowEncoder(tiny.tokenizer, END_ID, 256))
    pairs = pair_records(sampled)
    assert len(pairs) == 2 and all(len(pair["answers"]) == 2 and pair["ranks"] == [0, 0] for pair in pairs)


def test_a_reward_ranks_and_failures_are_left_out(tiny: LoadedModel):
    def reward(rollouts):
        scores = count_letters(rollouts)
        return [Score(0.0, valid=False), *scores[1:]]

    [sampled] = sample_answers(tiny, [Prompt.from_text("a", "hello")], 4, Sampling(8, 1.0), 0, reward=reward)
    record = ranking_record(sampled)
    assert record is not None and len(record["answers"]) == 3, "an answer that was not scored has no rank"
    best = record["answers"][record["ranks"].index(0)]
    assert len(best) == max(map(len, record["answers"]))
    for pair in pair_records(sampled):
        assert len(pair["chosen"]) > len(pair["rejected"])


def test_the_file_is_what_training_reads(prompts: Path, tiny: LoadedModel):
    sample(str(prompts), "-n", "4", "--out", "ranked.jsonl", "--reward", "{kind: length, unit: characters, max: 5}")
    rows = lines(Path("ranked.jsonl"))
    assert [row["id"] for row in rows if row["id"] != "2"] == [row["id"] for row in rows], "the long one is left out"
    assert rows[0]["prompt"][0] == {"role": "system", "content": "be brief"} and rows[0]["answer"] == "1"
    usable = [row for row in rows if len(set(row["ranks"])) > 1]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in usable))
    rankings = read_rankings("train.jsonl", RowEncoder(tiny.tokenizer, END_ID, 256))
    for row, ranking in zip(usable, rankings, strict=True):
        for ended, built in zip(row["ended"], ranking.rows, strict=True):
            assert (built.tokens[-1] == END_ID) == ended, "an answer that was cut off gets no end token"


def test_a_stopped_file_is_continued_to_the_same_content(prompts: Path, capsys):
    words = (str(prompts), "-n", "2", "--out")
    sample(*words, "whole.jsonl")
    whole = lines(Path("whole.jsonl"))
    first, second = Path("whole.jsonl").read_text().splitlines()[:2]
    Path("half.jsonl").write_text(f"{first}\n{second[: len(second) // 2]}")
    sample(*words, "half.jsonl", "--json")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["continued_after"] == 1 and told["skipped"] == 1
    half = lines(Path("half.jsonl"))
    assert [(row["id"], row["token_ids"]) for row in half] == [(row["id"], row["token_ids"]) for row in whole]
    before = Path("half.jsonl").read_bytes()
    sample(*words, "half.jsonl")
    assert Path("half.jsonl").read_bytes() == before and "nothing was sampled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("nothing.jsonl",), "no such file", 5),
        (("prompts.jsonl", "--json"), "--out", 2),
        (("prompts.jsonl", "--pairs", "-n", "1"), "at least two", 2),
        (("prompts.jsonl", "--out", "prompts.jsonl"), "not written by", 2),
        (("prompts.jsonl", "--reward", "nonsense"), "nonsense", 2),
        (("prompts.jsonl", "--temperature", "-1"), "temperature", 2),
        (("prompts.jsonl", "--out", "nowhere/\0/x.jsonl"), "", 1),
    ][:-1],
)
def test_wrong_inputs_are_told_in_a_sentence(prompts: Path, capsys, words, said, code):
    sample(*words, code=code)
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_other_settings_do_not_mix_in_one_file(prompts: Path, capsys):
    sample(str(prompts), "-n", "2", "--out", "a.jsonl")
    sample(str(prompts), "-n", "3", "--out", "a.jsonl", code=2)
    assert "n was 2" in capsys.readouterr().err


def test_records_go_to_stdout_without_a_file(prompts: Path, capsys):
    sample(str(prompts), "-n", "2", "--limit", "2")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == ["0", "b"] and rows[0]["prompt"][1] == Message(role="user", content="one")


def test_a_runs_system_prompt_is_used_and_can_be_replaced(prompts: Path):
    flags = ["--data.system_prompt", "Be kind.", "--data.overlong", "drop", "--rollout.max_new_tokens", "4"]
    flags += ["--run.steps", "1", "--run.name", "kind", "--ppo.minibatch_size", "4", "--rollout.prompts_per_step", "4"]
    assert main(["train", "ppo", *flags]) == 0
    options = ["-n", "2", "--max-new-tokens", "4", "--device", "cpu", "--limit", "2"]
    systems = {}
    for name, more in (("own", []), ("other", ["--system", "Be brief!"]), ("none", ["--system", ""])):
        assert main(["sample", "kind", "prompts.jsonl", "--out", f"{name}.jsonl", *more, *options]) == 0
        systems[name] = [record["prompt"][0]["content"] for record in lines(Path(f"{name}.jsonl"))]
    assert systems == {"own": ["be brief", "Be kind."], "other": ["be brief", "Be brief!"], "none": ["be brief", "two"]}
    assert main(["sample", "kind", "prompts.jsonl", "--out", "own.jsonl", "--system", "Hi", *options]) == 2
