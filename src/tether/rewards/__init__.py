"""Rewards and tasks: what makes an answer good."""
