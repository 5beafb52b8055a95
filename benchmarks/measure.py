"""Time a command, its whole process tree, and what the machine itself can do, by one clock."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Sample:
    """One run: seconds of wall time, CPU seconds (user and system) and the largest summed memory of
    the process tree in MB, shared file pages not counted."""

    seconds: float
    cpu: float
    peak_mb: float


def timed(command: Sequence[str]) -> Sample:
    """Run a command. Raises SystemExit with its error output if it fails."""
    before = os.times()
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment()
    )
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, _tree_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed: {errors.decode()[-2000:]}")
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return Sample(seconds, cpu, peak / 1e6)


def _environment() -> dict[str, str]:
    """Modules are compiled once, as those of an installed package are: without, each process of a clone
    in which Python may not write spends .45 s on it."""
    return {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def _tree_memory(pid: int) -> int:
    total = 0
    try:
        statm = Path(f"/proc/{pid}/statm").read_text().split()
        total += (int(statm[1]) - int(statm[2])) * mmap.PAGESIZE
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += _tree_memory(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total


@dataclass(frozen=True)
class Limit:
    """What the machine needs for the same bytes without the work: seconds to read the source, warm, and
    to write and sync as many bytes as the result, in the fastest way found; CPU seconds of both."""

    read: float
    write: float
    cpu: float
    how: str

    @property
    def sample(self) -> Sample:
        return Sample(self.read + self.write, self.cpu, 0.0)


def limit(source: Path, out: Path, write_bytes: int, threads: Sequence[int]) -> Limit:
    """Read, then write reserved files, one for each thread, through the page cache and past it,
    with as many threads as each of `threads` says; the best read and the best write count."""
    files = sorted(source.glob("*.safetensors"))
    reads = [_clocked(partial(_read, files, n)) for n in threads]
    writes = []
    for direct in (True, False):
        for count in threads:
            out.mkdir()
            try:
                found = _clocked(partial(_write, out, write_bytes, count, direct))
            except OSError:  # no direct writes here, as on some file systems
                continue
            finally:
                remove(out)
                os.sync()
            cache = "past" if direct else "through"
            writes.append((*found, f"{count} threads {cache} the page cache"))
    read, write = min(reads), min(writes)
    return Limit(read[0], write[0], read[1] + write[1], write[2])


def _clocked(work: Callable[[], object]) -> tuple[float, float]:
    before, begin = os.times(), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - begin, os.times()
    return seconds, after.user + after.system - before.user - before.system


def _read(files: Sequence[Path], threads: int) -> None:
    pieces = [
        (file, start, min(start + (64 << 20), size))
        for file in files
        for size in [file.stat().st_size]
        for start in range(0, size, 64 << 20)
    ]

    def work(mine: Sequence[tuple[Path, int, int]]) -> None:
        buffer = _buffer()
        for file, start, stop in mine:
            fd = os.open(file, os.O_RDONLY)
            for at in range(start, stop, _CHUNK):
                os.preadv(fd, [buffer[: min(_CHUNK, stop - at)]], at)
            os.close(fd)

    _in_threads([partial(work, pieces[n::threads]) for n in range(threads)])


def _write(out: Path, size: int, threads: int, direct: bool) -> None:
    flags = os.O_CREAT | os.O_RDWR | (os.O_DIRECT if direct else 0)
    each = -(-size // threads // 4096) * 4096

    def work(number: int) -> None:
        buffer = _buffer()
        fd = os.open(out / str(number), flags)
        try:
            os.posix_fallocate(fd, 0, each)
            for at in range(0, each, _CHUNK):
                os.pwrite(fd, buffer[: min(_CHUNK, each - at)], at)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    _in_threads([partial(work, n) for n in range(threads)])


def _in_threads(works: Sequence[Callable[[], None]]) -> None:
    failed: list[OSError] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            failed.append(error)

    running = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]


def _buffer() -> memoryview:
    pages = memoryview(mmap.mmap(-1, _CHUNK))
    pages[:] = os.urandom(1 << 16) * (_CHUNK >> 16)
    return pages


def memcpy_rate() -> float:
    """Bytes a second copied by one thread between two buffers that leave the caches."""
    size = 256 << 20
    source, target = bytearray(size), bytearray(size)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        target[:] = source
        best = max(best, size / (time.perf_counter() - begin))
    return best


def cold_read(folders: Sequence[Path], threads: Sequence[int]) -> Sample:
    """Every byte of the folders' shards read once from the disk, with the fastest of several numbers of
    threads."""
    files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
    best: Sample | None = None
    for count in threads:
        forget(folders)
        seconds, cpu = _clocked(lambda count=count: _read(files, count))  # type: ignore[misc]
        if best is None or seconds < best.seconds:
            best = Sample(seconds, cpu, 0.0)
    assert best is not None
    return best


def forget(folders: Sequence[Path]) -> None:
    """Drop the folders' shards from the page cache."""
    os.sync()
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(folder: Path) -> None:
    """Load a folder's files into the page cache, with nothing else waiting for the disk."""
    os.sync()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            buffer = bytearray(_CHUNK)
            while stream.readinto(buffer):
                pass


def remove(out: Path) -> None:
    """A run's result, file or folder."""
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
