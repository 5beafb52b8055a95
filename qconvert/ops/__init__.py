"""Ops: tensors in, tensors out. Each is a frozen dataclass that plans with only the standard library;
the libraries it computes with are imported inside `run`."""
