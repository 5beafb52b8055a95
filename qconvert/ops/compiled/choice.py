"""Choice of compiled loops for ops: see qconvert/compiled/choice.py, which decides."""

from __future__ import annotations

from qconvert.compiled.choice import ENOUGH_BYTES, LOOP_BYTES, VARIABLE, Loops, cache_folder, wanted

__all__ = [
    "ENOUGH_BYTES",
    "LOOPS",
    "LOOP_BYTES",
    "OPS",
    "VARIABLE",
    "cache_folder",
    "in_use",
    "load",
    "use",
    "wanted",
]

LOOPS = "qconvert.ops.compiled.loops"
OPS = Loops(LOOPS)
use, in_use, load = OPS.use, OPS.in_use, OPS.load
