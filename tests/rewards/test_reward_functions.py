"""Functions of users as rewards: what they are called with, what they may give, what becomes of their errors."""

import dataclasses
import json
from pathlib import Path

import pytest
from rollout_factory import rollout_of

from tether import cli
from tether.config.rewards import FunctionPart
from tether.errors import ConfigError, DataError
from tether.rewards.function import FunctionReward, named_reward, plain_rollout, rollout_from
from tether.rewards.parts import build_reward
from tether.rewards.resolve import resolve
from tether.rewards.scoring import part_metrics, score_rollouts
from tether.types import Prompt, Rollout, Score


def reward(name: str, **settings) -> FunctionReward:
    part = FunctionPart(kind="function", function=f"user_functions:{name}", **settings)
    return FunctionReward(part, field="reward.parts: function", seed=0)


def answers(*texts: str, as_messages: bool = False) -> list[Rollout]:
    rows = []
    for place, text in enumerate(texts):
        row = rollout_of(text, "gold", tokens=[1, 2 + place])
        meta = {"difficulty": place, "tags": ["x"]}
        prompt = dataclasses.replace(row.prompt, meta=meta, as_messages=as_messages)
        rows.append(dataclasses.replace(row, prompt=prompt, policy_version=7, sample_id=place))
    return rows


def given(name: str, *texts: str, as_messages: bool = False, **settings) -> list[float | str]:
    """Each answer's score, or the reason why it has none."""
    scores = reward(name, **settings)(answers(*texts, as_messages=as_messages))
    return [score.value if score.valid else _reason(score) for score in scores]


def _reason(score: Score) -> str:
    [name] = [name.removeprefix("failed/") for name in score.parts if name.startswith("failed/")]
    return name


@pytest.mark.parametrize(
    ("name", "takes", "wanted"),
    [
        ("by_column", "text", [1.5, 1.5]),
        ("named_only", "text", [0.0, 1.0]),
        ("trl", "trl", [1.0, 2.0]),
        ("trl_columns", "trl", [7.0, 8.0]),
        ("trl_ids", "trl", [2.0, 3.0]),
        ("trl_awaited", "trl", [1.0, 1.0]),
        ("awaited", "text", [1.0, 2.0]),
        ("of_rollouts", "rollouts", [3.0, 4.0]),
        ("an_object", "rollouts", [1.0, 1.0]),
        ("gives_a_tensor", "trl", [0.0, 1.0]),
    ],
)
def test_the_signature_tells_what_a_function_takes(name: str, takes: str, wanted: list[float]):
    assert reward(name).signature.takes == takes
    assert given(name, "a", "bb") == wanted


def test_a_function_of_trls_shape_gets_messages_where_the_record_held_them():
    assert given("trl_conversational", "a", "bb", as_messages=True) == [2.0, 3.0]
    prompt = Prompt("p", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    several = [dataclasses.replace(answers("abc")[0], prompt=prompt)]
    assert reward("trl_conversational")(several)[0].value == 5.0, "a text cannot hold two turns"


def test_what_a_function_logs_is_a_metric_of_its_part():
    part = FunctionPart(kind="function", function="user_functions:trl_columns")
    scores = build_reward([part], own=None, policy=None, seed=0)(answers("a", "bbb"))
    assert part_metrics(scores)["reward/function/longest"] == 3.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unclear", r"user_functions:unclear\(\*\*kwargs\) do not say what it takes: set takes to text for f\("),
        ("both", "do not say what it takes"),
        ("other_names", "do not say what it takes"),
        ("AClass", "is a class: name a function"),
        ("not_callable", "is of type int: name a function"),
        ("absent", "user_functions has no 'absent'"),
    ],
)
def test_what_cannot_be_told_is_asked_for(name: str, said: str):
    with pytest.raises(ConfigError, match=said) as error:
        reward(name)
    assert str(error.value).startswith("reward.parts: function: ")


def test_takes_text_gives_unknown_names_by_position():
    assert given("other_names", "gold", "lead", takes="text") == [1.0, 0.0]
    with pytest.raises(
        ConfigError, match=r"takes 'dificulty', and no record has such a column \(did you mean difficulty"
    ):
        reward("misspelt").check([row.prompt for row in answers("a")])
    assert given("misspelt", "a") == ["missing_column"]


def test_none_is_not_applicable_to_a_function_of_trls_shape():
    trl_part = FunctionPart(kind="function", name="t", function="user_functions:trl_none")
    other = FunctionPart(kind="function", name="o", function="user_functions:trl", weight=10.0)
    scores = build_reward([trl_part, other], own=None, policy=None, seed=0)(answers("a", "bb"))
    assert [score.value for score in scores] == [10.0, 22.0], "the part adds nothing; the others count"
    metrics = part_metrics(scores)
    assert metrics["reward/t/not_applicable"] == 1 and metrics["reward/t"] == 2.0 and metrics["reward/t/failed"] == 0
    alone = build_reward([trl_part], own=None, policy=None, seed=0)(answers("a", "bb"))
    assert [score.valid for score in alone] == [False, True] and "failed/not_applicable" in alone[0].parts


def test_what_a_function_may_give():
    texts = ["numpy", "array", "torch", "bool", "nan", "text", "dict", "list", "none", "score", "large"]
    numbers = [1.5, 2.0, 2.5, 1.0, "not_finite", "not_a_number", "not_a_number", "not_a_number", "none", 4.0]
    assert given("values", *texts) == [*numbers, "not_a_number"]
    assert "returned dict {'score': 1.0}, which is not a number" in reward("values")(answers("dict"))[0].error
    for name, said in (
        ("gives_a_dict", "returned dict"),
        ("gives_a_number", "returned float 1.0: it must return a list"),
    ):
        with pytest.raises(DataError, match=f"user_functions:{name} {said}"):
            given(name, "a", "b")


def test_an_error_is_shown_with_its_text_and_line():
    [score] = reward("raises")(answers("a"))
    assert score.parts == {"failed/KeyError": 1.0}
    assert score.error.startswith("KeyError: 'a' (") and score.error.endswith(
        ', in raises: return {"b": 1.0}[completion])'
    )
    [left] = reward("leaves")(answers("a"))
    assert left.parts == {"failed/SystemExit": 1.0} and "the code called sys.exit(enough)" in left.error
    with pytest.raises(DataError, match=r"user_functions:trl_raises raised RuntimeError: no more lines \(.*, line \d+"):
        given("trl_raises", "a")


def test_the_limit_ends_the_run_with_the_errors_own_text():
    with pytest.raises(DataError, match=r"Errors: KeyError: 'a' \(.*user_functions.py, line \d+, in raises"):
        score_rollouts(reward("raises"), answers("a", "b"), max_failure_rate=0.4)
    assert len(score_rollouts(reward("raises"), answers("a", "b"), max_failure_rate=0.5)) == 2


def test_a_reward_that_leaves_ends_the_run():
    def leaves(rollouts):
        raise SystemExit

    with pytest.raises(DataError, match=r"the reward raised SystemExit: the code called sys.exit\("):
        score_rollouts(leaves, answers("a"), max_failure_rate=1.0)


def test_what_a_function_does_to_its_arguments_stays_with_it():
    import user_functions

    for name in ("spoils", "spoils_columns"):
        rows = answers("b", "a")
        assert [score.value for score in score_rollouts(reward(name), rows, max_failure_rate=0)] == [1.0, 1.0]
        again = answers("b", "a")
        assert [row.completion for row in rows] == ["b", "a"]
        assert [row.prompt for row in rows] == [row.prompt for row in again]
        assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in again]
    rows = answers("b", "a")
    score_rollouts(lambda given: [Score(x) for x in user_functions.spoils(given)], rows, max_failure_rate=0)
    assert [row.completion for row in rows] == ["b", "a"] and rows[0].prompt.meta["difficulty"] == 0


def test_what_a_function_prints_goes_to_standard_error(capsys):
    given("prints", "a")
    out, err = capsys.readouterr()
    assert out == "" and "hello from the reward" in err


def test_an_async_function_is_awaited_for_many_answers_at_once():
    assert given("meets_others", *["a"] * 20) == [1.0] * 20


def test_a_function_in_a_file_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "helper_of_rewards.py").write_text("LIMIT = 2\n")
    code = "from helper_of_rewards import LIMIT\n\ndef f(completion, **columns):\n    return len(completion) / LIMIT\n"
    (tmp_path / "sub" / "rewards.py").write_text(code)
    assert resolve("sub/rewards.py:f", "x")(completion="abcd") == 2.0
    (tmp_path / "broken.py").write_text("a = 1\nb = a / 0\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    (tmp_path / "quits.py").write_text("import sys\nsys.exit()\n")
    for place, said in {
        "broken.py": r"broken.py could not be imported: ZeroDivisionError: .* \(broken.py, line 2, in <module>: b = a",
        "wrong.py": r"wrong.py could not be imported: SyntaxError: invalid syntax \(wrong.py, line 1\)",
        "quits.py": "quits.py could not be imported: SystemExit",
        "absent.py": "there is no file absent.py",
        "../outside.py": "is outside the working folder",
        "/etc/outside.py": "is outside the working folder",
    }.items():
        with pytest.raises(ConfigError, match=said):
            resolve(f"{place}:f", "x")


def test_a_rollout_survives_the_journey_as_json():
    [row] = answers("héllo\n")
    back = rollout_from(json.loads(json.dumps(plain_rollout(row, reward("of_rollouts").signature))))
    assert back.prompt == row.prompt and back.completion == row.completion and back.policy_version == 7
    assert back.token_ids.equal(row.token_ids) and back.response_mask.equal(row.response_mask)


def test_the_tasks_reward_may_be_of_any_shape():
    scores = named_reward("user_functions:trl", "task.reward")(answers("a", "bb"))
    assert [score.value for score in scores] == [1.0, 2.0]


# -- whole runs


def train(capsys, tmp_path: Path, name: str, *words: str) -> tuple[int, list[dict], str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "say a", "difficulty": 2, "answer": "x"}, {"prompt": "say b", "difficulty": 3, "answer": "y"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ["--rollout.prompts_per_step", "2", "--rollout.samples_per_prompt", "2", "--rollout.max_new_tokens", "3"]
    few += ["--run.save", "false", "--evaluation.every", "0", "--task.prompts", str(prompts), "--run.name", name]
    code = cli.main(["train", "ppo", "--json", "--model.device", "cpu", "--run.directory", str(tmp_path), *few, *words])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], " ".join(err.split())


def test_a_run_with_a_function_that_fails_now_and_then_keeps_its_words(capsys, tmp_path: Path):
    parts = json.dumps([{"kind": "function", "function": "user_functions:fails_for_x"}])
    words = ["--run.steps", "2", "--reward.parts", parts, "--reward.max_failure_rate", "0.5"]
    code, lines, err = train(capsys, tmp_path, "r", *words)
    assert code == 0 and [line["reward/function/failed/KeyError"] for line in lines] == [2.0, 2.0]
    said = "function: KeyError: 'x' (tests/rewards/user_functions.py, line"
    assert err.count("the reward could not score every answer") == 1, "the same words are said once"
    assert cli.main(["show", str(tmp_path / "r"), "--json"]) == 0
    events = [event for event in json.loads(capsys.readouterr().out)["events"] if event["kind"] == "reward"]
    assert len(events) == 1 and "KeyError: 'x' (" in events[0]["text"] and "in fails_for_x" in events[0]["text"], said
    assert cli.main(["report", str(tmp_path / "r")]) == 0
    assert "KeyError: &#x27;x&#x27; (" in (tmp_path / "r" / "report.html").read_text()


def test_a_run_that_ends_by_its_reward_says_why_everywhere(capsys, tmp_path: Path):
    code, lines, err = train(capsys, tmp_path, "r", "--run.steps", "1", "--task.reward", "user_functions:fails_for_x")
    assert code == 5 and lines[-1]["exit_code"] == 5
    assert "Errors: KeyError: 'x' (" in lines[-1]["error"] and "in fails_for_x" in err
    assert cli.main(["report", str(tmp_path / "r")]) == 0
    assert "The run ended with an error" in (tmp_path / "r" / "report.html").read_text()


def test_a_missing_column_is_told_before_anything_is_sampled(capsys, tmp_path: Path):
    code, lines, _ = train(capsys, tmp_path, "r", "--run.steps", "1", "--task.reward", "user_functions:misspelt")
    assert code == 2 and "task.reward: user_functions:misspelt takes 'dificulty'" in lines[-1]["error"]
    assert not (tmp_path / "r").exists()


def test_the_examples_of_the_document_run(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    document = (root / "docs" / "rewards.md").read_text()
    for file in ("one_answer.py", "as_in_trl.py", "whole_step.py"):
        blocks = [block.split("```")[0].strip() for block in document.split("```python\n")[1:]]
        source = (root / "recipes" / "rewards" / file).read_text()
        assert any(block in source for block in blocks), f"docs/rewards.md shows {file} as it is"
    parts = [f"one_answer.py:{name}" for name in ("right", "weighted", "judged")]
    parts += ["as_in_trl.py:contains_answer", "as_in_trl.py:easy_only", "whole_step.py:longest_of_its_group"]
    names = [{"kind": "function", "name": f"p{n}", "function": f"recipes/rewards/{p}"} for n, p in enumerate(parts)]
    words = ["--json", "--model.device", "cpu", "--run.directory", str(tmp_path), "--run.steps", "1"]
    words += ["--run.save", "false", "--reward.parts", json.dumps(names)]
    assert cli.main(["train", "ppo", "recipes/rewards/functions.yaml", *words]) == 0
    [line] = map(json.loads, capsys.readouterr().out.splitlines())
    assert all(line[f"reward/p{n}/failed"] == 0 for n in range(len(parts))) and line["reward/p4/not_applicable"] > 0
