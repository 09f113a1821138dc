"""Settings that several methods share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tether.config.base import (
    MAX_GROUP,
    MAX_NOTE,
    MAX_TAGS,
    CodeReference,
    Count,
    Fraction,
    NonNegative,
    Option,
    Paths,
    Positive,
    PositiveFloat,
    ReadSettings,
    Settings,
    Tag,
)
from tether.config.rewards import RewardPart, check_names
from tether.config.rollout_workers import WorkerSettings

TOY_TASK = "match-case"  # used when a recipe names neither a task nor prompts


class ModelSettings(Settings):
    """Which model to load, and how."""

    path: str = Field(
        default="tiny-bytes", description="A folder, a Hugging Face id, or tiny-bytes (random, byte-level)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Precision of the weights; auto is bfloat16 on a CUDA device that supports it, else float32.",
    )
    device: str = Field(default="auto", description="auto picks CUDA, then MPS, then CPU; or name one, such as cuda:1.")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto",
        description="Attention implementation; auto is sdpa where the model supports it, else eager.",
    )
    numerics: Literal["fast", "exact"] = Field(
        default="fast",
        description="exact: the sampler's log-probs are to the bit what training computes, on a CPU in float32; fast: "
        "they agree within rounding. See docs/exact-numerics.md.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute each layer in the backward pass: less memory, a third more compute."
    )
    quantize: Literal["none", "8bit", "4bit"] = Field(
        default="none", description="Quantize the frozen base with bitsandbytes; for roles.mode lora."
    )
    loader: CodeReference | None = Field(
        default=None,
        description="Your own function that loads model.path and returns (model, tokenizer); see docs/extending.md.",
    )


class TaskSettings(Settings):
    """The prompts and the reward."""

    name: str | None = Field(
        default=None,
        description="A built-in task, reasoning-gym:DATASET, or package.module:factory of a task; without prompts it "
        "defaults to match-case.",
    )
    options: dict[str, Option] = Field(
        default_factory=dict, description="Arguments of the task, such as {min_digits: 1, max_digits: 1}."
    )
    prompts: Paths | None = Field(
        default=None,
        description="Your own prompts, in place of name: a file, a glob, a saved dataset folder, a dataset id, or a "
        "list of them; see docs/data.md.",
    )
    held_out: Paths | None = Field(
        default=None, description="Prompts for evaluation, never trained on; same forms as prompts."
    )
    held_out_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Fraction of the prompts to hold out, in place of held_out."
    )
    split_seed: Count = Field(default=0, description="Seed that selects the prompts of held_out_fraction.")
    reward: str | None = Field(default=None, description="package.module:function, in place of the task's own reward.")

    @property
    def task_name(self) -> str | None:
        """The named task, or the toy task where nothing is named; None for the user's own prompts."""
        return self.name if self.name is not None or self.prompts is not None else TOY_TASK

    @model_validator(mode="after")
    def _one_source(self) -> TaskSettings:
        if self.prompts is None:
            if self.held_out is not None or self.held_out_fraction:
                raise ValueError(
                    "held_out and held_out_fraction go with task.prompts: a named task holds out its own prompts"
                )
            return self
        if self.name is not None:
            raise ValueError(
                f"name is {self.name} and prompts is set too, but a recipe takes one of them: remove task.name (or set "
                "it to null), and name a reward in reward.parts or task.reward"
            )
        if self.options:
            raise ValueError("options are for a named task, and task.prompts has none: remove task.options")
        if self.held_out is not None and self.held_out_fraction:
            raise ValueError("held_out and held_out_fraction are both set: keep one")
        return self


class RolloutSettings(WorkerSettings):
    """How answers are sampled."""

    prompts_per_step: Positive = Field(default=64, description="Prompts per iteration.")
    samples_per_prompt: Positive = Field(default=1, description="Answers to each prompt; a group, for RLOO and GRPO.")
    dynamic_sampling_rounds: Count = Field(
        default=0,
        description="Dynamic sampling (DAPO): at most this many further rounds in an iteration sample other prompts in "
        "place of those whose answers all have one score; 0: none.",
    )
    max_new_tokens: Positive = Field(default=64, description="Maximum length of an answer; longer ones are truncated.")
    temperature: float = Field(
        default=1.0, ge=0.01, le=100, description="Sampling temperature; training log-probs use it too."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Sample from the most probable tokens up to this mass.")
    top_k: Count = Field(default=0, description="Sample from this many most probable tokens; 0 keeps all.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Tokens that end an answer, beside the end token.")
    max_num_seqs: Positive | Literal["auto"] = Field(
        default="auto",
        description="Answers decoded at once; auto is 64, or on a GPU what fits its free memory, up to 1024.",
    )
    engine: Literal["auto", "transformers", "vllm"] | CodeReference = Field(
        default="auto",
        description="auto: the model's fast decoder if there is one; transformers: never use it; vllm: the servers in "
        "rollout.servers; or your own function from the policy to an engine (docs/extending.md).",
    )
    importance_sampling_cap: float | None = Field(
        default=None,
        ge=1,
        description="Weight each token's policy loss by min(old / behavior probability, cap); null: no weights.",
    )
    lag: Count = Field(
        default=0,
        description="Asynchronous training: the answers of a step are sampled by the policy of this many steps before; "
        "see docs/asynchronous.md.",
    )
    importance_sampling: Literal["token", "sequence", "masked"] = Field(
        default="token",
        description="What the cap is for: token, each token's weight; sequence, that of whole answers; masked, tokens "
        "whose weight is above the cap or below 1 / cap are left out.",
    )


class RewardSettings(Settings):
    """The parts of a score, and its processing before it becomes a reward."""

    parts: tuple[RewardPart, ...] = Field(
        default=(), description="Parts whose weighted sum replaces the task's own reward; see docs/rewards.md."
    )
    missing_eos_penalty: float | None = Field(
        default=None, description="Score of an answer without an end token, in place of its own."
    )
    clip: PositiveFloat | None = Field(default=None, description="Scores are clamped to [-clip, clip].")
    overlong_buffer: Positive | None = Field(
        default=None,
        description="Tokens before rollout.max_new_tokens over which a penalty on the score grows (DAPO); null: none.",
    )
    overlong_penalty: PositiveFloat = Field(
        default=1.0, description="Subtracted from the score of an answer of max_new_tokens, for overlong_buffer."
    )
    whiten: bool = Field(default=False, description="Divide per-token rewards by their deviation; keeps the mean.")
    max_failure_rate: Fraction = Field(
        default=0.1,
        description="Stop (exit 5) when more than this fraction of a step's scores is missing or not finite.",
    )
    timeout_seconds: NonNegative = Field(
        default=300.0,
        description="Time limit for one call of Python code in the training process: a reward function (one answer for "
        "text, a whole step for trl and rollouts), a task's own reward, a rule. 0 disables the limit.",
    )

    @model_validator(mode="after")
    def _names(self) -> RewardSettings:
        check_names(self.parts)
        return self


class RolesSettings(Settings):
    """Which models the roles use, and what they share."""

    mode: Literal["separate", "lora", "shared_backbone"] = Field(
        default="separate",
        description="Separate models; LoRA adapters on one frozen base; or top layers on one frozen shared backbone.",
    )
    critic: Literal["head", "separate"] = Field(
        default="separate",
        description="A value head on the policy's backbone, or a separate critic (in the mode above).",
    )
    critic_init: str | None = Field(
        default=None,
        description="A reward model (a run, or a folder) to initialize a separate critic from; default: the policy.",
    )
    lora_rank: Positive = Field(default=16, description="Rank of the adapters.")
    lora_alpha: PositiveFloat = Field(default=32.0, description="The adapters are scaled by lora_alpha / lora_rank.")
    lora_targets: str = Field(default="all-linear", description="all-linear, or comma-separated layer names.")
    trainable_layers: Positive = Field(default=4, description="Layers that each role owns in mode shared_backbone.")
    backbone_cache: str | None = Field(
        default=None,
        description="In mode shared_backbone: a folder that caches the backbone's hidden states of each text, for "
        "later runs on the same backbone.",
    )
    offload_reference: bool = Field(
        default=False, description="In mode separate: keep the reference in CPU memory between its passes."
    )

    @model_validator(mode="after")
    def _a_backbone_to_keep(self) -> RolesSettings:
        if self.backbone_cache is not None and self.mode != "shared_backbone":
            raise ValueError(
                f"backbone_cache is for mode shared_backbone; mode is {self.mode}: set roles.mode, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _a_critic_to_start(self) -> RolesSettings:
        if self.critic_init is not None and self.critic == "head":
            raise ValueError(
                "critic_init is a whole reward model, but critic is head: a head trained on the reward model's layers "
                "does not fit the policy's; set critic to separate, or remove critic_init"
            )
        return self


class OptimizerSettings(Settings):
    """The optimizer and its learning rates."""

    policy_lr: NonNegative = Field(default=1e-5, description="Learning rate of the policy (and of SFT, DPO).")
    critic_lr: NonNegative = Field(default=1e-5, description="Learning rate of the critic (and of the reward model).")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Learning rate schedule.")
    warmup: Fraction = Field(default=0.0, description="Fraction of the run over which the rates rise from zero.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW betas.")
    epsilon: PositiveFloat = Field(default=1e-8, description="AdamW epsilon.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW weight decay.")
    max_grad_norm: PositiveFloat | None = Field(default=1.0, description="Clip each group's gradient to this norm.")
    micro_batch_tokens: Positive = Field(
        default=8192, description="Padded tokens per forward and backward pass; affects memory, not the gradient."
    )
    master_weights: Literal["auto", "fp32", "none"] = Field(
        default="auto",
        description="Float32 copies of half-precision weights; auto keeps them, none loses the smallest updates.",
    )
    name: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="AdamW with 32-bit moments, or with 8-bit moments (a quarter of the memory)."
    )


class RunSettings(Settings):
    """General settings of the run."""

    name: str | None = Field(default=None, description="Name of the run's folder; default: the method and the time.")
    directory: str = Field(default="runs", description="Parent folder of all runs.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random.")
    steps: Positive = Field(default=100, description="Iterations (RL) or optimizer steps (SFT, reward, DPO).")
    save: bool = Field(default=True, description="Save the model at the end.")
    max_skipped: Positive = Field(default=10, description="Stop (exit 4) after this many updates skipped in a row.")
    hang_timeout: NonNegative = Field(
        default=0.0, description="Dump all stacks and stop (exit 7) after this long without progress; 0 disables it."
    )
    memory_check: Literal["error", "warn", "off"] = Field(
        default="error",
        description="If the planned memory exceeds the free memory: refuse, warn, or skip the check.",
    )
    doctor_every: Count = Field(default=5, description="Run the doctor every this many steps; 0 disables it.")
    doctor_rules: tuple[CodeReference, ...] = Field(
        default=(), description="Your own rules for the doctor, beside the shipped ones; see docs/extending.md."
    )
    note: str | None = Field(
        default=None, max_length=MAX_NOTE, description="A note about the run; Studio can change it later."
    )
    tags: tuple[Tag, ...] = Field(default=(), max_length=MAX_TAGS, description="Tags to find the run by.")
    group: str | None = Field(default=None, max_length=MAX_GROUP, description="Group under which the run is listed.")
    objects: tuple[str, ...] = Field(
        default=(),
        description="Written by the Python API: the objects that were passed to it, such as `reward my_reward`. Only a "
        "Python program that passes them again can resume the run; see docs/python.md.",
    )

    @field_validator("name", "directory", "group")
    @classmethod
    def _shown_as_it_is(cls, text: str | None) -> str | None:
        """Reject names with control characters: they appear in terminals, logs and pages."""
        if text is not None and not text.isprintable():
            raise ValueError(f"{text!r:.80} contains characters that cannot be printed, such as control codes")
        return text


class RecordsRunSettings(RunSettings):
    """General settings of the run."""

    steps: Positive = Field(default=100, description="Optimizer steps; computed if run.epochs is set.")
    epochs: PositiveFloat | None = Field(
        default=None,
        description="Passes over the training records, in place of run.steps.",
    )


class CheckpointSettings(Settings):
    """Checkpoints to resume and fork from."""

    every: Count = Field(default=10, description="Steps between checkpoints; 0: only when the run stops or ends.")
    keep: Positive = Field(default=2, description="Number of newest checkpoints to keep.")
    keep_every: Count = Field(default=0, description="Also keep checkpoints at multiples of this step.")


class DistributedSettings(Settings):
    """How several processes (ranks) train together: `tether train ... --nproc 4`, or torchrun."""

    reduction: Literal["exact", "fast"] = Field(
        default="exact",
        description="How gradients of ranks are added: exact in the order of micro-batches, to the same bits for any "
        "number of ranks; fast by one all-reduce, which rounds differently.",
    )
    shard: Literal["none", "full", "hybrid"] = Field(
        default="none",
        description="none: every rank holds all weights; full: FSDP, each rank holds its share of weights, gradients "
        "and optimizer state; hybrid: the same within groups of shard_ranks, each of which holds a copy.",
    )
    shard_ranks: Count = Field(
        default=0, description="With shard: hybrid, ranks that share one copy of the weights; 0: those of one machine."
    )
    rollout_chunk: Count = Field(
        default=0,
        description="Prompts that one rank samples together; 0: rank 0 samples all of a step in one call.",
    )
    timeout: NonNegative = Field(
        default=300.0,
        description="Seconds without an answer after which a rank counts as lost; 0 waits forever.",
    )

    @model_validator(mode="after")
    def _groups_to_share_in(self) -> DistributedSettings:
        if self.shard_ranks and self.shard != "hybrid":
            raise ValueError(f"shard_ranks is for shard: hybrid, and shard is {self.shard}: leave shard_ranks out")
        return self

    def sharing(self, ranks: int, on_machine: int) -> int:
        """How many of `ranks` ranks share one copy of the weights; `on_machine` is how many ranks a machine has.

        Ranks that cannot be divided into such groups all share one copy: that needs the least memory.
        """
        if self.shard == "none":
            return 1
        wanted = (self.shard_ranks or on_machine) if self.shard == "hybrid" else ranks
        return wanted if ranks % wanted == 0 else ranks


class StoreSettings(Settings):
    """The run store: metrics, events, and rollouts token by token."""

    url: str | None = Field(
        default=None, description="Database URL, such as postgresql://...; default: tether.db in run.directory."
    )
    rollouts_every: Count = Field(default=1, description="Keep the tokens of every Nth iteration; 0 keeps none.")
    rollouts_keep: Count = Field(default=200, description="Maximum number of iterations kept, evenly spaced; 0: all.")
    top_logprobs: Count = Field(
        default=5, description="Number of most probable tokens to store beside each sampled one; 0 stores none."
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"] | CodeReference, ...] = Field(
        default=(), description="Trackers that also receive the metrics, or your own class (docs/extending.md)."
    )


class PromptSettings(ReadSettings):
    """How the records of task.prompts and task.held_out become prompts."""

    max_prompt_length: Positive | None = Field(
        default=None,
        description="Maximum prompt length in tokens; default: the model's context minus max_new_tokens.",
    )
    truncate: bool = Field(
        default=False, description="Cut a prompt that is too long at paragraph ends, where that is enough."
    )
    overlong: Literal["drop", "error"] = Field(
        default="drop", description="What to do with a prompt that is too long and not cut."
    )


class DataSettings(ReadSettings):
    """Training records."""

    train: Paths = Field(
        description="Records: a file (.jsonl, .json, .csv, .parquet), a glob, a saved dataset folder, a dataset id, or "
        "a list of them; see docs/data.md."
    )
    held_out: Paths | None = Field(default=None, description="Records for evaluation, never trained on.")
    held_out_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of data.train to hold out, by prompt, in place of held_out; run.seed selects it.",
    )
    max_length: Positive = Field(default=1024, description="Maximum row length in tokens: prompt, answer, end token.")
    truncate: bool = Field(
        default=True,
        description="Cut a row that is too long at a paragraph end.",
    )
    overlong: Literal["drop", "error"] = Field(
        default="error", description="What to do with a row that is too long and not cut."
    )
    assistant_turns: Literal["last", "all"] = Field(
        default="last", description="SFT: which assistant turns of a conversation are trained on."
    )

    @model_validator(mode="after")
    def _held_out_once(self) -> DataSettings:
        if (self.held_out or self.held_out_split) is not None and self.held_out_fraction is not None:
            raise ValueError("held_out names a file and held_out_fraction splits data.train: set one of them")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether there are records to evaluate on."""
        return any(each is not None for each in (self.held_out, self.held_out_split, self.held_out_fraction))


class PenaltySettings(Settings):
    """KL(old || new) as a penalty in the loss (PPO paper, section 4)."""

    coef: NonNegative = Field(default=1.0, description="Initial beta.")
    adaptive: bool = Field(default=True, description="Halve and double beta to keep the KL near the target.")
    target: PositiveFloat = Field(default=0.01, description="Target KL(old || new) per token.")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="Per-token estimator of the KL.")


class AggregationSettings(Settings):
    """What a loss is averaged over."""

    over: Literal["token", "sequence", "fixed"] = Field(
        default="token", description="Average over tokens, sequences, or a fixed length."
    )
    fixed_length: Positive | None = Field(default=None, description="With over: fixed, the length to divide by.")

    @model_validator(mode="after")
    def _fixed_needs_length(self) -> AggregationSettings:
        if (self.over == "fixed") != (self.fixed_length is not None):
            raise ValueError("fixed_length must be set with over: fixed, and only there")
        return self
