"""How the tables came to be what they are, change by change."""
