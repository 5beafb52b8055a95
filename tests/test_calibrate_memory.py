"""Memory: a model four times its budget is calibrated, and depth takes no more of it.

The processes are measured from outside. Most experts are rounded for lack of tokens: what counts is that
they are read, seen and handed in, and four-bit solving of gigabytes takes minutes. Of the rounds of
refitting and of descent there is one each: others take the same memory again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from calibrate_models import llama, saved
from deep_models import EXPERTS, measured, said_by, write_model
from sampled import thinned

from qconvert.calibrate.memory import (
    Budget,
    _solver_bytes,
    experts_together,
    least_bytes,
    solved_together,
    together_on,
)
from qconvert.calibrate.settings import Solver
from qconvert.core.errors import RunError

BUDGET = 840 << 20
# The first stands for the others, a minute each, which `QCONVERT_ALL=1 make check` runs too.
_BEST = [("correct", 120, "int4"), ("correct", 120, "nvfp4"), ("ignore", 100, "int4")]
_BEST = _BEST if os.environ.get("QCONVERT_ALL") else _BEST[:1]

_CHILD = """
import sys
from pathlib import Path
import numpy as np
from qconvert.calibrate.engine import calibrate
from qconvert.calibrate.settings import Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.int_scheme import Nvfp4Scheme
from qconvert.core.int_scheme import IntScheme
from qconvert.plan.plan import Plan

count = 0
plan = Plan.identity(Checkpoint.open(Path(sys.argv[1])))
tokens = [np.random.default_rng(n).integers(0, 512, 64) for n in range(4)]
settings = Settings(min_tokens=int(sys.argv[4]), undersampled="rtn", solver=sys.argv[5],
                    propagated_error=sys.argv[6], refit=1, descent=1)
scheme = Nvfp4Scheme("modelopt") if sys.argv[7] == "nvfp4" else IntScheme(4, 128)
for event in calibrate(plan, tokens, [scheme], settings, work_dir=Path(sys.argv[2]),
                       memory=int(sys.argv[3]), key="k"):
    if isinstance(event, Matrix):
        assert event.codes[0].codes.any()
        count += 1
    del event
print(count)
"""


def child(folder: Path, room: Path, budget: int, min_tokens: int, solver: str,
          propagated_error: str = "ignore", scheme: str = "int4") -> tuple[int, int]:  # fmt: skip
    """Matrices handed in, and the process's largest resident size in bytes."""
    said = said_by(_CHILD, folder, room, budget, min_tokens, solver, propagated_error, scheme)
    return int(said[-2]), int(said[-1])


@pytest.mark.parametrize(
    ("deep", "budgets"),
    [pytest.param(6, 1, marks=pytest.mark.big), pytest.param(24, 4, marks=pytest.mark.rest)],
)
def test_depth_takes_no_memory(deep: int, budgets: int, tmp_path: Path) -> None:
    """Of a model that is larger than what may be taken, or four times as large."""
    peaks, sizes = [], []
    for layers in (2, deep):
        sizes.append(write_model(tmp_path / f"{layers}", layers))
        count, peak = child(
            tmp_path / f"{layers}", tmp_path / f"room{layers}", BUDGET, 60, "llmcompressor"
        )
        assert count == layers * EXPERTS * 3
        peaks.append(peak)
    print(
        f"model {sizes[1] >> 20} MiB, budget {BUDGET >> 20} MiB, peaks {[p >> 20 for p in peaks]} MiB"
    )
    assert sizes[1] > budgets * BUDGET
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] <= BUDGET


@pytest.mark.big
@pytest.mark.parametrize(("propagated_error", "more", "scheme"), _BEST)
def test_the_best_solver_keeps_to_its_budget(
    propagated_error: str, more: int, scheme: str, tmp_path: Path
) -> None:
    """A layer in which some experts are solved: all would take minutes. Copies take 100 MB more, what is
    corrected and solved against 20."""
    write_model(tmp_path / "model", 1)
    budget = BUDGET + (more << 20)
    asked = (propagated_error, scheme)
    count, peak = child(tmp_path / "model", tmp_path / "room", budget, 20, "best", *asked)
    print(f"peak {peak >> 20} MiB of {budget >> 20}")
    assert count == EXPERTS * 3
    assert peak <= budget


def together(memory: int, **over: Any) -> int:
    given: dict[str, Any] = {
        "hidden": 7168, "middle": 2048, "own_hessians": True, "schemes": 1, "together": 32,
        "layer_bytes": 1 << 29, "solver": "best", "chunk": 2048, **over,
    }  # fmt: skip
    return experts_together(Budget(memory, 1 << 30, {"cpu": memory >> 2}, 0), "cpu", **given)


def test_groups_grow_with_the_budget_and_without_hessians_of_their_own() -> None:
    """An expert of DeepSeek-V3 is 88 MB, its Hessians 222 MB: 64 GiB hold some 140 of them."""
    some = together(64 << 30)
    assert 120 < some < 160
    assert together(32 << 30) < some < together(128 << 30)
    assert together(64 << 30, own_hessians=False) > 2 * some


def test_either_solver_is_counted() -> None:
    """Matrices [4096, 7168] and [7168, 2048]: a Hessian's copies take 206 MB each, a thousand rows in
    float32 29 MB, the whole 117 MB. The best solver keeps more Hessians, and fewer rows."""
    cases: list[tuple[Solver, int, int]] = [("llmcompressor", 1000, 1300), ("best", 1500, 2500)]
    for solver, least, most in cases:
        assert least < _solver_bytes(7168, 2048, 1, solver) >> 20 < most
        assert least_bytes(7168, 2048, 1, solver) > _solver_bytes(7168, 2048, 1, solver)
        pair = _solver_bytes(7168, 2048, 1, solver, (2, 2), "cuda:0")
        assert pair > _solver_bytes(7168, 2048, 1, solver)


# Hidden sizes and experts' widths.
_SHAPES = {
    "Qwen3-30B": (2048, 768), "Qwen3-235B": (4096, 1536), "DeepSeek-V3": (7168, 2048),
    "Mixtral": (4096, 14336), "Jamba": (8192, 24576),
}  # fmt: skip


@pytest.mark.parametrize("solver", ["best", "llmcompressor"])
def test_experts_solved_together_leave_room_for_others(solver: Solver) -> None:
    """On GPUs of 24 to 192 GB, of which experts have half: the more memory, the more of them; never more
    than take three tenths of it, whichever matrix is solved, unless it is one."""
    corrects = solver == "best"
    for hidden, middle in _SHAPES.values():
        before = 0
        for size in (24, 48, 80, 141, 192):
            device = size * 10**9 // 2
            found = together_on(
                device,
                32,
                hidden=hidden,
                middle=middle,
                schemes=1,
                solver=solver,
                corrects=corrects,
            )
            assert before <= found <= 32
            before = found
            batches = solved_together(found, hidden), solved_together(found, middle)
            need = _solver_bytes(hidden, middle, 1, solver, batches, "cuda", corrects=corrects)
            assert max(batches) == 1 or need <= 0.3 * device


def test_experts_solved_together_are_known_of_published_models() -> None:
    """With the correction of propagated errors, of an H100 and an H200."""

    def of(name: str, device: int) -> int:
        hidden, middle = _SHAPES[name]
        return together_on(
            device, 32, hidden=hidden, middle=middle, schemes=1, solver="best", corrects=True
        )

    h100, h200 = 42_500_000_000, 75_300_000_000
    assert [of("Qwen3-30B", one) for one in (h100, h200)] == [32, 32]
    assert [of("DeepSeek-V3", one) for one in (h100, h200)] == [2, 4]


def test_experts_of_an_accelerator_are_as_many_as_it_holds() -> None:
    """An H100 has 42.5 GB for DeepSeek-V3's experts, of which each takes .6, and what tokens do not take
    of 29.8. Of a million of these the quantized stream's inputs lie there, and the others come from the
    host: 63 experts at a time. The more come from there, the fewer; of many tokens no fewer."""
    states = 29_750_000_000 - 15_032_385_536
    budget = Budget(150 << 30, 1 << 30, {"cuda": 0}, 42_500_000_000)

    def of(budget: Budget, **over: Any) -> int:
        given: dict[str, Any] = {
            "hidden": 7168, "middle": 2048, "own_hessians": True, "schemes": 1, "together": 2,
            "layer_bytes": 600 << 20, "solver": "best", "chunk": 262_144, "most": 37_376,
            "corrects": True, "hosted": 1, **over,
        }  # fmt: skip
        return experts_together(budget, "cuda", **given)

    whole = of(budget.with_rest("cuda", states))
    assert 60 <= whole <= 66
    assert of(budget) < whole - 20
    assert of(budget.with_rest("cuda", states), hosted=2) < whole
    assert of(budget.with_rest("cuda", states), chunk=300_000) > whole - 4
    assert budget.with_rest("cpu", states) == budget
    # What is lent takes the place of an expert's own Hessians, or is counted.
    assert of(budget, receives=True) == of(budget)
    every = {"own_hessians": False, "layer_bytes": 0}
    assert of(budget, receives=True, **every) < 0.75 * of(budget, **every)


def test_what_corrects_is_counted() -> None:
    """Of DeepSeek-V3's experts: a copy of 88 MB, and beside the Hessian of gate and up, 206 MB, another
    matrix of its size; down's, 17 MB, come after those are gone. What is solved against is 117 MB, and
    again where matrices are stacked, which else is half of that."""
    known = [
        least_bytes(7168, 2048, 1, "best", corrects=corrects) >> 20 for corrects in (False, True)
    ]
    assert 400 < known[1] - known[0] < 550
    assert together(64 << 30, corrects=True) < 0.75 * together(64 << 30)
    for own in (True, False):
        some = together(64 << 30, corrects=True, own_hessians=own)
        assert together(32 << 30, corrects=True, own_hessians=own) < some


def test_less_than_one_expert_is_refused() -> None:
    with pytest.raises(RunError, match="one expert with its Hessians"):
        together(2 << 30)


# --- Linears -----------------------------------------------------------------------------------------

_LINEARS = """
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
print(count, len(made[0]))
"""


@pytest.mark.big
@pytest.mark.parametrize("solver", thinned(["best", "llmcompressor"], 2))
def test_the_smallest_budget_of_linears_is_kept_to(solver: str, tmp_path: Path) -> None:
    """The one that a refusal names, with Hessians that are counted some at a time. A layer whose o_proj
    and down_proj have a Hessian of 21 MB each, of which a solver has several; two of them, because what
    libraries take differs by 14 MiB between processes: a budget that the first one names may have that
    much to spare in the second."""
    config = llama(
        num_hidden_layers=1, hidden_size=384, intermediate_size=2304, head_dim=144,
        num_attention_heads=16, num_key_value_heads=1,
    )  # fmt: skip
    folder = saved(config, tmp_path / "model")
    refused = measured(_LINEARS, folder, tmp_path / "none", 1 << 20, solver)
    told = re.search(r"give --memory (\d+)MiB", refused.stderr)
    assert told is not None, refused.stderr[-2000:]
    budget = int(told[1]) << 20
    said = said_by(_LINEARS, folder, tmp_path / "room", budget, solver)
    count, rounds, peak = map(int, said[-3:])
    print(f"{rounds} rounds, peak {peak >> 20} MiB of {budget >> 20}")
    assert count == 7
    assert rounds > 1
    assert peak <= budget
