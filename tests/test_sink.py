"""Whatever runs of bytes a sink is given, and whatever the file system refuses, the files get those
bytes and no others."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults import InTurn
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.errors import OutputError
from qconvert.run.work.files import Files
from qconvert.run.work.sink import BLOCK, MIN_WINDOW_BYTES, PendingMessages, Sink

_SIZE = 40 * BLOCK + 123
_WINDOW = MIN_WINDOW_BYTES


class Watched(InTurn):
    """Notes every write: whether it went past the page cache, from where to where."""

    def __init__(self) -> None:
        self.direct: list[tuple[int, int]] = []
        self.cached: list[tuple[int, int]] = []

    def write(self, fd: int, path: Path, data: memoryview, offset: int) -> None:
        self.cached.append((offset, offset + data.nbytes))
        super().write(fd, path, data, offset)

    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        count = super().write_direct(fd, path, data, offset)
        if count:
            self.direct.append((offset, offset + count))
        return count


class NoDirectOpen(Files):
    """A file system without direct writes, as seen when a file is opened."""

    def open_direct(self, path: Path) -> int:
        return self.open(path)


class NoDirectWrite(Files):
    """One that says so only when asked to write."""

    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        return 0


class Short(Files):
    """One that writes less than it was given."""

    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        return super().write_direct(fd, path, data[:BLOCK], offset)


class Full(Files):
    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        raise OutputError(f"{path}: cannot write: No space left on device")


def _files(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"{n}.bin" for n in range(count)]
    for path in paths:
        path.write_bytes(bytes(_SIZE))
    return paths


def _put(sink: Sink, file: int, at: int, data: bytes) -> None:
    for start in range(0, max(1, len(data)), sink.limit):
        piece = data[start : start + sink.limit]
        sink.room(file, at + start, len(piece))[:] = piece


_RUNS = st.lists(
    st.tuples(
        st.integers(0, 1),  # which file
        st.one_of(st.integers(0, _SIZE), st.integers(0, 40).map(lambda n: n * BLOCK)),
        st.lists(st.sampled_from([0, 1, 100, BLOCK - 1, BLOCK, 3 * BLOCK + 5, 17 * BLOCK]), max_size=6),
        st.booleans(),  # let go of it afterwards
    ),
    max_size=8,
)  # fmt: skip


@pytest.mark.parametrize("layer", [Files, InTurn, NoDirectOpen, NoDirectWrite, Short])
@settings(max_examples=25)
@given(runs=_RUNS, seed=st.integers(0, 99))
def test_any_runs_reach_their_places(
    tmp_path_factory: pytest.TempPathFactory,
    layer: type[Files],
    runs: Sequence[tuple[int, int, Sequence[int], bool]],
    seed: int,
) -> None:
    """Later bytes win where runs overlap: they are written in the order they are given."""
    paths = _files(tmp_path_factory.mktemp("sink"), 2)
    wanted = [bytearray(_SIZE), bytearray(_SIZE)]
    chooser = random.Random(seed)
    sink = Sink(layer(), paths, _WINDOW)
    given_bytes = 0
    for file, start, sizes, seal in runs:
        at = start
        for size in sizes:
            data = chooser.randbytes(min(size, _SIZE - at))
            _put(sink, file, at, data)
            wanted[file][at : at + len(data)] = data
            at += len(data)
            given_bytes += len(data)
        if seal:
            sink.seal()
    sink.flush()
    assert sink.taken == sink.written == given_bytes
    assert sink.read(1, 5, 100) == wanted[1][5:105]
    sink.close()
    assert [path.read_bytes() for path in paths] == wanted


def test_only_the_ends_of_a_run_go_through_the_cache(tmp_path: Path) -> None:
    """A run of 100,000 bytes from byte 5000 on, in pieces: blocks 2 to 24 begin in it and end in
    it (24 * 4096 = 98304, and 25 * 4096 = 102400 is the last multiple up to 105,000)."""
    if not _takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    files = Watched()
    (path,) = _files(tmp_path, 1)
    sink = Sink(files, [path], _WINDOW)
    for start in range(5000, 105_000, 10_000):
        _put(sink, 0, start, b"\x07" * 10_000)
    sink.flush()
    sink.close()
    if BLOCK == 4096:
        assert files.cached == [(5000, 8192), (102_400, 105_000)]
    assert all(start % BLOCK == stop % BLOCK == 0 for start, stop in files.direct)
    assert sum(stop - start for start, stop in files.direct) > 90_000 - BLOCK


def _takes_direct(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(BLOCK))
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("way", ["room", "flush", "written"])
def test_a_failed_write_is_told_of(tmp_path: Path, way: str) -> None:
    """Whatever is called next says so; nothing waits for ever, and closing works."""
    (path,) = _files(tmp_path, 1)
    sink = Sink(Full(), [path], _WINDOW)
    _put(sink, 0, 0, bytes(4 * BLOCK))
    sink.seal()

    def wait_for_it() -> None:
        while True:
            if way == "room":
                _put(sink, 0, 0, bytes(8 * BLOCK))
            elif way == "flush":
                sink.flush()
            else:
                assert sink.written == 0

    with pytest.raises(OutputError, match="No space left"):
        wait_for_it()
    sink.close()


def test_what_is_underway_is_said_when_it_is_written(tmp_path: Path) -> None:
    (path,) = _files(tmp_path, 1)
    sink = Sink(InTurn(), [path], _WINDOW)
    underway: PendingMessages[str] = PendingMessages(sink)
    _put(sink, 0, 0, b"a" * 100)
    underway.add("first")
    assert list(underway.settled()) == []
    _put(sink, 0, 100, b"b" * 50)
    underway.add("second")
    sink.seal()
    underway.add("third")
    assert list(underway.settled()) == ["first", "second", "third"]
    _put(sink, 0, 150, b"c" * 10)
    underway.add("fourth")
    assert list(underway.flush()) == ["fourth"]
    sink.close()
    assert path.read_bytes()[:161] == b"a" * 100 + b"b" * 50 + b"c" * 10 + b"\0"


def test_a_sink_keeps_few_files_open(tmp_path: Path) -> None:
    """Models have hundreds of files; a process may open about a thousand."""
    paths = _files(tmp_path, 60)
    sink = Sink(Files(), paths, _WINDOW)
    for number in range(60):
        _put(sink, number, 0, bytes([number + 1]) * (BLOCK + 1))
    sink.flush()
    assert 2 <= _opened_in(tmp_path) <= 40
    sink.close()
    assert _opened_in(tmp_path) == 0
    for number, path in enumerate(paths):
        assert path.read_bytes()[: BLOCK + 2] == bytes([number + 1]) * (BLOCK + 1) + b"\0"


def _opened_in(folder: Path) -> int:
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(entry.readlink().is_relative_to(folder) for entry in entries)
