"""Which worker gets what."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Output
from qconvert.plan.units import Unit
from qconvert.run.engines.local import BATCH_UNITS, BatchQueue, cut_batches, imports_ahead
from qconvert.run.work.unit_runner import Place
from qconvert.run.work.worker import Batch, WorkerSetup


def _unit(name: str, size: int) -> Unit:
    output = Output(TensorType("U8", (size,)), ())
    return Unit((name,), (output,), (), read=size, write=size, peak=0)


def _cut(files: Sequence[int], sizes: Sequence[int], most: int) -> list[Batch]:
    units = [(n, _unit(str(n), size)) for n, size in enumerate(sizes)]
    places = {str(n): Place(file, 0) for n, file in enumerate(files)}
    return list(cut_batches(units, places, most))


def test_batches_are_full_or_long_or_end_with_their_file() -> None:
    batches = _cut([0, 0, 0, 0, 1, 1], [40, 60, 10, 20, 500, 1], most=100)
    found = [(batch.file, [number for number, _ in batch.units]) for batch in batches]
    assert found == [(0, [0, 1]), (0, [2, 3]), (1, [4]), (1, [5])]
    assert [sorted(batch.places) for batch in batches] == [["0", "1"], ["2", "3"], ["4"], ["5"]]
    count = BATCH_UNITS + 3
    batches = _cut([0] * count, [0] * count, most=1 << 30)
    assert [len(batch.units) for batch in batches] == [BATCH_UNITS, 3]


def test_workers_keep_to_files_of_their_own() -> None:
    backlog = BatchQueue(_cut([0, 0, 0, 1, 1, 2], [1] * 6, most=1))
    assert len(backlog) == 6

    def given_to(current: int | None) -> tuple[int, int]:
        batch = backlog.next(current)
        assert batch is not None
        return batch.file, batch.units[0][0]

    assert [given_to(None) for _ in range(3)] == [(0, 0), (1, 3), (2, 5)]
    assert given_to(1) == (1, 4)
    assert given_to(0) == (0, 1)
    assert given_to(2) == (0, 2)  # file 2 is done: the worker helps where there is work left
    assert backlog.next(0) is None
    assert len(backlog) == 0


@given(
    files=st.lists(st.integers(0, 3), max_size=30),
    most=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_every_unit_is_given_once(files: list[int], most: int, seed: int) -> None:
    backlog = BatchQueue(_cut(sorted(files), [1] * len(files), most))
    at: dict[int, int | None] = {}
    seen: list[int] = []
    for worker in random.Random(seed).choices(range(5), k=200):
        batch = backlog.next(at.get(worker))
        if batch is not None:
            at[worker] = batch.file
            seen += [number for number, _ in batch.units]
    assert sorted(seen) == list(range(len(files)))


def test_loops_that_this_process_compiled_before_are_not_imported_for_every_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With numba they took each worker of a small conversion, through the API, 1 s."""
    loops = "qconvert.ops.compiled.loops.fp8"
    for name in (loops, "qconvert.formats.fp8.decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    found = imports_ahead(WorkerSetup((), (), 1, 1))
    assert "qconvert.formats.fp8.decode" in found
    assert loops not in found
