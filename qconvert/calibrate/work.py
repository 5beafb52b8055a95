"""Cost of the layers of a calibration, by kind, from shapes alone: what a progress bar goes by.

Operations are multiplications with an addition. They need not be exact: when a layer ends, what was told
of it is made what was planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qconvert.calibrate.settings import Settings
from qconvert.plan.plan import Plan
from qconvert.run.estimate import FORWARD, HESSIAN, READ, SOLVE

Work = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer: parameters beside its routed experts (`own`); experts, and those that a token is
    routed to; their matrices' sides. `linears` are rows and columns of what is solved beside them."""

    own: float
    experts: int
    routed: int
    hidden: int
    middle: int
    linears: tuple[tuple[int, int], ...] = ()


def matrix_cost(rows: int, columns: int) -> float:
    """Solving a matrix for one target: every column changes all after it."""
    return float(rows) * columns * columns


def look_cost(hidden: int, middle: int, *, into: bool, down: bool, paired: bool) -> float:
    """Of one token of an expert: what goes through gate and up, and sums of outer products."""
    through = 2.0 * hidden * middle if down else 0.0
    sums = (hidden * hidden if into else 0.0) + (middle * middle if down else 0.0)
    return (2 if paired else 1) * (through + sums)


def layer_work(sizes: Sizes, tokens: int, targets: int, settings: Settings) -> Work:
    """Return what a layer takes, over all tokens."""
    corrects = settings.corrects and bool(sizes.experts) and not sizes.linears
    streams = 2 if corrects else 1
    hidden, middle, routed = sizes.hidden, sizes.middle, sizes.routed
    expert = 3.0 * hidden * middle
    passes = 2 if sizes.experts else 1
    forward = streams * (passes * sizes.own + routed * expert) * tokens
    hessian = solve = 0.0
    if sizes.experts and targets:
        each = look_cost(hidden, middle, into=True, down=True, paired=corrects)
        seen = sizes.experts if settings.experts == "all" else routed
        hessian = seen * each * tokens
        costs = matrix_cost(2 * middle, hidden) + matrix_cost(hidden, middle)
        solve = sizes.experts * targets * costs
    if sizes.linears:
        hessian += (sizes.own + sum(c * c for _, c in sizes.linears)) * tokens
        solve += targets * sum(matrix_cost(*shape) for shape in sizes.linears)
    read = 2.0 * (sizes.own + sizes.experts * expert)
    return {READ: read, FORWARD: forward, HESSIAN: hessian, SOLVE: solve}


def sizes_of(source: Plan, linears: Mapping[int, tuple[tuple[int, int], ...]]) -> list[Sizes]:
    """Every layer's, from names and shapes of the source; draft (MTP) layers are not run."""
    index, config = source.role_index, source.config
    dims = index.dims
    expert = 3.0 * dims.hidden_size * dims.moe_intermediate_size
    held: dict[int, float] = {}
    for name, place in index.places.items():
        if place.layer is not None and name in source.tensors:
            held[place.layer] = held.get(place.layer, 0.0) + source.tensors[name].type.numel
    sparse = frozenset(dims.groups.get("moe", ()))
    routed = _routed(config, dims.num_experts)
    found = []
    for layer in range(dims.num_layers):
        experts = dims.num_experts if layer in sparse else 0
        # Packed weights have fewer elements than parameters.
        own = max(held.get(layer, 0.0) - experts * expert, 4.0 * dims.hidden_size**2)
        found.append(
            Sizes(
                own, experts, routed, dims.hidden_size, dims.moe_intermediate_size,
                linears.get(layer, ()),
            )
        )  # fmt: skip
    return found


def _routed(config: Mapping[str, object], experts: int) -> int:
    """Experts that a token is routed to, as configs name it; 8 where none does."""
    inner = config.get("text_config")
    for one in (config, inner if isinstance(inner, Mapping) else {}):
        for name in ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"):
            found = one.get(name)
            if type(found) is int and found > 0:
                return min(found, max(1, experts))
    return min(8, max(1, experts))


def added(works: list[Work]) -> dict[str, float]:
    """Work of several layers."""
    total: dict[str, float] = {}
    for work in works:
        for kind, amount in work.items():
            total[kind] = total.get(kind, 0.0) + amount
    return total


def has_begun(work_dir: Path) -> bool:
    """Return whether an earlier run left hidden states to go on from."""
    return (work_dir / "state.json").is_file()
