"""`split --balance`: stages cut so that the fullest one holds least."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from checkpoints import ran, run_cli
from hypothesis import given
from hypothesis import strategies as st
from loaders.published import published

from qconvert.runtimes.pipeline import StageWeights, balanced, default_partition

SIZES = st.integers(0, 12)


@st.composite
def models(draw: st.DrawFn) -> StageWeights:
    layers = tuple(draw(st.lists(SIZES, min_size=1, max_size=9)))
    stages = draw(st.integers(1, len(layers)))
    return StageWeights(layers, tuple(draw(st.lists(SIZES, min_size=stages, max_size=stages))))


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    found = []
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (*cuts, layers)
        found.append(tuple(b - a for a, b in zip((0, *cuts), ends, strict=True)))
    return found


@given(models())
def test_no_other_cut_is_better(weights: StageWeights) -> None:
    """The least maximum of all contiguous cuts, and of those the least sum of squares."""
    cut = balanced(weights)
    assert cut.held == weights.held(cut.partition)
    assert sum(cut.held) == sum(weights.layers) + sum(weights.beside)
    held = [weights.held(one) for one in every_cut(len(weights.layers), len(weights.beside))]
    best = min((max(one), sum(size * size for size in one)) for one in held)
    assert (cut.fullest, sum(size * size for size in cut.held)) == best


@given(models())
def test_it_is_no_worse_than_what_a_runtime_does(weights: StageWeights) -> None:
    for runtime in ("sglang", "vllm"):
        usual = default_partition(len(weights.layers), len(weights.beside), runtime)
        assert balanced(weights).fullest <= max(weights.held(usual))


def test_deepseek_v3_in_four_stages() -> None:
    """Sizes like its own: three dense layers, then 58 with experts, and a draft in the last stage."""
    weights = StageWeights((1,) * 3 + (11,) * 58, (2, 0, 0, 15))
    cut = balanced(weights)
    assert cut.partition == (17, 15, 15, 14)
    assert (max(weights.held((15, 15, 15, 16))), cut.fullest) == (191, 169)


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_stages_hold_what_was_counted(family: str, runtime: str, tmp_path: Path) -> None:
    source = published(family).write(tmp_path / "source")
    words: list[str | Path] = ["split", source, tmp_path / "out", "--pp", "2", "--for", runtime]
    words.append("--balance")
    planned = json.loads(run_cli(*words, "--dry-run", "--json").out)
    assert list(tmp_path.iterdir()) == [source]
    balance = planned["balanced"]
    assert balance["partition"] == planned["partition"]
    assert [stage["bytes"] for stage in planned["stages"]] == balance["bytes"]
    assert max(balance["bytes"]) <= max(planned["unbalanced"]["bytes"])
    done = ran(*words, "--jobs", "1")
    sizes = ",".join(map(str, balance["partition"]))
    assert done.out.splitlines()[-1] == f"set {runtime.upper()}_PP_LAYER_PARTITION={sizes}"
    assert f"balanced {sizes}: " in done.err


def test_a_head_that_every_stage_builds_is_counted(tmp_path: Path) -> None:
    """sglang's class of Qwen3-MoE has one in each stage, and reads it in the last."""
    model = published("qwen3_moe")
    words: list[str | Path] = ["split", model.write(tmp_path / "source"), tmp_path / "out"]
    words += ["--pp", "2", "--balance", "--dry-run"]
    head = len(model.tensors["lm_head.weight"].data)
    for runtime, more in (("sglang", head), ("vllm", 0)):
        planned = json.loads(run_cli(*words, "--for", runtime, "--json").out)
        counted = planned["balanced"]["bytes"][0]
        assert counted == planned["stages"][0]["bytes"] + more


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pp", "1,1", "--for", "sglang"], "--balance chooses the layers of each stage"),
        (["--pp", "2"], "runtimes split differently"),
    ],
)
def test_it_needs_a_number_of_stages_and_a_runtime(
    words: list[str], said: str, tmp_path: Path
) -> None:
    source = published("qwen3_moe").write(tmp_path / "source")
    done = run_cli("split", source, tmp_path / "out", "--balance", *words)
    assert (done.code, said in done.err) == (2, True), done.err
