"""`qconvert relabel`: codes are the same numbers, there and back is the identity, and what cannot be is
refused. Oracles: words taken apart field by field (int_forms.py, encoded_models.py), and, marked `peer`,
compressed-tensors' own converters."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, ran, read_tensors, run_cli
from dequantized import as_torch
from encoded_models import NVFP4_SCALARS, encoded, gpt_oss, near, nvfp4
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.published import published
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RowError, RunError
from qconvert.core.parameter_names import Dialect
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.fp8.from_mxfp4 import MxToBlockFp8
from qconvert.formats.mx.decode import DequantMxfp4
from qconvert.formats.nvfp4.decode import DequantNvfp4
from qconvert.formats.nvfp4.relabel import ExponentRange, Reciprocal, RelabelBlocks, RelabelOwn


def relabelled(source: Path, out: Path, to: str, *more: str) -> dict[str, Tensor]:
    """A folder that `relabel` made, and in which `validate --level full` finds no error."""
    done = run_cli("relabel", source, out, "--to", to, "--jobs", "1", *more)
    assert done.code == 0, done.err
    judged = run_cli("validate", out, "--level", "full", "--against", source, "--json")
    found = json.loads(judged.out)["findings"]
    assert judged.code == 0, [one for one in found if one["severity"] == "error"]
    return read_tensors(out)


def refused(source: Path, to: str, folder: Path, *more: str) -> str:
    done = run_cli("relabel", source, folder / "refused", "--to", to, "--jobs", "1", *more)
    assert done.code == 1
    return done.err


def in_bf16(folder: Path, out: Path) -> dict[str, Tensor]:
    done = run_cli("dequant", folder, out, "--jobs", "1")
    assert done.code == 0, done.err
    return read_tensors(out)


# --- integers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("encoding", ["awq", "awq symmetric", "awq a row"])
def test_awq_becomes_compressed_tensors(family: str, encoding: str, tmp_path: Path) -> None:
    """The same weights in BF16, and by hand from the new form's fields."""
    model, _ = encoded(family, encoding)
    source = model.write(tmp_path / "awq")
    relabelled(source, tmp_path / "packed", "compressed-tensors")
    assert in_bf16(tmp_path / "packed", tmp_path / "b") == in_bf16(source, tmp_path / "a")


@pytest.mark.parametrize("encoding", ["awq", "awq symmetric"])
@pytest.mark.parametrize(
    "way", [("gptq-v2", "compressed-tensors"), ("compressed-tensors", "gptq-v2")]
)
def test_there_and_back_is_the_identity(
    way: tuple[str, str], encoding: str, tmp_path: Path
) -> None:
    model, _ = encoded("qwen3_moe", encoding)
    first, other = way
    one = relabelled(model.write(tmp_path / "awq"), tmp_path / "one", first)
    relabelled(tmp_path / "one", tmp_path / "two", other)
    assert relabelled(tmp_path / "two", tmp_path / "three", first) == one


def test_gptqs_versions(tmp_path: Path) -> None:
    """Only zero points differ: each field by one."""
    model, _ = encoded("qwen3_moe", "awq symmetric")
    two = relabelled(model.write(tmp_path / "awq"), tmp_path / "two", "gptq-v2")
    one = relabelled(tmp_path / "two", tmp_path / "one", "gptq")
    zeros = {name for name in one if name.endswith(".qzeros")}
    assert zeros
    for name in zeros:
        assert set(one[name].data) == {0x77}
        assert set(two[name].data) == {0x88}
    assert {n: t for n, t in one.items() if n not in zeros} == {
        n: t for n, t in two.items() if n not in zeros
    }
    assert relabelled(tmp_path / "one", tmp_path / "back", "gptq-v2") == two


def without_zero(model: Model) -> Model:
    """Zero points of 0 are 5 now."""
    for name, value in model.tensors.items():
        if name.endswith(".qzeros"):
            pairs = [(byte & 15, byte >> 4) for byte in value.data]
            data = bytes((low or 5) | (high or 5) << 4 for low, high in pairs)
            model.tensors[name] = Tensor(value.dtype, value.shape, data)
    return model


def test_a_zero_point_of_0_is_none_of_gptqs_first_version(tmp_path: Path) -> None:
    model, _ = encoded("qwen3_moe", "awq")
    said = refused(model.write(tmp_path / "awq"), "gptq", tmp_path)
    assert re.search(r"_proj\.qweight'.*: row \d+.* has a zero point of 0 in group \d", said)
    assert "take gptq-v2" in said


@pytest.mark.parametrize("by", ["awq", "gptq-v2", "compressed-tensors"])
def test_asymmetric_codes_become_gptqs_first_version_where_their_zero_points_fit(
    by: str, tmp_path: Path
) -> None:
    """From each form there is, and back to the others."""
    source = without_zero(encoded("qwen3_moe", "awq")[0]).write(tmp_path / "awq")
    wanted = in_bf16(source, tmp_path / "bf16")
    if by != "awq":
        relabelled(source, tmp_path / "between", by)
        source = tmp_path / "between"
    made = relabelled(source, tmp_path / "one", "gptq")
    config = json.loads((tmp_path / "one" / "config.json").read_bytes())["quantization_config"]
    assert (config["checkpoint_format"], config["sym"]) == ("gptq", False)
    assert in_bf16(tmp_path / "one", tmp_path / "a") == wanted
    packed = relabelled(tmp_path / "one", tmp_path / "packed", "compressed-tensors")
    assert any(name.endswith("weight_zero_point") for name in packed)
    assert relabelled(tmp_path / "packed", tmp_path / "again", "gptq") == made


def test_a_zero_point_that_the_config_denies(tmp_path: Path) -> None:
    """A folder that says symmetric and is not: no form without zero points can hold it."""
    model, _ = encoded("qwen3_moe", "awq symmetric")
    relabelled(model.write(tmp_path / "awq"), tmp_path / "two", "gptq-v2")
    made = read_tensors(tmp_path / "two")
    config = json.loads((tmp_path / "two" / "config.json").read_bytes())
    name = next(name for name in made if name.endswith(".qzeros"))
    value = made[name]
    made[name] = Tensor(value.dtype, value.shape, b"\x89" + value.data[1:])
    source = Model(config, made, dict(models.SIDE_FILES)).write(tmp_path / "broken")
    said = refused(source, "compressed-tensors", tmp_path)
    assert name.removesuffix("qzeros") in said
    assert "has a zero point of 9 in group 0, and the config says symmetric" in said


@pytest.mark.peer
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_awqs_converter_writes_the_same_bytes(family: str, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    model, _ = encoded(family, "awq")
    found = relabelled(model.write(tmp_path / "awq"), tmp_path / "out", "compressed-tensors")
    block: dict[str, Any] = dict(model.config["quantization_config"])
    converter = AutoAWQConverter.from_autoawq_config(block)
    theirs = converter.process({n: as_torch(t) for n, t in model.tensors.items()})
    assert set(theirs) == set(found)
    for name, value in theirs.items():
        mine = found[name]
        assert mine.shape == tuple(value.shape), name
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        assert data == mine.data, name


# --- NVFP4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_nvfp4_between_dialects(dialect: str, inputs: bool, tmp_path: Path) -> None:
    other = next(name for name in NVFP4_SCALARS if name != dialect)
    model = nvfp4(dialect, inputs=inputs)
    source = model.write(tmp_path / "source")
    made = relabelled(source, tmp_path / "out", other)
    codes = {"modelopt": "weight", "compressed-tensors": "weight_packed"}
    for name, value in model.tensors.items():
        module, _, parameter = name.rpartition(".")
        if value.dtype == "U8":
            assert made[f"{module}.{codes[other]}"] == value
        elif parameter in NVFP4_SCALARS[dialect]:
            new = NVFP4_SCALARS[other][NVFP4_SCALARS[dialect].index(parameter)]
            (mine,) = struct.unpack("<f", made[f"{module}.{new}"].data)
            assert np.float32(1) / np.float32(mine) == struct.unpack("<f", value.data)[0]
        else:
            assert made[name] == value
    assert relabelled(tmp_path / "out", tmp_path / "back", dialect) == model.tensors


def test_a_scale_without_reciprocal_is_refused(tmp_path: Path) -> None:
    model = nvfp4("modelopt")
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_2"
    model.tensors[name] = Tensor("F32", (), struct.pack("<f", _without_reciprocal()))
    source = model.write(tmp_path / "source")
    said = refused(source, "compressed-tensors", tmp_path)
    assert name.removesuffix("_scale_2").removesuffix(".weight") in said
    assert "--nearest" in said
    done = run_cli("relabel", source, tmp_path / "out", "--to", "compressed-tensors", "--nearest")
    assert done.code == 0, done.err


def _without_reciprocal() -> float:
    """The first float32 above 1.5 to which no reciprocal rounds, by trying all near its own."""
    value = np.float32(1.5)
    while True:
        near = np.float32(1) / value
        around = [near]
        for _ in range(3):
            around += [
                np.nextafter(around[-1], np.float32(9), dtype=np.float32),
                np.nextafter(around[0], np.float32(0), dtype=np.float32),
            ]
        if all(np.float32(1) / one != value for one in around):
            return float(value)
        value = np.nextafter(value, np.float32(2), dtype=np.float32)


@settings(deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_reciprocals_there_and_back(value: float) -> None:
    """Of any scale: refused, or its divisor means it, and back it is the same bits."""
    kind = TensorType("F32", (1,))
    start = struct.pack("<f", value)
    for there, back in (("divisor", "multiplier"), ("multiplier", "divisor")):
        try:
            (made,), _ = run_op(Reciprocal(there), [buffer(kind, start)])  # type: ignore[arg-type]
        except RunError as error:
            assert "no reciprocal" in str(error)  # noqa: PT017
            continue
        (again,), _ = run_op(Reciprocal(back), [buffer(kind, made)])  # type: ignore[arg-type]
        assert again == start


# --- FP8 ----------------------------------------------------------------------------------------


def test_block_fp8_between_names(tmp_path: Path) -> None:
    """Of Qwen3-MoE: names and config alone, and back the same tensors."""
    model = models.qwen3_moe("fp8")
    source = model.write(tmp_path / "source")
    packed = relabelled(source, tmp_path / "packed", "compressed-tensors")
    assert packed == {n.replace("_scale_inv", "_scale"): t for n, t in model.tensors.items()}
    config = json.loads((tmp_path / "packed" / "config.json").read_bytes())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert group["weights"]["block_structure"] == [128, 128]
    assert relabelled(tmp_path / "packed", tmp_path / "back", "fp8") == model.tensors


def test_what_sglang_splits_is_refused(tmp_path: Path) -> None:
    said = refused(models.deepseek_v3().write(tmp_path / "s"), "compressed-tensors", tmp_path)
    assert "kv_b_proj" in said


# --- MXFP4 to FP8 -------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["mxfp4", "mxfp4 beside"])
def test_mxfp4_becomes_the_same_numbers_in_fp8(encoding: str, tmp_path: Path) -> None:
    source = near(encoded("qwen3_moe", encoding)[0]).write(tmp_path / "source")
    made = relabelled(source, tmp_path / "out", "fp8")
    scale = "scale" if encoding == "mxfp4 beside" else "weight_scale_inv"
    assert any(name.endswith(f"up_proj.{scale}") for name in made)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config.get("expert_dtype") == ("fp8" if encoding == "mxfp4 beside" else None)
    assert in_bf16(tmp_path / "out", tmp_path / "b") == in_bf16(source, tmp_path / "a")


def _block(exponents: list[int], codes: int) -> list[Any]:
    rows = len(exponents)
    return [
        buffer(TensorType("U8", (rows, 16)), bytes([codes | codes << 4]) * 16 * rows),
        buffer(TensorType("U8", (rows, 1)), bytes(exponents)),
    ]


@pytest.mark.parametrize("code", range(16))
def test_every_code_at_every_distance(code: int) -> None:
    """A row of 6 at the top, and one of the code, d below: it is exact, or refused, as float64 says of
    E4M3: a multiple of 2^-9 of at most four significant bits."""
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for distance in range(30):
        ins = _block([200, 200 - distance], 7)
        packed = bytes([0x77] * 16 + [code | code << 4] * 16)
        ins[0] = buffer(ins[0].type, packed)
        held = sizes[code & 7] * 2.0 ** (6 - distance) % 2.0**-9 == 0
        if not held:
            with pytest.raises(RowError, match="row 1 has MXFP4 exponents"):
                run_op(MxToBlockFp8(), ins)
            continue
        (codes, scale), _ = run_op(MxToBlockFp8(), ins)
        back = [
            buffer(TensorType("F8_E4M3", (2, 32)), codes),
            buffer(TensorType("F32", (1, 1)), scale),
        ]
        decoded, _ = run_op(DequantFp8((128, 128)), back)
        wanted, _ = run_op(DequantMxfp4(), ins)
        assert decoded == wanted
        theirs = torch.frombuffer(bytearray(codes), dtype=torch.float8_e4m3fn).float()[32]
        assert abs(float(theirs)) == sizes[code & 7] * 2.0 ** (6 - distance)


def test_exponents_too_far_apart_name_the_tensor(tmp_path: Path) -> None:
    model, _ = encoded("qwen3_moe", "mxfp4")
    said = refused(model.write(tmp_path / "source"), "fp8", tmp_path)
    assert ".experts." in said
    assert "it cannot be relabelled without loss" in said


def test_blocks_of_zeros_have_a_scale_of_one() -> None:
    (codes, scale), _ = run_op(MxToBlockFp8(), _block([0, 254], 0))
    assert set(codes) == {0}
    assert struct.unpack("<f", scale) == (1.0,)


# --- MXFP4 to NVFP4 -----------------------------------------------------------------------------


def _nvfp4_of(ins: list[Any], dialect: Dialect) -> list[Any]:
    """What an MXFP4 matrix becomes: codes, block scales and the global scale."""
    rows, half = ins[0].type.shape
    (extent,), _ = run_op(ExponentRange(), ins)
    pairs = buffer(TensorType("U8", (rows, 2)), extent)
    own = buffer(TensorType("F32", (1,)), run_op(RelabelOwn(dialect), [pairs])[0][0])
    (blocks,), _ = run_op(RelabelBlocks(dialect), [ins[1], own])
    codes = buffer(TensorType("U8", (rows, half)), bytes(ins[0].data))
    return [codes, buffer(TensorType("F8_E4M3", (rows, half // 8)), blocks), own]


def _by_torch(parts: list[Any], dialect: str) -> torch.Tensor:
    """NVFP4 in float64."""
    rows, half = parts[0].type.shape
    packed = torch.frombuffer(bytearray(parts[0].data), dtype=torch.uint8).reshape(rows, half)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.cat([sizes, -sizes])[torch.stack([packed & 15, packed >> 4], -1).long()]
    blocks = torch.frombuffer(bytearray(parts[1].data), dtype=torch.float8_e4m3fn).double()
    (own,) = struct.unpack("<f", parts[2].data)
    scale = blocks.reshape(rows, -1) * (own if dialect == "modelopt" else 1 / own)
    found: torch.Tensor = codes.reshape(rows, -1) * scale.repeat_interleave(16, 1)
    return found


@pytest.mark.parametrize("kinds", [("U8", "U8"), ("I8", "F8_E8M0")])
@pytest.mark.parametrize("dialect", NVFP4_SCALARS)
@pytest.mark.parametrize("top", [17, 100, 127, 200, 252])
def test_every_code_at_every_spread(top: int, dialect: Dialect, kinds: tuple[str, str]) -> None:
    """All codes at `top` and `spread` below: the same numbers to the bit, or refused, in float64 and in
    the reader of either form. E4M3's powers of two go from 2^8 down to 2^-9: 17 apart."""
    halves = bytes(range(0, 256, 17)) * 2
    for spread in range(min(top, 40) + 1):
        ins = [
            buffer(TensorType(kinds[0], (2, 16)), halves),
            buffer(TensorType(kinds[1], (2, 1)), bytes([top - spread, top])),
        ]
        if spread > 17:
            with pytest.raises(RunError, match=f"from {top - spread} to {top}.*row 0, row 1"):
                _nvfp4_of(ins, dialect)
            continue
        if dialect == "compressed-tensors" and top - 127 - 8 < -127:
            with pytest.raises(RunError, match="take dialect modelopt"):
                _nvfp4_of(ins, dialect)
            continue
        made = _nvfp4_of(ins, dialect)
        wanted, _ = run_op(DequantMxfp4(), ins)
        assert run_op(DequantNvfp4(dialect), made)[0] == wanted
        theirs = _by_torch(made, dialect).bfloat16()
        assert theirs.view(torch.uint8).numpy().tobytes() == wanted[0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_matrix_is_the_same_or_refused(data: st.DataObject) -> None:
    rows, blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    low = data.draw(st.integers(20, 230))
    exponents = data.draw(
        st.lists(st.integers(low, low + 20), min_size=rows * blocks, max_size=rows * blocks)
    )
    codes = data.draw(st.binary(min_size=16 * rows * blocks, max_size=16 * rows * blocks))
    ins = [
        buffer(TensorType("U8", (rows, 16 * blocks)), codes),
        buffer(TensorType("U8", (rows, blocks)), bytes(exponents)),
    ]
    groups = [codes[16 * n : 16 * n + 16] for n in range(rows * blocks)]
    used = [e for e, group in zip(exponents, groups, strict=True) if any(b & 0x77 for b in group)]
    if used and max(used) - min(used) > 17:
        with pytest.raises(RunError, match="cannot be relabelled without loss"):
            _nvfp4_of(ins, "modelopt")
        return
    wanted, _ = run_op(DequantMxfp4(), ins)
    assert run_op(DequantNvfp4("modelopt"), _nvfp4_of(ins, "modelopt"))[0] == wanted


NVFP4_CASES = [
    ("mxfp4", "modelopt"), ("mxfp4", "compressed-tensors"), ("mxfp4 beside", "modelopt"),
]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("encoding", "dialect"), NVFP4_CASES)
def test_mxfp4_becomes_the_same_numbers_in_nvfp4(
    encoding: str, dialect: str, family: str, tmp_path: Path
) -> None:
    """The codes' bytes, and the same weights in BF16; what `nvfp4` makes of it, where it reads it."""
    model = near(encoded(family, encoding)[0])
    source = listed(without_drafts(model)).write(tmp_path / "source")
    made = relabelled(source, tmp_path / "out", "nvfp4", "--dialect", dialect)
    name = "weight" if dialect == "modelopt" else "weight_packed"
    for codes, value in model.tensors.items():
        if value.dtype in ("U8", "I8") and not codes.endswith("scale"):
            one = made[f"{codes.rpartition('.')[0]}.{name}"]
            assert (one.dtype, one.data) == ("U8", value.data)
    assert in_bf16(tmp_path / "out", tmp_path / "b") == in_bf16(source, tmp_path / "a")
    if encoding == "mxfp4":
        done = run_cli("nvfp4", source, tmp_path / "n", "--dialect", dialect, "--jobs", "1")
        assert done.code == 0, done.err
        assert read_tensors(tmp_path / "n") == made
        configs = [(tmp_path / one / "config.json").read_bytes() for one in ("n", "out")]
        assert configs[0] == configs[1]


def without_drafts(model: Model) -> Model:
    """DeepSeek's without its MTP layer, which modelopt's dialect has no place for."""
    if "num_nextn_predict_layers" in model.config:
        last = f"model.layers.{model.config['num_hidden_layers']}."
        for name in [name for name in model.tensors if name.startswith(last)]:
            del model.tensors[name]
        model.config["num_nextn_predict_layers"] = 0
    return model


def listed(model: Model) -> Model:
    """The model with every matrix that is not quantized in compressed-tensors' list."""
    block = model.config["quantization_config"]
    if "ignore" in block:
        plain = [n.removesuffix(".weight") for n in model.tensors if n.endswith(".weight")]
        model.config["quantization_config"] = {**block, "ignore": plain}
    return model


def hybrid() -> Model:
    """DeepSeek-V3 with its FP8 layers as they are, and experts in MXFP4 as DeepSeek-V4 has them."""
    model = near(encoded("deepseek_v3", "mxfp4 beside")[0])
    fp8 = models.deepseek_v3().tensors
    layers = [n for n in fp8 if fp8[n].dtype == "F8_E4M3" and ".experts." not in n]
    model.tensors |= {n: fp8[n] for n in (*layers, *(f"{n}_scale_inv" for n in layers))}
    left = model.config["quantization_config"]["modules_to_not_convert"]
    kept = [one for one in left if f"{one}.weight" not in layers]
    model.config["quantization_config"]["modules_to_not_convert"] = kept
    return model


def test_experts_beside_fp8(tmp_path: Path) -> None:
    """FP8 layers as they are, experts of the draft too; runtimes read `moe_quant_algo`."""
    model = hybrid()
    source = model.write(tmp_path / "source")
    said = refused(source, "nvfp4", tmp_path, "--dialect", "modelopt")
    assert "give an input scale (--input-scale 1.0)" in said
    said = refused(source, "nvfp4", tmp_path, "--dialect", "compressed-tensors")
    assert "take dialect modelopt" in said
    made = relabelled(
        source, tmp_path / "out", "nvfp4", "--dialect", "modelopt", "--input-scale", "0.5"
    )
    draft = f"model.layers.{model.config['num_hidden_layers']}."
    for name, value in model.tensors.items():
        if ".experts." not in name or name.startswith(draft):
            assert made[name] == value
    inputs = {name: t.data for name, t in made.items() if name.endswith("input_scale")}
    assert set(inputs.values()) == {struct.pack("<f", 0.5)}
    assert not any(name.startswith(draft) for name in inputs)
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    old = model.config["quantization_config"]
    new = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    assert config["quantization_config"] == {**old, **new}
    assert config["expert_dtype"] == "fp4"
    mended = run_cli("repair", tmp_path / "out", "--dry-run")
    assert "would change" not in mended.out
    assert in_bf16(tmp_path / "out", tmp_path / "b") == in_bf16(source, tmp_path / "a")


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "to", "words"),
    [
        (lambda: models.qwen3_moe(), "fp8", "no quantized weight found"),
        (lambda: models.qwen3_moe("fp8"), "gptq", "FP8 does not become gptq without rounding"),
        (lambda: models.kimi(), "compressed-tensors", "already: use it as it is"),
        (lambda: encoded("qwen3_moe", "mxfp4")[0], "modelopt", "it becomes NVFP4 (--to nvfp4)"),
        (lambda: encoded("qwen3_moe", "int8")[0], "gptq", "INT8 does not become gptq"),
        (lambda: encoded("qwen3_moe", "mxfp8")[0], "fp8", "scales are exponents, as of MXFP8"),
        (lambda: gpt_oss()[0], "fp8", "is a stack of MXFP4 matrices of gpt-oss"),
    ],
)
def test_what_has_no_other_form(make: Any, to: str, words: str, tmp_path: Path) -> None:
    assert words in refused(make().write(tmp_path / "source"), to, tmp_path)


def test_scales_of_a_kv_cache_stay_stated(tmp_path: Path) -> None:
    """In each dialect's words: a runtime reads scales that its config states alone."""
    source, there, back = tmp_path / "source", tmp_path / "there", tmp_path / "back"
    published("qwen3_moe", experts=2, inner=128).write(tmp_path / "bf16")
    step = ("nvfp4", tmp_path / "bf16", source, "--dialect", "modelopt", "--weight-only")
    ran(*step, "--kv-scale", "0.5", "--jobs", "1")
    relabelled(source, there, "compressed-tensors", "--nearest")
    relabelled(there, back, "modelopt", "--nearest")
    blocks = [
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (source, there, back)
    ]
    assert blocks[1]["kv_cache_scheme"]["num_bits"] == 8
    assert blocks[2] == blocks[0]
    files = [(folder / "hf_quant_config.json").read_bytes() for folder in (source, back)]
    assert files[0] == files[1]
    assert json.loads(files[0])["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_a_form_without_a_kv_cache_has_no_place_for_its_scales(tmp_path: Path) -> None:
    models.qwen3_moe().write(tmp_path / "bf16")
    source, step = tmp_path / "source", ("--rtn", "--group-size", "32", "--kv-scale", "0.5")
    ran("w4a16", tmp_path / "bf16", source, *step, "--jobs", "1")
    assert "'gptq' has no scales of a KV cache" in refused(source, "gptq", tmp_path)
