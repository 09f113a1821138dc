"""Causal language models: loading, heads, the roles of a run and what they share, saving."""
