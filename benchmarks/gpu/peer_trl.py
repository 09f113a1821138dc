"""The peer of the PPO benchmark on a GPU: TRL 1.12's PPOTrainer on random weights, timed from log to log.

It runs in an interpreter that has `trl==1.12.0` (or with its packages' folder on PYTHONPATH), with any tokenizer of
49,152 tokens. It prints one line of JSON: the seconds of each iteration and of its generation, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl.experimental.ppo.ppo_trainer as trainer_module  # noqa: E402
from shapes import SHAPES  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402


def now() -> float:
    """The time, after the device has finished all its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    """Records the time at each log, which TRL writes once per iteration, and the time of generation until then."""

    def __init__(self) -> None:
        self.stamps = [now()]
        self.generating = [0.0]
        generate = trainer_module.batch_generation

        def timed(*arguments: Any, **named: Any) -> Any:
            began = now()
            made = generate(*arguments, **named)
            self.generating[-1] += now() - began
            return made

        trainer_module.batch_generation = timed

    def on_log(self, *_: Any, **__: Any) -> None:
        """The end of an iteration."""
        self.stamps.append(now())
        self.generating.append(0.0)


def trainer(options: argparse.Namespace, clock: Clock) -> Any:
    """TRL's trainer for four models of the shape, in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"
    shape = SHAPES[options.shape]
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096, tie_word_embeddings=True, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        policy, reference = (LlamaForCausalLM(config).to(torch.bfloat16) for _ in range(2))
        reward, value = (LlamaForSequenceClassification(config).to(torch.bfloat16) for _ in range(2))
    count = options.prompts * (options.iterations + 1)
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 40000, (count, options.prompt), generator=draws).tolist()
    data: Any = [{"input_ids": row} for row in ids]
    settings = PPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.prompts // options.micro, total_episodes=count,
        num_ppo_epochs=options.epochs, num_mini_batches=1, response_length=options.new,
        local_rollout_forward_batch_size=64, num_sample_generations=0, learning_rate=1e-6, report_to=[], bf16=True,
        missing_eos_penalty=1.0, stop_token="eos", save_strategy="no", gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip
    return PPOTrainer(
        args=settings, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=value, train_dataset=data, eval_dataset=data[:4], callbacks=[clock],
    )  # fmt: skip


def main() -> None:
    """Train for a few iterations after one warm-up, and print the time of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="1b", choices=["135m", "360m", "1b"])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--micro", type=int, default=32, help="rows per forward and backward pass")
    for name, value in (("prompts", 256), ("prompt", 128), ("new", 128), ("epochs", 4), ("iterations", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    clock = Clock()
    training = trainer(options, clock)
    torch.cuda.reset_peak_memory_stats()
    clock.stamps = [now()]
    training.train()
    seconds = [after - before for before, after in zip(clock.stamps, clock.stamps[1:], strict=False)]
    counted = range(1, len(seconds))
    best = min(counted, key=seconds.__getitem__)
    found = {"shape": options.shape, "all": [seconds[index] for index in counted], "whole": seconds[best]}
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(found | {"rollout": clock.generating[best], "peak": peak}))


if __name__ == "__main__":
    main()
