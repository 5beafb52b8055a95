"""The header of a GGUF file: its facts, and where each tensor lies.

Format source: ggml, `docs/gguf.md` (versions 2 and 3, little-endian), and block sizes of its types as
gguf 0.19 has them (`constants.py`, GGML_QUANT_SIZES). What violates it is refused, never repaired.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError
from qconvert.core.links import open_regular, reading
from qconvert.core.shown import count, format_size

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
# Formats of struct by the number of a value's type.
_NUMBERS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
# Of a model's vocabulary are lists of hundreds of thousands: only their length is kept.
_MOST_KEPT = 4096
_MOST_TENSORS, _MOST_DIMS = 1 << 20, 4
_ALIGNMENT = 32
# Vocabularies of a million words take 40 MB.
_MOST_HEADER = 512 << 20


class Blocks(NamedTuple):
    """A type of ggml: columns that make a block, and the bytes of one."""

    columns: int
    nbytes: int


# Types whose numbers are read, by name; those of one column are stored as they are.
TYPES: Mapping[str, Blocks] = {
    "F32": Blocks(1, 4), "F16": Blocks(1, 2), "BF16": Blocks(1, 2),
    "Q4_0": Blocks(32, 18), "Q4_1": Blocks(32, 20), "Q5_0": Blocks(32, 22), "Q5_1": Blocks(32, 24),
    "Q8_0": Blocks(32, 34), "Q2_K": Blocks(256, 84), "Q3_K": Blocks(256, 110),
    "Q4_K": Blocks(256, 144), "Q5_K": Blocks(256, 176), "Q6_K": Blocks(256, 210),
    "MXFP4": Blocks(32, 17),
}  # fmt: skip
_NAMES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """A tensor: its type's name, its shape with rows first, and its first byte within the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def stored(self) -> TensorType:
        """The type of its bytes: numbers as they are, blocks as U8 [..., bytes of a row]."""
        block = TYPES[self.kind]
        if block.columns == 1:
            return TensorType(self.kind, self.shape)
        *lead, columns = self.shape
        return TensorType("U8", (*lead, columns // block.columns * block.nbytes))


class Long(NamedTuple):
    """A list whose items are not kept."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Facts of a file by key, its tensors in the file's order, its size, and a hash of the header."""

    facts: Mapping[str, Any]
    tensors: Sequence[GgufTensor]
    file_size: int
    digest: str


def read_gguf(file: Path) -> GgufHeader:
    """Read the header of a file. Raises CheckpointError for one that is no GGUF file of these versions,
    is cut short, or has a tensor of a type that is not read here."""
    with reading(file), os.fdopen(open_regular(file, follow=True), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        at = _Cursor(file, stream, size)
        if at.take(4) != _MAGIC:
            raise CheckpointError(f"{file}: is not a GGUF file; it does not begin with GGUF")
        version = at.number("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{file}: expected GGUF version 2 or 3, little-endian, found {version}"
            )
        tensors, facts = at.number("Q"), at.number("Q")
        if tensors > _MOST_TENSORS:
            raise CheckpointError(
                f"{file}: expected at most {count(_MOST_TENSORS, 'tensor')}, found {tensors}"
            )
        known = {}
        for _ in range(facts):
            key = at.text()
            known[key] = at.value(at.number("I"))
        found = [_tensor(at) for _ in range(tensors)]
        stop = at.read
        stream.seek(0)
        digest = sha256(stream.read(stop)).hexdigest()
    alignment = known.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise CheckpointError(f"{file}: expected a general.alignment, found {alignment!r}")
    begin = -(-stop // alignment) * alignment
    placed = [one._replace(offset=begin + one.offset) for one in found]
    _check(file, placed, size)
    return GgufHeader(known, placed, size, digest)


def read_floats(file: Path, vector: GgufTensor) -> tuple[float, ...]:
    """The numbers of a short vector in F32. Raises CheckpointError if it cannot be read."""
    with reading(file), os.fdopen(open_regular(file, follow=True), "rb") as stream:
        stream.seek(vector.offset)
        (length,) = vector.shape
        return struct.unpack(f"<{length}f", stream.read(4 * length))


class _Cursor:
    """A file's bytes from the first on. Raises CheckpointError where it ends too early."""

    def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
        self.file, self.read, self._size, self._take = file, 0, size, stream.read

    def take(self, nbytes: int) -> bytes:
        self.read += nbytes
        if self.read > self._size:
            raise CheckpointError(f"{self.file}: ends within its header; download it again")
        if self.read > _MOST_HEADER:
            raise CheckpointError(
                f"{self.file}: expected a header of at most {format_size(_MOST_HEADER)}, found more"
            )
        return self._take(nbytes)

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file}: a text of its header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _TEXT:
            return self.text()
        item, length = (self.number("I"), self.number("Q")) if kind == _LIST else (-1, 0)
        if item in _NUMBERS:
            data = self.take(length * struct.calcsize(f"<{_NUMBERS[item]}"))
            if length > _MOST_KEPT:
                return Long(length)
            return struct.unpack(f"<{length}{_NUMBERS[item]}", data)
        if item != _TEXT:
            raise CheckpointError(f"{self.file}: a value of its header has unknown type {kind}")
        for _ in range(length):
            self.take(self.number("Q"))
        return Long(length)


def _tensor(at: _Cursor) -> GgufTensor:
    """An entry; its offset counts from where data begins."""
    name, dims = at.text(), at.number("I")
    if not 0 < dims <= _MOST_DIMS:
        raise CheckpointError(f"{at.file}: tensor {name!r} has {dims} dimensions")
    shape = tuple(at.number("Q") for _ in range(dims))[::-1]
    if min(shape) < 1:
        raise CheckpointError(f"{at.file}: tensor {name!r} has no elements: {list(shape)}")
    number = at.number("I")
    kind = _NAMES.get(number, f"type {number}")
    if kind not in TYPES:
        raise CheckpointError(
            f"{at.file}: tensor {name!r} is {kind}, which is not read here: {', '.join(TYPES)} are"
        )
    return GgufTensor(name, kind, shape, at.number("Q"))


def _check(file: Path, tensors: Sequence[GgufTensor], size: int) -> None:
    """Raise CheckpointError for blocks that do not fit a row, for tensors of one name or of the same
    bytes, and for bytes beyond the file."""
    names = set()
    last, name = 0, ""
    for one in sorted(tensors, key=lambda tensor: tensor.offset):
        if one.name in names:
            raise CheckpointError(f"{file}: names tensor {one.name!r} twice; the file is broken")
        names.add(one.name)
        columns, nbytes = TYPES[one.kind]
        if one.shape[-1] % columns:
            raise CheckpointError(
                f"{file}: tensor {one.name!r}: expected rows in blocks of {columns} for {one.kind}, "
                f"found {list(one.shape)}"
            )
        if one.offset < last:
            raise CheckpointError(f"{file}: tensors {name!r} and {one.name!r} overlap")
        last, name = one.offset + prod(one.shape) // columns * nbytes, one.name
    if last > size:
        raise CheckpointError(
            f"{file}: expected at least {last} bytes, since tensor {name!r} ends there, found {size}; "
            "download it again"
        )
