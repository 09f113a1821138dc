"""The file of a pipeline: stages by name, references between them, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tether.config.load_pipeline import load_pipeline, pipeline_from_record
from tether.config.pipeline_recipe import Pipeline
from tether.errors import ConfigError
from tether.pipeline.order import StagePlaces, check_references, order_lines, steps_of

GOOD = """\
method: pipeline
name: p
rounds: 3
task: {name: match-case}
truth: {prompts: 3}
stages:
  sft:
    method: sft
    data: {train: demonstrations.jsonl}
each_round:
  answers:
    method: collect
  proxy:
    method: reward
    model: {path: "stage:sft"}
    data: {train: "stage:answers@all", held_out: "stage:answers"}
  ppo:
    method: ppo
    kl: {reference: "stage:policy@first"}
    roles: {critic_init: "stage:proxy"}
    reward: {parts: [{kind: model, path: "stage:proxy"}]}
"""


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    return str(file)


def loaded(tmp_path: Path, text: str, *flags: str) -> Pipeline:
    pipeline = load_pipeline(written(tmp_path, text), flags)
    check_references(pipeline)
    return pipeline


def test_references_lead_to_what_was_made_before(tmp_path: Path):
    places = StagePlaces(loaded(tmp_path, GOOD), Path("runs/p"))
    found = {step.folder: places.resolved(step) for step in places.steps}
    assert list(found) == ["sft"] + [f"round-{k}-{name}" for k in (1, 2, 3) for name in ("answers", "proxy", "ppo")]
    sft, ppo = "runs/p/sft/model", "runs/p/round-{}-ppo/model"
    assert [found[f"round-{k}-answers"].model.path for k in (1, 2, 3)] == [sft, ppo.format(1), ppo.format(2)]
    assert [found[f"round-{k}-ppo"].model.path for k in (1, 2, 3)] == [sft, ppo.format(1), ppo.format(2)]
    assert {found[f"round-{k}-ppo"].kl.reference for k in (1, 2, 3)} == {sft}
    assert {found[f"round-{k}-proxy"].model.path for k in (1, 2, 3)} == {sft}
    train = found["round-3-proxy"].data.train
    assert train == tuple(f"runs/p/round-{k}-answers/train.jsonl" for k in (1, 2, 3)), "the old ratings are kept"
    assert found["round-3-proxy"].data.held_out == "runs/p/round-3-answers/held_out.jsonl"
    assert found["round-2-ppo"].reward.parts[0].path == "runs/p/round-2-proxy/model"
    assert found["round-2-ppo"].roles.critic_init == "runs/p/round-2-proxy/model"
    assert found["round-1-answers"].task.name == found["round-1-ppo"].task.name == "match-case"


def test_the_previous_rounds_policy_may_be_the_reference(tmp_path: Path):
    text = GOOD.replace("@first", "@previous").replace(
        "  ppo:\n",
        '  best:\n    method: rejection_sampling\n    reward: {parts: [{kind: model, path: "stage:proxy"}]}\n  ppo:\n',
    )
    places = StagePlaces(loaded(tmp_path, text), Path("r"))
    found = {step.folder: places.resolved(step) for step in places.steps}
    assert found["round-1-ppo"].model.path == "r/round-1-best/model", "rejection sampling makes a policy"
    assert found["round-1-ppo"].kl.reference == "r/sft/model"
    assert found["round-2-ppo"].kl.reference == "r/round-1-ppo/model"
    assert found["round-2-best"].model.path == "r/round-1-ppo/model"


def test_flags_are_for_the_pipeline_or_for_a_stage(tmp_path: Path):
    pipeline = loaded(tmp_path, GOOD, "--rounds", "1", "--ppo.run.steps", "7", "--answers.rater=reward", "--seed=4")
    assert pipeline.settings.rounds == 1 and pipeline.settings.seed == 4
    assert pipeline.each_round[2].settings.run.steps == 7
    assert len(steps_of(pipeline)) == 4
    assert "1 rounds, 4 stages in all" in order_lines(pipeline)[-1]


def test_a_pipeline_survives_its_record(tmp_path: Path):
    pipeline = loaded(tmp_path, GOOD)
    assert pipeline.has_truth and pipeline_from_record(json.loads(json.dumps(pipeline.record()))) == pipeline
    assert not loaded(tmp_path, GOOD.replace("truth: {prompts: 3}\n", "")).has_truth


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "method: reward",
            "method: rewards",
            r"stage proxy: unknown method rewards in .*p\.yaml, line 14: did you mean",
        ),
        ("method: reward\n", "\n", r"stage proxy in .*line 13 has no method: add `method:`"),
        ("  proxy:\n", "  Proxy:\n", r"Proxy in .*line 13 cannot be the name of a stage: use lower-case"),
        ("  proxy:\n", "  seed:\n", "seed in .* cannot be the name of a stage: it is a key of pipelines"),
        ("  proxy:\n", "  sft:\n", r"stage sft is given twice in .*lines 7 and 13: rename one"),
        ("rounds: 3", "round: 3", r"unknown key round in .*line 3: did you mean rounds\?"),
        ("rounds: 3", "rounds: 0", r"rounds in .*line 3"),
        (
            "method: collect",
            "method: collect\n    answers: {prompt: 3}",
            r"stage answers: unknown key answers\.prompt .*line 13: did you mean answers\.prompts\?",
        ),
        (
            "method: ppo",
            "method: ppo\n    run: {name: x}",
            r"stage ppo: run\.name in .* is set by the pipeline: remove it",
        ),
        ("method: ppo", "method: ppo\n    ppo: {lam: 3}", r"stage ppo: ppo\.lam in .*line 19"),
        ("stage:sft", "stage:stf", r"stage proxy, model\.path: there is no stage stf: did you mean stage:sft\?"),
        (
            'model: {path: "stage:sft"}',
            'model: {path: "stage:ppo"}',
            r"stage proxy, model\.path: it uses stage:ppo, which runs after it",
        ),
        (
            'model: {path: "stage:sft"}',
            'model: {path: "stage:answers"}',
            r"stage:answers makes ratings, and it needs a policy",
        ),
        (
            'critic_init: "stage:proxy"',
            'critic_init: "stage:sft"',
            r"stage:sft makes a policy, and it needs a reward model",
        ),
        (
            "data: {train: demonstrations.jsonl}",
            'data: {train: "stage:sft"}',
            r"stage sft, data\.train: stage:sft makes a policy, and it needs answers",
        ),
        (
            "data: {train: demonstrations.jsonl}",
            'data: {train: x}\n    model: {path: "stage:policy"}',
            r"stage sft, model\.path: no stage before it makes a policy",
        ),
        (
            "data: {train: demonstrations.jsonl}",
            "data: {train: x}\n    run: {save: false}",
            r"stage:sft has run\.save false",
        ),
        ("@first", "@frist", r"stage:policy@frist is unknown: write @previous or @first"),
        ("@all", "@every", r"@every of answers is unknown: @all is for the ratings"),
        (
            "method: collect",
            "method: collect\n    rater: judge",
            r"stage answers: rater is judge, and judge\.url is empty",
        ),
        ("method: collect", "method: collect\n    rater: jugde", r"stage answers: rater in .*line 13"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, old: str, new: str, message: str):
    assert old in GOOD
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no stages"),
        ("rounds: 2\n", "has no stages"),
        ("stages: [sft]\n", r"stages in .*line 1: expected stages by name, got a list"),
        ("stages: {sft: ppo}\n", r"stage sft in .*line 1: expected a mapping with `method:`"),
        ("method: ppo\nstages: {}\n", "method in .* is ppo, but pipeline was asked for"),
        ("stages: {a: {method: ppo}, a: {method: ppo}}\n", "stage a is given twice"),
    ],
)
def test_a_file_of_another_shape_is_one_sentence(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


def test_a_file_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_pipeline(str(tmp_path / "no.yaml"))
