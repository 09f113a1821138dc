"""Algorithms as values: an advantage estimator, an objective, an update rule and where the KL is applied."""
