"""Engines: where the units of a run are computed, and where finished files go."""
