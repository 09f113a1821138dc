"""Conversion between GGUF files and Hugging Face folders: config, float32 weights, tokenizer.

llama.cpp implements pre-tokenizers in code, under names. A tokenizer whose splitting matches none of the names below
raises an error: under a wrong name its texts would silently become other tokens. transformers can read GGUF too, but
its tokenizer for the Llama family does not split digits as "smollm" does (5.22), so numbers become tokens that the
model has not seen in training; files are therefore converted here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tether.errors import DataError
from tether.hub.gguf import GgufFile, open_gguf

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
    text = json.dumps([state.get("normalizer"), state.get("pre_tokenizer")])
    return '"Prepend"' in text or ('"Metaspace"' in text and '"prepend_scheme": "never"' not in text)


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


WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the model in `source` into `folder`, which exists; `progress` gets (tensors done, tensors in total)."""
    gguf = open_gguf(source)
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama" or any(".rope.scaling." in key for key in gguf.metadata):
        raise DataError(f"{source.name} is of architecture {architecture!r}: only llama without rope scaling is read")
    try:
        config, tokenizer = _config(gguf), _tokenizer(gguf.metadata)
    except KeyError as error:
        raise DataError(f"{source.name} does not state {error.args[0]}, without which it cannot be read") from error
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    weights = read_weights(gguf, heads, progress)
    _check_weights(weights, config, source.name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # which is made for its owner only


def _config(gguf: GgufFile) -> LlamaConfig:
    stated = gguf.metadata
    heads = stated["llama.attention.head_count"]
    epsilon = stated["llama.attention.layer_norm_rms_epsilon"]
    config = LlamaConfig(
        vocab_size=len(stated["tokenizer.ggml.tokens"]),
        hidden_size=stated["llama.embedding_length"],
        intermediate_size=stated["llama.feed_forward_length"],
        num_hidden_layers=stated["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=stated.get("llama.attention.head_count_kv", heads),
        max_position_embeddings=stated["llama.context_length"],
        rms_norm_eps=float(f"{epsilon:.7g}"),  # stored in single precision: 1e-5, not 9.99999974e-6
        rope_parameters={"rope_type": "default", "rope_theta": stated.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=stated.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=stated["tokenizer.ggml.eos_token_id"],
        pad_token_id=stated.get("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def read_weights(
    gguf: GgufFile, heads: Mapping[str, int], progress: Callable[[int, int], None] | None = None
) -> dict[str, Tensor]:
    """Every weight in float32 under transformers' name; `heads` names the parts with rows in pairs.

    Tables of frequencies, which transformers works out from the config, are left out.
    """
    weights = {}
    for done, name in enumerate(gguf.tensors):
        if progress is not None:
            progress(done, len(gguf.tensors))
        part = name.rpartition(".")[0].rpartition(".")[2]
        if part == "rope_freqs":
            continue
        weight = gguf.read(name)
        if part in heads:
            weight = _halves_from_pairs(weight, heads[part])
        weights[transformers_name(name)] = weight.contiguous()
    if progress is not None:
        progress(len(gguf.tensors), len(gguf.tensors))
    return weights


def transformers_name(name: str) -> str:
    """transformers' name of a weight that GGUF calls `name`."""
    stem, _, ending = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{BLOCK_WEIGHTS.get(part, part)}.{ending}"
    return f"{WEIGHTS.get(stem, stem)}.{ending}"


def _halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from llama.cpp's order to transformers'.

    Rotary embedding turns pairs of rows: (0, 1), (2, 3), ... in llama.cpp; (0, d/2), (1, d/2 + 1), ... here.
    """
    rows, rest = weight.shape[0], weight.shape[1:]
    return weight.reshape(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


def _check_weights(weights: Mapping[str, Tensor], config: LlamaConfig, name: str) -> None:
    """Raise unless the weights are exactly those of the model that `config` describes."""
    with torch.device("meta"):
        expected = {key: value.shape for key, value in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:  # saved once, as transformers does
        expected.pop("lm_head.weight", None)
    found = {key: value.shape for key, value in weights.items()}
    if wrong := sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key)):
        raise DataError(
            f"{name} does not hold the weights that its metadata describes: {len(wrong)} are missing, unknown or of "
            f"another shape (first: {wrong[0]})"
        )


def _tokenizer(stated: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE as SmolLM2 uses it: single digits, then GPT-2's pattern; control tokens kept whole."""
    kind = (stated["tokenizer.ggml.model"], stated["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise DataError(f"the GGUF file's tokenizer is {'/'.join(kind)}: only gpt2/smollm is read")
    tokens: list[str] = stated["tokenizer.ggml.tokens"]
    merges: list[tuple[str, str]] = []
    for merge in stated["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    types = stated["tokenizer.ggml.token_type"]
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: stated.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=stated["llama.context_length"],
        **{name: tokens[id] for name, id in ids.items() if id is not None},
    )
    tokenizer.chat_template = stated.get("tokenizer.chat_template")
    return tokenizer
