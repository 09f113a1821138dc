"""The database of a workspace: its tables, how to open it, and how to write records to it."""
