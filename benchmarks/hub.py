"""A conversion by id against a plain download of the same repo, from a Hub on the loopback that is held
to so many MB/s: seconds, bytes fetched against bytes needed, the largest disk.

    .venv/bin/python benchmarks/hub.py --layers 8 --runs 3
    .venv/bin/python benchmarks/hub.py --smallest      checks that it runs

Contenders run in turn: `download` is the client's own snapshot_download into an empty
cache, `convert` the command by id into a folder, from an empty cache. Bytes needed are those of the
tensors; disk is what lies in the folder and in the caches, sampled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from data import bf16_moe, qwen3_moe, write_checkpoint
from hub_serving import DOWNLOAD, REPO, serving

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


def measure(case: str, layers: int, experts: int, runs: int, rate: float) -> list[Measured]:
    """Contenders in turn. The source is written, and removed, here."""
    model, (command, *options) = _CASES[case]
    found = []
    with tempfile.TemporaryDirectory(prefix="qconvert-bench-") as scratch:
        source = Path(scratch) / "source"
        write_checkpoint(source, model(layers, experts))
        needed = tensor_bytes(source)
        with serving(source, rate) as hub:
            for number in range(runs):
                for what in ("download", "convert"):
                    place = Path(scratch) / f"{what}{number}"
                    place.mkdir()
                    words = [sys.executable, "-c", DOWNLOAD, REPO]
                    if what == "convert":
                        out = str(place / "out")
                        words = [sys.executable, "-m", "qconvert", command, REPO, out, *options]
                    one = hub.timed(words, place)
                    went = one.traffic
                    found.append(Measured(what, one.seconds, went.fetched, went.requests, one.disk))
                    print(
                        f"{what:<9} {one.seconds:6.1f} s  {went.fetched / needed:7.4f} of the bytes "
                        f"needed, {went.requests} requests, disk {one.disk / 1e9:.2f} GB",
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
    given = parser.parse_args()
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
