"""Triton as pyright sees it, installed or not: its own types do not describe the launch of a kernel."""

from typing import Any

def __getattr__(name: str) -> Any: ...
