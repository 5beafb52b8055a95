"""Experts prepared for TensorRT-LLM's kernels: experimental."""
