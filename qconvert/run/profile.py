"""Profile of a run: the report that --profile makes of a record."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from qconvert import __version__
from qconvert.core.profiling import (
    FOR_DISK,
    FOR_WORK,
    STEPS,
    WRITE,
    Record,
    Spent,
    Steps,
    add_steps,
    recorded,
    recording,
)
from qconvert.run.work.memory import free_bytes
from qconvert.run.work.meters import kinds_in

if TYPE_CHECKING:
    from qconvert.plan.units import Unit
    from qconvert.run.folder.target import Target

START, REST = "start", "rest"
# Workers are there, and have nothing to do, or do not run yet or any more.
AROUND = "not at work"
_PACKAGES = ("numpy", "numba", "torch")


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One step. `beside`: it went on in a thread of its own while others did, so that its seconds are
    in theirs."""

    step: str
    times: int
    seconds: float
    cpu_seconds: float
    bytes: int
    beside: bool = False


@dataclass(frozen=True)
class Profile:
    """Times of a conversion or a validation.

    `seconds` by the clock since the process began (or since profiling did, in a program); `cpu_seconds`
    of this process and of its workers. `main` are the phases of this process; they and its `rest` add up
    to `seconds`. `workers` are the steps of all `processes` that ran units, which were there for
    `worker_seconds` together: the steps that are not `beside` add up to these. An op's bytes are those
    of its arguments and results. `runs` says what was run: jobs, memory, units, bytes; `kernels` what
    ops ran in.
    """

    seconds: float
    cpu_seconds: float
    machine: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]
    main: Sequence[ProfileRow]
    workers: Sequence[ProfileRow]
    processes: int
    worker_seconds: float
    kernels: Sequence[str]

    def waited(self, step: str) -> float:
        """The share of the workers' time that a step took."""
        found = sum(row.seconds for row in self.workers if row.step == step)
        return found / self.worker_seconds if self.worker_seconds else 0.0

    @property
    def waited_for_work(self) -> float:
        return self.waited(FOR_WORK) + self.waited(AROUND)

    @property
    def waited_for_disk(self) -> float:
        return self.waited(FOR_DISK)

    def as_json(self) -> dict[str, Any]:
        """The report for programs, of names that stay."""
        return {
            "qconvert": __version__,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "machine": dict(self.machine),
            "runs": [dict(run) for run in self.runs],
            "main": [asdict(row) for row in self.main],
            "workers": {
                "processes": self.processes,
                "seconds": self.worker_seconds,
                "kernels": list(self.kernels),
                "waited_for_work": self.waited_for_work,
                "waited_for_disk": self.waited_for_disk,
                "steps": [asdict(row) for row in self.workers],
            },
        }


class Profiling:
    """A record with the time it was begun at. `whole_process`: what passed before counts, as `start`."""

    def __init__(self, record: Record, *, whole_process: bool) -> None:
        self._record = record
        self._before = _since_start() if whole_process else 0.0
        self._cpu_before = 0.0 if whole_process else process_time()
        self._start_cpu = process_time() if whole_process else 0.0
        self._children_before = _of_children()
        self._begin = perf_counter()
        self._main: Steps = {}

    def profile(self) -> Profile:
        """Return what was recorded so far."""
        record = self._record
        add_steps(self._main, record.main.take())
        seconds = perf_counter() - self._begin + self._before
        own_cpu = process_time() - self._cpu_before
        main = [] if not self._before else [_row(START, Spent(1, self._before, self._start_cpu))]
        main += [_row(name, spent) for name, spent in self._main.items()]
        known = Spent(0, sum(r.seconds for r in main), sum(r.cpu_seconds for r in main))
        main.append(_row(REST, _less(seconds, own_cpu, known)))
        # A worker in this process was counted with it. What others spent on imports, and the server that
        # forked them, is known when they have ended.
        told = record.cpu - record.own_cpu
        children = max(told, _of_children() - self._children_before)
        workers = _workers(record, children - told)
        return Profile(
            seconds, own_cpu + children, _machine(), list(record.runs), main, workers,
            len(record.processes), record.slots, sorted(record.computes),
        )  # fmt: skip

    @property
    def has_run(self) -> bool:
        """Return whether there is anything to report beside the start."""
        add_steps(self._main, self._record.main.take())
        return bool(self._main)


@contextmanager
def profiled(*, whole_process: bool = False) -> Iterator[Profiling]:
    """Within this, what is planned, run and validated is measured, in this process and its workers."""
    with recorded() as record:
        yield Profiling(record, whole_process=whole_process)


def note_run(targets: Sequence[Target], units: Sequence[tuple[int, Unit]]) -> None:
    """Return what is about to be run goes into the record, if there is one."""
    record = recording()
    if record is None:
        return
    ready = targets[0].ready
    share, shard = ready.share, ready.options.shard
    linked = {
        name
        for target in targets
        for name, (file, _) in target.ready.layout.places.items()
        if target.ready.layout.files[file].link is not None
    }
    todo = [unit for _, unit in units]
    for kind in kinds_in(todo):
        record.steps.setdefault(kind, Spent())
    not_written = sum(
        output.type.nbytes for unit in todo for name, output in unit.outputs if name in linked
    )
    record.runs.append(
        {
            "kind": "conversion",
            "tensors": sum(len(target.ready.plan.tensors) for target in targets),
            "units": len(ready.units),
            "units_run": len(todo),
            "bytes_to_read": sum(unit.read for unit in todo),
            "bytes_to_write": sum(unit.write for unit in todo) - not_written,
            "engine": ready.options.engine,
            "jobs": share.jobs,
            "memory": share.total,
            "arena": share.arena,
            "window": share.window,
            "kernels": "numba" if share.compiled else "numpy",
            "shard": None if shard is None else str(shard),
        }
    )


def _workers(record: Record, around: float) -> list[ProfileRow]:
    """Steps in a fixed order: reading, ops by name, what follows; then what nothing else names."""
    first, *others = STEPS
    ops = sorted(record.steps.keys() - set(STEPS) - {WRITE})
    rows = [_row(name, record.steps.get(name, Spent())) for name in (first, *ops, *others)]
    if WRITE in record.steps:
        rows.append(_row(WRITE, record.steps[WRITE]))
    known = Spent(0, sum(row.seconds for row in rows), sum(row.cpu_seconds for row in rows))
    if not record.processes:
        return rows
    beside = [_row(name, spent, beside=True) for name, spent in sorted(record.beside.items())]
    cpu = record.cpu - sum(row.cpu_seconds for row in beside)
    rows.append(_row(REST, _less(record.seconds, cpu, known)))
    rows.append(_row(AROUND, Spent(0, max(0.0, record.slots - record.seconds), around)))
    return [*rows, *beside]


def _less(seconds: float, cpu: float, known: Spent) -> Spent:
    """Return what is left; clocks of threads and of the process are not read at one instant."""
    return Spent(0, max(0.0, seconds - known.seconds), max(0.0, cpu - known.cpu))


def _row(name: str, spent: Spent, *, beside: bool = False) -> ProfileRow:
    return ProfileRow(name, spent.times, spent.seconds, spent.cpu, spent.nbytes, beside)


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_free": free_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_children() -> float:
    """CPU seconds of child processes that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def _cpu_model() -> str:
    """The processor's name, empty where the kernel tells none (arm64 does not)."""
    if sys.platform != "linux":
        return ""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, "")


def _since_start() -> float:
    """Seconds since this process was started, by the kernel's figure (hundredths of a second): its
    imports are in it. 0 where it tells none."""
    if sys.platform != "linux":
        return 0.0
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    from time import CLOCK_BOOTTIME, clock_gettime

    ticks = int(fields[19])  # the 22nd field, starttime, proc(5)
    return max(0.0, clock_gettime(CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
