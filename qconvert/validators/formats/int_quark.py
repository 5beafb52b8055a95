"""Integers of AMD Quark, whose codes are called `weight`.

Format source: amd-quark 0.13 (`torch/utils/pack.py`, `torch/export/nn/modules/realquantizer.py`), as
vLLM reads it (`quark/schemes/quark_w4a16_int4.py`, `quark_w8a8_int8.py`). INT4: I32 [K, N / 8] of a
matrix [N, K], `weight_zero_point` I32 [groups, N / 8], `weight_scale` [groups, N]; `int4` is in two's
complement, `uint4` is not; rows of a word as AutoAWQ has them (pack_method `reorder`) or in order.
INT8: I8 [N, K], `weight_zero_point` I8 and `weight_scale` of N numbers. Symmetric ones may have zero
points.

QC089 a part of Quark's integers has a type or shape that bits and group size do not give.
QC088 zero points are missing that the config states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.validation.findings import Finding
from qconvert.validators.formats.packed import INT_SCALES
from qconvert.validators.formats.qweight import AWQ_ORDER
from qconvert.validators.reading.forms import Codes, Form, Grid, Shape, Spec, Unread, Weights
from qconvert.validators.reading.quantization import blocks, scheme_of

_PARTS = ("weight_scale", "weight_zero_point")


def _stated(checkpoint: Checkpoint, name: str) -> Weights | None:
    """Quark's statement about a module's integers, None for another's."""
    found = scheme_of(checkpoint, name.removesuffix(".weight"))
    return found if found is not None and "signed" in found else None


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    found = _stated(checkpoint, name) if name.endswith(".weight") else None
    if found is None:
        return False
    words = checkpoint[name].type.dtype == "I32"
    return (found["num_bits"], found["strategy"]) == ((4, "group") if words else (8, "channel"))


def _sizes(kind: TensorType) -> tuple[int, int]:
    """Rows and columns of the matrix."""
    first, last = kind.shape
    return (8 * last, first) if kind.dtype == "I32" else (first, last)


def _wanted(
    kind: TensorType, stated: Weights
) -> dict[str, tuple[tuple[str, ...], tuple[Shape, ...]]]:
    """Types and shapes of the parts beside codes."""
    rows, columns = _sizes(kind)
    if kind.dtype == "I8":
        shapes: tuple[Shape, ...] = ((rows,), (rows, 1))
        return {_PARTS[0]: (INT_SCALES, shapes), _PARTS[1]: (("I8",), shapes)}
    groups = columns // max(1, stated["group_size"])
    return {
        _PARTS[0]: (INT_SCALES, ((groups, rows),)),
        _PARTS[1]: (("I32",), ((groups, rows // 8),)),
    }


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    kind, stated = checkpoint[name].type, _stated(checkpoint, name)
    if stated is None:
        return
    size = stated.get("group_size")
    if stated["strategy"] == "group" and (type(size) is not int or size < 1):
        message = f"expected a group_size of Quark's integers, found {size!r}"
        yield Finding("QC089", "error", name, message)
        return
    if len(kind.shape) != 2 or (size is not None and _sizes(kind)[1] % size):
        message = f"expected a matrix of whole groups of {size} columns, found {kind}"
        yield Finding("QC089", "error", name, message)
        return
    for part, (dtypes, shapes) in _wanted(kind, stated).items():
        found = checkpoint.get(name.removesuffix("weight") + part)
        if found is None and (part == _PARTS[0] or not stated["symmetric"]):
            yield Finding("QC088", "error", name, f"has no {part}, which the config states")
        elif found is not None and (
            found.type.dtype not in dtypes or found.type.shape not in shapes
        ):
            message = (
                f"expected {' or '.join(dtypes)} {list(shapes[0])} for {kind}, found {found.type}"
            )
            yield Finding("QC089", "error", found.name, message)


def _read(checkpoint: Checkpoint, name: str) -> Form:
    for fault in _faults(checkpoint, name):
        raise Unread(f"{fault.where}: {fault.message}")
    weight, stated = checkpoint[name], _stated(checkpoint, name)
    assert stated is not None
    scale, zeros = (checkpoint.get(name.removesuffix("weight") + part) for part in _PARTS)
    assert scale is not None
    rows, columns = _sizes(weight.type)
    if weight.type.dtype == "I8":
        codes = Codes(8, zeros is None, zeros, signed=True)
        return Form(
            "w8a8", weight, 0, rows, columns, Grid(scale, 0, rows, 1, (1, columns)), codes=codes
        )
    size = stated["group_size"]
    grid = Grid(scale, 0, rows, columns // size, (1, size), transposed=True)
    order = tuple(range(8)) if _in_order(checkpoint) else AWQ_ORDER
    codes = Codes(4, zeros is None, zeros, row_order=order, complement=stated["signed"])
    return Form("w4a16", weight, 0, rows, columns, grid, transposed=True, codes=codes)


def _in_order(checkpoint: Checkpoint) -> bool:
    """Tell whether a word's nibbles are of rows in their order."""
    export: Any = next(
        (
            one.config.block.get("export")
            for one in blocks(checkpoint)
            if one.config.method == "quark"
        ),
        None,
    )
    return isinstance(export, Mapping) and export.get("pack_method") == "order"


SPEC = Spec(
    name="Quark integers",
    dtypes=("I32", "I8"),
    applies=lambda folder: any(one.method == "quark" for one in folder.quantization_configs),
    stored=_stored,
    read=_read,
    faults=_faults,
    encodings=(),
    parts=("weight_zero_point",),
    states=lambda weights: "signed" in weights,
)
