"""The text of each token of a row, for reading token by token.

A token of a byte-level tokenizer need not be whole characters: a piece is what the token completes, so that a character
of three tokens stands with its third, and the pieces joined are the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from tether.store.recorder import Pieces


def token_pieces(tokenizer: Any) -> Pieces:
    """The pieces by a Hugging Face tokenizer; what each token stands for is looked up once."""
    known: dict[int, bytes] = {}
    letters = _byte_letters() if _is_byte_level(tokenizer) else None

    def bytes_of(token: int) -> bytes:
        if token not in known:
            known[token] = _token_bytes(tokenizer, token, letters)
        return known[token]

    def pieces(tokens: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts = [decoder.decode(bytes_of(token)) for token in tokens]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    return pieces


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are spelled in the letters that stand for bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in repr(getattr(backend, "decoder", None))


def _token_bytes(tokenizer: Any, token: int, letters: dict[str, int] | None) -> bytes:
    spelled = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else None
    if isinstance(spelled, str):
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):  # a byte, in SentencePiece
            return bytes([int(spelled[3:5], 16)])
        if letters is not None and all(letter in letters for letter in spelled):
            return bytes(letters[letter] for letter in spelled)
        if letters is None and spelled.startswith("▁"):  # SentencePiece's space, which decoding alone would drop
            return spelled.replace("▁", " ").encode("utf-8", "replace")
    return tokenizer.decode([token]).encode("utf-8", "replace")


def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling: the 188 printable bytes as they are, the other 68 as letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
