"""A checkpoint is there whole or not at all, and one byte that is not what was written is enough to pass it over."""

from __future__ import annotations

import errno
import itertools
import math
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.store import checkpoints
from tether.store.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    DamagedCheckpoint,
    damage,
    listed,
    prune,
    read,
    read_newest,
    write,
)

DAMAGES = ("truncated", "emptied", "deleted", "a bit flipped", "a byte more", "swapped", "from the one before")
PER_FILE_AND_DAMAGE = 18


def made(step: int) -> Checkpoint:
    """A small checkpoint whose every byte depends on the step."""
    numbers = torch.Generator().manual_seed(step)
    tensors = {
        "learner": {
            "policy/w": torch.randn(3, 2, generator=numbers),
            "policy/w/exp_avg": torch.randn(3, 2, generator=numbers),
        },
        "random": {"cpu": torch.randint(0, 256, (40,), generator=numbers, dtype=torch.uint8)},
    }
    return Checkpoint(step, tensors, {"best": step / 7, "learner": {"skipped_in_a_row": step}})


def same(one: Checkpoint, other: Checkpoint) -> bool:
    def flat(checkpoint: Checkpoint):
        return {
            (kind, name): (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist())
            for kind, tensors in checkpoint.tensors.items()
            for name, tensor in tensors.items()
        }

    return one.step == other.step and flat(one) == flat(other) and repr(one.values) == repr(other.values)


# -- reading ------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path):
    path = write(tmp_path, made(12))
    assert path.name == "step-00000012"
    assert same(read(path), made(12))
    assert damage(path) is None


kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
numbers = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(kinds, st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4), numbers)
def test_every_kind_of_tensor_and_number_comes_back_to_the_bit(tmp_path_factory, shapes, number):
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"t/{place}": (1e3 * torch.randn(shape, generator=draw)).to(kind) for place, (kind, shape) in enumerate(shapes)
    }
    checkpoint = Checkpoint(0, {"learner": tensors}, {"number": number})
    assert same(read(write(tmp_path_factory.mktemp("kinds"), checkpoint)), checkpoint)


def test_tensors_are_split_over_files_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 30)
    path = write(tmp_path, made(1))  # two tensors of 24 bytes: together they are above 30
    assert sorted(file.name for file in path.glob("learner-*")) == [
        "learner-00000.safetensors",
        "learner-00001.safetensors",
    ]
    assert same(read(path), made(1))


def corrupted(folder: Path, file: Path, kind: str, draw: random.Random) -> None:
    """Damage one file of the newest checkpoint in `folder`."""
    content = file.read_bytes()
    if kind == "truncated":
        file.write_bytes(content[: draw.randrange(1, len(content))])
    elif kind == "emptied":
        file.write_bytes(b"")
    elif kind == "deleted":
        file.unlink()
    elif kind == "a bit flipped":
        place = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
    elif kind == "a byte more":
        file.write_bytes(content + draw.randbytes(1))
    elif kind == "swapped":
        other = draw.choice([path for path in sorted(file.parent.iterdir()) if path != file])
        taken = other.read_bytes()
        other.write_bytes(content)
        file.write_bytes(taken)
    else:
        file.write_bytes((folder / "step-00000001" / file.name).read_bytes())


def test_every_corruption_of_every_file_is_found_and_the_checkpoint_before_is_used(tmp_path):
    draw = random.Random(20)
    pristine, folder = tmp_path / "pristine", tmp_path / "checkpoints"
    for step in (1, 2):
        write(pristine, made(step))
    names = sorted(file.name for file in (pristine / "step-00000002").iterdir())
    assert names == ["learner-00000.safetensors", "manifest.json", "random-00000.safetensors", "state.json"]
    count = 0
    for name, kind, _ in itertools.product(names, DAMAGES, range(PER_FILE_AND_DAMAGE)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine, folder)
        damaged = folder / "step-00000002"
        corrupted(folder, damaged / name, kind, draw)
        told: list[str] = []
        found = read_newest(folder, told.append)
        assert found is not None and same(found, made(1)), f"{name} {kind} was loaded"
        assert len(told) == 1 and str(damaged) in told[0], told
        assert damage(damaged) is not None
        with pytest.raises(DamagedCheckpoint):
            read(damaged)
        count += 1
    assert count >= 500


def test_every_single_byte_of_a_manifest_matters(tmp_path):
    path, draw = write(tmp_path, made(3)), random.Random(3)
    content = (path / "manifest.json").read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << draw.randrange(8)
        (path / "manifest.json").write_bytes(flipped)
        assert damage(path) is not None, f"byte {place}"


def test_the_words_name_the_file_and_what_is_wrong_with_it(tmp_path):
    path = write(tmp_path, made(3))
    (path / "state.json").write_bytes(b"{}")
    with pytest.raises(DamagedCheckpoint, match=r"step-00000003/state.json has 2 bytes where \d+ were written"):
        read(path)
    (path / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"state.json is missing or cannot be read"):
        read(path)


def test_a_format_of_the_future_is_not_guessed_at(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    path = write(tmp_path, made(3))
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpoint, match="has format 2, and this version reads 1"):
        read(path)


def test_nothing_is_found_where_nothing_is_whole(tmp_path):
    told: list[str] = []
    assert read_newest(tmp_path / "missing", told.append) is None
    for step in (1, 2):
        (write(tmp_path, made(step)) / "manifest.json").unlink()
    assert read_newest(tmp_path, told.append) is None
    assert len(told) == 2


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_at_any_file_leaves_the_others_as_they_were(tmp_path, monkeypatch, reason):
    write(tmp_path, made(1))
    write_file = checkpoints._write_file
    for last in range(4):
        left = [last]

        def failing(path, content, left=left):
            left[0] -= 1
            if left[0] < 0:
                path.write_bytes(content[: len(content) // 2])
                raise OSError(reason, "no")
            return write_file(path, content)

        monkeypatch.setattr(checkpoints, "_write_file", failing)
        with pytest.raises(OSError, match="no"):
            write(tmp_path, made(2))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert same(read(tmp_path / "step-00000001"), made(1))


def test_one_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    write(tmp_path, made(1))
    size = sum(tensor.nbytes for named in made(2).tensors.values() for tensor in named.values())
    usage = shutil.disk_usage(tmp_path)._replace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checkpoints, "_write_file", lambda *_: pytest.fail("a file was begun"))
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(tmp_path, made(2))
    assert caught.value.errno == errno.ENOSPC and [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write(tmp_path, made(4))
    other = Checkpoint(4, made(5).tensors, {"best": math.inf})
    write(tmp_path, other)
    assert same(read(tmp_path / "step-00000004"), other)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_checkpoint_has_no_name_before_what_was_recorded_is_safe(tmp_path):
    seen: list[list[str]] = []
    write(tmp_path, made(4), lambda: seen.append([path.name for path in tmp_path.iterdir()]))
    assert seen == [[".unfinished-step-00000004"]]


# -- keeping ------------------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in listed(folder)]


def test_the_newest_and_every_so_many_are_kept(tmp_path):
    for step in range(1, 9):
        write(tmp_path, made(step))
    prune(tmp_path, newest=2, every=3)
    assert steps_in(tmp_path) == [3, 6, 7, 8]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    for step in range(1, 6):
        write(tmp_path, made(step))
    for step in (4, 5):
        (tmp_path / f"step-0000000{step}" / "state.json").write_bytes(b"")
    prune(tmp_path, newest=1)
    assert 3 in steps_in(tmp_path)
    told: list[str] = []
    found = read_newest(tmp_path, told.append)
    assert found is not None and same(found, made(3))


@settings(deadline=None, max_examples=50)
@given(st.sets(st.integers(1, 12), min_size=1), st.sets(st.integers(1, 12)), st.integers(1, 4), st.integers(0, 4))
def test_pruning_never_removes_the_last_valid_one(tmp_path_factory, steps, damaged, newest, every):
    folder = tmp_path_factory.mktemp("kept")
    for step in steps:
        path = folder / f"step-{step:08d}"
        path.mkdir()
        content = checkpoints._sealed({"format": checkpoints.FORMAT, "step": step, "files": {}})
        (path / "manifest.json").write_bytes(content[:-3] if step in damaged else content)
    prune(folder, newest, every)
    valid, left = sorted(steps - damaged), steps_in(folder)
    assert set(valid[-newest:]) <= set(left)
    assert {step for step in steps if every and step % every == 0} <= set(left)


def test_what_a_killed_process_left_is_cleared_and_never_read(tmp_path):
    write(tmp_path, made(1))
    for name in (".unfinished-step-00000002", ".removed-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    assert steps_in(tmp_path) == [1]
    CheckpointWriter(tmp_path, keep=1, keep_every=0, notify=print)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# -- beside training ----------------------------------------------------------------------------------------------


def test_saving_does_not_wait_for_the_disk_and_the_next_one_waits_for_the_last(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=5, keep_every=0, notify=print)
    disk = threading.Event()
    writer.save(made(1), disk.wait)  # returns although the disk has not
    assert steps_in(tmp_path) == []
    disk.set()
    writer.save(made(2))
    assert 1 in steps_in(tmp_path)
    writer.wait()
    assert steps_in(tmp_path) == [1, 2]


def test_a_changed_working_folder_takes_no_checkpoint_with_it(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = CheckpointWriter(Path("kept"), keep=5, keep_every=0, notify=print)
    monkeypatch.chdir("elsewhere")
    writer.save(made(1))
    writer.wait()
    assert steps_in(tmp_path / "kept") == [1] and list(Path().iterdir()) == []


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_next_one_is_tried(tmp_path, monkeypatch):
    told: list[str] = []
    writer = CheckpointWriter(tmp_path, keep=2, keep_every=0, notify=told.append)

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "_write_file", full)
        writer.save(made(1))
        writer.wait()
    assert told == [f"The checkpoint of step 1 was not written (No space left on device): {tmp_path}"]
    writer.save(made(2))
    writer.wait()
    assert steps_in(tmp_path) == [2]
