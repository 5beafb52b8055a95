"""FP8 codes and scales: numbers worked out by hand, and torch's own rounding as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import read_tensors, run_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from input_stats import write_stats
from models import cast, deepseek_v3, qwen3_moe
from ops_harness import buffer, run_op

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.formats.fp8.encode import EncodeFp8, EncodeFp8Tensor, TensorScale
from qconvert.formats.nvfp4.scales import RowMaxima
from qconvert.passes.dequant import Dequant
from qconvert.passes.fp8 import ToFp8
from qconvert.plan.plan import Plan, run_passes

BLOCK = EncodeFp8("fp8", (128, 128))
POWERS = EncodeFp8("fp8", (128, 128), exponents=True)
PACKED = EncodeFp8("compressed-tensors", (128, 128))
ROWS = EncodeFp8("compressed-tensors", None)


def encoded(op: EncodeFp8, weight: torch.Tensor, limit: int | None = None) -> list[torch.Tensor]:
    """Codes U8 and scales of a bf16 matrix."""
    data = weight.contiguous().view(torch.int16).numpy().tobytes()
    (codes, scale), _ = run_op(op, [buffer(TensorType("BF16", tuple(weight.shape)), data)], limit)
    kind = op.infer(TensorType("BF16", tuple(weight.shape)))[1]
    dtype = torch.float32 if kind.dtype == "F32" else torch.bfloat16
    found = torch.frombuffer(bytearray(scale), dtype=dtype).reshape(kind.shape)
    return [torch.frombuffer(bytearray(codes), dtype=torch.uint8).reshape(weight.shape), found]


def spread(scale: torch.Tensor, op: EncodeFp8, rows: int, columns: int) -> torch.Tensor:
    """The scale of each weight."""
    high, wide = op.block or (1, columns)
    return scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]


def largest(weight: torch.Tensor, op: EncodeFp8) -> torch.Tensor:
    """The largest size under each scale."""
    rows, columns = weight.shape
    high, wide = op.block or (1, columns)
    grid = -(-rows // high), -(-columns // wide)
    padded = weight.new_zeros(grid[0] * high, grid[1] * wide)
    padded[:rows, :columns] = weight.abs()
    return padded.reshape(grid[0], high, grid[1], wide).amax((1, 3))


def expected(op: EncodeFp8, weight: torch.Tensor) -> list[torch.Tensor]:
    """The same by torch's arithmetic and its own cast to E4M3."""
    if op.dialect == "fp8":
        weight = weight.float()
    amax = largest(weight, op)
    scale = amax / 448
    if op.exponents:
        scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    if op.dialect == "fp8":
        scale = torch.where(amax == 0, torch.ones_like(scale), scale.clamp(min=2.0**-126))
    else:
        scale = torch.where(scale == 0, torch.full_like(scale, 2.0**-7), scale)
    quotient = (weight / spread(scale, op, *weight.shape)).clamp(-448, 448)
    return [quotient.to(torch.float8_e4m3fn).view(torch.uint8), scale]


def heavy(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Heavy tails, outlier channels, a row of zeros, denormals and both signs of zero."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=draw)
    weight *= torch.exp(2 * torch.randn(rows, 1, generator=draw))
    weight[:, columns // 3] *= 300
    weight[rows // 2] = 0
    weight[0, 0], weight[-1, -1] = -0.0, 1e-39
    return weight.bfloat16()


@pytest.mark.parametrize("op", [BLOCK, POWERS, PACKED, ROWS], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (300, 500), (576, 129), (2, 70_000)])
@pytest.mark.parametrize("limit", [None, 60_000])
def test_codes_and_scales_are_torchs(
    op: EncodeFp8, shape: tuple[int, int], limit: int | None
) -> None:
    weight = heavy(*shape, seed=sum(shape))
    for found, wanted in zip(encoded(op, weight, limit), expected(op, weight), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@given(
    st.lists(st.integers(0, 0x7F7F), min_size=1, max_size=200),
    st.sampled_from([BLOCK, POWERS, PACKED, ROWS]),
)
@settings(max_examples=100, deadline=None)
def test_any_bits(bits: list[int], op: EncodeFp8) -> None:
    """Every finite bf16, denormals and the largest among them, with every other sign."""
    words = np.array([b | (i % 2) << 15 for i, b in enumerate(bits)], np.uint16)
    weight = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)[None]
    codes, scale = encoded(op, weight)
    wanted, its = expected(op, weight)
    assert torch.equal(scale, its)
    assert torch.equal(codes, wanted)


def test_every_number_between_two_codes_goes_to_the_nearer() -> None:
    """With a scale of 1 (amax 448) bf16 numbers are rounded as they are: all 0x43E0 of them."""
    words = np.arange(0x43E1, dtype=np.uint16)
    weight = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)[None]
    codes, scale = encoded(
        BLOCK, torch.cat([weight, weight[:, -1:].expand(1, -len(words) % 128)], 1)
    )
    assert scale[0, -1] == 1
    one = EncodeFp8("fp8", (1, weight.shape[1]))
    codes, scale = encoded(one, weight)
    assert scale.item() == 1
    values = codes.view(torch.float8_e4m3fn).double()
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (weight.double().T - table).abs().amin(1)
    assert torch.equal((weight.double() - values).abs()[0], nearest)
    # Ties: 17 lies between 16 (code 0x58) and 18 (0x59), 19 between 18 and 20 (0x5A): to the even ones.
    ties = {17.0: 0x58, 19.0: 0x5A, 2.0**-10: 0x00, 3 * 2.0**-10: 0x02}
    for value, code in ties.items():
        at = int((weight[0].double() == value).nonzero()[0, 0])
        assert codes[0, at] == code


def test_bytes_by_hand() -> None:
    """amax 7: scale 7 / 448 = 2^-6. 1 / 2^-6 = 64 = 1.0 * 2^6: exponent 6 + 7 = 13, code 13 << 3 = 0x68;
    7 is 448: 0x7E; -0.5 is -32 = 2^5: 0x80 | 12 << 3 = 0xE0."""
    codes, scale = encoded(BLOCK, torch.tensor([[1.0, 7.0, -0.5, 0.0]]).bfloat16())
    assert scale.tolist() == [[2.0**-6]]
    assert codes.tolist() == [[0x68, 0x7E, 0xE0, 0x00]]


def test_powers_of_two_are_rounded_up_before_codes() -> None:
    """amax 8: 8 / 448 = 2^-5.8, so 2^-5; 8 / 2^-5 = 256 = 2^8: code (8 + 7) << 3 = 0x78, which the scale
    multiplies back to 8."""
    codes, scale = encoded(POWERS, torch.tensor([[8.0]]).bfloat16())
    assert (scale.item(), codes.item()) == (2.0**-5, 0x78)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("op", [BLOCK, ROWS], ids=str)
def test_what_is_no_number_is_refused(bad: float, op: EncodeFp8) -> None:
    weight = torch.ones(300, 200).bfloat16()
    weight[290, 199] = bad
    with pytest.raises(RowError, match=r"row 290 holds NaN or infinity"):
        encoded(op, weight)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="BF16 matrix"):
        BLOCK.infer(TensorType("F32", (2, 2)))
    for step in ({"block": None}, {"block": 0}, {"tp": 0},
                 {"dialect": "compressed-tensors", "exponents": True}):  # fmt: skip
        with pytest.raises(PlanError):
            ToFp8(**step)


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("fp8", "", "is FP8 in blocks of 128x128 already"),
        ("fp8", "--targets experts --block 64", "is FP8 in another form"),
        ("bf16", "--tp 64", "at tensor parallel 64 a rank would not get whole blocks"),
        ("bf16", "--ue8m0 --channel", "dialect fp8 only"),
    ],
)
def test_refusals(source: str, options: str, said: str, tmp_path: Path) -> None:
    model = deepseek_v3() if source == "fp8" else qwen3_moe()
    done = run_cli(
        "fp8", model.write(tmp_path / "s"), tmp_path / "o", *options.split(), "--dry-run"
    )
    assert done.code != 0
    assert said in done.err


# --- one scale a matrix --------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("limit", [None, 60_000])
def test_matrices_share_the_scale_of_the_largest_weight(dialect: Any, limit: int | None) -> None:
    """Codes and scales of two matrices by torch's arithmetic, the second smaller by far."""
    weights = [heavy(300, 500, seed=1), heavy(77, 513, seed=2) / 64]
    kinds = [TensorType("BF16", tuple(weight.shape)) for weight in weights]
    given = [
        buffer(kind, weight.view(torch.int16).numpy().tobytes())
        for kind, weight in zip(kinds, weights, strict=True)
    ]
    maxima = [
        buffer(TensorType("BF16", kind.shape[:1]), run_op(RowMaxima(), [one], limit)[0][0])
        for kind, one in zip(kinds, given, strict=True)
    ]
    op = TensorScale(dialect)
    (stored,) = op.infer(*(one.type for one in maxima))
    (scale,), _ = run_op(op, maxima)
    dtype = torch.float32 if dialect == "fp8" else torch.bfloat16
    own = torch.frombuffer(bytearray(scale), dtype=dtype)
    amax = max(weight.abs().max() for weight in weights)
    assert own.item() == (amax.to(dtype) / 448).item()
    for weight, one in zip(weights, given, strict=True):
        (codes,), _ = run_op(EncodeFp8Tensor(None, dialect), [one, buffer(stored, scale)], limit)
        quotient = (weight.to(dtype) / own).clamp(-448, 448)
        wanted = quotient.to(torch.float8_e4m3fn).view(torch.uint8)
        found = torch.frombuffer(bytearray(codes), dtype=torch.uint8)
        assert torch.equal(found.reshape(weight.shape), wanted)


@pytest.mark.parametrize(("dialect", "least"), [("fp8", 1.0), ("compressed-tensors", 2.0**-7)])
def test_a_matrix_of_zeros_has_a_scale(dialect: Any, least: float) -> None:
    maxima = [buffer(TensorType("BF16", (3,)), bytes(6))]
    (scale,), _ = run_op(TensorScale(dialect), maxima)
    dtype = torch.float32 if dialect == "fp8" else torch.bfloat16
    assert torch.frombuffer(bytearray(scale), dtype=dtype).item() == least


@pytest.mark.parametrize("options", [[], ["--dialect", "compressed-tensors"]])
@pytest.mark.parametrize("source", ["bf16", "fp8"])
def test_a_scale_a_matrix(source: str, options: list[str], tmp_path: Path) -> None:
    """Of q, k and v, and of gate and up, one; the constant input scale stands beside each."""
    model = deepseek_v3() if source == "fp8" else cast("BF16")
    folder, out = model.write(tmp_path / "s"), tmp_path / "o"
    words = "--tensor", "--input-scale", "1.5", *options
    done = run_cli("fp8", folder, out, *words, "--jobs", "1")
    assert done.code == 0, done.err
    found = read_tensors(out)
    modules = [n.removesuffix(".weight") for n, t in found.items() if t.dtype == "F8_E4M3"]
    assert len(modules) > 8
    for module in modules:
        assert found[f"{module}.weight_scale"].shape == (1,)
        constant = np.float32(1.5).tobytes()
        assert found[f"{module}.input_scale"] == ("F32", (1,), constant)
        other = module.replace("gate_proj", "up_proj").replace("q_proj", "k_proj")
        if f"{other}.weight_scale" in found:
            assert found[f"{module}.weight_scale"] == found[f"{other}.weight_scale"]
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    if options:
        (group,) = block["config_groups"].values()
        assert group["weights"]["strategy"] == group["input_activations"]["strategy"] == "tensor"
        assert group["input_activations"]["dynamic"] is False
    else:
        assert block["activation_scheme"] == "static"
        assert "weight_block_size" not in block
    assert "the constant 1.5, found from no data" in (out / "README.md").read_text()


@pytest.mark.parametrize("options", [[], ["--dialect", "compressed-tensors"]])
def test_input_scales_of_statistics(options: list[str], tmp_path: Path) -> None:
    """Of experts, beside other layers in BF16: 21 / 448 = .046875 and 42 / 448 = .09375."""
    stats = write_stats(tmp_path / "stats", [0, 1])
    out = tmp_path / "o"
    words = "--tensor", "--targets", "experts", "--stats", str(stats), *options
    done = run_cli("fp8", qwen3_moe().write(tmp_path / "s"), out, *words, "--jobs", "1")
    assert done.code == 0, done.err
    assert "1 experts saw no token" in done.err
    found = read_tensors(out)
    for expert, gate in enumerate((0.046875, 0.09375)):
        for kind, value in (("gate", gate), ("up", gate), ("down", 0.09375)):
            module = f"model.layers.0.mlp.experts.{expert}.{kind}_proj"
            assert found[f"{module}.input_scale"] == ("F32", (1,), np.float32(value).tobytes())
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == "BF16"
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    if options:
        (group,) = block["config_groups"].values()
        assert group["input_activations"]["dynamic"] is False
    else:
        assert block["activation_scheme"] == "static"


def test_statistics_say_nothing_of_draft_layers(tmp_path: Path) -> None:
    stats = write_stats(tmp_path / "stats", [1, 2])
    plan = Plan.identity(Checkpoint.open(deepseek_v3().write(tmp_path / "s")))
    step = ToFp8(tensor=True, targets=("experts",), stats=str(stats))
    with pytest.raises(
        PlanError, match=r"layers\.2\.mlp\.experts\.0\.\w+_proj': statistics are of"
    ):
        run_passes(plan, [Dequant(), step])


def test_options_of_a_scale_a_matrix() -> None:
    for wrong, said in (
        ({"tensor": True, "exponents": True}, "by block only"),
        ({"input_scale": 1.0}, "add tensor"),
        ({"tensor": True, "input_scale": -1.0}, "above 0"),
        ({"stats": "x", "targets": ("experts",)}, "add tensor"),
        ({"stats": "x", "tensor": True}, "all other layers would need"),
        ({"stats": "x", "tensor": True, "input_scale": 1.0}, "stats says otherwise"),
        (
            {"stats": "x", "tensor": True, "targets": ("experts",), "shared_experts": "quantize"},
            "quantized shared experts would need",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            ToFp8(**wrong)
