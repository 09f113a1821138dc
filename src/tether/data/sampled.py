"""Records that hold the very tokens that were sampled, beside their texts.

Encoding a text again need not give the tokens that were sampled: a model can spell one text in several ways. Where a
record names its token ids and the tokenizer that they belong to, a row is made of those ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether.data.formats import shown
from tether.data.records import Record
from tether.errors import DataError

PROMPT_IDS, TOKEN_IDS, TOKENIZER = "prompt_token_ids", "token_ids", "tokenizer"
MAX_ID = 2**31 - 1


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of what turns messages into token ids and ids into text: the vocabulary and the chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    template = getattr(tokenizer, "chat_template", None)
    content = json.dumps([vocabulary, template], separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class SampledIds:
    """The token ids of one prompt and of its answers, each answer with the token that ended it, where one did."""

    tokenizer: str  # its digest
    prompt: Sequence[int]
    answers: Sequence[Sequence[int]]


def sampled_ids(record: Record, count: int) -> SampledIds | None:
    """The ids that a record of `count` answers holds; None where it holds none.

    Answers in `chosen` and `rejected` have theirs in `chosen_token_ids` and `rejected_token_ids`, those in `answers` in
    `token_ids`.
    """
    if not record.has(PROMPT_IDS) or not record.has(TOKENIZER):
        return None
    if record.has(TOKEN_IDS):
        given = record.value(TOKEN_IDS)
        if not isinstance(given, list) or len(given) != count:
            raise DataError(f"{record.place}: field '{TOKEN_IDS}' must hold {count} lists of token ids")
        found = [_ids(record, f"{TOKEN_IDS}[{index}]", ids) for index, ids in enumerate(given)]
    elif record.has("chosen_token_ids") and record.has("rejected_token_ids"):
        found = [_ids(record, name, record.value(name)) for name in ("chosen_token_ids", "rejected_token_ids")]
    else:
        return None
    if len(found) != count:
        return None  # the ids are of other answers than the one that is read
    return SampledIds(record.text(TOKENIZER), _ids(record, PROMPT_IDS, record.value(PROMPT_IDS)), found)


def _ids(record: Record, field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and 0 <= one <= MAX_ID for one in value):
        raise DataError(f"{record.place}: field {field!r} must be a list of token ids, not {shown(value)}")
    return value
