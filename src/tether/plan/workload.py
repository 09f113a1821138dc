"""What one iteration of a recipe computes: the model's shape, rows, tokens, optimizer steps.

The shape comes from the model's config alone: no weights are read or allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tether.algorithms.algorithm import Algorithm
from tether.algorithms.select import build_algorithm
from tether.algorithms.trpo import TrustRegionStep
from tether.config.recipes import DPORecipe, Recipe, RewardRecipe, RLRecipe, SFTRecipe
from tether.data.chat import Encoder, prompt_token_ids
from tether.errors import ConfigError
from tether.hub.catalog import EMBEDDED, cached_model, check_digests, looks_like_path
from tether.hub.folder_check import check_folder, check_model_path
from tether.hub.tiny_model import tiny_model
from tether.models.acceleration import training_unsupported
from tether.models.backbones import layer_list
from tether.models.load import ask_hub
from tether.models.lora import CONFIG as ADAPTER_CONFIG
from tether.models.lora import saved_config
from tether.models.references import stands_on
from tether.store.find import find_model, is_start, reference_path
from tether.types import Prompt

TINY = "tiny-bytes"


@dataclass(frozen=True)
class Shape:
    """Sizes that costs depend on. Counts are of parameters; `linears` are (name, in, out) of one layer's matrices."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    embedding: int
    output: int  # parameters of the output layer; 0 where it is tied to the embedding
    layer: int  # parameters of one layer
    norm: int  # parameters of the rest: the final norm
    linears: tuple[tuple[str, int, int], ...]
    head_norms: bool  # whether queries and keys are normed per head
    packed: bool  # whether the packed pass supports this architecture
    norms: int = 2  # norms of whole states in a layer
    norms_after: bool = False  # whether what attention and the MLP give is normed, as in Gemma 2 and 3 and OLMo 2

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        return self.backbone + self.output

    @property
    def backbone(self) -> int:
        """Parameters without an untied output layer."""
        return self.embedding + self.layers * self.layer + self.norm

    @property
    def queries(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Features of all key heads; values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def products(self) -> int:
        """Numbers in the matrices of all layers, which multiply every token."""
        return self.layers * sum(inputs * outputs for _, inputs, outputs in self.linears)

    def adapters(self, rank: int, targets: str) -> int:
        """Parameters of one role's adapters: rank x (in + out) per adapted layer."""
        named = None if targets == "all-linear" else {name.strip() for name in targets.split(",")}
        sides = sum(a + b for name, a, b in self.linears if named is None or name in named)
        return self.layers * rank * sides

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shape:
        """Read the shape from a model, which may be on the meta device."""
        if getattr(model, "is_quantized", False):  # quantized weights are packed: the config has their shapes
            return replace(shape_of_config(model.config), packed=False)
        config: Any = model.config.get_text_config()
        backbone: Any = model.base_model
        layers = _layers(backbone)
        heads = getattr(config, "num_attention_heads", None) or 1  # a model without attention has none
        embedding = model.get_input_embeddings().weight.numel()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        whole = sum(parameter.numel() for parameter in backbone.parameters())
        layer = sum(parameter.numel() for each in layers for parameter in each.parameters()) // len(layers)
        return cls(
            layers=len(layers),
            hidden=config.hidden_size,
            inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            context=getattr(config, "max_position_embeddings", None) or 0,
            embedding=embedding,
            output=sum(parameter.numel() for parameter in model.parameters()) - whole,
            layer=layer,
            norm=whole - embedding - layer * len(layers),
            linears=_matrices(layers[0]),
            head_norms=any(
                name.endswith(("q_norm.weight", "k_norm.weight")) for name, _ in layers[0].named_parameters()
            ),
            packed=training_unsupported(backbone) is None,
            norms=sum(name.endswith("layernorm") for name, _ in layers[0].named_children()) or 2,
            norms_after=hasattr(layers[0], "post_feedforward_layernorm"),
        )


def _matrices(layer: nn.Module) -> tuple[tuple[str, int, int], ...]:
    """(name, in, out) of every matrix that multiplies tokens; `Conv1D` stores them transposed."""
    found: list[tuple[str, int, int]] = []
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 2:
            owner = name.rpartition(".")[0]
            outputs, inputs = parameter.shape
            if type(layer.get_submodule(owner)).__name__ == "Conv1D":
                outputs, inputs = inputs, outputs
            found.append((owner.rpartition(".")[2], inputs, outputs))
    return tuple(found)


def _layers(backbone: PreTrainedModel) -> list[nn.Module]:
    """The backbone's layers; if they cannot be identified, the whole backbone counts as one."""
    try:
        return list(layer_list(backbone)[1])
    except ConfigError:
        return [backbone]


def shape_of(path: str) -> Shape:
    """The shape of the model that `model.path` names: tiny-bytes, a cached or local folder, or a Hugging Face id."""
    if path == TINY:
        return Shape.of(tiny_model(0))
    return shape_of_config(read_config(path))


def critic_shape_of(recipe: Recipe) -> Shape | None:
    """The shape of a separate critic that starts from another model; None where it has the policy's shape."""
    start = recipe.roles.critic_init
    if start is None or recipe.roles.mode != "separate":
        return None
    try:
        return shape_of_config(read_config(find_model(start)))
    except ConfigError as error:
        raise ConfigError(f"roles.critic_init {start!r} has no readable config: {error}") from error


def reference_shape_of(recipe: Recipe) -> Shape | None:
    """The shape of a reference that is another model; None where it is the policy's start, or adapters on its base."""
    if not isinstance(recipe, RLRecipe) or is_start(recipe):
        return None
    path = reference_path(recipe)
    if recipe.roles.mode == "lora" and stands_on(Path(path), find_model(recipe.model.path)):
        return None
    try:
        return shape_of(path)
    except ConfigError as error:
        raise ConfigError(f"kl.reference {recipe.kl.reference!r} has no readable config: {error}") from error


def shape_of_config(config: PretrainedConfig) -> Shape:
    """The shape that a config describes."""
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return Shape.of(model)
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise ConfigError(f"the model's config is invalid ({type(error).__name__}: {reason})") from error


def read_config(path: str) -> PretrainedConfig:
    """The config at `path`; for adapters, that of their base model. Downloads no weights."""
    if path in EMBEDDED:
        found = cached_model(path)
        if found is None:
            raise ConfigError(f"model.path {path!r} is not in the cache yet: fetch it with `tether models pull {path}`")
        check_digests(found.path, path)
        path = str(found.path)
    check_model_path(path)
    folder = Path(path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        return read_config(str(saved_config(folder).get("base_model_name_or_path") or ""))
    if folder.is_dir():
        check_folder(folder)
    reason = ""
    local = folder.is_dir() or looks_like_path(path)
    for only_local in (True,) if local else (True, False):
        if not only_local:
            ask_hub(path)
        try:
            return AutoConfig.from_pretrained(
                str(folder) if folder.is_dir() else path, local_files_only=only_local, trust_remote_code=False
            )
        except Exception as error:  # an untrusted file can cause any error of a library
            reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    raise ConfigError(
        f"model.path {path!r} has no readable config, which is all that a plan needs: name the folder with its "
        f"config.json, {TINY!r}, or a model's name ({reason})"
    )


ASSUMED_PROMPT = 64  # tokens, where the length is unknown
PROMPTS_LOOKED_AT = 256

Critic = Literal["head", "separate"]


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the prompts (or of whole records), and their source."""

    mean: float
    longest: int
    source: str

    @classmethod
    def of(cls, prompts: Sequence[Prompt], tokenizer: Encoder) -> Lengths:
        """From a sample of the prompts."""
        some = [len(prompt_token_ids(tokenizer, prompt)) for prompt in prompts[:PROMPTS_LOOKED_AT]]
        return cls(sum(some) / len(some), max(some), f"the recipe's prompts, {len(some)} of them")

    @classmethod
    def of_records(cls, recipe: Recipe) -> Lengths:
        """For records that have not been read yet."""
        longest = recipe.data.max_length  # pyright: ignore[reportAttributeAccessIssue]
        return cls.assumed(longest, "data.max_length: every record has the maximum length")

    @classmethod
    def of_rows(cls, lengths: Sequence[int]) -> Lengths:
        """From the lengths of rows that were read."""
        return cls(sum(lengths) / len(lengths), max(lengths), f"the recipe's records, {len(lengths)} rows")

    @classmethod
    def assumed(cls, tokens: int, why: str) -> Lengths:
        """A fixed length, where the real one is unknown."""
        return cls(tokens, tokens, why)


@dataclass(frozen=True)
class Work:
    """One iteration. Every answer is assumed to have the maximum length."""

    rows: int  # sequences trained on
    row_tokens: float  # mean length of a row: prompt and answer
    longest_row: int
    answer_tokens: int  # trained tokens per row
    prompts: int  # read before sampling; 0 where nothing is sampled
    prompt_tokens: float
    epochs: int
    minibatch: int  # rows per optimizer step
    steps: int
    why: str  # an explanation of the steps
    critic: Critic | None
    critic_alone: int  # additional epochs of the critic alone
    reference: bool
    rewards: int  # reward models
    policy: bool  # whether a policy is trained; a reward model's training has none
    other_reference: Shape | None = None  # of a reference that shares no weights with the policy

    @property
    def tokens(self) -> int:
        """Tokens per iteration of training, including prompts."""
        return round(self.rows * self.row_tokens)

    @property
    def sampled(self) -> int:
        """Maximum number of sampled tokens."""
        return self.rows * self.answer_tokens if self.prompts else 0


def work_of(recipe: Recipe, lengths: Lengths, algorithm: Algorithm | None = None) -> Work:
    """What an iteration of this recipe does; `algorithm` is a run's own, by default the one of the recipe's method."""
    if not isinstance(recipe, RLRecipe):
        return _from_records(recipe, lengths)
    work = _from_rollouts(recipe, lengths, algorithm or build_algorithm(recipe))
    if algorithm is None and recipe.algorithm is not None:
        return replace(work, why=f"{work.why} (as {recipe.method}: a plan does not run {recipe.algorithm})")
    return work


def _from_rollouts(recipe: RLRecipe, lengths: Lengths, algorithm: Algorithm) -> Work:
    rollout, passes, minibatch = recipe.rollout, algorithm.passes, algorithm.minibatch_size
    rows = rollout.prompts_per_step * rollout.samples_per_prompt
    each = math.ceil(rows / minibatch)
    alone = _epochs(passes.critic_epochs, minibatch, each)
    if passes.whole_batch:
        steps = passes.epochs + passes.critic_epochs * each
        plural = "s" if passes.epochs > 1 else ""
        kind = "trust-region step" if isinstance(algorithm.update, TrustRegionStep) else "step"
        why = f"{rows} rollouts: {passes.epochs} {kind}{plural} of the policy"
        why += f", then {alone}" if passes.critic_epochs else ""
    else:
        steps = (passes.epochs + passes.critic_epochs) * each
        why = f"{rows} rollouts, {_epochs(passes.epochs, minibatch, each)}"
        why += f", then the critic alone: {alone}" if passes.critic_epochs else ""
    models = [part for part in recipe.reward.parts if part.kind == "model"]
    return Work(
        rows=rows,
        row_tokens=lengths.mean + rollout.max_new_tokens,
        longest_row=lengths.longest + rollout.max_new_tokens,
        answer_tokens=rollout.max_new_tokens,
        prompts=rollout.prompts_per_step,
        prompt_tokens=lengths.mean,
        epochs=passes.epochs,
        minibatch=min(minibatch, rows),
        steps=steps,
        why=why,
        critic=recipe.roles.critic if algorithm.needs_critic else None,
        critic_alone=passes.critic_epochs,
        reference=algorithm.needs_reference,
        rewards=len(models),
        policy=True,
        other_reference=reference_shape_of(recipe) if algorithm.needs_reference else None,
    )


def _epochs(epochs: int, minibatch: int, each: int) -> str:
    plural = "s" if epochs > 1 else ""
    return f"{epochs} epoch{plural}, minibatches of {minibatch}: {epochs * each} step{'s' if epochs * each > 1 else ''}"


def _from_records(recipe: Recipe, lengths: Lengths) -> Work:
    match recipe:
        case SFTRecipe():
            batch, each, what = recipe.sft.batch_size, 1, "demonstrations"
        case RewardRecipe():
            batch, each, what = recipe.reward.batch_size, 2, "ranked prompts of two answers"
        case DPORecipe():
            batch, each, what = recipe.dpo.batch_size, 2, "pairs"
        case _:
            raise ValueError(f"{recipe.method} does not learn from records")
    scores = isinstance(recipe, RewardRecipe)
    return Work(
        rows=batch * each,
        row_tokens=lengths.mean,
        longest_row=lengths.longest,
        answer_tokens=1 if scores else lengths.longest,
        prompts=0,
        prompt_tokens=0.0,
        epochs=1,
        minibatch=batch * each,
        steps=1,
        why=f"{batch} {what}: 1 step",
        critic="separate" if scores else None,  # a reward model costs as much as a critic
        critic_alone=0,
        reference=isinstance(recipe, DPORecipe),
        rewards=0,
        policy=not scores,
    )
