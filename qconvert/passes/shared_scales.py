"""Matrices that runtimes compute as one: they share a scale, that of the largest weight of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from qconvert.core.errors import PlanError
from qconvert.core.graph import Op, Output, apply
from qconvert.core.roles import Kind, joined_with
from qconvert.formats.base import Stored
from qconvert.formats.nvfp4.scales import DecodedMaxima, RowMaxima
from qconvert.ops.rowwise import RowOp
from qconvert.passes.selection import Selection


def shared_groups(modules: Mapping[str, Kind]) -> tuple[tuple[str, ...], ...]:
    """Modules in groups that share a scale: those under one parent that runtimes compute as one."""
    found: dict[tuple[str, tuple[Kind, ...]], list[str]] = {}
    for module, kind in modules.items():
        joined = joined_with(kind)
        at = module.rpartition(".")[0] if len(joined) > 1 else module
        found.setdefault((at, joined), []).append(module)
    return tuple(map(tuple, found.values()))


def encoded_together(
    chosen: Selection,
    scale_op: Op,
    encoder: Callable[[RowOp | None], Op],
    decoder: Callable[[Stored], RowOp | None] = lambda stored: stored.decoder,
    but: Mapping[str, object] | None = None,
) -> Iterator[tuple[str, tuple[Output, ...], Output]]:
    """Each chosen matrix that is not in `but`: its module, what the encoder of its decoder makes of it
    and its group's scale, and that scale, which `scale_op` makes of row maxima. Raises PlanError naming
    a matrix that cannot be quantized."""
    matrices = {module: stored for module, _, stored in chosen}
    for group in shared_groups({m: kind for m, kind, _ in chosen if m not in (but or {})}):
        maxima: list[Output] = []
        for module in group:
            stored = matrices[module]
            read = decoder(stored)
            op = RowMaxima() if read is None else DecodedMaxima(read, (RowMaxima(),))
            maxima += _applied(module, op, *stored.args)
        (scale,) = _applied(", ".join(group), scale_op, *maxima)
        for module in group:
            stored = matrices[module]
            yield module, _applied(module, encoder(decoder(stored)), *stored.args, scale), scale


def _applied(what: str, op: Op, *args: Output) -> tuple[Output, ...]:
    try:
        return tuple(apply(op, *args))
    except PlanError as error:
        raise PlanError(f"{what}: {error}") from error
