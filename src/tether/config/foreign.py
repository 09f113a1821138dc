"""Setting names of other trainers (TRL, transformers, peft), each with Tether's name for it.

Such a name is never accepted, because the meaning often differs (a batch, an epoch). The error names the flag to type,
with the given value where it carries over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True)
class Foreign:
    """Tether's keys for a foreign name; the first one that the method has is used.

    `{method}` in a key is the method's own section. `value` replaces the given value; None keeps it. `note` is an
    additional clause. A name without keys is answered with its note alone.
    """

    keys: tuple[str, ...] = ()
    value: str | None = None
    note: str = ""


def _to(*keys: str, value: str | None = None, note: str = "") -> Foreign:
    return Foreign(keys, value, note)


def _say(note: str) -> Foreign:
    return Foreign(note=note)


_RATE = _to("optimizer.policy_lr", note="the rate of the critic and the reward model is --optimizer.critic_lr")
_BATCH = _to(
    "{method}.batch_size",
    "{method}.minibatch_size",
    note="it counts a whole optimizer step; optimizer.micro_batch_tokens limits the tokens of one forward pass",
)
_EPOCHS = _to("run.epochs", "run.steps")
_FOLDER = _to("run.directory")
_DATA = _to("data.train", "task.prompts")
_RANK = "with --roles.mode lora"
_TRACKER = _to("store.trackers")
_REWARD = "name it in the recipe, as reward: {parts: [...]}, or as --task.reward package.module:function"

FOREIGN: dict[str, Foreign] = {
    # learning rates and schedules
    **dict.fromkeys(("lr", "learning_rate"), _RATE),
    "warmup_ratio": _to("optimizer.warmup"),
    "warmup_steps": _to("optimizer.warmup", value="FRACTION", note="a fraction of the run, not a number of steps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), _to("optimizer.schedule")),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2"), _to("optimizer.betas", value="0.9,0.999", note="both, with a comma between")
    ),
    "adam_epsilon": _to("optimizer.epsilon"),
    "optim": _to("optimizer.name", value="adamw_8bit", note="the optimizer is AdamW, with 32-bit or 8-bit state"),
    # length and sizes
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), _EPOCHS),
    **dict.fromkeys(("max_steps", "steps", "total_steps", "num_total_batches", "iterations"), _to("run.steps")),
    "total_episodes": _to(
        "run.steps", value="N", note="N times rollout.prompts_per_step times rollout.samples_per_prompt episodes"
    ),
    **dict.fromkeys(("per_device_train_batch_size", "batch_size", "train_batch_size"), _BATCH),
    **dict.fromkeys(("mini_batch_size", "num_mini_batches"), _BATCH),
    "gradient_accumulation_steps": _to(
        "optimizer.micro_batch_tokens",
        value="8192",
        note="a step's batch is split automatically into passes of that many tokens, with the same gradient",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_batch_size"),
        _to("optimizer.micro_batch_tokens", value="8192", note="it also splits evaluation batches"),
    ),
    **dict.fromkeys(("num_ppo_epochs", "ppo_epochs", "num_iterations", "mu"), _to("{method}.epochs")),
    **dict.fromkeys(("rollout_batch_size", "local_rollout_forward_batch_size"), _to("rollout.prompts_per_step")),
    # model and data
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "model_id", "pretrained", "sft_model_path", "base_model"),
        _to("model.path"),
    ),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), _say("Tether uses the model's own tokenizer")),
    **dict.fromkeys(("dataset_name", "dataset", "train_file", "train_data", "data_path", "dataset_path"), _DATA),
    **dict.fromkeys(("eval_dataset", "eval_file", "validation_file", "test_file"), _to("data.held_out")),
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "cutoff_len"), _to("data.max_length")),
    **dict.fromkeys(("dataset_train_split", "dataset_split"), _to("data.split")),
    "dataset_test_split": _to("data.held_out_split"),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), _to("data.config")),
    "max_prompt_length": _to("data.max_prompt_length", "data.max_length"),
    **dict.fromkeys(("attn_implementation", "use_flash_attention_2"), _to("model.attention", value="sdpa")),
    **dict.fromkeys(("torch_dtype", "mixed_precision"), _to("model.dtype", value="bfloat16")),
    "bf16": _to("model.dtype", value="bfloat16"),
    "fp16": _to("model.dtype", value="bfloat16", note="float16 is not supported"),
    "fp32": _to("model.dtype", value="float32"),
    "load_in_4bit": _to("model.quantize", value="4bit", note=_RANK),
    "load_in_8bit": _to("model.quantize", value="8bit", note=_RANK),
    "trust_remote_code": _say("Tether never runs code that comes with a model"),
    "device_map": _to("model.device", value="auto"),
    # adapters
    **dict.fromkeys(("use_peft", "use_lora", "lora", "peft"), _to("roles.mode", value="lora")),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), _to("roles.lora_rank", note=_RANK)),
    "lora_alpha": _to("roles.lora_alpha", note=_RANK),
    "lora_dropout": _say("dropout is off in every role, because it would add noise to ratios and KL"),
    **dict.fromkeys(("lora_target_modules", "target_modules"), _to("roles.lora_targets", note=_RANK)),
    # reinforcement learning
    "beta": _to("dpo.beta", "kl.coef"),
    **dict.fromkeys(("kl_coef", "init_kl_coef", "kl_coeff", "kl_penalty_coef"), _to("kl.coef")),
    "adap_kl_ctrl": _to("kl.controller", value="proportional"),
    **dict.fromkeys(("kl_estimator", "kl_penalty"), _to("kl.estimator")),
    "target_kl": _to(
        "{method}.target_kl", "trpo.max_kl", note="the target of the KL controller for the reference is --kl.target"
    ),
    **dict.fromkeys(("cliprange", "clip_eps", "eps_clip"), _to("{method}.clip_range")),
    "epsilon": _to("{method}.clip_range", "optimizer.epsilon"),
    "epsilon_high": _to("{method}.clip_range_high"),
    "cliprange_value": _to("ppo.value_clip"),
    **dict.fromkeys(("vf_coef", "value_loss_coef"), _to("{method}.value_coef")),
    **dict.fromkeys(("ent_coef", "entropy_coeff"), _to("{method}.entropy_coef")),
    **dict.fromkeys(("gae_lambda", "lambda"), _to("{method}.lam")),
    "whiten_rewards": _to("reward.whiten"),
    **dict.fromkeys(("missing_eos_penalty", "non_eos_penalty"), _to("reward.missing_eos_penalty")),
    **dict.fromkeys(
        ("response_length", "max_completion_length", "max_new_tokens", "generate_max_len"),
        _to("rollout.max_new_tokens"),
    ),
    **dict.fromkeys(("num_generations", "rloo_k", "num_return_sequences"), _to("rollout.samples_per_prompt")),
    **dict.fromkeys(("reward_model_path", "reward_model", "reward_pretrain", "reward_funcs"), _say(_REWARD)),
    **dict.fromkeys(("value_model_path", "critic_pretrain"), _to("roles.critic_init")),
    **dict.fromkeys(("ref_model", "ref_model_path", "reference_model"), _to("kl.reference")),
    **dict.fromkeys(("use_vllm", "vllm_mode"), _say("Tether's own engine samples the answers, in this process")),
    # the run
    **dict.fromkeys(("output_dir", "save_path", "ckpt_path"), _FOLDER),
    **dict.fromkeys(("run_name", "exp_name", "experiment_name"), _to("run.name")),
    **dict.fromkeys(("save_steps", "save_freq"), _to("checkpoint.every")),
    **dict.fromkeys(("save_strategy", "save_only_model"), _to("checkpoint.every", value="10")),
    "save_total_limit": _to("checkpoint.keep"),
    "eval_steps": _to("evaluation.every"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "do_eval"), _to("evaluation.every", value="10")),
    "load_best_model_at_end": _to("evaluation.keep_best", note="the best model is in best/ of the run's folder"),
    "metric_for_best_model": _to("evaluation.metric"),
    "early_stopping_patience": _to("evaluation.patience"),
    **dict.fromkeys(("report_to", "log_with", "logger"), _TRACKER),
    **dict.fromkeys(("wandb", "use_wandb"), _to("store.trackers", value="wandb")),
    "tensorboard": _to("store.trackers", value="tensorboard"),
    "wandb_project": _say("set the environment variable WANDB_PROJECT, and --store.trackers wandb"),
    "logging_steps": _say("every step is recorded; `tether show RUN` and --json print them"),
    "logging_dir": _to("run.directory"),
    "resume_from_checkpoint": _say("use --resume auto, or `tether resume RUN`"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), _say("train first; `tether export RUN` exports the model")),
    **dict.fromkeys(("deepspeed", "fsdp", "ddp_backend", "num_processes"), _say("a run is one process on one device")),
    **dict.fromkeys(("packing", "group_by_length"), _say("rows are packed without padding automatically")),
    **dict.fromkeys(("overwrite_output_dir",), _say("a run is never overwritten: choose another --run.name")),
}


def leads_to(name: str, method: str, known: Collection[str]) -> str | None:
    """Tether's key for a foreign name; "" where there is no key to set; None where the name is not known."""
    found = FOREIGN.get(name)
    if found is None:
        return None
    key = next((each for each in (key.format(method=method) for key in found.keys) if each in known), "")
    # The reward model uses the critic's learning rate.
    return "optimizer.critic_lr" if method == "reward" and key == "optimizer.policy_lr" else key


def answer(name: str, method: str, known: Collection[str], given: str | None, dashes: str) -> str:
    """One sentence about a foreign name.

    `known` are the keys that the method has, `given` is the value that was typed, `dashes` is empty for a file.
    """
    found, key = FOREIGN[name], leads_to(name, method, known)
    if not found.keys:
        return found.note
    if not key:
        return f"{method} has no such setting"
    if found is _EPOCHS and key == "run.steps":
        return f"{method} counts iterations, here it is {_written(key, 'N', dashes)}; {_passes(method, known, dashes)}"
    if found is _FOLDER:
        return _output_folder(given, dashes)
    note = (
        "the reward model uses the critic's learning rate" if key not in found.keys and found is _RATE else found.note
    )
    note = note if dashes else note.replace("--", "")
    value = found.value if found.value is not None else given
    return f"here it is {_written(key, value, dashes)}" + (f"; {note}" if note else "")


def _written(key: str, value: str | None, dashes: str) -> str:
    """`--optimizer.policy_lr 1e-5` for a command line, `optimizer: {policy_lr: 1e-5}` for a file."""
    if dashes:
        return f"{dashes}{key}" + (f" {value}" if value not in (None, "") else "")
    *parents, name = key.split(".")
    inner = f"{name}: {value}" if value not in (None, "") else name
    for parent in reversed(parents):
        inner = f"{parent}: {{{inner}}}"
    return inner


def _passes(method: str, known: Collection[str], dashes: str) -> str:
    if f"{method}.epochs" in known:
        return f"passes over each batch of rollouts are {_written(f'{method}.epochs', None, dashes)}"
    return "each batch of rollouts is used once"


def _output_folder(given: str | None, dashes: str) -> str:
    """A run's folder is `run.directory`/`run.name`."""
    path = PurePath(given or "runs/NAME")
    folder, name = (str(path.parent), path.name) if len(path.parts) > 1 else (None, str(path))
    named = _written("run.name", name, dashes)
    if folder is None:
        return f"here it is {named}, in the folder {_written('run.directory', 'runs', dashes)}"
    return f"here it is {_written('run.directory', folder, dashes)} {named}"
