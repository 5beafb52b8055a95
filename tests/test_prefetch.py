"""Rows on their way to an accelerator, and the memory that they are copied from."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Generator
from typing import Any

import pytest
import torch
from accelerators import pretend

from qconvert.calibrate.activation_store import InMemory, PageLocked, ScratchRows, prefetched
from qconvert.core.errors import RunError
from qconvert.run.work.files import Files

PARTS = [(0, 5), (5, 9), (9, 14), (14, 20), (20, 21)]


class Kept:
    """Rows in the host's memory, or where it is said; notes what is read."""

    def __init__(self, log: list[str], width: int = 3, device: str = "cpu") -> None:
        self.rows = torch.arange(21 * width).view(21, width)
        self.device, self._log = device, log

    def read(self, start: int, stop: int) -> torch.Tensor:
        self._log.append(f"read {start}")
        return self.rows[start:stop]

    def write(self, start: int, rows: torch.Tensor) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's streams, which note what is asked of which, copies too: the main one, or another."""
    pretend(monkeypatch)
    log: list[str] = []
    on = ["main"]
    copy = torch.Tensor.copy_

    def copied(into: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        log.append(f"copy on {on[-1]}")
        return copy(into, *args, **more)

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            log.append(f"{self.name} waits for {event.of}")

    class Event:
        of = ""

        def record(self, stream: Stream) -> None:
            self.of = f"{stream.name} {len(log)}"
            log.append(f"event {self.of}")

    @contextlib.contextmanager
    def within(stream: Stream) -> Any:
        on.append(stream.name)
        yield
        on.pop()

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    return log


def test_the_next_part_is_sent_before_this_one_is_worked_on(log: list[str]) -> None:
    """Each copy waits for what the main stream was asked while its buffer was read; each part is given
    once the main stream waits for its copy; and no more than two are there."""
    kept = Kept(log)
    buffers = []
    for (start, stop), (rows,) in zip(PARTS, prefetched([kept], PARTS, "cpu:0"), strict=True):
        assert torch.equal(rows, kept.rows[start:stop])
        buffers.append(rows.data_ptr())
        log.append(f"use {start}")
    assert buffers[0] == buffers[2] == buffers[4] != buffers[1] == buffers[3]
    for n, (start, _) in enumerate(PARTS):
        read, use = log.index(f"read {start}"), log.index(f"use {start}")
        free, waits, copy, arrived = log[read + 1 : read + 5]
        assert copy == "copy on side"
        assert free.startswith("event main")
        assert waits == f"side waits for {free.removeprefix('event ')}"
        assert arrived.startswith("event side")
        assert f"main waits for {arrived.removeprefix('event ')}" in log[read:use]
        if n:
            assert read < log.index(f"use {PARTS[n - 1][0]}")
        if n > 1:  # its buffer's last part
            assert read > log.index(f"use {PARTS[n - 2][0]}")


def test_what_is_on_its_way_arrives_before_buffers_are_given_back(log: list[str]) -> None:
    """Where nobody asks for the next part any more."""
    sent = prefetched([Kept(log)], PARTS, "cpu:0")
    next(sent)
    last = [line for line in log if line.startswith("event side")][-1]
    wait = f"main waits for {last.removeprefix('event ')}"
    assert "read 5" in log
    assert wait not in log
    assert isinstance(sent, Generator)
    sent.close()
    assert log[-1] == wait


def test_rows_that_are_there_are_given_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    log: list[str] = []
    there, far = Kept(log, device="cpu:0"), Kept(log, 2)
    for (start, stop), (mine, sent) in zip(
        PARTS, prefetched([there, far], PARTS, "cpu:0"), strict=True
    ):
        assert mine.data_ptr() == there.rows[start:].data_ptr()
        assert torch.equal(sent, far.rows[start:stop])
        assert sent.data_ptr() != far.rows[start:].data_ptr()
    assert [*prefetched([there], [], "cpu:0")] == []


def _cudart(monkeypatch: pytest.MonkeyPatch, log: list[tuple[str, int]], answer: int = 0) -> None:
    def register(at: int, size: int, _: int) -> int:
        log.append(("lock", size))
        return answer

    def unregister(at: int) -> int:
        with open("/proc/self/maps", encoding="ascii") as maps:
            there = any(int(line.split("-")[0], 16) <= at < _end(line) for line in maps)
        log.append(("unlock", there))
        return 0

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)


def _end(line: str) -> int:
    return int(line.split()[0].split("-")[1], 16)


def test_locked_memory_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same size, whatever its shape was; of another it is new, and what is not given back stays
    another's. It is unlocked before it is unmapped, once its last tensor is gone."""
    log: list[tuple[str, int]] = []
    _cudart(monkeypatch, log)
    memory = PageLocked()
    first = memory.take(300, 7, torch.bfloat16)
    first.fill_(2)
    second = memory.take(300, 7, torch.bfloat16)
    assert first.data_ptr() != second.data_ptr()
    assert bool((first == 2).all())
    at = first.data_ptr()
    memory.give(first)
    del first
    third = memory.take(150, 7, torch.float32)
    assert third.data_ptr() == at
    memory.take(300, 8, torch.bfloat16)
    assert log == [("lock", 4200), ("lock", 4200), ("lock", 4800), ("unlock", True)]
    memory.give(second)
    del second
    assert len(log) == 4
    memory.clear()
    assert log[4:] == [("unlock", True)]
    del third
    assert log[5:] == [("unlock", True)]


def test_memory_that_cannot_be_locked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []
    _cudart(monkeypatch, log, 2)
    with pytest.raises(
        RunError, match=r"cannot lock 2 MiB .* \(CUDA error 2\); give less --memory"
    ):
        PageLocked().take(1 << 10, 1 << 10, torch.bfloat16)
    assert log == [("lock", 2 << 20)]
    with pytest.raises(
        RunError, match=r"cannot lock 1099511627776 MiB .* \(Cannot allocate memory\)"
    ):
        PageLocked().take(1 << 30, 1 << 29, torch.bfloat16)  # no address space has so much


def test_a_layers_rows_are_given_back(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's lie where the last one's did, page-locked where an accelerator is; what is left of a
    device is known."""
    pretend(monkeypatch)
    found = []
    for _ in range(2):
        scratch = ScratchRows(tmp_path, {"cpu:0": 100, "cpu": 5000}, Files())
        rows = scratch.rows("inputs", 10, 100, torch.bfloat16)
        assert isinstance(rows, InMemory)
        assert (rows.device, scratch.left("cpu"), scratch.left("cpu:0")) == ("cpu", 3000, 100)
        assert scratch.rows("few", 10, 5, torch.bfloat16).device == "cpu:0"
        assert (scratch.left("cpu:0"), scratch.left("cuda:9")) == (0, 0)
        found.append(rows.read(0, 1).data_ptr())
        scratch.close()
    assert found[0] == found[1]
