"""Rows of plain text or demonstrations, for gradients that are mixed into RL."""

from __future__ import annotations

from tether.config.reading import Paths
from tether.data.examples import encode_demonstrations, parse_demonstrations
from tether.data.rows import Row, RowEncoder


def read_texts(paths: Paths, encode: RowEncoder) -> list[Row]:
    """From records with `text`, all of whose tokens but the first are learned, or from demonstrations.

    A text is cut at the longest row. It has no end token: it is mixed in as pretraining, not as an answer.
    """
    return encode_demonstrations(parse_demonstrations(paths), encode, end_texts=False)
