"""The conformance suite: golden traces of PPO's mathematics, and a runner that checks any implementation against them.

`adapter` is the contract, `runner` runs the cases, `traces/` has the numbers. `conformance/` at the top of the
repository writes the traces, from an oracle that shares no code with this package.
"""

from tether.conformance.adapter import Adapter, Unsupported

__all__ = ["Adapter", "Unsupported"]
