"""The peer of the PPO benchmarks: TRL 1.12's PPOTrainer on random weights, timed from log to log.

It runs in an interpreter that has `trl==1.12.0`. It waits for a line on stdin before each iteration, so that both sides
can alternate, and then prints one line of JSON: the seconds of the iteration and of its generation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import trl.experimental.ppo.ppo_trainer as trainer_module  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402

CACHE = Path(os.environ.get("TETHER_CACHE", Path.home() / ".cache" / "tether"))


class Clock(TrainerCallback):
    """Waits before each iteration; at TRL's log, written once per iteration, prints how long it took."""

    def __init__(self) -> None:
        self.generating = 0.0
        generate = trainer_module.batch_generation

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            made = generate(*arguments, **named)
            self.generating += time.perf_counter() - began
            return made

        trainer_module.batch_generation = timed

    def wait(self) -> None:
        """Wait for a line."""
        sys.stdin.readline()
        self.began, self.generating = time.perf_counter(), 0.0

    def on_log(self, *_: Any, **__: Any) -> None:
        """The end of an iteration."""
        print(json.dumps({"seconds": time.perf_counter() - self.began, "rollout": self.generating}), flush=True)
        self.wait()


def main() -> None:
    """Train for a few iterations, one at a time."""
    parser = argparse.ArgumentParser()
    for name in ("batch", "prompt", "response", "epochs", "threads", "iterations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tokenizer", default=str(CACHE / "models" / "smollm2-135m"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    policy, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    reward, value = LlamaForSequenceClassification(config), LlamaForSequenceClassification(config)
    iterations = options.iterations + 1
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 40000, (options.batch * iterations, options.prompt), generator=draws).tolist()
    data: Any = [{"input_ids": row} for row in ids]
    settings = PPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.batch, gradient_accumulation_steps=1,
        total_episodes=options.batch * iterations, num_ppo_epochs=options.epochs, num_mini_batches=1,
        response_length=options.response, local_rollout_forward_batch_size=options.batch, num_sample_generations=0,
        learning_rate=1e-6, report_to=[], bf16=False, use_cpu=True, missing_eos_penalty=1.0, stop_token="eos",
        save_strategy="no", gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip
    clock = Clock()
    trainer = PPOTrainer(
        args=settings, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=value, train_dataset=data, eval_dataset=data[:4], callbacks=[clock],
    )  # fmt: skip
    clock.wait()
    trainer.train()


if __name__ == "__main__":
    main()
