"""A skipped update is written down whole, can be read back, and never harms the run."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from tether.config.load import load_recipe
from tether.errors import StorageError
from tether.learner.gradients import Fault, NonfiniteTensor
from tether.train import failures
from tether.train.build import build_rl, load_policy
from tether.train.failures import FaultRecorder, read_fault, recorded_faults, write_fault
from tether.train.rl import train_rl
from tether.types import Experience, PairBatch, Sequences, columns_of

MASK = torch.tensor([[False, True, True], [False, False, True]])


def sequences(stage: type[Sequences], **columns) -> Sequences:
    tokens = torch.arange(6).reshape(2, 3)
    return stage(tokens=tokens, attention_mask=torch.ones_like(MASK), response_mask=MASK, temperature=0.7, **columns)


def experience() -> Experience:
    column = torch.tensor([[0.0, 1.5, math.nan], [0.0, 0.0, math.inf]])
    rows = torch.zeros(2)
    batch = sequences(
        Experience,
        **dict.fromkeys(("behavior_logprobs", "untruncated_logprobs", "old_logprobs", "rewards"), column),
        advantages=column.double(),
        values=column.bfloat16(),
        ref_logprobs=None,
        returns=None,
        final_values=rows,
        scores=rows,
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([True, False]),
    )
    assert isinstance(batch, Experience)
    return batch


def a_fault(*batches: Sequences) -> Fault:
    finding = NonfiniteTensor("advantages", 2, "nan", ((0, 2), (1, 2)))
    return Fault("not finite: advantages", (finding,), batches, {"policy": math.inf, "critic": 0.5}, 64)


def test_a_fault_comes_back_as_it_was_with_every_bit_and_type(tmp_path):
    pairs = sequences(
        PairBatch, pair_ids=torch.tensor([3, 3]), chosen=torch.tensor([True, False]), ref_logprobs=torch.ones(2, 3)
    )
    fault = a_fault(experience(), pairs)
    read = read_fault(write_fault(tmp_path, 12, fault))
    assert read.step == 12
    assert dataclasses.replace(read.fault, batches=()) == dataclasses.replace(fault, batches=())
    for one, other in zip(fault.batches, read.fault.batches, strict=True):
        assert type(one) is type(other)
        for name, column in columns_of(one).items():
            found = getattr(other, name)
            if isinstance(column, torch.Tensor):
                assert found.dtype == column.dtype
                assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(column))
                assert torch.equal(found.isnan(), column.isnan())
            else:
                assert found == column


def test_a_type_of_batch_that_only_a_loop_knows_is_read_back_as_what_it_extends(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Numbered(Experience):
        row: torch.Tensor

    batch = Numbered(**columns_of(experience()), row=torch.tensor([4, 5]))
    place = write_fault(tmp_path, 0, a_fault(batch))
    assert type(read_fault(place).fault.batches[0]) is Experience
    assert load_file(place / "batch-0.safetensors")["row"].tolist() == [4, 5]


def test_the_json_is_strict_and_says_why_and_where(tmp_path):
    place = write_fault(tmp_path, 3, a_fault(experience()))
    assert place == tmp_path / "step-000003-0"

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads((place / "fault.json").read_text(), parse_constant=refuse)
    assert content["reason"] == "not finite: advantages"
    assert content["findings"][0]["places"] == [[0, 2], [1, 2]]
    assert content["norms"] == {"policy": "inf", "critic": 0.5}
    assert content["batches"] == [{"file": "batch-0.safetensors", "stage": "Experience", "temperature": 0.7}]


def test_faults_of_one_step_are_numbered_and_those_of_a_run_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "MAX_DUMPS", 3)
    said: list[str] = []
    recorder = FaultRecorder(tmp_path, said.append)
    for step in (7, 7, 9, 10):
        recorder.step = step
        recorder(a_fault(experience()))
    assert [place.name for place in recorded_faults(tmp_path)] == ["step-000007-0", "step-000007-1", "step-000009-0"]
    assert len(said) == 3 and "no more are kept" in said[-1]
    FaultRecorder(tmp_path, said.append)(a_fault(experience()))  # the run resumed: those of before count
    assert len(recorded_faults(tmp_path)) == 3


def test_what_cannot_be_written_is_said_and_does_not_raise(tmp_path):
    (tmp_path / "faults").write_text("a file where the folder should be")
    said: list[str] = []
    FaultRecorder(tmp_path, said.append)(a_fault(experience()))
    assert len(said) == 1 and "was not kept" in said[0]


def test_a_write_that_fails_leaves_nothing_that_looks_like_a_fault(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failures, "save_file", full)
    said: list[str] = []
    FaultRecorder(tmp_path, said.append)(a_fault(experience()))
    assert recorded_faults(tmp_path) == []
    assert "No space left" in said[0]


@pytest.mark.parametrize("damage", ["fault.json", "batch-0.safetensors"])
def test_a_damaged_fault_is_a_clear_error(tmp_path, damage):
    place = write_fault(tmp_path, 0, a_fault(experience()))
    (place / damage).write_bytes((place / damage).read_bytes()[:20])
    with pytest.raises(StorageError, match="step-000000-0 is not a fault that can be read"):
        read_fault(place)


def test_a_run_writes_its_fault_and_goes_on(tmp_path):
    """One weight of the reference is not a number: its log-probs are not, and each iteration is skipped."""
    flags = ["--run.steps", "2", "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "4"]
    recipe = load_recipe("ppo", None, flags)
    parts = build_rl(recipe, load_policy(recipe))
    assert parts.roles.reference is not None
    with torch.no_grad():
        next(parts.roles.reference.backbone.parameters()).fill_(math.nan)
    recorder = FaultRecorder(tmp_path)
    parts.learner.on_fault = recorder
    before = parts.learner.state(copy=True)
    for result in train_rl(parts):
        recorder.step = result.step + 1
        assert result.metrics["skipped_steps"] == 1
    assert result.step == 1
    assert parts.learner.skipped_in_a_row == 2
    for name, tensor in parts.learner.state().tensors.items():
        assert torch.equal(tensor, before.tensors[name])
    places = recorded_faults(tmp_path)
    assert [place.name for place in places] == ["step-000000-0", "step-000001-0"]
    fault = read_fault(places[0]).fault
    assert fault.findings[0].tensor == "ref_logprobs"
    (batch,) = fault.batches
    assert isinstance(batch, Experience)
    assert batch.ref_logprobs is not None
    assert bool(batch.ref_logprobs[batch.response_mask].isnan().all())
