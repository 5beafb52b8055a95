"""Two checkpoints compared tensor by tensor, in bounded memory, and grouped by role; and by the files
beside the weights that decide what a runtime computes (`settings.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.prepared import own_role
from qconvert.core.graph import Source
from qconvert.core.names import natural_key, parse, split_parameter
from qconvert.core.shown import count, several
from qconvert.run.work.reader import Reader
from qconvert.validation.settings import (
    compared_files,
    different_lists,
    different_settings,
    uncompared_files,
)

_CHUNK = 4 << 20
_MOST_LINES = 30
_SAYS = {
    "only-a": ("is only in A", "are only in A"),
    "only-b": ("is only in B", "are only in B"),
    "type": ("differs in dtype or shape", "differ in dtype or shape"),
    "data": ("differs in bytes", "differ in bytes"),
}
_SAYS_OF_FILE = {
    "config": "{0.tensor} differs: {0.detail}",
    "file": "{0.tensor} differs in bytes ({0.detail})",
    "file-a": "{0.tensor} is only in A",
    "file-b": "{0.tensor} is only in B",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind` is `only-a`, `only-b`, `type` or `data`; `role` the family's name for it, else the
    tensor's name without its numbers. Of a file beside the weights `tensor` and `role` are its name, and
    `kind` is `config` (a key has another value), `file` (its bytes differ), `file-a` or `file-b` (only
    one has it)."""

    tensor: str
    kind: str
    detail: str
    role: str

    @property
    def of_file(self) -> bool:
        """Tell whether it is of a file beside the weights."""
        return self.kind in _SAYS_OF_FILE


def compare(a: Checkpoint, b: Checkpoint, *, data: bool = True) -> list[Difference]:
    """Every tensor that differs, in the order a model runs in; with `data` also every setting and file
    beside the weights that does, which come first."""
    found: list[Difference] = []
    if data:
        settings = different_settings(a, b)
        found += [Difference(file, kind, detail, file) for file, kind, detail in settings]
    readers = Reader(a.shards), Reader(b.shards)
    try:
        for name in sorted({*a, *b}, key=natural_key):
            different = _difference(a, b, name, readers, data=data)
            if different is not None:
                kind, detail = different
                found.append(Difference(name, kind, detail, _role(a if name in a else b, name)))
    finally:
        for reader in readers:
            reader.close()
    return found


def _difference(
    a: Checkpoint, b: Checkpoint, name: str, readers: tuple[Reader, Reader], *, data: bool
) -> tuple[str, str] | None:
    """Difference of a tensor: the kind, and a detail."""
    if name not in b:
        return "only-a", str(a[name].type)
    if name not in a:
        return "only-b", str(b[name].type)
    if a[name].type != b[name].type:
        return "type", f"{a[name].type} and {b[name].type}"
    at = _first_difference(readers, a[name], b[name]) if data else None
    return None if at is None else ("data", f"first differing byte {at} of {a[name].type.nbytes}")


def _role(checkpoint: Checkpoint, name: str) -> str:
    place = checkpoint.role_index.places.get(name)
    if place is not None:
        return place.role.name
    return own_role(name) or split_parameter(parse(name).template)[0]


def grouped_lines(found: Sequence[Difference], most: int = _MOST_LINES) -> Iterator[str]:
    """A line for each difference of a file beside the weights and for those of one kind in a role, at
    most `most` of each; the rest is counted."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    settings = [difference for difference in found if difference.of_file]
    yield from (_SAYS_OF_FILE[one.kind].format(one) for one in settings[:most])
    if len(settings) > most:
        yield f"... and {count(len(settings) - most, 'other difference')} of files beside the weights"
    for difference in found:
        if difference.of_file:
            continue
        groups.setdefault((difference.role, difference.kind), []).append(difference)
    shown = list(groups.items())[:most]
    for (role, kind), members in shown:
        first, number = members[0], count(len(members), "tensor")
        start = "first: " if len(members) > 1 else ""
        says = _SAYS[kind][len(members) > 1]
        yield f"{role}: {number} {says} ({start}{first.tensor}: {first.detail})"
    left = len(found) - len(settings) - sum(len(members) for _, members in shown)
    if left:
        yield f"... and {count(left, 'tensor')} of {count(len(groups) - len(shown), 'other group')}"


def lists_text(a: Checkpoint, b: Checkpoint) -> str:
    """Places of lists of modules that are not quantized which differ, and are not compared; "" of
    none."""
    lists = different_lists(a, b)
    return several(lists) if lists else ""


def uncompared_text(a: Checkpoint, b: Checkpoint) -> str:
    """Names of files that differ and are not counted, "" for none."""
    return several(uncompared_files(a, b))


def compared_text(a: Checkpoint, b: Checkpoint) -> str:
    """Names of the files beside the weights that were compared: `config.json, tokenizer.json`."""
    return several(compared_files(a, b))


def _first_difference(readers: tuple[Reader, Reader], a: Source, b: Source) -> int | None:
    """Offset of the first differing byte, None for equal tensors. Reading stops there."""
    size = a.type.nbytes
    buffers = [memoryview(bytearray(min(size, _CHUNK))) for _ in readers]
    for start in range(0, size, _CHUNK):
        ours, theirs = (buffer[: min(_CHUNK, size - start)] for buffer in buffers)
        readers[0].read(a, start, ours)
        readers[1].read(b, start, theirs)
        if ours != theirs:
            low, high = 0, ours.nbytes  # the first difference lies in [low, high)
            while high - low > 1:
                middle = (low + high) // 2
                if ours[low:middle] == theirs[low:middle]:
                    low = middle
                else:
                    high = middle
            return start + low
    return None
