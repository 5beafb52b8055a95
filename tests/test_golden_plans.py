"""What `qconvert plan` prints for published models, as text files: a change of plan shows as a diff.

QCONVERT_UPDATE_PLANS=1 pytest -m '' tests/test_golden_plans.py writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import headers
import pytest
from headers import HeaderSet
from sampled import thinned

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.plan_report import Rates, plan_lines
from qconvert.plan.plan import Plan, run_passes
from qconvert.recipe.recipe import load_recipe
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.options import RunOptions

_FOLDER = Path(__file__).parent / "plans"
_CASES = [
    ("deepseek-v3", "dequant-fp8"),
    ("deepseek-v3", "dequant-fp8-no-mtp"),
    ("qwen3-30b-a3b-fp8", "dequant-fp8"),
    ("qwen3-next-80b-a3b-fp8", "dequant-fp8"),
    ("qwen3.5-27b-fp8", "dequant-fp8"),
    ("qwen3.5-35b-a3b-fp8", "dequant-fp8"),
    ("qwen3.5-35b-a3b", "copy"),
    ("deepseek-v3", "deepseek-v3-amxint4-2numa"),
    ("qwen3-next-80b-a3b", "qwen3-next-amxint8"),
    ("qwen3.5-35b-a3b", "qwen3.5-moe-amxint4"),
    ("glm-4.5-air", "glm-4.5-amxint8"),
    ("deepseek-v3", "deepseek-v3-w4a16"),
    ("glm-4.5-air", "glm-4.5-air-w4a16-tp4"),
    ("glm-4.5-air", "glm-4.5-air-gptq"),
    ("qwen3.5-35b-a3b", "qwen3.5-moe-nvfp4"),
    ("deepseek-v3", "deepseek-v3-nvfp4"),
]


@pytest.mark.big
@pytest.mark.parametrize(("model", "recipe"), thinned(_CASES, 2))
def test_plan(model: str, recipe: str, tmp_path: Path) -> None:
    """As published: up to 92,000 tensors."""
    is_golden(headers.load(model), model, recipe, tmp_path)


@pytest.mark.parametrize(("model", "recipe"), _CASES)
def test_plan_of_few_experts(model: str, recipe: str, tmp_path: Path) -> None:
    found = headers.few(model)
    named = model if found is headers.load(model) else f"{model}-few"
    is_golden(found, named, recipe, tmp_path)


def is_golden(found: HeaderSet, model: str, recipe: str, folder: Path) -> None:
    headers.write_sparse(found, folder)
    plan = run_passes(Plan.identity(Checkpoint.open(folder)), load_recipe(recipe).passes)
    with pytest.MonkeyPatch.context() as patch:
        # The memory shown is the same whether numba is installed or not.
        patch.setenv("QCONVERT_KERNELS", "numpy")
        ready = prepare(plan, RunOptions(memory=1 << 30, jobs=2))
    text = "\n".join(plan_lines(ready, None, Rates(None, None))).replace(str(folder), model) + "\n"
    golden = _FOLDER / f"{model}.{recipe}.txt"
    if os.environ.get("QCONVERT_UPDATE_PLANS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40, "a plan fits a screen"
