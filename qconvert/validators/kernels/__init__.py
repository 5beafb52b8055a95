"""Triton kernels compared with torch."""
