"""What to change where a plan does not fit: settings tried one after another on the plan itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tether.config.load import change_settings
from tether.config.recipes import Recipe, RLRecipe
from tether.plan.memory import slots_of
from tether.plan.plan import Plan, make_plan

SMALLEST_MICRO = 256  # tokens: below that a device idles


@dataclass(frozen=True)
class Change:
    """One setting, to which value, and what that saves by itself."""

    key: str
    value: str
    saves: int  # bytes off the peak, by itself
    peak: int  # bytes that the peak would be
    fits: bool
    note: str


def advice(recipe: Recipe, plan: Plan) -> tuple[list[Change], list[Change]]:
    """`(each change by itself, the fewest found that together fit)`; what costs the least comes first."""
    alone = [change for candidate in candidates(recipe, plan) if (change := _try(recipe, plan, [candidate])).saves > 0]
    enough = next(([change] for change in alone if change.fits), None)
    return alone, enough if enough is not None else _together(recipe, plan, alone)


def _together(recipe: Recipe, plan: Plan, alone: list[Change]) -> list[Change]:
    """Change after change until it fits, and then those left out again without which it still does."""

    def fits(changes: Iterable[Change]) -> bool:
        return _try(recipe, plan, [(each.key, each.value, each.note) for each in changes]).fits

    taken: dict[str, Change] = {}
    for change in alone:
        taken[change.key] = change  # of one key the last and strongest value counts
        if fits(taken.values()):
            break
    else:
        return []
    for key in list(taken):
        others = [change for change in taken.values() if change.key != key]
        if others and fits(others):
            del taken[key]
    return list(taken.values())


def candidates(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(key, value, note): from those that change nothing but time to those that change what is trained."""
    tokens = recipe.optimizer.micro_batch_tokens
    longest = plan.work.longest_row
    for smaller in (tokens // 2, tokens // 4, tokens // 8, tokens // 16):
        if smaller >= max(SMALLEST_MICRO, longest):
            yield "optimizer.micro_batch_tokens", str(smaller), "the same gradient in more, smaller passes"
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", "true", "layers run twice: a third more time in the update"
    if isinstance(recipe, RLRecipe):
        slots = slots_of(recipe, plan.work, plan.machine.kind)
        yield "rollout.max_num_seqs", str(max(1, slots // 2)), "fewer answers sampled at once"
    if recipe.model.dtype == "float32" and plan.machine.kind == "cuda":
        yield "model.dtype", "bfloat16", "half the bytes of every weight"
    if recipe.roles.mode == "separate" and plan.work.reference and not recipe.roles.offload_reference:
        yield "roles.offload_reference", "true", "the reference waits in host memory"
    if recipe.optimizer.name == "adamw":
        yield "optimizer.name", "adamw_8bit", "the optimiser's moments in 8 bits"
    if plan.work.critic == "separate" and plan.work.policy and recipe.method != "trpo":
        yield "roles.critic", "head", "the critic is a head on the policy's backbone"
    if recipe.roles.mode == "separate":
        yield "roles.mode", "lora", "adapters on one frozen base are trained in place of whole models"
    elif recipe.model.quantize == "none" and recipe.roles.mode == "lora" and plan.machine.kind == "cuda":
        yield "model.quantize", "8bit", "the frozen base in 8 bits"
        yield "model.quantize", "4bit", "the frozen base in 4 bits"


def _try(recipe: Recipe, plan: Plan, changes: list[tuple[str, str, str]]) -> Change:
    """The plan under some changes; named after the last of them."""
    flags = [word for key, value, _ in changes for word in (f"--{key}", value)]
    changed = make_plan(change_settings(recipe, flags), plan.shape, plan.lengths, plan.machine)
    key, value, note = changes[-1]
    return Change(key, value, plan.memory.peak - changed.memory.peak, changed.memory.peak, changed.fits, note)
