"""The Python API: train, inspect and use models from a program or a notebook. See docs/python.md.

Every function uses the same recipe, checks and loop as the command line.
"""

from tether.api.run import Answer, Run, load_run
from tether.api.sweeping import Sweep, sweep
from tether.api.training import Step, dpo, evaluate, grpo, ppo, reward_model, sft, train_recipe

__all__ = [
    "Answer",
    "Run",
    "Step",
    "Sweep",
    "dpo",
    "evaluate",
    "grpo",
    "load_run",
    "ppo",
    "reward_model",
    "sft",
    "sweep",
    "train_recipe",
]
