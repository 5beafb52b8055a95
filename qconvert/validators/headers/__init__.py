"""Rules that read only headers and small files."""
