"""An algorithm is a value, not a trainer: an estimator, an objective, an update rule and where the KL goes."""
