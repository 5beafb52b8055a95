"""A pass of a manifest as a line of a recipe: read again as a recipe it is the pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoints import convert, fp8_moe, ran, refused, run_cli, tensor

from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.dequant import Dequant
from qconvert.passes.drop import Drop
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.fuse import Fuse
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import ToMx
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.pass_options import options_of, recipe_line
from qconvert.recipe.recipe import builtin_recipes, parse_recipe
from qconvert.samples.request import Calibration

STEPS = [
    *(step for name, text in builtin_recipes().items() for step in parse_recipe(text, name).passes),
    Drop(match="a: [b], 'c' \"d\" #", why="no: need\nof it"),
    ExpertsToAmx("int8", 2, rounding="search"),
    ExpertsToW4A16(group_size=32, targets=("Linear", "re:.*x.*"), scales="search"),
    ExpertsToW4A16(
        calibrate=Calibration(synthetic=True, experts="all", undersampled="rtn", samples=8)
    ),
    ToNvfp4(targets=("Linear",), dialect="compressed-tensors"),
    ToFp8(targets=("experts",), exponents=True),
    ToMx("mxfp8"),
]


def record(step: Any) -> Any:
    """As qconvert.json has it."""
    return json.loads(json.dumps({"name": step.name, "options": options_of(step)}))


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_a_line_is_a_recipe(step: Any) -> None:
    line = recipe_line(record(step))
    assert "\n" not in line
    assert parse_recipe(f"passes:\n- {line}\n", "line").passes == (step,)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Dequant(), "dequant"), (Fuse(consumer="sglang"), "fuse: {consumer: sglang}"),
        (ExpertsToW4A16(group_size=32), "w4a16: {group_size: 32}"),
        (ToNvfp4(targets=("Linear",)), "nvfp4: {targets: [Linear]}"),
    ],
)  # fmt: skip
def test_what_it_says(step: Any, line: str) -> None:
    assert recipe_line(record(step)) == line


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"name": "acme", "options": {"share": 0.5}}, "acme: {share: 0.5}"),
        ({"name": "dequant", "options": {"later": True}}, "dequant: {later: true}"),
        ({"name": "acme"}, "acme"), ({"options": 5}, "{'options': 5}"), (5, "5"), ("x", "x"),
    ],
)  # fmt: skip
def test_what_is_no_pass_of_ours(found: Any, line: str) -> None:
    """A manifest may be another version's, or anyone's."""
    assert recipe_line(found) == line


def test_cards_and_inspect_have_it(tmp_path: Any) -> None:
    model = fp8_moe()
    model.tensors["extra.weight"] = tensor("BF16", 3)
    source = model.write(tmp_path / "source")
    (tmp_path / "r.yaml").write_text("passes:\n- drop: {match: extra.*, why: a test}\n- dequant\n")
    ran("run", tmp_path / "r.yaml", source, tmp_path / "out", "--jobs", "1")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| `drop` | `{match: extra.*, why: a test}` | 1 | any |" in card
    assert "| `dequant` | `none` |" in card
    told = run_cli("inspect", tmp_path / "out").out
    assert "passes: drop: {match: extra.*, why: a test}; dequant\n" in told


def test_another_plan_is_refused_in_these_words(tmp_path: Any) -> None:
    source = fp8_moe().write(tmp_path / "source")
    convert("dequant", source, tmp_path / "out", "--shard", "0/2")
    assert "pass 1 was `dequant`, now `dequant: {dtype: f32}`" in refused(
        "dequant", source, tmp_path / "out", "--dtype", "f32"
    )
