"""Rules that read weights."""
