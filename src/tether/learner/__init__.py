"""The learner: micro-batches, gradients, steps. It knows no algorithm."""
