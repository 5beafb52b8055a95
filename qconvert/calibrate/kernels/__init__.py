"""Triton kernels of calibrations, imported only where `choice` says that they compute."""
