"""msmodelslim's integers (26.1, `modelslim_v1/save/ascendv1.py`; read by vllm-ascend,
`quantization/methods/`): `quant_model_description.json` names the type of each tensor.

`weight` I8 [N, K]; `weight_scale` and `weight_offset` [N, groups] in floats, or of static W8A8
`deq_scale` [N], F32 or its bits in I64, the product with `input_scale` [1]. W4A8: `weight` [N / 2, K],
two rows in one.

QC011 codes without their other parts.
QC027 a type or shape that the format does not have.
QC096 the description names another type than that of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import ASCEND, Checkpoint
from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validators.reading.decode import SCALES, floats
from qconvert.validators.reading.forms import Codes, Encoding, Form, Grid, Shape, Spec, Unread

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Floats

_ONE_A_BYTE = ("W8A8_DYNAMIC", "W8A8_MIX", "W8A16", "W4A4_DYNAMIC")
_STATIC, _TWO_ROWS = "W8A8", "W4A8_DYNAMIC"
_WRITTEN = "W8A8_DYNAMIC"  # judged as compressed-tensors' INT8: the codes are the same
_KINDS = (*_ONE_A_BYTE, _STATIC, _TWO_ROWS)
_FLOATS = SCALES[:3]


@dataclass(frozen=True)
class Rows:
    """A matrix of one type. `parts`: scales and offsets, or deq_scale and input_scale."""

    codes: Source
    parts: tuple[Source, Source]
    kind: str

    def rows(self, reader: Reads, first: int, last: int) -> Floats:
        import numpy as np

        columns = self.codes.type.shape[1]
        at = np.arange(first, last)
        lines = at // 2 if self.kind == _TWO_ROWS else at
        low, high = int(lines[0]), int(lines[-1]) + 1
        data = np.empty((high - low, columns), np.int8)
        reader.read(self.codes, low * columns, data.view(np.uint8).data)
        values = data[lines - low].astype(np.int32)
        if self.kind == _TWO_ROWS:
            nibbles = values >> (4 * (at % 2))[:, None] & 15
            values = nibbles - 16 * (nibbles > 7)
        with np.errstate(all="ignore"):
            if self.kind == _STATIC:
                scale = _read(reader, self.parts[0], first, last) / _read(
                    reader, self.parts[1], 0, 1
                )
                return values.astype(np.float32) * scale.reshape(-1, 1)
            groups = self.parts[0].type.shape[1]
            scale, offset = (
                np.repeat(
                    _read(reader, part, first, last).reshape(-1, groups), columns // groups, 1
                )
                for part in self.parts
            )
            return (values.astype(np.float32) - offset) * scale


def _read(reader: Reads, source: Source, first: int, last: int) -> Float32s:
    """Numbers of rows [first, last) of a tensor, flat."""
    import numpy as np

    size = source.type.row_nbytes
    data = np.empty((last - first) * size, np.uint8)
    reader.read(source, first * size, data.data)
    if source.type.dtype == "I64":
        return data.view("<i8").astype(np.int32).view(np.float32)
    return floats(data, source.type.dtype)


def _kind(checkpoint: Checkpoint, name: str) -> object:
    """The type that the description names for a tensor; None without one, or a description."""
    stated = (c.block for c in checkpoint.quantization_configs if c.method == ASCEND)
    return next(stated, {}).get(name)


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight")


def _names(kind: object) -> tuple[str, str]:
    return ("deq_scale", "input_scale") if kind == _STATIC else ("weight_scale", "weight_offset")


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    codes, kind = checkpoint[name].type, _kind(checkpoint, name)
    if kind not in _KINDS:
        message = f"is I8, expected {', '.join(_KINDS)} in the description, found {kind!r}"
        yield Finding("QC096", "error", name, message)
        return
    module = name.removesuffix(".weight")
    parts = [checkpoint.get(f"{module}.{part}") for part in _names(kind)]
    for part, found in zip(_names(kind), parts, strict=True):
        if found is None:
            yield Finding("QC011", "error", name, f"{kind} without {module}.{part}")
    first, second = parts
    if first is None or second is None:
        return
    rows = codes.shape[0] * (2 if kind == _TWO_ROWS else 1)
    groups = first.type.shape[-1] if len(first.type.shape) == 2 else 1
    shapes: tuple[Shape, Shape] = ((rows, groups), (rows, groups))
    if kind == _STATIC:
        shapes = (first.type.shape if first.type.shape == (rows, 1) else (rows,), (1,))
    types = (("F32", "I64"), _FLOATS) if kind == _STATIC else (_FLOATS, _FLOATS)
    for found, shape, dtypes in zip((first, second), shapes, types, strict=True):
        if found.type.shape != shape or found.type.dtype not in dtypes or codes.shape[1] % groups:
            message = (
                f"expected {' or '.join(dtypes)} {list(shape)} for {codes}, found {found.type}"
            )
            yield Finding("QC027", "error", found.name, message)


def _form(checkpoint: Checkpoint, name: str) -> Form:
    codes = checkpoint[name]
    if len(codes.type.shape) != 2:
        raise Unread(f"codes of shape {list(codes.type.shape)}")
    for fault in _faults(checkpoint, name):
        raise Unread(f"{fault.where}: {fault.message}")
    kind, module = str(_kind(checkpoint, name)), name.removesuffix(".weight")
    first, second = (checkpoint[f"{module}.{part}"] for part in _names(kind))
    rows, columns = codes.type.shape[0] * (2 if kind == _TWO_ROWS else 1), codes.type.shape[1]
    numbers = Rows(codes, (first, second), kind)
    if kind == _WRITTEN and first.type.shape == (rows, 1):
        grid = Grid(first, 0, rows, 1, (1, columns))
        packed = Codes(8, signed=True)
        return Form("w8a8", codes, 0, rows, columns, grid, codes=packed, numbers=numbers)
    form = "ascend4" if kind == _TWO_ROWS else "ascend8"
    return Form(form, codes, 0, rows, columns, numbers=numbers)


def _shape(checkpoint: Checkpoint, name: str, shape: Shape) -> Shape | None:
    halves = 2 if _kind(checkpoint, name) == _TWO_ROWS and shape[0] > 0 else 1
    return (shape[0] // halves, *shape[1:])


SPEC = Spec(
    name="msmodelslim",
    dtypes=("I8",),
    applies=lambda folder: any(one.method == ASCEND for one in folder.quantization_configs),
    stored=_stored,
    read=_form,
    faults=_faults,
    shape=_shape,
    encodings=(
        Encoding(name="ascend4", bits=4),
        Encoding(name="ascend8", bits=8),
    ),
    parts=("weight_scale", "weight_offset", "deq_scale"),
    methods=(ASCEND,),
)
