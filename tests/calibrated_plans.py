"""Plans with calibrated weights, and a maker that needs no model: its codes are made up, and always the
same for the same matrix."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes
from qconvert.matrices.calibrated import Calibrated
from qconvert.passes.amx import ExpertsToAmx
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.files import Files
from qconvert.run.outside import Desk, Wanted
from qconvert.samples.request import Calibration

SYNTHETIC = Calibration(synthetic=True, samples=2, length=8)


def amx_plan(source: Path, request: Calibration = SYNTHETIC, numa: int = 1) -> Plan:
    """Experts as AMXINT4, to be calibrated."""
    step = ExpertsToAmx("int4", numa, calibrate=request)
    return run_passes(Plan.identity(Checkpoint.open(source)), (step,))


def made_up(op: Calibrated, rows: int, columns: int) -> Codes:
    """Codes and steps from the matrix's place alone."""
    seed = zlib.crc32(f"{op.layer} {op.expert} {op.kind}".encode())
    random = np.random.default_rng(seed)
    packer = op.packers[0]
    groups = packer.scheme_of(columns).groups(columns)
    return Codes(
        random.integers(-7, 8, (rows, columns)).astype(np.int8),
        random.random((rows, groups)).astype(np.float32),
    )


def shape_of(op: Calibrated, hidden: int, intermediate: int) -> tuple[int, int]:
    return (hidden, intermediate) if op.kind == "down_proj" else (intermediate, hidden)


@dataclass
class MadeUp:
    """A maker. `made` lists the matrices it handed in, `checked` what it was
    asked about before; it stops with an error before number `stop`."""

    hidden: int
    intermediate: int
    stop: int | None = None
    made: list[tuple[int, int, str]] = field(default_factory=list)
    checked: list[tuple[Path, ...]] = field(default_factory=list)

    def disk_bytes(self) -> int:
        return 0

    def check(self, folders: Sequence[Path]) -> None:
        self.checked.append(tuple(folders))

    def idle(self) -> Sequence[str]:
        return ["nothing made"]

    def make(
        self,
        wanted: Sequence[Wanted],
        desk: Desk,
        *,
        room: Path,
        key: str,
        files: Files,
        say: Callable[[str], None],
    ) -> Sequence[str]:
        layer = None
        for item in sorted(wanted, key=lambda w: (w.op.layer, w.op.expert, w.op.kind)):
            if layer is not None and item.op.layer != layer:
                desk.commit()
            layer = item.op.layer
            if len(self.made) == self.stop:
                raise KeyboardInterrupt
            rows, columns = shape_of(item.op, self.hidden, self.intermediate)
            buffers: list[Buffer] = []
            for packer in item.op.packers:
                kinds = packer.infer(TensorType("BF16", (rows, columns)))
                outs = [Buffer(kind, memoryview(bytearray(kind.nbytes))) for kind in kinds]
                packer.pack(made_up(item.op, rows, columns), outs)
                buffers += outs
            read = {"name": "x", "start": 0, "stop": 1, "xxh3": "0" * 32}
            desk.put(item.number, buffers, [read])
            self.made.append((item.op.layer, item.op.expert, item.op.kind))
        return ["made up"]
