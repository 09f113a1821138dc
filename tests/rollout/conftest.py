"""The fixtures of every engine's tests."""

from engine_fixtures import assert_matches_plain_forward, assert_same_rollouts, exact, loaded, prompts

__all__ = ["assert_matches_plain_forward", "assert_same_rollouts", "exact", "loaded", "prompts"]
