"""Memory: how much there is, how much a run may take, and how it is shared out.

`--memory` bounds the anonymous memory of all processes of a run, interpreters included. File pages
in the kernel's cache are not counted: they are given back on demand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from qconvert.compiled.choice import LOOP_BYTES
from qconvert.compiled.choice import wanted as loops_wanted
from qconvert.core.errors import PlanError
from qconvert.core.graph import Apply, aligned
from qconvert.core.shown import exact_size, format_size
from qconvert.ops.rowwise import encoded, search_loops
from qconvert.plan.units import (
    FAR_REREAD_BYTES,
    PART_BYTES,
    REREAD_BYTES,
    Compute,
    Step,
    Unit,
    compute_bytes,
    gathered_bytes,
    reread,
)
from qconvert.run.work.sink import BLOCK, MIN_WINDOW_BYTES, WINDOW_BYTES, WINDOWS

# Without --memory; more where the plan and a worker for each core need it.
DEFAULT_BYTES = 1 << 30
# What the plan, the units and the receipts of one tensor cost the main process: see
# tests/test_memory.py, which measures it (1.6 KB when planned, 3.6 KB when published).
PLAN_BYTES_PER_TENSOR = 4096
# A process beyond arena and windows: interpreter and numpy (17 MB), pickled units, records.
PROCESS_BYTES = 24 << 20
# The same where Ray is imported, with its threads and buffers: 62 MB in a worker, 78 in the process that
# leads (tests/test_engine_ray.py).
RAY_PROCESS_BYTES = 88 << 20
# What the process that leads takes besides, where it sends files while workers, one at least, make
# others: the Hub's client and three files on their way (72 MiB with the interpreter, measured), and an
# interpreter more where there is one worker.
SEND_BYTES = 128 << 20
# What linked files are read through, to be hashed.
_LEAST_ARENA = 1 << 20
# numpy searches for scales at 0.005 to 0.015 GB/s of a core, for AMX's at 0.06, and runs other ops at
# about 1. (A larger weight would have loops compiled, for seconds, where numpy takes one.)
_SEARCH_WEIGHT, _AMX_SEARCH_WEIGHT = 50, 17
# Below this much output a process's start costs more than it saves.
BYTES_PER_JOB = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """The decision: how many workers, and what each of them gets, in bytes: an arena to compute in
    and the windows its results wait in for the disk. `compiled`: they compute in compiled loops.
    On a cluster `jobs` is 0 where as many are taken as there is room for, `total` is this process's, and
    `worker` what each worker takes."""

    jobs: int
    arena: int
    window: int
    total: int
    compiled: bool = False
    worker: int = 0


def free_bytes() -> int:
    """Memory that could be taken now: the machine's, or the cgroup's where that is less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, int(limit) - used) if limit.isdecimal() else available


def share_out(
    units: Sequence[Unit],
    tensors: int,
    memory: int | None,
    jobs: int | None,
    client: int = 0,
    sender: int = 0,
) -> MemoryShare:
    """Workers and arena for a budget in bytes, or for what is fit where none is given. `tensors`
    counts those read or those written, whichever are more; `client` is what each process takes to
    read from a store, `sender` what this one takes to send files while others are made. Raises PlanError
    naming the tensor that cannot fit and the smallest --memory that is enough.

    Workers are given up before arenas shrink below what keeps an op's parts large: fewer, fuller
    workers are never slower than many starved ones.
    """
    plan = tensors * PLAN_BYTES_PER_TENSOR + sender
    process = PROCESS_BYTES + client
    worst = max(units, key=attrgetter("peak"))
    comfortable = max(worst.peak, _LEAST_ARENA, _comfort(units))
    kept = _kept(units, FAR_REREAD_BYTES if client else REREAD_BYTES)
    # Of a store, reading again costs more than fewer workers do.
    least = comfortable + (kept if client else 0)
    need = plan + process + worst.peak + WINDOWS * MIN_WINDOW_BYTES
    output = sum([unit.write for unit in units])
    wanted = jobs or max(1, min(len(os.sched_getaffinity(0)), output // BYTES_PER_JOB))
    wanted = max(1, min(wanted, len(units)))
    given = None if memory is None else exact_size(memory)
    if memory is None:
        each = process + comfortable + kept + WINDOWS * WINDOW_BYTES
        full = plan + process + wanted * (each + LOOP_BYTES)
        memory = min(max(DEFAULT_BYTES, full), free_bytes() // 2)
    if need > memory:
        raise PlanError(
            f"tensor {worst.names[0]!r} needs {_mib(worst.peak)} of buffers at once, the plan "
            f"{_mib(plan)} and a worker {_mib(need - plan - worst.peak)}; give --memory {_mib(need)} or "
            "more "
            + (f"(given: {given})" if given else f"(half of what is free: {format_size(memory)})")
        )
    for count in range(wanted, 0, -1):
        processes = process * (count + 1 if count > 1 else 1)
        each = (memory - plan - processes) // count
        if each >= least + WINDOWS * WINDOW_BYTES or count == 1:
            arena = min(each - WINDOWS * MIN_WINDOW_BYTES, comfortable)
            if each >= comfortable + kept + WINDOWS * WINDOW_BYTES:
                arena += kept
            window = min((each - arena) // WINDOWS // BLOCK * BLOCK, WINDOW_BYTES)
            total = plan + processes + count * (arena + WINDOWS * window)
            compiled = loops_wanted(_computed(units)) and total + count * LOOP_BYTES <= memory
            if compiled:
                total += count * LOOP_BYTES
            return MemoryShare(count, arena, window, total, compiled)
    raise AssertionError("one worker always fits: checked above")


def share_on_cluster(
    units: Sequence[Unit], tensors: int, memory: int | None, jobs: int | None, client: int = 0
) -> MemoryShare:
    """Return what a worker on a node of a cluster gets, and this process takes. `memory` is what every
    machine gives, in bytes: how many workers fit there is known when the run begins; `client` is as for
    `share_out`. Raises PlanError naming the tensor for which not even one does."""
    process = RAY_PROCESS_BYTES + client
    leader = tensors * PLAN_BYTES_PER_TENSOR + process
    worst = max(units, key=lambda unit: unit.peak)
    least = process + worst.peak + WINDOWS * MIN_WINDOW_BYTES
    if memory is not None and leader + least > memory:
        raise PlanError(
            f"tensor {worst.names[0]!r} needs {_mib(worst.peak)} of buffers at once, a worker with "
            f"Ray {_mib(least)} and the machine that leads {_mib(leader)}; give --memory "
            f"{_mib(leader + least)} or more, which each machine gives (given: {exact_size(memory)})"
        )
    comfortable = max(worst.peak, _LEAST_ARENA, _comfort(units))
    full = process + comfortable + WINDOWS * WINDOW_BYTES
    worker = full if memory is None else min(full, memory - leader)
    arena = min(worker - process - WINDOWS * MIN_WINDOW_BYTES, comfortable)
    window = min((worker - process - arena) // WINDOWS // BLOCK * BLOCK, WINDOW_BYTES)
    compiled = loops_wanted(_computed(units) // (jobs or 1))
    if compiled and (memory is None or leader + worker + LOOP_BYTES <= memory):
        return MemoryShare(jobs or 0, arena, window, leader, True, worker + LOOP_BYTES)
    return MemoryShare(jobs or 0, arena, window, leader, False, worker)


def _computed(units: Sequence[Unit]) -> int:
    """Bytes that are read or written of units that are not all copies, whichever are more, with a search
    for scales as what else takes as long in numpy."""
    moved = sum(
        [
            unit.read if unit.read > unit.write else unit.write
            for unit in units
            if unit.node is not None or any(map(_computes, unit.cut))
        ]
    )
    return moved + sum(
        size * (_AMX_SEARCH_WEIGHT if loop == "amx_search" else _SEARCH_WEIGHT)
        for loop, size in searched(units).items()
    )


def searched(units: Sequence[Unit]) -> dict[str, int]:
    """The loops that search for scales, and the bytes of BF16 weights that each is given."""
    found: dict[str, int] = {}
    for node, times in _kinds(units):
        for loop in search_loops(node.op):
            matrix = encoded(node.op, [arg.type for arg in node.args])
            found[loop] = found.get(loop, 0) + times * 2 * matrix.numel
    return found


def _kinds(units: Sequence[Unit]) -> Iterator[tuple[Apply, int]]:
    """A node of each kind, and how many there are of it in these units; those of units of several nodes
    one by one."""
    alone = [unit.node for unit in units if unit.node is not None]
    for unit in units if len(alone) < len(units) else ():
        for step in unit.cut:
            for node in step.nodes if isinstance(step, Compute) else ():
                yield node, 1
    # Not by their index in a list: each calibrated node is a kind of its own.
    one = {id(node.types): node for node in alone}
    for kind, count in Counter([id(node.types) for node in alone]).items():
        yield one[kind], count


def _computes(step: Step) -> bool:
    return isinstance(step, Compute)


def _comfort(units: Sequence[Unit]) -> int:
    """The most memory that a step of these units can use well. Steps of one node are asked about once
    for each kind of node."""
    seen: set[int] = set()
    most = 0
    for unit in units:
        if unit.node is not None and id(unit.node.types) in seen:
            continue
        for step in unit.steps:
            if not isinstance(step, Compute):
                continue
            if len(step.nodes) == 1:
                if id(step.nodes[0].types) in seen:
                    continue
                seen.add(id(step.nodes[0].types))
            most = max(most, compute_bytes(step, PART_BYTES) + gathered_bytes(step))
    return most


def _kept(units: Sequence[Unit], most: int) -> int:
    """Memory in which a worker keeps what a step of these units reads more than once, if it is no more
    than `most`."""
    steps = (step for unit in units if unit.node is None for step in unit.cut)
    found = (reread(step, most) for step in steps if isinstance(step, Compute))
    return max((sum(map(aligned, each.values())) for each in found), default=0)


def _mib(size: int) -> str:
    return f"{-(-size // (1 << 20))}MiB"
