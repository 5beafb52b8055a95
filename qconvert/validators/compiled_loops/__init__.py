"""The hot loops of validators, compiled by numba. They are written from the formats' definitions as
numpy's forms in validators/reading are, and share nothing with the loops of ops. This package is
imported where loops run."""

from qconvert.validators.compiled_loops.decode import amx_tiles, fp4_rows, fp8_rows, int4_rows
from qconvert.validators.compiled_loops.judge import fp4_fits, fp8_fits, int_fits, row_fits, sums

__all__ = [
    "amx_tiles",
    "fp4_fits",
    "fp4_rows",
    "fp8_fits",
    "fp8_rows",
    "int4_rows",
    "int_fits",
    "row_fits",
    "sums",
]
