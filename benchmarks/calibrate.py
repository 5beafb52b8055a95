"""How long full-size layers take to calibrate, by the whole command, and where the time goes.

    python benchmarks/calibrate.py qwen3-30b --layers 4 [--solver llmcompressor] [--device cuda:0]
    python benchmarks/calibrate.py qwen3.5-35b --samples 512
    python benchmarks/calibrate.py deepseek-v3 --layers 3 --samples 512
    python benchmarks/calibrate.py qwen3-30b --oneshot          # llm-compressor beside it, in this run
    python benchmarks/calibrate.py small --layers 3 --samples 8 --length 64 --device cpu

`qconvert w4a16 --gptq` of a few layers of a published model (full_size.py), groups of 128, tokens
at random. Start-up is what passes before the first layer's attention, a layer what passes between
two of those; the first layer is told apart, because it loads kernels. With --oneshot llm-compressor
quantizes the same checkpoint with the same tokens, and its seconds a layer are printed beside.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

_ATTENTION = re.compile(r"calibrating layer (\d+) of \d+: attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", help="qwen3-30b, qwen3.5-35b, deepseek-v3 or small")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--solver", action="append", default=[], help="both, if not given")
    parser.add_argument("--oneshot", action="store_true", help="llm-compressor too")
    parser.add_argument("--folder", type=Path, help="keep the model there, or take it from there")
    parser.add_argument("rest", nargs="*", help="more options of qconvert, after --")
    asked = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory(prefix="qconvert-bench-") as where:
        folder = asked.folder or Path(where) / "model"
        if not folder.exists():
            start = time.monotonic()
            size = _write(folder, asked.model, asked.layers)
            print(f"model of {size / 1e9:.1f} GB written in {time.monotonic() - start:.0f} s")
        data = Path(where) / "tokens.safetensors"
        tokens = _tokens(data, folder, asked.samples, asked.length)
        print(_machine(), f"{asked.model}, {asked.samples} x {asked.length} tokens", flush=True)
        found: dict[str, float] = {}
        for solver in asked.solver or ["llmcompressor", "best"]:
            options = [*_devices(asked.device), "--solver", solver, *asked.rest]
            found[solver] = _ours(folder, Path(where), data, asked.samples, asked.length, options)
        if asked.oneshot:
            from calibrate_oneshot import oneshot

            took = oneshot(folder, tokens, asked.length)
            each = statistics.median(took[1:] or took)
            print(f"oneshot: layers {_listed(took)}; {each:.1f} s a layer", flush=True)
            for solver, seconds in found.items():
                print(f"  {each / seconds:.1f} x qconvert's {solver}")


def _write(folder: Path, name: str, layers: int) -> int:
    from full_size import MODELS, write

    if name not in MODELS:
        sys.exit(f"no model {name!r}; there are {', '.join(MODELS)}")
    return write(folder, MODELS[name](layers))


def _tokens(file: Path, folder: Path, samples: int, length: int) -> np.ndarray[Any, Any]:
    from safetensors.numpy import save_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = np.random.default_rng(0).integers(0, config["vocab_size"], (samples, length))
    save_file({"input_ids": made}, file)
    return made


def _machine() -> str:
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__},"


def _devices(names: Sequence[str]) -> list[str]:
    return [part for name in names for part in ("--device", name)]


def _ours(
    folder: Path, where: Path, data: Path, samples: int, length: int, options: Sequence[str]
) -> float:
    """Run the command. Returns seconds a layer."""
    log, out = where / "log.jsonl", where / "out"
    log.unlink(missing_ok=True)
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-m", "qconvert", "w4a16", str(folder), str(out), "--gptq",
            "--data", str(data), "--samples", str(samples), "--length", str(length),
            "--log-json", str(log), "--profile", *options,
        ],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    took = time.monotonic() - start
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    shutil.rmtree(out)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    begun = {
        int(found[1]): event["seconds"]
        for event in events
        if event["event"] == "phase" and (found := _ATTENTION.match(event["phase"]))
    }
    before = took - events[-1]["seconds"]  # imports and the plan, before the log
    times = [begun[n] for n in sorted(begun)] + [events[-1]["seconds"]]
    layers = [b - a for a, b in pairwise(times)]
    each: float = statistics.median(layers[1:] or layers)
    print(f"{' '.join(options)}: {took:.1f} s; start-up {before + times[0]:.1f} s, layers "
          f"{_listed(layers)}; {each:.2f} s a layer")  # fmt: skip
    work: Mapping[str, Any] = events[-1].get("work", {})
    for kind, one in sorted(work.items()):
        print(f"  {kind:<8} {one['seconds'] / len(layers):7.2f} s a layer")
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"  host memory of its largest process {most / 1e6:.1f} GB")
    said = (done.stdout + done.stderr).splitlines()
    print("\n".join(f"  {line}" for line in said[-45:]), flush=True)
    return each


def _listed(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds)


if __name__ == "__main__":
    main()
