"""FP8 of AMD's MI300 (FNUZ), decoded and judged. Oracles: torch's own types, and the definition by hand
in float64 (biases 8 and 16, 0x80 is NaN)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, read_tensors, refused, run_cli
from dequantized import errors
from models import qwen3_moe
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.formats.fp8.decode import FNUZ, DequantFp8
from qconvert.validators.reading.decode import fp8_floats

TORCH = {"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz}
kinds = pytest.mark.parametrize("dtype", FNUZ)


def number(code: int, dtype: str) -> float:
    """The number of one code, by hand."""
    width, bias = (3, 8) if dtype == "F8_E4M3FNUZ" else (2, 16)
    exponent, mantissa = divmod(code & 0x7F, 1 << width)
    if code == 0x80:
        return math.nan
    whole = mantissa / (1 << width) + (exponent > 0)
    return (-1.0 if code & 0x80 else 1.0) * whole * 2.0 ** (max(exponent, 1) - bias)


@kinds
def test_torch_has_the_same_numbers(dtype: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(TORCH[dtype]).double().tolist()
    np.testing.assert_array_equal([number(code, dtype) for code in range(256)], wanted)
    found = fp8_floats(np.arange(256, dtype=np.uint8), dtype)
    np.testing.assert_array_equal(found.astype(np.float64), wanted)


@kinds
@pytest.mark.parametrize("block", [(128, 128), (1, 136), (192, 136)])
@pytest.mark.parametrize("limit", [None, 1, 9_000])
def test_every_code_under_ragged_blocks(
    dtype: str, block: tuple[int, int], limit: int | None
) -> None:
    """Torch's product in float64, rounded to bf16 once: float32 holds scales of 8 bits times codes."""
    rows, columns = 192, 136
    random = np.random.default_rng(5)
    codes = random.integers(0, 256, (rows, columns), np.uint8)
    codes[0, :128], codes[1, :128] = np.arange(128), np.arange(128, 256)
    grid = -(-rows // block[0]), -(-columns // block[1])
    scale = (random.integers(128, 256, grid) * 2.0 ** random.integers(-130, 100, grid)).astype(
        np.float32
    )
    ins = [
        buffer(TensorType(dtype, (rows, columns)), codes.tobytes()),
        buffer(TensorType("F32", grid), scale.tobytes()),
    ]
    (found,), remarks = run_op(DequantFp8(block), ins, limit)
    wide = np.repeat(np.repeat(scale.astype(np.float64), block[0], 0), block[1], 1)
    values = torch.from_numpy(codes).view(TORCH[dtype]).double().numpy() * wide[:rows, :columns]
    wanted = torch.from_numpy(values.astype(np.float32)).bfloat16()
    made = torch.frombuffer(bytearray(found), dtype=torch.bfloat16).reshape(rows, columns)
    assert torch.equal(made.isnan(), wanted.isnan())
    keep = ~wanted.isnan()
    assert torch.equal(made[keep], wanted[keep])
    assert remarks["NaN codes"] == int((codes == 0x80).sum())


def model_of(dtype: str, **block: str) -> Model:
    """Block FP8, its codes as those of another dtype; NaN is none."""
    model = qwen3_moe("fp8")
    for name, value in model.tensors.items():
        if value.dtype == "F8_E4M3":
            data = (
                value.data.replace(b"\x80", b"\0").replace(b"\x7f", b"\0").replace(b"\xff", b"\0")
            )
            model.tensors[name] = Tensor(dtype, value.shape, data)
    model.config["quantization_config"] = {**model.config["quantization_config"], **block}
    return model


@kinds
def test_a_folder_becomes_bf16(dtype: str, tmp_path: Path) -> None:
    fmt = dtype.removeprefix("F8_").lower()
    source, out = model_of(dtype, fmt=fmt).write(tmp_path / "in"), tmp_path / "out"
    assert errors(source) == []
    done = run_cli("dequant", source, out)
    assert done.code == 0, done.err
    assert errors(out, "--against", source) == []
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    codes = torch.frombuffer(bytearray(read_tensors(source)[name].data), dtype=torch.uint8)
    scales = np.frombuffer(read_tensors(source)[f"{name}_scale_inv"].data, np.float32)
    wide = torch.from_numpy(np.repeat(scales.reshape(2, 1), 128, 0).copy())
    wanted = codes.view(TORCH[dtype]).float().reshape(256, 128) * wide
    assert read_tensors(out)[name].data == wanted.bfloat16().view(torch.uint8).numpy().tobytes()


def test_codes_read_as_ocp_are_twice_as_large_and_found(tmp_path: Path) -> None:
    """A reader that took OCP's numbers would be off by a factor of two."""
    source = model_of("F8_E4M3FNUZ", fmt="e4m3fnuz").write(tmp_path / "in")
    wrong = model_of("F8_E4M3").write(tmp_path / "wrong")
    assert run_cli("dequant", wrong, tmp_path / "out").code == 0
    assert "QC060" in {one["rule"] for one in errors(tmp_path / "out", "--against", source)}


def test_a_config_of_fnuz_beside_codes_of_ocp_is_refused(tmp_path: Path) -> None:
    source = model_of("F8_E4M3", fmt="e4m3fnuz").write(tmp_path / "in")
    said = refused("dequant", source, tmp_path / "out")
    assert "states fmt fnuz, whose codes are F8_E4M3FNUZ or F8_E5M2FNUZ, found F8_E4M3" in said
    assert [one["rule"] for one in errors(source)] == ["QC096"]


def test_nan_among_codes_is_found(tmp_path: Path) -> None:
    model = model_of("F8_E4M3FNUZ", fmt="e4m3fnuz")
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    old = model.tensors[name]
    model.tensors[name] = Tensor(old.dtype, old.shape, b"\x80" + old.data[1:])
    found = errors(model.write(tmp_path / "in"))
    assert [(one["rule"], one["where"]) for one in found] == [("QC066", name)]


@pytest.mark.parametrize("to", ["compressed-tensors", "fp8"])
def test_no_other_form_has_these_codes(to: str, tmp_path: Path) -> None:
    source = model_of("F8_E4M3FNUZ", fmt="e4m3fnuz").write(tmp_path / "in")
    said = refused("relabel", source, tmp_path / "out", "--to", to)
    assert "whose codes no other form has" in said
