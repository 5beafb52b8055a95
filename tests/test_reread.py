"""What several nodes of a step read: once where memory has room, else as often as they ask."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from checkpoints import read_tensors, run_cli
from models import qwen3_moe

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.plan.plan import Plan, run_passes
from qconvert.plan.units import REREAD_BYTES, Compute, Unit, reread
from qconvert.run import unit_runner
from qconvert.run.memory import share_out
from qconvert.run.prepare import Options, prepare
from qconvert.run.reader import Reader
from qconvert.run.sink import WINDOW_BYTES, WINDOWS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    qwen3_moe().write(folder)
    return folder


def units_of(source: Path) -> list[Unit]:
    plan = run_passes(Plan.identity(Checkpoint.open(source)), [ToNvfp4("modelopt")])
    return list(prepare(plan, Options()).units)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read of each tensor."""
    found: Counter[str] = Counter()
    real = Reader.read

    def read(self: Reader, source: Source, start: int, into: memoryview) -> None:
        found[source.name] += into.nbytes
        real(self, source, start, into)

    monkeypatch.setattr(Reader, "read", read)
    return found


def test_each_weight_is_read_once_and_the_bytes_are_the_same(
    source: Path, tmp_path: Path, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: len(tensor.data) for name, tensor in read_tensors(source).items()}
    once, twice = tmp_path / "once", tmp_path / "twice"
    for out in (once, twice):
        counted.clear()
        done = run_cli("nvfp4", source, out, "--dialect", "modelopt", "--jobs", "1")
        assert done.code == 0, done.err
        experts = [name for name in counted if ".experts." in name]
        assert experts
        assert {counted[name] // sizes[name] for name in experts} == {1 if out is once else 2}
        monkeypatch.setattr(unit_runner, "reread", lambda _step: {})
    one, other = read_tensors(once), read_tensors(twice)
    assert {n: t.data for n, t in one.items()} == {n: t.data for n, t in other.items()}


def test_objects_of_a_store_are_read_as_often_as_they_were_asked_for(
    source: Path, tmp_path: Path, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reader.__init__

    def far(self: Reader, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self.far = True
        monkeypatch.setattr(self, "expect", lambda _units: None)

    monkeypatch.setattr(Reader, "__init__", far)
    done = run_cli("nvfp4", source, tmp_path / "out", "--dialect", "modelopt", "--jobs", "1")
    assert done.code == 0, done.err
    sizes = {name: len(tensor.data) for name, tensor in read_tensors(source).items()}
    experts = [name for name in counted if ".experts." in name]
    assert {counted[name] // sizes[name] for name in experts} == {2}


def test_memory_for_it_is_taken_only_beside_all_else(source: Path) -> None:
    units = units_of(source)
    kept = [reread(step) for unit in units for step in unit.steps if isinstance(step, Compute)]
    most = max(sum(each.values()) for each in kept)
    assert 0 < most <= REREAD_BYTES
    rich = share_out(units, len(units), 1 << 30, 1)
    # All that is there but what is kept: windows are full, and nothing is left.
    poor = share_out(units, len(units), rich.total - most, 1)
    assert (poor.jobs, poor.window) == (rich.jobs, WINDOW_BYTES)
    assert rich.arena - poor.arena >= most
    assert rich.total >= rich.arena + WINDOWS * WINDOW_BYTES
