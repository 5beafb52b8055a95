"""FP8: codes E4M3 or E5M2, of OCP or FNUZ, and scales of a tensor, a row or a block, or (MXFP8) of 32
columns.

Format sources: OCP 8-bit Floating Point; DeepSeek-V3 (`weight_scale_inv` F32 [ceil(N / 128), ceil(K /
128)], quant_method fp8); compressed-tensors (`float-quantized`, `mxfp8-quantized`: `weight_scale`);
modelopt. U8 scales are exponents (E8M0) where the config says so.

QC015 a grid of block scales does not fit its weight.
QC027 a type or shape that the format does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.graph import Source
from qconvert.core.names import is_scale, scale_candidates, split_parameter
from qconvert.validation.compiled import done
from qconvert.validation.findings import Finding
from qconvert.validators.reading.decode import FP8, SCALES, fp8_floats
from qconvert.validators.reading.forms import Encoding, Form, Grid, Spec, Unread, Weights
from qconvert.validators.reading.quantization import (
    KNOWN_METHODS,
    all_weights,
    blocks,
    scheme_of,
    stated_for,
)
from qconvert.validators.reading.rows import scales, spread
from qconvert.validators.reading.stated_schemes import grouped_weights, pair, stated_weights

if TYPE_CHECKING:
    from qconvert.core.arrays import Bools
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Floats
    from qconvert.validators.reading.matrices import Matrix

_8_BITS = {"type": "float", "num_bits": 8}
_BLOCKS = {**_8_BITS, "strategy": "block", "block_structure": [128, 128], "inputs": False}
_EXPONENTS = "torch.uint8"
_MX = {**_8_BITS, "strategy": "group", "group_size": 32}
# Half a step: of a normal number's own size, and of a denormal one in units of its scale.
_HALF = {
    "F8_E4M3": (2.0**-4, 2.0**-10), "F8_E5M2": (2.0**-3, 2.0**-17),
    "F8_E4M3FNUZ": (2.0**-4, 2.0**-11), "F8_E5M2FNUZ": (2.0**-3, 2.0**-18),
}  # fmt: skip
_SLACK = 1 + 2.0**-7
# compressed-tensors divides in bf16: the quotient is rounded once more before it is rounded to a code.
_BF16_HALF = 2.0**-8
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


# --- Statements ----------------------------------------------------------------------------------


def _is_fp8(g: Weights) -> bool:
    return _8_BITS.items() <= g.items()


def _is_mx(g: Weights) -> bool:
    return _is_fp8(g) and g.get("strategy") == "group"


def _strategy(g: Weights) -> str | None:
    strategy = g.get("strategy")
    return strategy if _is_fp8(g) and isinstance(strategy, str) else None


def float_block(g: Weights) -> tuple[int, int] | None:
    """Rows and columns that share a scale of 8-bit floats, None where a group states none."""
    if _is_mx(g):
        return pair([1, g.get("group_size")])
    return pair(g.get("block_structure")) if g.get("type") == "float" else None


def _with_inner(config: QuantConfig) -> Iterator[Mapping[str, Any]]:
    """A block, and those inside it (`linear_fp8_config`)."""
    yield config.block
    for key, inner in config.block.items():
        if key.endswith("_config") and isinstance(inner, Mapping):
            yield inner


def fp8_blocks(configs: Iterable[QuantConfig]) -> dict[tuple[int, int], str]:
    """Every stated block of FP8 scales, and where it is first stated."""
    found: dict[tuple[int, int], str] = {}
    for config in configs:
        inner = list(_with_inner(config))
        sizes = [pair(block.get("weight_block_size")) for block in inner]
        groups = [g for block in inner for _, g in grouped_weights(block)]
        groups += [g for _, g in stated_weights(config)]
        for block in (*sizes, *map(float_block, groups)):
            if block is not None:
                found.setdefault(block, config.where)
    return found


@dataclass(frozen=True)
class _Stated:
    """Statements of all blocks: sizes of blocks, in order; whether all FP8 weights have the first;
    whether U8 scales are exponents, and whether there is MXFP8."""

    sizes: tuple[tuple[int, int], ...]
    alike: bool
    exponents: bool
    mx: bool

    @property
    def first(self) -> tuple[int, int] | None:
        return next(iter(self.sizes), None)


@lru_cache(maxsize=8)  # called for each matrix
def _stated(checkpoint: Checkpoint) -> _Stated:
    configs = [block.config for block in blocks(checkpoint)]
    sizes, groups = tuple(fp8_blocks(configs)), list(filter(_is_fp8, all_weights(checkpoint)))
    formats = [inner.get("scale_fmt") for config in configs for inner in _with_inner(config)]
    alike = all(float_block(g) == next(iter(sizes), None) for g in groups)
    return _Stated(sizes, alike, "ue8m0" in formats, any(map(_is_mx, groups)))


def fp8_block_of(checkpoint: Checkpoint, module: str) -> tuple[int, int] | None:
    """The block of a module's FP8 scales: what is stated for the module, where that is FP8, else the
    first that is stated at all; None if there is none."""
    stated = _stated(checkpoint)
    own = None if stated.alike else scheme_of(checkpoint, module)
    return float_block(own) if own is not None and _is_fp8(own) else stated.first


def fp8_strategy_of(checkpoint: Checkpoint, module: str) -> str | None:
    """Tell whether a scale for a `tensor`, a `channel`, a `block` or a `group` of columns is stated for
    a module's FP8 weight; None where none is."""
    return stated_for(checkpoint, module, _strategy)


def _are_exponents(checkpoint: Checkpoint, module: str) -> bool:
    """Tell whether the U8 scales of a module's FP8 weight are exponents."""
    stated, own = _stated(checkpoint), scheme_of(checkpoint, module)
    if own is not None and own.get("scale_dtype") == _EXPONENTS:
        return True
    return stated.exponents or (stated.mx if own is None else _is_mx(own))


# --- Tensors -------------------------------------------------------------------------------------


def _scale_of(checkpoint: Checkpoint, weight: str) -> Source:
    """The scale of an FP8 weight. Raises Unread."""
    sources = checkpoint.sources
    found = [name for name in scale_candidates(weight) if name in sources]
    if len(found) > 1:  # beside a scale that only weights have, `scale` is the model's own
        found = [name for name in found if not name.endswith(".scale")]
    if len(found) != 1:
        raise Unread(f"it has {len(found)} scales")
    scale = sources[found[0]]
    if scale.type.dtype not in SCALES:
        raise Unread(f"its scale is {scale.type.dtype}")
    if scale.type.dtype == "U8" and not _are_exponents(checkpoint, split_parameter(weight)[0]):
        raise Unread("its scale is U8, but no scale_fmt says that those are exponents")
    return scale


def _block_of(checkpoint: Checkpoint, weight: str) -> tuple[int, int] | None:
    """The block of a weight's scales, of those that are stated; None where a scale a tensor or a row is
    stated for it. Raises Unread."""
    module, sizes = split_parameter(weight)[0], _stated(checkpoint).sizes
    found = fp8_block_of(checkpoint, module)
    if not sizes or (found is None and fp8_strategy_of(checkpoint, module) is not None):
        return None
    if len(sizes) == 1:
        return sizes[0]
    if found not in sizes:
        raise Unread("the config states several block sizes for scales, and not which one applies")
    return found


def _read(checkpoint: Checkpoint, name: str) -> Form:
    weight = checkpoint[name]
    if len(weight.type.shape) != 2:
        raise Unread(f"FP8 of shape {list(weight.type.shape)}")
    rows, columns = weight.type.shape
    grid = _grid(checkpoint, weight, (), rows, columns, 0)
    return Form("fp8", weight, 0, rows, columns, grid)


def _stack(checkpoint: Checkpoint, name: str) -> Iterator[Form]:
    weight = checkpoint[name]
    experts, rows, columns = weight.type.shape
    for expert in range(experts):
        grid = _grid(checkpoint, weight, (experts,), rows, columns, expert)
        yield Form("fp8", weight, expert * rows * columns, rows, columns, grid)


def _grid(
    checkpoint: Checkpoint,
    weight: Source,
    lead: tuple[int, ...],
    rows: int,
    columns: int,
    number: int,
) -> Grid:
    """Scales of matrix `number` in a stack of `lead`."""
    scale = _scale_of(checkpoint, weight.name)
    shape, block = scale.type.shape, _block_of(checkpoint, weight.name)
    if block is not None:
        grid = ceil_div(rows, block[0]), ceil_div(columns, block[1])
        if shape in ((*lead, *grid), (*lead, grid[0], 1, grid[1], 1)):
            return Grid(scale, number * prod(grid), *grid, block)
    if scale.type.numel == 1:
        return Grid(scale, 0, 1, 1, (rows, columns))
    if shape in ((*lead, rows), (*lead, rows, 1)):
        return Grid(scale, number * rows, rows, 1, (1, columns))
    if lead and shape in (lead, (*lead, 1, 1)):
        return Grid(scale, number, 1, 1, (rows, columns))
    sizes = ", ".join(f"{a}x{b}" for a, b in sorted(_stated(checkpoint).sizes)) or "no size"
    raise Unread(f"a scale {scale.type} fits no matrix [{rows}, {columns}] in blocks of {sizes}")


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    sources = checkpoint.sources
    kind = sources[name].type
    if len(kind.shape) not in (2, 3):
        message = f"expected an FP8 matrix or a stack of matrices, found {kind}"
        yield Finding("QC027", "error", name, message)
    scale = next((s for s in scale_candidates(name) if s in sources), None)
    if scale is None:
        return
    module, found = split_parameter(name)[0], sources[scale].type
    strategy = fp8_strategy_of(checkpoint, module)
    exponents = found.dtype != "U8" or _are_exponents(checkpoint, module)
    fault = _scale_fault(found, exponents=exponents, only=strategy == "group")
    if fault is not None:
        yield Finding("QC027", "error", scale, fault)
    if len(kind.shape) < 2:
        return
    block = fp8_block_of(checkpoint, module)
    fault = _strategy_fault(kind, found, strategy, block) or _grid_fault(kind, found, scale, block)
    configs = checkpoint.quantization_configs
    if fault is not None and (block or any(one.method in KNOWN_METHODS for one in configs)):
        yield Finding("QC015", "error", scale, fault)


def _scale_fault(scale: TensorType, *, exponents: bool, only: bool) -> str | None:
    """`only`: MXFP8, whose scales are nothing but exponents."""
    if only and scale.dtype not in ("U8", "F8_E8M0"):
        return f"the config states MXFP8: expected exponents in U8 or F8_E8M0, found {scale}"
    if scale.dtype not in _SCALES:
        return f"expected FP8 scales in {', '.join(_SCALES)}, found {scale}"
    if scale.dtype == "U8" and not exponents:
        return (
            f"{scale}: bytes are exponents only if scale_fmt is ue8m0, and the config states none"
        )
    return None


def _strategy_fault(
    weight: TensorType, scale: TensorType, strategy: str | None, block: tuple[int, int] | None
) -> str | None:
    """Fault of scales that are stated to be of tensors, channels, blocks or groups."""
    if len(weight.shape) != 2:
        return None
    rows, columns = weight.shape
    if strategy == "tensor" and scale.numel != 1:
        return (
            f"the config states a scale a tensor: expected one number for {weight}, found {scale}"
        )
    if strategy == "channel" and scale.shape[-2:] not in ((rows, 1), (rows,)):
        return f"the config states a scale a row: expected [{rows}, 1] for {weight}, found {scale}"
    if strategy in ("block", "group") and block is not None:
        grid = ceil_div(rows, block[0]), ceil_div(columns, block[1])
        # modelopt's FP8_PB_WO keeps axes of one (vLLM, `modelopt.py`).
        if scale.shape not in (grid, (grid[0], 1, grid[1], 1)):
            return (
                f"the config states blocks of {block[0]}x{block[1]}: expected scales {list(grid)} for "
                f"{weight}, found {scale}"
            )
    return None


def _grid_fault(
    weight: TensorType, scale: TensorType, name: str, block: tuple[int, int] | None
) -> str | None:
    if block is None:
        # Without blocks a scale is one number, or one per row.
        last = scale.shape[-1:] in ((), (1,))
        if scale.numel == 1 or last or len(scale.shape) < len(weight.shape):
            return None
        return f"a grid {list(scale.shape)} of block scales, but the config states no block size"
    *lead, rows, columns = weight.shape
    if scale.numel == 1:
        if name.endswith("_scale_inv") and (rows > block[0] or columns > block[1]):
            return f"one scale for {weight}, but the config states blocks of {block[0]}x{block[1]}"
        return None
    grid = (*lead, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    # A scale per row, or per expert, is another form.
    others = (*lead, rows, 1), (*lead, 1, 1)
    if len(scale.shape) != len(grid) or scale.shape in (grid, *others):
        return None
    return (
        f"expected a scale grid {list(grid)} for {weight} in blocks of {block[0]}x{block[1]}, found "
        f"{list(scale.shape)}"
    )


# --- Values --------------------------------------------------------------------------------------


def _nearest(
    reader: Reads, matrix: Matrix, start: int, stop: int, expected: Floats, found: Floats
) -> tuple[Bools | None, str]:
    import numpy as np

    grid, dtype = matrix.form.grid, matrix.form.weight.type.dtype
    assert grid is not None
    half, least = _HALF[dtype]
    more = _BF16_HALF if grid.scale.type.dtype == "BF16" else 0.0
    with np.errstate(all="ignore"):
        size = np.abs(scales(reader, matrix, start, stop))
        if done("fp8_fits", expected, found, size, grid.block[1], half, least, _SLACK, more):
            return None, ""
        step = spread(reader, size, matrix.form)
        allowed = np.maximum(half * np.abs(expected), least * step) * _SLACK
        if more:
            allowed += more * np.abs(expected)
        fits = np.abs(expected - found) <= allowed
        return fits | (np.isnan(expected) & np.isnan(found)), ""


SPEC = Spec(
    name="FP8",
    dtypes=FP8,
    stored=lambda checkpoint, name: not is_scale(name),
    read=_read,
    stack=_stack,
    faults=_faults,
    shape=lambda checkpoint, name, shape: shape,
    encodings=(
        Encoding(
            name="fp8", bits=8, floats=fp8_floats, loop="fp8_rows", largest=448.0,
            passes=("fp8", "mx", "quantize"), nearest=_nearest,
        ),
    ),
    parts=("scale", "scale_inv"),
    states=lambda g: (g.get("type"), g.get("num_bits", 8)) == ("float", 8),
    formats=("float-quantized", "naive-quantized", "mxfp8-quantized"),
    algorithms={
        "FP8": {**_8_BITS, "strategy": "tensor", "inputs": True},
        "FP8_PER_CHANNEL_PER_TOKEN": {**_8_BITS, "strategy": "channel", "inputs": False},
        "FP8_PB_WO": _BLOCKS,
        "FP8_PB_REAL": _BLOCKS,
        "FP8_BLOCK_SCALES": _BLOCKS,
        "MXFP8": {**_MX, "inputs": False},
    },
    methods=("fp8", "fbgemm_fp8"),
)  # fmt: skip
