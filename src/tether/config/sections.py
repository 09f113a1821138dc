"""Settings that several methods share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tether.config.base import (
    MAX_GROUP,
    MAX_NOTE,
    MAX_TAGS,
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

TOY_TASK = "match-case"  # the task of a recipe that names neither a task nor prompts


class ModelSettings(Settings):
    """Which model, and how it is held."""

    path: str = Field(
        default="tiny-bytes", description="A folder, a Hugging Face id, or tiny-bytes (random, byte-level)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Precision of the weights; auto is bfloat16 on a CUDA device that computes in it, else float32.",
    )
    device: str = Field(default="auto", description="auto picks CUDA, then MPS, then CPU; or name one, such as cuda:1.")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto",
        description="Attention kernels; auto is sdpa where the model's attention can be computed by it, else eager.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Run each layer again in the backward pass: less memory, a third more work."
    )
    quantize: Literal["none", "8bit", "4bit"] = Field(
        default="none", description="Hold the frozen base in fewer bits, through bitsandbytes; for roles.mode lora."
    )


class TaskSettings(Settings):
    """What the policy is asked and how its answers are scored."""

    name: str | None = Field(
        default=None,
        description="A built-in task, reasoning-gym:DATASET, or package.module:factory of a task; where there are no "
        "prompts either, match-case.",
    )
    options: dict[str, Option] = Field(
        default_factory=dict, description="What the task is made with, such as {min_digits: 1, max_digits: 1}."
    )
    prompts: Paths | None = Field(
        default=None,
        description="Your own prompts, in place of name: a file, a glob, a saved dataset's folder, a dataset's id, or "
        "a list of them; see docs/data.md.",
    )
    held_out: Paths | None = Field(
        default=None, description="Prompts for evaluation, never trained on; named as prompts are."
    )
    held_out_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="In place of held_out: this fraction of the prompts is held out."
    )
    split_seed: Count = Field(default=0, description="Which prompts held_out_fraction holds out follows from it.")
    reward: str | None = Field(default=None, description="package.module:function, in place of the task's own reward.")

    @property
    def task_name(self) -> str | None:
        """The named task, or the toy task where nothing is named; None where the prompts are the user's own."""
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
                f"name is {self.name} and prompts is set too, but prompts of your own are a task of their own: remove "
                "task.name (or set it to null), and name a reward in reward.parts or task.reward"
            )
        if self.options:
            raise ValueError("options are for a task that is named, and task.prompts has none: remove task.options")
        if self.held_out is not None and self.held_out_fraction:
            raise ValueError("held_out and held_out_fraction are both set: keep one")
        return self


class RolloutSettings(Settings):
    """How answers are sampled."""

    prompts_per_step: Positive = Field(default=64, description="Prompts in one iteration.")
    samples_per_prompt: Positive = Field(default=1, description="Answers to each prompt; a group, for RLOO and GRPO.")
    max_new_tokens: Positive = Field(default=64, description="An answer is cut off after this many tokens.")
    temperature: float = Field(
        default=1.0, ge=0.01, le=100, description="Of sampling, and of every log-probability in training."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Keep the likeliest tokens up to this mass.")
    top_k: Count = Field(default=0, description="Keep this many likeliest tokens; 0 keeps all.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Tokens that end an answer, beside the end token.")
    max_num_seqs: Positive | Literal["auto"] = Field(
        default="auto",
        description="Answers decoded at once; auto is 64, and on a GPU what its free memory holds, up to 1024.",
    )
    engine: Literal["auto", "transformers"] = Field(
        default="auto", description="auto takes the decoder written for the model where there is one; general never."
    )
    importance_sampling_cap: float | None = Field(
        default=None,
        ge=1,
        description="Weigh each token's policy loss by min(old / behaviour probability, this); null: do not weigh.",
    )


class RewardSettings(Settings):
    """What makes up a score, and what happens to it before it becomes a reward."""

    parts: tuple[RewardPart, ...] = Field(
        default=(), description="A weighted sum of these, in place of the task's own reward; see docs/rewards.md."
    )
    missing_eos_penalty: float | None = Field(
        default=None, description="The score of an answer that never ended, in place of its own."
    )
    clip: PositiveFloat | None = Field(default=None, description="Scores are clamped to [-clip, clip].")
    whiten: bool = Field(default=False, description="Divide per-token rewards by their deviation; the mean is kept.")
    max_failure_rate: Fraction = Field(
        default=0.1,
        description="Stop (exit 5) when more than this fraction of a step's scores is missing or not finite.",
    )
    timeout_seconds: NonNegative = Field(
        default=300.0,
        description="Time limit for one call of Python code in the training process: a reward function (one answer for "
        "text, a whole step for trl and rollouts), a task's own reward, a rule. 0: no limit.",
    )

    @model_validator(mode="after")
    def _names(self) -> RewardSettings:
        check_names(self.parts)
        return self


class KLSettings(Settings):
    """The tether to the reference: the policy before RL."""

    apply_to: Literal["reward", "loss", "none"] = Field(
        default="reward", description="Where the KL to the reference acts."
    )
    coef: NonNegative = Field(default=0.05, description="Its weight at the start.")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k1", description="The per-token estimate.")
    controller: Literal["fixed", "adaptive", "proportional"] = Field(
        default="fixed", description="fixed; adaptive doubles and halves (PPO paper); proportional (RLHF papers)."
    )
    target: PositiveFloat = Field(default=6.0, description="The KL a sequence should keep to; for the two that adapt.")
    horizon: PositiveFloat = Field(
        default=10_000, description="How many samples the proportional controller acts over."
    )

    @model_validator(mode="after")
    def _something_to_adapt(self) -> KLSettings:
        if self.controller != "fixed" and self.coef == 0.0:
            raise ValueError("coef is 0, which no controller can move: start above 0, or use controller: fixed")
        return self


class RolesSettings(Settings):
    """Who shares what."""

    mode: Literal["separate", "lora", "shared_backbone"] = Field(
        default="separate",
        description="Four models; adapters on one frozen base; or top layers on one frozen backbone, run once a row.",
    )
    critic: Literal["head", "separate"] = Field(
        default="separate",
        description="A value head on the policy's backbone, or a critic of its own (in the mode above).",
    )
    critic_init: str | None = Field(
        default=None,
        description="A reward model (a run, or a folder) that a separate critic starts as; by default, the policy.",
    )
    lora_rank: Positive = Field(default=16, description="Rank of the adapters.")
    lora_alpha: PositiveFloat = Field(default=32.0, description="The adapters are scaled by this over their rank.")
    lora_targets: str = Field(default="all-linear", description="all-linear, or layer names with commas between.")
    trainable_layers: Positive = Field(default=4, description="How many layers each role owns in mode shared_backbone.")
    backbone_cache: str | None = Field(
        default=None,
        description="In mode shared_backbone, a folder that keeps the backbone's hidden states of each text for "
        "later runs on the same backbone.",
    )
    offload_reference: bool = Field(
        default=False, description="In mode separate the reference waits in host memory and comes in for its pass."
    )

    @model_validator(mode="after")
    def _a_backbone_to_keep(self) -> RolesSettings:
        if self.backbone_cache is not None and self.mode != "shared_backbone":
            raise ValueError(
                f"backbone_cache is for mode shared_backbone, where a backbone is shared; mode is {self.mode}"
            )
        return self

    @model_validator(mode="after")
    def _a_critic_to_start(self) -> RolesSettings:
        if self.critic_init is not None and self.critic == "head":
            raise ValueError(
                "critic_init is a whole reward model, but critic is head: a head that was trained on the reward "
                "model's layers means nothing on the policy's; set critic to separate, or leave critic_init out"
            )
        return self


class OptimizerSettings(Settings):
    """How gradients become steps."""

    policy_lr: NonNegative = Field(default=1e-5, description="Learning rate of the policy (and of SFT, DPO).")
    critic_lr: NonNegative = Field(default=1e-5, description="Learning rate of the critic (and of the reward model).")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Shape of the rates over the run."
    )
    warmup: Fraction = Field(default=0.0, description="Fraction of the run over which the rates rise from zero.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's decay rates.")
    epsilon: PositiveFloat = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW's weight decay.")
    max_grad_norm: PositiveFloat | None = Field(default=1.0, description="Clip each group's gradient to this norm.")
    micro_batch_tokens: Positive = Field(
        default=8192, description="Padded tokens in one forward and backward; changes memory, never the gradient."
    )
    master_weights: Literal["auto", "fp32", "none"] = Field(
        default="auto",
        description="Step weights in half precision through fp32 copies; auto does, none loses the smallest steps.",
    )
    name: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="AdamW's running means as they are, or in 8 bits: a quarter of the memory."
    )


class RunSettings(Settings):
    """The run itself."""

    name: str | None = Field(default=None, description="The run's folder; by default the method and the time.")
    directory: str = Field(default="runs", description="Where runs are kept.")
    seed: int = Field(default=0, ge=0, description="Everything random follows from it.")
    steps: Positive = Field(default=100, description="Iterations (RL) or optimiser steps (SFT, reward, DPO).")
    save: bool = Field(default=True, description="Save the model at the end.")
    max_skipped: Positive = Field(default=10, description="Stop (exit 4) after this many updates skipped in a row.")
    hang_timeout: NonNegative = Field(
        default=0.0, description="Dump all stacks and end (exit 7) after this long without progress; 0: never."
    )
    memory_check: Literal["error", "warn", "off"] = Field(
        default="error",
        description="Where the plan says that the run does not fit into free memory: refuse, warn, or do not ask.",
    )
    doctor_every: Count = Field(default=5, description="Look for what goes wrong every so many steps; 0: never.")
    note: str | None = Field(
        default=None, max_length=MAX_NOTE, description="A note about the run; Studio can change it later."
    )
    tags: tuple[Tag, ...] = Field(default=(), max_length=MAX_TAGS, description="Tags to find the run by.")
    group: str | None = Field(default=None, max_length=MAX_GROUP, description="The group that the run is listed under.")
    objects: tuple[str, ...] = Field(
        default=(),
        description="Written by the Python API: the objects that were passed to it, such as `reward my_reward`. Only a "
        "Python program that passes them again can resume the run; see docs/python.md.",
    )

    @field_validator("name", "directory", "group")
    @classmethod
    def _shown_as_it_is(cls, text: str | None) -> str | None:
        """Names stand in terminals, logs and pages: none may hold what moves a cursor or hides text."""
        if text is not None and not text.isprintable():
            raise ValueError(f"{text!r:.80} holds characters that cannot be printed, such as control codes")
        return text


class RecordsRunSettings(RunSettings):
    """The run itself."""

    steps: Positive = Field(default=100, description="Optimiser steps; with run.epochs what that comes to.")
    epochs: PositiveFloat | None = Field(
        default=None,
        description="Passes over the training records, in place of run.steps; each record is seen that often.",
    )


class CheckpointSettings(Settings):
    """What a run can be resumed and forked from."""

    every: Count = Field(default=10, description="Steps between two; 0: only when the run stops and at its end.")
    keep: Positive = Field(default=2, description="How many of the newest are kept.")
    keep_every: Count = Field(default=0, description="Those of steps that are multiples of this are kept as well.")


class DistributedSettings(Settings):
    """How several processes (ranks) train together: `tether train ... --nproc 4`, or torchrun."""

    reduction: Literal["exact", "fast"] = Field(
        default="exact",
        description="How gradients of ranks are added: exact in the order of micro-batches, to the same bits for any "
        "number of ranks; fast by one all-reduce, which rounds differently.",
    )
    shard: Literal["none", "full"] = Field(
        default="none",
        description="none: every rank holds all weights; full: FSDP, each rank holds its share of weights, gradients "
        "and optimizer state.",
    )
    rollout_chunk: Count = Field(
        default=0,
        description="Prompts that one rank samples together; 0: rank 0 samples all of a step in one call.",
    )


class StoreSettings(Settings):
    """The run store: metrics, events, and rollouts token by token."""

    url: str | None = Field(
        default=None, description="Of a database, such as postgresql://...; by default tether.db in run.directory."
    )
    rollouts_every: Count = Field(default=1, description="Keep the tokens of every so many iterations; 0: of none.")
    rollouts_keep: Count = Field(default=200, description="Of at most so many iterations, spread out; 0: of all.")
    top_logprobs: Count = Field(
        default=5, description="Tokens that the policy held likeliest, kept beside each sampled one; 0: none."
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(), description="Where metrics go as well."
    )


class EvaluationRules(Settings):
    """When held-out data is looked at, and what follows from it."""

    every: Count = Field(
        default=0, description="Evaluate before the first and after every so many iterations; 0: never."
    )
    keep_best: bool = Field(default=True, description="Keep the model with the best held-out score as best/.")
    patience: Count = Field(
        default=0, description="End the run after this many evaluations in a row without a better one; 0: never."
    )

    @model_validator(mode="after")
    def _something_to_wait_for(self) -> EvaluationRules:
        if self.patience and not self.every:
            raise ValueError("patience counts evaluations, and every is 0: set evaluation.every as well")
        return self


class EvaluationSettings(EvaluationRules):
    """Looking at held-out prompts while training."""

    prompts: Positive = Field(default=64, description="Held-out prompts at the most.")


class RecordsEvaluationSettings(EvaluationRules):
    """Looking at held-out records while training."""

    every: Count = Field(
        default=0,
        description="Evaluate before the first and after every so many steps; 0: after the last, if records are held "
        "out.",
    )
    keep_best: bool = Field(default=True, description="Keep the model with the lowest held-out loss as best/.")
    records: Positive | None = Field(default=None, description="Held-out records at the most; null: all.")


class PreferenceEvaluationSettings(RecordsEvaluationSettings):
    """Looking at held-out preferences while training."""

    keep_best: bool = Field(default=True, description="Keep the model that is best by evaluation.metric as best/.")
    metric: Literal["loss", "accuracy"] = Field(
        default="loss", description="What says which model is best: the lowest loss, or the highest accuracy."
    )


class PromptSettings(ReadSettings):
    """How the records of task.prompts and task.held_out become prompts."""

    max_prompt_length: Positive | None = Field(
        default=None,
        description="Longest prompt in tokens; by default what the model's context leaves beside max_new_tokens.",
    )
    truncate: bool = Field(
        default=False, description="Cut a prompt that is too long at the ends of paragraphs, where that suffices."
    )
    overlong: Literal["drop", "error"] = Field(
        default="drop", description="What happens to a prompt that is too long and is not cut."
    )


class DataSettings(ReadSettings):
    """Training records."""

    train: Paths = Field(
        description="Records: a file (.jsonl, .json, .csv, .parquet), a glob, a saved dataset's folder, a dataset's "
        "id, or a list of them; see docs/data.md."
    )
    held_out: Paths | None = Field(default=None, description="Records for evaluation, never trained on.")
    held_out_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Hold out this part of data.train, by prompt, in place of a file; run.seed says which.",
    )
    max_length: Positive = Field(default=1024, description="Longest row in tokens: prompt, answer and end token.")
    truncate: bool = Field(
        default=True,
        description="Cut a row that is too long at the end of a paragraph.",
    )
    overlong: Literal["drop", "error"] = Field(
        default="error", description="What happens to a row that is too long and is not cut."
    )
    assistant_turns: Literal["last", "all"] = Field(
        default="last", description="In SFT, which of a conversation's assistant turns are trained on."
    )

    @model_validator(mode="after")
    def _held_out_once(self) -> DataSettings:
        if (self.held_out or self.held_out_split) is not None and self.held_out_fraction is not None:
            raise ValueError("held_out names a file and held_out_fraction splits data.train: give one of them")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether there are records to evaluate on."""
        return any(each is not None for each in (self.held_out, self.held_out_split, self.held_out_fraction))


class PenaltySettings(Settings):
    """KL(old || new) as a penalty in the loss (PPO paper, section 4)."""

    coef: NonNegative = Field(default=1.0, description="beta at the start.")
    adaptive: bool = Field(default=True, description="Halve and double beta to keep the KL near the target.")
    target: PositiveFloat = Field(default=0.01, description="KL(old || new) per token that beta aims at.")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="The per-token estimate.")


class AggregationSettings(Settings):
    """What a loss is averaged over."""

    over: Literal["token", "sequence", "fixed"] = Field(
        default="token", description="Tokens, sequences, or a fixed length."
    )
    fixed_length: Positive | None = Field(default=None, description="The length that 'fixed' divides each sequence by.")

    @model_validator(mode="after")
    def _fixed_needs_length(self) -> AggregationSettings:
        if (self.over == "fixed") != (self.fixed_length is not None):
            raise ValueError("fixed_length is needed with over: fixed, and only there")
        return self
