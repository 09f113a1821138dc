"""Engines that sample answers: scripted (a shipped fake) and native (any Hugging Face model)."""
