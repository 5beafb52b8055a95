"""numba's decorators for the loops of ops."""

from qconvert.compiled.jit import inner, load_kept, loop

__all__ = ["inner", "load_kept", "loop"]
