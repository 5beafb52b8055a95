"""Whether ops compute in their compiled loops: see qconvert/compiled/choice.py, which decides."""

from __future__ import annotations

from qconvert.compiled.choice import ENOUGH_BYTES, LOOP_BYTES, VARIABLE, Loops, cache_folder, wanted

__all__ = [
    "ENOUGH_BYTES",
    "LOOPS",
    "LOOP_BYTES",
    "VARIABLE",
    "cache_folder",
    "in_use",
    "load",
    "use",
    "wanted",
]

LOOPS = "qconvert.ops.compiled.loops"
_OPS = Loops(LOOPS)
use, in_use, load = _OPS.use, _OPS.in_use, _OPS.load
