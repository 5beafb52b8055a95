"""NVFP4: E2M1 codes in blocks of 16 columns with E4M3 scales, and one float32 scale a matrix.

Format sources: compressed-tensors (`quantization/utils/helpers.py` `generate_gparam` and
`calculate_qparams`, `compressors/nvfp4/`), as llm-compressor calls them with `memoryless_minmax`;
nvidia-modelopt (`torch/quantization/qtensor/nvfp4_tensor.py`). The two differ in more than names:

                  compressed-tensors                   modelopt
    global scale  G = 1 / amax * 2688, a divisor       S = amax / 2688, a multiplier
    block scale   s = e4m3(G * (bmax / 6)), 0 -> 1/8   s = e4m3(max(bmax / (6 * S), 2^-9)), 0 -> 1
    code          e2m1(w / (s / G))                    e2m1(w / (s * S))

compressed-tensors rounds 1 / amax, its product with 2688, and bmax / 6 to the weight's dtype. That is
followed for bf16; in fp16 the product is infinite wherever amax is below 0.041, G = 1 is taken instead,
and small weights are lost, so fp16 weights are worked on in float32 here: what it makes of them once
they are float32.

Runtimes compute gate and up (and q, k and v) as one matrix with one global scale, so those that are
served together share one, from the largest weight of all.

Codes and scales that a calibration found become the same tensors, chosen otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, Nvfp4Scheme, groups_in_row
from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.formats.nvfp4.scales import as_float32, bits_type, to_bf16_values
from qconvert.ops.base import array
from qconvert.ops.cast import FLOAT_DTYPES, TILE_ELEMENTS, decode, matrix_to_quantize
from qconvert.ops.compiled import done
from qconvert.ops.fp4 import BLOCK, SIZES, e4m3, from_e4m3, pack, to_codes
from qconvert.ops.rowwise import Scaled

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float32s, Float64s, Int32s, UInt8s

    Bits = np.ndarray[tuple[int, ...], np.dtype[np.int16 | np.int32]]

_SIGN = 8
_TWICE = 2  # codes come as twice their numbers


@dataclass(frozen=True, slots=True)
class PackNvfp4Codes:
    """Codes [N, K] -> packed U8 [N, K/2], block scales F8_E4M3 [N, K/16] and the matrix's own scale F32,
    shaped as the dialect has it. Raises PlanError where columns are not whole blocks of 16."""

    dialect: Dialect
    row_step: ClassVar[int] = 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        names = NVFP4[self.dialect]
        return names.weight, names.scale, names.global_scale

    def scheme_of(self, columns: int) -> Nvfp4Scheme:
        return Nvfp4Scheme(self.dialect)

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        rows, columns = matrix_to_quantize(weight, "NVFP4", FLOAT_DTYPES)
        blocks = self.scheme_of(columns).groups(columns)
        return (
            TensorType("U8", (rows, columns // 2)),
            TensorType("F8_E4M3", (rows, blocks)),
            TensorType("F32", NVFP4[self.dialect].scalar),
        )

    def loss(self, weight: TensorType) -> str:
        dtype = weight.dtype.lower().replace("f", "fp").replace("bfp", "bf")
        return f"rounds {dtype} to NVFP4 in blocks of {BLOCK} ({self.dialect} dialect)"

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        packed, scale, own = outs
        assert codes.global_scale is not None
        array(own.data, np.float32, (1,))[0] = codes.global_scale
        known = np.zeros(2 * _TWICE * int(SIZES[-1]) + 1, np.uint8)  # by twice a number, plus 12
        middle = known.size // 2
        for code, size in enumerate(SIZES):
            known[middle + round(_TWICE * size)] = code
            known[middle - round(_TWICE * size)] = code + _SIGN if code else 0
        rows, columns = codes.codes.shape
        half = array(packed.data, np.uint8, (rows, columns // 2))
        blocks = array(scale.data, np.uint8, codes.scale.shape)
        step = max(1, TILE_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            nibbles = np.take(known, codes.codes[part].astype(np.int16) + middle).reshape(-1)
            pack(nibbles, np.empty_like(nibbles), half[part].reshape(-1))
            e4m3(codes.scale[part].astype(np.float32), blocks[part])


# --- Block scales that lose less ------------------------------------------------------------------
# The error of a block is |e|^2 + (e . w)^2 / |w|^2, as formats/int_packed/search.py has it for 16.


# Of E4M3 codes, eight of which are a factor of two.
_OFFSETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7)
_HIGHEST_CODE = 0x7E
_FAR = 2.0**120
_ONE, _FOUR = 127 << 23, 129 << 23


def best_scales(
    values: Float32s,
    scale: UInt8s,
    factor: Float32s,
    global_scale: np.float32,
    dialect: Dialect,
    work: Float32s,
    sizes: Float32s,
    spare: Int32s,
) -> None:
    """Blocks [n, 16] of weights, their E4M3 codes and factors [n] -> better ones in place. `work`,
    `sizes` and `spare` are working memory as large as the blocks."""
    import numpy as np

    np.abs(values, out=work)
    largest = work.max(axis=1)
    np.multiply(work, (np.float32(1) / np.where(largest > 0, largest, 1))[:, None], out=work)
    np.multiply(work, work, out=work)
    np.add.accumulate(work, axis=1, out=sizes)
    length, size = sizes[:, -1].astype(np.float64), largest.astype(np.float64)
    best = np.full(factor.shape, np.inf)
    first, own = scale.astype(np.int32), factor.copy()
    usual = (own > 1 / _FAR) & (own < _FAR)
    for offset in _OFFSETS:
        code = first + offset
        usable = usual & (code >= 1) & (code <= _HIGHEST_CODE)
        each = from_e4m3(np.where(usable, code, 0x38).astype(np.uint8))
        each = each * global_scale if dialect == "modelopt" else each / global_scale
        if offset == 0:
            each = own
        wide = each.astype(np.float64)
        error, along = _errors(values, each, work, sizes, spare)
        along *= wide / size
        error = (error + along * along / length) * (wide * wide)
        better = usable & (error < best)
        np.copyto(best, error, where=better)
        np.copyto(scale, code, where=better, casting="unsafe")
        np.copyto(factor, each, where=better)


def _errors(
    values: Float32s, factor: Float32s, work: Float32s, sizes: Float32s, bits: Int32s
) -> tuple[Float64s, Float64s]:
    """Squared errors of blocks and errors times weights, both [n], in units of their factors."""
    import numpy as np

    np.multiply(values, (np.float32(1) / factor)[:, None], out=work)
    np.abs(work, out=work)
    # E2M1's step is half of a number's own power of two, from 1 to 4. Adding 1.5 * 2^23 steps rounds to
    # a step, ties to even.
    np.bitwise_and(work.view(np.int32), 0x7F800000, out=bits)
    np.clip(bits, _ONE, _FOUR, out=bits)
    np.add(bits, (22 << 23) + (1 << 22), out=bits)
    np.add(work, bits.view(np.float32), out=sizes)
    np.subtract(sizes, bits.view(np.float32), out=sizes)
    np.minimum(sizes, np.float32(6), out=sizes)
    np.subtract(work, sizes, out=sizes)
    np.multiply(work, sizes, out=work)
    np.add.accumulate(work, axis=1, out=work)
    np.multiply(sizes, sizes, out=sizes)
    np.add.accumulate(sizes, axis=1, out=sizes)
    return sizes[:, -1].astype(np.float64), work[:, -1].astype(np.float64)


_E2M1_MAX, _E4M3_MAX = SIZES[-1], 448.0
_LEAST_E4M3 = 2.0**-9
_TILE_BLOCKS = TILE_ELEMENTS // BLOCK


Scales = Literal["amax", "search"]


@dataclass(frozen=True, slots=True)
class PackNvfp4(Scaled):
    """The decoder's arguments (a matrix [N, K] in BF16, F16 or F32 where there is none) and the
    global scale F32 [1] -> packed U8 [N, K/2] and block scales F8_E4M3 [N, K/16].

    With `scales: search` each block's is the best of those around its own, see formats/nvfp4/encode.py.
    The matrix has no NaN and no infinity: `RowMaxima` looks. Raises PlanError where arguments do not fit
    or columns are not whole blocks of 16.
    """

    dialect: Dialect
    scales: Scales = "amax"

    @property
    def search_loop(self) -> str | None:
        """The loop that its block scales are searched for with."""
        return "nvfp4_encode" if self.scales == "search" else None

    def __repr__(self) -> str:
        """The name in fingerprints and journals that the op had before it searched."""
        searched = "" if self.scales == "amax" else f", scales={self.scales!r}"
        return f"PackNvfp4(decoder={self.decoder!r}, dialect={self.dialect!r}{searched})"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight = self.decoded(*args)
        rows, columns = matrix_to_quantize(weight, "NVFP4", FLOAT_DTYPES)
        if args[-1] != TensorType("F32", (1,)):
            raise PlanError(f"expected the global scale as F32 [1], found {args[-1]}")
        blocks = groups_in_row(columns, BLOCK)
        return TensorType("U8", (rows, columns // 2)), TensorType("F8_E4M3", (rows, blocks))

    def own_scratch(self, weight: TensorType) -> int:
        """A tile twice as float32; five times to search."""
        return self._tiles * 4 * min(weight.numel, _TILE_BLOCKS * BLOCK)

    @property
    def _tiles(self) -> int:
        return 2 if self.scales == "amax" else 5

    def loss(self, *args: TensorType) -> str | None:
        before = None if self.decoder is None else self.decoder.loss(*args[:-1])
        dtype = self.decoded(*args).dtype.lower().replace("f", "fp").replace("bfp", "bf")
        how = "" if self.scales == "amax" else ", scales searched for"
        own = f"rounds {dtype} to NVFP4 in blocks of {BLOCK} ({self.dialect} dialect{how})"
        return own if before is None else f"{before}; {own}"

    def encode(
        self, weight: Buffer, scale: Buffer, outs: Sequence[Buffer], scratch: memoryview
    ) -> None:
        import numpy as np

        global_scale = array(scale.data, np.float32, (1,))[0]
        total = weight.type.numel // BLOCK
        step = min(total, _TILE_BLOCKS)
        width = weight.type.nbytes // max(1, weight.type.numel) * BLOCK
        packed = array(outs[0].data, np.uint8, (total, BLOCK // 2))
        blocks = array(outs[1].data, np.uint8, (total,))
        if weight.type.dtype == "BF16" and 0 < global_scale < np.inf:
            groups = array(weight.data, np.uint16, (total, BLOCK))
            own = float(global_scale)
            how = self.dialect == "modelopt", self.scales == "search"
            if done("nvfp4_encode", groups, own, *how, packed, blocks):
                return
        size = 4 * step * BLOCK
        values, work, *more = (
            array(scratch[n * size : (n + 1) * size], np.int32, (step, BLOCK))
            for n in range(self._tiles)
        )
        with np.errstate(all="ignore"):  # a scale of 0 is looked after
            for start in range(0, total, max(1, step)):
                stop = min(start + step, total)
                data = weight.data[width * start : width * stop]
                count = stop - start
                _blocks(
                    data, weight.type.dtype, global_scale, self.dialect,
                    values[:count].view(np.float32), work[:count], [part[:count] for part in more],
                    packed[start:stop], blocks[start:stop],
                )  # fmt: skip


def _blocks(
    data: memoryview,
    dtype: str,
    global_scale: np.float32,
    dialect: Dialect,
    values: Float32s,
    work: Int32s,
    searching: Sequence[Int32s],
    packed: UInt8s,
    scale: UInt8s,
) -> None:
    """Blocks [n, 16] of weights -> packed [n, 8] and scale codes [n]; with memory for `searching`, the
    best."""
    import numpy as np

    count = values.shape[0]
    kind = bits_type(dtype)
    largest = as_float32(_largest(array(data, kind, (count * BLOCK,)), values, work), dtype)
    decode(data, dtype, values, work)
    if dialect == "modelopt":
        each = largest / (np.float32(_E2M1_MAX) * global_scale)
        each[each == 0] = 1
        np.clip(each, np.float32(_LEAST_E4M3), np.float32(_E4M3_MAX), out=each)
        e4m3(each, scale)
        np.multiply(each, global_scale, out=each)
    else:
        each = largest / np.float32(_E2M1_MAX)
        if dtype == "BF16":
            to_bf16_values(each)
        np.multiply(each, global_scale, out=each)
        np.minimum(each, np.float32(_E4M3_MAX), out=each)
        e4m3(each, scale)
        none = each == 0
        each[none] = 0.125
        scale[none] = 0x20
        np.divide(each, global_scale, out=each)
    if searching:
        one, two, three = searching
        best_scales(
            values,
            scale,
            each,
            global_scale,
            dialect,
            one.view(np.float32),
            two.view(np.float32),
            three,
        )
    np.divide(values, each[:, None], out=values)
    bytes_ = work.reshape(-1).view(np.uint8)
    codes, spare = bytes_[: count * BLOCK], bytes_[count * BLOCK : 2 * count * BLOCK]
    to_codes(values.reshape(-1), codes, spare)
    pack(codes, spare, packed.reshape(-1))


def _largest(weight: Bits, values: Float32s, work: Int32s) -> Bits:
    """Bits of the largest size of each 16 numbers. numpy starts a reduction anew for each block, which
    costs more than the block does: instead, entry i becomes the largest of i and its next 1, 3, 7, 15
    neighbours, all blocks at once."""
    import numpy as np

    size = weight.size
    sizes = values.reshape(-1).view(weight.dtype)[:size]
    other = work.reshape(-1).view(weight.dtype)[:size]
    np.bitwise_and(weight, np.iinfo(weight.dtype).max, out=sizes)
    width = 1
    while width < BLOCK:
        left = size - 2 * width + 1
        np.maximum(sizes[:left], sizes[width : width + left], out=other[:left])
        sizes, other = other, sizes
        width *= 2
    return sizes[::BLOCK].copy()


def inverse(packed: UInt8s, scale: UInt8s, own: float, dialect: Dialect) -> Float32s:
    """Return what the bytes mean: packed [N, K/2] and scale codes [N, K/16] -> float32 [N, K], not
    rounded to bf16. Written from the definitions of E2M1 and E4M3, number by number."""
    import numpy as np

    rows = packed.shape[0]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)
    sizes = np.array(SIZES, np.float32)[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)
    exponent, mantissa = (scale >> 3).astype(np.int32), (scale & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    each = np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)
    factor = each * np.float32(own) if dialect == "modelopt" else each / np.float32(own)
    found: Float32s = sizes * np.repeat(factor, BLOCK, axis=1)
    return found
