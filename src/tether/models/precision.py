"""The precision of weights: what the recipe says, or what suits the device. `auto` is resolved only here."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from tether.config.recipes import Recipe, RLRecipe
from tether.config.rewards import ModelPart
from tether.errors import ConfigError

AUTO = "auto"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HAS_BFLOAT16 = (8, 0)  # the compute capability from which on a CUDA device multiplies in bfloat16

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def resolve_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """The named dtype; "auto" suits the device. Raises if the device does not support the dtype well."""
    if dtype == AUTO:
        return auto_dtype(device)
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ConfigError(f"model.dtype is {dtype!r}: choose one of {', '.join((AUTO, *DTYPES))}")
        dtype = DTYPES[dtype]
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
        named = dtype_name(dtype)
        raise ConfigError(f"model.dtype is {named}, which is slow and imprecise on the CPU: use float32 on CPU")
    return dtype


def auto_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a CUDA device that multiplies in it, else float32.

    A CUDA device that is not here, for which only a plan can be made, is taken to be one that does.
    """
    if device.type != "cuda":
        return torch.float32
    here = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    able = not here or torch.cuda.get_device_capability(device) >= HAS_BFLOAT16
    return torch.bfloat16 if able else torch.float32


def hold_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move a model to `device` and hold what is saved of it in `dtype`.

    What it worked out for itself stays as exact as it is: rotary frequencies rounded to bfloat16 are off by up to 1 in
    512, so that the angle of a token at position 1,000 would be off by a radian and more.
    """
    model.to(device)
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """As recipes write it: float32, bfloat16."""
    return str(dtype).removeprefix("torch.")


def with_precision(recipe: AnyRecipe, device: torch.device) -> AnyRecipe:
    """The recipe of a run whose policy is on `device`, with what every `dtype: auto` is there in its place.

    A run records it: resumed on another machine, it continues in the precision in which it began.
    """
    dtype = recipe.model.dtype
    if dtype == AUTO:
        dtype = dtype_name(auto_dtype(device))
    changes: dict[str, object] = {"model": recipe.model.model_copy(update={"dtype": dtype})}
    if isinstance(recipe, RLRecipe):
        parts = tuple(
            _part_with_precision(part, dtype, device) if isinstance(part, ModelPart) else part
            for part in recipe.reward.parts
        )
        changes["reward"] = recipe.reward.model_copy(update={"parts": parts})
    return recipe.model_copy(update=changes)


def _part_with_precision(part: ModelPart, policy: str, device: torch.device) -> ModelPart:
    """A reward model's `auto`: the policy's precision where they share a backbone, else what suits its own device."""
    if part.dtype != AUTO:
        return part
    if part.shared:
        return part.model_copy(update={"dtype": policy})
    try:
        place = device if part.device == "auto" else torch.device(part.device)
    except RuntimeError as error:
        raise ConfigError(f"reward.parts: device {part.device!r} of {part.label} is no device") from error
    return part.model_copy(update={"dtype": dtype_name(auto_dtype(place))})


def precision_notice(asked: Recipe, recipe: Recipe) -> str | None:
    """What to tell of a precision that was chosen for the person, where it is not float32."""
    if asked.model.dtype != AUTO or recipe.model.dtype == "float32":
        return None
    return (
        f"model.dtype is auto: weights are held in {recipe.model.dtype} on this device; float32 is slower and more "
        "exact."
    )
