"""The conversion that a model needs for a runtime, if any."""
