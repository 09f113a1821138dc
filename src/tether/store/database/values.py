"""JSON values as the store writes them."""

from __future__ import annotations

import math
from typing import Any


def without_infinities(value: Any) -> Any:
    """The same JSON value with null for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): without_infinities(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(inner) for inner in value]
    return value
