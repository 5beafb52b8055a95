"""Validators' work on data: the same results from one process or several, in the order of the layers,
within a budget."""

from __future__ import annotations

import os
import signal
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from checkpoints import Tensor, watched_reads, write_json, write_shard
from hypothesis import given
from hypothesis import strategies as st
from stub_tasks import Count

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import RunError
from qconvert.validation.findings import Finding
from qconvert.validation.workers import CHUNK, Folders, Numbered, Result, Watch, run_tasks

LAYERS = 12


@dataclass(frozen=True, kw_only=True)
class See(Watch):
    """Says which bytes it was shown, one after another, and in which stretches."""

    scratch: ClassVar[int] = 0

    def look(self) -> Seen:
        return Seen(self)


class Seen:
    def __init__(self, task: See) -> None:
        self.task, self.data, self.places = task, b"", list[int]()

    def take(self, at: int, data: memoryview) -> None:
        assert data.readonly
        self.data += bytes(data)
        self.places.append(at)

    def end(self, folders: Folders) -> Iterator[Result]:
        yield Finding("QC001", "warning", self.task.where, f"{self.places} {self.data.hex()}")


@dataclass(frozen=True, slots=True)
class ReadAt(Count):
    """Reads some stretches of a tensor, in this order."""

    stretches: tuple[tuple[int, int], ...] = ()

    def run(self, folders: Folders) -> Iterator[Result]:
        for start, stop in self.stretches:
            folders.output.read(self.tensor, start, memoryview(bytearray(stop - start)))
        yield from ()


@dataclass(frozen=True, slots=True)
class Die(Count):
    """Ends its process, as the kernel does when memory runs out."""

    def run(self, folders: Folders) -> Iterator[Result]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()


@pytest.fixture
def folder(tmp_path: Path) -> Checkpoint:
    tensors = {"lm_head.weight": Tensor("U8", (3,), b"\1\2\3")}
    for layer in reversed(range(LAYERS)):
        data = struct.pack("<2H", layer, 300)
        tensors[f"model.layers.{layer}.a"] = Tensor("U8", (4,), data)
        tensors[f"blk.{layer}.b"] = Tensor("U8", (2,), data[:2])
    write_shard(tmp_path / "model.safetensors", tensors)
    write_json(tmp_path / "config.json", {"model_type": "none"})
    return Checkpoint.open(tmp_path)


def results(folder: Checkpoint, jobs: int | None) -> list[tuple[int, Result]]:
    tasks = [(number, Count(tensor)) for number, tensor in enumerate(folder.values())]
    return list(run_tasks(tasks, (folder.shards, ()), jobs=jobs))


def test_several_processes_say_what_one_says(folder: Checkpoint) -> None:
    """Each with the number of its task."""
    alone, names = results(folder, 1), list(folder)
    assert len(alone) == 2 * LAYERS + 1
    assert [names[n] for n, item in alone] == [getattr(item, "where", None) for _, item in alone]
    assert results(folder, 2) == results(folder, None) == alone


def test_results_come_layer_by_layer_whatever_names_are_like(folder: Checkpoint) -> None:
    """What one task reads, another of the same layer finds in the page cache."""
    names = [item.where for _, item in results(folder, 1) if isinstance(item, Finding)]
    expected = [name for n in range(LAYERS) for name in (f"model.layers.{n}.a", f"blk.{n}.b")]
    assert names == ["lm_head.weight", *expected]


def test_a_tensor_larger_than_the_buffer_is_read_in_chunks(tmp_path: Path) -> None:
    data = bytes(range(256)) * (2 * CHUNK // 256) + b"\7"
    write_shard(tmp_path / "model.safetensors", {"x": Tensor("U8", (len(data),), data)})
    write_json(tmp_path / "config.json", {})
    folder = Checkpoint.open(tmp_path)
    ((_, item),) = results(folder, 1)
    assert isinstance(item, Finding)
    assert item.message == f"{2 * CHUNK + 1} bytes, sum {sum(data)}"


def test_progress_adds_up_to_the_total(folder: Checkpoint) -> None:
    class Seen:
        total = done = 0

        def start(self, total: int, done: int) -> None:
            self.total = total

        def wrote(self, nbytes: int) -> None:
            self.done += nbytes

    for jobs in (1, 2):
        seen = Seen()
        tasks = [(0, Count(tensor)) for tensor in folder.values()]
        assert list(run_tasks(tasks, (folder.shards, ()), jobs=jobs, progress=seen))
        assert seen.total == seen.done == folder.nbytes


def test_a_task_that_cannot_fit_is_refused_by_name(folder: Checkpoint) -> None:
    tasks = [(0, Count(tensor)) for tensor in folder.values()]
    tasks.append((0, Count(folder["lm_head.weight"], scratch=1 << 40)))
    with pytest.raises(RunError, match=r"'lm_head.weight'.*give --memory \d+MiB"):
        list(run_tasks(tasks, (folder.shards, ()), memory=1 << 30))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_folder_that_changes_meanwhile_is_an_error(folder: Checkpoint, jobs: int) -> None:
    (shard,) = folder.shards
    shard.path.write_bytes(shard.path.read_bytes() + b"\0")
    with pytest.raises(RunError, match="changed"):
        results(folder, jobs)


def test_a_worker_that_dies_is_an_error(folder: Checkpoint) -> None:
    tasks: list[tuple[int, Count]] = [(0, Count(tensor)) for tensor in folder.values()]
    tasks.append((0, Die(folder["model.layers.7.a"])))
    with pytest.raises(RunError, match=r"a worker process died.*--memory"):
        list(run_tasks(tasks, (folder.shards, ()), jobs=2))


# --- Watches -------------------------------------------------------------------------------------

Spans = tuple[tuple[int, int], ...]


def one_tensor(folder: Path, size: int, name: str = "x.weight") -> tuple[Checkpoint, bytes]:
    data = bytes(i * 37 % 251 for i in range(size))
    write_shard(folder / "model.safetensors", {name: Tensor("U8", (size,), data)})
    write_json(folder / "config.json", {})
    return Checkpoint.open(folder), data


def test_what_a_task_reads_is_shown_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * CHUNK + 5
    folder, data = one_tensor(tmp_path, size)
    tensor = folder["x.weight"]
    counted: Counter[str] = Counter()
    watched_reads(monkeypatch, counted)
    tasks: list[Numbered] = [
        (0, See(tensor=tensor)),
        (1, Count(tensor, step=1000)),
        (2, See(tensor=tensor)),
    ]
    found = dict(run_tasks(tasks, (folder.shards, ()), jobs=1))
    assert counted == {"x.weight": size}
    for number in (0, 2):
        item = found[number]
        assert isinstance(item, Finding)
        assert item.message.endswith(f" {data.hex()}")
        assert item.message.startswith("[0, 1000, 2000,")


def test_a_source_is_watched_beside_what_was_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name, and the same name in both folders is two tensors."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours, _ = one_tensor(tmp_path / "a", 50, "model.layers.3.fused.weight")
    theirs, data = one_tensor(tmp_path / "b", 70, "model.layers.3.z.weight")

    @dataclass(frozen=True, slots=True)
    class Both(Count):
        def run(self, folders: Folders) -> Iterator[Result]:
            folders.output.read(self.tensor, 0, memoryview(bytearray(50)))
            folders.source.read(theirs["model.layers.3.z.weight"], 0, memoryview(bytearray(70)))
            yield from ()

    fused = ours["model.layers.3.fused.weight"]
    there = See(
        tensor=theirs["model.layers.3.z.weight"], side="source", spans=((10, 60),),
        grouped_with=fused.name,
    )  # fmt: skip
    counted: Counter[str] = Counter()
    watched_reads(monkeypatch, counted)
    tasks: list[Numbered] = [(0, there), (1, Both(fused)), (2, See(tensor=fused))]
    found = dict(run_tasks(tasks, (ours.shards, theirs.shards), jobs=1))
    assert counted == {fused.name: 50, "model.layers.3.z.weight": 70}
    item = found[0]
    assert isinstance(item, Finding)
    assert item.message == f"[10] {data[10:60].hex()}"


STRETCH = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p)))


@given(st.lists(STRETCH, max_size=8), st.sets(st.integers(0, 60), max_size=6))
def test_a_watch_sees_its_spans_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, reads: list[tuple[int, int]], cuts: set[int]
) -> None:
    """Whatever others read, backwards, twice or with gaps."""
    folder, data = one_tensor(tmp_path_factory.mktemp("spans"), 60)
    edges = sorted(cuts)
    spans = tuple(zip(edges[::2], edges[1::2], strict=False))
    tensor = folder["x.weight"]
    tasks: list[Numbered] = [
        (0, See(tensor=tensor, spans=spans)),
        (1, ReadAt(tensor, stretches=tuple(reads))),
    ]
    ((_, item),) = run_tasks(tasks, (folder.shards, ()), jobs=1)
    assert isinstance(item, Finding)
    expected = b"".join(data[start:stop] for start, stop in spans)
    assert item.message.rpartition(" ")[2] == expected.hex()


def test_scales_and_shards_for_numa_nodes_are_read_with_their_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same batch, whatever comes between by name."""
    names = [f"blk.3.ffn_up_exps.{e}.numa.{n}.{p}" for e in (2, 10) for n in (0, 1)
             for p in ("weight", "scale")]  # fmt: skip
    write_shard(tmp_path / "model.safetensors", {n: Tensor("U8", (1,), b"a") for n in names})
    write_json(tmp_path / "config.json", {})
    folder = Checkpoint.open(tmp_path)
    watches = [(n, See(tensor=folder[name])) for n, name in enumerate(names[::-1])]
    first = folder["blk.3.ffn_up_exps.2.numa.1.weight"]

    @dataclass(frozen=True, slots=True)
    class Matrix(Count):
        def run(self, folders: Folders) -> Iterator[Result]:
            for name in names[:4]:
                folders.output.read(folder[name], 0, memoryview(bytearray(1)))
            yield from ()

    counted: Counter[str] = Counter()
    watched_reads(monkeypatch, counted)
    order = [
        item.where
        for _, item in run_tasks([*watches, (99, Matrix(first))], (folder.shards, ()), jobs=1)
        if isinstance(item, Finding)
    ]
    assert set(order[:4]) == set(names[:4])
    assert counted == dict.fromkeys(names, 1)


def test_memory_that_was_held_before_counts_no_more(folder: Checkpoint) -> None:
    """What was held and is gone leaves a peak behind."""
    held = bytearray(b"x") * (400 << 20)
    del held
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    tasks = [(0, Count(tensor)) for tensor in folder.values()]
    assert list(run_tasks(tasks, (folder.shards, ()), jobs=1, memory=now + (100 << 20)))
