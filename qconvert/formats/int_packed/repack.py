"""Integer codes from one form to another: compressed-tensors', GPTQ's two and AutoAWQ's. Nothing is
rounded: codes, zero points and scales are the same numbers in other places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, aligned
from qconvert.core.int_scheme import Codes, Packer
from qconvert.formats.int_packed.decode import IntDecoder
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import TILE_ELEMENTS


@dataclass(frozen=True, slots=True)
class RepackInts(Uncut, Exact):
    """The arguments of a decoder -> the results of a packer, for the same codes. The packer's scheme has
    the dtype of the scales.

    Raises PlanError as both do, and where they differ in bits or groups; RowError for a zero point that
    is none of a symmetric matrix, or that the packer cannot hold, and for a g_idx where the packer has
    no place for one.
    """

    stored: IntDecoder
    packer: Packer

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = self.stored.infer(*args)
        scheme = self.packer.scheme_of(weight.shape[1])
        bits, group = self.stored.scheme
        if (bits, group) != (scheme.bits, scheme.group):
            raise PlanError(
                f"expected {scheme.bits} bits in groups of {scheme.group}, found {bits} in groups of "
                f"{group}"
            )
        scale = args[self.stored.scale_at]
        if scale.dtype != scheme.scale_dtype:
            raise PlanError(f"expected scales in {scheme.scale_dtype}, found {scale}")
        return self.packer.infer(weight)

    def scratch(self, *args: TensorType) -> int:
        """The codes, one a byte, and scales and zero points by row."""
        (weight,) = self.stored.infer(*args)
        groups = self.packer.scheme_of(weight.shape[1]).groups(weight.shape[1])
        return aligned(weight.numel) + aligned(weight.shape[0] * groups) + TILE_ELEMENTS

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
        scale, order = self.stored.integers(ins, codes, zero)
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
