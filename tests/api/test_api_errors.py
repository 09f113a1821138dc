"""What is wrong with the arguments is told by name, with the repair, before anything is trained."""

import sys

import pytest
from small_runs import DEMONSTRATIONS, PROMPTS, SMALL, share_of_letters

import tether


def refused(kind: type[Exception], pattern: str):
    return pytest.raises(kind, match=pattern)


def test_what_is_missing_is_named(small_ppo):
    with refused(tether.ConfigError, r"^reward is missing: give a function such as f\(prompt, completion\)"):
        small_ppo(reward=None)
    with refused(tether.ConfigError, r"^prompts is missing: give a list of texts"):
        small_ppo(None)
    with refused(tether.ConfigError, r"^prompts and task are both given"):
        small_ppo(task="match-case")
    with refused(tether.ConfigError, r"^model: expected a name, a folder or a run, was given nothing"):
        tether.ppo(None, PROMPTS, share_of_letters)  # pyright: ignore[reportArgumentType]


def test_wrong_prompts_are_told_by_their_place(small_ppo, tmp_path):
    with refused(tether.DataError, r"^prompts is empty: give at least one record"):
        small_ppo([])
    with refused(tether.DataError, r"^prompts\[1\]: expected one of texts or mappings.*was given a int"):
        small_ppo(["red:", 7])
    with refused(tether.DataError, r"^prompts: expected a file or a list of texts or mappings.*was given a dict"):
        small_ppo({"prompt": "red:"})
    with refused(tether.DataError, r"^prompts\[0\]: it cannot be written as JSON"):
        small_ppo([{"prompt": "red:", "when": object()}])
    with refused(tether.DataError, r"nowhere\.jsonl"):
        small_ppo("nowhere.jsonl")
    with refused(tether.DataError, r"prompt"):
        small_ppo([{"question": 3}])
    with refused(tether.DataError, r"^data\[0\]: expected one of mappings.*was given a str"):
        tether.sft("tiny-bytes", ["a text"], directory=tmp_path)
    assert not list((tmp_path / "runs").glob("ppo-*"))


def test_an_unknown_setting_is_answered_with_the_nearest(small_ppo, tmp_path):
    with refused(
        tether.ConfigError,
        r"^unknown key rollout\.sample_per_prompt in the settings: did you mean rollout\.samples_per_prompt\?$",
    ):
        small_ppo(settings={"rollout.sample_per_prompt": 4})
    with refused(tether.ConfigError, r"unknown key rollout\.temprature in the settings: did you mean rollout\.temper"):
        small_ppo(settings={"rollout": {"temprature": 1.0}})
    with refused(tether.ConfigError, r"^rollout\.max_new_tokens in the settings: expected.*got \"many\""):
        small_ppo(settings={"rollout.max_new_tokens": "many"})
    with refused(tether.ConfigError, r"^ppo\.epochs in the settings: expected.*got a object"):
        small_ppo(settings={"ppo.epochs": object()})
    with refused(tether.ConfigError, r"^run\.steps is given twice, by an argument and in settings: leave one out"):
        small_ppo(settings={"run": {"steps": 9}})
    with refused(tether.ConfigError, r"run\.steps .* and run\.epochs .* both set the length of the run"):
        tether.sft("tiny-bytes", DEMONSTRATIONS, steps=3, epochs=1, directory=tmp_path)
    with refused(tether.ConfigError, r"^unknown method pppo: did you mean ppo\?"):
        tether.train_recipe("pppo")
    with refused(tether.ConfigError, r"^sft trains on records and takes no algorithm _makes_nothing: that is for ppo,"):
        tether.train_recipe("sft", settings={"data.train": "x.jsonl"}, algorithm=_makes_nothing)


def test_an_unknown_model_is_told(small_ppo, tmp_path):
    with refused(tether.ConfigError, r"there is no run and no model at \./nowhere"):
        tether.ppo("./nowhere", PROMPTS, share_of_letters, directory=tmp_path, progress=False)
    with refused(tether.ConfigError, r"there is no run at nothing"):
        tether.load_run("nothing", tmp_path)


def test_a_name_that_is_taken_is_refused(small_ppo):
    first = small_ppo(name="mine", steps=1)
    with refused(tether.ConfigError, r"^run\.name: .*mine already holds a run; choose another name"):
        small_ppo(name="mine", steps=1)
    unnamed = [small_ppo(steps=1) for _ in range(2)]
    assert len({first.path, *(run.path for run in unnamed)}) == 3


def test_a_reward_that_raises_ends_the_run_with_its_line(small_ppo):
    def broken(prompt, completion):
        return {}["no such key"]

    with refused(tether.DataError, r"KeyError: 'no such key' \(.*test_api_errors.py, line \d+, in broken"):
        small_ppo(reward=broken)


@pytest.mark.parametrize(
    ("reward", "kind", "pattern"),
    [
        (3, tether.ConfigError, r"^reward: expected a function .*was given a int"),
        ([], tether.ConfigError, r"^reward is empty"),
        (lambda one, two: 1.0, tether.ConfigError, r"^reward: the parameters of lambda\(one, two\) do not say"),
        (lambda completion, colour: 1.0, tether.ConfigError, r"^reward: lambda takes 'colour', and no record has such"),
        (lambda prompt, completion: "good", tether.DataError, r"returned str 'good', which is not a number"),
        ("lenght", tether.ConfigError, r"lenght.*length"),
        ({"a": share_of_letters, "b!": share_of_letters}, tether.ConfigError, r"b!"),
        (dict, tether.ConfigError, r"^reward: dict is a class"),
    ],
)
def test_a_reward_that_cannot_be_used_is_told_why(small_ppo, reward, kind, pattern):
    with refused(kind, pattern):
        small_ppo(reward=reward, steps=1)


def test_objects_that_are_none_of_their_kind_are_told(small_ppo):
    with refused(tether.ConfigError, r"^engine: _makes_nothing has no method generate"):
        small_ppo(engine=_makes_nothing)
    with refused(tether.ConfigError, r"^algorithm: _makes_nothing gave a object: pass an Algorithm"):
        small_ppo(algorithm=_makes_nothing)


def _makes_nothing(given):
    return object()


def test_wrong_requests_to_a_run_are_told(small_ppo, monkeypatch):
    run = small_ppo(steps=2)
    with refused(tether.ConfigError, r"the answers of step 9 were not kept; the last that were: 0, 1"):
        run.answers(9)
    with refused(tether.ConfigError, r"temperature is -1"):
        run.generate("hi", temperature=-1.0)
    with refused(tether.ConfigError, r"^n is 0"):
        run.generate("hi", n=0)
    with refused(tether.DataError, r"^prompts is empty"):
        run.generate([])
    with refused(tether.DataError, r"exceeds the model's context"):
        run.generate("hi" * 5000)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(tether.ConfigError, r"run\.metrics needs the package pandas.*run\.metrics_rows\(\)"):
        _ = run.metrics
    assert len(run.metrics_rows()) == 2


def test_settings_take_numbers_of_numpy_and_paths(small_ppo, tmp_path):
    import numpy

    run = small_ppo(steps=numpy.int64(1), settings={"kl.coef": numpy.float64(0.25), "run.note": "mine"})
    assert run.settings["kl"]["coef"] == 0.25 and run.steps == 1
    assert SMALL["rollout.max_new_tokens"] == run.settings["rollout"]["max_new_tokens"]
