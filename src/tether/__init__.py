"""Tether: PPO for language models, right by proof.

Every update is tethered to the policy that sampled the data (the clip), and the whole run is tethered to the model
it started from (the KL). Start with `tether.loops.rl`, which reads like the paper's pseudo-code.
"""

__version__ = "0.2.0"
