"""A conversion that goes to the Hub while it is made, against plain transfers of the same bytes, with
a Hub on the loopback that is held to so many MB/s each way: seconds, bytes sent, the largest disk.

    .venv/bin/python benchmarks/hub_stream.py --layers 8 --runs 3
    .venv/bin/python benchmarks/hub_stream.py --from hub      the source by id, too
    .venv/bin/python benchmarks/hub_stream.py --smallest      checks that it runs

Contenders run in turn: `download` of the source and `upload` of the finished
folder, both by the client alone, and `stream`: the command with --disk-budget of a part of the source.
What arrived is compared with the folder of a local run by `qconvert diff`. Disk is what lies below the
run's folders, caches included, sampled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from data import bf16_moe, qwen3_moe, write_checkpoint
from hub_serving import DOWNLOAD, REPO, serving

_UPLOADED, _STREAMED = "me/uploaded", "me/streamed"
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
        named = ["--base-model", REPO] if by_id else []  # what a card says of its source
        words = [*run, str(source), str(local), *options, *named]
        subprocess.run(words, check=True, capture_output=True)
        with serving(source, rate) as hub:
            commands = {
                "download": [sys.executable, "-c", DOWNLOAD, REPO],
                "upload": [sys.executable, "-c", _UPLOAD, str(local), _UPLOADED],
            }
            for number in range(runs):
                for what in ("download", "upload", "stream"):
                    place = Path(scratch) / f"{what}{number}"
                    place.mkdir()
                    commands["stream"] = [
                        *run, REPO if by_id else str(source), f"hf://{_STREAMED}", *options,
                        "--disk-budget", str(budget), "--work-dir", str(place / "work"),
                    ]  # fmt: skip
                    hub.traffic(forget=True)
                    one = hub.timed(commands[what], place)
                    went, same = one.traffic, None
                    if what == "stream":
                        check = [sys.executable, "-m", "qconvert", "diff", str(local)]
                        compared = subprocess.run(
                            [*check, f"hf://{_STREAMED}"], env=hub.environment(place),
                            capture_output=True, text=True, check=False,
                        )  # fmt: skip
                        same = compared.returncode == 0
                        print(compared.stdout.strip().splitlines()[-1])
                    found.append(
                        Measured(what, one.seconds, went.sent, went.fetched, one.disk, same)
                    )
                    print(
                        f"{what:<9} {one.seconds:6.1f} s  sent {went.sent / 1e9:.2f} GB, fetched "
                        f"{went.fetched / 1e9:.2f} GB, disk {one.disk / 1e9:.3f} GB",
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
    given = parser.parse_args()
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
