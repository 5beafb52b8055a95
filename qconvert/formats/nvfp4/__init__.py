"""NVFP4 in both dialects."""
