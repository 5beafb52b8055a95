"""Blocks that state an encoding for each layer: modelopt's MIXED_PRECISION and AMD Quark's. Oracles:
float64 arithmetic on codes taken out field by field (encoded_models.py), rounded once; and, marked
`peer`, amd-quark's own unpacking and dequantization (its kernels run on a CPU)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, read_tensors, refused, run_cli
from dequantized import errors, rounded
from encoded_models import Array
from layer_models import (
    E8M0,
    MODELOPT,
    MXFP4,
    QUARK,
    mixed,
    of_quark,
    plain,
    quark,
    stacked_fp8,
    tensor_of,
)
from models import qwen3_moe
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.formats.mx.encode import EncodeQuarkMxfp4
from qconvert.formats.mx.format import quark_config


def becomes_bf16(model: Model, meaning: Mapping[str, Array], folder: Path) -> None:
    source, out = model.write(folder / "source"), folder / "out"
    assert errors(source) == []
    done = run_cli("dequant", source, out, "--jobs", "1")
    assert done.code == 0, done.err
    found = read_tensors(out)
    for name, values in meaning.items():
        assert found[name] == Tensor("BF16", values.shape, rounded(values)), name
    assert not [name for name in found if "scale" in name or "zero_point" in name]
    assert errors(out, "--against", source) == []


# --- modelopt ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", MODELOPT)
def test_a_mixture_of_modelopt_becomes_bf16(attention: str, tmp_path: Path) -> None:
    becomes_bf16(*mixed("NVFP4", attention), tmp_path)


@pytest.mark.parametrize("experts", ["FP8_PB_WO", "MXFP8", "W4A8_MXFP4_FP8"])
def test_experts_of_a_mixture_become_bf16(experts: str, tmp_path: Path) -> None:
    becomes_bf16(*mixed(experts, "FP8"), tmp_path)


def _runtime(module: str) -> str:
    at, _, last = module.rpartition(".")
    return f"{at}.qkv_proj" if last in ("q_proj", "k_proj", "v_proj") else module


@pytest.mark.parametrize(
    "spelled",
    [
        _runtime,
        lambda module: module.partition(".experts.")[0] + ".experts" * (".experts." in module),
        lambda module: module.replace("model.", "model.language_model.", 1),
        lambda module: "model.layers.*." + module.split(".", 3)[3],
    ],
    ids=["fused", "holders", "wrapped", "patterns"],
)
def test_a_table_names_modules_as_runtimes_do(
    spelled: Callable[[str], str], tmp_path: Path
) -> None:
    model, meaning = mixed("FP8", "FP8_PB_WO of 64")
    block = model.config["quantization_config"]
    table = block["quantized_layers"]
    block["quantized_layers"] = {spelled(module): entry for module, entry in table.items()}
    becomes_bf16(model, meaning, tmp_path)


def test_a_stack_has_what_is_stated_of_all_its_experts(tmp_path: Path) -> None:
    model = stacked_fp8()
    source, out = model.write(tmp_path / "in"), tmp_path / "out"
    assert errors(source) == []
    done = run_cli("dequant", source, out)
    assert done.code == 0, done.err
    assert errors(out, "--against", source) == []
    table = model.config["quantization_config"]["quantized_layers"]
    table["model.layers.0.mlp.experts.1.up_proj"] = {"quant_algo": "FP8"}
    said = refused("dequant", model.write(tmp_path / "odd"), tmp_path / "other")
    assert "different FP8 schemes, and none of them covers" in said


def test_the_table_of_modelopts_own_file_is_read(tmp_path: Path) -> None:
    model, meaning = mixed("NVFP4", "FP8_PB_WO")
    block = model.config.pop("quantization_config")
    inner = {key: one for key, one in block.items() if key not in ("quant_method", "ignore")}
    whole = {"quantization": {**inner, "exclude_modules": block["ignore"]}}
    model.side_files["hf_quant_config.json"] = json.dumps(whole).encode()
    becomes_bf16(model, meaning, tmp_path)


def test_one_algorithm_of_blocks_needs_no_size(tmp_path: Path) -> None:
    """FP8_PB_WO's are of 128."""
    model, meaning = mixed("FP8_PB_WO", "FP8_PB_WO")
    block = model.config["quantization_config"]
    del block["quantized_layers"]
    block["quant_algo"] = "FP8_PB_WO"
    becomes_bf16(model, meaning, tmp_path)


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ"])
def test_an_algorithm_that_is_not_read_is_named(algorithm: str, tmp_path: Path) -> None:
    model, _ = mixed("NVFP4", "W4A8_MXFP4_FP8")
    table = model.config["quantization_config"]["quantized_layers"]
    for module, entry in table.items():
        if "self_attn" in module:
            entry["quant_algo"] = algorithm
    said = refused("dequant", model.write(tmp_path / "in"), tmp_path / "out")
    assert f"states {algorithm} for it, which is not read here in that form" in said
    assert "model.layers.0.self_attn.k_proj.weight' is U8" in said
    found = errors(tmp_path / "in")
    assert [one["rule"] for one in found] == ["QC097"]
    assert algorithm in found[0]["message"]


def test_inputs_that_are_scaled_before_nvfp4_are_refused(tmp_path: Path) -> None:
    model, _ = mixed("NVFP4_AWQ", "FP8")
    name = "model.layers.0.mlp.experts.0.up_proj.pre_quant_scale"
    model.tensors[name] = Tensor("BF16", (128,), b"\0\x3f" * 128)
    said = refused("dequant", model.write(tmp_path / "in"), tmp_path / "out")
    assert f"{name!r}: inputs are multiplied by it" in said


def test_a_layer_of_another_algorithm_is_refused(tmp_path: Path) -> None:
    model, _ = mixed("NVFP4", "FP8_PB_WO")
    module = "model.layers.1.self_attn.o_proj"
    model.config["quantization_config"]["quantized_layers"][module] = {"quant_algo": "NVFP4"}
    source = model.write(tmp_path / "in")
    said = refused("dequant", source, tmp_path / "out")
    assert f"states 4-bit float for '{module}', which is FP8" in said
    assert {(one["rule"], one["where"]) for one in errors(source)} >= {
        ("QC096", f"{module}.weight")
    }


def test_fp8_in_other_blocks_than_the_table_states_is_refused(tmp_path: Path) -> None:
    model, _ = mixed("NVFP4", "FP8_PB_WO of 64")
    for entry in model.config["quantization_config"]["quantized_layers"].values():
        entry.pop("group_size")
    source = model.write(tmp_path / "in")
    assert "in blocks of 128x128, found [1, 2]" in refused("dequant", source, tmp_path / "out")
    assert {one["rule"] for one in errors(source)} == {"QC015"}


# --- Quark ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", QUARK)
def test_an_encoding_of_quark_becomes_bf16(encoding: str, tmp_path: Path) -> None:
    becomes_bf16(*quark(encoding), tmp_path)


@pytest.mark.parametrize("attention", ["FP8 a tensor", "FP8 a row", "INT8", "INT4"])
def test_a_mixture_of_quark_becomes_bf16(attention: str, tmp_path: Path) -> None:
    becomes_bf16(*quark("MXFP4", attention), tmp_path)


def test_a_config_for_linear_layers_stands_before_that_for_all(tmp_path: Path) -> None:
    model, meaning = quark("FP8 in blocks")
    block = model.config["quantization_config"]
    block["layer_type_quant_config"] = {"Linear": block["global_quant_config"]}
    block["global_quant_config"] = MXFP4
    becomes_bf16(model, meaning, tmp_path)


@pytest.mark.parametrize(
    "weight",
    [tensor_of("fp6_e2m3", "per_group", **E8M0), tensor_of("int4", "per_channel", ch_axis=0)],
)
def test_an_encoding_of_quark_that_is_not_read_is_named(
    weight: Mapping[str, Any], tmp_path: Path
) -> None:
    model, _ = quark("MXFP4")
    model.config["quantization_config"]["global_quant_config"] = of_quark(weight)
    said = refused("dequant", model.write(tmp_path / "in"), tmp_path / "out")
    assert "which is not read here in that form" in said
    assert errors(tmp_path / "in")


@pytest.mark.parametrize(
    ("encoding", "part", "shape", "rules", "said"),
    [
        ("MXFP4", "weight_scale", (256, 3), {"QC027"}, "[256, 128 / 32]"),
        ("MXFP4", "weight_scale", None, {"QC097"}, "weight_scale' is missing"),
        ("INT4", "weight_scale", (3, 256), {"QC089"}, "weight_scale"),
        ("INT4", "weight_scale", None, {"QC088"}, "weight_scale' is missing"),
        ("UINT4", "weight_zero_point", (4, 31), {"QC089"}, "[4, 32]"),
        ("UINT4", "weight_zero_point", None, {"QC088"}, "weight_zero_point' is missing"),
        ("INT8", "weight_scale", (255,), {"QC089"}, "[256, groups]"),
        ("FP8 a tensor", "weight_scale", (2,), {"QC015"}, "found [2]"),
    ],
)
def test_parts_of_quark_that_do_not_fit_are_found(
    encoding: str,
    part: str,
    shape: tuple[int, ...] | None,
    rules: set[str],
    said: str,
    tmp_path: Path,
) -> None:
    model, _ = quark(encoding)
    name = f"model.layers.1.mlp.experts.1.up_proj.{part}"
    old = model.tensors.pop(name)
    if shape is not None:
        size = {"F32": 4, "F16": 2, "U8": 1, "I32": 4, "I8": 1}[old.dtype]
        model.tensors[name] = Tensor(old.dtype, shape, b"\1" * (int(np.prod(shape)) * size))
    source = model.write(tmp_path / "in")
    assert said in refused("dequant", source, tmp_path / "out")
    assert {one["rule"] for one in errors(source)} >= rules


def test_static_inputs_of_quark_need_their_scales(tmp_path: Path) -> None:
    model, _ = quark("FP8 a tensor")
    model.tensors = {n: t for n, t in model.tensors.items() if not n.endswith("input_scale")}
    assert [one["rule"] for one in errors(model.write(tmp_path / "in"))] == ["QC101"]


# --- relabel -------------------------------------------------------------------------------------


def relabelled(model: Model, folder: Path, *how: str) -> dict[str, Tensor]:
    source, out = model.write(folder / "in"), folder / "out"
    done = run_cli("relabel", source, out, *how)
    assert done.code == 0, done.err
    assert errors(out, "--against", source) == []
    return read_tensors(out)


def test_quarks_mxfp4_gets_compressed_tensors_names(tmp_path: Path) -> None:
    model, meaning = quark("MXFP4")
    made = relabelled(model, tmp_path, "--to", "compressed-tensors")
    for name in meaning:
        assert made[f"{name}_packed"] == model.tensors[name]
        assert made[f"{name}_scale"] == model.tensors[f"{name}_scale"]
    block = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    assert block["format"] == "mxfp4-pack-quantized"


@pytest.mark.parametrize("of", ["quark", "modelopt"])
@pytest.mark.parametrize(("encoding", "last"), [("tensor", 1), ("row", None)])
def test_fp8_gets_compressed_tensors_shapes(
    of: str, encoding: str, last: int | None, tmp_path: Path
) -> None:
    if of == "quark":
        model, meaning = quark(f"FP8 a {encoding}")
    else:
        kind = {"tensor": "FP8", "row": "FP8_PER_CHANNEL_PER_TOKEN"}[encoding]
        model, meaning = mixed(kind, kind)
    made = relabelled(model, tmp_path, "--to", "compressed-tensors")
    for name, values in meaning.items():
        assert made[name] == model.tensors[name]
        scale = made[f"{name}_scale"]
        assert scale.shape == ((1,) if last else (values.shape[0], 1))
        assert scale.data == model.tensors[f"{name}_scale"].data
    block = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    (group,) = block["config_groups"].values()
    assert group["weights"]["strategy"] == ("tensor" if last else "channel")
    assert group["input_activations"]["dynamic"] is not bool(last)


def test_quarks_int4_becomes_packed_integers(tmp_path: Path) -> None:
    model, _ = quark("UINT4")
    made = relabelled(model, tmp_path, "--to", "compressed-tensors")
    assert [name for name in made if name.endswith("weight_zero_point")]


# --- written -------------------------------------------------------------------------------------


def _block(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    return found


@pytest.mark.parametrize("targets", ["experts", "Linear"])
def test_mxfp4_is_written_as_quark_names_it(targets: str, tmp_path: Path) -> None:
    """The numbers and exponents are those of compressed-tensors' dialect; zeros have no sign."""
    source = plain().write(tmp_path / "in")
    outs = [tmp_path / dialect for dialect in ("compressed-tensors", "quark")]
    for out in outs:
        named = (
            (
                "--dialect",
                "quark",
            )
            if out.name == "quark"
            else ()
        )
        done = run_cli("mx", source, out, *named, "--targets", targets)
        assert done.code == 0, done.err
        assert errors(out, "--against", source) == []
    packed, own = map(read_tensors, outs)
    names = [name for name in packed if name.endswith(".weight_packed")]
    assert len(names) == 12 + 8 * (targets == "Linear")
    for name in names:
        stem = name.removesuffix("_packed")
        assert own[f"{stem}_scale"] == packed[f"{stem}_scale"]
        numbers = [
            np.frombuffer(one.data, np.uint8)[:, None] >> np.array([0, 4]) & 15
            for one in (packed[name], own[stem])
        ]
        assert np.array_equal(np.where(numbers[0] == 8, 0, numbers[0]), numbers[1])
    block = _block(outs[1])
    assert block["global_quant_config"]["input_tensors"]["is_dynamic"] is True
    assert "lm_head" in block["exclude"]
    assert ("model.layers.0.self_attn.qkv_proj" in block["exclude"]) == (targets == "experts")
    again = refused("mx", outs[1], tmp_path / "again")
    assert "the source is MXFP4" in again


def test_quark_has_no_mxfp8_and_no_place_for_fp8(tmp_path: Path) -> None:
    source = qwen3_moe("fp8").write(tmp_path / "in")
    said = run_cli("mx", source, tmp_path / "out", "--dialect", "quark", "--bits", "8")
    assert said.code == 2
    assert "dialect quark is written for mxfp4 alone" in said.err
    assert "is FP8 and stays so" in refused("mx", source, tmp_path / "out", "--dialect", "quark")


def test_mxfp4_goes_to_quark_and_back(tmp_path: Path) -> None:
    source = plain().write(tmp_path / "in")
    assert run_cli("mx", source, tmp_path / "first").code == 0
    for to, of in (("quark", "first"), ("compressed-tensors", "quark")):
        done = run_cli("relabel", tmp_path / of, tmp_path / to, "--to", to)
        assert done.code == 0, done.err
        assert errors(tmp_path / to, "--against", tmp_path / of) == []
    first, last = (read_tensors(tmp_path / name) for name in ("first", "compressed-tensors"))
    assert {n: t for n, t in first.items() if "shape" not in n} == last
    said = refused("relabel", tmp_path / "quark", tmp_path / "out", "--to", "quark")
    assert "in form quark already" in said


# --- inspect and peers ---------------------------------------------------------------------------


def test_inspect_names_quarks_encodings(tmp_path: Path) -> None:
    model, _ = quark("INT4", "INT8")
    out = run_cli("inspect", model.write(tmp_path / "in")).out
    assert "Quark INT4 g32" in out
    assert "Quark INT8 per channel" in out


@pytest.mark.peer
@pytest.mark.parametrize("encoding", ["INT4", "UINT4", "UINT4 in order", "MXFP4"])
def test_quark_dequantizes_to_the_same_numbers(encoding: str) -> None:
    """Its own unpacking and dequantization, of a float32 result, rounded to bf16 once."""
    pack = pytest.importorskip("quark.torch.utils.pack", reason="amd-quark is not installed")
    dequantize = pytest.importorskip("quark.torch.kernel").dequantize
    layer, make, method = QUARK[encoding]
    stated = layer["weight"]
    parts, values = make(np.random.default_rng(3), 64, 128)
    numbers = {"U8": torch.uint8, "I32": torch.int32, "F16": torch.float16}
    tensors = {
        name: torch.frombuffer(bytearray(one.data), dtype=numbers[one.dtype]).reshape(one.shape)
        for name, one in parts.items()
    }
    packer = pack.create_pack_method("per_group", stated["dtype"])
    codes = packer.unpack(tensors["weight"], method == "reorder")
    scale, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    if encoding == "MXFP4":
        scale = 2.0 ** (scale.to(torch.int16) - 127).float()
    else:
        scale = scale.t().contiguous()
        zeros = packer.unpack(zeros, method == "reorder")
    found = dequantize(stated["dtype"], codes, scale, zeros, -1, stated["group_size"], "per_group")
    assert found.bfloat16().view(torch.uint8).numpy().tobytes() == rounded(values)


@pytest.mark.peer
def test_quark_writes_the_same_mxfp4() -> None:
    """Its own scales, codes and packing of a matrix in BF16; its config reads the block that is
    written."""
    config = pytest.importorskip(
        "quark.torch.quantization.config.config", reason="amd-quark is not installed"
    )
    fake = pytest.importorskip("quark.torch.quantization.tensor_quantize").FakeQuantizeBase
    real = pytest.importorskip("quark.torch.export.nn.modules.realquantizer")
    spec = config.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec()
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[5] = 0
    weight = weight.bfloat16()
    seen = fake.get_fake_quantize(spec, device=torch.device("cpu"))
    seen.enable_observer()
    seen.disable_fake_quant()
    seen(weight)
    theirs = real.StaticScaledRealQuantizer(
        spec, seen, True, True, torch.bfloat16, torch.device("cpu")
    )
    codes = theirs.to_real_quantize_params(weight)
    theirs.maybe_convert_and_transpose_scale()
    data = weight.view(torch.uint8).numpy().tobytes()
    (mine, scale), _ = run_op(
        EncodeQuarkMxfp4("mxfp4"), [buffer(TensorType("BF16", (96, 160)), data)]
    )
    assert mine == codes.numpy().tobytes()
    zero = np.frombuffer(scale, np.uint8).reshape(96, 5)
    assert np.array_equal(np.delete(zero, 5, 0), np.delete(theirs.scale.numpy(), 5, 0))
    block = quark_config(["lm_head"])
    assert config.QConfig.from_dict(block).to_dict() | {"export": block["export"]} == block
