"""An algorithm of your own, without a trainer: `python examples/custom_algorithm.py`.

An algorithm is a value. This one is GRPO with another advantage: an answer's reward minus the median of its group.
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor

import tether
from tether.algorithms.algorithm import Algorithm


class MedianAdvantage:
    """The reward of an answer minus the median reward of the answers to the same prompt, on each of its tokens."""

    def __call__(self, rewards: Tensor, mask: Tensor, *, group_ids: Tensor, **_: object) -> tuple[Tensor, None]:
        """`(advantages, returns)`; without a critic there are no returns."""
        totals = rewards.sum(dim=1)  # (B,)
        medians = torch.stack([totals[group_ids == group].median() for group in group_ids])
        return (totals - medians)[:, None] * mask, None


def with_median(grpo: Algorithm) -> Algorithm:
    """GRPO as the recipe builds it, with the other advantage."""
    return replace(grpo, name="median-grpo", estimator=MedianAdvantage())


def few_commas(completion: str) -> float:
    """Likes answers without commas."""
    return -float(completion.count(","))


def main() -> None:
    """Train with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a name, a folder or a Hugging Face id")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    run = tether.grpo(
        options.model,
        ["List some fruits.", "Name the colours of a rainbow.", "List three countries.", "Name some animals."],
        reward=few_commas,
        algorithm=with_median,
        steps=options.steps,
        settings={"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": 32},
    )
    print(run.metrics[["score", "response_length"]])
    print(run.settings["run"]["objects"])


if __name__ == "__main__":
    main()
