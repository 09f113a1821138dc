"""A few megabytes that stand for gigabytes are refused before they are there; tables hold no formulas."""

import csv
import gzip
import json
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from recording import synthetic

from tether.data import formats
from tether.errors import DataError, StorageError
from tether.reports.export_data import csv_cell, write_table
from tether.store.recorded import decode_rollout, encode_rollout, rollout_head_of

FIELDS = {"step": 0, "row": 0, "group_id": 0, "sample_id": 0, "finish": "stop", "score": 0.0}


def bomb(head: bytes, zeros: int) -> bytes:
    """A row that inflates to `head` and so many zeros."""
    packer, block = zlib.compressobj(9), bytes(1 << 24)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)  # stands alone, and may be repeated
    return bytes([2]) + start + again * (zeros >> 24)


def test_a_row_that_inflates_to_gigabytes_is_refused_in_little_memory():
    """In a process that may have 2 GiB in all; the row is 3 MB and would be 3 GiB."""
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from test_bounded import FIELDS, bomb
from tether.errors import StorageError
from tether.store.recorded import decode_rollout
row = bomb(b"\\x02\\0\\0\\0{}", 3 << 30)
assert len(row) < 4 << 20, len(row)
try:
    decode_rollout(row, **FIELDS)
except StorageError as error:
    print(error)
"""
    limit = 2 << 30

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    words = [sys.executable, "-c", script, str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, preexec_fn=limited, check=False)
    assert done.returncode == 0 and "decompress to more than 256 MiB" in done.stdout, done.stderr[-800:]


def packed(header: object, rest: bytes = b"", size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return bytes([2]) + zlib.compress(struct.pack("<I", len(text) if size is None else size) + text + rest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02",
        b"\x09" + zlib.compress(b"xxxx"),
        packed([1, 2]),
        packed({"length": -1, "columns": ["token"]}),
        packed({"length": 10**12, "columns": ["token"]}),
        packed({"length": "many", "columns": ["token"]}),
        packed({"length": 1, "columns": 3}),
        packed({"length": 1, "columns": ["nothing"]}),
        packed({"length": 0, "columns": []}),
        packed({}, size=2**32 - 1),
        bytes([2]) + zlib.compress(struct.pack("<I", 400_000) + b"[" * 200_000 + b"]" * 200_000),
        encode_rollout(synthetic(0, 0))[:-20],
    ],
    ids=range(13),
)
def test_a_damaged_row_is_told_in_one_sentence(content: bytes):
    with pytest.raises(StorageError, match="damaged"):
        decode_rollout(content, **FIELDS)


def test_the_head_of_a_row_is_bounded_too():
    assert rollout_head_of(encode_rollout(synthetic(0, 0)))["prompt_id"] == "p0"
    with pytest.raises(StorageError, match="damaged"):
        rollout_head_of(packed({}, size=2**32 - 1))


def test_a_gzip_file_that_inflates_beyond_reason_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(formats, "MIN_INFLATED", 1 << 20)
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000 + b" " * (4 << 20)))
    with pytest.raises(DataError, match=r"x\.jsonl\.gz: inflates to more than 1 MiB"):
        list(formats.READERS[".jsonl.gz"](str(file)))
    file.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000))
    assert len(list(formats.READERS[".jsonl.gz"](str(file)))) == 1000


def test_a_parquet_file_that_inflates_beyond_reason_is_refused(tmp_path: Path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    monkeypatch.setattr(formats, "MIN_INFLATED", 1 << 20)
    file = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"prompt": ["p" * 1000] * 200_000}), file, compression="zstd")
    with pytest.raises(DataError, match="rows inflate to more than"):
        list(formats.READERS[".parquet"](str(file)))
    parquet.write_table(arrow.table({"prompt": ["p"] * 1000}), file)
    assert len(list(formats.READERS[".parquet"](str(file)))) == 1000


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", '=HYPERLINK("x")'])
def test_a_text_that_a_spreadsheet_would_run_is_kept_as_text(text: str, tmp_path: Path):
    assert csv_cell(text) == f"'{text}"
    rows = [{"step": 0, text: -0.5, "score": 1e-9}, {"step": 1, "score": float("nan")}]
    with (tmp_path / "x.csv").open("w", newline="", encoding="utf-8") as file:
        write_table(file, rows)
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        head, first, second = csv.reader(file)
    assert sorted(head) == sorted(["step", f"'{text}", "score"])
    named = dict(zip(head, first, strict=True))
    assert float(named[f"'{text}"]) == -0.5 and float(named["score"]) == 1e-9, "numbers stay numbers"
    assert dict(zip(head, second, strict=True)) == {"step": "1", f"'{text}": "", "score": ""}


@pytest.mark.parametrize("value", [-1, -0.5, 3, "plain", "a=b", "", "1-2"])
def test_everything_else_stays_as_it_is(value):
    assert csv_cell(value) == value
