"""Memory: three models, each larger than the budget, are evaluated within it, and depth takes no more.

The budget is the one that a refusal names, because what libraries take depends on which of them
transformers finds installed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoints import ran
from deep_models import measured, said_by, write_model

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from qconvert.checkpoint.open import open_source
from qconvert.evaluate.engine import evaluate
from qconvert.samples.data import DataSpec

*repos, source = (open_source(folder) for folder in sys.argv[1:4])
found = evaluate(repos, source, DataSpec(sys.argv[4], 4, 64), memory=int(sys.argv[5]), devices=["cpu"])
print(found.layers, found.logits.kl, found.beside[0].logits.kl)
"""


@pytest.mark.big
def test_models_larger_than_the_budget(tmp_path: Path) -> None:
    data = tmp_path / "ids.jsonl"
    rows = [[(7 * n * m + n) % 512 for n in range(64)] for m in range(1, 5)]
    data.write_text("".join(f'{{"input_ids": {row}}}\n' for row in rows))
    peaks = []
    for layers in (2, 6):
        source = tmp_path / f"{layers}"
        size = write_model(source, layers)
        repos = [tmp_path / f"{layers}-int{bits}" for bits in (4, 8)]
        for repo, bits in zip(repos, ("4", "8"), strict=True):
            ran("w4a16", source, repo, "--rtn", "--bits", bits, "--group-size", "128")
        if layers == 2:
            refused = measured(_CHILD, *repos, source, data, 1 << 20, TMPDIR=str(data.parent))
            enough = re.search(r"give --memory (\d+)MiB", refused.stderr)
            assert enough is not None, refused.stderr[-2000:]
            budget = int(enough[1]) << 20
        said = said_by(_CHILD, *repos, source, data, budget, TMPDIR=str(data.parent))
        count, *kls, peak = said[-4:]
        int4, int8 = map(float, kls)
        assert (int(count), 0 < int8 < int4 < 1) == (layers, True)
        peaks.append(int(peak))
    print(
        f"model {size >> 20} MiB, budget {budget >> 20} MiB, peaks {[p >> 20 for p in peaks]} MiB"
    )
    assert size > budget
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] <= budget
    assert [file.name for file in tmp_path.iterdir() if "qconvert-eval" in file.name] == []
