"""Integer codes from one form to another: compressed-tensors', GPTQ's two and AutoAWQ's. Nothing is
rounded: codes, zero points and scales are the same numbers in other places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, aligned
from qconvert.core.int_scheme import Codes, Packer
from qconvert.ops.awq import BITS, DequantAwq, awq_rows
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.gptq_packed import DequantGptq
from qconvert.ops.ints import DequantInts, group_of_columns, unpacked

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.int_scheme import Float32s, Int8s, Int32s

    UInt32s = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]

Stored = DequantInts | DequantGptq | DequantAwq
_TILE = 1 << 16  # codes taken apart at a time


@dataclass(frozen=True, slots=True)
class RepackInts(Uncut, Exact):
    """The arguments of a decoder -> the results of a packer, for the same codes. The packer's scheme has
    the dtype of the scales.

    Raises PlanError as both do, and where they differ in bits or groups; RowError for a zero point that
    is none of a symmetric matrix, or that the packer cannot hold, and for a g_idx where the packer has
    no place for one.
    """

    stored: Stored
    packer: Packer

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = self.stored.infer(*args)
        scheme = self.packer.scheme_of(weight.shape[1])
        bits = BITS if isinstance(self.stored, DequantAwq) else self.stored.bits
        if (bits, self.stored.group) != (scheme.bits, scheme.group):
            raise PlanError(
                f"expected {scheme.bits} bits in groups of {scheme.group}, found {bits} in groups of "
                f"{self.stored.group}"
            )
        scale = args[2 if isinstance(self.stored, DequantGptq) else 1]
        if scale.dtype != scheme.scale_dtype:
            raise PlanError(f"expected scales in {scheme.scale_dtype}, found {scale}")
        return self.packer.infer(weight)

    def scratch(self, *args: TensorType) -> int:
        """The codes, one a byte, and scales and zero points by row."""
        (weight,) = self.stored.infer(*args)
        groups = self.packer.scheme_of(weight.shape[1]).groups(weight.shape[1])
        return aligned(weight.numel) + aligned(weight.shape[0] * groups) + _TILE

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        (weight,) = self.stored.infer(*(one.type for one in ins))
        rows, columns = weight.shape
        scheme = self.packer.scheme_of(columns)
        groups = scheme.groups(columns)
        codes = array(scratch[: weight.numel], np.int8, (rows, columns))
        at = aligned(weight.numel)
        zero = array(scratch[at : at + rows * groups], np.int8, (rows, groups))
        zero[:] = 0
        scale, order = taken_apart(self.stored, ins, codes, zero)
        if scheme.symmetric and zero.any():
            row, group = np.argwhere(zero)[0]
            middle = int(zero[row, group]) + (1 << (scheme.bits - 1))
            raise RowError(
                int(row),
                f"has a zero point of {middle} in group {int(group)}, and the config says symmetric",
            )
        if order is not None and scheme.actorder != "group":
            if not np.array_equal(order, np.arange(columns) // scheme.width(columns)):
                raise RowError(
                    0, "has columns of other groups by its g_idx than the config says (no desc_act)"
                )
            order = None
        self.packer.pack(Codes(codes, scale, None if scheme.symmetric else zero, order), outs)
        return {}


def taken_apart(
    stored: Stored, ins: Sequence[Buffer], codes: Int8s, zero: Int8s
) -> tuple[Float32s, Int32s | None]:
    """Fill codes [N, K] and zero points [N, groups], counted from the middle; scales [N, groups] and
    g_idx. Raises RowError for a zero point that readers of GPTQ's first version differ on."""
    import numpy as np

    rows = codes.shape[0]
    step = max(1, _TILE // max(1, codes.shape[1]))
    tiles = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    if isinstance(stored, DequantAwq):
        words = array(ins[0].data, np.uint32, ins[0].type.shape)
        for start, stop in tiles:
            codes[start:stop] = awq_rows(words, start, stop).view(np.int8) - np.int8(8)
        if stored.zeros:
            at = array(ins[2].data, np.uint32, ins[2].type.shape)
            zero[:] = awq_rows(at, 0, rows).view(np.int8) - np.int8(8)
        return _numbers(ins[1]).T, None
    middle = 1 << (stored.bits - 1)
    if isinstance(stored, DequantGptq):
        words = array(ins[0].data, np.uint32, ins[0].type.shape)
        for start, stop in tiles:
            fields = unpacked(np.ascontiguousarray(words[:, start:stop].T), stored.bits)
            codes[start:stop] = (fields - np.uint16(middle)).astype(np.int8)
        _gptq_zeros(ins[1], stored, zero)
        order = group_of_columns(ins[3], zero.shape[1]) if len(ins) > 3 else None
        return _numbers(ins[2]).T, order
    words = array(ins[0].data, np.uint32, ins[0].type.shape)
    for start, stop in tiles:
        fields = unpacked(words[start:stop], stored.bits)
        codes[start:stop] = (fields - np.uint16(middle)).astype(np.int8)
    if not stored.symmetric:
        at = array(ins[2].data, np.uint32, ins[2].type.shape)
        fields = unpacked(np.ascontiguousarray(at.T), stored.bits).T[:rows]
        zero[:] = (fields - np.uint16(middle)).astype(np.int8)
    order = group_of_columns(ins[-1], zero.shape[1]) if stored.g_idx else None
    return _numbers(ins[1]), order


def _gptq_zeros(stored: Buffer, form: DequantGptq, zero: Int8s) -> None:
    import numpy as np

    middle = 1 << (form.bits - 1)
    words = array(stored.data, np.uint32, stored.type.shape)
    fields = unpacked(words, form.bits).T.astype(np.int32)
    if form.version == 1:
        fields += 1
    if int(fields.max(initial=0)) >= 2 * middle:
        row = int(np.argwhere(fields >= 2 * middle)[0][0])
        raise RowError(
            row,
            f"has a stored zero point of {2 * middle - 1}, which readers of GPTQ's first version "
            f"take for 0 or for {2 * middle}; have the model saved as gptq_v2",
        )
    zero[:] = fields - middle


def _numbers(scale: Buffer) -> Float32s:
    """Scales as float32, exactly."""
    import numpy as np

    if scale.type.dtype == "BF16":
        bits = array(scale.data, np.uint16, scale.type.shape).astype(np.uint32)
        return (bits << 16).view(np.float32)
    kind = np.float16 if scale.type.dtype == "F16" else np.float32
    return array(scale.data, kind, scale.type.shape).astype(np.float32)
