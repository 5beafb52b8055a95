"""The safetensors header, read strictly and written exactly.

Format (safetensors 0.8, README "Format"): 8 bytes little-endian header size, that many bytes of
JSON, then tensor data; `data_offsets` count from the end of the JSON, cover the data without hole
or overlap, and a `__metadata__` entry maps strings to strings. What does not hold is refused, never
repaired: a header that lies about sizes is how a truncated download turns into garbage weights.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.errors import CheckpointError, PlanError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
MAX_HEADER = 100_000_000  # the limit of safetensors' own reader
# Tensor data of our files starts at a multiple of this, so that a writer may go around the page
# cache (O_DIRECT wants block-aligned file offsets). The JSON is padded with spaces, which the
# format allows.
DATA_ALIGNMENT = 4096


class Entry(NamedTuple):
    """One tensor of a file; `offset` in bytes from the start of the file."""

    name: str
    type: TensorType
    offset: int


class Header(NamedTuple):
    """A file's tensors in order of offset, its metadata, and its raw header bytes."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int
    raw: bytes


def _unique(file: Path) -> Any:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{file}: the header names {twice!r} twice; the file is broken")
        return found

    return hook


def _parse(file: Path, raw: bytes) -> Any:
    """The header's JSON. Raises ValueError where it is none, or its text no UTF-8."""
    text = raw.decode("utf-8")  # left to json, UTF-16 and a byte order mark would pass as well
    table = json.loads(text, object_pairs_hook=_unique(file))
    if "\\ud" in text.lower():  # half a surrogate pair can be escaped, and cannot be written
        json.dumps(table, ensure_ascii=False).encode()
    return table


def _entry(file: Path, name: str, value: Any, data_start: int) -> tuple[Entry, int]:
    """One header entry and where it ends, both from the start of the file."""

    def broken(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {what}; download the file again")

    if _CONTROL.search(name):  # it would reach the user's terminal
        raise broken("its name holds control characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise broken("its header entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {dtype!r}, which is none of "
            f"{', '.join(DTYPE_BITS)}; a newer qconvert may know it"
        )
    for label, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise broken(f"{label} must be a list of non-negative integers, found {numbers!r}")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise broken(f"data_offsets must be [start, stop], found {offsets!r}")
    try:
        tensor_type = TensorType(dtype, tuple(shape))
    except PlanError as error:  # sub-byte elements that do not fill whole bytes
        raise broken(str(error)) from error
    if offsets[1] - offsets[0] != tensor_type.nbytes:
        raise broken(
            f"{tensor_type} takes {tensor_type.nbytes} bytes, the header gives it "
            f"{offsets[1] - offsets[0]}"
        )
    return Entry(name, tensor_type, data_start + offsets[0]), data_start + offsets[1]


def read_header(file: Path) -> Header:
    """Read and check one file's header. Raises CheckpointError naming the file (and tensor)."""
    try:
        status = file.stat()
        if not S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise CheckpointError(f"{file}: is not a regular file")
        size = status.st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            if len(first) < 8:
                raise CheckpointError(f"{file}: {size} bytes is too short for a safetensors file")
            (length,) = struct.unpack("<Q", first)
            if length > MAX_HEADER:
                raise CheckpointError(
                    f"{file}: claims a header of {length} bytes (limit {MAX_HEADER}); "
                    "this is not a safetensors file"
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if len(raw) < length:
        raise CheckpointError(
            f"{file}: is cut off inside its header ({8 + length} bytes needed, {size} found); "
            "download it again"
        )
    try:
        table = _parse(file, raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: its header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map strings to strings")
    data_start = 8 + length
    found = sorted(
        (_entry(file, name, value, data_start) for name, value in table.items()),
        key=lambda pair: (pair[0].offset, pair[1]),
    )
    at = data_start
    for entry, end in found:
        if entry.offset != at:
            kind = "overlaps the tensor before it" if entry.offset < at else "leaves a hole"
            raise CheckpointError(
                f"{file}: tensor {entry.name!r} starts at byte {entry.offset}, expected {at}: "
                f"it {kind}; download the file again"
            )
        at = end
    if at != size:
        what = "is cut off" if size < at else "has bytes no tensor owns"
        raise CheckpointError(
            f"{file}: {what}: its header accounts for {at} bytes, the file has {size}; "
            "download it again"
        )
    return Header(tuple(entry for entry, _ in found), metadata, data_start, size, first + raw)


def build_header(
    tensors: Sequence[tuple[str, TensorType]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[int, ...]]:
    """Header bytes for tensors laid out in the given order, and each one's offset in the file.

    The header is padded so that data starts at a multiple of DATA_ALIGNMENT.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    starts = []
    for name, tensor_type in tensors:
        starts.append(at)
        table[name] = {
            "dtype": tensor_type.dtype,
            "shape": list(tensor_type.shape),
            "data_offsets": [at, at + tensor_type.nbytes],
        }
        at += tensor_type.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    raw = struct.pack("<Q", len(text)) + text
    return raw, tuple(len(raw) + start for start in starts)
