"""What a run puts on disk, against what the user allows it.

A source in a store or on the Hub takes none: its ranges are held in memory, within --memory, until they
are used. What takes disk is the result, made here whole even where it is sent elsewhere afterwards, and
beside it the journal, the records, and the hidden states of a calibration.
"""

from __future__ import annotations

from collections.abc import Sequence

from qconvert.core.errors import PlanError
from qconvert.core.sizes import exact_size, format_size
from qconvert.run.prepare import Prepared, disk_bytes


def whole_result(ready: Sequence[Prepared], beside: int = 0) -> int:
    """Most bytes below the output folders of a run that makes all of its result here, with `beside` for
    what a calibration keeps there meanwhile. An upper bound: shards that are hard-linked to the
    source's take none, and are not counted."""
    return sum(map(disk_bytes, ready)) + beside


def check_disk_budget(budget: int | None, need: int, what: str) -> None:
    """Raise PlanError where a run needs more disk than it was given, with the smallest budget that
    works; `what` names what takes it."""
    if budget is not None and need > budget:
        raise PlanError(
            f"--disk-budget {exact_size(budget)}: {what} takes up to {format_size(need)} of disk; give "
            f"--disk-budget {_rounded(need)} or more, or choose a smaller format"
        )


def _rounded(need: int) -> str:
    """The next whole MiB, as one would write it."""
    return f"{-(-need >> 20)}MiB"
