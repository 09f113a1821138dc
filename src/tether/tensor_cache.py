"""Answers that are remembered for as long as what they are about lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


class TensorCache(Generic[T]):
    """A function that remembers what it said of its first argument for as long as that lives.

    Where a batch's tokens stand is asked by every role, and on a device each answer makes the host wait. So this is
    for questions about frozen batches and their masks. Who knows an answer beforehand, because
    the batch was on the host a moment ago, can say it with `set`.
    """

    def __init__(self, find: Callable[..., T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, about: Any, *others: Any) -> T:
        """What `find` says; it is asked again of a tensor that was written to since."""
        known = self._known.get(about)
        if known is None or known[0] != _version(about):
            known = self._known[about] = (_version(about), self.find(about, *others))
        return known[1]

    def set(self, about: Any, answer: T) -> None:
        """What it will say."""
        self._known[about] = (_version(about), answer)


def _version(about: Any) -> int:
    """How often a tensor was written to; 0 of what keeps no count."""
    return about._version if isinstance(about, Tensor) and not about.is_inference() else 0


def tensor_cached(find: Callable[..., T]) -> TensorCache[T]:
    """`find` as a function that remembers."""
    return TensorCache(find)
