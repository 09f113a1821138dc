"""The loops' tests share the soak's tiny recipes, and its way to compare two runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))
