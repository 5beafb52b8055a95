"""FP8 -> BF16 against compressed-tensors' converter and this machine's own limit, in one run.

    .venv/bin/python benchmarks/dequant.py --layers 6 --runs 5 --out result.json

Commands run in turn, A B C A B C, because shared machines change speed from minute to minute. The
limit is a plain loop of the same bytes: read the source (warm), write as much as the result, sync.
Needs about four times the source's size on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from data import write_checkpoint

_CHUNK = 4 << 20
_PEER = """
import sys
from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint
convert_checkpoint(model_stub=sys.argv[1], save_directory=sys.argv[2], max_workers=2,
    converter=FP8BlockDequantizer(targets=["re:.*proj$"], weight_block_size=(128, 128)))
"""


@dataclass(frozen=True)
class Sample:
    """One run: seconds on the wall, CPU seconds and the largest summed memory of the process tree."""

    seconds: float
    cpu: float
    peak_mb: float


def _tree_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants, shared file pages counted once a process."""
    total = 0
    try:
        statm = Path(f"/proc/{pid}/statm").read_text().split()
        total += (int(statm[1]) - int(statm[2])) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += _tree_rss(int(child))
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total


def _timed(command: list[str]) -> Sample:
    before = os.times()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, _tree_rss(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    done.set()
    watcher.join()
    seconds = time.perf_counter() - begin
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed: {errors.decode()[-2000:]}")
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return Sample(seconds, cpu, peak / 1e6)


def _limit(source: Path, out: Path, write_bytes: int) -> Sample:
    """Read all shards, write `write_bytes` into a reserved file, sync: what no converter can beat by
    much through the page cache."""
    before, begin = os.times(), time.perf_counter()
    buffer = memoryview(bytearray(_CHUNK))
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    fd = os.open(out, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    os.posix_fallocate(fd, 0, write_bytes)
    for start in range(0, write_bytes, _CHUNK):
        os.pwrite(fd, buffer[: min(_CHUNK, write_bytes - start)], start)
    os.fdatasync(fd)
    os.close(fd)
    seconds = time.perf_counter() - begin
    after = os.times()
    return Sample(seconds, after.user + after.system - before.user - before.system, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=6, help="0.62 GB of FP8 each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", type=Path, help="folder for the data [default: temporary]")
    parser.add_argument("--out", type=Path, help="write the samples as JSON")
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="qconvert-bench-", dir=arguments.work))
    try:
        samples = _measure(work, arguments.layers, arguments.runs, peer=not arguments.no_peer)
    finally:
        shutil.rmtree(work)
    if arguments.out:
        arguments.out.write_text(
            json.dumps(
                {name: [asdict(s) for s in runs] for name, runs in samples.items()}, indent=2
            )
        )


def _measure(work: Path, layers: int, runs: int, *, peer: bool) -> dict[str, list[Sample]]:
    source = work / "source"
    read = write_checkpoint(source, layers)
    written = 2 * read  # nearly all of it is FP8 that becomes BF16
    print(f"{read / 1e9:.2f} GB of source, {runs} runs of each, medians")
    python, out = sys.executable, work / "out"
    dequant = [python, "-m", "qconvert", "dequant", str(source), str(out)]
    contenders: dict[str, Callable[[], Sample]] = {
        "limit": lambda: _limit(source, out, written),
        "qconvert --jobs 1": lambda: _timed([*dequant, "--jobs", "1"]),
        "qconvert --jobs 2": lambda: _timed([*dequant, "--jobs", "2"]),
    }
    if peer:
        command = [python, "-c", _PEER, str(source), str(out)]
        contenders["compressed-tensors"] = lambda: _timed(command)
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, run in contenders.items():
            samples[name].append(run())
            shutil.rmtree(out) if out.is_dir() else out.unlink()
    limit = statistics.median(sample.seconds for sample in samples["limit"])
    print(f"{'':<20} {'seconds':>8} {'GB/s in':>8} {'CPU s':>7} {'peak MB':>8} {'x limit':>8}")
    for name, found in samples.items():
        seconds, cpu, peak = (
            statistics.median(getattr(sample, key) for sample in found)
            for key in ("seconds", "cpu", "peak_mb")
        )
        print(
            f"{name:<20} {seconds:>8.2f} {read / 1e9 / seconds:>8.2f} {cpu:>7.1f} {peak:>8.0f} "
            f"{seconds / limit:>8.2f}"
        )
    return samples


if __name__ == "__main__":
    main()
