"""Weights as F16 or F32, decoded from any encoding."""
