"""Formats a consumer loads: options, packing, inverse, config block; one a folder."""
