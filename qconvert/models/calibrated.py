"""Weights whose codes are found by calibration: what they will look like, before anything is computed.

How a layer's codes come out depends on what goes through the model up to it, so no op can make one
matrix by itself. In a plan such a matrix is a `Calibrated` node all the same: it has arguments, which
are accounted for, and results of known types, which have their places in files. The executor leaves
units with one to a backend (`qconvert/calibrate/`), a layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RunError
from qconvert.core.graph import Apply, Buffer
from qconvert.core.int_scheme import CodePacker
from qconvert.formats.fp8.kv_scales import MAXIMA, KvScales
from qconvert.ops.base import Uncut
from qconvert.ops.rowwise import RowOp, lost_at
from qconvert.plan.units import Compute, Unit


@dataclass(frozen=True, slots=True)
class Calibrated(Uncut):
    """A matrix in any stored form -> the results of each packer in turn, from calibrated codes.

    `layer`, `expert` and `kind` (gate_proj, up_proj, down_proj) say which matrix it is; `expert` is None
    for a linear layer beside the routed experts, whose `kind` is its module in the checkpoint. `request`
    is a digest of the calibration's data and settings, so that another calibration is another plan.
    With `KvScales` the results are scales of a layer's KV cache, there are no arguments, and `kind` is
    the module of attention. Raises PlanError as the decoder and the packers do.
    """

    decoder: RowOp | None
    packers: tuple[CodePacker, ...]
    layer: int
    expert: int | None
    kind: str
    request: str

    @property
    def what(self) -> str:
        """The matrix, for messages."""
        if self.expert is None:
            return self.kind
        return f"layer {self.layer}: {self.kind} of expert {self.expert}"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if self.of_cache:
            return self.packers[0].infer(MAXIMA)
        decoded = args[0] if self.decoder is None else self.decoder.infer(*args)[0]
        return tuple(kind for packer in self.packers for kind in packer.infer(decoded))

    @property
    def of_cache(self) -> bool:
        """Return whether it gives scales of a KV cache."""
        return self.packers == (KvScales(),)

    @property
    def several(self) -> bool:
        return len(self.packers) > 1

    def loss(self, *args: TensorType) -> str | None:
        return self.loss_of(frozenset(range(len(self.infer(*args)))), *args)

    def loss_of(self, ports: Set[int], *args: TensorType) -> str | None:
        return (
            lost_at(ports, self.decoder, self.packers, args, ", calibrated") if args else None
        )  # of a cache

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        raise RunError(
            f"{self.what} needs its layer's calibration; give the run a backend "
            "(qconvert.calibrate.backend.backend_for)"
        )


def calibrated_op(node: Apply) -> Calibrated | None:
    """The node's op where it is one of these."""
    return node.op if isinstance(node.op, Calibrated) else None


def calibrated_in(unit: Unit) -> Calibrated | None:
    """The op of a unit that is a backend's to compute, None for a worker's unit."""
    if unit.node is not None:
        return calibrated_op(unit.node)
    for step in unit.cut:
        if isinstance(step, Compute):
            for node in step.nodes:
                if (op := calibrated_op(node)) is not None:
                    return op
    return None
