"""NVFP4 scheme of a matrix: what a calibration must know of it (formats/nvfp4/encode.py has
the format)."""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError

NVFP4_BLOCK = 16  # columns that share an E4M3 scale


@dataclass(frozen=True, slots=True)
class Nvfp4Scheme:
    """Of one matrix [N, K]: E2M1 codes, an E4M3 scale for each block of 16 columns, a float32 scale for
    the matrix, or for several that are served as one. The `dialect` says how the last is rounded."""

    dialect: Dialect

    def groups(self, columns: int) -> int:
        """Scales in a row. Raises PlanError if the columns are not whole blocks."""
        if columns % NVFP4_BLOCK:
            raise PlanError(f"expected columns in whole blocks of {NVFP4_BLOCK}, found {columns}")
        return columns // NVFP4_BLOCK
