"""Fusing and splitting rows of packed integers, INT8, FP4 and static FP8: the codes' rows, scales of
groups and zero points move together. Oracles: dequantizing and fusing commute, there and back is the
identity, and `validate`, which reads both folders with code of its own."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gdn_models
import numpy as np
import pytest
from checkpoints import Model, Tensor, ran, read_tensors, run_cli
from encoded_models import Parts, int8, mxfp4, mxfp8, stored
from loaders.folders import source as family_source
from sampled import sampled

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.diff import compare

_PARTS = ("in_proj_qkv", "in_proj_z")
Random = np.random.Generator
Make = Callable[[Random, int, int], Parts]


def _bf16(random: Random, *shape: int) -> Tensor:
    return gdn_models.bf16(0.02 * np.exp(random.standard_normal(shape)).astype(np.float32))


def packed(bits: int, *, zeros: bool = False, group: int = 16) -> Make:
    def make(random: Random, rows: int, columns: int) -> Parts:
        word = 32 // bits
        words = random.integers(0, 1 << 32, (rows, columns // word), np.uint32)
        parts = {
            "weight_packed": Tensor("I32", words.shape, words.tobytes()),
            "weight_scale": _bf16(random, rows, columns // group),
            "weight_shape": Tensor("I64", (2,), struct.pack("<2q", rows, columns)),
        }
        if zeros:
            points = random.integers(0, 1 << 32, (rows // word, columns // group), np.uint32)
            parts["weight_zero_point"] = Tensor("I32", points.shape, points.tobytes())
        return parts

    return make


def nvfp4(dialect: str, *, own: float | None = 2.0**-9) -> Make:
    """`own` None: a global scale of each matrix."""

    def make(random: Random, rows: int, columns: int) -> Parts:
        codes = random.integers(0, 256, (rows, columns // 2), np.uint8)
        scale = random.integers(0x30, 0x70, (rows, columns // 16), np.uint8)
        value = own if own is not None else 2.0 ** -float(random.integers(5, 12))
        parts = {"weight_scale": Tensor("F8_E4M3", scale.shape, scale.tobytes())}
        if dialect == "modelopt":
            one = stored("F32", np.array(value, np.float32))
            return parts | {
                "weight": stored("U8", codes),
                "weight_scale_2": one,
                "input_scale": one,
            }
        return parts | {
            "weight_packed": stored("U8", codes),
            "weight_global_scale": stored("F32", np.array([1 / value], np.float32)),
        }

    return make


def static_fp8(random: Random, rows: int, columns: int) -> Parts:
    codes = random.integers(0, 0x7F, (rows, columns), np.uint8)
    scale, inputs = (np.array([bits], np.uint16) for bits in (0x3C00, 0x3F80))
    return {
        "weight": stored("F8_E4M3", codes),
        "weight_scale": stored("BF16", scale),
        "input_scale": stored("BF16", inputs),
    }


def groups(
    weights: dict[str, Any],
    form: str,
    targets: str = "Linear",
    inputs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    group = {"targets": [targets], "format": form, "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": [],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


def ints(bits: int, *, symmetric: bool = True, group: int = 16) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    return groups({**weights, "group_size": group}, "pack-quantized")


def _float(strategy: str, bits: int, size: int | None, form: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy,
               "scale_dtype": "torch.uint8" if size == 32 else None}  # fmt: skip
    return groups(weights if size is None else {**weights, "group_size": size}, form)


_INT8 = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
_TENSOR = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "int4": (packed(4), ints(4)),
    "int4 asymmetric": (packed(4, zeros=True), ints(4, symmetric=False)),
    "int8 packed": (packed(8, zeros=True), ints(8, symmetric=False)),
    "int8": (lambda *given: int8(False, None)(*given)[0], groups(_INT8, "int-quantized")),
    "nvfp4": (nvfp4("compressed-tensors"), _float("tensor_group", 4, 16, "nvfp4-pack-quantized")),
    "nvfp4 modelopt": (
        nvfp4("modelopt"),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []},
    ),
    "mxfp4": (
        lambda *given: mxfp4(("weight_packed", "weight_scale"), ("U8", "U8"))(*given)[0],
        _float("group", 4, 32, "mxfp4-pack-quantized"),
    ),
    "mxfp8": (lambda *given: mxfp8(*given)[0], _float("group", 8, 32, "mxfp8-quantized")),
    "static fp8": (static_fp8, groups(_TENSOR, "float-quantized", inputs=_TENSOR)),
}  # fmt: skip


def coded(make: Make, block: dict[str, Any], model: Model | None = None) -> Model:
    """A Qwen3.5 whose linear attention holds qkv and z in this form; all else is listed."""
    model = model or gdn_models.model("qwen3_5_moe_text")
    tensors, left = {}, []
    for name, value in model.tensors.items():
        module, _, parameter = name.rpartition(".")
        if module.rpartition(".")[2] not in _PARTS:
            tensors[name] = value
            if parameter == "weight" and len(value.shape) == 2:
                left.append(module)
            continue
        parts = make(np.random.default_rng(zlib.crc32(name.encode())), *value.shape)
        tensors |= {f"{module}.{part}": one for part, one in parts.items()}
    model.tensors = tensors
    model.config["quantization_config"] = {**block, "ignore": left}
    return model


def converted(command: str, source: Path, out: Path, *options: str) -> Path:
    ran(command, source, out, *options, "--jobs", "1")
    return out


def judged(folder: Path, source: Path) -> None:
    done = run_cli("validate", folder, "--level", "full", "--against", source, "--json")
    findings = json.loads(done.out)["findings"]
    assert done.code == 0, [one for one in findings if one["severity"] == "error"]


ORDERS = [("--for", "sglang"), ("--groups", "2"), ("--for", "qwen3-next")]
EVERY = [(case, order) for case in CASES for order in ORDERS]


@pytest.mark.parametrize("every", sampled(EVERY, 4, name=lambda one: " ".join((one[0], *one[1]))))
def test_rows_move_with_all_that_is_theirs(
    every: tuple[str, tuple[str, str]], tmp_path: Path
) -> None:
    case, order = every
    make, block = CASES[case]
    source = coded(make, block).write(tmp_path / "source")
    fused = converted("fuse", source, tmp_path / "fused", *order)
    judged(fused, source)
    names = {name.rpartition(".")[0] for name in read_tensors(fused)}
    assert any(name.endswith("in_proj_qkvz") for name in names)
    assert not any(name.endswith(_PARTS) for name in names)
    plain = converted("dequant", fused, tmp_path / "plain")
    first = converted("dequant", source, tmp_path / "first")
    other = converted("fuse", first, tmp_path / "other", *order)
    assert read_tensors(plain) == read_tensors(other)
    own = ("--for", "qwen3.5") if "qwen3-next" in order else ()
    back = converted("unfuse", fused, tmp_path / "back", *own)
    judged(back, fused)
    assert read_tensors(back) == read_tensors(source)


def refused(model: Model, folder: Path, *options: str) -> str:
    done = run_cli("fuse", model.write(folder / "source"), folder / "out", *options)
    assert done.code == 1
    return done.err


def test_input_scales_that_differ_are_refused(tmp_path: Path) -> None:
    model = coded(*CASES["static fp8"])
    name = next(name for name in model.tensors if name.endswith("in_proj_z.input_scale"))
    model.tensors[name] = stored("BF16", np.array([0x4000], np.uint16))
    said = refused(model, tmp_path, "--for", "sglang")
    assert "in_proj_qkvz.input_scale: the parts have different per-tensor scales" in said


def test_targets_that_name_a_part_are_refused(tmp_path: Path) -> None:
    make, block = CASES["int4"]
    weights = block["config_groups"]["group_0"]["weights"]
    own = groups(weights, "pack-quantized", r"re:.*in_proj_(qkv|z)$")
    said = refused(coded(make, own), tmp_path, "--for", "sglang")
    assert "QC034" in said
    assert "in_proj_qkvz" in said


def test_quantized_and_fused_in_one_recipe(tmp_path: Path) -> None:
    """The scales that parts share are computed, and hf_quant_config.json would have the old names."""
    origin = family_source(tmp_path, "qwen3_5_text", fp8=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "passes:\n  - nvfp4: {dialect: modelopt, targets: [Linear]}\n  - fuse: {consumer: sglang}\n"
    )
    out = tmp_path / "out"
    ran("run", recipe, origin, out, "--jobs", "1")
    assert not (out / "hf_quant_config.json").exists()
    words = ("--dialect", "modelopt", "--targets", "Linear")
    apart = converted("nvfp4", origin, tmp_path / "apart", *words)
    fused = converted("fuse", apart, tmp_path / "fused", "--for", "sglang")
    assert compare(Checkpoint.open(out), Checkpoint.open(fused)) == []
