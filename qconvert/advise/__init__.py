"""Which conversion a model needs for a runtime, if any."""
