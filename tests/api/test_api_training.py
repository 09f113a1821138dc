"""Every training function of the Python API, on the tiny model, and the run that it gives."""

import dataclasses
import json
import math
import threading
from collections.abc import Sequence

import pandas
import pytest
from small_runs import DEMONSTRATIONS, PREFERENCES, PROMPTS, SMALL, share_of_letters

import tether
from tether.types import Prompt, Rollout, Score

RECORDS = {"model.device": "cpu", "optimizer.policy_lr": 3e-3, "optimizer.critic_lr": 3e-3}


# -- PPO and its run --------------------------------------------------------------------------------------------------


def test_ppo_trains_on_prompts_and_a_closure_and_gives_the_run(small_ppo, tmp_path):
    seen: list[tuple[str, str]] = []
    heard: list[tether.Step] = []

    def reward(prompt, completion):
        seen.append((prompt, completion))
        return share_of_letters(prompt, completion)

    run = small_ppo(reward=reward, on_step=heard.append, name="first")
    assert run.finished and run.steps == 3 and run.method == "ppo" and run.state == "done"
    assert run.path == tmp_path / "runs" / "first" and run.name == "first"
    assert len(seen) == 3 * 4 * 2 and {prompt for prompt, _ in seen} <= set(PROMPTS)
    assert [(step.step, step.total) for step in heard] == [(0, 3), (1, 3), (2, 3)]
    assert heard[-1].seconds_left == 0 and all(step.seconds_left >= 0 for step in heard)
    with pytest.raises(dataclasses.FrozenInstanceError):
        heard[0].step = 5  # pyright: ignore[reportAttributeAccessIssue]
    assert repr(run) == f"<Run {run.path}: ppo, 3 of 3 steps, done>"

    rows = run.metrics_rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert isinstance(run.metrics, pandas.DataFrame) and list(run.metrics.index) == [0, 1, 2]
    for step, row in zip(heard, rows, strict=True):
        assert step.metrics["score"] == row["score"] == run.metrics.loc[step.step, "score"]

    answers = run.answers()
    assert [(answer.prompt, answer.text) for answer in answers] == seen[-8:]
    assert [answer.score for answer in answers] == pytest.approx([share_of_letters(*pair) for pair in seen[-8:]])
    assert answers[0].parts == {"reward": answers[0].score} and not answers[0].ended
    assert run.metrics["score"].iloc[-1] == pytest.approx(sum(answer.score or 0 for answer in answers) / 8)
    assert [answer.text for answer in run.answers(step=0)] == [text for _, text in seen[:8]]
    assert run.events[-1].kind == "done"


def test_a_run_generates_and_saves_its_model(small_ppo, tmp_path):
    run = small_ppo()
    once = run.generate(["say red", {"messages": [{"role": "user", "content": "hi"}]}], n=2, seed=3)
    assert [answer.prompt for answer in once] == ["say red", "say red", "hi", "hi"]
    assert all(answer.score is None for answer in once)
    assert once == run.generate(["say red", {"prompt": "hi"}], n=2, seed=3)
    assert once != run.generate(["say red", "hi"], n=2, seed=4)
    greedy = run.generate("say red", temperature=0.0, max_new_tokens=9)
    saved = run.save(tmp_path / "model")
    assert sorted(path.name for path in saved.iterdir()) == sorted(path.name for path in run.model_path.iterdir())
    with pytest.raises(tether.ConfigError, match=r"exists already"):
        run.save(saved)
    run.release()
    assert run.generate("say red", temperature=0.0, max_new_tokens=9) == greedy
    # The saved folder is a model for everything else.
    again = tether.ppo(saved, PROMPTS, share_of_letters, steps=1, settings=SMALL, directory=tmp_path, progress=False)
    assert again.settings["model"]["path"] == str(saved)


@pytest.mark.parametrize("kind", ["texts", "mappings", "file", "dataset", "dataframe", "iterator"])
def test_prompts_come_in_many_shapes_and_train_the_same(small_ppo, tmp_path, kind):
    rows = [{"prompt": prompt, "answer": prompt[0]} for prompt in PROMPTS]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets = pytest.importorskip("datasets")
    given = {
        "texts": PROMPTS,
        "mappings": rows,
        "file": file,
        "dataset": datasets.Dataset.from_list(rows),
        "dataframe": pandas.DataFrame(rows),
        "iterator": iter(rows),
    }[kind]
    run = small_ppo(given, steps=1)
    plain = small_ppo(PROMPTS, steps=1, workspace="plain")
    assert [answer.text for answer in run.answers()] == [answer.text for answer in plain.answers()]
    assert (run.model_path / "model.safetensors").read_bytes() == (plain.model_path / "model.safetensors").read_bytes()


def test_a_reward_gets_the_columns_of_its_records(small_ppo):
    seen = set()

    def reward(completion, answer, level):
        seen.add((answer, level))
        return float(answer in completion)

    small_ppo([{"prompt": "2+2=", "answer": 4, "level": "easy"}], reward, steps=1)
    assert seen == {("4", "easy")}


def test_rewards_are_weighted_mixed_with_rules_and_read_by_their_signatures(small_ppo):
    def longer(completions, **_):
        return [len(text) for text in completions]

    def whole_group(rollouts):
        return [Score(float(rollout.sample_id)) for rollout in rollouts]

    run = small_ppo(
        reward={
            "length": (longer, 0.5),
            "group": whole_group,
            "ended": "ended",
            "rule": ({"kind": "length", "max": 2}, -1),
        }
    )
    parts = run.settings["reward"]["parts"]
    assert [(part["kind"], part["name"], part["weight"]) for part in parts] == [
        ("object", "length", 0.5),
        ("object", "group", 1.0),
        ("ended", "ended", 1.0),
        ("length", "rule", -1.0),
    ]
    for answer in run.answers():
        assert answer.parts["length"] == len(answer.text)
        weighted = 0.5 * answer.parts["length"] + answer.parts["group"] + answer.parts["ended"] - answer.parts["rule"]
        assert answer.score == pytest.approx(weighted)


def test_two_functions_of_one_name_are_told_apart(small_ppo):
    run = small_ppo(reward=[lambda prompt, completion: 1.0, lambda prompt, completion: 2.0], steps=1)
    assert [part["name"] for part in run.settings["reward"]["parts"]] == ["lambda", "lambda_2"]
    assert {answer.score for answer in run.answers()} == {3.0}


def test_held_out_prompts_are_evaluated(small_ppo):
    run = small_ppo(held_out=["pink:"], settings={"evaluation.every": 1, "evaluation.prompts": 1})
    assert all(not math.isnan(row["held_out/score"]) for row in run.metrics_rows())
    run = small_ppo(held_out=0.4, settings={"evaluation": {"every": 3}})
    assert "held_out/score" in run.metrics_rows()[-1] and run.settings["task"]["held_out_fraction"] == 0.4


# -- the other methods ------------------------------------------------------------------------------------------------


def test_grpo_takes_a_group_of_answers(tmp_path):
    run = tether.grpo(
        "tiny-bytes", PROMPTS, share_of_letters, steps=2, settings=SMALL, directory=tmp_path, progress=False
    )
    assert run.finished and run.method == "grpo" and len(run.answers()) == 8


def test_sft_then_a_reward_model_then_ppo_against_it(tmp_path):
    place = {"directory": tmp_path, "progress": False}
    first = tether.sft("tiny-bytes", DEMONSTRATIONS, epochs=30, settings={**RECORDS, "sft.batch_size": 4}, **place)
    assert first.finished and first.metrics["loss"].iloc[-1] < first.metrics["loss"].iloc[0]
    with pytest.raises(tether.ConfigError, match=r"sft samples none"):
        first.answers()
    heard: list[int] = []
    judge = tether.reward_model(
        first,
        PREFERENCES,
        steps=20,
        held_out=PREFERENCES,
        on_step=lambda step: heard.append(step.step),
        settings={**RECORDS, "reward.batch_size": 4},
        **place,
    )
    assert heard == list(range(20)) and judge.metrics["accuracy"].iloc[-1] == 1.0 and judge.report
    with pytest.raises(tether.ConfigError, match=r"is a reward model: it scores answers"):
        judge.generate("hi")
    run = tether.ppo(first, ["red?", "pink?"], judge, steps=2, settings=SMALL, **place)
    assert run.settings["reward"]["parts"][0]["path"] == str(judge.model_path)
    assert run.settings["run"]["objects"] == [] and run.finished
    with pytest.raises(tether.ConfigError, match=r"was trained by sft and is not a reward model"):
        tether.ppo(first, ["red?"], first, steps=1, **place)


def test_dpo_raises_the_margin_of_its_preferences(tmp_path):
    run = tether.dpo(
        "tiny-bytes",
        PREFERENCES,
        steps=8,
        settings={**RECORDS, "dpo.batch_size": 4},
        directory=tmp_path,
        progress=False,
    )
    assert run.finished and run.method == "dpo" and run.metrics["accuracy"].iloc[-1] == 1.0


def test_evaluate_measures_one_model_and_compares_two(small_ppo):
    run = small_ppo()
    report = tether.evaluate(run, PROMPTS, share_of_letters, n=2, progress=False)
    assert 0.0 <= report.metrics["score"].low <= report.metrics["score"].value <= report.metrics["score"].high
    assert report.settings["max_new_tokens"] == 4 and report.settings["samples"] == 2
    both = tether.evaluate(run, PROMPTS, share_of_letters, against="tiny-bytes", n=2, progress=False)
    assert both.evaluations[0].metrics["score"] == report.metrics["score"]
    difference = both.evaluations[0].metrics["score"].value - both.evaluations[1].metrics["score"].value
    assert both.differences["score"].value == pytest.approx(difference)
    wins = both.win_rates["reward"]
    assert wins.wins + wins.losses + wins.ties == 10 and "kl_k1" in both.metrics
    assert "score" not in tether.evaluate(run, ["red:"], progress=False).metrics


# -- objects in place of names ----------------------------------------------------------------------------------------


class Colours:
    """A task of a program's own."""

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt.from_text("red", "red:"), Prompt.from_text("blue", "blue:")]

    def held_out(self) -> Sequence[Prompt]:
        return []

    def reward(self):
        def score(rollouts: Sequence[Rollout]) -> list[Score]:
            return [Score(float(len(rollout.prompt.id))) for rollout in rollouts]

        return score


class Counting:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []
        self.closed = False

    def record(self, step, metrics) -> None:
        self.rows.append((step, metrics["score"]))

    def close(self) -> None:
        self.closed = True


def test_a_task_an_engine_an_algorithm_and_a_tracker_can_be_objects(tmp_path):
    from tether.algorithms.algorithm import Algorithm
    from tether.rollout.scripted import ScriptedEngine

    tracker, built = Counting(), []

    def engine(policy):
        return ScriptedEngine(policy.tokenizer, lambda prompt, sample: f"{prompt.id}{sample}")

    def without_whitening(algorithm: Algorithm) -> Algorithm:
        built.append(algorithm.name)
        return dataclasses.replace(
            algorithm, advantage_settings=dataclasses.replace(algorithm.advantage_settings, whiten_advantages=False)
        )

    run = tether.ppo(
        "tiny-bytes",
        task=Colours(),
        engine=engine,
        algorithm=without_whitening,
        trackers=[tracker],
        steps=2,
        settings={**SMALL, "rollout.max_new_tokens": 8},
        directory=tmp_path,
        progress=False,
    )
    assert run.settings["run"]["objects"] == ["task Colours", "engine engine", "algorithm without_whitening"]
    assert {answer.text for answer in run.answers()} == {"red0", "red1", "blue0", "blue1"}
    assert {(answer.prompt, answer.score) for answer in run.answers()} == {("red:", 3.0), ("blue:", 4.0)}
    assert built == ["ppo"] and tracker.closed
    assert tracker.rows == [(row["step"], row["score"]) for row in run.metrics_rows()]


def test_a_named_task_needs_no_prompts_and_no_reward(tmp_path):
    run = tether.ppo("tiny-bytes", task="match-case", steps=1, settings=SMALL, directory=tmp_path, progress=False)
    assert run.finished and run.settings["task"]["name"] == "match-case"


# -- progress ---------------------------------------------------------------------------------------------------------


def test_progress_is_shown_on_stderr_or_not_at_all(small_ppo, capsys):
    small_ppo(steps=1, progress=True)
    shown = capsys.readouterr()
    assert "ppo 1/1" in shown.err and shown.out == ""
    small_ppo(steps=1)
    quiet = capsys.readouterr()
    assert (quiet.err, quiet.out) == ("", "")


def test_a_run_in_another_thread_needs_no_signals(small_ppo):
    runs: list[tether.Run] = []
    thread = threading.Thread(target=lambda: runs.append(small_ppo(steps=1)))
    thread.start()
    thread.join()
    assert runs and runs[0].finished
