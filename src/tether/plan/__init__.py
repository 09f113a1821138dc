"""Predict what a run costs in memory, steps and seconds, and what to change if it does not fit."""
