"""The oracle and the generator live in `conformance/` at the top of the repository, outside the installed package."""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))
