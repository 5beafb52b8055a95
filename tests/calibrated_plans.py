"""Plans with calibrated weights, and a backend that needs no model: its codes are made up, and always
the same for the same matrix."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes
from qconvert.models.calibrated import Calibrated
from qconvert.passes.amx import ExpertsToAmx
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.work.backend import BackendJob, Barrier, Item, Remark, Requirements, SolvedUnit
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
    """A backend. `made` lists the matrices it solved, `checked` what it was
    asked about before; it stops with an error before number `stop`."""

    hidden: int
    intermediate: int
    stop: int | None = None
    memory: int = 0
    made: list[tuple[int, int | None, str]] = field(default_factory=list)
    checked: list[tuple[Path, ...]] = field(default_factory=list)

    follows = False

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def needs(self) -> Requirements:
        return Requirements(self.memory, disk=0)

    def check(self, folders: Sequence[Path]) -> None:
        self.checked.append(tuple(folders))

    def unused(self) -> Sequence[str]:
        return ["nothing made"]

    def work(self, job: BackendJob) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return {"solve": float(len(job.units))}, {}

    def get_ready(self, job: BackendJob) -> None:
        pass

    def solve(self, job: BackendJob) -> Generator[Item]:
        layer = None
        for unit in sorted(job.units, key=lambda u: (u.op.layer, u.op.expert, u.op.kind)):
            if layer is not None and unit.op.layer != layer:
                yield Barrier()
            layer = unit.op.layer
            if len(self.made) == self.stop:
                raise KeyboardInterrupt
            rows, columns = shape_of(unit.op, self.hidden, self.intermediate)
            buffers: list[Buffer] = []
            for packer in unit.op.packers:
                kinds = packer.infer(TensorType("BF16", (rows, columns)))
                outs = [Buffer(kind, memoryview(bytearray(kind.nbytes))) for kind in kinds]
                packer.pack(made_up(unit.op, rows, columns), outs)
                buffers += outs
            read = {"name": "x", "start": 0, "stop": 1, "xxh3": "0" * 32}
            yield SolvedUnit(unit.number, buffers, [read])
            self.made.append((unit.op.layer, unit.op.expert, unit.op.kind))
        yield Remark("made up")
