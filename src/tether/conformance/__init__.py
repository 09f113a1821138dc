"""The conformance suite: golden traces of PPO's mathematics, and a runner that holds any implementation to them.

`adapter` is the contract, `runner` the runner, `traces/` the numbers. The traces are written by `conformance/` at the
top of the repository, from an oracle that shares no code with this package.
"""

from tether.conformance.adapter import Adapter, Unsupported

__all__ = ["Adapter", "Unsupported"]
