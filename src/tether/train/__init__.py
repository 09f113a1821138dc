"""Training: each loop reads top to bottom like the paper's pseudo-code; hooks around a step."""
