"""The trained policy as two files, and reading it back: `policy.safetensors` and `policy.json`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tether.config.control_recipe import EnvironmentSettings, NetworkSettings
from tether.control.networks import ControlModel, NumpyPolicy
from tether.control.normalizer import ObservationNormalizer
from tether.control.spaces import actions_of, make, observations_of
from tether.control.training import ControlTraining
from tether.errors import DataError
from tether.files import read_plain_json, swap
from tether.store.find import POLICY
from tether.store.folder import write_whole

WEIGHTS, ABOUT = "policy.safetensors", POLICY
LIMIT = 1_000_000  # bytes of policy.json


def save_policy(training: ControlTraining, folder: Path) -> None:
    """Write the policy, the critic and the moments of the observations; the folder appears whole."""
    recipe, moments = training.recipe, training.environments.see.moments
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in training.model.state_dict().items()}
    tensors |= {"observation.mean": torch.tensor(moments.mean), "observation.variance": torch.tensor(moments.variance)}
    save_file(tensors, unfinished / WEIGHTS)
    about = {name: getattr(recipe, name).model_dump(mode="json") for name in ("environment", "network")}
    write_whole(unfinished / ABOUT, about)
    swap(unfinished, folder)


class SavedPolicy:
    """A trained policy: called with an observation of the environment, it returns its most likely action."""

    def __init__(self, folder: str | Path) -> None:
        """`folder` is a run of `tether control`, or its `model` folder."""
        path = Path(folder).expanduser()
        path = path if (path / ABOUT).is_file() else path / "model"
        try:
            about: Any = read_plain_json(path / ABOUT, LIMIT)
            tensors = load_file(path / WEIGHTS)
            self.environment = EnvironmentSettings(**about["environment"])
            network = NetworkSettings(**about["network"] | {"hidden": tuple(about["network"]["hidden"])})
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DataError(f"{path} holds no policy of `tether control` ({error}): name a finished run") from error
        example = make(self.environment)
        self.read = observations_of(example.observation_space, self.environment.id).read
        self.actions = actions_of(example.action_space, self.environment.id)
        self.see = ObservationNormalizer(
            len(tensors["observation.mean"]),
            active=self.environment.normalize_observations,
            limit=self.environment.clip_observations,
        )
        self.see.moments.mean = tensors.pop("observation.mean").numpy()
        self.see.moments.variance = tensors.pop("observation.variance").numpy()
        model = ControlModel(len(self.see.moments.mean), self.actions.size, network, continuous=self.actions.continuous)
        model.load_state_dict(tensors)
        self.policy = NumpyPolicy(model)

    def __call__(self, observation: Any) -> Any:
        """The action for `step` of the environment."""
        seen = self.see(self.read(observation)[None], learn=False)
        return self.actions.act(self.policy.mode(seen)[0])
