"""MLX's words (mlx 0.32, `mlx/ops.cpp`; mlx-lm 0.32, `utils.py`): `weight` U32 [.., N, K * bits / 32],
`scales` [.., N, K / group]; affine ones have `biases` like them, others scales in U8: E8M0 exponents, or
E4M3 numbers in mode nvfp4. An entry under a module's path holds for it; `false`: it stays in floats.
Experts are stacked under `switch_mlp` there, and read one by one.

QC011 codes without their other parts.
QC027 a type or shape that the format does not have.
QC034 a module with codes is one that the config leaves in floats.
QC097 a mode, bits or group size that mlx does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validators.reading.decode import SCALES, fp8_floats
from qconvert.validators.reading.forms import Encoding, Form, Grid, Shape, Spec, Unread

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Bytes, Floats

METHOD = "mlx"
# Group size, bits, and what scales are, of each mode but affine.
_FLOATS: Mapping[str, tuple[int, int, str]] = {
    "mxfp4": (32, 4, "F8_E8M0"), "mxfp8": (32, 8, "F8_E8M0"), "nvfp4": (16, 4, "F8_E4M3"),
}  # fmt: skip
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BITS = (1, 2, 3, 4, 5, 6, 8)


class Stated(NamedTuple):
    """Statements about a module: mode, group size, bits."""

    mode: str
    group: int
    bits: int


def _stated(checkpoint: Checkpoint, module: str) -> Stated | str | None:
    """The scheme of a module by the first block of MLX; None where it is left in floats, a text for what
    mlx does not have."""
    block = next((c.block for c in checkpoint.quantization_configs if c.method == METHOD), None)
    if block is None:
        return "no block of the config states MLX's quantization"
    stack = re.sub(r"\.experts\.\d+\.", ".switch_mlp.", module)
    for letter, projection in _MIXTRAL.items():
        stack = re.sub(rf"\.{letter}$", f".{projection}", stack)
    own: Any = block.get(module, block.get(stack, True))
    if own is False:
        return None
    said = own if isinstance(own, Mapping) else block
    mode = said.get("mode") or "affine"
    usual = _FLOATS.get(mode, (64, 4, ""))
    found = Stated(mode, said.get("group_size") or usual[0], said.get("bits") or usual[1])
    if mode == "affine":
        fits = found.bits in _BITS and type(found.group) is int and found.group > 0
    else:
        fits = mode in _FLOATS and found[1:] == usual[:2]
    where = "" if said is block else f" for {module!r}"
    return found if fits else f"states {mode} of {found[2]} bits and group size {found[1]}{where}"


def _stored(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight")


def _faults(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    module, kind = name.removesuffix(".weight"), checkpoint[name].type
    stated = _stated(checkpoint, module)
    if stated is None:
        message = "is MLX's codes, but the config leaves the module in floats (`false`)"
        yield Finding("QC034", "error", name, message)
    if isinstance(stated, str) and checkpoint.quantization_configs:  # else QC012
        yield Finding("QC097", "error", name, f"expected a scheme of mlx 0.32, but it {stated}")
    if not isinstance(stated, Stated):
        return
    columns, rest = divmod(32 * kind.shape[-1], stated.bits)
    if rest or columns % stated.group:
        message = (
            f"expected whole groups of {stated.group} codes of {stated.bits} bits, found {kind}"
        )
        yield Finding("QC027", "error", name, message)
        return
    dtypes = SCALES[:3] if stated.mode == "affine" else ("U8",)
    shape = (*kind.shape[:-1], columns // stated.group)
    scales, biases = (checkpoint.get(f"{module}.{part}") for part in ("scales", "biases"))
    if scales is None or (biases is None and stated.mode == "affine"):
        lacking = "scales" if scales is None else "biases"
        yield Finding("QC011", "error", name, f"codes without {module}.{lacking}")
        return
    if stated.mode != "affine" and biases is not None:
        message = f"exists, but the config states mode {stated.mode}, which has none"
        yield Finding("QC011", "error", biases.name, message)
    for part in (scales, *([biases] if biases is not None and stated.mode == "affine" else [])):
        alike = part.type.dtype == scales.type.dtype
        if part.type.dtype not in dtypes or part.type.shape != shape or not alike:
            message = f"expected {' or '.join(dtypes)} {list(shape)} for {kind}, found {part.type}"
            yield Finding("QC027", "error", part.name, message)


def _read(checkpoint: Checkpoint, name: str) -> Form:
    for fault in _faults(checkpoint, name):
        raise Unread(f"{fault.where}: {fault.message}")
    module, weight = name.removesuffix(".weight"), checkpoint[name]
    stated = _stated(checkpoint, module)
    if not isinstance(stated, Stated):
        raise Unread(f"packed as {weight.type}, and {stated or 'left in floats'}")
    mode, group, bits = stated
    rows, columns = prod(weight.type.shape[:-1]), 32 * weight.type.shape[-1] // bits
    size = rows, columns // group, (1, group)
    scales, biases = (checkpoint.get(f"{module}.{part}") for part in ("scales", "biases"))
    assert scales is not None
    if mode != "affine":
        grid = Grid(scales, 0, *size, kind=_FLOATS[mode][2])
        return Form("mlx-fp8" if bits == 8 else "mxfp4", weight, 0, rows, columns, grid)
    assert biases is not None
    grid, offset = Grid(scales, 0, *size), Grid(biases, 0, *size)
    steps = scales.type.dtype
    return Form(f"mlx{bits}", weight, 0, rows, columns, grid, offset=offset, steps=steps)


def _shape(checkpoint: Checkpoint, name: str, shape: Shape) -> Shape | None:
    stated = _stated(checkpoint, name.removesuffix(".weight"))
    if not isinstance(stated, Stated):
        return None
    return (*shape[:-1], -1 if shape[-1] < 0 else shape[-1] * stated.bits // 32)


def _affine(bits: int, data: Bytes, dtype: str) -> Floats:
    """Codes of a stream of bits, the first in the lowest bits of the first byte."""
    import numpy as np

    each = np.unpackbits(data, bitorder="little").reshape(-1, bits)
    return (each @ (1 << np.arange(bits, dtype=np.uint16))).astype(np.float32)


def _e4m3(data: Bytes, dtype: str) -> Floats:
    return fp8_floats(data, "F8_E4M3")


SPEC = Spec(
    name="MLX",
    dtypes=("U32",),
    stored=_stored,
    read=_read,
    faults=_faults,
    shape=_shape,
    encodings=(
        *(
            Encoding(
                name=f"mlx{bits}", bits=bits, floats=partial(_affine, bits), largest=2.0**bits - 1
            )
            for bits in _BITS
        ),
        Encoding(name="mlx-fp8", bits=8, floats=_e4m3, largest=448.0),
    ),
    parts=(".scales", ".biases"),
    methods=(METHOD,),
)
