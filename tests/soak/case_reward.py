"""The built-in task's reward, for prompts from a file: `answer` is the kind of characters that is asked for."""

from __future__ import annotations

from tether.rewards.tasks import MatchCase

reward = MatchCase().reward()
