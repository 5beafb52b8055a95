"""MLX's checkpoints, as mlx-lm writes them: words of codes, scales and, of affine ones, biases under the
names of each module, stacks of experts (`switch_mlp`) among them.

MLX's words -> BF16, as `mlx.core.dequantize` (0.32) computes it.

Format source: mlx 0.32, `mlx/ops.cpp` (`dequantize`, `fp_dequantize`). A row's codes are one stream of
bits, the first in the lowest bits of the first byte, whatever their width. Affine: code * scale, rounded
to the scales' dtype, plus the offset, rounded again. mxfp4: E2M1 times 2^(e - 127); mxfp8: E4M3 times
that; nvfp4: E2M1 times an E4M3 number. Scales of these are U8, and all products but the smallest of
mxfp8 are bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.checkpoint.mlx_config import MLX, mlx_scheme, states_mlx
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.core.parameter_names import MLX as PARTS
from qconvert.formats.base import FolderTensors, Format, Read, as_matrix, stored, weights_of_method
from qconvert.ops.base import array
from qconvert.ops.cast import FLOAT_DTYPES, RoundedTiles, check_finite, decode, float_tiles
from qconvert.ops.fp4 import from_codes, from_e4m3
from qconvert.ops.ints import spread_nibbles
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    from qconvert.checkpoint.mlx_config import Mode
    from qconvert.core.arrays import Float32s, UInt8s

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class DequantMlx(RoundedTiles):
    """weight U32 [N, K * bits / 32] and scales [N, K / group], of affine codes in BF16, F16 or F32 and
    beside biases of the same type, else U8 -> BF16 [N, K].

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale or bias is NaN or infinite
    and for a result beyond bf16.
    """

    mode: Mode
    bits: int
    group: int

    format: ClassVar[str] = "mlx"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scales, *biases = args
        if weight.dtype != "U32" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in a U32 matrix, found {weight}")
        rows, columns = weight.shape[0], weight.shape[1] * _WORD_BITS // self.bits
        whole = columns * self.bits == weight.shape[1] * _WORD_BITS and not columns % self.group
        affine = self.mode == "affine"
        dtypes = FLOAT_DTYPES if affine else ("U8",)
        if not whole or scales.dtype not in dtypes or scales.shape != (rows, columns // self.group):
            raise PlanError(
                f"expected scales [{rows}, {columns} / {self.group}] in {' or '.join(dtypes)} for "
                f"{weight} of {self.bits} bits, found {scales}"
            )
        if biases != ([scales] if affine else []):
            raise PlanError(
                f"expected {f'biases {scales}' if affine else 'no biases'} beside the scales, found "
                f"{', '.join(map(str, biases)) or 'none'}"
            )
        return (TensorType("BF16", (rows, columns)),)

    def loss(self, *args: TensorType) -> str | None:
        if self.mode != "affine":
            return None
        return f"rounds int{self.bits} x scale + offset to bf16 (relative error at most 2^-8)"

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        weight = array(ins[0].data, np.uint8, (ins[0].type.shape[0], ins[0].type.row_nbytes))
        columns = 8 * weight.shape[1] // self.bits
        for start, stop in float_tiles(weight.shape[0], columns):
            data = weight[start:stop]
            grid, *offsets = (self._scales(one, start, stop) for one in ins[1:])
            if self.mode == "mxfp8":
                values = from_e4m3(data)
            elif self.mode == "affine":
                values = bit_fields(data, self.bits).astype(np.float32)
            else:
                values = from_codes(data)
            dtype = ins[1].type.dtype
            blocks = values.reshape(*grid.shape, self.group)
            with np.errstate(all="ignore"):  # what is beyond float32 is refused where it is rounded
                np.multiply(blocks, grid[..., None], out=blocks)
                for offset in offsets:
                    blocks = _rounded(blocks, dtype)
                    np.add(blocks, offset[..., None], out=blocks)
                    blocks = _rounded(blocks, dtype)
            yield start, blocks.reshape(stop - start, columns)

    def _scales(self, stored: Buffer, start: int, stop: int) -> Float32s:
        """Scales or biases of rows [start, stop), as float32. Raises RowError for NaN and infinity."""
        import numpy as np

        shape, size = (stop - start, stored.type.shape[1]), stored.type.row_nbytes
        data = stored.data[start * size : stop * size]
        found: Float32s
        if stored.type.dtype != "U8":
            found = np.empty(shape, np.float32)
            decode(data, stored.type.dtype, found, np.empty(shape, np.int32))
        elif self.mode == "nvfp4":
            found = from_e4m3(array(data, np.uint8, shape))
        else:
            exponents = np.arange(255) - 127
            powers = np.append(np.ldexp(np.float32(1), exponents), np.float32(np.nan))
            found = powers[array(data, np.uint8, shape)]
        check_finite(found, start)
        return found


def bit_fields(data: UInt8s, bits: int) -> UInt8s:
    """Bytes [n, m] -> codes of 1 to 8 bits [n, 8 m / bits], the first in the lowest bits. Eight codes
    fill `bits` bytes."""
    import numpy as np

    if bits == 8:
        return data
    if bits == 4:
        pairs = np.empty(data.size, np.uint16)
        spread_nibbles(data.reshape(-1), pairs, np.empty_like(pairs))
        return pairs.view(np.uint8).reshape(data.shape[0], -1)
    pieces = data.reshape(data.shape[0], -1, bits)
    words = np.zeros(pieces.shape[:2], np.uint64)
    for byte in range(bits):
        words |= pieces[..., byte].astype(np.uint64) << np.uint64(8 * byte)
    codes = np.empty((*words.shape, 8), np.uint8)
    for code in range(8):
        part = words >> np.uint64(bits * code) & np.uint64((1 << bits) - 1)
        np.copyto(codes[..., code], part, casting="unsafe")
    return codes.reshape(data.shape[0], -1)


def _rounded(values: Float32s, dtype: str) -> Float32s:
    """Rounded to the dtype, as float32."""
    import numpy as np

    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        bits += (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)
        bits &= np.uint32(0xFFFF0000)
    return values


# Families of which mlx-lm stores other numbers than transformers (`models/qwen3_next.py`, `qwen3_5.py`,
# `sanitize`).
_SHIFTED = ("qwen3_next", "qwen3_5")
_GLOBAL_SCALE = "global_scale"


def read(plan: Plan, module: str) -> Read | None:
    """A module with scales, or with a `weight` in U32, where the config states MLX's quantization. A
    stack [E, N, words] is read as its rows, one matrix below another."""
    codes, scales, biases = (f"{module}.{part}" for part in PARTS)
    weight = plan.tensors.get(codes)
    in_words = weight is not None and weight.type.dtype == "U32"
    if not states_mlx(plan.checkpoint) or not (in_words or scales in plan.tensors):
        return None

    if plan.checkpoint.family.name in _SHIFTED:
        raise PlanError(
            f"mlx-lm stores the norms of {plan.checkpoint.family.name} plus 1 and its convolutions "
            "transposed, which is not undone here: start from the model's own release"
        )
    if f"{module}.{_GLOBAL_SCALE}" in plan.tensors:
        raise PlanError(
            f"{module!r} has a {_GLOBAL_SCALE}: experts with scales of their own over "
            "mode nvfp4's are not read here; start from the model's own release"
        )
    scheme = mlx_scheme(plan.checkpoint, module)
    if scheme is None:
        raise PlanError(f"{module!r} has MLX's codes or scales, and the config leaves it in floats")
    if weight is None or not in_words:
        found = "none" if weight is None else weight.type
        raise PlanError(f"{codes!r}: expected MLX's codes in U32 beside {scales!r}, found {found}")
    names = [codes, scales, biases] if scheme.mode == "affine" else [codes, scales]
    if scheme.mode != "affine" and biases in plan.tensors:
        raise PlanError(f"{biases!r} exists, and mode {scheme.mode} has none: one of them is wrong")
    decoder = DequantMlx(scheme.mode, scheme.bits, scheme.group)
    return stored(plan, names, decoder, as_matrix), tuple(names)


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    if parameter != PARTS[0] or not folder.once(states_mlx):
        return None
    try:
        scheme = mlx_scheme(folder.checkpoint, module)
    except PlanError:
        return "MLX"
    if scheme is None:
        return None
    kind = f"INT{scheme.bits}" if scheme.mode == "affine" else scheme.mode.upper()
    return f"MLX {kind} g{scheme.group}"


FORMAT = Format(
    name="mlx", title="MLX", parameters=PARTS, mark=PARTS[1],
    unmixed=weights_of_method(MLX, read), codes=("U32",),
    cut=(1, "group"), order=15,
    equals="mlx 0.32 mlx.core.dequantize", read=read, label=_label,
)  # fmt: skip
