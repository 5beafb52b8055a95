"""Limits of MXFP4: E2M1 codes, two a byte, under an exponent for each 32 columns."""

from __future__ import annotations

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError

MX_BLOCK = 32  # columns that share a scale


_CODES = ("U8", "I8")
EXPONENTS = ("U8", "F8_E8M0")


def check_mxfp4(packed: TensorType, scale: TensorType) -> None:
    """Raise PlanError where two tensors are no MXFP4 matrix."""
    if packed.dtype not in _CODES or len(packed.shape) != 2:
        raise PlanError(f"expected packed E2M1 codes in a U8 or I8 matrix, found {packed}")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    shape = rows, columns // MX_BLOCK
    if columns % MX_BLOCK or scale.shape != shape or scale.dtype not in EXPONENTS:
        raise PlanError(
            f"expected exponents U8 or F8_E8M0 [{rows}, {columns} / {MX_BLOCK}] for {packed}, found "
            f"{scale}"
        )
