"""Loading causal language models, and what the roles of a run share."""
