"""Division of a run's units among shards: by plan alone, so that machines agree without asking.

Units are sorted by where their first output goes, and cut into runs of about the same bytes read and
written, so that a shard writes long stretches of few files. A file has no single owner: a weight and its
scales may lie on both sides of a file's end, and chains of such units would tie all files together.

Two hosts must not write to one page of a file through their page caches: a network file system may send
the whole page, with what the other wrote missing (Linux fs/nfs/write.c, nfs_can_extend_write). So a unit
that would write to a block where another shard writes is left to `finish`, which writes alone: a
few units at each cut. Calibrations are divided in another way (calibrate/distributed.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.errors import UsageError
from qconvert.plan.units import Unit

if TYPE_CHECKING:
    from qconvert.run.work.file_layout import ShardLayout

# The largest page of a common Linux kernel (arm64): what two hosts may not share.
BLOCK_BYTES = 64 << 10
MOST_SHARDS = 10_000
# Owner of the units that `finish` does.
LEFT_TO_FINISH = -1


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Part `index` of `count` of a run, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True, slots=True)
class Division:
    """`owner` of each unit, LEFT_TO_FINISH or the index of a shard; units and bytes to write of each
    shard, and of what is left to `finish`."""

    owner: tuple[int, ...]
    shares: tuple[tuple[int, int], ...]
    rest: tuple[int, int]

    def of(self, shard: Shard) -> frozenset[int]:
        return frozenset(n for n, owner in enumerate(self.owner) if owner == shard.index)


def divide(units: Sequence[Unit], layouts: Sequence[ShardLayout], count: int) -> Division:
    """Divide units among `count` shards. `layouts` are those of all folders of the run."""
    at = _places(layouts)
    owner = [0] * len(units)
    order = sorted(range(len(units)), key=lambda n: (at[units[n].names[0]][:2], n))
    total = sum(_cost(units[n]) for n in order)
    before = 0
    for n in order:
        cost = _cost(units[n])
        owner[n] = min((2 * before + cost) * count // (2 * total), count - 1)
        before += cost
    if count > 1:
        for n in _sharing(units, at, owner):
            owner[n] = LEFT_TO_FINISH
    sums = {index: [0, 0] for index in range(LEFT_TO_FINISH, count)}
    for n, index in enumerate(owner):
        sums[index][0] += 1
        sums[index][1] += units[n].write
    shares = tuple((sums[index][0], sums[index][1]) for index in range(count))
    return Division(tuple(owner), shares, (sums[LEFT_TO_FINISH][0], sums[LEFT_TO_FINISH][1]))


def _cost(unit: Unit) -> int:
    return max(1, unit.read + unit.write)


def _places(layouts: Sequence[ShardLayout]) -> dict[str, tuple[int, int, bool]]:
    """File (counted over all folders), offset, and whether the file is written, of each output."""
    places: dict[str, tuple[int, int, bool]] = {}
    base = 0
    for layout in layouts:
        for name, (file, offset) in layout.places.items():
            places[name] = (base + file, offset, layout.files[file].link is None)
        base += len(layout.files)
    return places


def _sharing(
    units: Sequence[Unit], at: Mapping[str, tuple[int, int, bool]], owner: Sequence[int]
) -> set[int]:
    """Units that write to a block to which an earlier unit, of another shard, writes."""
    written = sorted(
        (at[name][0], at[name][1], output.type.nbytes, number)
        for number, unit in enumerate(units)
        for name, output in unit.outputs
        if at[name][2] and output.type.nbytes
    )
    found: set[int] = set()
    last = (-1, -1, 0)  # file, block and owner of the last byte before
    for file, offset, nbytes, number in written:
        shares = last[:2] == (file, offset // BLOCK_BYTES) and last[2] != owner[number]
        if shares or number in found:
            found.add(number)
        else:
            last = (file, (offset + nbytes - 1) // BLOCK_BYTES, owner[number])
    return found


# --- which shard this process is ------------------------------------------------------------------

# Index, count and first index in the environment of what starts many processes, the innermost first.
# torchrun; srun; Slurm's job arrays; indexed jobs of Kubernetes, which do not tell how many there are.
_ARRAY = "SLURM_ARRAY_TASK_ID"
_STARTERS = (
    ("RANK", "WORLD_SIZE", None),
    ("SLURM_PROCID", "SLURM_NTASKS", None),
    (_ARRAY, "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", None, None),
)


def parse_shard(text: str, environment: Mapping[str, str]) -> Shard:
    """`2/8`, or `auto`, `auto/8` for the index that Slurm, torchrun or Kubernetes gives in the
    environment. Raises UsageError."""
    index, slash, count = text.partition("/")
    if index == "auto":
        return _from_environment(_count(text, count) if slash else None, environment)
    if not slash or not _is_number(index):
        raise UsageError(f"--shard {text[:40]}: write I/N, counted from 0 (0/4 to 3/4), or auto")
    return _checked(text, int(index), _count(text, count))


def _from_environment(given: int | None, environment: Mapping[str, str]) -> Shard:
    found = []
    for index, count, first in _STARTERS:
        # A step of a job array that was not asked for tasks has a SLURM_PROCID, and no SLURM_NTASKS.
        alone = index == "SLURM_PROCID" and count not in environment and _ARRAY in environment
        if index in environment and not alone:
            start = _value(environment, first) if first and first in environment else 0
            many = _value(environment, count) if count is not None else None
            found.append((index, _value(environment, index) - start, many))
    if not found:
        names = ", ".join(f"{i} with {c}" if c else f"{i} (for auto/N)" for i, c, _ in _STARTERS)
        raise UsageError(f"--shard auto: none of these is set: {names}; write --shard I/N")
    # A batch script has SLURM_PROCID too, and is one process.
    several = [each for each in found if each[2] != 1] or found
    arrays = [each for each in several if each[0] == _ARRAY and each[2] != 1]
    if arrays and len(several) > 1:
        names = " and ".join(each[0] for each in several)
        raise UsageError(
            f"--shard auto: {names} both say which of several processes this is; write --shard I/N"
        )
    name, number, many = several[0]
    if given is None and many is None:
        raise UsageError(
            f"--shard auto: {name} does not say how many there are; write --shard auto/N"
        )
    return _checked(f"auto ({name})", number, given if given is not None else many or 0)


def _value(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not _is_number(text):
        raise UsageError(f"--shard auto: {name} is {text[:40]!r}, expected a number")
    return int(text)


def _count(text: str, count: str) -> int:
    if not _is_number(count):
        raise UsageError(f"--shard {text[:40]}: write I/N, counted from 0 (0/4 to 3/4), or auto/N")
    return int(count)


def _is_number(text: str) -> bool:
    return 0 < len(text) <= 9 and text.isascii() and text.isdigit()


def _checked(text: str, index: int, count: int) -> Shard:
    if not 1 <= count <= MOST_SHARDS:
        raise UsageError(f"--shard {text[:40]}: write N from 1 to {MOST_SHARDS}, not {count}")
    if not 0 <= index < count:
        raise UsageError(
            f"--shard {text[:40]}: shard {index} of {count}: shards are counted from 0 to {count - 1} "
            "(a job array must have no gaps)"
        )
    return Shard(index, count)
