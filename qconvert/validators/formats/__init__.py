"""Stored formats, a file each with its `SPEC`: what it is, as validators judge it."""
