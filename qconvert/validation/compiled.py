"""Choice of compiled loops for validators of their own (qconvert/validators/compiled_loops).

numpy's form is the definition: a loop gives the same bits and the same answers, or declines what is out
of the ordinary (NaN, infinities), which numpy's form then answers; all that is wrong is found there.
"""

from __future__ import annotations

from typing import Any

from qconvert.compiled.choice import LOOP_BYTES, Loops, wanted

__all__ = ["LOOPS", "LOOP_BYTES", "done", "worth"]

LOOPS = Loops("qconvert.validators.compiled_loops")

# Bytes that a worker computes with, of both folders, from which on loops pay for compiling them once, or
# for the 0.5 CPU s that each process takes to import numba. Against 1.2 GB of FP8, 1.8 GB in all, INT4
# took 7.3 CPU s and takes 4.3, NVFP4 22.0 and 5.8, AMX's matrices 4.7 and 3.6.
_ENOUGH_BYTES = 384 << 20


def worth(nbytes: int, workers: int) -> bool:
    """Tell whether workers that compute with this many bytes should use loops. Raises RunError as
    `wanted` does."""
    return wanted(nbytes // workers, _ENOUGH_BYTES)


def done(name: str, *args: Any) -> bool:
    """Tell whether the loop of this name made its results; else they are undefined, and numpy's form is
    to make them."""
    found = LOOPS.in_use()
    return found is not None and bool(getattr(found, name)(*args))
