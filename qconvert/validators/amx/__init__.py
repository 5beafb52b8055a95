"""Rules for folders of CPU experts."""
