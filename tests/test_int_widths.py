"""Packed integers of 2 to 8 bits. Oracles: strings of bits and float64 (int_models.py), rounded once;
marked `peer`: compressed-tensors' and auto-round's own packing and dequantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Tensor, read_tensors, run_cli
from dequantized import as_torch, converted, rounded
from encoded_models import FAMILIES, encoded
from int_models import INTEGERS, packed, qweight
from ops_harness import buffer, run_op
from test_relabel import in_bf16, refused, relabelled

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.formats.int_packed.decode import DequantInts
from qconvert.formats.int_packed.gptq import DequantGptq
from qconvert.ops.cast import DequantTo
from qconvert.ops.ints import bit_fields, bit_string

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
each = pytest.mark.parametrize("encoding", INTEGERS)


def _buffers(parts: dict[str, Tensor], *names: str) -> list[Buffer]:
    found = [parts[name] for name in names if name in parts]
    return [buffer(TensorType(one.dtype, one.shape), one.data) for one in found]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("limit", [None, 1, 3_000])
def test_ragged_matrices_of_all_codes(bits: int, symmetric: bool, limit: int | None) -> None:
    """Rows and columns that fill no words; parts of any size, in both forms of the op."""
    for rows, columns, group in ((70, 36, 12), (33, 264, 24), (1, 20, 20), (65, 31, None)):
        make = packed(bits, symmetric=symmetric, group=group)
        parts, values = make(np.random.default_rng(bits), rows, columns)
        op = DequantInts(bits, group, symmetric, False, columns if group is None else None)
        ins = _buffers(parts, "weight_packed", "weight_scale", "weight_zero_point")
        (found,), _ = run_op(op, ins, limit)
        assert found == rounded(values), (rows, columns, group)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("version", [1, 2])
def test_gptqs_words_of_all_codes(bits: int, version: Any) -> None:
    make = qweight(bits, less=2 - version, symmetric=False, group=32, index=True)
    parts, values = make(np.random.default_rng(bits), 64, 96)
    if version == 1:  # what readers differ on
        stored = np.frombuffer(parts["qzeros"].data, "<u4").reshape(3, -1)
        assert not (bit_fields(stored.view(np.uint8), bits, 64) == (1 << bits) - 1).any()
    ins = _buffers(parts, "qweight", "qzeros", "scales", "g_idx")
    (found,), _ = run_op(DequantGptq(bits, 32, version, 0, 64), ins)
    assert found == rounded(values)
    (cut,), _ = run_op(DequantGptq(bits, 32, version, 17, 30), ins)
    assert cut == rounded(values[17:47])


@pytest.mark.parametrize("bits", WIDTHS)
def test_strings_of_bits_there_and_back(bits: int) -> None:
    fields = np.random.default_rng(bits).integers(0, 1 << bits, (5, 96)).astype(np.uint8)
    assert np.array_equal(bit_fields(bit_string(fields, bits), bits, 96), fields)
    assert np.array_equal(bit_fields(bit_string(fields, bits), bits, 90), fields[:, :90])


@pytest.mark.parametrize("family", FAMILIES)
@each
def test_a_model_becomes_bf16(family: str, encoding: str, tmp_path: Path) -> None:
    model, meaning = encoded(family, INTEGERS[encoding])
    kept = {name: t for name, t in model.tensors.items() if ".experts." not in name}
    wanted = kept | {n: Tensor("BF16", v.shape, rounded(v)) for n, v in meaning.items()}
    assert converted(model, tmp_path) == wanted


@each
def test_relabelled_they_mean_the_same(encoding: str, tmp_path: Path) -> None:
    """To compressed-tensors, to GPTQ's second version, and back: the same codes."""
    model, _ = encoded("qwen3_moe", INTEGERS[encoding])
    source = model.write(tmp_path / "source")
    wanted = in_bf16(source, tmp_path / "bf16")
    first, other = "compressed-tensors", "gptq-v2"
    if encoding.startswith("packed"):
        first, other = other, first
    one = relabelled(source, tmp_path / "one", first)
    assert in_bf16(tmp_path / "one", tmp_path / "a") == wanted
    relabelled(tmp_path / "one", tmp_path / "two", other)
    assert relabelled(tmp_path / "two", tmp_path / "three", first) == one


@each
def test_a_quantizing_command_takes_them(encoding: str, tmp_path: Path) -> None:
    """Through BF16, or at once: the same bytes."""
    model, _ = encoded("qwen3_moe", INTEGERS[encoding])
    source = model.write(tmp_path / "source")
    in_bf16(source, tmp_path / "bf16")
    made = []
    for number, folder in enumerate((source, tmp_path / "bf16")):
        out = tmp_path / f"out{number}"
        done = run_cli("fp8", folder, out, "--jobs", "1")
        assert done.code == 0, done.err
        experts = {n: t for n, t in read_tensors(out).items() if ".experts." in n}
        made.append(experts)
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("encoding", "label"),
    [
        ("packed, 3 bits, zero points", "INT3 g32, zero points (packed)"),
        ("packed, 6 bits a row", "INT6 per channel (packed)"),
        ("gptq, 3 bits", "GPTQ INT3 g32"),
        ("auto_gptq", "GPTQ INT4 g64"),
        ("auto_round, 3 bits", "GPTQ INT3 g32, zero points"),
    ],
)
def test_inspect_names_them(encoding: str, label: str, tmp_path: Path) -> None:
    model, _ = encoded("qwen3_moe", INTEGERS[encoding])
    done = run_cli("inspect", model.write(tmp_path / "source"))
    assert done.code == 0, done.err
    assert label in done.out


# --- faults -----------------------------------------------------------------------------------


def _names(tensors: dict[str, Tensor], end: str) -> str:
    return next(name for name in tensors if name.endswith(end))


@pytest.mark.parametrize(
    ("encoding", "part", "rules"),
    [
        ("packed, 3 bits", ".weight_scale", ("QC011",)),
        ("packed, 3 bits, zero points", ".weight_zero_point", ("QC088",)),
        ("gptq, 3 bits", ".scales", ("QC088",)),
        ("auto_gptq", ".qzeros", ("QC088",)),
        ("auto_gptq", ".scales", ("QC088",)),
    ],
)
def test_a_missing_part(encoding: str, part: str, rules: tuple[str, ...], tmp_path: Path) -> None:
    model, _ = encoded("qwen3_moe", INTEGERS[encoding])
    del model.tensors[_names(model.tensors, part)]
    source = model.write(tmp_path / "source")
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert f"{part}' is missing" in done.err
    judged = json.loads(run_cli("validate", source, "--json").out)
    found = {one["rule"] for one in judged["findings"] if one["severity"] == "error"}
    assert found & set(rules), found


@pytest.mark.parametrize(
    ("encoding", "part", "rule"),
    [
        ("packed, 5 bits", ".weight_packed", "QC0"),
        ("packed, 3 bits, zero points", ".weight_zero_point", "QC089"),
        ("gptq, 3 bits", ".qzeros", "QC089"),
        ("auto_gptq", ".qweight", "QC089"),
    ],
)
def test_a_part_with_fewer_words(encoding: str, part: str, rule: str, tmp_path: Path) -> None:
    model, _ = encoded("qwen3_moe", INTEGERS[encoding])
    name = _names(model.tensors, part)
    one = model.tensors[name]
    values = np.frombuffer(one.data, "<u4").reshape(one.shape)
    cut = values[:, :-1] if part in (".weight_packed", ".qzeros") else values[:-1]
    model.tensors[name] = Tensor("I32", cut.shape, np.ascontiguousarray(cut).tobytes())
    source = model.write(tmp_path / "source")
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert name.rpartition(".")[0] in done.err
    assert "expected" in done.err
    judged = json.loads(run_cli("validate", source, "--json").out)
    found = [one["rule"] for one in judged["findings"] if one["severity"] == "error"]
    assert any(one.startswith(rule) for one in found), found


def test_another_code_is_found(tmp_path: Path) -> None:
    """One bit of one weight of 3 bits, in the result and in the source."""
    model, _ = encoded("qwen3_moe", INTEGERS["packed, 3 bits"])
    converted(model, tmp_path)
    name = _names(model.tensors, ".weight_packed")
    one = model.tensors[name]
    data = bytearray(one.data)
    data[40] ^= 1 << 3
    model.tensors[name] = Tensor(one.dtype, one.shape, bytes(data))
    other = model.write(tmp_path / "other")
    judged = run_cli("validate", tmp_path / "out", "--level", "full", "--against", other, "--json")
    found = [
        one["rule"] for one in json.loads(judged.out)["findings"] if one["severity"] == "error"
    ]
    assert "QC060" in found


@pytest.mark.parametrize("bits", [4, 6])
def test_a_row_that_fills_no_word_has_the_columns_of_its_shape(bits: int, tmp_path: Path) -> None:
    """With a scale a row nothing but weight_shape says how many codes the last word holds."""
    model, _ = encoded("qwen3_moe", INTEGERS["packed, 6 bits a row"])
    block = model.config["quantization_config"]
    block["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    make = packed(bits, group=None)
    name = "model.layers.0.mlp.experts.0.toy"
    parts, values = make(np.random.default_rng(3), 7, 45)
    model.tensors = {f"{name}.{part}": one for part, one in parts.items()}
    model.config = {"model_type": "toy", "quantization_config": block}
    found = converted(model, tmp_path)
    assert found == {f"{name}.weight": Tensor("BF16", (7, 45), rounded(values))}
    shape = np.array([7, 70])
    model.tensors[f"{name}.weight_shape"] = Tensor("I64", (2,), shape.tobytes())
    source = model.write(tmp_path / "wrong")
    done = run_cli("dequant", source, tmp_path / "refused", "--jobs", "1")
    assert done.code == 1
    assert "weight_shape' states, [7, 70]" in done.err


def test_a_shape_decides_where_words_and_scales_do_not(tmp_path: Path) -> None:
    """One word of 4 bits: of 8 columns, whose scales are of another group than is stated, or of 4."""
    model, _ = encoded("qwen3_moe", INTEGERS["packed, 3 bits"])
    block = model.config["quantization_config"]
    block["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "group_size": 4}
    name = "model.layers.0.mlp.experts.0.toy"
    model.config = {"model_type": "toy", "quantization_config": block}
    parts, values = packed(4, group=4)(np.random.default_rng(3), 16, 4)
    model.tensors = {f"{name}.{part}": one for part, one in parts.items()}
    wanted = Tensor("BF16", (16, 4), rounded(values))
    assert converted(model, tmp_path) == {f"{name}.weight": wanted}
    parts, _ = packed(4, group=8)(np.random.default_rng(3), 16, 8)
    model.tensors = {f"{name}.{part}": one for part, one in parts.items()}
    done = run_cli("dequant", model.write(tmp_path / "other"), tmp_path / "refused", "--jobs", "1")
    assert done.code == 1
    assert "expected scales [16, 2]" in done.err


def test_ragged_rows_are_no_gptq(tmp_path: Path) -> None:
    """Columns that fill no words: words of GPTQ's form lie along them."""
    model, _ = encoded("qwen3_moe", INTEGERS["packed, 3 bits"])
    name = "model.layers.0.mlp.experts.0.toy"
    parts, _ = packed(3, group=12)(np.random.default_rng(3), 32, 36)
    block = model.config["quantization_config"]
    block["config_groups"]["group_0"]["weights"]["group_size"] = 12
    model.tensors = {f"{name}.{part}": one for part, one in parts.items()}
    model.config = {"model_type": "toy", "quantization_config": block}
    said = refused(model.write(tmp_path / "source"), "gptq-v2", tmp_path)
    assert "expected columns in whole words of 32" in said


# --- peers ------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packs_and_decodes_the_same(bits: int, symmetric: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group, rows, columns = 12, 50, 60
    parts, values = packed(bits, symmetric=symmetric, group=group)(
        np.random.default_rng(bits), rows, columns
    )
    state = {name: as_torch(one) for name, one in parts.items() if name != "weight_shape"}
    state["weight_shape"] = torch.tensor([rows, columns])
    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = PackedQuantizationCompressor.decompress(dict(state), scheme)["weight"]
    assert theirs.dtype == torch.bfloat16
    assert theirs.view(torch.uint8).numpy().tobytes() == rounded(values)
    scale = state["weight_scale"].double().repeat_interleave(group, 1)
    codes = (torch.from_numpy(values) / scale).round().to(torch.int8)
    if symmetric:
        assert torch.equal(pack_to_int32(codes, bits), state["weight_packed"])


@pytest.mark.peer
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["qlinear_torch", "qlinear_torch_zp"])
def test_auto_round_packs_and_decodes_the_same(bits: int, symmetric: bool, kind: str) -> None:
    """`auto_round` and `auto_round:gptqmodel`, and `auto_round:auto_gptq`: what its layer holds is what
    is read, and what it computes with, which is rounded to F16 once, is what that means."""
    from importlib import import_module

    layer = import_module(f"auto_round_extension.torch.{kind}").QuantLinear
    random = np.random.default_rng(bits)
    rows, columns, group = 64, 96, 32
    scale = torch.from_numpy(0.01 + random.random((rows, columns // group))).half().float()
    top = 1 << bits
    low = 1 if kind == "qlinear_torch_zp" else 0  # it has no room for 0
    zero = torch.from_numpy(random.integers(low, top, (rows, columns // group))).float()
    zeros: Any = top // 2 if symmetric else zero
    codes = torch.from_numpy(random.integers(0, top, (rows, columns))).float()
    middle = torch.full_like(zero, top // 2) if symmetric else zero
    weight = (codes - middle.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = weight
    made = layer(bits, group, columns, rows, bias=False)
    made.device = torch.device("cpu")
    made.pack(linear, scale, zeros, None, device="cpu")
    theirs = made(torch.eye(columns).half()).T.contiguous()
    parts = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}
    kinds = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
    tensors = {
        name: Tensor(kinds[name], tuple(one.shape), one.contiguous().numpy().tobytes())
        for name, one in parts.items()
    }
    version: Any = 1 if kind == "qlinear_torch_zp" else 2
    op = DequantTo(DequantGptq(bits, group, version, 0, rows), "F16")
    (found,), _ = run_op(op, _buffers(tensors, "qweight", "qzeros", "scales"))
    assert found == theirs.view(torch.uint8).numpy().tobytes()
