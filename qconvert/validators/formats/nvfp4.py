"""NVFP4: codes E2M1, two per byte, the even column in the low half; an E4M3 block scale for 16 columns;
one float32 global scale per matrix. No code is shared with the encoder.

Format sources: OCP Microscaling v1.0, 5.3.3 (E2M1); compressed-tensors (`nvfp4-pack-quantized`:
the global scale is a divisor); nvidia-modelopt (a multiplier).

QC104 an NVFP4 matrix lacks a part, or a part has another type or shape than its codes require.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Source
from qconvert.validation.compiled import LOOPS, done
from qconvert.validation.findings import Finding
from qconvert.validators.reading.forms import Encoding, Form, GlobalScale, Grid, Spec, Unread
from qconvert.validators.reading.rows import scales
from qconvert.validators.reading.stated_schemes import stated_weights

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Bools, Float64s
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Bytes, Floats
    from qconvert.validators.reading.matrices import Matrix


NVFP4, BLOCK = "nvfp4", 16
MOST = 6.0 * 448.0  # the largest code under the largest block scale
# Of a code's three lower bits: two of exponent, one of mantissa, bias 1; 0 and 1 are denormal.
_SIZES = tuple(
    (c & 1) / 2 if c < 2 else (1 + (c & 1) / 2) * 2.0 ** ((c >> 1) - 1) for c in range(8)
)
_LEAST_NORMAL = 2.0**-6  # of E4M3
# A block's largest weight in units of its scale: 6, and 1/16 beyond if the scale was rounded down,
# and the rounding to bf16; a denormal scale may be rounded down by a third.
_REACH, _REACH_DENORMAL = 6.5, 9.1
_SLACK = 1 + 1e-5
_COARSE = 1.5  # a scale this much above its block's need was made for another block


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of a matrix's tensors, and whether its global scale divides."""

    name: str
    weight: str
    global_scale: str
    input: str
    divisor: bool


MODELOPT = Dialect("modelopt", "weight", "weight_scale_2", "input_scale", False)
PACKED = Dialect(
    "compressed-tensors", "weight_packed", "weight_global_scale", "input_global_scale", True
)
DIALECTS = (MODELOPT, PACKED)
_INPUTS = tuple(dialect.input for dialect in DIALECTS)


@dataclass(frozen=True, slots=True)
class Parts:
    """One matrix's tensors; None for a missing one."""

    module: str
    dialect: Dialect
    weight: Source
    scale: Source | None
    global_scale: Source | None
    input: Source | None


def parts_of(tensors: Mapping[str, Source], name: str) -> Parts | None:
    """The matrix that a tensor holds the codes of; None if it is not an NVFP4 weight: U8, with a global
    scale or block scales in E4M3."""
    weight = tensors[name]
    if weight.type.dtype != "U8":
        return None
    module, _, parameter = name.rpartition(".")
    dialect = next((d for d in DIALECTS if d.weight == parameter), None)
    if dialect is None:
        return None
    scale, global_scale, given = (
        tensors.get(f"{module}.{part}")
        for part in ("weight_scale", dialect.global_scale, dialect.input)
    )
    if global_scale is None and (scale is None or scale.type.dtype != "F8_E4M3"):
        return None
    return Parts(module, dialect, weight, scale, global_scale, given)


def all_parts(tensors: Mapping[str, Source]) -> Iterator[Parts]:
    for name in tensors:
        if name.endswith((".weight", ".weight_packed")):
            parts = parts_of(tensors, name)
            if parts is not None:
                yield parts


def fault(parts: Parts) -> tuple[str, str] | None:
    """The first tensor that is missing or has another type than its codes require, and what is wrong."""
    kind, module = parts.weight.type, parts.module
    if len(kind.shape) != 2:
        return parts.weight.name, f"expected NVFP4 codes as a matrix [N, K / 2], found {kind}"
    rows, columns = kind.shape[0], 2 * kind.shape[1]
    if columns % BLOCK:
        return parts.weight.name, f"expected columns in whole blocks of {BLOCK}, found {columns}"
    if parts.scale is None:
        return parts.weight.name, f"NVFP4 without its block scales, {module}.weight_scale"
    wanted = TensorType("F8_E4M3", (rows, columns // BLOCK))
    if parts.scale.type != wanted:
        return parts.scale.name, f"expected {wanted} for codes {kind}, found {parts.scale.type}"
    if parts.global_scale is None:
        return (
            parts.weight.name,
            f"NVFP4 without its global scale, {module}.{parts.dialect.global_scale}",
        )
    for one in (parts.global_scale, parts.input):
        if one is not None and (one.type.dtype != "F32" or one.type.numel != 1):
            return one.name, f"expected one number in F32, found {one.type}"
    return None


def is_part(tensors: Mapping[str, Source], name: str) -> bool:
    """Tell whether a tensor is the input scale of an NVFP4 matrix."""
    if not name.endswith(_INPUTS):
        return False
    module, _, parameter = name.rpartition(".")
    return any(
        parameter == d.input
        and f"{module}.{d.global_scale}" in tensors
        and f"{module}.{d.weight}" in tensors
        for d in DIALECTS
    )


# --- What the config says ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stated:
    """A dialect's block: where it stands, and whether activations are quantized too."""

    where: str
    dialect: Dialect
    inputs: bool


def stated(config: QuantConfig) -> Stated | None:
    """Statements of a block about NVFP4, None if it states nothing or several things (sglang
    `layers/quantization/modelopt_quant.py`; compressed-tensors `quant_scheme.py`)."""
    if config.method == "compressed-tensors":
        inputs = set(_group_inputs(config.block.get("config_groups")))
        return Stated(config.where, PACKED, inputs.pop()) if len(inputs) == 1 else None
    stated_here = [config.block.get(key) for key in ("moe_quant_algo", "quant_algo")]
    layers = config.block.get("quantized_layers")  # of quant_algo MIXED_PRECISION
    for entry in layers.values() if isinstance(layers, Mapping) else ():
        stated_here.append(entry.get("quant_algo") if isinstance(entry, Mapping) else None)
    for algorithm in map(str, stated_here):
        if "NVFP4" in algorithm:
            return Stated(config.where, MODELOPT, not algorithm.startswith("W4A16"))
    return None


def speaks_of_nvfp4(config: QuantConfig) -> bool:
    """Tell whether a block states anything about NVFP4, even contradictions."""
    if config.method == "quark":
        return any(one.get("strategy") == "tensor_group" for _, one in stated_weights(config))
    return stated(config) is not None or any(
        True for _ in _group_inputs(config.block.get("config_groups"))
    )


def _group_inputs(groups: Any) -> Iterator[bool]:
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if kind == ("float", 4, "tensor_group"):
            yield group.get("input_activations") is not None


# --- Numbers -------------------------------------------------------------------------------------


@cache
def _pairs() -> np.ndarray[Any, Any]:
    """Two numbers (one complex64) for every byte, low half first."""
    import numpy as np

    both = np.arange(256)[:, None] >> np.array([0, 4])
    sizes = np.array(_SIZES, np.float32)[both & 7]
    found = np.copysign(sizes, np.where(both & 8, -1, 1)).astype(np.float32)
    pairs: np.ndarray[Any, Any] = found.view(np.complex64).reshape(-1)
    return pairs


def fp4_floats(packed: Bytes, dtype: str = "U8") -> Floats:
    """Packed codes of either dtype, bytes [n] -> float32 [2n]."""
    import numpy as np

    out = np.empty(2 * packed.size, np.float32)
    np.take(_pairs(), packed.astype(np.intp), out=out.view(np.complex64), mode="clip")
    return out


def steps(
    expected: Floats, found: Floats, factor: Floats
) -> tuple[Float64s, Float64s, Float64s, Float64s]:
    """Of weights [n, K] and the factors of their blocks: their steps, their sizes in steps, half a step
    of E2M1 there in steps, and how far they are off."""
    import numpy as np

    step = np.repeat(
        np.abs(factor).astype(np.float64), expected.shape[1] // factor.shape[1], axis=1
    )
    size = np.abs(expected) / step
    half = np.where(size < 2, 0.25, np.where(size < 4, 0.5, np.maximum(size - 6, 1.0)))
    return step, size, half, np.abs(expected.astype(np.float64) - found)


def near_in_loop(
    expected: Floats, found: Floats, factor: Floats, *bounds: float
) -> tuple[Bools | None, Floats]:
    """Tell whether a compiled loop found all weights within bounds (None: it declined, or some are not),
    and the largest of each block."""
    import numpy as np

    largest = np.empty(factor.shape, np.float32)
    if LOOPS.in_use() is None or not done("fp4_fits", expected, found, factor, *bounds, largest):
        return None, largest
    return np.ones((1, 1), np.bool_), largest


def halfway(expected: Floats, found: Floats, factor: Floats, unit: float) -> tuple[Bools, str]:
    """Return which weights [n, K] are within half a step of the expected ones, and what is wrong with
    block scales that are coarser than their blocks need. `factor` [n, K / 16] are block scales times the
    global one, `unit` is the global one. Half a step is a quarter, a half or one of a factor; beyond 6
    there is only the rest that a rounded-down block scale leaves."""
    import numpy as np

    with np.errstate(all="ignore"):
        least = float(np.float64(_LEAST_NORMAL) * unit / _SLACK)
        fits, largest = near_in_loop(
            expected, found, factor, least, _REACH, _REACH_DENORMAL, _SLACK
        )
        if fits is None:
            step, size, half, error = steps(expected, found, factor)
            reach = np.where(step >= least, _REACH, _REACH_DENORMAL)
            fits = (error <= half * step * _SLACK) & (size <= reach)
            fits |= (error == 0) | (np.isnan(expected) & np.isnan(found))
            largest = np.abs(expected).reshape(*factor.shape, BLOCK).max(axis=-1)
        needed = largest.astype(np.float64) / 6 / unit
        coarse = (needed >= _LEAST_NORMAL) & (np.abs(factor) > _COARSE * needed * unit)
    if not coarse.any():
        return fits, ""
    row, block = divmod(int(np.argmax(coarse)), coarse.shape[1])
    return fits, (
        f"row {row}, block {block}: its scale is {factor[row, block] / unit:.4g}, but its weights need "
        f"{needed[row, block]:.4g}"
    )


def _nearest(
    reader: Reads, matrix: Matrix, start: int, stop: int, expected: Floats, found: Floats
) -> tuple[Bools, str]:
    grid = matrix.form.grid
    assert grid is not None
    assert grid.global_scale is not None
    factor = scales(reader, matrix, start, stop)
    return halfway(expected, found, factor, grid.global_scale.unit(reader))


# --- The format ----------------------------------------------------------------------------------


def _read(checkpoint: Checkpoint, name: str) -> Form:
    parts = parts_of(checkpoint, name)
    assert parts is not None
    wrong = fault(parts)
    if wrong is not None:
        raise Unread(f"{wrong[0]}: {wrong[1]}")
    if f"{parts.module}.pre_quant_scale" in checkpoint:
        raise Unread("its inputs are multiplied by pre_quant_scale (modelopt's AWQ)")
    assert parts.scale is not None
    assert parts.global_scale is not None
    rows, columns = parts.weight.type.shape[0], 2 * parts.weight.type.shape[1]
    global_scale = GlobalScale(parts.global_scale, parts.dialect.divisor)
    grid = Grid(parts.scale, 0, rows, columns // BLOCK, (1, BLOCK), global_scale=global_scale)
    return Form(NVFP4, parts.weight, 0, rows, columns, grid)


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    parts = parts_of(checkpoint, name)
    wrong = None if parts is None else fault(parts)
    if wrong is not None:
        yield Finding("QC104", "error", *wrong)


_STATED = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": BLOCK}

SPEC = Spec(
    name="NVFP4",
    dtypes=("U8",),
    stored=lambda checkpoint, name: parts_of(checkpoint, name) is not None,
    read=_read,
    faults=_faults,
    encodings=(
        Encoding(
            name=NVFP4, bits=4, floats=fp4_floats, loop="fp4_rows", largest=6.0, passes=("nvfp4",),
            nearest=_nearest,
        ),
    ),
    parts=("scale_2",),
    states=lambda g: (g.get("type"), g.get("num_bits")) == ("float", 4) and g.get("group_size") != 32,
    formats=("nvfp4-pack-quantized",),
    algorithms={"NVFP4": {**_STATED, "inputs": True}, "W4A16_NVFP4": {**_STATED, "inputs": False}},
)  # fmt: skip
