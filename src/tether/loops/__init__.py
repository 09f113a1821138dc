"""The loops: each reads top to bottom like the paper's pseudo-code."""
