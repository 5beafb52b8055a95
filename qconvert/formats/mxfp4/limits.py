"""What can be MXFP4: E2M1 codes, two a byte, under an exponent for each 32 columns."""

from __future__ import annotations

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError

MX_BLOCK = 32  # columns that share a scale


def check_mxfp4(packed: TensorType, scale: TensorType) -> None:
    """Raise PlanError where two tensors are no MXFP4 matrix."""
    if packed.dtype != "U8" or len(packed.shape) != 2:
        raise PlanError(f"expected packed E2M1 codes in a U8 matrix, found {packed}")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % MX_BLOCK or scale != TensorType("U8", (rows, columns // MX_BLOCK)):
        raise PlanError(
            f"expected exponents U8 [{rows}, {columns} / {MX_BLOCK}] for {packed}, found {scale}"
        )
