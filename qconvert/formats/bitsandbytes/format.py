"""bitsandbytes' checkpoints, as transformers saves them: how they are read. A 4-bit matrix is a column
of bytes; its shape and blocks are in a JSON beside it, which is read when a conversion is planned.

bitsandbytes' codes -> BF16.

Format source: bitsandbytes 0.50, `functional.py` (`QuantState`, `int8_vectorwise_dequant`) and
`backends/default/ops.py` (`_dequantize_4bit_compute`): numbers in a table of 16, two codes a byte, the
first in the upper half, times the largest of their block, in float32. Blocks are of the flattened matrix
and cross its rows. Those largest are stored as they are, or themselves as codes of a table of 256 times
the largest of a block of them, plus an offset. (Its kernel for CPUs takes rows that are no whole blocks
for blocks of their own, and gives other numbers than its own quantizer was given.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import CheckpointError, PlanError, RowError
from qconvert.core.graph import Buffer, Output, Part, whole
from qconvert.core.json_text import parse_object
from qconvert.core.parameter_names import BNB4, BNB8
from qconvert.formats.base import FolderTensors, Format, Read, stored, weights_of_method
from qconvert.ops.base import array
from qconvert.ops.cast import RoundedTiles, check_finite, float_tiles
from qconvert.ops.rowwise import row_parts
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s

_PER_127 = 7.874015718698502e-3  # bitsandbytes' own 1 / 127


@dataclass(frozen=True, slots=True)
class Nested:
    """Largest numbers of blocks as codes: `block` of them share a scale; `offset` is added to each."""

    block: int
    offset: float


@dataclass(frozen=True, slots=True)
class DequantBnb4(RoundedTiles):
    """Codes U8 [rows * columns / 2], largest numbers F32 [blocks], the table F32 [16], and of
    `nested` ones, which are U8, their scales F32 and their table F32
    [256]; all flat -> BF16 [rows, columns].

    Raises PlanError where dtypes or sizes do not fit, or rows are cut within a block; RowError where a
    largest number is NaN or infinite.
    """

    columns: int
    block: int
    nested: Nested | None = None

    format: ClassVar[str] = "bitsandbytes-4bit"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        rows = 2 * args[0].numel // max(1, self.columns)
        blocks = ceil_div(rows * self.columns, self.block)
        wanted = [TensorType("U8", (ceil_div(rows * self.columns, 2),))]
        wanted += [TensorType("F32" if self.nested is None else "U8", (blocks,))]
        wanted += [TensorType("F32", (16,))]
        if self.nested is not None:
            scales = ceil_div(blocks, self.nested.block)
            wanted += [TensorType("F32", (scales,)), TensorType("F32", (256,))]
        if self.columns < 2 or list(args) != wanted:
            raise PlanError(
                f"expected {', '.join(map(str, wanted))} for {self.columns} columns in blocks of "
                f"{self.block}, found {', '.join(map(str, args))}"
            )
        return (TensorType("BF16", (rows, self.columns)),)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds 4-bit x scale to bf16 (relative error at most 2^-8)"

    @property
    def _together(self) -> int:
        """Elements that one scale is of, or one scale of scales."""
        return self.block * (1 if self.nested is None else self.nested.block)

    def row_step(self, *args: TensorType) -> int:
        return self._together // gcd(self._together, self.columns)

    def _spans(self, start: int, stop: int, *args: TensorType) -> list[tuple[int, int]]:
        """First and last element of each argument for rows [start, stop)."""
        first, last = start * self.columns, stop * self.columns
        found = [(first // 2, ceil_div(last, 2)), (first // self.block, ceil_div(last, self.block))]
        found.append((0, 16))
        if self.nested is not None:
            low, high = found[1]
            size = self.nested.block
            found += [(low // size, ceil_div(high, size)), (0, 256)]
        return found

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (made,) = self.infer(*args)
        if (start, stop) == (0, made.shape[0]):
            return whole(self, args)
        taken = tuple(
            (low * arg.row_nbytes, arg.with_rows(high - low))
            for arg, (low, high) in zip(args, self._spans(start, stop), strict=True)
        )
        return Part(taken, ((start * made.row_nbytes, made.with_rows(stop - start)),))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        (made,) = self.infer(*args)
        return row_parts(self, made.shape[0], made.row_nbytes + self.columns, limit, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        step = self.row_step()
        if start % step:
            raise PlanError(
                f"rows from {start} on are wanted, and blocks of {self.block} cross rows of "
                f"{self.columns}: only every {step}th begins with blocks of its own; dequantize the "
                "model first"
            )
        spans = self._spans(start, stop)
        return self, tuple(arg.rows(*span) for arg, span in zip(args, spans, strict=True))

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        packed, _, table, *_ = ins
        data = array(packed.data, np.uint8, packed.type.shape)
        numbers = array(table.data, np.float32, (16,))
        rows = 2 * data.size // self.columns
        for start, stop in float_tiles(rows, self.columns):
            first, last = start * self.columns, stop * self.columns
            pairs = data[first // 2 : ceil_div(last, 2)]
            codes = np.stack([pairs >> 4, pairs & np.uint8(15)], axis=-1).reshape(-1)
            codes = codes[first % 2 : first % 2 + last - first]
            low = first // self.block
            scale = self._scales(ins, low, ceil_div(last, self.block))
            if not np.isfinite(scale).all():
                at = (low + int(np.argmin(np.isfinite(scale)))) * self.block // self.columns
                raise RowError(at, "has a scale of NaN or infinity; the checkpoint is broken")
            skip = first - low * self.block
            spread = np.repeat(scale, self.block)[skip : skip + last - first]
            yield start, (numbers[codes] * spread).reshape(stop - start, self.columns)

    def _scales(self, ins: Sequence[Buffer], first: int, last: int) -> Float32s:
        """The largest numbers of blocks [first, last)."""
        import numpy as np

        stored = ins[1]
        if self.nested is None:
            return array(stored.data, np.float32, stored.type.shape)[first:last]
        codes = array(stored.data, np.uint8, stored.type.shape)[first:last]
        scales, table = (array(one.data, np.float32, one.type.shape) for one in ins[3:])
        each = scales[np.arange(first, last) // self.nested.block]
        with np.errstate(all="ignore"):
            found: Float32s = table[codes] * each + np.float32(self.nested.offset)
        return found


@dataclass(frozen=True, slots=True)
class DequantBnb8(RoundedTiles):
    """weight I8 [N, K] and SCB F32 [N, 1], the largest of each row -> BF16 [N, K]: (code * SCB) / 127,
    each step in float32.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    format: ClassVar[str] = "bitsandbytes-int8"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale = args
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in an I8 matrix, found {weight}")
        if scale != TensorType("F32", (weight.shape[0], 1)):
            raise PlanError(f"expected SCB F32 [{weight.shape[0]}] for {weight}, found {scale}")
        return (TensorType("BF16", weight.shape),)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int8 x scale to bf16 (relative error at most 2^-8)"

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        codes = array(ins[0].data, np.int8, ins[0].type.shape)
        scale = array(ins[1].data, np.float32, ins[1].type.shape)
        check_finite(scale, 0)
        for start, stop in float_tiles(*codes.shape):
            with np.errstate(all="ignore"):
                products = codes[start:stop].astype(np.float32) * scale[start:stop]
                yield start, products * np.float32(_PER_127)


_METHOD = "bitsandbytes"
_FLAGS = {4: "load_in_4bit", 8: "load_in_8bit"}
_BY_ROW = 0  # of `weight_format`: others are orders of kernels that bitsandbytes no longer has


def read_4bit(plan: Plan, module: str) -> Read | None:
    """A module whose weight has a `quant_state`, or an `absmax` alone."""
    codes, absmax, table, nested, nested_table, *states = (f"{module}.{part}" for part in BNB4)
    state = next((name for name in states if name in plan.tensors), None)
    if state is None and absmax not in plan.tensors:
        return None
    config = _config(plan.checkpoint, module, 4)
    if state is None or codes not in plan.tensors:
        lacking = repr(codes) if state else " or ".join(map(repr, states))
        raise PlanError(f"{lacking} is missing, and {module!r} has parts of bitsandbytes' codes")
    weight = plan.tensors[codes].type
    if weight.dtype != "U8":
        raise PlanError(
            f"{codes!r}: expected bitsandbytes' codes in U8, found {weight}: bnb_4bit_quant_storage "
            "uint8 is read"
        )
    kind = state.rpartition("__")[2]
    if (said := config.block.get("bnb_4bit_quant_type", kind)) != kind:
        raise PlanError(
            f"{config.where} states bnb_4bit_quant_type {said!r}, and {module!r} is {kind}"
        )
    found = _decoder(plan.checkpoint, state, kind)
    names = [codes, absmax, table]
    if found.decoder.nested is not None:
        names += [nested, nested_table]
    read = stored(plan, names, found.decoder, _flat)
    if read.rows != found.rows:
        raise PlanError(
            f"{codes!r}: {state!r} states {found.rows} rows of {found.decoder.columns}, and its "
            f"{weight.numel} bytes hold {read.rows}"
        )
    return read, (*names, state)


def _flat(output: Output) -> Output:
    return output.reshape((output.type.numel,))


class _Stated(NamedTuple):
    """A matrix by its quant_state."""

    rows: int
    decoder: DequantBnb4


@lru_cache(maxsize=4096)
def _decoder(checkpoint: Checkpoint, name: str, kind: str) -> _Stated:
    """The decoder of a matrix by the JSON under this name. Raises PlanError for one that bitsandbytes
    does not write."""

    try:
        state = parse_object(checkpoint.read_small(checkpoint[name]), checkpoint.root / name)
    except CheckpointError as error:
        raise PlanError(f"{name!r}: expected a JSON of bitsandbytes': {error}") from error
    sizes: list[Any] = [state.get("blocksize"), *(state.get("shape") or [])]
    nested = state.get("nested_blocksize")
    offset = state.get("nested_offset")
    sizes += [] if nested is None else [nested]
    whole = len(sizes) == 3 + (nested is not None)
    even = whole and type(sizes[0]) is int and sizes[0] % 2 == 0
    whole = even and all(type(one) is int and one > 0 for one in sizes)
    if not whole or state.get("quant_type") != kind:
        raise PlanError(
            f"{name!r}: expected quant_type {kind}, an even blocksize and a shape of two sizes, found "
            f"{state!r}"
        )
    if nested is not None and not isinstance(offset, float | int):
        raise PlanError(f"{name!r}: expected a nested_offset, found {offset!r}")
    beside = None if nested is None else Nested(nested, float(offset or 0))
    return _Stated(sizes[1], DequantBnb4(sizes[2], sizes[0], beside))


def read_int8(plan: Plan, module: str) -> Read | None:
    """A module with an `SCB`. Raises PlanError for another order of its codes than by row."""
    codes, scale, order = (f"{module}.{part}" for part in BNB8)
    if scale not in plan.tensors:
        return None

    _config(plan.checkpoint, module, 8)
    names = [codes, scale]
    if order in plan.tensors:
        names.append(order)
        kind = plan.tensors[order].type
        value = plan.checkpoint.read_small(plan.checkpoint[order])[0] if kind.numel == 1 else None
        if value != _BY_ROW:
            raise PlanError(
                f"{order!r}: expected one number, 0 (by row), found {kind}, {value}: weights in the "
                "order of a kernel of bitsandbytes before 0.45 are not read; save them with a later one"
            )
    read = stored(plan, names[:2], DequantBnb8(), _as_column)
    return read, tuple(names)


def _as_column(output: Output) -> Output:
    shape = output.type.shape
    return output.reshape((*shape, 1)) if len(shape) == 1 else output


def _config(checkpoint: Checkpoint, module: str, bits: int) -> QuantConfig:
    """bitsandbytes' block. Raises PlanError where there is none of these bits."""
    for config in checkpoint.quantization_configs:
        if config.method == _METHOD and config.block.get(_FLAGS[bits]):
            return config
    raise PlanError(
        f"{module!r} has bitsandbytes' {bits}-bit codes, and the config does not state quant_method "
        f"{_METHOD} with {_FLAGS[bits]}: one of them is wrong"
    )


def _label_4bit(folder: FolderTensors, module: str, parameter: str) -> str | None:
    name = f"{module}.{parameter}"
    kinds = (one.rpartition("__")[2] for one in BNB4[5:] if f"{module}.{one}" in folder.tensors)
    found = next(kinds, None)
    return f"bitsandbytes {found.upper()}" if name == f"{module}.{BNB4[0]}" and found else None


_EQUALS = "bitsandbytes 0.50"
FORMATS = (
    Format(
        name="bitsandbytes-4bit", title="bitsandbytes 4-bit", parameters=BNB4, mark=BNB4[1],
        unmixed=weights_of_method(_METHOD, read_4bit), codes=("U8",), cut=(0, 0), order=16,
        equals=f"{_EQUALS} dequantize_4bit", read=read_4bit, label=_label_4bit,
    ),
    Format(
        name="bitsandbytes-int8", title="bitsandbytes INT8", parameters=BNB8, mark=BNB8[1],
        unmixed=weights_of_method(_METHOD, read_int8), codes=("I8",), cut=(1, 0), order=17,
        equals=f"{_EQUALS} int8_vectorwise_dequant", read=read_int8,
    ),
)  # fmt: skip
