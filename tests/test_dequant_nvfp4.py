"""`qconvert dequant` of NVFP4, in both dialects. Oracles: torch's float8 and bf16, with codes taken out
of bytes one by one; and, marked `peer`, compressed-tensors' own decompression."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Model, Tensor, read_tensors, run_cli
from models import MODELS, decoded, numbers_only, nvfp4_moe

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.passes.dequant import STALE_RULE, Dequant
from qconvert.plan.plan import Plan, run_passes

DIALECTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
both = pytest.mark.parametrize("dialect", sorted(DIALECTS))
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def source(dialect: str, *, inputs: bool = True) -> Model:
    return numbers_only(nvfp4_moe(dialect, inputs=inputs))


def meaning(model: Model, module: str, dialect: str) -> Tensor:
    """The matrix in BF16."""
    packed, scale, one = (model.tensors[f"{module}.{name}"] for name in DIALECTS[dialect])
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    codes = [code for byte in packed.data for code in (byte & 15, byte >> 4)]
    values = torch.tensor([SIZES[code & 7] * (-1 if code & 8 else 1) for code in codes])
    each = torch.frombuffer(bytearray(scale.data), dtype=torch.uint8).view(torch.float8_e4m3fn)
    (number,) = struct.unpack("<f", one.data)
    whole = torch.tensor(number, dtype=torch.float32)
    factor = each.float() * whole if dialect == "modelopt" else each.float() / whole
    found = (values.reshape(-1, 16) * factor[:, None]).bfloat16()
    return Tensor("BF16", (rows, columns), found.view(torch.uint8).numpy().tobytes())


def experts(model: Model, dialect: str) -> list[str]:
    end = f".{DIALECTS[dialect][2]}"
    return [name.removesuffix(end) for name in model.tensors if name.endswith(end)]


@both
@pytest.mark.parametrize("inputs", [True, False])
def test_experts_become_bf16_and_all_else_is_as_it_was(
    dialect: str, inputs: bool, tmp_path: Path
) -> None:
    model = source(dialect, inputs=inputs)
    modules = experts(model, dialect)
    assert len(modules) == 2 * 3 * 3
    folder, out = model.write(tmp_path / "source"), tmp_path / "out"
    done = run_cli("dequant", folder, out, "--jobs", "1")
    assert done.code == 0, done.err
    wanted = {name: value for name, value in model.tensors.items() if ".experts." not in name}
    wanted |= {f"{module}.weight": meaning(model, module, dialect) for module in modules}
    assert read_tensors(out) == wanted
    assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
    rules = json.loads((out / "qconvert.json").read_bytes())["dropped"]
    assert set(rules) == ({STALE_RULE} if inputs else set())
    assert run_cli("validate", out, "--level", "full", "--against", folder).code == 0


@both
def test_a_model_quantized_here_comes_back(dialect: str, tmp_path: Path) -> None:
    """Also the hybrid of NVFP4 experts and block-FP8 linears."""
    for kind, make in MODELS.items():
        model, folder = make(), tmp_path / kind
        quantized, out = folder / "nvfp4", folder / "bf16"
        first = run_cli("nvfp4", model.write(folder / "source"), quantized, "--dialect", dialect)
        assert first.code == 0, first.err
        # One model has weights next to the largest number, which NVFP4 may round up beyond bf16.
        done = run_cli("dequant", quantized, out, "--jobs", "1", "--allow-overflow")
        assert done.code == 0, done.err
        stored = Model({}, read_tensors(quantized))
        modules, found = experts(stored, dialect), read_tensors(out)
        assert modules
        for module in modules:
            assert found[f"{module}.weight"] == meaning(stored, module, dialect)
        assert {value.dtype for value in found.values()} <= {"BF16", "F32"}
        for name, value in stored.tensors.items():
            if value.dtype == "F8_E4M3" and name.endswith(".weight"):
                assert found[name].data == decoded(model, name.removesuffix(".weight"))


@pytest.mark.peer
def test_compressed_tensors_decompresses_to_the_same(tmp_path: Path) -> None:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    model = source("compressed-tensors")
    done = run_cli("dequant", model.write(tmp_path / "source"), tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    found = read_tensors(tmp_path / "out")
    for module in experts(model, "compressed-tensors"):
        packed, scale, one = (
            torch.frombuffer(bytearray(model.tensors[f"{module}.{name}"].data), dtype=dtype)
            for name, dtype in zip(
                DIALECTS["compressed-tensors"],
                (torch.uint8, torch.float8_e4m3fn, torch.float32),
                strict=True,
            )
        )
        rows, columns = found[f"{module}.weight"].shape
        values = unpack_fp4_from_uint8(packed.reshape(rows, -1), rows, columns, torch.float32)
        factor = (scale.float() / one).reshape(rows, -1, 1)
        wanted = (values.reshape(rows, -1, 16) * factor).bfloat16()
        assert found[f"{module}.weight"].data == wanted.view(torch.uint8).numpy().tobytes()


def refused(model: Model, tmp_path: Path) -> str:
    plan = Plan.identity(Checkpoint.open(model.write(tmp_path / "source")))
    with pytest.raises(PlanError) as caught:
        run_passes(plan, (Dequant(),))
    return str(caught.value)


@both
@pytest.mark.parametrize("part", [0, 1])
def test_a_tensor_that_is_missing_is_named(dialect: str, part: int, tmp_path: Path) -> None:
    model = source(dialect)
    name = f"{experts(model, dialect)[4]}.{DIALECTS[dialect][part]}"
    del model.tensors[name]
    assert repr(name) in refused(model, tmp_path)


@both
def test_an_expert_that_is_missing_is_named(dialect: str, tmp_path: Path) -> None:
    model = source(dialect)
    module = experts(model, dialect)[4]
    for name in [name for name in model.tensors if name.startswith(f"{module}.")]:
        del model.tensors[name]
    said = refused(model, tmp_path)
    assert f"{module}.weight" in said
    assert "is missing" in said


@both
def test_a_scale_of_another_type_is_refused(dialect: str, tmp_path: Path) -> None:
    model = source(dialect)
    name = f"{experts(model, dialect)[0]}.weight_scale"
    value = model.tensors[name]
    model.tensors[name] = Tensor("U8", value.shape, value.data)
    said = refused(model, tmp_path)
    assert repr(name) in said
    assert "expected scales F8_E4M3" in said


def beyond(dialect: str) -> tuple[Model, str]:
    """One matrix whose global scale makes its largest weights infinite, not its block scales."""
    model = source(dialect)
    module, (_, scale, one) = experts(model, dialect)[4], DIALECTS[dialect]
    blocks = model.tensors[f"{module}.{scale}"]
    small = bytes(byte & 0x3F for byte in blocks.data[:-1]) + bytes([0x7E])
    model.tensors[f"{module}.{scale}"] = Tensor(blocks.dtype, blocks.shape, small)
    whole = model.tensors[f"{module}.{one}"]
    number: Any = struct.pack("<f", 4e35 if dialect == "modelopt" else 1 / 4e35)
    model.tensors[f"{module}.{one}"] = Tensor("F32", whole.shape, number)
    weight = model.tensors[f"{module}.{DIALECTS[dialect][0]}"]
    codes = weight.data[:-1] + bytes([0x77])
    model.tensors[f"{module}.{DIALECTS[dialect][0]}"] = Tensor("U8", weight.shape, codes)
    return model, module


@both
def test_weights_beyond_bf16_end_the_run_unless_they_are_allowed(
    dialect: str, tmp_path: Path
) -> None:
    model, module = beyond(dialect)
    folder = model.write(tmp_path / "source")
    done = run_cli("dequant", folder, tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert module in done.err
    assert "beyond bf16" in done.err
    done = run_cli("dequant", folder, tmp_path / "inf", "--jobs", "1", "--allow-overflow")
    assert done.code == 0, done.err
    found = read_tensors(tmp_path / "inf")[f"{module}.weight"]
    assert found == meaning(model, module, dialect)
    assert found.data.endswith(b"\x80\x7f")
