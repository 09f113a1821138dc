"""What a run's note, tags and group may be: for recipes, the command line and Studio alike."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

MAX_NOTE = 10_000  # characters
MAX_TAGS = 20
MAX_GROUP = 100  # characters
TAG = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:+-]{0,39}")

Tag = Annotated[str, Field(pattern=f"^{TAG.pattern}$")]
