"""Backbone states in a folder: read by a later run on the same backbone, to the bit, and by no other."""

from __future__ import annotations

import pytest
import torch
from test_backbone_memory import rows

from tether.config.sections import RolesSettings
from tether.errors import StorageError
from tether.hub.tiny_model import tiny_model
from tether.models.backbones import backbone_of
from tether.models.shared_backbone import BackboneCache, SharedBackbone
from tether.types import Sequences


def backbone_keeping(folder, *, seed: int = 3, depth: int = 1) -> SharedBackbone:
    model = backbone_of(tiny_model(seed=seed))
    return SharedBackbone(model, depth, kept=BackboneCache(folder, model, depth))


def test_a_later_run_reads_to_the_bit_what_an_earlier_one_found(tmp_path):
    first = backbone_keeping(tmp_path)
    found = first.states(rows((7, 1), (3, 2), (5, 3)))
    first.write_kept()
    later = backbone_keeping(tmp_path)
    assert torch.equal(later.states(rows((5, 3), (7, 1)))[0, :5], found[2, :5])
    assert torch.equal(later.states(rows((7, 1), (3, 2), (5, 3))), found)
    assert later.rows_run == 0 and first.rows_run == 3


def test_what_is_not_there_is_run_and_added(tmp_path):
    first = backbone_keeping(tmp_path)
    first.states(rows((7, 1)))
    first.write_kept()
    second = backbone_keeping(tmp_path)
    second.states(rows((7, 1), (4, 9)))
    assert second.rows_run == 1
    second.write_kept()
    assert len(list(tmp_path.iterdir())) == 2, "a file is never changed"
    third = backbone_keeping(tmp_path)
    third.states(rows((4, 9), (7, 1)))
    assert third.rows_run == 0
    third.write_kept()
    assert len(list(tmp_path.iterdir())) == 2, "nothing is written twice"


@pytest.mark.parametrize("other", [{"seed": 4}, {"depth": 0}])
def test_another_backbone_reads_nothing_of_it(tmp_path, other):
    first = backbone_keeping(tmp_path)
    first.states(rows((7, 1)))
    first.write_kept()
    another = backbone_keeping(tmp_path, **other)
    another.states(rows((7, 1)))
    assert another.rows_run == 1


def test_a_name_that_says_more_than_the_file_is_not_believed(tmp_path):
    first = backbone_keeping(tmp_path)
    first.states(rows((7, 1)))
    first.write_kept()
    [file] = tmp_path.iterdir()
    other = backbone_keeping(tmp_path, seed=4)
    assert other.kept is not None
    file.rename(tmp_path / f"{other.kept.digest[:16]}-1-0.safetensors")
    assert not BackboneCache(tmp_path, backbone_of(tiny_model(seed=4)), 1)._places


def test_rows_that_a_checkpoint_only_named_are_found_again_before_they_are_written(tmp_path):
    calm = backbone_keeping(tmp_path / "calm")
    found = calm.states(rows((7, 1), (3, 2)))
    calm.write_kept()
    resumed = backbone_keeping(tmp_path / "resumed")
    resumed.restore_rows(calm.memory())
    resumed.write_kept()
    later = backbone_keeping(tmp_path / "resumed")
    assert torch.equal(later.states(rows((7, 1), (3, 2))), found) and later.rows_run == 0


def test_what_a_sampler_found_is_taken(tmp_path):
    """A sampler that ran the same layers may hand over their inputs, which may differ by rounding."""
    model = backbone_of(tiny_model(seed=3))
    kept = BackboneCache(tmp_path, model, 1)
    kept.keep(torch.tensor([5, 6, 7]), torch.full((3, 64), 0.5))
    assert torch.tensor([5, 6, 7]).numpy().tobytes() not in kept, "not before it is written"
    kept.write()
    all_real = torch.ones(1, 3, dtype=torch.bool)
    batch = Sequences(tokens=torch.tensor([[5, 6, 7]]), attention_mask=all_real, response_mask=all_real)
    backbone = backbone_keeping(tmp_path)
    assert torch.equal(backbone.states(batch), torch.full((1, 3, 64), 0.5)) and backbone.rows_run == 0


def test_a_damaged_file_is_named_with_its_repair(tmp_path):
    first = backbone_keeping(tmp_path)
    first.states(rows((7, 1)))
    first.write_kept()
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StorageError, match=rf"backbone_cache: .*{file.name} is damaged .* remove it"):
        backbone_keeping(tmp_path)


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"backbone_cache: .*cannot be written \(.*make room, or leave"):
        backbone_keeping(tmp_path / "file" / "states")


def test_it_is_for_mode_top():
    with pytest.raises(ValueError, match="backbone_cache is for mode shared_backbone"):
        RolesSettings(mode="lora", backbone_cache="somewhere")
