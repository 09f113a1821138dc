"""The engine that a recipe asks for: in this process, or a pool of workers."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

import torch

from tether.config.recipes import RLRecipe
from tether.errors import ConfigError
from tether.models.load import LoadedModel
from tether.models.sharing import Sharing
from tether.protocols import RolloutEngine
from tether.redact import remember_secret
from tether.rollout.chunks import in_chunks
from tether.rollout.messages import ModelToLoad
from tether.rollout.native import NativeEngine
from tether.rollout.native_worker import LocalWorker, NativeWorker
from tether.rollout.rollout_pool import RolloutPool
from tether.rollout.vllm_worker import VllmWorker
from tether.rollout.weights import PolicyWeights, Snapshots
from tether.seeds import derive_seed

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the folder made there is this user's alone)
_pools: weakref.WeakSet[OwnedPool] = weakref.WeakSet()


def build_engine(
    recipe: RLRecipe, policy: LoadedModel, sharing: Sharing, own: RolloutEngine | None = None
) -> RolloutEngine:
    """The engine for this policy; `own` is the user's."""
    rollout, chunk = recipe.rollout, recipe.distributed.rollout_chunk
    if own is None and rollout.samples_elsewhere:
        return build_pool(recipe, policy)
    general = rollout.engine == "transformers"
    native = own or NativeEngine(
        policy,
        max_num_seqs=rollout.max_num_seqs,
        # What is sampled ahead trains in a later step, and the shared backbone forgets between steps.
        states_for=None if rollout.lag else sharing.shared,
        general=general,
        exact=recipe.model.numerics == "exact",
    )
    return in_chunks(native, chunk)


def build_pool(recipe: RLRecipe, policy: LoadedModel) -> RolloutPool:
    """A pool with the workers that the recipe starts and those that it names."""
    rollout = recipe.rollout
    model = model_to_load(recipe, policy)
    token = token_of(rollout.token_env) if rollout.servers else secrets.token_urlsafe(32)
    pool = OwnedPool(recipe, policy)
    for number in range(rollout.workers):
        pool.add(LocalWorker(number, secrets.token_urlsafe(32), model, rollout.worker_timeout, pool.folder))
    for url in rollout.servers:
        if rollout.engine == "vllm":
            pool.add(VllmWorker(url, token, policy, rollout.worker_timeout, pool.folder))
        else:
            pool.add(NativeWorker(url, token, model, rollout.worker_timeout))
    return pool


class OwnedPool(RolloutPool):
    """The pool of a run, with a folder for the weights on their way: in shared memory where there is some."""

    def __init__(self, recipe: RLRecipe, policy: LoadedModel) -> None:
        weights = PolicyWeights(policy.model)
        size = sum(each.numel() * each.element_size() for each in weights.trained.values())
        named = recipe.rollout.weights_dir
        place = Path(named).expanduser().resolve() if named else _place(3 * size)
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="tether-weights-", dir=place))
        super().__init__(
            Snapshots(weights, self.folder),
            policy.tokenizer,
            chunk=recipe.distributed.rollout_chunk,
            hedge_seconds=recipe.rollout.hedge_seconds,
            patience=recipe.rollout.worker_patience,
        )
        _pools.add(self)

    def close(self) -> None:
        """End the workers, and delete the weights."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)


def close_pools() -> None:
    """End the workers of every pool in this process."""
    for pool in list(_pools):
        pool.close()


atexit.register(close_pools)


def _place(size: int) -> Path | None:
    """Shared memory where `size` bytes fit; else the folder for temporary files."""
    fits = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > size
    return SHARED_MEMORY if fits else None


def model_to_load(recipe: RLRecipe, policy: LoadedModel) -> ModelToLoad:
    """What a worker needs to make the policy's tree of modules; the weights that are trained come from the run."""
    path = Path(recipe.model.path).expanduser()
    kept = ("mode", "lora_rank", "lora_alpha", "lora_targets")
    return ModelToLoad(
        path=str(path.resolve()) if path.is_dir() else recipe.model.path,
        dtype=str(policy.model.dtype).removeprefix("torch."),
        seed=derive_seed(recipe.run.seed, "model"),
        attention=recipe.model.attention,
        quantize=recipe.model.quantize,
        roles={name: getattr(recipe.roles, name) for name in kept},
        roles_seed=derive_seed(recipe.run.seed, "adapters"),
        max_num_seqs=recipe.rollout.max_num_seqs,
        general=recipe.rollout.engine == "transformers",
        exact=recipe.model.numerics == "exact",
        threads=torch.get_num_threads(),
    )


def token_of(variable: str) -> str:
    """The bearer token of the servers."""
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"rollout.servers need a token: export {variable}=... with the one they were started with")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"rollout.token_env: the token in {variable} has characters that an HTTP header cannot contain"
        )
    remember_secret(token)
    return token
