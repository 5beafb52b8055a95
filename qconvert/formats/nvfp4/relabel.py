"""MXFP4 to NVFP4 without loss: the same E2M1 codes under other scales.

MXFP4 (OCP Microscaling Formats v1.0, 6.2; compressed-tensors `mxfp4-pack-quantized`; DeepSeek-V4's
experts, whose codes are called I8) has a power of two, 2^(e - 127), for each 32 columns. NVFP4's global
scale takes the largest of them over 2^8, and each 16 columns' E4M3 scale what is left, which is a power
of two from 2^8 down to 2^-9: exponents may spread over 17, gate's and up's together. Blocks of zeros
alone do not count, whatever their exponent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qconvert.checkpoint.quantization_config import config_groups, states_mxfp4
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Buffer, Output, apply
from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.formats.mx.decode import BLOCK as MX_BLOCK
from qconvert.formats.mx.decode import EXPONENTS, check_mxfp4
from qconvert.formats.nvfp4.format import group_config
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import NAN_SCALE
from qconvert.ops.fp4 import BLOCK
from qconvert.ops.rowwise import EachRow
from qconvert.plan.plan import Plan

# --- NVFP4's scalars from one dialect to the other ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reciprocal(Uncut):
    """F32 [] or [1] -> F32 of the same shape: the divisor that means the same multiplier, or the
    multiplier that the same divisor means, by what is wanted.

    Raises RunError for what is no positive finite number, and, unless `nearest`, where there is no such
    divisor, or where that of the multiplier would be another one.
    """

    wanted: Literal["divisor", "multiplier"]
    nearest: bool = False

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (scale,) = args
        if scale.dtype != "F32" or scale.numel != 1:
            raise PlanError(f"expected a scale in F32 [1] or [], found {scale}")
        return (scale,)

    def loss(self, *args: TensorType) -> str | None:
        if not self.nearest:
            return None
        return "takes the nearest float32 where a scale has no exact reciprocal (2^-23 at most)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        value = array(ins[0].data, np.float32, (1,))
        if not 0 < float(value[0]) < float("inf"):
            raise RunError(f"its scale is {value[0]}; the checkpoint is broken")
        one = np.float32(1)
        with np.errstate(all="ignore"):
            near = one / value
            tried = [near, np.nextafter(near, np.float32(0)), np.nextafter(near, one * np.inf)]
            fits = [other for other in tried if (one / other)[0] == value[0]]
        if self.wanted == "multiplier":
            # What a divisor means is its rounded reciprocal; back again it has to be the same divisor.
            fits = [near] if fits and fits[0][0] == near[0] else []
        if not fits and not self.nearest:
            raise RunError(
                f"its scale {float(value[0])!r} has no reciprocal in float32 that leads back to it; "
                "relabel with --nearest to take the nearest (2^-23 of the scale at most)"
            )
        array(outs[0].data, np.float32, (1,))[:] = fits[0] if fits else near
        return {} if fits else {"scales without an exact reciprocal": 1}


# --- MXFP4 matrices of a plan under NVFP4's scales, and the config's block for them ---------------


# Keys of a block that make it one of NVFP4 experts beside block FP8: sglang
# (`configs/model_config.py`, "hybrid NVFP4 moe") and vLLM (`models/deepseek_v4/quant_config.py`).
# Both then take NVFP4 of weights and activations.
_HYBRID = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": BLOCK}


def relabelled(matrices: Mapping[str, Sequence[Output]], dialect: Dialect) -> dict[str, Output]:
    """The tensors of matrices that share a scale, by name, from codes and exponents of each. Raises
    PlanError naming a matrix whose parts do not fit."""
    names = NVFP4[dialect]
    ranges = []
    for module, parts in matrices.items():
        try:
            ranges.append(apply(ExponentRange(), *parts)[0])
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
    (global_scale,) = apply(RelabelOwn(dialect), *ranges)
    made: dict[str, Output] = {}
    for module, (codes, scale) in matrices.items():
        (blocks,) = apply(RelabelBlocks(dialect), scale, global_scale)
        # DeepSeek-V4 calls the same bytes I8.
        made[f"{module}.{names.weight}"] = Output(TensorType("U8", codes.type.shape), codes.pieces)
        made[f"{module}.{names.scale}"] = blocks
        made[f"{module}.{names.global_scale}"] = global_scale.reshape(names.scalar)
    return made


def hybrid_block(block: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V4's own block of its FP8 layers, with experts in modelopt's NVFP4 beside them."""
    return {**block, **_HYBRID}


def relabelled_block(plan: Plan, *, inputs: bool = False) -> dict[str, Any]:
    """The config's block with each MXFP4 group in NVFP4, weights only or with `inputs` too. Raises
    PlanError for a group that is another format."""
    config = next(c for c in plan.checkpoint.quantization_configs if states_mxfp4(c.block))
    stated = list(config_groups(config))
    made = {}
    for key, (targets, weights) in zip(config.block["config_groups"], stated, strict=True):
        found = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
        if found != ("float", 4, MX_BLOCK):
            raise PlanError(
                f"{config.where}: {key} is {found[1]}-bit {found[0]} in groups of {found[2]}; only "
                "models whose groups are all MXFP4 are relabelled"
            )
        made[key] = group_config(targets, inputs=inputs)
    return {**config.block, "format": "nvfp4-pack-quantized", "config_groups": made}


# E4M3's largest and smallest powers of two; the spread that fits between them.
_HIGH, _LOW = 8, -9
SPREAD = _HIGH - _LOW
_BIAS = 127
_NAN = 255
_SIZES = 0x7777777777777777  # codes without their signs


@dataclass(frozen=True, slots=True)
class ExponentRange(EachRow, Exact):
    """packed U8 or I8 [N, K/2] and E8M0 scales U8 or F8_E8M0 [N, K/32] -> U8 [N, 2], the least and the
    largest exponent of a row's blocks that are not all zero: 255 and 0 where there is none.

    Raises PlanError where shapes do not fit, RowError where the scale of such a block is NaN.
    """

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale = args
        check_mxfp4(packed, scale)
        return (TensorType("U8", (packed.shape[0], 2)),)

    def scratch(self, *args: TensorType) -> int:
        """The codes without their signs."""
        return args[0].nbytes

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, blocks = ins[1].type.shape
        sizes = array(scratch, np.uint64, (rows, blocks, 2))
        np.bitwise_and(array(ins[0].data, np.uint64, (rows, blocks, 2)), _SIZES, out=sizes)
        used = (sizes[..., 0] | sizes[..., 1]) != 0
        scale = array(ins[1].data, np.uint8, (rows, blocks))
        broken = np.flatnonzero((used & (scale == _NAN)).any(axis=1))
        if broken.size:
            raise RowError(int(broken[0]), NAN_SCALE)
        target = array(outs[0].data, np.uint8, (rows, 2))
        np.min(scale, axis=1, initial=_NAN, where=used, out=target[:, 0])
        np.max(scale, axis=1, initial=0, where=used, out=target[:, 1])
        return {}


@dataclass(frozen=True, slots=True)
class RelabelOwn(Uncut, Exact):
    """Exponent ranges U8 [N, 2] of matrices that share a scale -> that scale, F32 [1]: 2^(e - 135) of
    the largest exponent e (modelopt), or its inverse (compressed-tensors).

    Raises RunError, with the numbers and their rows, where exponents spread over more than E4M3 holds.
    """

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        for kind in args:
            if kind.dtype != "U8" or len(kind.shape) != 2 or kind.shape[1] != 2:
                raise PlanError(f"expected exponent ranges as U8 [rows, 2], found {kind}")
        return (TensorType("F32", (1,)),)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        ranges = np.concatenate([array(b.data, np.uint8, b.type.shape) for b in ins])
        least, largest = int(ranges[:, 0].min(initial=_NAN)), int(ranges[:, 1].max(initial=0))
        power = 0
        if least <= largest:
            if largest - least > SPREAD:
                low, high = (
                    _place(ins, int(ranges[:, 0].argmin())),
                    _place(ins, int(ranges[:, 1].argmax())),
                )
                raise RunError(
                    f"its MXFP4 exponents go from {least} to {largest}, a spread of "
                    f"{largest - least} ({low}, {high}), and NVFP4's block scales hold {SPREAD}: it "
                    "cannot be relabelled without loss; quantize to NVFP4 from the original weights"
                )
            power = largest - _BIAS - _HIGH
        if self.dialect == "compressed-tensors":
            power = -power
        if power > _BIAS:
            raise RunError(
                f"its largest MXFP4 exponent is {largest}, whose divisor 2^{power} is no float32; "
                "take dialect modelopt, which multiplies"
            )
        array(outs[0].data, np.float32, (1,))[0] = np.float32(2.0**power)
        return {}


def _place(ranges: Sequence[Buffer], at: int) -> str:
    """Row `at` of the matrices that share a scale, as a row of its own matrix."""
    number = 0
    while at >= ranges[number].type.shape[0]:
        at -= ranges[number].type.shape[0]
        number += 1
    return f"row {at}" if len(ranges) == 1 else f"row {at} of matrix {number + 1} of {len(ranges)}"


@dataclass(frozen=True, slots=True)
class RelabelBlocks(EachRow, Exact):
    """E8M0 scales U8 or F8_E8M0 [N, K/32] and what `RelabelOwn` made of them F32 [1] -> F8_E4M3
    [N, K/16], each twice. Raises PlanError where types do not fit."""

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        scale, global_scale = args
        wanted = TensorType("F32", (1,))
        if scale.dtype not in EXPONENTS or len(scale.shape) != 2 or global_scale != wanted:
            raise PlanError(
                f"expected U8 or F8_E8M0 scales and an {wanted}, found {scale} and {global_scale}"
            )
        return (TensorType("F8_E4M3", (scale.shape[0], 2 * scale.shape[1])),)

    def scratch(self, *args: TensorType) -> int:
        return 0

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        power = int(np.log2(float(array(ins[1].data, np.float32, (1,))[0])))
        largest = (power if self.dialect == "modelopt" else -power) + _BIAS + _HIGH
        # Blocks of zeros may lie outside; any scale means the same for them.
        table = [_power_code(min(max(e - largest + _HIGH, _LOW), _HIGH)) for e in range(256)]
        scale = array(ins[0].data, np.uint8, ins[0].type.shape)
        target = array(outs[0].data, np.uint8, (*scale.shape, 2))
        target[:] = np.array(table, np.uint8)[scale][..., None]
        return {}


def _power_code(power: int) -> int:
    """2^power in E4M3: an exponent field from 2^-6 on, a bit of the mantissa below."""
    return (power + 7) << 3 if power >= -6 else 1 << (power + 9)
