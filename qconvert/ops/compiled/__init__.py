"""The hot loops of row ops, compiled by numba (the extra `fast`).

numpy's form of an op is the definition: a compiled loop of `loops/` gives the same bytes, or declines.
It declines what is out of the ordinary (NaN, infinities, overflow, denormal scales), which numpy's form
then answers, errors included. So an op asks `done("name of the loop", ...)` first and goes on as if it
were alone where the answer is no; whether loops are compiled at all is decided for a run
(qconvert/compiled/choice.py).
"""

from __future__ import annotations

from typing import Any

from qconvert.compiled.choice import Loops

LOOPS = "qconvert.ops.compiled.loops"
OPS = Loops(LOOPS)
use, in_use, load = OPS.use, OPS.in_use, OPS.load


def done(name: str, *args: Any) -> bool:
    """Return whether the loop of this name made the results; else they are undefined, and numpy's form
    is to make them."""
    found = in_use()
    return found is not None and bool(getattr(found, name)(*args))


def may_be_done() -> bool:
    """Return whether `done` has anything to ask, for what would be prepared for it alone."""
    return in_use() is not None
