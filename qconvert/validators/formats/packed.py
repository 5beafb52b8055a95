"""Packed integers of compressed-tensors (`compressors/pack_quantized/`), and what configs state of
packed integers of any tool.

`weight_packed` I32 [N, ceil(K * bits / 32)], `weight_scale` [N, groups], `weight_shape` [2]; asymmetric
ones have `weight_zero_point` I32 [ceil(N * bits / 32), groups], those of actorder group `weight_g_idx`
I32 [K].
INT8 (`int-quantized`, `compressors/naive_quantized/`): codes I8 [N, K] as `weight`, a scale a row; zero
points I8 [N, groups] if asymmetric.

QC027 a type or shape that the format does not have.
QC038 the config's group size is not that of the packed weights' scales.
QC088 zero points or group indices (g_idx) are not those that the config states.
QC089 a part of packed integers has a type or shape that bits and group size do not give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import ceil_div
from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validators.reading.decode import SCALES, int4_floats, int8_floats
from qconvert.validators.reading.forms import (
    Codes,
    Encoding,
    Form,
    Grid,
    Shape,
    Spec,
    Unread,
    Weights,
    words_of,
)
from qconvert.validators.reading.quantization import stated_for

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Bytes, Floats

INT_SCALES, INDEX = SCALES[:3], ("I32", "I64")
PASSES = ("w4a16", "int8", "quantize")


# --- Statements ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackedInts:
    """Form of packed integers, by a config: `bits` from 2 to 8, a scale for each `group` columns
    (None: for a row), zero points unless `symmetric`; `ordered`: the group of each column is stored too
    (g_idx)."""

    bits: int
    group: int | None
    symmetric: bool
    ordered: bool

    def groups(self, columns: int) -> int:
        """Scales in a row."""
        return ceil_div(columns, self.group or columns)

    def columns(self, words: int, scales: Shape = ()) -> int:
        """Columns of a row of so many words: whole groups, as many as it has scales, where those take so
        many words; else all that the words hold."""
        wide = self.group * scales[-1] if self.group and len(scales) == 2 else 0
        return wide if wide and words_of(wide, self.bits) == words else words * 32 // self.bits

    def encoding(self, columns: int) -> str:
        """The name of what reads a row of so many codes."""
        whole = self.bits in (4, 8) and columns * self.bits % 32 == 0
        return f"w{self.bits}a16" if whole else f"int{self.bits}"

    def __str__(self) -> str:
        return f"groups of {self.group}" if self.group else "one scale a row"


def ints_of(checkpoint: Checkpoint, module: str) -> PackedInts | None:
    """The form of packed weights that compressed-tensors blocks state for a module: that of the group
    that covers it, else the one that all share. None for none or several."""
    return stated_for(checkpoint, module, packed_ints)


def packed_ints(weights: Weights) -> PackedInts | None:
    """A scale a row: compressed-tensors infers that from a group size of -1."""
    size, bits, strategy = (weights.get(key) for key in ("group_size", "num_bits", "strategy"))
    by_row = strategy == "channel" or (strategy is None and size == -1)
    if weights.get("type", "int") != "int" or type(bits) is not int or bits not in range(2, 9):
        return None
    if not by_row and (type(size) is not int or size < 1):
        return None
    symmetric = weights.get("symmetric", True) is not False
    ordered = weights.get("actorder") == "group"
    return PackedInts(bits, None if by_row else size, symmetric, ordered)


# --- Parts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor beside codes: its types and shape, and the key of the config that says whether there
    has to be one (`asked`)."""

    name: str
    dtypes: tuple[str, ...]
    shape: Shape
    asked: bool = True
    key: str = ""


def part_faults(
    checkpoint: Checkpoint, name: str, stated: PackedInts, parts: Iterable[Part]
) -> Iterator[Finding]:
    """Findings about the parts beside codes."""
    module = name.rpartition(".")[0]
    for part in parts:
        found = checkpoint.get(f"{module}.{part.name}")
        if found is not None and (part.asked or not part.key):
            yield from unlike(found, part.dtypes, part.shape, stated)
        elif found is not None:
            message = f"exists, but the config's {part.key} says that there is none"
            yield Finding("QC088", "error", found.name, message)
        elif part.asked:
            why = f"but the config's {part.key} requires one" if part.key in _CT else _LOADERS
            yield Finding("QC088", "error", name, f"has no {part.name}, {why}")


_CT, _LOADERS = ("symmetric", "actorder"), "which every loader requires"


def unlike(
    found: Source, dtypes: tuple[str, ...], shape: Shape, stated: PackedInts
) -> Iterator[Finding]:
    if found.type.dtype not in dtypes or found.type.shape != shape:
        message = (
            f"the config states {stated.bits} bits and {stated}: expected {' or '.join(dtypes)} "
            f"{list(shape)}, found {found.type}"
        )
        yield Finding("QC089", "error", found.name, message)


def checked(stated: PackedInts, columns: int, faults: Iterable[Finding]) -> int:
    """Scales in a row of a matrix whose parts have no fault. Raises Unread."""
    for fault in faults:
        raise Unread(f"{fault.where}: {fault.message}")
    if stated.group is not None and columns % stated.group:
        raise Unread(f"{columns} columns are not whole groups of {stated.group}")
    return stated.groups(columns)


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight_packed")


def _columns(checkpoint: Checkpoint, module: str, stated: PackedInts) -> int:
    """Columns of a matrix of packed words; of one with a scale a row, as its `weight_shape` states."""
    words = checkpoint[f"{module}.weight_packed"].type.shape[1]
    scale, shape = (checkpoint.get(f"{module}.weight_{part}") for part in ("scale", "shape"))
    if stated.group is None and shape is not None:
        found = checkpoint.read_shape(shape)
        if found is not None and words_of(found[1], stated.bits) == words:  # else QC086
            return found[1]
    return stated.columns(words, () if scale is None else scale.type.shape)


def _parts(rows: int, columns: int, stated: PackedInts) -> tuple[Part, ...]:
    zeros = words_of(rows, stated.bits), stated.groups(columns)
    return (
        Part("weight_zero_point", ("I32",), zeros, not stated.symmetric, "symmetric"),
        Part("weight_g_idx", INDEX, (columns,), stated.ordered, "actorder"),
    )


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    kind, stem = checkpoint[name].type, name.removesuffix("packed")
    if len(kind.shape) != 2:
        yield Finding("QC027", "error", name, f"expected I32 [N, K / 8], found {kind}")
        return
    shape = checkpoint.get(f"{stem}shape")
    if shape is not None and (shape.type.dtype not in INDEX or shape.type.shape != (2,)):
        message = f"expected I64 or I32 [2], found {shape.type}"
        yield Finding("QC027", "error", shape.name, message)
    yield from _unread(checkpoint, name)


def _unread(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    """Faults of parts without which nothing can be read."""
    kind, module = checkpoint[name].type, name.removesuffix(".weight_packed")
    stated, scale = ints_of(checkpoint, module), checkpoint.get(f"{module}.weight_scale")
    if scale is not None:
        found, rows = scale.type, kind.shape[0]
        if found.dtype not in INT_SCALES or len(found.shape) != 2 or found.shape[0] != rows:
            message = f"expected a scale [{rows}, K / group], found {found}"
            yield Finding("QC027", "error", scale.name, message)
        if stated is not None and len(found.shape) == 2:
            columns = _columns(checkpoint, module, stated)
            wanted = stated.groups(columns)
            if found.shape[1] != wanted:
                message = (
                    f"the config states {stated}: expected {wanted} scales a row of {columns} columns, "
                    f"found {found}"
                )
                yield Finding("QC038", "error", scale.name, message)
    if stated is not None:
        columns = _columns(checkpoint, module, stated)
        yield from part_faults(checkpoint, name, stated, _parts(kind.shape[0], columns, stated))


def _read(checkpoint: Checkpoint, name: str) -> Form:
    packed, module = checkpoint[name], name.removesuffix(".weight_packed")
    scale, zeros, order = (
        checkpoint.get(f"{module}.weight_{part}") for part in ("scale", "zero_point", "g_idx")
    )
    if len(packed.type.shape) != 2 or scale is None:
        raise Unread(f"packed as {packed.type}" if scale else "it has no scale")
    stated = ints_of(checkpoint, module)
    if stated is None:
        raise Unread("the config states no form of packed integers for it, or several")
    rows, columns = packed.type.shape[0], _columns(checkpoint, module, stated)
    groups = checked(stated, columns, _unread(checkpoint, name))
    grid = Grid(scale, 0, rows, groups, (1, columns // groups))
    codes = Codes(stated.bits, stated.symmetric, zeros, 0, order)
    return Form(stated.encoding(columns), packed, 0, rows, columns, grid, codes=codes)


def _shape(checkpoint: Checkpoint, name: str, shape: Shape) -> Shape | None:
    stated = ints_of(checkpoint, name.removesuffix(".weight_packed"))
    if stated is None:
        return None
    return (*shape[:-1], -1 if shape[-1] < 0 else ceil_div(shape[-1] * stated.bits, 32))


def _states(weights: Weights) -> bool:
    return weights.get("type", "int") == "int" and weights.get("num_bits", 8) in range(2, 9)


def _floats4(packed: Bytes, dtype: str) -> Floats:
    return int4_floats(packed)


def _floats8(packed: Bytes, dtype: str) -> Floats:
    return int8_floats(packed)


def _floats_apart(bits: int, codes: Bytes, dtype: str) -> Floats:
    """Stored codes, a byte each."""
    import numpy as np

    return codes.astype(np.float32) - np.float32(1 << (bits - 1))


def _apart(bits: int) -> Encoding:
    """Codes that are no whole words of 4 or 8 bits."""
    read, largest = partial(_floats_apart, bits), float(1 << (bits - 1))
    return Encoding(name=f"int{bits}", bits=8, floats=read, largest=largest, apart=bits)


PACKED = Spec(
    name="packed integers",
    dtypes=("I32",),
    stored=_stored,
    read=_read,
    faults=_faults,
    shape=_shape,
    encodings=(
        Encoding(
            name="w4a16", bits=4, floats=_floats4, loop="int4_rows", largest=8.0, passes=PASSES
        ),
        Encoding(name="w8a16", bits=8, floats=_floats8, largest=128.0, passes=PASSES),
        *map(_apart, range(2, 9)),
    ),
    parts=("weight_shape", "zero_point", "g_idx"),
    states=_states,
    formats=("pack-quantized",),
)


# --- INT8 ----------------------------------------------------------------------------------------


def _stored_int8(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and f"{name}_scale" in checkpoint.sources


def _faults_int8(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    kind, scale = checkpoint[name].type, checkpoint[f"{name}_scale"]
    if len(kind.shape) != 2:
        return
    rows, columns = kind.shape
    stated = ints_of(checkpoint, name.removesuffix(".weight"))
    groups = 1 if stated is None else stated.groups(columns)
    if scale.type.dtype not in INT_SCALES or scale.type.shape != (rows, groups):
        each = "a scale" if groups == 1 else f"{groups} scales"
        message = f"expected {each} a row, [{rows}, {groups}], for {kind}, found {scale.type}"
        yield Finding("QC027", "error", scale.name, message)


def _read_int8(checkpoint: Checkpoint, name: str) -> Form:
    weight, scale = checkpoint[name], checkpoint[f"{name}_scale"]
    stated = ints_of(checkpoint, name.removesuffix(".weight"))
    zeros = checkpoint.get(f"{name}_zero_point")
    if stated is None or stated.bits != 8 or stated.ordered:
        raise Unread("it is I8, and the config states no INT8 for it with groups side by side")
    if stated.symmetric != (zeros is None):
        has = "no zero points" if zeros is None else "zero points"
        raise Unread(f"it has {has}, and the config says symmetric: {stated.symmetric}")
    if len(weight.type.shape) != 2:
        raise Unread(f"INT8 of shape {list(weight.type.shape)}")
    rows, columns = weight.type.shape
    shape = rows, stated.groups(columns)
    parts = [(scale, INT_SCALES), *([] if zeros is None else [(zeros, ("I8",))])]
    faults = (f for part, dtypes in parts for f in unlike(part, dtypes, shape, stated))
    groups = checked(stated, columns, faults)
    codes = Codes(8, stated.symmetric, zeros, signed=True)
    grid = Grid(scale, 0, rows, groups, (1, columns // groups))
    return Form("w8a8", weight, 0, rows, columns, grid, codes=codes)


def _states_int8(weights: Weights) -> bool:
    return (weights.get("type", "int"), weights.get("num_bits", 8)) == ("int", 8)


def _floats_int8(data: Bytes, dtype: str) -> Floats:
    import numpy as np

    return data.view(np.int8).astype(np.float32)


INT8 = Spec(
    name="INT8",
    dtypes=("I8",),
    applies=lambda checkpoint: ".weight_scale" in checkpoint.ends,
    stored=_stored_int8,
    read=_read_int8,
    faults=_faults_int8,
    shape=lambda checkpoint, name, shape: shape,
    encodings=(Encoding(name="w8a8", bits=8, floats=_floats_int8, largest=128.0, passes=PASSES),),
    states=_states_int8,
    formats=("int-quantized", "naive-quantized"),
)

SPECS = PACKED, INT8
