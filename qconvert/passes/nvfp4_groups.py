"""Stored matrices as NVFP4; those that runtimes compute as one share a global scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.roles import Cut, Kind, joined_with
from qconvert.formats.base import Stored
from qconvert.formats.int_packed.limits import TP_SIZES, Matrix
from qconvert.formats.nvfp4.config import NAMES
from qconvert.formats.nvfp4.encode import PackNvfp4, Scales
from qconvert.formats.nvfp4.scales import DecodedMaxima, OwnScale, RowMaxima
from qconvert.ops.cast import ToBf16
from qconvert.ops.fp4 import BLOCK
from qconvert.ops.rowwise import RowOp


def quantized(
    matrices: Mapping[str, Stored], dialect: Dialect, scales: Scales = "amax"
) -> dict[str, Output]:
    """The tensors of matrices that share a scale, by name. Raises PlanError naming a matrix that
    cannot be quantized."""
    maxima, names = [], NAMES[dialect]
    for module, stored in matrices.items():
        decoder = _decoder(stored)
        op = RowMaxima() if decoder is None else DecodedMaxima(decoder, (RowMaxima(),))
        try:
            maxima.append(apply(op, *stored.args)[0])
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
    try:
        (global_scale,) = apply(OwnScale(dialect), *maxima)
    except PlanError as error:
        raise PlanError(f"{', '.join(matrices)}: {error}") from error
    made: dict[str, Output] = {}
    for module, stored in matrices.items():
        try:
            encoder = PackNvfp4(_decoder(stored), dialect, scales)
            weight, scale = apply(encoder, *stored.args, global_scale)
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
        made[f"{module}.{names.weight}"] = weight
        made[f"{module}.{names.scale}"] = scale
        made[f"{module}.{names.global_scale}"] = global_scale.reshape(names.scalar)
    return made


def _decoder(stored: Stored) -> RowOp | None:
    """Return how the matrix is read: F16 and F32 as they are, since bf16 would round them once more."""
    return None if isinstance(stored.decoder, ToBf16) else stored.decoder


def shared_groups(modules: Mapping[str, Kind]) -> tuple[tuple[str, ...], ...]:
    """Modules in groups that share a scale: those under one parent that runtimes compute as one."""
    found: dict[tuple[str, tuple[Kind, ...]], list[str]] = {}
    for module, kind in modules.items():
        joined = joined_with(kind)
        at = module.rpartition(".")[0] if len(joined) > 1 else module
        found.setdefault((at, joined), []).append(module)
    return tuple(map(tuple, found.values()))


def cut_blocks(matrices: Iterable[Matrix], tp: int) -> list[Matrix]:
    """The matrices of whose columns each of `tp` ranks would not get whole blocks."""
    return [m for m in matrices if m.cut is Cut.COLUMNS and m.columns % (tp * BLOCK)]


def check_tp(matrices: Sequence[Matrix], tp: int | None) -> None:
    """Raises PlanError where a rank would cut a block, naming the matrix."""
    for matrix in cut_blocks(matrices, tp) if tp is not None else ():
        sizes = [size for size in TP_SIZES if not cut_blocks(matrices, size)]
        raise PlanError(
            f"{matrix.module}: at tensor parallel {tp} a rank would not get whole blocks of "
            f"{BLOCK} of its {matrix.columns} columns; ranks do at "
            + (", ".join(map(str, sizes)) or "none of the usual sizes")
        )
