"""Before a run: what it will cost in memory, steps and seconds, and what to change where it does not fit."""
