"""MXFP4 -> BF16: a power of two for each 32 columns times E2M1 codes, two a byte, low nibble first.

Format sources: OCP Microscaling Formats v1.0, 5.3.3 (E2M1), 5.4.1 (E8M0: 2^(e - 127), 255 is NaN) and
6.2; compressed-tensors `mxfp4-pack-quantized`; transformers, `integrations/mxfp4.py`
(`_convert_moe_packed_tensors`: gpt-oss stores the transposed matrix). Every product that bf16's range
holds is exact: a code has two significant bits, and 2^-128, the smallest, is a bf16 subnormal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, aligned
from qconvert.ops.base import Uncut, array
from qconvert.ops.cast import NAN_SCALE, check_finite, float_tiles
from qconvert.ops.compiled import done
from qconvert.ops.fp4 import SIZES, from_codes
from qconvert.ops.rowwise import EachRow

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, UInt8s, UInt32s


BLOCK = 32  # columns that share a scale
_CODES = ("U8", "I8")
EXPONENTS = ("U8", "F8_E8M0")
_BYTES = BLOCK // 2
_NAN = 255
# 1.5 * 2^2 is the largest code, and 1.5 * 2^127 bf16's largest power of two: from exponent 253 on codes
# may be beyond bf16.
_RISKY = 253
_INFINITY = 0x7F80
_LEAST_POWER = 0x00400000  # bits of 2^-127, a denormal float32
# Bytes looked up at a time: their indices, 8 bytes each, fit in a core's own cache.
_TILE = 1 << 15


def check_mxfp4(packed: TensorType, scale: TensorType) -> None:
    """Raise PlanError where two tensors are no MXFP4 matrix."""
    if packed.dtype not in _CODES or len(packed.shape) != 2:
        raise PlanError(f"expected packed E2M1 codes in a U8 or I8 matrix, found {packed}")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    shape = rows, columns // BLOCK
    if columns % BLOCK or scale.shape != shape or scale.dtype not in EXPONENTS:
        raise PlanError(
            f"expected exponents U8 or F8_E8M0 [{rows}, {columns} / {BLOCK}] for {packed}, found "
            f"{scale}"
        )


@cache
def _table() -> UInt32s:
    """Two bf16, the even column's in the lower half, for each exponent and byte: [256 * 256]."""
    import numpy as np

    sizes = np.array((*SIZES, *(-size for size in SIZES)), np.float64)
    with np.errstate(all="ignore"):
        values = np.ldexp(sizes, np.arange(256)[:, None] - 127).astype(np.float32)
    codes = (values.view(np.uint32) >> 16).astype(np.uint32)
    # float32 holds 2^129 as infinity, and all else exactly; so does bf16, which drops zeros alone.
    byte = np.arange(256)
    pairs = codes[:, byte & 15] | codes[:, byte >> 4] << np.uint32(16)
    return pairs.reshape(-1)


@dataclass(frozen=True, slots=True)
class DequantMxfp4(EachRow):
    """packed U8 or I8 [N, K/2] and scale U8 or F8_E8M0 [N, K/32] -> BF16 [N, K].

    Raises PlanError where dtypes or shapes do not fit, RowError for a scale that is NaN and for a result
    beyond bf16 (with `overflow` that is written as infinite, and counted).
    """

    overflow: bool = False

    format: ClassVar[str] = "mxfp4"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale = args
        check_mxfp4(packed, scale)
        return (TensorType("BF16", (packed.shape[0], 2 * packed.shape[1])),)

    def scratch(self, *args: TensorType) -> int:
        """Return where a tile's bytes are looked up."""
        return 8 * min(aligned(args[0].numel), _TILE)

    def loss(self, *args: TensorType) -> str | None:
        """Exact, but for what is beyond bf16, which stops the run."""
        return "fp4 x scale beyond bf16 becomes infinite" if self.overflow else None

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        packed, stored = (array(one.data, np.uint8, one.type.shape) for one in ins)
        powers = np.ldexp(np.float64(1), np.arange(256) - 127).astype(np.float32)
        powers[_NAN] = np.nan
        for start, stop in float_tiles(packed.shape[0], 2 * packed.shape[1]):
            each = powers[stored[start:stop]]
            check_finite(each, start)
            yield start, from_codes(packed[start:stop]) * np.repeat(each, BLOCK, axis=1)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        blocks = ins[1].type.numel
        source = array(ins[0].data, np.uint8, (blocks, _BYTES))
        scale = array(ins[1].data, np.uint8, (blocks,))
        _check(scale, ins[1].type.shape[1])
        target = array(outs[0].data, np.uint32, (blocks, _BYTES))
        step = max(1, min(blocks, _TILE // _BYTES))
        room = array(
            scratch[: 8 * min(blocks, step) * _BYTES], np.intp, (min(blocks, step), _BYTES)
        )
        if not scale.size or int(scale.max()) < _RISKY:
            powers = scale.astype(np.uint32) << np.uint32(23)
            powers[scale == 0] = _LEAST_POWER
            if done("fp4_decode", source, powers.view(np.float32), target):
                return {}
        table = _table()
        for start in range(0, blocks, step):
            stop = min(start + step, blocks)
            at = room[: stop - start]
            np.multiply(scale[start:stop, None], np.intp(256), out=at, casting="unsafe")
            np.add(at, source[start:stop], out=at, casting="unsafe")
            np.take(table, at, out=target[start:stop], mode="clip")
        return self._beyond(scale, target, outs[0].type.shape[1])

    def _beyond(self, scale: UInt8s, target: UInt32s, columns: int) -> Mapping[str, int]:
        """Count what is infinite, or raise RowError for it."""
        import numpy as np

        if not scale.size or int(scale.max()) < _RISKY:
            return {}
        infinite = (target.view(np.uint16) & np.uint16(0x7FFF)) == _INFINITY
        found = np.flatnonzero(infinite.any(axis=1))
        if found.size and not self.overflow:
            raise RowError(
                int(found[0]) * BLOCK // columns,
                "has weights beyond bf16 (3.39e38 at most); write infinities with `dequant "
                "--allow-overflow`",
            )
        count = int(np.count_nonzero(infinite))
        return {"values beyond bf16, written as infinite": count} if count else {}


@dataclass(frozen=True, slots=True)
class DequantMxfp4Columns(Uncut):
    """packed U8 [N, K/2] and scale U8 [N, K/32] -> BF16 [K, N]: the transposed matrix, as gpt-oss keeps
    its experts in BF16. Raises as `DequantMxfp4` does; a row of its RowError is one of the source."""

    overflow: bool = False

    @property
    def _decoder(self) -> DequantMxfp4:
        return DequantMxfp4(self.overflow)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (decoded,) = self._decoder.infer(*args)
        return (TensorType("BF16", decoded.shape[::-1]),)

    def _rows(self, *args: TensorType) -> int:
        """Rows decoded at a time: 64 of them fill the lines of cache that a transposed write touches."""
        return max(1, min(args[0].shape[0], 64))

    def scratch(self, *args: TensorType) -> int:
        cut = [kind.with_rows(self._rows(*args)) for kind in args]
        (decoded,) = self._decoder.infer(*cut)
        return aligned(decoded.nbytes) + self._decoder.scratch(*cut)

    def loss(self, *args: TensorType) -> str | None:
        return self._decoder.loss(*args)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        kinds = [one.type for one in ins]
        columns, rows = outs[0].type.shape
        target = array(outs[0].data, np.uint16, (columns, rows))
        counts: dict[str, int] = {}
        step = self._rows(*kinds)
        for start in range(0, rows, step):
            height = min(step, rows - start)
            part = self._decoder.rows(start, start + height, *kinds)
            cut = [
                Buffer(kind, one.data[at : at + kind.nbytes])
                for one, (at, kind) in zip(ins, part.args, strict=True)
            ]
            (kind,) = self._decoder.infer(*(one.type for one in cut))
            made = Buffer(kind, scratch[: kind.nbytes])
            beside = scratch[aligned(kind.nbytes) :]
            try:
                found = self._decoder.run(cut, [made], beside)
            except RowError as error:
                raise RowError(start + error.row, error.what, by_column=True) from error
            for what, count in found.items():
                counts[what] = counts.get(what, 0) + count
            target[:, start : start + height] = array(made.data, np.uint16, kind.shape).T
        return counts


def _check(scale: UInt8s, blocks: int) -> None:
    import numpy as np

    if scale.size and int(scale.max()) == _NAN:
        row = int(np.flatnonzero(scale == _NAN)[0]) // blocks
        raise RowError(row, NAN_SCALE)
