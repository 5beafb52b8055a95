"""A Hub on the loopback, in a process of its own, held to so many bytes a second each way; and commands
timed against it.

The Hub is that of the tests (tests/loopback_hub.py), the client the real one, over LFS: hf_xet cannot be
tried offline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from loopback_hub import TOKEN, Blob, Pace, Repo, loopback_hub

REPO = "org/model"
DOWNLOAD = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1])"
)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the repo's weights that the Hub sent, bytes of files that it got, and requests."""

    fetched: int
    sent: int
    requests: int


@dataclass(frozen=True)
class Timed:
    """A command: seconds, what went through the Hub, the largest disk in bytes."""

    seconds: float
    traffic: Traffic
    disk: int


class Serving:
    """The Hub's process, and its URL."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url: str = json.loads(_stream(process.stdout).readline())["url"]

    def traffic(self, *, forget: bool = False) -> Traffic:
        """What went through since the last time; `forget` drops what was uploaded."""
        stdin = _stream(self._process.stdin)
        stdin.write("forget\n" if forget else "\n")
        stdin.flush()
        return Traffic(**json.loads(_stream(self._process.stdout).readline()))

    def environment(self, place: Path) -> dict[str, str]:
        """For a command whose caches lie below `place`."""
        return os.environ | {
            "HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": str(place / "hf"),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "XDG_CACHE_HOME": str(place / "cache"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip

    def timed(self, words: Sequence[str], place: Path) -> Timed:
        """Run a command whose files lie below `place`, and sample their size. SystemExit if it fails."""
        self.traffic()
        largest = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal largest
            while not done.wait(0.02):
                largest = max(largest, on_disk(place))

        watcher = threading.Thread(target=watch)
        watcher.start()
        begin = time.perf_counter()
        env = self.environment(place)
        ended = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        done.set()
        watcher.join()
        if ended.returncode:
            raise SystemExit(f"{' '.join(words[:4])} failed: {ended.stderr[-2000:]}")
        return Timed(seconds, self.traffic(), max(largest, on_disk(place)))


@contextmanager
def serving(folder: Path, rate: float) -> Iterator[Serving]:
    """A Hub that has the folder as REPO."""
    words = [sys.executable, __file__, str(folder), str(rate)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Serving(process)
    finally:
        _stream(process.stdin).close()
        process.wait()


def _stream(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def on_disk(place: Path) -> int:
    """Bytes that files below a folder take on the disk; holes take none."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:  # it was renamed or removed meanwhile
                continue
    return total


def _serve(folder: Path, rate: float) -> None:
    """Answer each line on stdin with the traffic since the last one, until stdin ends."""
    with loopback_hub() as hub:
        # Hashing gigabytes here would take the cores of those that are measured.
        hub.lying_tree = hub.trusting = True
        tree = {path.name: hub.blob(path.name, path.read_bytes()) for path in folder.iterdir()}
        repo = hub.repos[REPO] = Repo(private=False)
        repo.commit("main", tree, "first")
        own, weights = (
            set(hub.objects),
            {blob.lfs for name, blob in tree.items() if _is_shard(name, blob)},
        )
        hub.down, hub.up = Pace(rate), Pace(rate)
        print(json.dumps({"url": hub.url}), flush=True)
        for line in sys.stdin:
            log, hub.log = hub.log, []
            if line.strip() == "forget":
                hub.repos = {REPO: repo}
                hub.objects = {oid: data for oid, data in hub.objects.items() if oid in own}
            ends = ((a.path.partition("?")[0].rpartition("/")[2], a.sent) for a in log)
            fetched = sum(sent for end, sent in ends if end in weights)
            sent = sum(a.received for a in log if a.method == "PUT")
            print(json.dumps({"fetched": fetched, "sent": sent, "requests": len(log)}), flush=True)


def _is_shard(name: str, blob: Blob) -> bool:
    return name.endswith(".safetensors") and blob.lfs is not None


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), float(sys.argv[2]))
