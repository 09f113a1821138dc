"""Ranks are forked from the test's own process, which has imported everything: see `ranks_runner.py`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in ("soak", "train")]
