"""The smallest policy that can be trained: P(1 | x) = sigmoid(theta0 + theta1 x), with its derivatives by hand.

With z = theta0 + theta1 x and p = sigmoid(z):
  log pi(a) = log sigmoid(z) for a = 1, log sigmoid(-z) for a = 0;   d log pi(a) / dz = a - p
  H = -p log p - (1 - p) log(1 - p);                                 dH / dz = -z p (1 - p)
  KL(old || new) = p_old (log p_old - log p_new) + (1 - p_old) (log(1 - p_old) - log(1 - p_new))
  d^2 KL / dz^2 at new = old: p (1 - p), the Fisher information;     dz / dtheta = (1, x)
"""

import math

from conformance.oracle.grids import Row
from conformance.oracle.preferences import log_sigmoid


def logit(theta: Row, x: float) -> float:
    """z = theta0 + theta1 x."""
    return theta[0] + theta[1] * x


def probability_of_one(theta: Row, x: float) -> float:
    """p = sigmoid(z)."""
    return math.exp(log_sigmoid(logit(theta, x)))


def logprob(theta: Row, x: float, action: int) -> float:
    """log pi(action | x)."""
    z = logit(theta, x)
    return log_sigmoid(z if action == 1 else -z)


def logprob_slope(theta: Row, x: float, action: int) -> float:
    """d log pi(action | x) / dz = action - p."""
    return action - probability_of_one(theta, x)


def entropy(theta: Row, x: float) -> float:
    """H = -p log p - (1 - p) log(1 - p)."""
    z = logit(theta, x)
    p = probability_of_one(theta, x)
    return -p * log_sigmoid(z) - (1 - p) * log_sigmoid(-z)


def entropy_slope(theta: Row, x: float) -> float:
    """dH / dz = p (1 - p) log((1 - p) / p) = -z p (1 - p)."""
    p = probability_of_one(theta, x)
    return -logit(theta, x) * p * (1 - p)


def kl_divergence(old_theta: Row, new_theta: Row, x: float) -> float:
    """The exact KL(old || new) at feature x."""
    p_old = probability_of_one(old_theta, x)
    z_old, z_new = logit(old_theta, x), logit(new_theta, x)
    return p_old * (log_sigmoid(z_old) - log_sigmoid(z_new)) + (1 - p_old) * (log_sigmoid(-z_old) - log_sigmoid(-z_new))


def fisher(theta: Row, x: float) -> float:
    """d^2 KL / dz^2 where new = old: p (1 - p)."""
    p = probability_of_one(theta, x)
    return p * (1 - p)
