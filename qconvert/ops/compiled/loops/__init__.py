"""The loops by their names. This package is imported where loops run."""

from qconvert.ops.compiled.loops.amx import amx_int4, amx_int8, amx_search
from qconvert.ops.compiled.loops.fp4 import (
    fp4_decode,
    nvfp4_decode,
    nvfp4_encode,
    row_maxima,
)
from qconvert.ops.compiled.loops.fp8 import fp8_codes, fp8_decode, fp8_encode
from qconvert.ops.compiled.loops.ints import (
    int4_decode,
    int8_decode,
    ints_pack,
    ints_round,
    ints_round_any,
    ints_round_pack,
)
from qconvert.ops.compiled.loops.mx import mxfp4_encode, mxfp8_encode
from qconvert.ops.compiled.loops.search import ints_search

__all__ = [
    "amx_int4",
    "amx_int8",
    "amx_search",
    "fp4_decode",
    "fp8_codes",
    "fp8_decode",
    "fp8_encode",
    "int4_decode",
    "int8_decode",
    "ints_pack",
    "ints_round",
    "ints_round_any",
    "ints_round_pack",
    "ints_search",
    "mxfp4_encode",
    "mxfp8_encode",
    "nvfp4_decode",
    "nvfp4_encode",
    "row_maxima",
]
