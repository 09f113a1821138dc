"""Making a gymnasium environment, and reading its spaces: what the networks see, and what their outputs mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.config.control_recipe import EnvironmentSettings
from tether.errors import ConfigError, DataError

Array = NDArray[Any]

SUPPORTED = "supported are Box and Discrete spaces"
EXTRA = "pip install 'tether-rl[control]'"


def gymnasium() -> Any:
    """The package, imported when it is needed."""
    try:
        return import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise ConfigError(f"control needs the package {error.name}: {EXTRA}") from None


def make(settings: EnvironmentSettings) -> Any:
    """One copy of the environment."""
    package, name = gymnasium(), settings.id
    limit = {} if settings.max_episode_steps is None else {"max_episode_steps": settings.max_episode_steps}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the papers' versions are older than the newest
            return package.make(name, disable_env_checker=True, **limit, **settings.kwargs)
    except package.error.DependencyNotInstalled as error:
        raise missing(name, error) from None
    except (package.error.UnregisteredEnv, package.error.Error) as error:
        raise ConfigError(f"environment.id: there is no {name}: {near(name, package)}") from error
    except ImportError as error:  # such as MuJoCo's environments of versions 2 and 3, which have moved
        raise ConfigError(f"environment.id: {name} cannot be made ({in_line(error)}): {near(name, package)}") from error
    except Exception as error:  # of the environment's own code, which checks its arguments in its own way
        raise ConfigError(f"environment.kwargs: {name} does not take them ({described(error)})") from error


def failure(name: str, call: str, error: Exception) -> Exception:
    """The error to raise where a call of an environment raised one: a sentence, unless memory ran out."""
    if isinstance(error, MemoryError):
        return error
    if isinstance(error, gymnasium().error.DependencyNotInstalled):
        return missing(name, error)
    return DataError(f"the environment {name} failed in its {call} ({described(error)})")


def missing(name: str, error: Exception) -> ConfigError:
    """The error of an environment that needs a package."""
    extra = EXTRA if "mujoco" in str(error).lower() else "install what its page in gymnasium's documentation names"
    return ConfigError(f"environment.id: {name} needs a missing package ({in_line(error)}): {extra}")


def near(name: str, package: Any) -> str:
    """The registered environments that were most likely meant, each in its newest version."""
    newest: dict[str, str] = {}
    for known in sorted(package.registry, key=_version):
        newest[known.rpartition("-v")[0] or known] = known
    base = name.rpartition("-v")[0] or name
    lowered = {known.lower(): known for known in newest if newest[known] != name}
    found = [newest[lowered[word]] for word in get_close_matches(base.lower(), lowered, n=3, cutoff=0.7)]
    return f"did you mean {' or '.join(found)}?" if found else "`gymnasium.pprint_registry()` lists all"


def _version(name: str) -> int:
    number = name.rpartition("-v")[2]
    return int(number) if number.isdecimal() else -1


def described(error: BaseException) -> str:
    """The error's type and message on one line; the type alone tells what a message such as `'5x5'` is."""
    return f"{type(error).__name__}: {in_line(error)}"


def in_line(error: BaseException) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())


@dataclass(frozen=True)
class Observations:
    """How an observation becomes a vector."""

    size: int
    read: Callable[[Any], Array]


@dataclass(frozen=True)
class Actions:
    """How the policy's output becomes an action.

    `size` is the number of choices of a categorical policy, or of dimensions of a Gaussian one.
    """

    continuous: bool
    size: int
    act: Callable[[Any], Any]  # for the environment, of what was sampled


def observations_of(space: Any, name: str) -> Observations:
    """The reader of an observation space."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Discrete):
        choices, first = int(space.n), int(space.start)

        def one_hot(observation: Any) -> Array:
            row = np.zeros(choices)
            row[int(observation) - first] = 1.0
            return row

        return Observations(choices, one_hot)
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"environment.id: {name} has observations of {kind(space)}: {SUPPORTED}")
    if len(space.shape) > 1 and space.dtype == np.uint8:
        raise ConfigError(
            f"environment.id: {name} shows images {space.shape}, which need a convolutional network: choose an "
            "environment whose observations are vectors"
        )
    return Observations(int(np.prod(space.shape)), lambda observation: np.asarray(observation, np.float64).reshape(-1))


def actions_of(space: Any, name: str) -> Actions:
    """The policy that an action space needs; sampled vectors are clipped to the space's bounds."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return Actions(False, int(space.n), lambda sampled: int(sampled) + first)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(f"environment.id: {name} has actions of {kind(space)}: {SUPPORTED}")
    low, high, shape, dtype = space.low.reshape(-1), space.high.reshape(-1), space.shape, space.dtype

    def clipped(sampled: Any) -> Array:
        return np.minimum(np.maximum(sampled, low), high).astype(dtype, copy=False).reshape(shape)

    return Actions(True, int(np.prod(shape)), clipped)


def kind(space: Any) -> str:
    """A space in words."""
    return f"integers {space.shape}" if type(space).__name__ == "Box" else f"type {type(space).__name__}"
