"""The learner: micro-batches, gradients and steps, independent of the algorithm."""
