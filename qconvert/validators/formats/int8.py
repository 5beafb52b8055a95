"""INT8 as compressed-tensors 0.19 stores it (`int-quantized`, `compressors/naive_quantized/`): codes I8
[N, K] as `weight`, a scale a row; zero points I8 [N, groups] if asymmetric.

QC027 a type or shape that the format does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validators.formats.packed import INT_SCALES, PASSES, checked, ints_of, unlike
from qconvert.validators.reading.forms import Codes, Encoding, Form, Grid, Spec, Unread, Weights

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Bytes, Floats


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and f"{name}_scale" in checkpoint.sources


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    kind, scale = checkpoint[name].type, checkpoint[f"{name}_scale"]
    if len(kind.shape) != 2:
        return
    rows = kind.shape[0]
    if scale.type.dtype not in INT_SCALES or scale.type.shape != (rows, 1):
        message = f"expected a scale a row, [{rows}, 1], for {kind}, found {scale.type}"
        yield Finding("QC027", "error", scale.name, message)


def _read(checkpoint: Checkpoint, name: str) -> Form:
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


def _states(weights: Weights) -> bool:
    return weights.get("type", "int") == "int" and weights.get("num_bits", 8) == 8


def _floats(data: Bytes, dtype: str) -> Floats:
    import numpy as np

    return data.view(np.int8).astype(np.float32)


SPEC = Spec(
    name="INT8",
    dtypes=("I8",),
    stored=_stored,
    read=_read,
    faults=_faults,
    shape=lambda checkpoint, name, shape: shape,
    encodings=(Encoding(name="w8a8", bits=8, floats=_floats, largest=128.0, passes=PASSES),),
    states=_states,
    formats=("int-quantized", "naive-quantized"),
)
