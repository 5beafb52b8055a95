"""AutoAWQ's form as `w4a16 --packing awq` and `relabel --to awq` write it. Oracle: GPTQ's second version
of the same codes, taken apart nibble by nibble; marked `peer`: auto-round's own packing of AutoAWQ's
form, and compressed-tensors' converter."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import int_forms
import models
import numpy as np
import pytest
import torch
from checkpoints import Tensor, read_tensors, run_cli
from dequantized import as_torch
from encoded_models import AWQ_NIBBLES, encoded
from int_models import INTEGERS, mixed, qweight
from ops_harness import buffer, run_op
from test_relabel import in_bf16, refused, relabelled
from test_w4a16 import ordinary

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import Codes, IntScheme
from qconvert.formats.int_packed.encode import encoder
from qconvert.formats.int_packed.format import left_parts
from qconvert.formats.int_packed.packers import PackAwq, PackGptq


def written(source: Path, out: Path, *more: str) -> dict[str, Tensor]:
    """Tensors that `w4a16` makes, in which `validate --level full` finds no error."""
    done = run_cli("w4a16", source, out, "--rtn", "--asymmetric", "--jobs", "1", *more)
    assert done.code == 0, done.err
    judged = run_cli("validate", out, "--level", "full", "--against", source, "--json")
    found = json.loads(judged.out)["findings"]
    assert judged.code == 0, [one for one in found if one["severity"] == "error"]
    return read_tensors(out)


def fields(words: Tensor, places: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Nibbles of words [n, m], each at the place that it is of, [n, 8 m]."""
    stored = np.frombuffer(words.data, "<u4").reshape(words.shape).astype(np.int64)
    found = np.empty((*words.shape, 8), np.int64)
    for nibble, place in enumerate(places):
        found[..., place] = stored >> 4 * nibble & 15
    return found.reshape(words.shape[0], -1)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("group", ["64", "channel"])
def test_the_codes_of_gptqs_second_version(family: str, group: str, tmp_path: Path) -> None:
    source = tmp_path / "bf16"
    if family == "deepseek_v3":  # its FP8 layers have no place in either form
        in_bf16(models.deepseek_v3().write(tmp_path / "source"), source)
    else:
        ordinary().write(source)
    awq = written(source, tmp_path / "awq", "--packing", "awq", "--group-size", group)
    gptq = written(source, tmp_path / "gptq", "--packing", "gptq-v2", "--group-size", group)
    modules = [name.removesuffix(".qweight") for name in awq if name.endswith(".qweight")]
    assert modules
    plain = tuple(range(8))
    for module in modules:
        mine, yours = (
            {part: made[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")}
            for made in (awq, gptq)
        )
        assert f"{module}.g_idx" not in awq
        assert mine["scales"] == yours["scales"]
        assert np.array_equal(fields(mine["qzeros"], AWQ_NIBBLES), fields(yours["qzeros"], plain))
        along = np.frombuffer(yours["qweight"].data, "<u4").reshape(yours["qweight"].shape)
        turned = Tensor("I32", along.T.shape, np.ascontiguousarray(along.T).tobytes())
        assert np.array_equal(fields(mine["qweight"], AWQ_NIBBLES), fields(turned, plain).T)
    block = json.loads((tmp_path / "awq" / "config.json").read_bytes())["quantization_config"]
    left = block.pop("modules_to_not_convert")
    assert block == {
        "quant_method": "awq", "bits": 4, "group_size": -1 if group == "channel" else 64,
        "zero_point": True, "version": "gemm",
    }  # fmt: skip
    assert "model.layers.1.mlp.gate" in left
    assert not any(part in module for part in left for module in modules)
    assert in_bf16(tmp_path / "awq", tmp_path / "a") == in_bf16(tmp_path / "gptq", tmp_path / "b")
    there = relabelled(tmp_path / "awq", tmp_path / "there", "gptq-v2")
    packed = {name for name in gptq if name.endswith((".qweight", ".qzeros", ".scales"))}
    assert {name: there[name] for name in packed} == {name: gptq[name] for name in packed}
    assert relabelled(tmp_path / "there", tmp_path / "back", "awq") == awq


@pytest.mark.parametrize("limit", [None, 1])
def test_tiles_of_large_matrices(limit: int | None) -> None:
    """More codes than are packed at a time, in whole words of rows."""
    scheme = IntScheme(4, 64, symmetric=False, scale_dtype="F16")
    weight = int_forms.weight(72, 4096)
    (words, scale, zeros), _ = run_op(encoder(scheme, PackAwq(scheme)), [weight], limit)
    (theirs, their_zeros, their_scale, _), _ = run_op(
        encoder(scheme, PackGptq(scheme, 2)), [weight]
    )
    assert scale == their_scale
    mine = fields(Tensor("I32", (4096, 9), words), AWQ_NIBBLES)
    along = np.frombuffer(theirs, "<u4").reshape(512, 72)
    turned = Tensor("I32", (72, 512), np.ascontiguousarray(along.T).tobytes())
    assert np.array_equal(mine, fields(turned, tuple(range(8))).T)
    assert np.array_equal(
        fields(Tensor("I32", (64, 9), zeros), AWQ_NIBBLES),
        fields(Tensor("I32", (64, 9), their_zeros), tuple(range(8))),
    )


def test_all_linears(tmp_path: Path) -> None:
    source, out = ordinary().write(tmp_path / "source"), tmp_path / "out"
    made = written(source, out, "--packing", "awq", "--targets", "Linear", "--group-size", "32")
    assert "model.layers.0.self_attn.q_proj.qweight" in made
    block = json.loads((out / "config.json").read_bytes())["quantization_config"]
    assert "model.layers.0.mlp.gate" in block["modules_to_not_convert"]
    assert not any("self_attn" in name for name in block["modules_to_not_convert"])


@pytest.mark.parametrize("encoding", ["auto_gptq", "gptqmodel"])
def test_symmetric_codes_of_other_forms(encoding: str, tmp_path: Path) -> None:
    """They get zero points of 8, and mean the same."""
    model, _ = encoded("qwen3_moe", INTEGERS[encoding])
    source = model.write(tmp_path / "source")
    made = relabelled(source, tmp_path / "awq", "awq")
    assert {set(t.data) == {0x88} for n, t in made.items() if n.endswith(".qzeros")} == {True}
    assert in_bf16(tmp_path / "awq", tmp_path / "a") == in_bf16(source, tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--packing", "awq"), "AutoAWQ's form is of weights with zero points"),
        (("--packing", "awq", "--asymmetric", "--bits", "8"), "holds codes of 4 bits"),
    ],
)
def test_what_the_form_has_no_place_for(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    source = models.qwen3_moe().write(tmp_path / "source")
    done = run_cli("w4a16", source, tmp_path / "out", "--rtn", *options, "--jobs", "1")
    assert done.code == 1
    assert says in done.err


def test_ragged_rows_and_widths_of_others(tmp_path: Path) -> None:
    scheme = IntScheme(4, 32, symmetric=False, scale_dtype="F16")
    with pytest.raises(PlanError, match="expected rows in whole words, found 12"):
        PackAwq(scheme).infer(TensorType("BF16", (12, 64)))
    model, _ = encoded("qwen3_moe", INTEGERS["gptq, 3 bits"])
    said = refused(model.write(tmp_path / "three"), "awq", tmp_path)
    assert "holds codes of 4 bits" in said
    rules = {"+:.*self_attn.*": {"group_size": 64}, r"-:.*mlp\.gate$": {}, "-:lm_head": {}}
    block = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "dynamic": rules,
    }  # fmt: skip
    own = {r"self_attn\.[qkvo]_proj$": qweight(4, less=1, group=64), "experts": qweight(4, less=1)}
    said = refused(mixed(block, own)[0].write(tmp_path / "two"), "awq", tmp_path)
    assert "2 schemes, and AutoAWQ's form has place for one" in said


def test_a_list_that_would_name_quantized_modules() -> None:
    """Parts of names: `mlp.gate` is one of `mlp.gate_proj`'s."""
    gate, quantized = "model.layers.0.mlp.gate", ["model.layers.0.mlp.gate_proj"]
    with pytest.raises(PlanError, match="AutoAWQ's list names parts of names: it would leave both"):
        left_parts([gate, *quantized], (), quantized)
    other = ["model.layers.0.mlp.experts.0.gate_proj"]
    assert left_parts([gate, *other], (), other) == [gate]
    assert left_parts([gate, *other], (".mlp.experts",), ()) == [gate, "mlp.experts"]


# --- peers ------------------------------------------------------------------------------------


@pytest.mark.peer
def test_auto_round_packs_the_same() -> None:
    awq = import_module("auto_round.export.export_to_awq.utils").WQLinear_GEMM
    random = np.random.default_rng(0)
    rows, columns, group = 48, 96, 32
    scale = torch.from_numpy(0.01 + random.random((rows, columns // group))).half().float()
    zero = torch.from_numpy(random.integers(0, 16, (rows, columns // group))).float()
    codes = torch.from_numpy(random.integers(0, 16, (rows, columns))).float()
    wide = scale.repeat_interleave(group, 1)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = (codes - zero.repeat_interleave(group, 1)) * wide
    made = awq.from_linear(linear, 4, group, scales=scale.T, zeros=zero.T, device="cpu")
    scheme = IntScheme(4, group, symmetric=False, scale_dtype="F16")
    own = PackAwq(scheme)
    outs = [
        buffer(kind, bytes(kind.nbytes)) for kind in own.infer(TensorType("BF16", (rows, columns)))
    ]
    signed = codes.numpy().astype(np.int8) - np.int8(8)
    own.pack(Codes(signed, scale.numpy(), zero.numpy().astype(np.int8) - np.int8(8)), outs)
    for mine, theirs in zip(outs, (made.qweight, made.scales, made.qzeros), strict=True):
        assert bytes(mine.data) == theirs.contiguous().numpy().tobytes()


@pytest.mark.peer
def test_compressed_tensors_converter_reads_the_same(tmp_path: Path) -> None:
    """Its converter's words are those of our relabel."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    source = ordinary().write(tmp_path / "source")
    made = written(source, tmp_path / "awq", "--packing", "awq", "--group-size", "64")
    block = json.loads((tmp_path / "awq" / "config.json").read_bytes())["quantization_config"]
    converter = AutoAWQConverter.from_autoawq_config(block)
    theirs = converter.process({name: as_torch(one) for name, one in made.items()})
    ours = relabelled(tmp_path / "awq", tmp_path / "packed", "compressed-tensors")
    names = [name for name in ours if name.endswith(("_packed", "_zero_point", "weight_scale"))]
    assert names
    for name in names:
        assert torch.equal(theirs[name], as_torch(ours[name])), name
