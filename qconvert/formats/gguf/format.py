"""Tensors of a GGUF file, each of the type that its header states.

Types of ggml -> BF16: codes times scales, less minima, in float32, rounded once.

Format source: ggml, `ggml-common.h` (blocks) and `ggml-quants.c` (dequantize_row_*), whose order of
operations gguf 0.19 (`quants.py`) keeps; the results are its float32 to the bit. A GGUF file of a Llama
has the two halves of a head's rows interleaved (llama.cpp, `convert_hf_to_gguf.py`, `permute`), one of a
Gemma its norms as 1 + weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.gguf.header import TYPES
from qconvert.checkpoint.gguf.stated import SECOND, StoredAs, stored_in
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Output
from qconvert.formats.base import FolderTensors, Format, Read, Stored
from qconvert.ops.base import array
from qconvert.ops.cast import (
    BEYOND,
    BF16_OVERFLOW,
    NOT_FINITE,
    TILE_ELEMENTS,
    check_beyond,
    decode,
    round_to_bf16,
)
from qconvert.ops.rowwise import EachRow
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float32s, UInt8s, UInt16s

_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice E2M1's values


@dataclass(frozen=True, slots=True)
class DequantGguf(EachRow):
    """A tensor of the type `kind` -> BF16 [N, K]: blocks as U8 [N, bytes of a row], numbers as F32, F16
    or BF16 [N, K] or [N]. `head` rows in turn are the first and the second half of a head by turns
    (0: rows are in order); of `plus_one` numbers 1 is taken away.

    Raises PlanError where dtypes or shapes do not fit, RowError for NaN, infinity and what bf16 has no
    room for.
    """

    kind: str
    head: int = 0
    plus_one: bool = False

    format: ClassVar[str] = "gguf"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (stored,) = args
        columns, nbytes = TYPES[self.kind]
        coded = columns > 1
        dims = len(stored.shape)
        if stored.dtype != ("U8" if coded else self.kind) or dims not in (
            (2,) if coded else (1, 2)
        ):
            raise PlanError(f"expected a matrix of {self.kind}, found {stored}")
        if coded and stored.shape[1] % nbytes:
            raise PlanError(f"expected {self.kind} in blocks of {nbytes} bytes, found {stored}")
        if self.head and (self.head % 2 or stored.shape[0] % self.head):
            raise PlanError(f"expected rows in heads of {self.head}, found {stored}")
        shape = (stored.shape[0], stored.shape[1] // nbytes * columns) if coded else stored.shape
        return (TensorType("BF16", shape),)

    def row_step(self, *args: TensorType) -> int:
        return self.head or 1

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[DequantGguf, tuple[Output, ...]]:
        if self.head and (start % self.head or stop % self.head):
            raise PlanError(f"rows [{start}, {stop}) part a head of {self.head} rows")
        return self, (args[0].rows(start, stop),)

    def scratch(self, *args: TensorType) -> int:
        """Return none: tiles are allocated."""
        return 0

    def loss(self, *args: TensorType) -> str | None:
        if self.kind == "BF16" and not self.plus_one:
            return None
        return f"rounds {self.kind} of a GGUF file to bf16 (relative error at most 2^-8)"

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        kind = ins[0].type
        rows = kind.shape[0]
        (made,) = self.infer(kind)
        columns = made.numel // max(1, rows)
        step = max(1, TILE_ELEMENTS // max(1, columns * (self.head or 1))) * (self.head or 1)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            data = ins[0].data[start * kind.row_nbytes : stop * kind.row_nbytes]
            with np.errstate(all="ignore"):
                values = _floats(self.kind, data, stop - start, columns)
                if self.plus_one:
                    values -= np.float32(1)
            if self.head:
                turned = values.reshape(-1, self.head // 2, 2, columns).swapaxes(1, 2)
                values = np.ascontiguousarray(turned).reshape(-1, columns)
            largest = float(np.maximum(values.max(), -values.min())) if values.size else 0.0
            if not largest < float("inf"):
                row = int(np.argmin(np.isfinite(values).all(axis=1)))
                raise RowError(start + row, NOT_FINITE)
            yield start, values

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows = outs[0].type.shape[0]
        target = array(outs[0].data, np.uint16, (rows, outs[0].type.numel // max(1, rows)))
        for start, values in self.floats(ins, scratch):
            target[start : start + values.shape[0]] = _as_bf16(start, values)
        return {}


@dataclass(frozen=True, slots=True)
class DequantGgufStack(EachRow):
    """A stack [E, N, bytes of a row], or [E, N, K] of numbers, of the type `kind` -> BF16 [E, K, N]:
    each matrix transposed, as gpt-oss keeps its experts. Of two of them, rows of the first and the
    second by turns: [E, K, 2 N]. Vectors [E, N], one or two, become [E, N] or [E, 2 N] alike.

    Raises PlanError where types do not fit, RowError as DequantGguf; its row is one of the stored.
    """

    kind: str

    format: ClassVar[str] = "gguf"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        first = args[0]
        if any(arg != first for arg in args[1:]):
            raise PlanError(f"expected two tensors alike, found {first} and {args[1]}")
        if len(first.shape) == 2:
            DequantGguf(self.kind).infer(first)
            return (TensorType("BF16", (first.shape[0], len(args) * first.shape[1])),)
        if len(first.shape) != 3:
            raise PlanError(f"expected a stack of matrices, found {first}")
        (one,) = DequantGguf(self.kind).infer(TensorType(first.dtype, first.shape[1:]))
        rows, columns = one.shape
        return (TensorType("BF16", (first.shape[0], columns, len(args) * rows)),)

    def scratch(self, *args: TensorType) -> int:
        """Return none: tiles are allocated."""
        return 0

    def loss(self, *args: TensorType) -> str | None:
        return DequantGguf(self.kind).loss()

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        made, step, stored = outs[0].type.shape, len(ins), ins[0].type
        target = array(outs[0].data, np.uint16, made)
        one = TensorType(stored.dtype, stored.shape[-2:]) if len(made) == 3 else stored
        for number, arg in enumerate(ins):
            for expert in range(made[0] if len(made) == 3 else 1):
                data = arg.data[expert * one.nbytes : (expert + 1) * one.nbytes]
                for start, values in DequantGguf(self.kind).floats([Buffer(one, data)], scratch):
                    found = _as_bf16(start, values)
                    if len(made) == 3:
                        first, stop = step * start + number, step * (start + found.shape[0])
                        target[expert, :, first:stop:step] = found.T
                    else:
                        target[start : start + found.shape[0], number::step] = found
        return {}


def _as_bf16(start: int, values: Float32s) -> UInt16s:
    """Bits of rows from `start` on, rounded; `values` are overwritten. Raises RowError for what bf16 has
    no room for."""
    import numpy as np

    if values.size and float(np.abs(values).max()) >= BF16_OVERFLOW:
        check_beyond(values, start * values.shape[1], values.shape[1], BEYOND)
    bits = values.view(np.int32)
    round_to_bf16(bits, np.empty_like(bits))
    return bits.astype(np.uint16)


def _floats(kind: str, data: memoryview, rows: int, columns: int) -> Float32s:
    """Rows of a type, as float32 [rows, columns]."""
    import numpy as np

    wide, nbytes = TYPES[kind]
    if wide == 1:
        found = np.empty((rows, columns), np.float32)
        decode(data, kind, found, np.empty(found.shape, np.int32))
        return found
    blocks = array(data, np.uint8, (rows * columns // wide, nbytes))
    return _DECODERS[kind](blocks).reshape(rows, columns)


# --- Blocks [n, bytes] -> float32 [n, columns] ----------------------------------------------------


def _halves(blocks: UInt8s, at: int) -> Float32s:
    """The F16 at a byte of each block, [n, 1]."""
    import numpy as np

    found: Float32s = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    return found


def _planes(packed: UInt8s, run: int, bits: int) -> UInt8s:
    """Codes of some bits, packed in runs of bytes: of each run the lowest codes of all bytes, then the
    next ones."""
    import numpy as np

    count = packed.shape[0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = packed.reshape(count, -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(count, -1)


def _scaled(
    codes: np.ndarray[Any, Any], scale: Float32s, least: Float32s | None = None
) -> Float32s:
    """Codes [n, K] times scales [n, groups], less minima alike."""
    import numpy as np

    found = codes.astype(np.float32).reshape(*scale.shape, -1)
    found *= scale[..., None]
    if least is not None:
        found -= least[..., None]
    return found.reshape(codes.shape)


def _q4_0(blocks: UInt8s) -> Float32s:
    import numpy as np

    return _scaled(_planes(blocks[:, 2:], 16, 4).astype(np.int8) - np.int8(8), _halves(blocks, 0))


def _q4_1(blocks: UInt8s) -> Float32s:
    return _scaled(_planes(blocks[:, 4:], 16, 4), _halves(blocks, 0), -_halves(blocks, 2))


def _fives(bits: UInt8s, nibbles: UInt8s) -> UInt8s:
    import numpy as np

    return _planes(nibbles, 16, 4) | _planes(bits, 1, 1) << np.uint8(4)


def _q5_0(blocks: UInt8s) -> Float32s:
    import numpy as np

    codes = _fives(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - np.int8(16)
    return _scaled(codes, _halves(blocks, 0))


def _q5_1(blocks: UInt8s) -> Float32s:
    codes = _fives(blocks[:, 4:8], blocks[:, 8:])
    return _scaled(codes, _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: UInt8s) -> Float32s:
    import numpy as np

    return _scaled(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _q2_k(blocks: UInt8s) -> Float32s:
    import numpy as np

    both = blocks[:, :16]
    scale = _halves(blocks, 80) * (both & np.uint8(15)).astype(np.float32)
    least = _halves(blocks, 82) * (both >> np.uint8(4)).astype(np.float32)
    return _scaled(_planes(blocks[:, 16:80], 32, 2), scale, least)


def _q3_k(blocks: UInt8s) -> Float32s:
    import numpy as np

    low, high = _planes(blocks[:, 32:96], 32, 2), _planes(blocks[:, :32], 32, 1)
    codes = (low | high << np.uint8(2)).astype(np.int8) - np.int8(4)
    six = _planes(blocks[:, 96:104], 8, 4) | _planes(blocks[:, 104:108], 4, 2) << np.uint8(4)
    scale = _halves(blocks, 108) * (six.astype(np.int8) - np.int8(32)).astype(np.float32)
    return _scaled(codes, scale)


def _k_scales(blocks: UInt8s) -> tuple[Float32s, Float32s]:
    """Scales and minima [n, 8] of Q4_K and Q5_K, six bits each in twelve bytes."""
    import numpy as np

    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, top = np.uint8(63), np.uint8(48)
    scale = np.concatenate([first & six, third & np.uint8(15) | first >> np.uint8(2) & top], axis=1)
    least = np.concatenate(
        [second & six, third >> np.uint8(4) | second >> np.uint8(2) & top], axis=1
    )
    return (
        _halves(blocks, 0) * scale.astype(np.float32),
        _halves(blocks, 2) * least.astype(np.float32),
    )


def _q4_k(blocks: UInt8s) -> Float32s:
    return _scaled(_planes(blocks[:, 16:], 32, 4), *_k_scales(blocks))


def _q5_k(blocks: UInt8s) -> Float32s:
    import numpy as np

    codes = _planes(blocks[:, 48:], 32, 4) | _planes(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return _scaled(codes, *_k_scales(blocks))


def _q6_k(blocks: UInt8s) -> Float32s:
    import numpy as np

    six = _planes(blocks[:, :128], 64, 4) | _planes(blocks[:, 128:192], 32, 2) << np.uint8(4)
    scale = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(six.astype(np.int8) - np.int8(32), scale)


def _mxfp4(blocks: UInt8s) -> Float32s:
    import numpy as np

    # Half of 2^(e - 127), as ggml has it: the codes' values are doubled. 255 is a number there.
    powers = np.ldexp(np.float64(1), np.arange(256) - 128).astype(np.float32)
    codes = np.array(_FP4, np.int8)[_planes(blocks[:, 1:], 16, 4)]
    return _scaled(codes, powers[blocks[:, :1]])


_DECODERS: Mapping[str, Callable[[UInt8s], Float32s]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4,
}  # fmt: skip


@lru_cache(maxsize=8)  # asked for each matrix
def _stated(checkpoint: Checkpoint) -> StoredAs:
    return stored_in(checkpoint)


def read(plan: Plan, module: str) -> Read | None:
    """A module's weight in a GGUF file. Raises PlanError where it does not fit its type."""
    name = f"{module}.weight"
    if name not in _stated(plan.checkpoint).kinds or not _is_as_read(plan, name):
        return None
    return _stored(plan, name), (name,)


def _is_as_read(plan: Plan, name: str) -> bool:
    """Return whether a tensor is in the plan as the file has it."""
    return name in plan.tensors and plan.tensors[name].source is not None


def _stored(plan: Plan, name: str) -> Stored:
    stated, output = _stated(plan.checkpoint), plan.tensors[name]
    second = plan.tensors.get(name + SECOND)
    if second is not None or len(output.type.shape) == 3:
        args = (output,) if second is None else (output, second)
        stack = DequantGgufStack(stated.kinds[name])
        (kind,) = stack.infer(*(arg.type for arg in args))
        return Stored(stack, args, kind.shape[0], kind.numel // max(1, kind.shape[0]))
    halves = stated.halves.get(name, 0)
    decoder = DequantGguf(stated.kinds[name], halves, name in stated.plus_one)
    (kind,) = decoder.infer(output.type)
    rows = kind.shape[0]
    return Stored(decoder, (output,), rows, kind.numel // max(1, rows))


def unmixed(plan: Plan) -> Iterator[tuple[str, Read]]:
    """All tensors of a GGUF file that no folder holds as they are: blocks, numbers in F32 as it has
    them, rows in another order. Raises PlanError for one that does not fit its type."""
    for name in _stated(plan.checkpoint).kinds:
        if _is_as_read(plan, name) and not name.endswith(SECOND):
            second = (name + SECOND,) if name + SECOND in plan.tensors else ()
            yield name, (_stored(plan, name), (name, *second))


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    return folder.once(_stated).kinds.get(f"{module}.{parameter}")


FORMATS = (
    Format(
        name="gguf", title="GGUF", parameters=("weight", "_proj"), codes=("U8",), cut=(1, 0), order=5,
        equals="gguf 0.19 quants.py", read=read, unmixed=unmixed, label=_label,
    ),
)  # fmt: skip
