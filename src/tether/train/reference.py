"""`kl.reference`: the policy that the KL is to, where it is another than this run's at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tether.config.recipes import Recipe, RLRecipe
from tether.errors import ConfigError
from tether.models.backbones import Backbone, OutputLayer
from tether.models.load import LoadedModel, check_same_vocabulary, load_causal_lm
from tether.models.own_loader import OwnLoader
from tether.models.references import adapted_reference, stands_on, whole_reference
from tether.models.save import weights_digest
from tether.models.sharing import Adapters, Sharing
from tether.seeds import derive_seed
from tether.store.find import is_start, reference_path


@dataclass(frozen=True)
class OtherReference:
    """A reference, the longest row that it can read, and the digest of its weights."""

    parts: tuple[Backbone, OutputLayer]
    context_length: int
    digest: str


def check_reference(recipe: Recipe) -> None:
    """Raise ConfigError, before loading, where there is no such model."""
    if isinstance(recipe, RLRecipe):
        is_start(recipe)


def other_reference(
    recipe: RLRecipe, sharing: Sharing, policy: LoadedModel, loader: OwnLoader | None = None
) -> OtherReference | None:
    """The reference that the recipe names; None where it is this run's own policy at its start."""
    if is_start(recipe):
        return None
    path = reference_path(recipe)
    try:
        if isinstance(sharing, Adapters) and stands_on(Path(path), _base_of(sharing)):
            parts = adapted_reference(sharing, Path(path))
            return OtherReference(parts, policy.context_length, _digest(parts))
        loaded = _load(recipe, path, policy.model.device, loader)
        check_same_vocabulary(policy, loaded, "reference")
        parts = whole_reference(sharing, loaded.model)
        return OtherReference(parts, loaded.context_length, _digest(parts))
    except ConfigError as error:
        raise ConfigError(f"kl.reference {recipe.kl.reference}: {error}") from error


def _base_of(sharing: Adapters) -> str:
    return str(getattr(sharing.base.config, "name_or_path", ""))


def _load(recipe: RLRecipe, path: str, device: torch.device, loader: OwnLoader | None) -> LoadedModel:
    settings, adapters = recipe.model, (Path(path).expanduser() / "adapter_config.json").is_file()
    return load_causal_lm(
        path,
        dtype=settings.dtype,
        device=device,
        seed=derive_seed(recipe.run.seed, "model"),
        attention=settings.attention,
        quantize="none" if adapters else settings.quantize,  # adapters are merged, which whole weights allow
        loader=loader,
    )


def _digest(parts: tuple[Backbone, OutputLayer]) -> str:
    return weights_digest(parts[0].model)
