"""Whether a calibration that was paused after each layer finds the codes of an undisturbed one.

    python benchmarks/calibrate_paused.py qwen3-30b --layers 3 --device cuda:0
    python benchmarks/calibrate_paused.py small --layers 3 --samples 8 --length 64 --device cpu

The same conversion is made undisturbed, twice, and stopped by `--until` after each layer. For each
layer it prints how many bytes differ between the first two, and between the first and the last; and for
each pause the hash of the hidden states that were kept, which a second paused run must keep too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from calibrate import _devices, _machine, _tokens, _write
from safetensors import safe_open

_MORE = 4  # qconvert's exit code where there is more to do
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PIECE = 1 << 26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", help="qwen3-30b, qwen3.5-35b, deepseek-v3 or small")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("rest", nargs="*", help="more options of qconvert, after --")
    asked = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="qconvert-bench-") as where:
        folder, data = Path(where) / "model", Path(where) / "tokens.safetensors"
        _write(folder, asked.model, asked.layers)
        _tokens(data, folder, asked.samples, asked.length)
        print(_machine(), f"{asked.model}, {asked.samples} x {asked.length} tokens", flush=True)
        options = [
            "--gptq", "--data", str(data), "--samples", str(asked.samples),
            "--length", str(asked.length), *_devices(asked.device), *asked.rest,
        ]  # fmt: skip
        whole = [Path(where) / name for name in ("one", "two")]
        log = Path(where) / "log.jsonl"
        for out in whole:
            _run(folder, out, [*options, "--log-json", str(log)])
            # Over within the first layer: earlier, and a run might end before it calibrates.
            until = f"{_start_up(log) + 2}s"
            log.unlink()
        paused = [Path(where) / name for name in ("paused", "again")]
        kept = [_paused(folder, out, [*options, "--until", until]) for out in paused]
        print("hidden states at each pause:", *_compared(*kept))
        for title, other in (("undisturbed twice", whole[1]), ("paused", paused[0])):
            for layer, kinds in sorted(_differing(whole[0], other).items()):
                shares = ", ".join(f"{kind} {share:.2%}" for kind, share in sorted(kinds.items()))
                print(f"{title}, layer {layer}: {shares}", flush=True)


def _run(folder: Path, out: Path, options: Sequence[str], *allowed: int) -> int:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "qconvert", "w4a16", str(folder), str(out), "-q", *options],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.monotonic() - start
    print(f"{out.name}: exit code {done.returncode} after {seconds:.1f} s", flush=True)
    if done.returncode not in (0, *allowed):
        sys.exit(done.stderr[-3000:])
    return done.returncode


def _start_up(log: Path) -> int:
    """Seconds that pass before the first layer."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return int(next(event["seconds"] for event in events if "attention" in event.get("phase", "")))


def _paused(folder: Path, out: Path, options: Sequence[str]) -> dict[str, str]:
    """Run until it is done, and hash what was kept at pauses, by the name of the file."""
    found: dict[str, str] = {}
    while _run(folder, out, options, _MORE) == _MORE:
        files = sorted(out.parent.glob(f"{out.name}*/**/hidden.*.rows"))
        found.update({file.name: _hash(file) for file in files})
    return found


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:12]


def _compared(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {digest}" + ("" if digest == other.get(name) else f" != {other.get(name)}")
        for name, digest in one.items()
    ]


def _differing(one: Path, other: Path) -> dict[int, dict[str, float]]:
    """By layer and kind of tensor, the part of the bytes that differ."""
    sums: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    for file in sorted(one.glob("*.safetensors")):
        with safe_open(file, "pt") as here, safe_open(other / file.name, "pt") as there:
            for name in here.keys():  # noqa: SIM118 - it is no mapping
                found = _LAYER.search(name)
                if found is None:
                    continue
                pair: list[Any] = [_bytes(opened.get_tensor(name)) for opened in (here, there)]
                total = sums[int(found[1]), name.rpartition(".")[2]]
                total[0] += int(np.count_nonzero(pair[0] != pair[1]))
                total[1] += pair[0].size
    result: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for (layer, kind), (wrong, size) in sums.items():
        if wrong or kind == "weight_packed":
            result[layer][kind] = wrong / size
    return dict(result)


def _bytes(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import torch

    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().view(torch.uint8).numpy()
    return array.reshape(-1)


if __name__ == "__main__":
    main()
