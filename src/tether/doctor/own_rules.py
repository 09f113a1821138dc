"""Doctor rules of the user's own: functions from what a run recorded to findings, beside the shipped audits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from inspect import isclass, signature
from typing import Any, cast

from tether.doctor.findings import SEVERITIES, Finding
from tether.errors import ConfigError, DataError
from tether.rewards.calling import explain
from tether.rewards.resolve import resolve
from tether.store.recorded import RecordedRun
from tether.user_code import TimeLimitError, apart, is_its_own, time_limit

SECONDS = 60.0  # for one call of a rule
REPAIR = "a rule returns a tether.doctor.findings.Finding, a list of them, or None"


@dataclass(frozen=True)
class OwnRule:
    """A function `rule(run)`, and the name it has in reports: that of the function, or `file.py:name`."""

    name: str
    function: Callable[[RecordedRun], Any]

    def findings(self, run: RecordedRun) -> list[Finding]:
        """What the rule found. A rule that raises, hangs or returns something else is a finding itself, never an error.

        Training calls it between two steps: a wrong rule must not end a run.
        """
        try:
            with apart(), redirect_stdout(sys.stderr), time_limit(SECONDS, f"the doctor's rule {self.name}"):
                return self._checked(self.function(run))
        except DataError as error:
            return [self._failed(str(error))]
        except BaseException as error:
            if not is_its_own(error):
                raise
            late = f"took longer than {SECONDS:.0f} seconds"
            return [self._failed(late if isinstance(error, TimeLimitError) else f"raised {explain(error)}")]

    def _checked(self, given: object) -> list[Finding]:
        listed = [] if given is None else given if isinstance(given, list | tuple) else [given]
        found: list[Finding] = []
        for each in cast("Sequence[object]", listed):
            if not isinstance(each, Finding):
                raise DataError(f"gave a {type(each).__name__}: {REPAIR}")
            if each.severity not in SEVERITIES:
                raise DataError(f"gave a finding of severity {each.severity!r}: use {', '.join(SEVERITIES)}")
            change = (each.change,) if isinstance(each.change, str) else tuple(each.change)
            found.append(dataclasses.replace(each, change=change, rule=self.name))
        return found

    def _failed(self, why: str) -> Finding:
        return Finding(
            audit=self.name,
            severity="warning",
            title="A rule of your own failed",
            saw=f"{self.name} {why}",
            why="What the rule looks for was not looked at.",
            change=(f"correct {self.name}",),
            rule=self.name,
        )


def own_rules(given: object, field: str) -> tuple[OwnRule, ...]:
    """Rules from functions and from names of them. Raises ConfigError, which names `field`, on anything else."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{field}: expected a list of rules, was given a {type(given).__name__}")
    return tuple(_rule(each, f"{field}[{place}]") for place, each in enumerate(cast("Sequence[object]", given)))


def _rule(given: object, field: str) -> OwnRule:
    if isinstance(given, OwnRule):
        return given
    if isinstance(given, str):
        with apart(), redirect_stdout(sys.stderr):
            function = resolve(given, field)
        name = given
    else:
        function, name = cast("Any", given), str(getattr(given, "__name__", type(given).__name__))
    if isclass(function) or not callable(function):
        what = "a class" if isclass(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{field}: {name} is {what}: pass a function of the run, rule(run)")
    try:
        signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"{field}: {name} cannot be called with the run alone ({error}): write rule(run)") from None
    except ValueError:  # a callable whose parameters Python cannot tell
        pass
    return OwnRule(name, function)
