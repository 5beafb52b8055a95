"""bitsandbytes' checkpoints (0.50, `functional.py`: `QuantState.as_dict`, `int8_vectorwise_dequant`).

4 bits: `weight` U8 [n / 2, 1], two codes of a table a byte, the first in the upper half; `weight.absmax`
the largest of each block of the flattened matrix, F32, or U8 with `weight.nested_absmax` and
`weight.nested_quant_map`; `weight.quant_map` F32 [16]; a JSON, `weight.quant_state.bitsandbytes__nf4` or
`fp4`. INT8: `weight` I8 [N, K], `SCB` F32 [N], `weight_format`.

QC011 codes without their other parts.
QC027 a type or shape that the format does not have.
QC096 the config states other bits, or another table, than the tensors have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.core.graph import Source
from qconvert.core.json_text import parse_object
from qconvert.validation.findings import Finding
from qconvert.validators.reading.forms import Encoding, Form, Shape, Spec, Unread

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Bytes, Floats

METHOD = "bitsandbytes"
_STATE = "quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")


def _numbers(reader: Reads, source: Source, first: int = 0, last: int | None = None) -> Float32s:
    """F32 numbers [first, last) of a tensor (all)."""
    import numpy as np

    count = (source.type.numel if last is None else last) - first
    found = np.empty(count, "<f4")
    reader.read(source, 4 * first, found.view(np.uint8).data)
    return found


def _bytes(reader: Reads, source: Source, first: int, last: int) -> Bytes:
    import numpy as np

    found = np.empty(last - first, np.uint8)
    reader.read(source, first, found.data)
    return found


@dataclass(frozen=True)
class Flat:
    """A matrix in blocks of its elements, row after row. `nested` of the blocks' scales share one, and
    `offset` is added to them; 0: they are as stored. `parts`: scales, table, those of nested ones."""

    codes: Source
    parts: tuple[Source, ...]
    columns: int
    block: int
    nested: int
    offset: float

    def rows(self, reader: Reads, first: int, last: int) -> Floats:
        import numpy as np

        elements = np.arange(first * self.columns, last * self.columns)
        begin, end = int(elements[0]) // 2, int(elements[-1]) // 2 + 1
        pairs = _bytes(reader, self.codes, begin, end)
        each = pairs[elements // 2 - begin]
        codes = np.where(elements % 2 == 0, each >> 4, each & 15)
        low, high = int(elements[0]) // self.block, int(elements[-1]) // self.block + 1
        table = _numbers(reader, self.parts[1])
        with np.errstate(all="ignore"):
            scales = self._scales(reader, low, high)
            values: Floats = table[codes] * scales[elements // self.block - low]
        return values.reshape(last - first, self.columns)

    def _scales(self, reader: Reads, low: int, high: int) -> Float32s:
        import numpy as np

        if not self.nested:
            return _numbers(reader, self.parts[0], low, high)
        codes = _bytes(reader, self.parts[0], low, high)
        outer, table = (_numbers(reader, part) for part in self.parts[2:4])
        products = table[codes] * outer[np.arange(low, high) // self.nested]
        return products + np.float32(self.offset)


@dataclass(frozen=True)
class ByRow:
    """INT8 with the largest of each row."""

    codes: Source
    parts: tuple[Source, ...]

    def rows(self, reader: Reads, first: int, last: int) -> Floats:
        import numpy as np

        columns = self.codes.type.shape[1]
        stored = _bytes(reader, self.codes, first * columns, last * columns).view(np.int8)
        scales = _numbers(reader, self.parts[0], first, last)
        with np.errstate(all="ignore"):
            products = stored.reshape(-1, columns).astype(np.float32) * scales[:, None]
            return products * np.float32(1 / 127)


# --- 4 bits --------------------------------------------------------------------------------------


def _stored4(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and f"{name}.absmax" in checkpoint.sources


def _kind(checkpoint: Checkpoint, name: str) -> str | None:
    return next((kind for kind in _KINDS if f"{name}.{_STATE}{kind}" in checkpoint), None)


def _faults4(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    codes, absmax, kind = checkpoint[name], checkpoint[f"{name}.absmax"], _kind(checkpoint, name)
    parts = {"quant_map": 16}
    if absmax.type.dtype == "U8":
        parts |= {"nested_absmax": 0, "nested_quant_map": 256}
    if kind is None:
        yield Finding("QC011", "error", name, f"codes without {name}.{_STATE}nf4 or fp4")
    elif (said := _unlike(checkpoint, 4, kind)) is not None:
        yield Finding("QC096", "error", name, f"is {kind}, but {said}")
    if codes.type.shape[1:] not in ((), (1,)):
        message = f"expected codes U8 [n / 2, 1], found {codes.type}"
        yield Finding("QC027", "error", name, message)
    if absmax.type.dtype not in ("U8", "F32") or len(absmax.type.shape) != 1:
        message = f"expected U8 or F32 [blocks], found {absmax.type}"
        yield Finding("QC027", "error", absmax.name, message)
    for part, size in parts.items():
        found = checkpoint.get(f"{name}.{part}")
        if found is None:
            yield Finding("QC011", "error", name, f"codes without {name}.{part}")
        elif found.type.dtype != "F32" or found.type.shape != (size or found.type.numel,):
            message = f"expected F32 [{size or 'blocks of blocks'}], found {found.type}"
            yield Finding("QC027", "error", found.name, message)


def _unlike(checkpoint: Checkpoint, bits: int, kind: str) -> str | None:
    """Statement of the config instead; None if nothing else, or nothing at all (QC012)."""
    for config in checkpoint.quantization_configs:
        if config.method != METHOD:
            return f"{config.where} states {config.method}"
        if not config.block.get(f"load_in_{bits}bit"):
            return f"{config.where} does not state load_in_{bits}bit"
        said = config.block.get("bnb_4bit_quant_type", kind)
        if bits == 4 and said != kind:
            return f"{config.where} states bnb_4bit_quant_type {said!r}"
    return None


def _state(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """The JSON of a matrix. Raises Unread."""
    kind = _kind(checkpoint, name)
    assert kind is not None
    where = f"{name}.{_STATE}{kind}"
    try:
        found = parse_object(checkpoint.read_small(checkpoint[where]), checkpoint.root / where)
    except CheckpointError as error:
        raise Unread(f"{where}: {error}") from error
    if found.get("quant_type") != kind:
        raise Unread(f"{where} states {found!r}")
    return found


def _read4(checkpoint: Checkpoint, name: str) -> Form:
    for fault in _faults4(checkpoint, name):
        raise Unread(f"{fault.where}: {fault.message}")
    state, codes = _state(checkpoint, name), checkpoint[name]
    block: Any = state.get("blocksize")
    shape = state.get("shape")
    nested, offset = state.get("nested_blocksize", 0), state.get("nested_offset", 0.0)
    sizes = shape if isinstance(shape, list) and len(shape) == 2 else [0, 0]
    if not all(type(one) is int and one > 0 for one in (block, *sizes)):
        raise Unread(f"its quant_state states blocksize {block!r} and shape {shape!r}")
    absmax, is_nested = (
        checkpoint[f"{name}.absmax"],
        checkpoint[f"{name}.absmax"].type.dtype == "U8",
    )
    if is_nested != (type(nested) is int and nested > 0) or type(offset) not in (int, float):
        raise Unread(f"its quant_state states nested_blocksize {nested!r}, absmax is {absmax.type}")
    rows, columns = sizes
    blocks = -(-rows * columns // block)
    names = ["quant_map", *(["nested_absmax", "nested_quant_map"] if is_nested else [])]
    parts = [absmax, *(checkpoint[f"{name}.{part}"] for part in names)]
    held = codes.type.numel, absmax.type.numel, parts[2].type.numel if is_nested else 0
    wanted = -(-rows * columns // 2), blocks, -(-blocks // nested) if is_nested else 0
    if held != wanted:
        raise Unread(
            f"{rows} x {columns} codes take {wanted} bytes, scales and their scales: {held}"
        )
    numbers = Flat(codes, tuple(parts), columns, block, nested if is_nested else 0, float(offset))
    return Form(str(state["quant_type"]), codes, 0, rows, columns, numbers=numbers)


def _shape4(checkpoint: Checkpoint, name: str, shape: Shape) -> Shape | None:
    return (-(-prod(shape) // 2), 1) if min(shape, default=-1) > 0 else None


BNB4 = Spec(
    name="bitsandbytes 4-bit",
    dtypes=("U8",),
    stored=_stored4,
    read=_read4,
    faults=_faults4,
    shape=_shape4,
    encodings=tuple(Encoding(name=kind, bits=4) for kind in _KINDS),
    parts=("absmax", "quant_map", *(f".{_STATE}{kind}" for kind in _KINDS)),
    methods=(METHOD,),
)


# --- INT8 ----------------------------------------------------------------------------------------


def _stored8(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and f"{name.removesuffix('weight')}SCB" in checkpoint.sources


def _faults8(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    codes, scale = checkpoint[name], checkpoint[f"{name.removesuffix('weight')}SCB"]
    if (said := _unlike(checkpoint, 8, "")) is not None:
        yield Finding("QC096", "error", name, f"is bitsandbytes' INT8, but {said}")
    if len(codes.type.shape) != 2:
        yield Finding("QC027", "error", name, f"expected codes I8 [N, K], found {codes.type}")
    elif scale.type.dtype != "F32" or scale.type.shape != codes.type.shape[:1]:
        message = f"expected F32 [{codes.type.shape[0]}] for {codes.type}, found {scale.type}"
        yield Finding("QC027", "error", scale.name, message)


def _read8(checkpoint: Checkpoint, name: str) -> Form:
    for fault in _faults8(checkpoint, name):
        raise Unread(f"{fault.where}: {fault.message}")
    order = checkpoint.get(f"{name.removesuffix('weight')}weight_format")
    if order is not None and checkpoint.read_small(order) != b"\0":
        raise Unread(f"{order.name} states an order of codes that is not by row")
    codes, scale = checkpoint[name], checkpoint[f"{name.removesuffix('weight')}SCB"]
    rows, columns = codes.type.shape
    parts = (scale,) if order is None else (scale, order)
    return Form("bnb-int8", codes, 0, rows, columns, numbers=ByRow(codes, parts))


BNB8 = Spec(
    name="bitsandbytes INT8",
    dtypes=("I8",),
    applies=lambda checkpoint: ".SCB" in checkpoint.ends,
    stored=_stored8,
    read=_read8,
    faults=_faults8,
    shape=lambda checkpoint, name, shape: shape,
    encodings=(Encoding(name="bnb-int8", bits=8),),
    parts=(".SCB", ".weight_format"),
    methods=(METHOD,),
)

SPECS = BNB4, BNB8
