"""What an audit says: a finding with its reason and cure, that all is well, or that there is too little to go by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tether.store.recorded import RecordedRun

Severity = Literal["note", "warning", "alarm"]
SEVERITIES: tuple[Severity, ...] = ("alarm", "warning", "note")
"""The gravest first. An alarm: the run is being wasted. A warning: it will not become what it could. A note: worth
knowing, and perhaps meant."""

GUIDE = "docs/doctor.md"


@dataclass(frozen=True)
class Finding:
    """Something wrong with a run, in words that a person can act on."""

    audit: str  # the audit's name, which is also the anchor in the guide
    severity: Severity
    title: str
    saw: str  # with numbers and steps
    why: str  # it matters
    change: tuple[str, ...]  # what to do, most likely cure first; each names a key of the recipe where one does it
    metric: str  # whose curve this is about
    first_step: int
    last_step: int
    examples: tuple[str, ...] = ()  # tokens or answers, as the model wrote them

    @property
    def link(self) -> str:
        """Where the guide explains it."""
        return f"{GUIDE}#{self.audit}"

    def as_json(self) -> dict[str, Any]:
        """Plain values, the link with them."""
        return dataclasses.asdict(self) | {"link": self.link}


@dataclass(frozen=True)
class Healthy:
    """The audit had enough to go by, and found nothing."""

    saw: str


@dataclass(frozen=True)
class TooLittle:
    """The audit could not judge: what it would need."""

    lacks: str


Verdict = Finding | Healthy | TooLittle


@dataclass(frozen=True)
class Audit:
    """One rule: its name, the question that it answers, and the pure function that answers it."""

    name: str
    question: str
    examine: Callable[[RecordedRun], Verdict]
