"""MXFP4, MXFP8 and INT8 a row: numbers worked out by hand, and torch's arithmetic as the oracle. Bytes
of the libraries that write them: test_w4a16_rtn_peer.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import run_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from models import deepseek_v3, qwen3_moe
from ops_harness import buffer, run_op

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.plan_report import dump
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.formats.int_packed.encode import RoundToNearest
from qconvert.formats.int_packed.packers import INT8_ROWS, KeepInt8
from qconvert.formats.mx.encode import EncodeMx
from qconvert.passes.quantize import Quantize, ToInt8, ToMx
from qconvert.plan.plan import Plan, run_passes

FP4, FP8 = EncodeMx("mxfp4"), EncodeMx("mxfp8")
INT8 = RoundToNearest(INT8_ROWS, KeepInt8())
_SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def encoded(op: Any, weight: torch.Tensor, limit: int | None = None) -> list[torch.Tensor]:
    """The results of a bf16 matrix, as bytes in their shapes."""
    kind = TensorType("BF16", tuple(weight.shape))
    data = weight.contiguous().view(torch.int16).numpy().tobytes()
    found, _ = run_op(op, [buffer(kind, data)], limit)
    return [
        torch.frombuffer(bytearray(one), dtype=torch.uint8).reshape(out.shape[0], -1)
        for one, out in zip(found, op.infer(kind), strict=True)
    ]


def expected(op: EncodeMx, weight: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, from the definitions; -0 has no sign among E2M1 codes."""
    groups = weight.double().reshape(weight.shape[0], -1, 32)
    mantissa, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))  # 0.5 to 1
    power = exponent - 1 + (mantissa >= 0.875).int()
    stored = (127 + power - (2 if op is FP4 else 8)).clamp(min=0)
    stored[mantissa == 0] = 0
    quotient = groups * torch.exp2(127.0 - stored.double())
    if op is FP8:
        codes = quotient.float().to(torch.float8_e4m3fn).view(torch.uint8)
        return [codes.reshape(weight.shape), stored[..., 0].to(torch.uint8)]
    off = (quotient.abs()[..., None] - _SIZES).abs()
    nearest = off.amin(-1, keepdim=True) == off
    even = nearest & (torch.arange(8) % 2 == 0)
    code = torch.where(even.any(-1), even.int().argmax(-1), nearest.int().argmax(-1))
    code = (code + 8 * (quotient.bfloat16() < 0)).reshape(weight.shape).to(torch.uint8)
    return [code[:, ::2] | code[:, 1::2] << 4, stored[..., 0].to(torch.uint8)]


def heavy(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Heavy tails, outlier channels, a row of zeros, denormals and both signs of zero."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=draw)
    weight *= torch.exp(2 * torch.randn(rows, 1, generator=draw))
    weight[:, columns // 3] *= 300
    weight[rows // 2] = 0
    weight[0, 0], weight[-1, -1] = -0.0, 1e-39
    return weight.bfloat16()


@pytest.mark.parametrize("op", [FP4, FP8], ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (300, 512), (577, 96), (3, 70_016)])
@pytest.mark.parametrize("limit", [None, 60_000])
def test_codes_and_exponents(op: EncodeMx, shape: tuple[int, int], limit: int | None) -> None:
    weight = heavy(*shape, seed=sum(shape))
    for found, wanted in zip(encoded(op, weight, limit), expected(op, weight), strict=True):
        assert torch.equal(found, wanted)


@given(st.lists(st.integers(0, 0x7F5F), min_size=32, max_size=32), st.sampled_from([FP4, FP8]))
@settings(max_examples=150, deadline=None)
def test_any_bits(bits: list[int], op: EncodeMx) -> None:
    """Every bf16 below 1.75 * 2^127, denormals among them, with every other sign."""
    words = np.array([b | (i % 2) << 15 for i, b in enumerate(bits)], np.uint16)
    weight = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)[None]
    for found, wanted in zip(encoded(op, weight), expected(op, weight), strict=True):
        assert torch.equal(found, wanted)


def test_bytes_by_hand() -> None:
    """amax 6: the power below is 4 = 2^2, so 2^2 / 4 = 1, exponent 127. Codes: 6 is 7, -1 is 8 + 2,
    2.5 is halfway between 2 and 3 (codes 4 and 5): 4. amax 7 = 1.75 * 4 goes to 8: exponent 128, and
    7 / 2 = 3.5, halfway, is 4 (6)."""
    weight = torch.zeros(1, 64)
    weight[0, :4], weight[0, 32] = torch.tensor([6.0, -1.0, 2.5, 0.0]), 7.0
    codes, exponents = encoded(FP4, weight.bfloat16())
    assert codes[0, :3].tolist() == [7 | 10 << 4, 4, 0]
    assert (codes[0, 16].item(), exponents.tolist()) == (6, [[127, 128]])
    codes, exponents = encoded(FP8, weight.bfloat16())
    # 4 / 256 = 2^-6; 6 * 64 = 384 = 1.5 * 2^8: (8 + 7) << 3 | 4 = 0x7C.
    # 8 / 256 = 2^-5; 7 * 32 = 224 = 1.75 * 2^7: (7 + 7) << 3 | 6 = 0x76.
    assert (codes[0, 0].item(), codes[0, 32].item()) == (0x7C, 0x76)
    assert exponents.tolist() == [[121, 122]]


def test_int8_by_hand() -> None:
    """amax 127.5: the scale is 1, the largest code 127; 0.5 goes to the even 0, -1.5 to -2."""
    codes, scale = encoded(INT8, torch.tensor([[127.5, 0.5, -1.5]]).bfloat16())
    assert codes.view(torch.int8).tolist() == [[127, 0, -2]]
    assert scale.view(torch.bfloat16).tolist() == [[1.0]]


@pytest.mark.parametrize("op", [FP4, FP8], ids=str)
def test_what_no_scale_holds_is_refused(op: EncodeMx) -> None:
    weight = torch.ones(300, 64).bfloat16()
    for bad, said in (
        (float("nan"), "NaN or infinity"),
        (float("-inf"), "NaN or"),
        (3e38, "2.9e38"),
    ):
        weight[290, 63] = bad
        with pytest.raises(RowError, match=rf"row 290 holds .*{said}"):
            encoded(op, weight)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="BF16 matrix"):
        FP4.infer(TensorType("F32", (2, 32)))
    with pytest.raises(PlanError, match=r" 32\b.*, found 48"):
        FP8.infer(TensorType("BF16", (2, 48)))
    with pytest.raises(PlanError, match="mxfp6"):
        ToMx("mxfp6")  # type: ignore[arg-type]
    for step in (ToMx, ToInt8):
        with pytest.raises(PlanError, match="tensor parallel"):
            step(tp=0)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("mx --tp 64", "at tensor parallel 64 a rank would not get whole blocks"),
        ("mx --tp 16", "blocks (1 x 32) of [128, 256]; ranks do at 1, 2, 4, 8"),
        ("int8 --tp 3", "at tensor parallel 3 a rank would not get whole blocks of"),
        ("quantize --format fp8", "fp8 has a command of its own: qconvert fp8"),
        ("quantize --format int4", "int4 has a command of its own: qconvert w4a16"),
        ("quantize --format awq", "one of int8, mxfp4, mxfp8; found 'awq', which is only read"),
        ("quantize --format mxfp6", "one of int8, mxfp4, mxfp8; found 'mxfp6'"),
        (
            "quantize --format mxfp4 --targets Linear --ignore q_proj",
            "runtimes make one layer of them",
        ),
    ],
)
def test_refusals(command: str, said: str, tmp_path: Path) -> None:
    head, *rest = command.split()
    done = run_cli(head, qwen3_moe().write(tmp_path / "s"), tmp_path / "o", *rest, "--dry-run")
    assert done.code != 0
    assert said in done.err


@pytest.mark.parametrize(
    ("step", "form"), [(ToMx(), "mxfp4"), (ToMx("mxfp8"), "mxfp8"), (ToInt8(), "int8")], ids=str
)
def test_quantize_is_each_of_them_by_the_name_of_its_format(
    step: ToMx | ToInt8, form: str, tmp_path: Path
) -> None:
    start = Plan.identity(Checkpoint.open(deepseek_v3().write(tmp_path / "s")))
    other = Quantize(form, targets=step.targets)
    one, two = run_passes(start, (step,)), run_passes(start, (other,))
    assert list(dump(one)) == list(dump(two))
    assert (one.config, one.dropped, one.facts) == (two.config, two.dropped, two.facts)
    assert one.log[0].notes == two.log[0].notes
    assert two.log[0].options["format"] == form


def test_names_are_targets_and_others_stay(tmp_path: Path) -> None:
    start = Plan.identity(Checkpoint.open(qwen3_moe().write(tmp_path / "s")))
    step = Quantize("mxfp8", targets=("Linear",), ignore=("re:.*self_attn.*", "experts"))
    with pytest.raises(PlanError, match="target 'Linear' matches no weight"):
        run_passes(start, (step,))
    made = run_passes(start, (Quantize("mxfp8", targets=("o_proj",)),))
    block = made.config["quantization_config"]
    assert block["format"] == "mxfp8-quantized"
    assert block["config_groups"]["group_0"]["targets"] == ["Linear"]
    at = "model.layers.1.self_attn"
    assert f"{at}.o_proj.weight_scale" in made.tensors
    assert {f"{at}.q_proj", "lm_head", r"re:.*\.mlp\.experts(\..*)?$"} <= set(block["ignore"])


def test_mxfp4_is_not_rounded_again(tmp_path: Path) -> None:
    made = tmp_path / "made"
    source = qwen3_moe(hidden=64, intermediate=64)
    for name, one in source.tensors.items():
        source.tensors[name] = one._replace(data=b"\x00\x3c" * (len(one.data) // 2))
    done = run_cli("mx", source.write(tmp_path / "s"), made, "--jobs", "1")
    assert done.code == 0, done.err
    done = run_cli("mx", made, tmp_path / "o", "--bits", "8", "--dry-run")
    assert done.code == 1
    assert "the source is MXFP4" in done.err


@pytest.mark.parametrize("command", ["mx", "mx --bits 8", "int8 --targets experts"])
def test_block_fp8_stays_beside_experts(command: str, tmp_path: Path) -> None:
    """Linears in blocks are a group of their own, with scales under compressed-tensors' name."""
    head, *rest = command.split()
    source, out = deepseek_v3().write(tmp_path / "s"), tmp_path / "o"
    done = run_cli(head, source, out, *rest, "--jobs", "1")
    assert done.code == 0, done.err
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = block["config_groups"]
    assert block["format"] == "mixed-precision"
    assert groups["group_1"]["weights"]["block_structure"] == [128, 128]
    assert all("experts" in target for target in groups["group_0"]["targets"])
    checked = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert checked.code == 0, checked.err
