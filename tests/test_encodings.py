"""`qconvert dequant` of every encoding. Oracles: float64 arithmetic on codes taken out field by field
(encoded_models.py), rounded once; and, marked `peer`, the decoders of the libraries that write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Model, Tensor, read_tensors, run_cli
from dequantized import as_torch, converted, rounded
from encoded_models import ENCODINGS, FAMILIES, Array, encoded, gpt_oss, near
from hypothesis import given, settings
from hypothesis import strategies as st
from models import kimi, per_channel, per_tensor, qwen3_moe
from ops_harness import buffer, run_op

from qconvert.checkpoint.quantization_config import Entries
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RowError
from qconvert.formats.mx.decode import DequantMxfp4, DequantMxfp4Columns

every = pytest.mark.parametrize("encoding", ENCODINGS)
families = pytest.mark.parametrize("family", FAMILIES)


@families
@every
def test_a_model_becomes_bf16(family: str, encoding: str, tmp_path: Path) -> None:
    model, meaning = encoded(family, encoding)
    kept = {name: t for name, t in model.tensors.items() if ".experts." not in name}
    wanted = kept | {
        name: Tensor("BF16", values.shape, rounded(values)) for name, values in meaning.items()
    }
    assert converted(model, tmp_path) == wanted
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert config.get("expert_dtype") == ("bf16" if encoding == "mxfp4 beside" else None)


def test_gpt_oss_becomes_bf16(tmp_path: Path) -> None:
    """Transposed, as its class in transformers has it."""
    model, meaning = gpt_oss()
    wanted = {n: t for n, t in model.tensors.items() if not n.endswith(("_blocks", "_scales"))}
    wanted |= {n: Tensor("BF16", v.shape, rounded(v)) for n, v in meaning.items()}
    assert converted(model, tmp_path) == wanted


def test_scales_that_belong_to_the_quantization_leave(tmp_path: Path) -> None:
    """Those of a KV cache too: no runtime reads them in a folder without a quantization block."""
    model, _ = encoded("qwen3_moe", "int8")
    one = Tensor("F32", (1,), b"\0\0\x80\x3f")
    of_cache = [
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
        for layer in range(2)
        for part in "kv"
    ]
    stale = "model.layers.0.mlp.experts.0.up_proj.input_scale"
    model.tensors |= dict.fromkeys((*of_cache, stale), one)
    assert not {*of_cache, stale} & converted(model, tmp_path).keys()


def _exponents(rows: int) -> bytes:
    """Every exponent but NaN, a row each."""
    return bytes(range(255)) * (rows // 255)


def _bits(data: bytes, rows: int) -> Array:
    return np.frombuffer(data, np.uint16).reshape(rows, -1)


def _all_codes(rows: int) -> bytes:
    """All pairs of codes would be 256 bytes; a block holds 16: each code in each half of a byte."""
    return (bytes(range(0, 256, 17)) * rows)[: 16 * rows]


@pytest.mark.parametrize("limit", [None, 1, 3_000, 1 << 20])
def test_mxfp4_of_all_codes_under_all_exponents(limit: int | None) -> None:
    """Torch's own: ldexp in float64, then bf16; what is beyond is infinite and counted."""
    ins = [
        buffer(TensorType("U8", (255, 16)), _all_codes(255)),
        buffer(TensorType("U8", (255, 1)), _exponents(255)),
    ]
    (found,), remarks = run_op(DequantMxfp4(overflow=True), ins, limit)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.cat([sizes, -sizes]).repeat_interleave(2)
    powers = torch.arange(255, dtype=torch.float64)[:, None] - 127
    wanted = (codes * torch.exp2(powers)).bfloat16()
    assert found == wanted.view(torch.uint8).numpy().tobytes()
    assert remarks["values beyond bf16, written as infinite"] == int(wanted.isinf().sum()) > 0
    with pytest.raises(RowError, match="beyond bf16"):
        run_op(DequantMxfp4(), ins, limit)


def test_a_nan_exponent_is_refused() -> None:
    kinds = TensorType("U8", (3, 16)), TensorType("U8", (3, 1))
    ins = [buffer(kinds[0], bytes(48)), buffer(kinds[1], bytes([0, 255, 0]))]
    with pytest.raises(RowError, match="row 1 has a scale of NaN"):
        run_op(DequantMxfp4(), ins)
    with pytest.raises(RowError, match="column 1 has a scale of NaN"):
        run_op(DequantMxfp4Columns(), ins)


# --- peers -------------------------------------------------------------------------------------


def _scheme(model: Model) -> Any:
    from compressed_tensors.quantization import QuantizationConfig

    block = model.config["quantization_config"]
    return QuantizationConfig.model_validate(block).config_groups["group_0"]


def _by_compressed_tensors(model: Model, module: str, encoding: str) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor

    scheme = _scheme(model)
    name = model.config["quantization_config"]["format"]
    compressor = BaseCompressor.get_value_from_registry(name)
    state = {
        parameter: as_torch(model.tensors[f"{module}.{parameter}"])
        for parameter in ("weight", "weight_packed", "weight_scale", "weight_zero_point")
        if f"{module}.{parameter}" in model.tensors
    }
    found: torch.Tensor = compressor.decompress(state, scheme)["weight"]
    return found


@pytest.mark.peer
@families
@pytest.mark.parametrize("encoding", ["mxfp4", "mxfp8", "int8", "int8 asymmetric"])
def test_compressed_tensors_decodes_the_same(family: str, encoding: str, tmp_path: Path) -> None:
    model, meaning = encoded(family, encoding)
    found = converted(model, tmp_path)
    for name in meaning:
        theirs = _by_compressed_tensors(model, name.removesuffix(".weight"), encoding)
        assert torch.equal(as_torch(found[name]), theirs.bfloat16()), name


@pytest.mark.peer
@families
def test_awqs_converter_means_the_same(family: str, tmp_path: Path) -> None:
    """compressed-tensors' AutoAWQConverter, then its own decompression; scales are F16 there, and its
    products are rounded to F16 once: compared so."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    model, meaning = encoded(family, "awq")
    block = {**model.config["quantization_config"]}
    converter = AutoAWQConverter.from_autoawq_config(block)
    theirs = converter.process({n: as_torch(t) for n, t in model.tensors.items()})
    scheme = next(iter(converter.update_config(None).config_groups.values()))
    converted(model, tmp_path)
    for name, values in meaning.items():
        module = name.removesuffix(".weight")
        parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        state = {part: theirs[f"{module}.{part}"] for part in parts}
        made = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
        assert made.dtype == torch.float16
        assert torch.equal(torch.from_numpy(values).half(), made), name


@pytest.mark.peer
def test_transformers_decodes_gpt_oss_the_same(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, meaning = gpt_oss()
    found = converted(model, tmp_path)
    for name in meaning:
        blocks, scales = (as_torch(model.tensors[f"{name}{end}"]) for end in ("_blocks", "_scales"))
        theirs = convert_moe_packed_tensors(blocks, scales)
        assert torch.equal(as_torch(found[name]), theirs), name


@pytest.mark.peer
def test_modelopt_decodes_mxfp8_the_same(tmp_path: Path) -> None:
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    model, meaning = encoded("qwen3_moe", "mxfp8 modelopt")
    found = converted(model, tmp_path)
    for name, values in meaning.items():
        codes = as_torch(model.tensors[name])
        tensor = MXFP8QTensor(codes.shape, torch.bfloat16, codes)
        scale = as_torch(model.tensors[f"{name}_scale"])
        theirs = tensor.dequantize(torch.bfloat16, scale=scale)
        assert torch.equal(as_torch(found[name]), theirs), name
        assert values.shape == codes.shape


# --- which scheme covers a module ---------------------------------------------------------------

_TARGETS = (
    "Linear", "model.layers.0.mlp.up_proj", "re:.*up_proj$", "re:model.layers.1.*", "re:.*mlp.*",
    "re:up_proj", "up_proj", "re:.*self_attn.(q|k)_proj", "layers.0", "lm_head", "Embedding",
)  # fmt: skip


@pytest.mark.peer
@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(_TARGETS), max_size=4, unique=True),
    st.lists(st.sampled_from(_TARGETS), max_size=3, unique=True),
)
def test_modules_are_matched_as_compressed_tensors_matches_them(
    targets: list[str], ignore: list[str]
) -> None:
    from compressed_tensors.utils import match_named_modules

    def block(**linears: int) -> torch.nn.Module:
        return torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in linears})

    layers = [
        torch.nn.ModuleDict(
            {
                "self_attn": block(q_proj=1, k_proj=1, o_proj=1),
                "mlp": block(up_proj=1, down_proj=1),
            }
        )
        for _ in range(2)
    ]
    model = torch.nn.ModuleDict(
        {
            "model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)}),
            "lm_head": torch.nn.Linear(1, 1),
        }
    )
    linears = {name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    theirs = {name for name, _ in match_named_modules(model, targets, ignore)} & linears
    covered, left = (Entries.of(dict.fromkeys(each, True)) for each in (targets, ignore))
    ours = {name for name in linears if covered.find(name) and not left.find(name)}
    assert ours == theirs


# --- other dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@every
def test_in_another_dtype(dtype: str, encoding: str, tmp_path: Path) -> None:
    """float32 holds each product; float16 rounds it once, and what is beyond ends the run."""
    model, meaning = encoded("qwen3_moe", encoding)
    if encoding.startswith("mxfp4") and dtype == "f16":
        said = run_cli("dequant", model.write(tmp_path / "s"), tmp_path / "o", "--dtype", dtype)
        assert said.code == 1
        assert "has weights beyond F16" in said.err
        near(model)
        meaning = {}
    kind = {"f16": np.float16, "f32": np.float32}[dtype]
    found = converted(model, tmp_path, "--dtype", dtype)
    for name, values in meaning.items():
        wanted = np.ascontiguousarray(values.astype(np.float32).astype(kind))
        assert found[name] == Tensor(dtype.upper(), values.shape, wanted.tobytes())


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("make", [lambda: qwen3_moe("fp8"), per_channel, per_tensor, kimi])
def test_fp8_and_packed_integers_in_another_dtype(dtype: str, make: Any, tmp_path: Path) -> None:
    """Rounded to BF16 they are what `dequant` gives."""
    model = make()
    converted(model, tmp_path / "a")
    plain = read_tensors(tmp_path / "a" / "out")
    for name, value in converted(model, tmp_path / "b", "--dtype", dtype).items():
        if value.dtype == "BF16":
            assert plain[name] == value
            continue
        kind = {"F16": torch.float16, "F32": torch.float32}[value.dtype]
        wide = torch.frombuffer(bytearray(value.data), dtype=kind)
        bf16 = torch.frombuffer(bytearray(plain[name].data), dtype=torch.bfloat16)
        if dtype == "f32":
            assert torch.equal(wide.bfloat16(), bf16)
        else:
            assert torch.allclose(wide.float(), bf16.float(), rtol=2**-8, atol=2**-25)
