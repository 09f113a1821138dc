"""The Python API: train, look at and use models from a program or a notebook; docs/python.md shows it.

Every function goes through the recipe, the checks and the loop of the command line.
"""

from tether.api.run import Answer, Run, load_run
from tether.api.training import Step, dpo, evaluate, grpo, ppo, reward_model, sft, train_recipe

__all__ = [
    "Answer",
    "Run",
    "Step",
    "dpo",
    "evaluate",
    "grpo",
    "load_run",
    "ppo",
    "reward_model",
    "sft",
    "train_recipe",
]
