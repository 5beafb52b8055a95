"""The machine room: read, compute, write, remember."""
