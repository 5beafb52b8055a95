"""What a run costs beside its units: checks, batches, journal, syncs, receipt and renames, by tensor.

    python benchmarks/overhead.py [--tensors 20000] [--shards 4] [--ray] [--folder DIR]

A checkpoint of small tensors is copied by one process, and by shards one after another with `finish`
at the end. Of each the wall time of the run (after planning) less the time in its units, divided by
the tensors; of shards the mean, as they would run at the same time. Units run in this process (one
job), so that their time can be measured. With --ray also one worker of a Ray cluster on this machine:
the time of its units is taken for that of the first line, and its start is in the wall time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from qconvert import api
from qconvert.checkpoint.safetensors import build_header
from qconvert.core.dtypes import TensorType
from qconvert.run.engines.ray import connected
from qconvert.run.work.unit_runner import UnitRunner

_SIZE = TensorType("BF16", (64, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        source = _written(root / "source", asked.tensors)
        print(f"{'run':<12} {'wall s':>7} {'units s':>8} {'us a tensor':>12}")
        alone = _timed(source, root / "one")
        _show("one process", alone, asked.tensors)
        parts = [
            _timed(source, root / "out", shard=f"{n}/{asked.shards}") for n in range(asked.shards)
        ]
        walls, units = (sum(column) / asked.shards for column in zip(*parts, strict=True))
        _show(f"of {asked.shards} shards", (walls, units), asked.tensors)
        _show("finish", _timed(source, root / "out", finish=True), asked.tensors)
        if asked.ray:
            with connected("local"):
                wall, _ = _timed(source, root / "ray", engine="ray")
            _show("ray", (wall, alone[1]), asked.tensors)
    finally:
        shutil.rmtree(root)


def _written(folder: Path, tensors: int) -> Path:
    folder.mkdir()
    names = [f"model.layers.{n}.weight" for n in range(tensors)]
    header, _ = build_header([(name, _SIZE) for name in names], {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + tensors * _SIZE.nbytes)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"}), encoding="utf-8")
    return folder


def _timed(source: Path, out: Path, **options: Any) -> tuple[float, float]:
    """Wall seconds of a run, and those in its units."""
    spent = 0.0
    real = UnitRunner.run

    def run(self: UnitRunner, *arguments: Any) -> Any:
        nonlocal spent
        begin = time.perf_counter()
        try:
            return real(self, *arguments)
        finally:
            spent += time.perf_counter() - begin

    planned = api.plan("copy", source, out, jobs=1, **options)
    UnitRunner.run = run  # type: ignore[method-assign, assignment]
    try:
        begin = time.perf_counter()
        api.carry_out(planned)
        return time.perf_counter() - begin, spent
    finally:
        UnitRunner.run = real  # type: ignore[method-assign]


def _show(name: str, timed: tuple[float, float], tensors: int) -> None:
    wall, units = timed
    print(f"{name:<12} {wall:>7.2f} {units:>8.2f} {(wall - units) / tensors * 1e6:>12.0f}")


if __name__ == "__main__":
    main()
