"""The migrations of the tables, in order."""
