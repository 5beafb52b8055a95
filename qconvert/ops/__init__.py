"""Ops: tensors in, tensors out. Each is a frozen dataclass that plans with the standard library
alone; what it computes with is imported inside `run`."""
