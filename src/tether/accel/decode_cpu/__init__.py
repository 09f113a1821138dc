"""A decoder for CPUs: fixed slots, float32, one new token a slot in each step."""
