"""Loading a causal language model and its tokenizer, with every silent trap turned into an error or a notice."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tether.errors import ConfigError, is_memory
from tether.files import check_saved
from tether.hub.catalog import looks_like_path, resolve_model_path
from tether.hub.folder_check import check_folder, check_hub_copy, check_model_path, fetch_hub_names
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.ends import ends_notice, find_ends
from tether.models.lora import CONFIG as ADAPTER_CONFIG
from tether.models.lora import inject_lora, load_config, load_lora, merge_lora, saved_config
from tether.models.own_loader import OwnLoader
from tether.models.precision import hold_in, resolve_dtype

transformers_logging.disable_progress_bar()  # its bars for reading and writing shards would tear Tether's own

TINY = "tiny-bytes"
HUB_SECONDS = 10.0  # for one question to the hub
NO_LIMIT = 1 << 30  # the context of a model that states none


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with dropout gone, and what the rest of a run needs to know of it.

    `end_id` is the token that training appends to an answer that ended; sampling stops at each of `end_ids`, of which
    it is one. `pad_id` is a real token id that is none of them. `notices` are sentences for the user, one for each
    choice that was made on their behalf.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_id: int
    pad_id: int
    context_length: int
    notices: tuple[str, ...] = ()
    other_end_ids: tuple[int, ...] = ()

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends an answer."""
        return frozenset((self.end_id, *self.other_end_ids))


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str,
    seed: int,
    attention: str = "auto",
    quantize: str = "none",
    verify: bool = True,
    loader: OwnLoader | None = None,
) -> LoadedModel:
    """The model at `path`: "tiny-bytes" (built in code from `seed`), the name of an embedded model (fetched into the
    cache where it is absent), a local folder (of a whole model, or of adapters), or a Hugging Face id.

    Only safetensors are read and no code of the checkpoint is run. A Hugging Face id is looked for in the local
    cache first, and only then on the network. With `quantize` its linear layers are held in 8 or 4 bits and frozen. A
    model that Tether saved is refused where its files are not what was written; without `verify` the caller compares.
    A `loader` of the user's reads `path` instead; what it returns is prepared in the same way.
    """
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    if loader is not None:
        model, tokenizer = loader(path, dtype=kind, device=place, seed=seed, attention=attention)
        return _prepared(model, tokenizer, [], kind, place)
    check_model_path(path)
    fewer_bits = quantization(quantize, kind, place)
    if fewer_bits is not None and (path == TINY or (Path(path).expanduser() / ADAPTER_CONFIG).is_file()):
        raise ConfigError(f"model.quantize is {quantize}, which is for whole saved models, and {path!r} is none")
    if path == TINY:
        model, tokenizer, notices = tiny_model(seed), tiny_tokenizer(), []
        if attention != "auto":
            model.set_attn_implementation(attention)
    elif (Path(path).expanduser() / ADAPTER_CONFIG).is_file():
        loaded = load_adapters(Path(path).expanduser(), kind, place, seed, attention)
        if verify:
            check_saved(Path(path).expanduser())
        merge_lora(loaded.model)
        # Adapters that are trained on it next stand on these, not on these adapters' base.
        loaded.model.config.name_or_path = str(Path(path).expanduser().resolve())
        return loaded
    else:
        model, tokenizer, notices = _load_pretrained(resolve_model_path(path), kind, attention, seed, fewer_bits)
        if verify:
            check_saved(Path(path).expanduser())
    return _prepared(model, tokenizer, notices, kind if fewer_bits is None else None, place)


def _prepared(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    notices: list[str],
    dtype: torch.dtype | None,
    device: torch.device,
) -> LoadedModel:
    """The model without dropout, in its precision on its device; with dtype None (quantized) it stays as it is."""
    disable_dropout(model)
    train_every_embedding(model)
    keep_scale(model)
    if dtype is not None:
        hold_in(model, dtype, device)
    return describe(model, tokenizer, notices)


def quantization(bits: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any] | None:
    """How a model is loaded with its linear layers in fewer bits, by bitsandbytes; None for as they are."""
    if bits == "none":
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.quantize is {bits}, which needs bitsandbytes: pip install 'tether-rl[quantize]', or set "
            "model.quantize none"
        )
    if device.type != "cuda":
        raise ConfigError(f"model.quantize is {bits}, which needs a CUDA device: set model.quantize none")
    options: dict[str, Any] = {"load_in_8bit": True}
    if bits == "4bit":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it tells of a cast at every product
    config = BitsAndBytesConfig(**options)
    return {"quantization_config": config, "device_map": {"": device}}


def load_adapters(
    folder: Path, dtype: torch.dtype, device: torch.device, seed: int = 0, attention: str = "auto"
) -> LoadedModel:
    """The base model that saved adapters name, with the adapters on it, not yet merged."""
    check_folder(folder)
    check_not_reward_model(folder)
    loaded = load_base(folder, dtype, device, seed, attention)
    inject_lora(loaded.model, load_config(folder), seed)
    load_lora(loaded.model, folder)
    loaded.model.requires_grad_(True)
    return loaded


def load_base(
    folder: Path, dtype: torch.dtype, device: torch.device, seed: int = 0, attention: str = "auto"
) -> LoadedModel:
    """The model that the adapters in a folder were trained on, without them."""
    base = str(saved_config(folder).get("base_model_name_or_path") or "")
    if not base:
        raise ConfigError(f"model.path {str(folder)!r} holds adapters that do not say for which model they are")
    return load_causal_lm(base, dtype=dtype, device=device, seed=seed, attention=attention)


def is_reward_model(folder: Path) -> bool:
    """Whether a folder holds a model with a score in place of a language-model head, whole or as adapters."""
    for name, key in (("config.json", "architectures"), (ADAPTER_CONFIG, "task_type")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            text = json.loads((folder / name).read_text(encoding="utf-8")).get(key)
            if any(mark in str(text) for mark in ("ForSequenceClassification", "SEQ_CLS")):
                return True
    return False


def check_not_reward_model(folder: Path) -> None:
    """Raise on a reward model. Where its embeddings are tied it would load, and answer as if it were a policy."""
    if is_reward_model(folder):
        raise ConfigError(
            f"model.path {str(folder)!r} holds a reward model, which scores answers and writes none: name a model that "
            "was trained with sft, dpo or RL"
        )


def describe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, notices: list[str] | None = None
) -> LoadedModel:
    """A model and tokenizer that are already in memory, as a LoadedModel: ids chosen and checked, notices written."""
    notices = list(notices or [])
    rows = embedding_count(model)
    ends = find_ends(tokenizer, model.config, getattr(model, "generation_config", None), rows)
    if ends is None:
        raise ConfigError("model.path: the tokenizer has no end token; set `eos_token` in its tokenizer_config.json")
    if ends.also:  # kept in config.json too: a reward model made of this one is saved without a generation config
        model.config.eos_token_id = list(ends.all)
    if len(tokenizer) > rows:
        notices.append(
            f"The tokenizer knows {len(tokenizer)} tokens and the model has embeddings for {rows}: "
            "a prompt that uses one of the others is refused."
        )
    pad_id, pad_notice = choose_pad_id(tokenizer, ends.appended, rows, other_ends=ends.also)
    context, context_notice = context_length(model.config)
    notices += [notice for notice in (pad_notice, context_notice, ends_notice(tokenizer, ends)) if notice]
    return LoadedModel(model, tokenizer, ends.appended, pad_id, context, tuple(notices), ends.also)


def embedding_count(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]


def resolve_device(device: torch.device | str) -> torch.device:
    """The device named; "auto" is CUDA where there is one, else MPS, else the CPU."""
    if str(device) == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device {device!r} is no device: use auto, cpu, cuda, cuda:1 or mps") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, and this machine offers no CUDA device: use auto or cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"model.device is {chosen}, and this machine's last one is cuda:{last}: use that, or auto")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("model.device is mps, and this machine offers no MPS device: use auto or cpu")
    return chosen


def choose_pad_id(
    tokenizer: PreTrainedTokenizerBase, end_id: int, embeddings: int, other_ends: Sequence[int] = ()
) -> tuple[int, str | None]:
    """An id to fill padding with, never an end token and always one the model has an embedding for; and what to tell.

    Masks come from lengths, so the choice changes no result; it must only be an id that can be embedded.
    """
    pad, ends = cast("int | None", tokenizer.pad_token_id), {end_id, *other_ends}
    if pad is not None and pad not in ends and pad < embeddings:
        return pad, None
    special = [tokenizer.unk_token_id, *tokenizer.all_special_ids, *range(len(ends) + 1)]
    chosen = next(id for id in special if id is not None and id not in ends and id < embeddings)
    reason = "has no padding token" if pad is None else "pads with its end token"
    if pad is not None and pad not in ends:
        reason = "pads with a token that the model has no embedding for"
    token = tokenizer.convert_ids_to_tokens(chosen)
    return chosen, (
        f"The tokenizer {reason}, so token {chosen} ({token}) fills the padding; "
        "masks come from lengths, so this changes no result."
    )


def check_same_vocabulary(a: LoadedModel, b: LoadedModel, role: str) -> None:
    """Raise where `b`, which plays `role`, would read `a`'s token ids as other text."""
    pairs = {
        "vocabulary size": (len(a.tokenizer), len(b.tokenizer)),
        "end token id": (a.tokenizer.eos_token_id, b.tokenizer.eos_token_id),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ConfigError(
                f"the {role} does not share the policy's vocabulary ({name}: policy {ours}, {role} {theirs}): "
                "choose models of one family, with the same tokenizer"
            )
    if a.tokenizer is not b.tokenizer and a.tokenizer.get_vocab() != b.tokenizer.get_vocab():
        raise ConfigError(
            f"the {role} does not share the policy's vocabulary (equally many tokens, with other ids): "
            "choose models of one family, with the same tokenizer"
        )


def disable_dropout(model: nn.Module) -> None:
    """Take dropout out for good, and leave the model in eval mode.

    Eval mode alone is not enough: gradient checkpointing needs `.train()`, which would turn dropout on again and make
    ratios and KL noise. So the probabilities themselves become 0: of Dropout modules, of floats that functional
    dropout reads (`attention_dropout`, `resid_pdrop`, ...), and in the configs that modules read them from.
    """
    for module in model.modules():
        for holder in (module, *_configs_of(module)):
            for name, value in list(vars(holder).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):  # its `p` has no telling name
            module.p = 0.0
    model.eval()


def train_every_embedding(model: nn.Module) -> None:
    """Give every token's embedding its gradient.

    A checkpoint whose pad token equals its end token has `padding_idx` on the end token, which silently keeps that
    row from training.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def keep_scale(model: PreTrainedModel) -> None:
    """Keep RWKV from halving its own weights.

    From `rescale_every` layers on it divides weights in place when it is evaluated, and multiplies them back for
    training: what is saved after an evaluation would be another model, and quantised weights cannot be divided.
    """
    if getattr(model.config, "rescale_every", 0):
        model.config.rescale_every = 0


def _configs_of(module: nn.Module) -> Iterator[PretrainedConfig]:
    """The module's config and the configs nested in it."""
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig):
        yield config
        yield from (part for part in vars(config).values() if isinstance(part, PretrainedConfig))


def _load_pretrained(
    path: str, dtype: torch.dtype, attention: str, seed: int, fewer_bits: dict[str, Any] | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path {path!r} is a folder without a config.json: name the folder of a saved model"
            )
        check_folder(folder)
        check_not_reward_model(folder)
        return _read(str(folder), dtype, attention, seed, fewer_bits, local=True)
    if folder.is_file():
        raise ConfigError(f"model.path {path!r} is a file: name the folder that holds config.json and the weights")
    if looks_like_path(path):
        raise ConfigError(f"model.path {path!r}: this folder does not exist; correct the path, or use {TINY!r}")
    check_hub_copy(path)
    try:
        return _read(path, dtype, attention, seed, fewer_bits, local=True)
    except (OSError, ValueError):  # not (wholly) in the cache
        ask_hub(path)
        fetch_hub_names(path)
        check_hub_copy(path)
        return _read(path, dtype, attention, seed, fewer_bits, local=False)


def ask_hub(name: str, what: str = "model.path") -> None:
    """Ask the hub once, for a few seconds, whether it has a model; raise in a sentence where it cannot be had.

    Loading itself tries again and again for a minute and more, which is right for a large file and wrong for a typo.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    local = f"no folder {name!r} is here, and it is not in the cache of models"
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except GatedRepoError as error:
        raise ConfigError(
            f"{what} {name!r}: its owner must let you in first: ask on its page, then set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{what} {name!r}: {local}, and the Hugging Face hub has no such model (or a private one: set "
            "HF_TOKEN); check the name"
        ) from error
    except Exception as error:  # no network, a proxy, the hub itself; httpx's errors share no base with requests'
        raise ConfigError(
            f"{what} {name!r}: {local}, and the Hugging Face hub cannot be reached: check the name and the "
            f"network, or give the folder of a saved model ({_first_line(error)})"
        ) from error


def _read(
    path: str, dtype: torch.dtype, attention: str, seed: int, fewer_bits: dict[str, Any] | None, *, local: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    where: dict[str, Any] = {"local_files_only": local}
    try:
        kernels = attention_options(AutoConfig.from_pretrained(path, trust_remote_code=False, **where), attention)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                adapter_kwargs={"local_files_only": local},  # else the network is asked for adapters all the same
                **kernels,
                **where,
                **(fewer_bits or {}),
            )
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # a config or file that somebody made can bring any of a library's errors
        if is_memory(error):
            raise
        if "support an attention implementation" in str(error):
            raise ConfigError(
                f"model.attention is {attention}, by which this model's attention cannot be computed: use auto"
            ) from error
        repair = (
            "the folder must hold the config.json of an architecture that transformers knows, and its weights as "
            "whole .safetensors files"
            if Path(path).is_dir()
            else "no such folder, and the Hugging Face hub did not give it: check the name and the network, "
            "or download the model and give its folder"
        )
        raise ConfigError(f"model.path {path!r} could not be loaded: {repair} ({_first_line(error)})") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model.path {path!r} lacks {len(missing)} weights of a causal language model (first: {missing[0]}), "
            "which would be random: name a model saved with its language-model head"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **where)
    except Exception as error:
        raise ConfigError(
            f"model.path {path!r} has no tokenizer that can be loaded: save one beside the model with "
            f"tokenizer.save_pretrained ({_first_line(error)})"
        ) from error
    unread = len(info["unexpected_keys"])
    return model, tokenizer, [f"{unread} weights in {path} belong to no part of the model."] if unread else []


def attention_options(config: PretrainedConfig, attention: str) -> dict[str, str]:
    """What `from_pretrained` is told of attention kernels; nothing where it may choose sdpa, or eager where it must.

    sdpa has no soft cap on scores. Some releases of transformers refuse it for models that have one, others leave the
    cap out.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if attention == "auto":
        return {"attn_implementation": "eager"} if capped else {}
    if attention == "sdpa" and capped:
        raise ConfigError(
            f"model.attention is sdpa, which would leave out this model's cap of {capped:g} on attention scores: use "
            "auto or eager"
        )
    return {"attn_implementation": attention}


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0][:300]
    known = isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError))
    return text if known and text else f"{type(error).__name__} {text}".strip()


def context_length(config: PretrainedConfig) -> tuple[int, str | None]:
    """How many tokens the model reads at once, and what to tell where it does not say."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length, None
    return NO_LIMIT, "The model states no context length, so the lengths of prompts and answers are not checked."
