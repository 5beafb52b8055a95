"""Two checkpoints compared tensor by tensor, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.core.names import natural_key
from qconvert.run.reader import Reader

_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind` is `only-a`, `only-b`, `type` or `data`."""

    tensor: str
    kind: str
    detail: str


def compare(a: Checkpoint, b: Checkpoint, *, data: bool = True) -> list[Difference]:
    """Every tensor that differs, in the order a model runs in."""
    found: list[Difference] = []
    readers = Reader(a.shards), Reader(b.shards)
    try:
        for name in sorted({*a, *b}, key=natural_key):
            if name not in b:
                found.append(Difference(name, "only-a", str(a[name].type)))
            elif name not in a:
                found.append(Difference(name, "only-b", str(b[name].type)))
            elif a[name].type != b[name].type:
                found.append(Difference(name, "type", f"{a[name].type} and {b[name].type}"))
            elif data:
                at = _first_difference(readers, a[name], b[name])
                if at is not None:
                    detail = f"first differing byte {at} of {a[name].type.nbytes}"
                    found.append(Difference(name, "data", detail))
    finally:
        for reader in readers:
            reader.close()
    return found


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
