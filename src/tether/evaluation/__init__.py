"""Text metrics, confidence intervals, judges and win rates."""
