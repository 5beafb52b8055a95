"""What several nodes of a step read: once where memory has room, else as often as they ask."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import read_tensors, run_cli, watched_reads
from models import qwen3_moe

from qconvert import api
from qconvert.checkpoint.checkpoint import Checkpoint, Shard
from qconvert.checkpoint.fsspec_store import FsspecStore
from qconvert.checkpoint.store import StoredObject
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RunError
from qconvert.core.graph import Source
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.plan.plan import Plan, run_passes
from qconvert.plan.units import REREAD_BYTES, Compute, Unit, reread
from qconvert.run.executor import run_prepared
from qconvert.run.folder.prepare import prepare
from qconvert.run.work import reader, unit_runner
from qconvert.run.work.forkserver import ended
from qconvert.run.work.memory import share_out
from qconvert.run.work.options import RunOptions
from qconvert.run.work.reader import Reader
from qconvert.run.work.sink import WINDOW_BYTES, WINDOWS


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    qwen3_moe().write(folder)
    return folder


def units_of(source: Path) -> list[Unit]:
    plan = run_passes(Plan.identity(Checkpoint.open(source)), [ToNvfp4("modelopt")])
    return list(prepare(plan, RunOptions()).units)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes read of each tensor."""
    found: Counter[str] = Counter()
    watched_reads(monkeypatch, found)
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
        monkeypatch.setattr(unit_runner, "kept_in", lambda *_: {})
    one, other = read_tensors(once), read_tensors(twice)
    assert {n: t.data for n, t in one.items()} == {n: t.data for n, t in other.items()}


@pytest.fixture
def file(tmp_path: Path) -> tuple[Shard, Source]:
    """A file of three pages and a bit, and the tensor that it is, from byte 64 on."""
    path = tmp_path / "file"
    path.write_bytes(bytes(n * n % 251 for n in range(13_000)))
    status = path.stat()
    shard = Shard(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return shard, Source("w", TensorType("U8", (12_936,)), 0, 64)


def test_mapped_bytes_are_those_that_are_read(file: tuple[Shard, Source]) -> None:
    """From any place that loops can read at; what is written to them stays here."""
    shard, weight = file
    data = shard.path.read_bytes()
    reader = Reader([shard], maps=True)
    for start, stop in ((0, 1), (0, 12_936), (8, 5000), (4032, 4033), (4096, 12_000)):
        mapped = reader.mapped(weight, start, stop)
        assert mapped is not None
        assert mapped == data[64 + start : 64 + stop]
        mapped[:1] = bytes([mapped[0] ^ 255])
        assert shard.path.read_bytes() == data
    assert reader.mapped(weight, 4, 5000) is None
    assert Reader([shard]).mapped(weight, 0, 8) is None, "not in the process of a command"
    reader.close()


def test_what_a_file_lacks_is_read_and_named(file: tuple[Shard, Source]) -> None:
    shard, weight = file
    reader = Reader([shard], maps=True)
    assert reader.mapped(weight, 0, 8) is not None
    os.truncate(shard.path, 5000)
    assert reader.mapped(weight, 0, 12_936) is None
    with pytest.raises(RunError, match="'w': the file ends at byte 5000"):
        reader.read(weight, 0, memoryview(bytearray(12_936)))
    reader.close()


def test_a_file_that_is_cut_while_it_is_mapped(file: tuple[Shard, Source]) -> None:
    """The page is gone when it is looked at: the kernel ends the process, and its end is explained."""
    shard, weight = file
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        mapped = Reader([shard], maps=True).mapped(weight, 0, 12_936)
        assert mapped is not None
        os.truncate(shard.path, 0)
        os._exit(mapped[-1] & 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGBUS
    said = str(ended(pid, code, ""))
    assert "was killed by signal 7 (a source file became shorter while it was read" in said
    assert said.endswith("run the same command again to go on")


def test_workers_make_the_same_bytes_of_mapped_weights(tmp_path: Path) -> None:
    """Headers end at a multiple of 8, as the library writes them, so that weights are mapped."""
    from safetensors.torch import load_file, save_file

    source = qwen3_moe().write(tmp_path / "source")
    for path in source.glob("*.safetensors"):
        save_file(load_file(path), path, metadata={"format": "pt"})
    assert any(one.offset % 8 == 0 for one in Checkpoint.open(source).values())
    made = []
    for jobs in ("1", "2"):
        out = tmp_path / f"out{jobs}"
        done = run_cli("nvfp4", source, out, "--dialect", "modelopt", "--jobs", jobs)
        assert done.code == 0, done.err
        made.append({n: t.data for n, t in read_tensors(out).items()})
    assert made[0] == made[1]


@pytest.mark.parametrize("enough", [True, False])
def test_objects_of_a_store_are_fetched_once_where_memory_has_room(
    enough: bool,
    source: Path,
    tmp_path: Path,
    counted: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of pieces so small that no matrix is held in them."""
    monkeypatch.setattr(reader, "PIECE_BYTES", 4096)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: Counter[str] = Counter()
    real = FsspecStore.read

    def read(self: FsspecStore, found: StoredObject, start: int, stop: int) -> bytes:
        asked[found.name] += stop - start
        return real(self, found, start, stop)

    (planned,) = api.plan(ToNvfp4("modelopt"), source.as_uri(), tmp_path / "far", jobs=1).folders
    assert planned.ready.plan.checkpoint.sample_digest, "the samples are read before"
    monkeypatch.setattr(FsspecStore, "read", read)
    least = share_out(planned.ready.units, len(planned.ready.units), None, 1, 1)
    ready = planned.ready
    if not enough:
        small = replace(ready.share, arena=max(unit.peak for unit in ready.units))
        ready = replace(ready, share=small)
    run_prepared(ready, tmp_path / "far")
    tensors = api.open_checkpoint(source).nbytes
    fetched = sum(size for name, size in asked.items() if name.endswith(".safetensors"))
    assert (fetched < 1.02 * tensors) if enough else (fetched > 1.5 * tensors)
    assert least.arena >= ready.share.arena
    api.run(ToNvfp4("modelopt"), source, tmp_path / "near", jobs=1)
    near, far = read_tensors(tmp_path / "near"), read_tensors(tmp_path / "far")
    assert {n: t.data for n, t in near.items()} == {n: t.data for n, t in far.items()}


def test_for_a_store_workers_are_given_up_first(source: Path) -> None:
    """One that keeps what it reads again is better than two that fetch it twice."""
    units = units_of(source)
    one = share_out(units, len(units), 1 << 40, 1, client=1)
    kept = share_out(units, len(units), 1 << 40, 1).arena
    two = share_out(units, len(units), 1 << 40, 2, client=1)
    assert one.arena == kept == two.arena
    less = share_out(units, len(units), two.total - 1, 2, client=1)
    assert (less.jobs, less.arena) == (1, kept)
    near = share_out(units, len(units), two.total - 3, 2)
    assert near.jobs == 2


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
