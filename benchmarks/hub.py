"""A conversion by id against a plain download of the same repo, from a Hub on the loopback that is held
to so many MB/s: seconds, bytes fetched against bytes needed, the largest disk.

    .venv/bin/python benchmarks/hub.py --layers 8 --runs 3
    .venv/bin/python benchmarks/hub.py --smallest      checks that it runs

The Hub is a process of its own (tests/loopback_hub.py), the client the real one, over LFS: hf_xet cannot
be tried offline. Contenders run in turn: `download` is the client's own snapshot_download into an empty
cache, `convert` the command by id into a folder, from an empty cache. Bytes needed are those of the
tensors; disk is what lies in the folder and in the caches, sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from data import bf16_moe, qwen3_moe, write_checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from loopback_hub import TOKEN, Blob, Pace, Repo, loopback_hub

_REPO = "org/model"
_DOWNLOAD = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1])"
)
# A source, and what is made of it; the last part of each must lie within the machine's speed.
_CASES = {
    "w4a16": (bf16_moe, ("w4a16", "--rtn")),
    "dequant": (qwen3_moe, ("dequant",)),
}


@dataclass(frozen=True)
class Measured:
    """One run: seconds, bytes of weights that the Hub sent, the largest disk in bytes."""

    what: str
    seconds: float
    fetched: int
    requests: int
    disk: int


def serve(folder: Path, rate: float) -> None:
    """A Hub with one repo, until stdin ends. A line on stdin is answered with the bytes and requests of
    weights since the last one."""
    with loopback_hub() as hub:
        # Hashes of gigabytes are computed once.
        hub.lying_tree = True
        tree = {}
        for path in sorted(folder.iterdir()):
            tree[path.name] = hub.blob(path.name, path.read_bytes())
        repo = hub.repos[_REPO] = Repo(private=False)
        repo.commit("main", tree, "first")
        hub.down = hub.up = Pace(rate)
        weights = {blob.lfs for name, blob in tree.items() if _is_shard(name, blob)}
        print(json.dumps({"url": hub.url}), flush=True)
        for _ in sys.stdin:
            log, hub.log = hub.log, []
            sent = [a.sent for a in log if a.path.partition("?")[0].rpartition("/")[2] in weights]
            print(json.dumps({"fetched": sum(sent), "requests": len(log)}), flush=True)


def _is_shard(name: str, blob: Blob) -> bool:
    return name.endswith(".safetensors") and blob.lfs is not None


@contextmanager
def serving(folder: Path, rate: float) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The Hub's URL, and its process."""
    words = [sys.executable, __file__, "--serve", str(folder), "--rate", str(rate)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(_stream(process.stdout).readline())["url"], process
    finally:
        _stream(process.stdin).close()
        process.wait()


def _stream(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the Hub sent since the last time."""
    stdin = _stream(process.stdin)
    stdin.write("\n")
    stdin.flush()
    found: dict[str, Any] = json.loads(_stream(process.stdout).readline())
    return found


def timed(
    what: str, words: Sequence[str], env: dict[str, str], hub: subprocess.Popen[str], place: Path
) -> Measured:
    """Run a command whose files lie below `place`, and sample their size."""
    asked(hub)
    largest = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.05):
            largest = max(largest, on_disk(place))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    ended = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    if ended.returncode:
        raise SystemExit(f"{' '.join(words[:4])} failed: {ended.stderr[-2000:]}")
    return Measured(what, seconds, **asked(hub), disk=max(largest, on_disk(place)))


def on_disk(place: Path) -> int:
    """Bytes that files below a folder take on the disk; holes take none."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # it was renamed meanwhile
                continue
    return total


def measure(case: str, layers: int, experts: int, runs: int, rate: float) -> list[Measured]:
    """Contenders in turn. The source is written, and removed, here."""
    model, command = _CASES[case]
    found = []
    with tempfile.TemporaryDirectory(prefix="qconvert-bench-") as scratch:
        source = Path(scratch) / "source"
        write_checkpoint(source, model(layers, experts))
        needed = tensor_bytes(source)
        with serving(source, rate) as (url, hub):
            for number in range(runs):
                for what in ("download", "convert"):
                    place = Path(scratch) / f"{what}{number}"
                    place.mkdir()
                    env = os.environ | {
                        "HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "hf"),
                        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
                        "XDG_CACHE_HOME": str(place / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                    }  # fmt: skip
                    words = [sys.executable, "-c", _DOWNLOAD, _REPO]
                    if what == "convert":
                        name, *options = command
                        out = str(place / "out")
                        words = [sys.executable, "-m", "qconvert", name, _REPO, out, *options]
                    one = timed(what, words, env, hub, place)
                    found.append(one)
                    print(
                        f"{what:<9} {one.seconds:6.1f} s  {one.fetched / needed:7.4f} of the bytes "
                        f"needed, {one.requests} requests, disk {one.disk / 1e9:.2f} GB",
                        flush=True,
                    )
                    subprocess.run(["rm", "-rf", str(place)], check=True)
        plain, made = (
            statistics.median(one.seconds for one in found if one.what == what)
            for what in ("download", "convert")
        )
        print(
            f"{case}: {needed / 1e9:.2f} GB at {rate / 1e6:.0f} MB/s, {made / plain:.2f} x a download"
        )
    return found


def tensor_bytes(folder: Path) -> int:
    from qconvert.api import open_checkpoint

    return open_checkpoint(folder).nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(_CASES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=200e6, help="bytes a second each way")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.rate)
        return
    layers, experts, runs = given.layers, given.experts, given.runs
    if given.smallest:
        layers, experts, runs = 1, 4, 1
    found = {
        case: [asdict(one) for one in measure(case, layers, experts, runs, given.rate)]
        for case in given.cases or list(_CASES)
    }
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
