"""A plan is run: read, compute, write, journal, publish."""
