"""Tether: PPO for language models, with every formula tested against an independent oracle.

Every update is tethered to the policy that sampled the data (the clip), and the whole run is tethered to the model
it started from (the KL). Start with `tether.train.rl`, which reads like the paper's pseudo-code.

The Python API stands in `tether.api` and is imported when it is first used, so that `import tether` needs no torch:

    import tether
    run = tether.ppo("smollm2-135m", prompts, reward=my_function, steps=20)
"""

# Nothing is imported here: `python -m tether` reads this file while the working folder is still on the search path,
# where a file `typing.py` would run. Type checkers take the constant for typing's.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from tether.api import (
        Answer,
        Run,
        Step,
        Sweep,
        dpo,
        evaluate,
        grpo,
        load_run,
        ppo,
        reward_model,
        sft,
        sweep,
        train_recipe,
    )
    from tether.errors import ConfigError, DataError, Stopped, TetherError

__version__ = "0.2.0"

__all__ = [
    "Answer",
    "ConfigError",
    "DataError",
    "Run",
    "Step",
    "Stopped",
    "Sweep",
    "TetherError",
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

_ERRORS = {"ConfigError", "DataError", "Stopped", "TetherError"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("tether.errors" if name in _ERRORS else "tether.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
