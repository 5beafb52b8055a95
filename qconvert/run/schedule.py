"""The order of units in which output files are finished one after another, and the disk that takes.

A file whose last unit is done can be sent and removed while others are filled. Units are grouped by
the first file that they write to; a group's files are on disk until the last group that writes to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.errors import PlanError
from qconvert.core.shown import exact_size, format_size
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.units import Unit
from qconvert.run.shards import ShardLayout

# Without a budget so many finished files of the largest size may wait to be sent.
WAITING_FILES = 3
# Shards of the default size may be too large for a budget: these parts of it are tried then.
_PARTS = (4, 8, 16, 32)
_LEAST_SHARD = 4096

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Room:
    """Disk for files that are not sent yet, in bytes: the `least` that a run can go on with, of which
    one file may be on its way while the next is filled, and what it `takes` at most. `rest` is beside
    them: side files, records."""

    least: int
    takes: int
    rest: int


def places_of(layouts: Sequence[ShardLayout]) -> dict[str, Place]:
    """File number and offset of every output, the files of all folders counted through."""
    found: dict[str, Place] = {}
    base = 0
    for layout in layouts:
        found |= {name: (base + n, at) for name, (n, at) in layout.places.items()}
        base += len(layout.files)
    return found


def files_of(unit: Unit, places: Mapping[str, Place]) -> frozenset[int]:
    """Numbers of the files that a unit writes to."""
    return frozenset(places[name][0] for name in unit.names)


def in_file_order(
    todo: Sequence[tuple[int, Unit]], places: Mapping[str, Place]
) -> list[tuple[int, Unit]]:
    """Units with their numbers, in the order of the first place that each writes to."""
    return sorted(todo, key=lambda item: min(places[name] for name in item[1].names))


def peak(units: Sequence[Unit], layouts: Sequence[ShardLayout]) -> int:
    """The most bytes of files that are begun and not finished. Weights that are calibrated come in no
    order of files: with them it is all."""
    sizes = [file.size for layout in layouts for file in layout.files]
    if any(calibrated_in(unit) is not None for unit in units):
        return sum(sizes)
    groups: dict[int, set[int]] = {}
    places = places_of(layouts)
    for unit in units:
        written = files_of(unit, places)
        groups.setdefault(min(written), set()).update(written)
    last = {file: group for group in sorted(groups) for file in groups[group]}
    most, live = 0, set[int]()
    for group in sorted(groups):
        live |= groups[group]
        most = max(most, sum(sizes[file] for file in live))
        live = {file for file in live if last[file] > group}
    return max(most, *sizes)


def room_for(
    units: Sequence[Unit], layouts: Sequence[ShardLayout], rest: int, budget: int | None
) -> Room:
    """Return what a run that sends its files takes. `rest` bytes lie beside them."""
    sizes = [file.size for layout in layouts for file in layout.files]
    begun, total = peak(units, layouts), sum(sizes)
    least = min(total, begun + max(sizes)) + rest
    if budget is None:
        budget = begun + WAITING_FILES * max(sizes) + rest
    return Room(least, min(budget, total + rest), rest)


def smaller_shards(budget: int) -> Iterator[int]:
    """Sizes of shards to try where those of the default size do not fit a budget, largest first."""
    for part in _PARTS:
        if (size := budget // part) >= _LEAST_SHARD:
            yield size


def refuse(budget: int, least: int, *, chosen: bool) -> PlanError:
    """Why a budget is too small. `chosen`: the size of shards was the user's."""
    smaller = ", or a smaller --max-shard-size" if chosen else ""
    return PlanError(
        f"--disk-budget {exact_size(budget)} is too small: a file that is sent, the next one that is "
        f"filled, and side files take {format_size(least)}; give {exact_size(least)} or more{smaller}"
    )
