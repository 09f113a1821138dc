"""Single bits flipped over every file of a stopped run, and stores mangled in other ways: told, or equal to the bit.

`tests/soak/flips.py` does the same with thousands of flips.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

import flips

from tether.errors import TetherError
from tether.models.load import load_causal_lm

FLIPS = 96


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[flips.Case]:
    return flips.make_cases(tmp_path_factory.mktemp("flips"))


@pytest.mark.parametrize("number", range(FLIPS))
def test_a_flipped_bit_is_told_or_changes_nothing(cases, number: int):
    case, draw = cases[number % 2], random.Random(number)
    files = case.files()
    file = files[number // 2 % len(files)]
    bit = draw.randrange(8 * (case.kept / file).stat().st_size)
    outcome, words = flips.try_flip(case, file, bit, how="look" if number % 8 else "resume")
    assert outcome in ("told", "refused", "equal"), f"{file} bit {bit}: {words}"


def cut(file: Path, share: float) -> None:
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def garble(file: Path, start: int, count: int) -> None:
    content = bytearray(file.read_bytes())
    content[start : start + count] = random.Random(start).randbytes(len(content[start : start + count]))
    file.write_bytes(bytes(content))


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


MANGLED = {
    "cut in half": lambda file: cut(file, 0.5),
    "cut to nothing": lambda file: cut(file, 0.0),
    "its last page gone": lambda file: cut(file, 0.98),
    "its header garbled": lambda file: garble(file, 0, 100),
    "a page garbled": lambda file: garble(file, 4096, 4096),
    "pages garbled": lambda file: garble(file, 20_000, 30_000),
    "a folder": as_folder,
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("how", MANGLED)
@pytest.mark.parametrize("name", ["tether.db", "run/records.jsonl", "run/run.json", "run/recipe.json"])
def test_a_mangled_file_is_told_or_changes_nothing(cases, name: str, how: str):
    case = cases[0]
    case.put_back()
    MANGLED[how](case.place / name)
    try:
        said = [text for text in flips.resume(case) if text not in case.quiet]
    except TetherError as error:
        assert len(str(error)) > 20
        return
    assert said or flips.compare(case) == []


@pytest.fixture(scope="module")
def model(cases) -> Path:
    return cases[0].calm / "model"


@pytest.mark.parametrize("number", range(24))
def test_a_flipped_bit_of_a_saved_model_is_refused(model: Path, tmp_path: Path, number: int):
    place = tmp_path / "model"
    shutil.copytree(model, place)
    files = sorted(file for file in place.iterdir() if file.stat().st_size)
    file = files[number % len(files)]
    flips.flip(file, random.Random(number).randrange(8 * file.stat().st_size))
    with pytest.raises(TetherError, match=r"model|tether-files"):
        load_causal_lm(str(place), dtype="float32", device="cpu", seed=0)
