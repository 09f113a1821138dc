"""A small suite of capabilities that needs no download, and a bridge to lm-evaluation-harness."""
