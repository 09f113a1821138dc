"""The mathematics, as pure functions on tensors.

Each function states its equation, its shapes and its source. (B, T) is a batch of padded rows in which `x[b, t]` is
about token t; `mask` is True where the policy sampled the token. Nothing here knows a model or an algorithm.
"""
