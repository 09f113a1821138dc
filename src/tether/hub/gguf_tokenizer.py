"""A fast tokenizer as GGUF metadata: its tokens, their types, merges or scores, and which pre-tokenizer splits text.

llama.cpp has the pre-tokenizers in code, under names. A tokenizer whose splitting is none of the ones below is refused:
under another's name its texts would silently become other tokens.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.errors import DataError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's types of tokens

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2", _TEKKEN: "tekken"}
NAMES = ("gpt-2", "smollm", *SPLITS.values())


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    """The `tokenizer.*` entries of a file whose embedding has `rows` rows; ids without a token are marked unused."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError("--gguf: the tokenizer is not a fast one (tokenizer.json), and cannot be written as GGUF")
    state: dict[str, Any] = json.loads(backend.to_str())
    model: dict[str, Any] = state["model"]
    if model["type"] != "BPE":
        raise DataError(f"--gguf: the tokenizer is of type {model['type']}, and only BPE is written")
    if len(tokenizer) > rows:
        raise DataError(f"--gguf: the tokenizer has {len(tokenizer)} tokens, and the model has embeddings for {rows}")
    tokens, types = _tokens(state, rows)
    found: dict[str, Any] = {}
    if model.get("byte_fallback"):
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        found["tokenizer.ggml.add_space_prefix"] = _prepends_space(state)
        types = _sentencepiece_types(tokens, types, model.get("unk_token"))
        found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"] = tokens, _scores(tokens, model["merges"])
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_tokenizer_name(state)}
        found["tokenizer.ggml.tokens"] = tokens
        found["tokenizer.ggml.merges"] = [" ".join(_pair(merge)) for merge in model["merges"]]
    found["tokenizer.ggml.token_type"] = types
    return found | _special_ids(tokenizer)


def pre_tokenizer_name(state: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text."""
    step = state.get("pre_tokenizer") or {}
    steps: list[dict[str, Any]] = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    kinds = [one.get("type") for one in steps]
    last = steps[-1]
    if kinds and kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex"):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and last.get("use_regex") and steps[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex") and steps[0].get("behavior") == "Isolated":
            pattern = (steps[0].get("pattern") or {}).get("Regex")
            if pattern in SPLITS:
                return SPLITS[pattern]
    raise DataError(
        f"--gguf: the tokenizer splits text in a way that has no name here ({' + '.join(map(str, kinds))}); known are "
        f"{', '.join(NAMES)} and SentencePiece: export with --merge, and convert with llama.cpp's own script"
    )


def _tokens(state: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{id}]" for id in range(rows)]
    types = [UNUSED] * rows
    for token, id in state["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in state.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _sentencepiece_types(tokens: list[str], types: list[int], unknown: str | None) -> list[int]:
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
    found = [BYTE if token in bytes_ else kind for token, kind in zip(tokens, types, strict=True)]
    return [UNKNOWN if token == unknown else kind for token, kind in zip(tokens, found, strict=True)]


def _scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """The earlier the merge that makes a token, the higher its score; llama.cpp joins what scores highest first."""
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault("".join(_pair(merge)), place)
    last = len(merges)
    return [-float(rank.get(token, last)) for token in tokens]


def _pair(merge: Any) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else list(merge)


def _prepends_space(state: dict[str, Any]) -> bool:
    """Whether a space is put before a text; either the normaliser or the pre-tokenizer does."""
    said = json.dumps([state.get("normalizer"), state.get("pre_tokenizer")])
    return '"Prepend"' in said or ('"Metaspace"' in said and '"prepend_scheme": "never"' not in said)


def _special_ids(tokenizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    for name, attribute in names.items():
        if isinstance(id := getattr(tokenizer, attribute, None), int):
            found[f"tokenizer.ggml.{name}_token_id"] = id
    with_special = tokenizer.encode("a", add_special_tokens=True)
    found["tokenizer.ggml.add_bos_token"] = bool(with_special) and with_special[0] == tokenizer.bos_token_id
    found["tokenizer.ggml.add_eos_token"] = bool(with_special) and with_special[-1] == tokenizer.eos_token_id
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return found | ({"tokenizer.chat_template": template} if template else {})
