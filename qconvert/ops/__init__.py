"""Ops: tensors in, tensors out. Each is a frozen dataclass that plans without torch and imports it
only inside `run`."""
