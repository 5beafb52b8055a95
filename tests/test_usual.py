"""What formats usually lose, measured again on normal weights; and the words for it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate_models import qwen3_moe, saved
from checkpoints import bf16_moe, convert, run_cli
from safetensors.torch import load_file
from sample_reports import RULES, measure

from qconvert import api
from qconvert.passes.dequant import Dequant
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import ToInt8, ToMx
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.validation.findings import Measure
from qconvert.validation.reports import as_html, as_text, for_programs
from qconvert.validation.reports.figures import USUAL, Group, compared, side_by_side
from qconvert.validation.runner import Report

W4A16 = "what rounding to w4a16 usually gives (16 to 20.6 dB)"
CALIBRATED = "codes of a calibration; rounding to w4a16 usually gives 16 to 20.6 dB"
GROUP = Group("w4a16", "up_proj", 8, 0, 0, 20.0, 20.2, 0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, f"within 3 dB of {W4A16}"),
        ({"median": 13.0, "worst": 13.0}, f"within 3 dB of {W4A16}"),
        ({"median": 25.0}, f"better than {W4A16} by more than 3 dB"),
        ({"median": 12.9, "worst": 11.0}, f"worse than {W4A16} by more than 3 dB"),
        ({"worst": 9.0}, f"within 3 dB of {W4A16}; its worst matrix is lower by more than 6 dB"),
        ({"median": 14.7, "worst": 14.0, "calibrated": True}, CALIBRATED),
        ({"median": inf, "calibrated": True}, "most are exact"),
        ({"median": inf, "worst": 20.0}, "most are exact"),
        ({"worst": inf, "median": inf}, ""), ({"median": nan}, ""), ({"format": "bf16"}, ""),
    ],
)  # fmt: skip
def test_words(changes: dict[str, Any], words: str) -> None:
    assert compared(replace(GROUP, **changes)) == words


Held = tuple[dict[str, torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """One layer, its experts of normal weights with 1,024 columns."""
    config = qwen3_moe(
        hidden_size=1024, moe_intermediate_size=1024, num_hidden_layers=1, num_experts=2
    )
    folder = saved(config, tmp_path_factory.mktemp("usual") / "model")
    tensors = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    for name, weight in tensors.items():
        if ".experts." in name:
            tensors[name] = normal(*weight.shape)
    return tensors, json.loads((folder / "config.json").read_text(encoding="utf-8"))


def normal(rows: int, columns: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(7)
    return (torch.randn(rows, columns, generator=made) * 0.02).bfloat16()


def sqnr(weight: torch.Tensor, decoded: torch.Tensor) -> float:
    noise = (weight.double() - decoded.double()).norm()
    return float(20 * torch.log10(weight.double().norm() / noise))


PASSES = [
    ("fp8", ToFp8(targets=("experts",))), ("fp8", ToFp8(targets=("experts",), exponents=True)),
    ("w4a16", ExpertsToW4A16(group_size=32)), ("w4a16", ExpertsToW4A16(group_size=128)),
    ("w4a16", ExpertsToW4A16(group_size=None)),
    ("w4a16", ExpertsToW4A16(group_size=128, symmetric=False)),
    ("w8a16", ExpertsToW4A16(bits=8, group_size=128)),
    ("w8a16", ExpertsToW4A16(bits=8, group_size=None)),
    ("w8a8", ToInt8(targets=("experts",))), ("nvfp4", ToNvfp4()), ("mxfp4", ToMx()),
    ("fp8", ToMx("mxfp8")),
]  # fmt: skip


@pytest.mark.parametrize(("format", "step"), PASSES, ids=repr)
def test_the_usual_loss_of_a_pass(format: str, step: Any, model: Held) -> None:
    tensors, config = model
    there = api.converter(step, tensors, config)
    made = dict(there.stream(tensors))
    back = api.convert(Dequant(), made, there.config)
    (name,) = (n for n in tensors if n.endswith("experts.1.up_proj.weight"))
    least, most = USUAL[format]
    assert least <= sqnr(tensors[name], back[name]) <= most


@pytest.mark.parametrize(
    ("format", "most", "columns"),
    [
        ("w4a16", 7.5, 7168), ("w8a16", 127.5, 7168), ("w8a8", 127.5, 7168),
        ("amxint4", 7, 1024), ("amxint4", 7, 7168), ("amxint8", 127, 1024), ("amxint8", 127, 7168),
    ],
)  # fmt: skip
def test_the_usual_loss_of_a_scale_a_row(format: str, most: float, columns: int) -> None:
    """In float64, with the largest magnitude at the end of the range, as all of them have it."""
    weight = normal(128, columns).double()
    step = weight.abs().amax(1, keepdim=True) / most
    top = round(most + 0.6)
    decoded = (weight / step).round().clamp(-top, top - 1) * step
    least, largest = USUAL[format]
    assert least <= sqnr(weight, decoded) <= largest


# --- Two folders ---------------------------------------------------------------------------------


def both() -> tuple[Report, Report]:
    """One role that this is better at, one that the other lacks, one exact in both, one equal."""

    def report(name: str, rms: float, *more: Measure) -> Report:
        found = [measure(0, 0, "up_proj", rms), measure(0, None, "o_proj", 0.0), *more]
        return Report(about={"folder": name}, measures=[*found, measure(1, 0, "down_proj", 0.1)])

    return report("a", 0.1, measure(0, 0, "gate_proj", 0.1)), report("b", 0.2)


def test_side_by_side() -> None:
    table = side_by_side(*both())
    assert table.rows == (
        ("up_proj", "w4a16", "20.0", "20.0", "w4a16", "14.0", "14.0", "this, 6.0 dB"),
        ("down_proj", "w4a16", "20.0", "20.0", "w4a16", "20.0", "20.0", "equal"),
        ("gate_proj", "w4a16", "20.0", "20.0", "not there", "", "", "unknown"),
    )
    turned = side_by_side(*reversed(both()))
    assert turned.rows[0][-1] == "the other, 6.0 dB"


def test_roles_of_one_word_are_counted() -> None:
    measures = [measure(0, 0, role, 0.1) for role in ("a", "b", "c", "d")]
    text = as_text.render(Report(measures=measures), RULES)
    assert f"4 roles: within 3 dB of {W4A16}" in text
    assert "a, b, c: within 3 dB" in as_text.render(Report(measures=measures[:3]), RULES)


def test_codes_of_a_calibration_are_further_from_the_weights() -> None:
    text = as_text.render(Report(measures=[measure(0, 0, "a", 0.4)]), RULES)
    assert f"worse than {W4A16}" in text
    assert "weights with outliers lose more than is usual" in text
    assert "calibrated codes lie" not in text
    for calibrated in (False, True):
        near = [measure(0, 0, "a", 0.1, calibrated=calibrated), measure(1, 0, "a", 0.1)]
        text = as_text.render(Report(measures=near), RULES)
        assert ("calibrated codes" in text) is calibrated
        assert (f"a: {CALIBRATED}" in text) is calibrated


def test_reports_show_both() -> None:
    first, second = both()
    report = replace(first, beside=second)
    text = as_text.render(report, RULES)
    assert "a (this) beside b (the other: 0 errors, 0 warnings)" in text
    assert "this, 6.0 dB" in text
    page = as_html.render(report, RULES)
    assert page.count('<div class="box passed">') == 2
    assert page.index("Side by side") < page.index("Against the source")
    told = for_programs.to_json(report, RULES)
    assert told["beside"]["about"] == {"folder": "b"}
    assert "beside" not in for_programs.to_json(first, RULES)


def test_the_command_checks_both(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    convert("copy", source, tmp_path / "a")
    convert("copy", source, tmp_path / "b")
    words = ("validate", tmp_path / "a", "--beside", tmp_path / "b", "--level", "full")
    done = run_cli(*words, "--against", source, "--json")
    assert done.code == 0
    told = json.loads(done.out)
    for found, name in ((told, "a"), (told["beside"], "b")):
        assert found["about"]["folder"] == str(tmp_path / name)
        assert found["about"]["level"] == "full"
    refused = run_cli(*words)
    assert refused.code == 2
    assert "give --against SRC" in refused.err


# --- The page ------------------------------------------------------------------------------------


def test_what_is_lossy_comes_first_and_exact_rows_are_folded() -> None:
    measures = [
        measure(0, None, "a_exact", 0.0), measure(0, 0, "b_better", 0.05),
        measure(0, 0, "c_worse", 0.2), measure(1, None, "a_exact", 0.0),
    ]  # fmt: skip
    page = as_html.render(Report(measures=measures, proved=["proved"]), RULES)
    at = [page.index(text) for text in ("<td class=\"\">c_worse", "<td class=\"\">b_better",
          '<details class="exact">', "<td class=\"\">a_exact", 'class="claims"')]  # fmt: skip
    assert at == sorted(at)
    assert "2 matrices and vectors of 1 role are exact" in page
    assert f"within 3 dB of {W4A16}" in page
    nothing = as_html.render(Report(measures=measures[:1]), RULES)
    assert "1 matrix or vector of 1 role is exact" in nothing
