"""How validators are run, and what they report."""
