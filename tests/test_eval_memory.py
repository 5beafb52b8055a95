"""Memory: two models, each larger than the budget, are evaluated within it, and depth takes no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import run_cli
from deep_models import write_model

BUDGET = 760 << 20

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from qconvert.checkpoint.open import open_source
from qconvert.evaluate.run import evaluate
from qconvert.samples.data import DataSpec

found = evaluate(open_source(sys.argv[1]), open_source(sys.argv[2]), DataSpec(sys.argv[3], 4, 64),
                 memory=int(sys.argv[4]), devices=["cpu"])
# Not ru_maxrss: that counts what the process was before exec, a copy of the tests' own.
peak = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
print(found.layers, found.logits.kl, int(peak.split()[1]) * 1024)
"""


def child(repo: Path, source: Path, data: Path, budget: int) -> tuple[int, float, int]:
    """Layers, KL, and the process's largest resident size in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(repo), str(source), str(data), str(budget)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(data.parent)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    layers, kl, peak = done.stdout.split()[-3:]
    return int(layers), float(kl), int(peak)


@pytest.mark.big
def test_two_models_larger_than_the_budget(tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    rows = [[(7 * n * m + n) % 512 for n in range(64)] for m in range(1, 5)]
    data.write_text("".join(f'{{"input_ids": {row}}}\n' for row in rows))
    peaks = []
    for layers in (2, 6):
        source, repo = tmp_path / f"{layers}", tmp_path / f"{layers}-int8"
        size = write_model(source, layers)
        done = run_cli("w4a16", source, repo, "--rtn", "--bits", "8", "--group-size", "128")
        assert done.code == 0, done.err
        count, kl, peak = child(repo, source, data, BUDGET)
        assert (count, 0 < kl < 1) == (layers, True)
        peaks.append(peak)
    print(
        f"model {size >> 20} MiB, budget {BUDGET >> 20} MiB, peaks {[p >> 20 for p in peaks]} MiB"
    )
    assert size > BUDGET
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] <= BUDGET
    assert [file.name for file in tmp_path.iterdir() if "qconvert-eval" in file.name] == []
