"""The fixtures of the learner's tests; what they make is in `learner_factory.py`."""

from learner_factory import *  # noqa: F403
