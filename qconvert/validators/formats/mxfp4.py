"""MXFP4: codes E2M1, two per byte, the even column in the low half; an E8M0 exponent for 32 columns.

Format sources: OCP Microscaling v1.0 (5.2, 5.3.3); compressed-tensors (`mxfp4-pack-quantized`:
`weight_packed` U8 [N, K / 2], `weight_scale` U8 [N, K / 32]); amd-quark and modelopt (`weight` U8 and
`weight_scale` U8 of these shapes); gpt-oss's stacks of experts (`_blocks` U8 [E, N, K / 32, 16],
`_scales`); DeepSeek-V4 (`weight` I8 and `scale` F8_E8M0). No code is shared with the encoder.

QC027 exponents have another type or shape than the codes beside them require.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validators.formats.nvfp4 import fp4_floats, near_in_loop, steps
from qconvert.validators.reading.forms import Encoding, Form, Grid, Spec, Unread, Weights
from qconvert.validators.reading.quantization import all_weights
from qconvert.validators.reading.rows import scales

if TYPE_CHECKING:
    from qconvert.core.arrays import Bools
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Floats
    from qconvert.validators.reading.matrices import Matrix

BLOCK = 32
_REACH, _LEAST, _LEAST_EXPONENT = 8.0, 3.0, 2.0**-127


def _states(weights: Weights) -> bool:
    keys = ("type", "num_bits", "group_size")
    return tuple(map(weights.get, keys)) == ("float", 4, BLOCK)


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    last, is_bytes = name.rpartition(".")[2], checkpoint[name].type.dtype == "U8"
    if last.endswith("_blocks"):
        return is_bytes
    scale = _scale_of(checkpoint, name)
    if scale is None or (is_bytes and last not in ("weight_packed", "weight")):
        return False
    return scale.type.dtype in (("U8", "F8_E8M0") if is_bytes else ("F8_E8M0",))


def _scale_of(checkpoint: Checkpoint, name: str) -> Source | None:
    if checkpoint[name].type.dtype == "I8":
        return checkpoint.get(f"{name.rpartition('.')[0]}.scale")
    if name.endswith("_blocks"):
        return checkpoint.get(f"{name.removesuffix('_blocks')}_scales")
    return checkpoint.get(f"{name.removesuffix('_packed')}_scale")


def _read(checkpoint: Checkpoint, name: str) -> Form:
    weight, scale = checkpoint[name], _scale_of(checkpoint, name)
    kind = weight.type
    if kind.dtype == "U8" and not any(map(_states, all_weights(checkpoint))):
        raise Unread(f"packed as {kind}, but the config states no MXFP4")
    assert scale is not None
    rows, columns = kind.shape[0], 2 * kind.shape[-1]
    groups = columns // BLOCK
    if len(kind.shape) != 2 or columns % BLOCK or scale.type.shape != (rows, groups):
        raise Unread(f"{scale.name} {scale.type} does not fit {kind} in blocks of {BLOCK}")
    return Form("mxfp4", weight, 0, rows, columns, Grid(scale, 0, rows, groups, (1, BLOCK)))


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    """Of Quark's names: structure and shapes judge the others."""
    weight, scale = checkpoint[name].type, _scale_of(checkpoint, name)
    if not name.endswith(".weight") or weight.dtype != "U8" or scale is None:
        return
    wanted = (weight.shape[0], 2 * weight.shape[-1] // BLOCK) if len(weight.shape) == 2 else None
    if wanted is None or 2 * weight.shape[1] % BLOCK:
        message = (
            f"expected MXFP4 codes [N, K / 2] of whole blocks of {BLOCK} columns, found {weight}"
        )
        yield Finding("QC027", "error", name, message)
    elif scale.type.shape != wanted:
        message = f"expected exponents {list(wanted)} for codes {weight}, found {scale.type}"
        yield Finding("QC027", "error", scale.name, message)


def _stack(checkpoint: Checkpoint, name: str) -> Iterator[Form]:
    """The matrix [rows, 32 * blocks] of each expert in gpt-oss's stack."""
    codes, scale = checkpoint[name], _scale_of(checkpoint, name)
    if len(codes.type.shape) != 4 or scale is None:
        raise Unread(f"a stack of {codes.type}, {'with' if scale else 'without'} scales")
    experts, rows, blocks, size = codes.type.shape
    if size != BLOCK // 2 or scale.type.shape != codes.type.shape[:3]:
        raise Unread(f"{scale.name} {scale.type} does not fit {codes.type}")
    for expert in range(experts):
        grid = Grid(scale, expert * rows * blocks, rows, blocks, (1, BLOCK))
        yield Form("mxfp4", codes, expert * rows * blocks * size, rows, BLOCK * blocks, grid)


def _nearest(
    reader: Reads, matrix: Matrix, start: int, stop: int, expected: Floats, found: Floats
) -> tuple[Bools, str]:
    return mx_fits(expected, found, scales(reader, matrix, start, stop))


def mx_fits(expected: Floats, found: Floats, factor: Floats) -> tuple[Bools, str]:
    """Return which weights [n, K] are within half a step of the expected ones, and what is wrong with
    exponents, `factor` [n, K / 32] being powers of two. The largest weight of a block is 8 of them at
    most (OCP's rule), and more than 3 (that of rounding up)."""
    import numpy as np

    fits, largest = near_in_loop(expected, found, factor, 0.0, _REACH, _REACH, 1.0)
    with np.errstate(all="ignore"):
        if fits is None:
            step, size, half, error = steps(expected, found, factor)
            fits = (error <= half * step) & (size <= _REACH)
            fits |= (error == 0) | (np.isnan(expected) & np.isnan(found))
            largest = np.abs(expected).reshape(*factor.shape, BLOCK).max(axis=-1)
        coarse = (factor > _LEAST_EXPONENT) & (largest > 0) & (largest / factor <= _LEAST)
    if not coarse.any():
        return fits, ""
    row, block = divmod(int(np.argmax(coarse)), coarse.shape[1])
    return fits, (
        f"row {row}, block {block}: its scale is {factor[row, block]:.4g}, but its largest weight is "
        f"{largest[row, block]:.4g}"
    )


_STATED = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": BLOCK}

SPEC = Spec(
    name="MXFP4",
    dtypes=("U8", "I8"),
    applies=lambda checkpoint: not checkpoint.dtypes.isdisjoint(("U8", "F8_E8M0")),
    stored=_stored,
    read=_read,
    stack=_stack,
    faults=_faults,
    encodings=(
        Encoding(
            name="mxfp4", bits=4, floats=fp4_floats, loop="fp4_rows", largest=6.0,
            passes=("mx", "quantize"), nearest=_nearest, exact_zero=True,
        ),
    ),
    states=_states,
    formats=("mxfp4-pack-quantized",),
    algorithms={"W4A8_MXFP4_FP8": {**_STATED, "inputs": True}},
    methods=("mxfp4",),
)  # fmt: skip
