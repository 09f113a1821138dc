"""Text metrics and confidence intervals, as pure functions."""
