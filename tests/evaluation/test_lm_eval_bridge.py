"""The bridge to lm-evaluation-harness: tasks of the user's own on a tiny model, and what is refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
import yaml

from tether.errors import ConfigError, DataError
from tether.evaluation.suite.capability_suite import compare_suites, run_suite
from tether.evaluation.suite.own_task import read_own_task
from tether.evaluation.suite.suite_model import SuiteModel
from tether.models.load import load_causal_lm

CHOICES = {
    "task": "colours",
    "dataset_path": "json",
    "data_files": "colours.jsonl",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "The {{thing}} is",
    "doc_to_target": "{{right}}",
    "doc_to_choice": ["red", "green"],
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def model() -> SuiteModel:
    return SuiteModel.of_loaded(load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0))


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval, with a cache of data sets that is the test's own."""
    pytest.importorskip("lm_eval", reason="the extra `lm-eval` is not installed")
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, config: dict, rows: list[dict]) -> str:
    (folder / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


ROWS = [{"thing": thing, "right": right} for thing, right in (("sky", 1), ("fire", 0), ("grass", 1))]


def whole_pass(model: SuiteModel, ids: list[int]) -> torch.Tensor:
    """(T - 1, V) the log-distributions after each token, by the model's own forward pass."""
    with torch.no_grad():
        return model.actor.policy(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)


def nats(model: SuiteModel, before: str, after: str) -> float:
    """log p(after | before), by the model's own forward pass."""
    ids = [*model.opening, *model.tokenizer.encode(before + after, add_special_tokens=False)]
    first = len(ids) - len(model.tokenizer.encode(after, add_special_tokens=False))
    table = whole_pass(model, ids)
    return sum(float(table[place - 1, ids[place]]) for place in range(first, len(ids)))


def test_a_task_of_choices_gives_what_the_models_own_pass_gives(model, harness, tmp_path, monkeypatch):
    task = f"lm-eval:{write(tmp_path, CHOICES, ROWS)}"
    found = run_suite(model, [task])
    expected = []
    for row in ROWS:
        scores = [nats(model, f"The {row['thing']} is", f" {choice}") for choice in ("red", "green")]
        expected.append(float(scores[row["right"]] == max(scores)))
    assert found.columns["lm-eval:colours/acc"] == tuple(expected)
    assert found.estimates["lm-eval:colours/acc"].method == "wilson"
    assert run_suite(model, [task], items=2).columns["lm-eval:colours/acc"] == tuple(expected[:2])
    change = compare_suites(found, found)["lm-eval:colours/acc"]
    assert (change.difference.value, change.metric.better) == (0.0, "higher")


def test_random_generators_are_put_back(model, harness, tmp_path):
    task = f"lm-eval:{write(tmp_path, CHOICES, ROWS)}"
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), float(torch.rand(()))
    random.seed(5)
    torch.manual_seed(5)
    run_suite(model, [task])
    assert (random.random(), float(torch.rand(()))) == expected


def test_a_task_of_generation_is_cut_at_its_stop_text(model, harness, tmp_path):
    config = {
        **CHOICES,
        "output_type": "generate_until",
        "doc_to_target": "{{thing}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    del config["doc_to_choice"]
    found = run_suite(model, [f"lm-eval:{write(tmp_path, config, ROWS)}"])
    assert found.columns["lm-eval:colours/exact_match"] == (0.0, 0.0, 0.0)


def test_a_rolling_task_gives_bits_per_byte(model, harness, tmp_path):
    long = "the quick brown fox jumps over the lazy dog. " * 8  # 360 bytes: more than the context of 256
    rows = [{"thing": "short text"}, {"thing": long}]
    config = {
        **CHOICES,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{thing}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    }
    del config["doc_to_choice"]
    found = run_suite(model, [f"lm-eval:{write(tmp_path, config, rows)}"])
    short, windows = found.columns["lm-eval:colours/bits_per_byte"]
    assert short == pytest.approx(-nats(model, "", "short text") / len("short text") / math.log(2.0), rel=1e-5)
    ids, total = [*model.opening, *model.tokenizer.encode(long, add_special_tokens=False)], 0.0
    table = whole_pass(model, ids[:256])
    total += sum(float(table[place - 1, ids[place]]) for place in range(1, 256))
    table = whole_pass(model, ids[len(ids) - 256 :])  # the last window has a whole context before it
    offset = len(ids) - 256
    total += sum(float(table[place - offset - 1, ids[place]]) for place in range(256, len(ids)))
    assert windows == pytest.approx(-total / len(long) / math.log(2.0), rel=1e-5)
    assert found.metric("lm-eval:colours/bits_per_byte").better == "lower"


def test_a_name_that_no_task_has_is_one_sentence(model, harness):
    with pytest.raises(ConfigError, match="lm-eval:no-such-task is neither a task"):
        run_suite(model, ["lm-eval:no-such-task"])


def test_data_that_is_not_here_is_one_sentence(model, harness, monkeypatch):
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"lm-eval:arc_easy could not be run .* could not be downloaded") as raised:
        run_suite(model, ["lm-eval:arc_easy"])
    assert "\n" not in str(raised.value)


def test_templates_cannot_reach_pythons_insides(model, harness, tmp_path):
    config = {**CHOICES, "doc_to_text": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}
    with pytest.raises(DataError, match=r"SecurityError|unsafe"):
        run_suite(model, [f"lm-eval:{write(tmp_path, config, ROWS)}"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"include": "other.yaml"}, "has include, which"),
        ({"class": "mine.Task"}, "has class, which"),
        ({"process_docs": "x"}, "has process_docs, which"),
        ({"dataset_path": "someone/else"}, "dataset_path must be one of"),
        ({"data_files": "nothing.jsonl"}, "there is no file"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "a metric of metric_list may have only"),
    ],
)
def test_a_task_of_ones_own_holds_no_code(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        read_own_task(write(tmp_path, {**CHOICES, **change}, ROWS))


def test_a_function_in_a_task_is_refused_and_not_imported(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    path = tmp_path / "task.yaml"
    path.write_text("task: x\nprocess_docs: !function evil.run\n")
    with pytest.raises(ConfigError, match="names a Python function"):
        read_own_task(str(path))


def test_without_the_package_the_message_says_what_to_install(model, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install 'tether-rl\[lm-eval\]'"):
        run_suite(model, ["lm-eval:arc_easy"])
