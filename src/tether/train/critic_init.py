"""The reward model that a critic starts as (`roles.critic_init`): found, checked and loaded."""

from __future__ import annotations

from pathlib import Path

from tether.config.recipes import Recipe
from tether.errors import ConfigError, TetherError
from tether.files import check_saved
from tether.models.heads import ScalarModel
from tether.models.load import LoadedModel, check_same_vocabulary
from tether.models.lora import CONFIG
from tether.models.roles import Sharing
from tether.rewards.model import load_vocabulary
from tether.store.find import find_model

FIELD = "roles.critic_init"


def check_critic_start(recipe: Recipe) -> None:
    """Refuse, before anything is loaded, a folder that holds no model or one of another mode."""
    start, mode = recipe.roles.critic_init, recipe.roles.mode
    if start is None:
        return
    folder = critic_folder(start)
    adapters = (folder / CONFIG).is_file()
    if not adapters and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{FIELD}: {start} holds no saved reward model: name a run of `tether train reward`, or the folder with "
            "its config.json"
        )
    if adapters != (mode == "lora"):
        what, repair = ("adapters", "lora") if adapters else ("a whole model", "separate or shared_backbone")
        raise ConfigError(
            f"{FIELD}: {start} holds {what}, but roles.mode is {mode}: set roles.mode to {repair}, or train the reward "
            f"model with roles.mode {mode}"
        )


def critic_folder(start: str) -> Path:
    """The folder that `roles.critic_init` names, be it a run's own or its model's."""
    try:
        return Path(find_model(start)).expanduser()
    except TetherError as error:
        raise ConfigError(
            f"{FIELD}: {start} holds no saved reward model ({error}): name a run of `tether train reward`, or the "
            "folder with its config.json"
        ) from None


def load_critic(start: str, sharing: Sharing, policy: LoadedModel) -> tuple[ScalarModel, int]:
    """The critic, and the longest row that it can read.

    It reads the policy's token ids, so it must have the policy's vocabulary. In mode separate it may be a model of any
    size; in the other modes it stands on the policy's own base, and is refused where it was trained on another.
    """
    folder = critic_folder(start)
    try:
        critic = sharing.load_scalar(folder, "critic")
        vocabulary = load_vocabulary(folder, critic.backbone.model)
        check_same_vocabulary(policy, vocabulary, "critic")
    except ConfigError as error:
        raise ConfigError(f"{FIELD}: {error}") from error
    check_saved(folder)  # last: what cannot be a critic at all is said in words of its own
    return critic, vocabulary.context_length
