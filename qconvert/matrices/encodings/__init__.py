"""Readers of encodings of a module's weight, one a file: `read(plan, module)` gives the matrix and
the names of all tensors that it takes, None where the module is not stored so. Raises PlanError where it
is and a part is missing, does not fit, or contradicts the config.

Which is asked of which module: matrices/reading.py. What tensors are called: core/encodings.py.
"""
