"""Prompts, demonstrations and preferences, as tokens."""
