"""Memory of calibrated linears: the smallest budget that a refusal names is enough, and is kept to, with
Hessians that are counted some at a time. The processes are measured from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from calibrate_models import llama, saved
from sampled import thinned

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from qconvert.calibrate import linears
from qconvert.calibrate.engine import calibrate
from qconvert.calibrate.settings import Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.int_scheme import IntScheme
from qconvert.models.linears import quantizable
from qconvert.plan.plan import Plan

made = []
real = linears.rounds
linears.rounds = lambda *a, **n: made.append(real(*a, **n)) or made[-1]
count = 0
plan = Plan.identity(Checkpoint.open(Path(sys.argv[1])))
asked = {module: [IntScheme(4, 128)] for module, _ in quantizable(plan, ())}
tokens = [np.random.default_rng(n).integers(0, 300, 64) for n in range(4)]
for event in calibrate(plan, tokens, [], Settings(solver=sys.argv[4], refit=1, descent=1),
                       work_dir=Path(sys.argv[2]), memory=int(sys.argv[3]), key="k", linears=asked):
    if isinstance(event, Matrix):
        assert event.codes[0].codes.any()
        count += 1
    del event
# Not ru_maxrss: that counts what the process was before exec, a copy of the tests' own.
peak = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
print(count, len(made[0]), int(peak.split()[1]) * 1024)
"""


def child(folder: Path, room: Path, budget: int, solver: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _CHILD, str(folder), str(room), str(budget), solver],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.big
@pytest.mark.parametrize("solver", thinned(["best", "llmcompressor"], 2))
def test_the_smallest_budget_is_kept_to(solver: str, tmp_path: Path) -> None:
    """A layer whose o_proj and down_proj have a Hessian of 21 MB each, of which a solver has several.
    Two of them, because what libraries take differs by 14 MiB between processes: a budget that the
    first one names may have that much to spare in the second."""
    config = llama(
        num_hidden_layers=1, hidden_size=384, intermediate_size=2304, head_dim=144,
        num_attention_heads=16, num_key_value_heads=1,
    )  # fmt: skip
    folder = saved(config, tmp_path / "model")
    refused = child(folder, tmp_path / "none", 1 << 20, solver)
    told = re.search(r"give --memory (\d+)MiB", refused.stderr)
    assert told is not None, refused.stderr[-2000:]
    budget = int(told[1]) << 20
    done = child(folder, tmp_path / "room", budget, solver)
    assert done.returncode == 0, done.stderr[-2000:]
    count, rounds, peak = map(int, done.stdout.split()[-3:])
    print(f"{rounds} rounds, peak {peak >> 20} MiB of {budget >> 20}")
    assert count == 7
    assert rounds > 1
    assert peak <= budget
