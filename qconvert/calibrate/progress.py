"""Clock of a calibration: where its time goes, how much of its work is done, what each layer costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qconvert.calibrate.settings import Settings
from qconvert.core.profiling import phase
from qconvert.plan.plan import Plan
from qconvert.run.work.estimate import FORWARD, HESSIAN, READ, SOLVE

# Cost of the layers of a calibration, by kind, from shapes alone: what a progress bar goes by.
# Operations are multiplications with an addition. They need not be exact: when a layer ends, what was
# told of it is made what was planned.


Work = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LayerSizes:
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


def accumulation_cost(hidden: int, middle: int, *, into: bool, down: bool, paired: bool) -> float:
    """Of one token of an expert: what goes through gate and up, and sums of outer products."""
    through = 2.0 * hidden * middle if down else 0.0
    sums = (hidden * hidden if into else 0.0) + (middle * middle if down else 0.0)
    return (2 if paired else 1) * (through + sums)


def layer_work(sizes: LayerSizes, tokens: int, targets: int, settings: Settings) -> Work:
    """Return what a layer takes, over all tokens."""
    corrects = settings.corrects and bool(sizes.experts) and not sizes.linears
    streams = 2 if corrects else 1
    hidden, middle, routed = sizes.hidden, sizes.middle, sizes.routed
    expert = 3.0 * hidden * middle
    passes = 2 if sizes.experts else 1
    forward = streams * (passes * sizes.own + routed * expert) * tokens
    hessian = solve = 0.0
    if sizes.experts and targets:
        each = accumulation_cost(hidden, middle, into=True, down=True, paired=corrects)
        seen = sizes.experts if settings.experts == "all" else routed
        hessian = seen * each * tokens
        costs = matrix_cost(2 * middle, hidden) + matrix_cost(hidden, middle)
        solve = sizes.experts * targets * costs
    if sizes.linears:
        hessian += (sizes.own + sum(c * c for _, c in sizes.linears)) * tokens
        solve += targets * sum(matrix_cost(*shape) for shape in sizes.linears)
    read = 2.0 * (sizes.own + sizes.experts * expert)
    return {READ: read, FORWARD: forward, HESSIAN: hessian, SOLVE: solve}


def sizes_of(source: Plan, linears: Mapping[int, tuple[tuple[int, int], ...]]) -> list[LayerSizes]:
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
            LayerSizes(
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


# Called with a kind of work, how much of it was done, and the seconds it took.
OnWork = Callable[[str, float, float], None]


class Clock:
    """Adds up seconds by what they were spent on, and work. Accelerators are waited for at both ends.
    `on_work` hears of each piece."""

    def __init__(
        self, on_work: OnWork | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.work: defaultdict[str, float] = defaultdict(float)
        self._tell, self._now = on_work, now

    @contextmanager
    def __call__(self, what: str, device: str) -> Iterator[Callable[[float], None]]:
        """Around what is done; what it gives is called with the amount of each piece."""
        _wait(device)
        start = self._now()

        def tick(amount: float) -> None:
            nonlocal start
            at = self._now()
            self.worked(what, amount, at - start)
            start = at

        try:
            with phase(f"calibrate: {what}"):
                yield tick
        finally:
            _wait(device)
            tick(0.0)

    @contextmanager
    def part(self, what: str, of: str) -> Iterator[None]:
        """Around something within another kind of work, whose seconds are then less by these. `told`
        does not hear of it: it belongs to the other's speed."""
        start = self._now()
        try:
            with phase(f"calibrate: {what}"):
                yield
        finally:
            seconds = self._now() - start
            self.seconds[what] += seconds
            self.seconds[of] -= seconds

    def worked(self, what: str, amount: float, seconds: float) -> None:
        """Another process has done work, and took so long."""
        self.seconds[what] += seconds
        self.work[what] += amount
        if self._tell is not None:
            self._tell(what, amount, seconds)

    def layer_done(self, planned: Mapping[str, float], before: Mapping[str, float]) -> None:
        """A layer has ended: what was told of it since `before` is made what was planned."""
        for what, amount in planned.items():
            self.worked(what, amount - (self.work[what] - before.get(what, 0.0)), 0.0)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
