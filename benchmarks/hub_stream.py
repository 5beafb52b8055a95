"""A conversion that goes to the Hub while it is made, against plain transfers of the same bytes, with
a Hub on the loopback that is held to so many MB/s each way: seconds, bytes sent, the largest disk.

    .venv/bin/python benchmarks/hub_stream.py --layers 8 --runs 3
    .venv/bin/python benchmarks/hub_stream.py --from hub      the source by id, too
    .venv/bin/python benchmarks/hub_stream.py --smallest      checks that it runs

The Hub is a process of its own (tests/loopback_hub.py), the client the real one, over LFS: hf_xet
cannot be tried offline. Contenders run in turn: `download` of the source and `upload` of the finished
folder, both by the client alone, and `stream`: the command with --disk-budget of a part of the source.
What arrived is compared with the folder of a local run by `qconvert diff`. Disk is what lies below the
run's folders, caches included, sampled.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from data import bf16_moe, qwen3_moe, write_checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from loopback_hub import TOKEN, Pace, Repo, loopback_hub

_SOURCE, _UPLOADED, _STREAMED = "org/model", "me/uploaded", "me/streamed"
_DOWNLOAD = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1])"
)
_UPLOAD = (
    "import sys; from huggingface_hub import HfApi; api = HfApi(); api.create_repo(sys.argv[2]); "
    "api.upload_folder(repo_id=sys.argv[2], folder_path=sys.argv[1])"
)
# A source, and what is made of it.
_CASES = {
    "copy": (bf16_moe, ("run", "copy")),
    "w4a16": (bf16_moe, ("w4a16", "--rtn")),
    "dequant": (qwen3_moe, ("dequant",)),
}


@dataclass(frozen=True)
class Measured:
    """One run: seconds, bytes of files that came to the Hub and went from it, the largest disk in bytes,
    whether what arrived is what a local run makes (None: not asked)."""

    what: str
    seconds: float
    sent: int
    fetched: int
    disk: int
    same: bool | None = None


def serve(folder: Path, rate: float) -> None:
    """A Hub with one repo, until stdin ends. A line on stdin is answered with the bytes since the last
    one; `forget` also drops what was uploaded."""
    with loopback_hub() as hub:
        # Hashing gigabytes here would take the cores of those that are measured.
        hub.lying_tree = hub.trusting = True
        tree = {path.name: hub.blob(path.name, path.read_bytes()) for path in folder.iterdir()}
        repo = hub.repos[_SOURCE] = Repo(private=False)
        repo.commit("main", tree, "first")
        own = set(hub.objects)
        hub.down, hub.up = Pace(rate), Pace(rate)
        print(json.dumps({"url": hub.url}), flush=True)
        for line in sys.stdin:
            log, hub.log = hub.log, []
            if line.strip() == "forget":
                hub.repos = {_SOURCE: repo}
                hub.objects = {oid: data for oid, data in hub.objects.items() if oid in own}
            fetched = sum(a.sent for a in log if "/cdn/" in a.path)
            sent = sum(a.received for a in log if a.method == "PUT")
            print(json.dumps({"fetched": fetched, "sent": sent}), flush=True)


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


def asked(process: subprocess.Popen[str], word: str = "") -> dict[str, Any]:
    """What went through the Hub since the last time."""
    stdin = _stream(process.stdin)
    stdin.write(f"{word}\n")
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
        while not done.wait(0.02):
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
    return Measured(what, seconds, **asked(hub), disk=largest)


def on_disk(place: Path) -> int:
    """Bytes that files below a folder take on the disk; holes take none."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # it was removed meanwhile
                continue
    return total


def measure(
    case: str, layers: int, experts: int, runs: int, rate: float, part: int, *, by_id: bool
) -> list[Measured]:
    """Contenders in turn. Sources and results are written, and removed, here."""
    model, command = _CASES[case]
    found = []
    with tempfile.TemporaryDirectory(prefix="qconvert-bench-") as scratch:
        source, local = Path(scratch) / "source", Path(scratch) / "local"
        nbytes = write_checkpoint(source, model(layers, experts))
        budget = nbytes // part
        shard = str(budget // 5 >> 20) + "MiB" if budget > 50 << 20 else str(budget // 5)
        options = (*command[1 if command[0] != "run" else 2 :], "--max-shard-size", shard)
        start = command[: 1 if command[0] != "run" else 2]
        run = [sys.executable, "-m", "qconvert", *start]
        subprocess.run([*run, str(source), str(local), *options], check=True, capture_output=True)
        with serving(source, rate) as (url, hub):
            words = {
                "download": [sys.executable, "-c", _DOWNLOAD, _SOURCE],
                "upload": [sys.executable, "-c", _UPLOAD, str(local), _UPLOADED],
            }
            for number in range(runs):
                for what in ("download", "upload", "stream"):
                    place = Path(scratch) / f"{what}{number}"
                    place.mkdir()
                    env = os.environ | {
                        "HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "hf"),
                        "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
                        "XDG_CACHE_HOME": str(place / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                    }  # fmt: skip
                    words["stream"] = [
                        *run, _SOURCE if by_id else str(source), f"hf://{_STREAMED}", *options,
                        "--disk-budget", str(budget), "--work-dir", str(place / "work"),
                    ]  # fmt: skip
                    asked(hub, "forget")
                    one = timed(what, words[what], env, hub, place)
                    same = None
                    if what == "stream":
                        check = [sys.executable, "-m", "qconvert", "diff", str(local)]
                        compared = subprocess.run(
                            [*check, f"hf://{_STREAMED}"], env=env, capture_output=True, text=True,
                            check=False,
                        )  # fmt: skip
                        same = compared.returncode == 0
                        print(compared.stdout.strip().splitlines()[-1])
                    found.append(Measured(**{**asdict(one), "same": same}))
                    print(
                        f"{what:<9} {one.seconds:6.1f} s  sent {one.sent / 1e9:.2f} GB, fetched "
                        f"{one.fetched / 1e9:.2f} GB, disk {one.disk / 1e9:.3f} GB",
                        flush=True,
                    )
                    shutil.rmtree(place)
        seconds = {
            what: statistics.median(one.seconds for one in found if one.what == what)
            for what in ("download", "upload", "stream")
        }
        disk = max(one.disk for one in found if one.what == "stream")
        result = sum(path.stat().st_size for path in local.iterdir())
        print(
            f"{case}: {nbytes / 1e9:.2f} GB to {result / 1e9:.2f} GB at {rate / 1e6:.0f} MB/s, "
            f"{seconds['stream'] / seconds['download']:.2f} x a download of the source, "
            f"{seconds['stream'] / seconds['upload']:.2f} x an upload of the result; disk "
            f"{disk / budget:.3f} of the budget of {budget / 1e9:.3f} GB"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(_CASES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=200e6, help="bytes a second each way")
    parser.add_argument("--part", type=int, default=4, help="the budget is this part of the source")
    parser.add_argument("--from", dest="source", choices=["folder", "hub"], default="folder")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.rate)
        return
    layers, experts, runs = given.layers, given.experts, given.runs
    if given.smallest:
        layers, experts, runs, given.part = 1, 4, 1, 1
    by_id = given.source == "hub"
    found = {
        case: [
            asdict(one)
            for one in measure(case, layers, experts, runs, given.rate, given.part, by_id=by_id)
        ]
        for case in given.cases or list(_CASES)
    }
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
