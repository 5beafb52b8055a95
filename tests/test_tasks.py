"""Validators' work on data: the same results from one process or several, in the order of the layers,
within a budget."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoints import Tensor, write_json, write_shard

from qconvert.checkpoint import Checkpoint
from qconvert.errors import RunError
from qconvert.findings import Finding
from qconvert.graph import Source
from qconvert.tasks import CHUNK, Result, Room, run_tasks

LAYERS = 12


@dataclass(frozen=True, slots=True)
class Count:
    """Says how many bytes of a tensor there are, and their sum."""

    tensor: Source
    scratch: int = 0

    @property
    def where(self) -> str:
        return self.tensor.name

    @property
    def nbytes(self) -> int:
        return self.tensor.type.nbytes

    def run(self, room: Room) -> Iterator[Result]:
        total = size = 0
        for start, chunk in room.chunks(room.output, self.tensor):
            assert start == size
            total, size = total + sum(chunk), size + len(chunk)
        yield Finding("QC000", "warning", self.where, f"{size} bytes, sum {total}")


@dataclass(frozen=True, slots=True)
class Die(Count):
    """Ends its process, as the kernel does when memory runs out."""

    def run(self, room: Room) -> Iterator[Result]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()


@dataclass(frozen=True, slots=True)
class Sleep(Count):
    """Says that it has begun, and takes its time; used by tests/test_validate_cli.py."""

    def run(self, room: Room) -> Iterator[Result]:
        Path(os.environ["QCONVERT_TEST_ROOM"], f"asleep-{os.getpid()}").touch()
        time.sleep(2)
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
    alone = results(folder, 1)
    assert len(alone) == 2 * LAYERS + 1
    assert results(folder, 2) == results(folder, None) == alone


def test_results_come_layer_by_layer_whatever_names_are_like(folder: Checkpoint) -> None:
    """What one task reads, another of the same layer finds in the page cache."""
    names = [item.where for _, item in results(folder, 1) if isinstance(item, Finding)]
    expected = [name for n in range(LAYERS) for name in (f"model.layers.{n}.a", f"blk.{n}.b")]
    assert names == ["lm_head.weight", *expected]


def test_results_carry_the_number_of_their_task(folder: Checkpoint) -> None:
    names = list(folder)
    for number, item in results(folder, 2):
        assert isinstance(item, Finding)
        assert names[number] == item.where


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
