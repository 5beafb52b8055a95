"""One subject of the command line a file."""
