"""What planning, `advise` and `validate` take by headers: CPU seconds and peak memory, on one core.

    python benchmarks/planning.py [--runs 3] [--against CHECKOUT] [--only kimi] [--folder DIR]

Sources are headers of full size over holes (tests/headers, tests/families/published). Each command is
a process of its own, compiled before, and a plan has `--dry-run --jobs 1`; --against runs the same
commands with the code of another checkout, in turn with those of this one. Medians of CPU seconds (user
and system), most of the peaks (VmHWM).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from qconvert.core.dtypes import TensorType

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import headers
from headers import HeaderSet

_ROOT = Path(__file__).parent.parent
_PUBLISHED = _ROOT / "tests" / "families" / "published"
_AMX = ("--method", "int4", "--numa", "2")
_COMMANDS = {
    "kimi-k2 amx": ("kimi-k2", "amx", *_AMX),
    "kimi-k2 kt": ("kimi-k2", "kt", "--cpu", "int4", "--numa", "2"),
    "kimi-k2 dequant": ("kimi-k2", "dequant"),
    "deepseek-v3 amx": ("deepseek-v3", "amx", *_AMX),
    "deepseek-v3 dequant": ("deepseek-v3", "dequant"),
    "deepseek-v3 w4a16 --rtn": ("deepseek-v3", "w4a16", "--rtn"),
    "deepseek-v3 advise": ("deepseek-v3", "advise", "--for", "sglang"),
    "deepseek-v3 validate": ("deepseek-v3", "validate", "--level", "headers"),
    "qwen3-235b w4a16 --rtn": ("qwen3-235b", "w4a16", "--rtn"),
    "qwen3-235b nvfp4": ("qwen3-235b", "nvfp4", "--dialect", "modelopt"),
}
# The command line on a disk that holds any model; what it took goes to a file.
_RUN = """
import atexit, os, re, resource, sys, types
from pathlib import Path
os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1 << 40, f_frsize=4096)
took = Path(sys.argv.pop(1))
def end():
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    took.write_text(f"{sum(each.ru_utime + each.ru_stime for each in usage)} {peak}")
atexit.register(end)
from qconvert.__main__ import main
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="commands that begin so")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    asked = parser.parse_args()
    trees = [_ROOT, *([asked.against] if asked.against else [])]
    room = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        print(f"{'':<26}{'tensors':>9}" + f"{'CPU s':>8}{'us each':>9}{'MB':>6}" * len(trees))
        for label, (model, command, *options) in _COMMANDS.items():
            if not label.startswith(asked.only):
                continue
            source, tensors = _source(model, room)
            words: list[str | Path] = [command, source, *options]
            if command not in ("advise", "validate"):
                out = ["--cpu-out", room / "out"] if command == "kt" else [room / "out"]
                words = [command, source, *out, *options, "--dry-run", "--jobs", "1"]
            taken = [[_taken(tree, words, room) for tree in trees] for _ in range(asked.runs)]
            line = f"{label:<26}{tensors:>9,}"
            for each in zip(*taken, strict=True):
                cpu = statistics.median(seconds for seconds, _ in each)
                peak = max(size for _, size in each)
                line += f"{cpu:>8.2f}{cpu / tensors * 1e6:>9.0f}{peak / 1024:>6.0f}"
            print(line, flush=True)
    finally:
        shutil.rmtree(room)


def _source(model: str, room: Path) -> tuple[Path, int]:
    folder = room / model
    found = _headers(model)
    if not folder.exists():
        folder.mkdir()
        headers.write_sparse(found, folder)
    return folder, len(found.tensors)


def _headers(model: str) -> HeaderSet:
    if model != "qwen3-235b":
        file = _PUBLISHED / f"{model}.yaml"
        return headers.read(file) if file.exists() else headers.load(model)
    # The BF16 model has the names of the FP8 one, without its scales.
    coded = headers.read(_PUBLISHED / "qwen3-235b-fp8.yaml")
    config = {key: value for key, value in coded.config.items() if key != "quantization_config"}
    tensors = {
        name: TensorType("BF16", kind.shape) if kind.dtype == "F8_E4M3" else kind
        for name, kind in coded.tensors.items()
        if not name.endswith("_scale_inv")
    }
    return replace(coded, config=config, tensors=tensors, shards=118)


def _taken(tree: Path, words: list[str | Path], room: Path) -> tuple[float, int]:
    """CPU seconds, and the peak in KiB."""
    took = room / "took"
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(room / "bytecode")}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, took, *map(str, words)],
        cwd=tree, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stderr}")
    seconds, peak = took.read_text().split()
    return float(seconds), int(peak)


if __name__ == "__main__":
    main()
