"""What shards of a calibration have solved, one file an expert, in the folder that they share.

Every shard runs all layers over all samples, because hidden states must be the same bits; the experts of
a layer are divided among them. Who has solved one puts its codes here: a file that appears whole, once
(link(2)), with a hash of its content, and is noted in its journal. Who needs it reads it. Experts of a
shard that is not at work are solved by the others: the same codes, so that two who do so at once do no
harm. `finish` reads all of them, and is the only one to write into the result.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert.core.errors import OutputError, RunError
from qconvert.core.json_text import parse_object
from qconvert.core.regular import read_regular
from qconvert.core.shown import count
from qconvert.run import leases
from qconvert.run.division import Shard
from qconvert.run.files import Files
from qconvert.run.leases import SOLVED, ShardJournal, appear, journals_in, state_of, unfinished
from qconvert.run.until import Until

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_STATES = "states"
_NAME = re.compile(r"[0-9]{1,6}-[0-9]{1,6}")
_POLL_SECONDS = 0.25
_LOOK_SECONDS = 3.0  # between looks at who is at work
_DIGEST = 16
_HEADER_BYTES = 4 << 20
_DTYPES = ("int8", "uint8", "int32", "float32")


class OutOfTime(Exception):
    """A run's time was over while it waited for others."""


class Peers:
    """Who of the other shards is at work, told from journals that grow: see run/leases.py. A shard that
    has not begun is waited for as long as one that gives no sign of life."""

    def __init__(self, work: Path, shards: int, now: Callable[[], float] = time.monotonic) -> None:
        self._work, self._shards, self._now = work, shards, now
        self._seen: dict[Path | int, tuple[int, float]] = {}

    def lost(self) -> set[int]:
        """Indices of shards that are not at work."""
        latest = {
            j.shard.index: j for j in journals_in(self._work) if j.shard.count == self._shards
        }
        return {index for index in range(self._shards) if not self._alive(index, latest.get(index))}

    def _alive(self, index: int, journal: ShardJournal | None) -> bool:
        if journal is None:
            return self._changed(index, 0)
        state = state_of(journal)
        if state == "unknown":
            return self._changed(journal.path, leases.size_of(journal.path))
        return state == "running"

    def _changed(self, what: Path | int, size: int) -> bool:
        """Whether something has had another size within the last STALE_SECONDS."""
        known = self._seen.get(what)
        if known is None or known[0] != size:
            known = self._seen[what] = size, self._now()
        return self._now() - known[1] < leases.STALE_SECONDS


@dataclass(frozen=True)
class Exchange:
    """The folder `work`/solved of one plan, `key`. `shard` is None for a run that does what is left
    of all; `note` appends to the shard's journal, which is for who writes that: `[{"solved": name}]` of
    each file that was put. `kind` of devices: codes of CPU and GPU do not mix, None where they are only
    written."""

    work: Path
    key: str
    files: Files
    shard: Shard | None = None
    note: Callable[[Sequence[Mapping[str, Any]]], None] | None = None
    until: Until | None = None
    kind: str | None = None
    _peers: list[Peers] = field(default_factory=list, repr=False)

    @property
    def folder(self) -> Path:
        return self.work / SOLVED

    @property
    def states(self) -> Path:
        """A folder for the hidden states of this shard, of its own. Raises OutputError for a link."""
        assert self.shard is not None
        name = f"{_STATES}-{self.shard.index}-of-{self.shard.count}"
        path = self.folder / name
        if path.is_symlink():
            raise OutputError(f"{path}: expected a folder, found a symbolic link; remove it")
        return path

    def has(self, layer: int, expert: int) -> bool:
        return os.path.lexists(self.folder / f"{layer}-{expert}")

    def together(self, experts: int, whole: int) -> int:
        """Experts that are solved together: `whole`, a power of two, or less where there are not as many
        such batches as shards."""
        shards = 1 if self.shard is None else self.shard.count
        while whole > 1 and -(-experts // whole) < shards:
            whole //= 2
        return whole

    def _parts(self, experts: int, whole: int) -> list[range]:
        """The experts of each shard: whole batches, one more or less than the others have."""
        shards = 1 if self.shard is None else self.shard.count
        size = self.together(experts, whole)
        batches = -(-experts // size)
        cuts = [min(experts, batches * n // shards * size) for n in range(shards + 1)]
        return [range(*cut) for cut in pairwise(cuts)]

    def mine(self, layer: int, experts: int, whole: int = 1) -> list[int]:
        """Experts of a layer that this run is to solve and that nobody has yet. Parts of shards are cut
        between batches of `whole` experts that are solved together."""
        part = self._parts(experts, whole)[0 if self.shard is None else self.shard.index]
        return [expert for expert in part if not self.has(layer, expert)]

    def others(self, layer: int, experts: int, whole: int = 1) -> Iterator[tuple[str, list[int]]]:
        """Wait for what others are to solve. Each item is a line to show and experts to solve here,
        because their shards are not at work: none while there is only to wait. It ends once all are
        there. Raises OutOfTime."""
        told = False
        looked = -_LOOK_SECONDS
        parts = self._parts(experts, whole)
        while missing := [e for e in range(experts) if not self.has(layer, e)]:
            if self.shard is None:
                yield "", missing
                continue
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                if not self._peers:
                    self._peers.append(Peers(self.work, self.shard.count))
                lost = self._peers[0].lost() - {self.shard.index}
                adopted = [e for e in missing if any(e in parts[index] for index in lost)]
                if adopted:
                    # Not all survivors begin with the same one.
                    at = self.shard.index * len(adopted) // self.shard.count
                    yield "of shards that are not at work", adopted[at:] + adopted[:at]
                    continue
            if not told:
                told = True
                yield f"waiting for {count(len(missing), 'expert')} of other shards", []
            if self.until is not None and self.until.over:
                raise OutOfTime
            time.sleep(_POLL_SECONDS)

    def put(
        self, layer: int, expert: int, about: Mapping[str, Any], arrays: Mapping[str, Array]
    ) -> str | None:
        """Put what is known of an expert where the others find it, unless it is there. Returns the name
        of the file, None where it was."""
        self.files.make_folder(self.folder)
        listed = [[name, str(a.dtype), list(a.shape)] for name, a in arrays.items()]
        header = {
            "key": self.key, "kind": self.kind, "layer": layer, "expert": expert, "arrays": listed,
            "about": about,
        }  # fmt: skip
        parts = [json.dumps(header, separators=(",", ":")).encode() + b"\n"]
        parts += [array.tobytes() for array in arrays.values()]
        data = b"".join(parts)
        data += xxhash.xxh3_128(data).digest()
        path = self.folder / f"{layer}-{expert}"
        new = unfinished(self.work, self.shard or Shard(0, 1))
        self.files.make_folder(new.parent)
        if not appear(path, new, data, len(data), self.files):
            return None
        self.files.sync_folder(self.folder)
        return path.name

    def get(self, layer: int, expert: int, limit: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """What was put, of at most `limit` bytes beside its header. Raises RunError for a file that is
        damaged, or of another run or kind of device."""
        import numpy as np

        path = self.folder / f"{layer}-{expert}"
        data = read_regular(path, limit + _HEADER_BYTES, follow=False, error=RunError)
        body, digest = data[:-_DIGEST], data[-_DIGEST:]
        if xxhash.xxh3_128(body).digest() != digest:
            raise RunError(
                f"{path}: is damaged: its bytes have another hash than it states; remove it"
            )
        text, _, rest = body.partition(b"\n")
        header = parse_object(text, path, error=RunError)
        if (header.get("key"), header.get("layer"), header.get("expert")) != (
            self.key,
            layer,
            expert,
        ):
            raise RunError(f"{path}: was solved for another run, layer or expert; remove it")
        if self.kind is not None and header.get("kind") != self.kind:
            raise RunError(
                f"{path}: was solved on another kind of device ({header.get('kind')!r}, here "
                f"{self.kind!r}), whose codes do not mix; give every shard the same --device"
            )
        found: dict[str, Array] = {}
        at = 0
        about, listed = header.get("about"), header.get("arrays")
        if not isinstance(about, dict) or not isinstance(listed, list):
            raise RunError(f"{path}: was not written by qconvert; remove it")
        for entry in listed:
            name, dtype, shape = _entry(entry, path)
            kind = np.dtype(dtype)
            size = kind.itemsize
            for side in shape:
                size *= side
            if at + size > len(rest):
                raise RunError(f"{path}: {name} goes beyond the end of the file; remove it")
            found[name] = np.frombuffer(rest, kind, size // kind.itemsize, at).reshape(shape)
            at += size
        return about, found


def _entry(entry: Any, path: Path) -> tuple[str, str, list[int]]:
    sound = isinstance(entry, list) and len(entry) == 3
    name, dtype, shape = entry if sound else ("", "", [])
    sides = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 32 for n in shape)
    if not (isinstance(name, str) and dtype in _DTYPES and sides and len(shape) <= 2):
        raise RunError(f"{path}: was not written by qconvert; remove it")
    return name, dtype, shape


def solved_in(work: Path) -> int:
    """How many experts have been solved in a folder that shards share."""
    try:
        return sum(_NAME.fullmatch(name) is not None for name in os.listdir(work / SOLVED))
    except (FileNotFoundError, NotADirectoryError):
        return 0
