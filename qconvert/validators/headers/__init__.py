"""Rules that read headers and small files."""
