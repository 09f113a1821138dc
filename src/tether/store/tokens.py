"""Convert between training's padded tensors and the store's rollouts, and get the text of each token.

Nothing is rounded: a column that is stored and loaded again has the same bits. A token of a byte-level tokenizer may be
part of a character. The piece of a token is the text that it completes: a character of three tokens belongs to the
third, and the joined pieces are the row's text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tether.store.recorded import TOKEN_COLUMNS, Column, StoredRollout, TopLogprobs
from tether.store.recorder import Pieces
from tether.types import Experience, Prompt, Rollout

# -- the text of each token ---------------------------------------------------------------------------------------


def token_pieces(tokenizer: Any) -> Pieces:
    """The pieces by a Hugging Face tokenizer; the bytes of each token are looked up once."""
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
    """Whether the vocabulary spells bytes as GPT-2's letters."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in repr(getattr(backend, "decoder", None))


def _token_bytes(tokenizer: Any, token: int, letters: dict[str, int] | None) -> bytes:
    spelled = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else None
    if isinstance(spelled, str):
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):  # a byte, in SentencePiece
            return bytes([int(spelled[3:5], 16)])
        if letters is not None and all(letter in letters for letter in spelled):
            return bytes(letters[letter] for letter in spelled)
        if letters is None and spelled.startswith("▁"):  # SentencePiece's space, which decode() would drop
            return spelled.replace("▁", " ").encode("utf-8", "replace")
    return tokenizer.decode([token]).encode("utf-8", "replace")


def _byte_letters() -> dict[str, int]:
    """GPT-2's spelling: the 188 printable bytes as themselves, the other 68 as letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


# -- between tensors and stored rollouts --------------------------------------------------------------------------

LEAST_LIKELY = 0.001  # less likely tokens are not stored

FIELDS: dict[str, str] = {
    "token": "tokens",
    "response": "response_mask",
    "behavior_logprob": "behavior_logprobs",
    "untruncated_logprob": "untruncated_logprobs",
    "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "value": "values",
    "reward": "rewards",
    "advantage": "advantages",
    "return": "returns",
    "entropy": "entropy",
}
"""The field of an `Experience` for each stored column; `ratio` and `clipped` come from the update."""


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of one iteration in training's form, as references without copying.

    Row b of every tensor belongs to `rollouts[b]`. Nothing may be changed after it was passed to the recorder.
    """

    experience: Experience
    rollouts: Sequence[Rollout]
    ratios: Tensor | None = None  # (B, T) new / old in the last pass of the update
    clipped: Tensor | None = None  # (B, T) bool
    parts: Sequence[Mapping[str, float]] = ()  # of each score

    def stored(self, step: int, pieces: Pieces | None) -> list[StoredRollout]:
        """Convert them to the stored form."""
        return stored_rollouts(step, self, pieces)


def stored_rollouts(step: int, source: StepRollouts, pieces: Pieces | None = None) -> list[StoredRollout]:
    """The rows of a step, each without its padding."""
    experience = source.experience
    if len(source.rollouts) != len(experience):
        raise ValueError(f"{len(source.rollouts)} rollouts cannot belong to {len(experience)} rows")
    padded = {name: getattr(experience, field) for name, field in FIELDS.items()}
    padded |= {"ratio": source.ratios, "clipped": source.clipped}
    arrays = {name: _numpy(tensor, TOKEN_COLUMNS[name]) for name, tensor in padded.items() if tensor is not None}
    real = _numpy(experience.attention_mask, "bool")
    scores = experience.scores.tolist()
    finals = None if experience.final_values is None else experience.final_values.tolist()
    return [
        _stored_row(
            step,
            row,
            rollout,
            {name: array[row][real[row]] for name, array in arrays.items()},
            pieces,
            score=scores[row],
            temperature=experience.temperature,
            final_value=None if finals is None else finals[row],
            parts=dict(source.parts[row]) if source.parts else {},
            top_logprobs=top_logprobs_of(experience, row, pieces) if pieces is not None else None,
        )
        for row, rollout in enumerate(source.rollouts)
    ]


def _stored_row(
    step: int, row: int, rollout: Rollout, columns: dict[str, Column], pieces: Pieces | None, **numbers: object
) -> StoredRollout:
    texts = pieces(columns["token"].tolist()) if pieces is not None else []
    return StoredRollout(
        step=step,
        row=row,
        prompt_id=rollout.prompt.id,
        group_id=rollout.group_id,
        sample_id=rollout.sample_id,
        prompt_text=prompt_text(rollout.prompt),
        completion=rollout.completion,
        finish=rollout.finish,
        columns=columns,
        pieces=texts,
        messages=tuple(dict(message) for message in rollout.prompt.messages),
        tools=tuple(rollout.prompt.tools),
        policy_version=rollout.policy_version if rollout.policy_version != step else None,
        **numbers,  # pyright: ignore[reportArgumentType]
    )


def top_logprobs_of(experience: Experience, row: int, pieces: Pieces) -> TopLogprobs | None:
    """The row's most likely tokens with a probability of at least LEAST_LIKELY; None if they were not computed."""
    if experience.top_tokens is None or experience.top_logprobs is None:
        return None
    real = experience.attention_mask[row]
    tokens = _numpy(experience.top_tokens[row][real], "int32")  # (T, K)
    logprobs = _numpy(experience.top_logprobs[row][real], "float32")
    own = _numpy(experience.tokens[row][real], "int32")
    answer = _numpy(experience.response_mask[row][real], "bool")
    kept = answer[:, None] & (tokens != own[:, None]) & (logprobs >= math.log(LEAST_LIKELY))
    chosen = tokens[kept]
    return TopLogprobs(
        counts=kept.sum(axis=1).astype(np.uint8),
        tokens=chosen,
        logprobs=logprobs[kept].astype(np.float16),
        texts={token: pieces([token])[0] for token in np.unique(chosen).tolist()},
    )


def prompt_text(prompt: Prompt) -> str:
    """The prompt as text: its one message, or all messages with their roles."""
    if len(prompt.messages) == 1:
        return prompt.messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def padded_columns(rollouts: Sequence[StoredRollout]) -> dict[str, Tensor]:
    """(B, T) every column of the rollouts, right-padded with zeros, and their "attention" mask."""
    longest = max((len(rollout.columns["token"]) for rollout in rollouts), default=0)
    names = [name for name in TOKEN_COLUMNS if all(name in rollout.columns for rollout in rollouts)]
    padded = {name: np.zeros((len(rollouts), longest), dtype=TOKEN_COLUMNS[name]) for name in names}
    attention = np.zeros((len(rollouts), longest), dtype=bool)
    for place, rollout in enumerate(rollouts):
        length = len(rollout.columns["token"])
        attention[place, :length] = True
        for name in names:
            padded[name][place, :length] = rollout.columns[name]
    return {name: torch.from_numpy(array) for name, array in (padded | {"attention": attention}).items()}


def stored_experience(rollouts: Sequence[StoredRollout], *, pad_id: int = 0) -> Experience:
    """The batch that a step trained on, with the rows in the given order."""
    columns = padded_columns(rollouts)
    fields = {field: columns.get(name) for name, field in FIELDS.items()}
    fields["tokens"] = columns["token"].long().masked_fill(~columns["attention"], pad_id)
    finals = [rollout.final_value for rollout in rollouts]
    known = [value for value in finals if value is not None]
    return Experience(
        **fields,  # pyright: ignore[reportArgumentType]
        attention_mask=columns["attention"],
        temperature=rollouts[0].temperature,
        scores=torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float32),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts]),
        truncated=torch.tensor([rollout.finish == "length" for rollout in rollouts]),
        final_values=torch.tensor(known, dtype=torch.float32) if len(known) == len(finals) else None,
    )


def _numpy(tensor: Tensor, kind: str) -> Column:
    """A tensor as an array of the stored type; bfloat16 and float16 fit into float32 exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy().astype(kind, copy=False)
