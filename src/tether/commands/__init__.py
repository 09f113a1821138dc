"""The commands of the command line: options first, heavy imports only when a command runs."""
