"""The safetensors header, read strictly and written exactly.

Format (safetensors 0.8, README "Format"): 8 bytes little-endian header size, that many bytes of
JSON, then tensor data; `data_offsets` count from the end of the JSON, cover the data without hole
or overlap, and a `__metadata__` entry maps strings to strings. What violates this is refused, never
repaired: a header with wrong sizes is how a truncated download turns into garbage weights.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, NamedTuple

from qconvert.core.dtypes import DTYPE_BITS, TensorType, known_type
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.links import open_regular, reading
from qconvert.core.shown import shortened

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


# --- The JSON ------------------------------------------------------------------------------------
#
# It is read one tensor at a time. json.loads would take twenty bytes for each byte of `[[],[],...`:
# 2 GB for a header of the largest size allowed, before it could be refused.

_SPACE = rb"[ \t\n\r]*"
_NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
_MARK = re.compile(_SPACE + rb"([{}:,])" + _SPACE)
_UNPRINTED = re.compile(rb"[\x00-\x1f]")
# An entry as safetensors writers write it. All others are parsed by json.
_USUAL = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[(N(?:,N){0,63})?\],"data_offsets":\[(N),(N)\]\}'.replace(
        b"N", _NUMBER
    )
)
# The next tensor as they write it, with a name of plain characters: 2.6 us instead of 9.
_NEXT = re.compile(rb',"([A-Za-z0-9_.-]{1,512})":' + _USUAL.pattern)
_MOST_ENTRY = 16 << 10  # bytes of one tensor's entry; one of four dimensions takes about 100
_MOST_NUMBER = 2**63 - 1
_MOST_DIMENSIONS = 64  # numpy 2.4's limit, and torch's
_METADATA = "__metadata__"


class _Table:
    """A header's JSON: `pairs` are its tensors, each with where it ends, in the order of the text.

    Raises ValueError for invalid JSON or UTF-8, CheckpointError for an invalid header.
    """

    def __init__(self, file: Path, raw: bytes, data_start: int) -> None:
        self._file, self._raw, self._at, self._start = file, raw, 0, data_start
        self.metadata: dict[str, str] = {}
        self._types: dict[tuple[bytes, bytes | None], TensorType] = {}
        self.pairs: list[tuple[Entry, int]] = []
        if raw.lstrip(b" \t\n\r")[:1] in (b"[", b'"'):
            raise CheckpointError(f"{file}: its header is not a JSON object")
        names: set[str] = set()
        for name in self._keys():
            if name in names:
                raise CheckpointError(
                    f"{file}: the header names {name!r} twice; the file is broken"
                )
            names.add(name)
            if name == _METADATA:
                self.metadata = self._texts()
            else:
                self.pairs.append(self._entry(name))
            self._usual_ones(names)
        if raw[self._at :].strip(b" \t\n\r"):
            raise ValueError(f"extra data at byte {self._at}")

    def _usual_ones(self, names: set[str]) -> None:
        """Tensors in the usual spelling, up to one that has another, or that is invalid: that one is
        left to `_entry`, which says why."""
        begin, keep = self._start, self.pairs.append
        while (found := _NEXT.match(self._raw, self._at)) is not None:
            spelled, dtype, dims, first, last = found.groups()
            name, start, stop = spelled.decode(), int(first), int(last)
            known = self._types.get((dtype, dims))
            if known is None:
                try:
                    shape = tuple(map(int, dims.split(b","))) if dims else ()
                    known = known_type(dtype.decode(), shape)
                except PlanError:
                    return
                if max(*known.shape, 0, 0) > _MOST_NUMBER:
                    return
                self._types[dtype, dims] = known
            if name in names or name == _METADATA:
                return
            if stop > _MOST_NUMBER or stop - start != known.nbytes:
                return
            names.add(name)
            keep((Entry(name, known, begin + start), begin + stop))
            self._at = found.end()

    def _keys(self) -> Iterator[str]:
        """The keys of an object. Each key's value must be read before the next key is asked for."""
        if self._mark() != b"{":
            raise ValueError(f"expected an object at byte {self._at}")
        if self._raw[self._at : self._at + 1] == b"}":
            self._mark()
            return
        mark = b","
        while mark == b",":
            key = self._string()
            if self._mark() != b":":
                raise ValueError(f"expected a colon at byte {self._at}")
            yield key
            mark = self._mark()
        if mark != b"}":
            raise ValueError(f"expected a comma or a brace at byte {self._at}")

    def _mark(self) -> bytes:
        found = _MARK.match(self._raw, self._at)
        if found is None:
            raise ValueError(f"unexpected character at byte {self._at}")
        self._at = found.end()
        return found[1]

    def _string(self) -> str:
        raw, start = self._raw, self._at + 1
        stop = raw.find(b'"', start) if raw[self._at : start] == b'"' else -1
        # A quote after an odd number of backslashes is part of the text. (A pattern for all this would
        # take a hundred bytes of stack for each backslash.)
        while stop > 0 and _backslashes(raw, start, stop) % 2:
            stop = raw.find(b'"', stop + 1)
        if stop < 0 or _UNPRINTED.search(raw, start, stop):
            raise ValueError(f"expected a string at byte {self._at}")
        self._at = stop + 1
        text = raw[start:stop].decode("utf-8")
        if "\\" in text:
            text = json.loads(f'"{text}"')
            text.encode()  # half a surrogate pair can be escaped, but not written
        return text

    def _texts(self) -> dict[str, str]:
        """An object of strings."""
        found: dict[str, str] = {}
        if self._raw[self._at : self._at + 1] == b"{":
            for key in self._keys():
                if self._raw[self._at : self._at + 1] != b'"':
                    break
                if key in found:
                    raise CheckpointError(
                        f"{self._file}: the header names {key!r} twice; the file is broken"
                    )
                found[key] = self._string()
            else:
                return found
        raise CheckpointError(f"{self._file}: {_METADATA} must map strings to strings")

    def _entry(self, name: str) -> tuple[Entry, int]:
        usual = _USUAL.match(self._raw, self._at)
        if usual is not None:
            self._at = usual.end()
            dtype, dims, first, last = usual.groups()
            shape = [int(dim) for dim in dims.split(b",")] if dims else []
            offsets = [int(first), int(last)]
            return _entry(self._file, name, dtype.decode(), shape, offsets, self._start)
        stop = self._raw.find(b"}", self._at, self._at + _MOST_ENTRY) + 1
        if self._raw[self._at : self._at + 1] != b"{" or not stop:
            stop = self._at  # not an object, or a very large one
        value = None
        if stop > self._at:
            text = self._raw[self._at : stop].decode("utf-8")
            value = json.loads(text, object_pairs_hook=_unique(self._file))
            self._at = stop
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(
                f"{self._file}: tensor {name!r}: its header entry must have exactly dtype, shape and "
                "data_offsets; download the file again"
            )
        return _entry(
            self._file, name, value["dtype"], value["shape"], value["data_offsets"], self._start
        )


def _backslashes(raw: bytes, start: int, stop: int) -> int:
    """Return how many stand directly before `stop`."""
    at = stop
    while at > start and raw[at - 1] == 0x5C:
        at -= 1
    return stop - at


def _unique(file: Path) -> Any:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError(
                    f"{file}: the header names {name!r} twice; the file is broken"
                )
            found[name] = value
        return found

    return hook


def _entry(
    file: Path, name: str, dtype: Any, shape: Any, offsets: Any, data_start: int
) -> tuple[Entry, int]:
    """One header entry and where it ends, both from the start of the file."""

    def broken(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r}: {what}; download the file again")

    if _CONTROL.search(name):  # it would be written to the user's terminal
        raise broken("its name contains control characters")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {dtype!r}, expected one of "
            f"{', '.join(DTYPE_BITS)}; a newer qconvert may know it"
        )
    for label, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(
            type(n) is not int or not 0 <= n <= _MOST_NUMBER for n in numbers
        ):
            raise broken(
                f"{label} must be a list of integers from 0 to {_MOST_NUMBER}, found "
                f"{shortened(repr(numbers), 200)}"
            )
    if len(shape) > _MOST_DIMENSIONS:
        raise broken(f"expected at most {_MOST_DIMENSIONS} dimensions, found {len(shape)}")
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


# --- The file ------------------------------------------------------------------------------------


def read_header(file: Path, real: Path | None = None) -> Header:
    """Read and check one file's header. `real` is the file's resolved path, if links were resolved: it
    is opened, and must not be a link. Raises CheckpointError naming `file` (and tensor)."""
    with reading(file), os.fdopen(open_regular(real or file, follow=real is None), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(8)
        if len(first) < 8:
            raise CheckpointError(f"{file}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", first)
        if length > MAX_HEADER:
            raise CheckpointError(
                f"{file}: claims a header of {length} bytes (limit {MAX_HEADER}); "
                "this is not a safetensors file"
            )
        raw = stream.read(min(length, max(0, size - 8)))
    if len(raw) < length:
        raise CheckpointError(
            f"{file}: is truncated inside its header ({8 + length} bytes needed, {size} found); "
            "download it again"
        )
    data_start = 8 + length
    try:
        table = _Table(file, raw, data_start)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its header is not JSON: {error}") from error
    found = sorted(table.pairs, key=lambda pair: (pair[0].offset, pair[1]))
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
        what = "is truncated" if size < at else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{file}: {what}: its header accounts for {at} bytes, the file has {size}; "
            "download it again"
        )
    return Header(tuple(entry for entry, _ in found), table.metadata, data_start, size, first + raw)


def build_header(
    tensors: Sequence[tuple[str, TensorType]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[int, ...]]:
    """Header bytes for tensors laid out in the given order, and each one's offset in the file.

    The header is padded so that data starts at a multiple of DATA_ALIGNMENT.
    """
    at = 0
    starts = []
    # Written entry by entry: json.dumps takes three times as long. A model has few types, which live as
    # long as `tensors` do.
    text = [_metadata_text(metadata)]
    spelled: dict[int, str] = {}
    for name, kind in tensors:
        begin = spelled.get(id(kind))
        if begin is None:
            begin = spelled[id(kind)] = _type_text(kind)
        stop = at + kind.nbytes
        text.append(f",{encode_basestring(name)}:{begin}{at},{stop}]}}")
        starts.append(at)
        at = stop
    text.append("}")
    body = "".join(text).encode()
    body += b" " * (-(8 + len(body)) % DATA_ALIGNMENT)
    raw = struct.pack("<Q", len(body)) + body
    return raw, tuple([len(raw) + start for start in starts])


def header_places(
    tensors: Sequence[tuple[str, TensorType]], metadata: Mapping[str, str]
) -> tuple[int, tuple[int, ...]]:
    """Return how long the header of `build_header` is, and its offsets, without the header: of Kimi-K2's
    276,480 tiles it is 28 MB of text, which takes twice as long to make as to measure."""
    length = 8 + len(_metadata_text(metadata).encode()) + len("}")
    at, digits = 0, 1
    starts = []
    around: dict[int, int] = {}
    for name, kind in tensors:
        fixed = around.get(id(kind))
        if fixed is None:
            fixed = around[id(kind)] = len(_type_text(kind)) + len(",:,]}")
        starts.append(at)
        at += kind.nbytes
        spelled, behind = encode_basestring(name), len(str(at))
        named = len(spelled) if spelled.isascii() else len(spelled.encode())
        length += fixed + named + digits + behind
        digits = behind
    length += -length % DATA_ALIGNMENT
    return length, tuple([length + start for start in starts])


def _metadata_text(metadata: Mapping[str, str]) -> str:
    """The JSON up to the first tensor."""
    text = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)
    return '{"__metadata__":' + text


def _type_text(kind: TensorType) -> str:
    """An entry up to its first offset."""
    shape = ",".join(map(str, kind.shape))
    return f'{{"dtype":"{kind.dtype}","shape":[{shape}],"data_offsets":['
