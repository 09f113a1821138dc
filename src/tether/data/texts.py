"""Rows of plain text or demonstrations, for gradients that are mixed into RL."""

from __future__ import annotations

import torch

from tether.data.examples import Row, RowEncoder, read_demonstrations
from tether.data.records import read_records


def read_texts(path: str, encode: RowEncoder) -> list[Row]:
    """From records with `text`, all of whose tokens but the first are learned, or from demonstrations.

    A text is cut at the longest row; it has no end token, for a cut text does not end there.
    """
    records = read_records(path)
    if "text" not in records[0].fields:
        return read_demonstrations(path, encode)
    rows = [encode.tokenizer.encode(record.text("text"), add_special_tokens=False) for record in records]
    return [Row(torch.tensor(row[: encode.max_length]), 1) for row in rows if len(row) > 1]
