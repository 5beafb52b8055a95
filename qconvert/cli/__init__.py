"""The command line: one subject a file."""
