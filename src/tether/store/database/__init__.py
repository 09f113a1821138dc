"""The database of a workspace: its tables, how it is opened, and how records get into it."""
