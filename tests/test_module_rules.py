"""Integers in several schemes, as GPTQModel's `dynamic` and AutoRound's `extra_config` state them for
each module. Oracle: strings of bits and float64 (int_models.py), rounded once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoded_models
import numpy as np
import pytest
from checkpoints import Model, Tensor, run_cli
from dequantized import converted, rounded
from encoded_models import Array, Parts
from int_models import auto_round_block, gptq_block, mixed, qweight
from test_relabel import in_bf16, refused, relabelled

from qconvert.checkpoint.auto_round import auto_round_block as read_block
from qconvert.checkpoint.checkpoint import QuantConfig
from qconvert.checkpoint.integer_config import Dynamic
from qconvert.core.errors import PlanError
from qconvert.validators.reading.stated_schemes import Rules, gptq_rules

ATTENTION, EXPERTS = r"self_attn\.[qkvo]_proj$", r"\.experts\."
ONE = "model.layers.1.self_attn.o_proj"
LEFT: dict[str, Any] = {r"-:.*mlp\.gate$": {}, r"-:lm_head": {}}
EIGHT = {"bits": 8, "group_size": 64}


def _fp8(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
    """Block FP8 of DeepSeek and Qwen."""
    codes = random.integers(0, 0x7E, (rows, columns), np.uint8)
    grid = (-(-rows // 128), -(-columns // 128))
    scale = 2.0 ** -random.integers(4, 9, grid)
    mantissa, exponent = codes & 7, codes >> 3
    values = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :columns]
    parts = {
        "weight": Tensor("F8_E4M3", codes.shape, codes.tobytes()),
        "weight_scale_inv": Tensor("F32", grid, scale.astype("<f4").tobytes()),
    }
    return parts, values * wide


def by_dynamic() -> tuple[Model, dict[str, Array]]:
    """8 bits of attention but for one matrix, 4 of experts, which a later rule would change."""
    rules = {
        **LEFT,
        f"+:^{re.escape(ONE)}$": {"bits": 4, "group_size": 64},
        r".*self_attn.*": EIGHT,
        r"+:.*down_proj.*": {"bits": 4},
        r"+:.*experts\.0\.down.*": {"bits": 3},
    }
    eight, four = qweight(8, less=1, group=64), qweight(4, less=1, group=32)
    other = qweight(4, less=1, group=64)
    makers = {re.escape(ONE): other, ATTENTION: eight, EXPERTS: four}
    return mixed(gptq_block(4, 32, dynamic=rules), makers)


def by_extra_config(*, fp8: bool) -> tuple[Model, dict[str, Array]]:
    attention: dict[str, Any] = {"bits": 8, "group_size": 64}
    make = qweight(8, less=1, group=64)
    if fp8:
        attention, make = {"bits": 8, "data_type": "fp8", "group_size": [128, 128]}, _fp8
    other = {"bits": 4, "group_size": 64}
    extra = {r".*self_attn.*": attention, r".*mlp\.gate$": {"bits": 16}, ONE: other}
    block = auto_round_block(4, 32, "auto_round:auto_gptq")
    block["extra_config"] = extra
    own, four = qweight(4, less=1, group=64), qweight(4, less=1, group=32)
    return mixed(block, {re.escape(ONE): own, ATTENTION: make, EXPERTS: four})


SOURCES: dict[str, Callable[[], tuple[Model, dict[str, Array]]]] = {
    "dynamic": by_dynamic,
    "extra_config": lambda: by_extra_config(fp8=False),
    "extra_config beside FP8": lambda: by_extra_config(fp8=True),
}
each = pytest.mark.parametrize("kind", SOURCES)


@each
def test_a_model_becomes_bf16(kind: str, tmp_path: Path) -> None:
    model, meaning = SOURCES[kind]()
    found = converted(model, tmp_path)
    assert len(meaning) == 2 * (4 + 3 * 2)
    for name, values in meaning.items():
        assert found[name] == Tensor("BF16", values.shape, rounded(values)), name
    judged = run_cli("validate", tmp_path / "source", "--level", "full")
    assert judged.code == 0, judged.out


@each
def test_schemes_are_groups_of_compressed_tensors(kind: str, tmp_path: Path) -> None:
    """One a scheme, which name each module; one matrix of another by its name."""
    model, _ = SOURCES[kind]()
    source = model.write(tmp_path / "source")
    relabelled(source, tmp_path / "packed", "compressed-tensors")
    assert in_bf16(tmp_path / "packed", tmp_path / "a") == in_bf16(source, tmp_path / "b")
    block = json.loads((tmp_path / "packed" / "config.json").read_bytes())["quantization_config"]
    groups = block["config_groups"].values()
    with_fp8 = kind.endswith("FP8")
    keys = ("num_bits", "type", "group_size")
    assert {tuple(g["weights"].get(key) for key in keys) for g in groups} == {
        (4, "int", 32), (4, "int", 64), (8, "float", None) if with_fp8 else (8, "int", 64),
    }  # fmt: skip
    assert block["format"] == ("mixed-precision" if with_fp8 else "pack-quantized")
    assert any(ONE in group["targets"] for group in groups)
    if with_fp8:
        said = refused(source, "gptq-v2", tmp_path)
        assert "several quantized forms" in said
        return
    relabelled(tmp_path / "packed", tmp_path / "gptq", "gptq")
    assert in_bf16(tmp_path / "gptq", tmp_path / "c") == in_bf16(source, tmp_path / "d")
    again = json.loads((tmp_path / "gptq" / "config.json").read_bytes())["quantization_config"]
    changed = {(one["bits"], one["group_size"]) for one in again["dynamic"].values() if one}
    assert {(again["bits"], again["group_size"]), *changed} == {(4, 32), (4, 64), (8, 64)}


def test_inspect_names_each_scheme(tmp_path: Path) -> None:
    done = run_cli("inspect", by_dynamic()[0].write(tmp_path / "source"))
    assert "GPTQ INT8 g64" in done.out
    assert "GPTQ INT4 g32" in done.out


@pytest.mark.parametrize("encoding", ["awq", "awq symmetric"])
def test_auto_rounds_awq(encoding: str, tmp_path: Path) -> None:
    """Zero points of symmetric ones are stored too: 8, else no form without them can hold it."""
    symmetric, group = encoding == "awq symmetric", 64
    make = encoded_models.awq(zero_point=True, group=group)

    def middle(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        parts, values = encoded_models.awq(zero_point=False, group=group)(random, rows, columns)
        words = np.full((columns // group, rows // 8), 0x88888888, np.uint32)
        return parts | {"qzeros": Tensor("I32", words.shape, words.tobytes())}, values

    block = auto_round_block(4, group, "auto_round:auto_awq", sym=symmetric)
    model, meaning = mixed(block, {EXPERTS: middle if symmetric else make})
    found = converted(model, tmp_path)
    for name, values in meaning.items():
        assert found[name] == Tensor("BF16", values.shape, rounded(values)), name
    judged = run_cli("validate", tmp_path / "source", "--level", "full")
    assert judged.code == 0, judged.out
    assert "AWQ INT4 g64" in run_cli("inspect", tmp_path / "source").out
    relabelled(tmp_path / "source", tmp_path / "packed", "compressed-tensors")
    block = json.loads((tmp_path / "packed" / "config.json").read_bytes())["quantization_config"]
    assert block["config_groups"]["group_0"]["weights"]["symmetric"] == symmetric
    if symmetric:
        name = next(n for n in model.tensors if n.endswith(".qzeros"))
        one = model.tensors[name]
        model.tensors[name] = Tensor(one.dtype, one.shape, b"\x87" + one.data[1:])
        said = refused(model.write(tmp_path / "wrong"), "compressed-tensors", tmp_path)
        assert "has a zero point of 7 in group 0, and the config says symmetric" in said


@pytest.mark.parametrize(
    ("data_type", "bits", "group", "maker"),
    [
        ("mx_fp", 4, 32, encoded_models.mxfp4(("weight_packed", "weight_scale"), ("U8", "U8"))),
        ("mx_fp", 8, 32, encoded_models.mxfp8),
        ("fp", 8, [128, 128], _fp8),
    ],
)
def test_auto_rounds_floats(
    data_type: str, bits: int, group: Any, maker: Any, tmp_path: Path
) -> None:
    packing = "auto_round:fp8" if data_type == "fp" else "auto_round:llm_compressor"
    block = auto_round_block(bits, group, packing, data_type=data_type)
    model, meaning = mixed(block, {EXPERTS: maker})
    found = converted(model, tmp_path)
    for name, values in meaning.items():
        assert found[name] == Tensor("BF16", values.shape, rounded(values)), name
    judged = run_cli("validate", tmp_path / "source", "--level", "full")
    assert judged.code == 0, judged.out


# --- which rule holds --------------------------------------------------------------------------

AUTO_ROUND = {
    "bits": 4, "group_size": 128, "sym": True, "quant_method": "auto-round",
    "block_name_to_quantize": ["model.layers", "model.visual.blocks"],
    "extra_config": {
        "model.layers.0.mlp.up_proj": {"bits": 8},
        "mlp.gate": {"bits": 16},
        "lm_head": {"bits": 6, "group_size": 32},
        ".*self_attn.*": {"group_size": 64},
        ".*q_proj": {"bits": 2},
        "^model.embed": {"bits": 8},
        "layers.7.*": {"data_type": "fp8", "bits": 8, "group_size": [128, 128]},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "bits", "group"),
    [
        ("model.layers.0.mlp.up_proj", 8, 128),
        ("model.language_model.layers.0.mlp.up_proj", 8, 128),
        ("model.layers.3.mlp.gate", None, None),
        ("model.layers.3.mlp.gate_proj", 4, 128),
        ("model.layers.3.self_attn.q_proj", 4, 64),
        ("model.layers.3.q_proj", 2, 128),
        ("lm_head", 6, 32),
        ("model.lm_head", 6, 32),
        ("model.embed_tokens", 8, 128),
        ("model.norm", None, None),
        ("model.visual.blocks.0.fc1", 4, 128),
        ("model.visual.merger.fc1", None, None),
        ("model.layers.7.fc1", 8, [128, 128]),
    ],
)
def test_auto_rounds_rules(module: str, bits: int | None, group: Any) -> None:
    """A name, the end of one, then the first pattern that is found; outside of the blocks only what is
    named. The validators' own reading says the same."""
    stated = read_block(QuantConfig("config.json", AUTO_ROUND)).of(module)
    judged = Rules(AUTO_ROUND)(module)
    for found in (stated, judged):
        assert (
            (None, None) if found is None else (found["bits"], found["group_size"]) == (bits, group)
        )
        assert (found is None) == (bits is None)


def test_a_head_that_no_rule_names_stays() -> None:
    block = {"bits": 4, "group_size": 128, "quant_method": "auto-round"}
    assert read_block(QuantConfig("config.json", block)).of("lm_head") is None
    assert Rules(block)("lm_head") is None
    assert Rules(block)("model.layers.0.mlp.up_proj") is not None


DYNAMIC = {
    "-:^lm_head$": {},
    r"+:^model\.layers\.0\.mlp\.up_proj$": {"bits": 8},
    "layers": {"bits": 2},
    r"-:.*shared.*": {},
    r"+:.*mlp.*": {"bits": 3},
    r"+:^model\.layers\.5\.mlp\.up_proj$": {"bits": 7},
}


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("lm_head", None),
        ("model.layers.0.mlp.up_proj", {"bits": 8}),
        ("model.layers.0.mlp.up_proj_more", {"bits": 3}),
        ("model.layers.1.shared.mlp", None),
        ("model.layers.5.mlp.up_proj", {"bits": 3}),
        ("layers.0.mlp", {"bits": 2}),
        ("model.layers.0.self_attn.q_proj", {}),
    ],
)
def test_dynamics_rules(module: str, change: dict[str, int] | None) -> None:
    """The first that matches the beginning of a name, as GPTQModel, sglang and vLLM have it."""
    assert Dynamic.of("config.json", DYNAMIC).find(module) == change
    first = next(
        (one for pattern, one in gptq_rules({"dynamic": DYNAMIC}) if re.match(pattern, module)), {}
    )
    assert first == change


# --- contradictions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says", "rule"),
    [
        ({"packing_format": "auto_round:marlin"}, "found 'auto_round:marlin'", "QC089"),
        ({"bits": 9}, "2 to 8 bits, found 9", "QC097"),
        ({"group_size": 0}, "a group_size, found 0", "QC089"),
        ({"extra_config": {".*experts.*": {"bits": 16}}}, "leaves it out", "QC034"),
        (
            {"extra_config": {".*experts.*": {"data_type": "fp8", "bits": 8}}},
            "data_type fp8",
            "QC096",
        ),
        ({"block_name_to_quantize": "model.visual"}, "leaves it out", "QC034"),
        ({"extra_config": ["lm_head"]}, "expected extra_config with an object", None),
        ({"extra_config": {"*": {"bits": 8}}}, "'*' is not a valid regular expression", None),
        ({"extra_config": {".*experts.*": {"bits": 8}}}, "expected", "QC089"),
    ],
)
def test_what_auto_round_says_wrongly(
    change: dict[str, Any], says: str, rule: str | None, tmp_path: Path
) -> None:
    block = auto_round_block(4, 32, "auto_round:auto_gptq") | change
    model, _ = mixed(block, {EXPERTS: qweight(4, less=1, group=32)})
    source = model.write(tmp_path / "source")
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert says in done.err
    judged = json.loads(run_cli("validate", source, "--json").out)
    rules = {one["rule"] for one in judged["findings"] if one["severity"] == "error"}
    assert rule is None or rule in rules, rules


def test_experts_of_a_layer_in_two_schemes(tmp_path: Path) -> None:
    """Runtimes load all experts of a layer as one."""
    rules = {**LEFT, r"+:.*experts\.0\..*": {"bits": 8}, "-:.*self_attn.*": {}}
    makers = {r"experts\.0\.": qweight(8, less=1), EXPERTS: qweight(4, less=1)}
    model, _ = mixed(gptq_block(4, 32, dynamic=rules), makers)
    judged = json.loads(run_cli("validate", model.write(tmp_path / "source"), "--json").out)
    assert "QC091" in {one["rule"] for one in judged["findings"] if one["severity"] == "error"}


def test_fp8_that_auto_round_states_as_integers(tmp_path: Path) -> None:
    block = auto_round_block(4, 32, "auto_round:auto_gptq")
    model, _ = mixed(block, {EXPERTS: _fp8})
    done = run_cli("dequant", model.write(tmp_path / "source"), tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert "states 4-bit int for 'model.layers.0.mlp.experts.0.down_proj', which is FP8" in done.err
    judged = json.loads(run_cli("validate", tmp_path / "source", "--json").out)
    assert "QC096" in {one["rule"] for one in judged["findings"]}


def test_zero_points_that_autoawq_denies(tmp_path: Path) -> None:
    model, _ = encoded_models.encoded("qwen3_moe", "awq")
    model.config["quantization_config"]["zero_point"] = False
    done = run_cli("dequant", model.write(tmp_path / "source"), tmp_path / "out", "--jobs", "1")
    assert done.code == 1
    assert "the config says zero_point false: one of them is wrong" in done.err


def test_a_rule_that_states_nothing_that_is_read() -> None:
    with pytest.raises(PlanError, match=r"expected settings for dynamic '\+:a', found 8"):
        Dynamic.of("config.json", {"+:a": 8})
