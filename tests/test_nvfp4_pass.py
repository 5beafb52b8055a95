"""`qconvert nvfp4`: which tensors a folder has and what they are made of, scales that pairs share, input
scales from statistics, config blocks, MXFP4 under new scales, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import headers
import numpy as np
import pytest
from checkpoints import Model, Result, Tensor, read_tensors, run_cli, without
from input_stats import write_stats
from models import MODELS, bf16, decoded, deepseek_v3, qwen3_moe
from ops_harness import buffer, run_op

from qconvert.calibrate.expert_stats import begin, save_layer
from qconvert.calibrate.settings import LayerStats
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.quantization_config import complete_ignore_lists
from qconvert.cli.plan_report import dump
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RunError
from qconvert.core.parameter_names import Dialect
from qconvert.core.roles import Kind
from qconvert.formats.nvfp4.encode import PackNvfp4, inverse
from qconvert.formats.nvfp4.relabel import ExponentRange, RelabelBlocks, RelabelOwn
from qconvert.formats.nvfp4.scales import OwnScale, RowMaxima
from qconvert.ops.fp4 import SIZES
from qconvert.passes.input_scales import input_maxima
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.shared_scales import shared_groups
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.options import RunOptions

DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)
every_model = pytest.mark.parametrize("kind", sorted(MODELS))

_PARAMETERS: dict[Dialect, tuple[str, str, str]] = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
SPENT = ("weight", "weight_scale_inv")


def nvfp4(source: Path, out: Path, dialect: Dialect, *more: str, jobs: int = 1) -> Result:
    return run_cli("nvfp4", source, out, "--dialect", dialect, "--jobs", str(jobs), *more)


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return dict(found["quantization_config"])


def wanted(model: Model, modules: tuple[str, ...], dialect: Dialect) -> dict[str, Tensor]:
    """What modules that share a scale become, decoded by torch and rounded by the ops (which are proved
    in test_nvfp4.py and test_nvfp4_peer.py)."""
    weights = []
    for module in modules:
        kind = TensorType("BF16", model.tensors[f"{module}.weight"].shape)
        weights.append(buffer(kind, decoded(model, module)))
    maxima = [
        buffer(TensorType("BF16", w.type.shape[:1]), run_op(RowMaxima(), [w])[0][0])
        for w in weights
    ]
    own = run_op(OwnScale(dialect), maxima)[0][0]
    found = {}
    names = _PARAMETERS[dialect]
    for module, weight in zip(modules, weights, strict=True):
        rows, columns = weight.type.shape
        args = [weight, buffer(TensorType("F32", (1,)), own)]
        packed, scale = run_op(PackNvfp4(None, dialect), args)[0]
        found[f"{module}.{names[0]}"] = Tensor("U8", (rows, columns // 2), packed)
        found[f"{module}.{names[1]}"] = Tensor("F8_E4M3", (rows, columns // 16), scale)
        shape = (1,) if dialect == "compressed-tensors" else ()
        found[f"{module}.{names[2]}"] = Tensor("F32", shape, own)
    return found


def expert_parents(model: Model) -> list[str]:
    """`model.layers.1.mlp.experts.0` of every expert that is not of a draft layer."""
    found = {
        name.rpartition(".gate_proj")[0]
        for name in model.tensors
        if ".mlp.experts." in name and ".gate_proj." in name
    }
    drafts = f"model.layers.{model.config['num_hidden_layers']}."
    return sorted(parent for parent in found if not parent.startswith(drafts))


def experts_as(model: Model, dialect: Dialect) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for parent in expert_parents(model):
        found |= wanted(model, (f"{parent}.gate_proj", f"{parent}.up_proj"), dialect)
        found |= wanted(model, (f"{parent}.down_proj",), dialect)
    return found


# --- tensors -----------------------------------------------------------------------------------


@every_model
@both
def test_experts_are_quantized_and_all_else_is_as_it_was(
    dialect: Dialect, kind: str, tmp_path: Path
) -> None:
    model = MODELS[kind]()
    done = nvfp4(model.write(tmp_path / "source"), tmp_path / "out", dialect)
    assert done.code == 0, done.err
    found = read_tensors(tmp_path / "out")
    parents = tuple(f"{parent}." for parent in expert_parents(model))
    others = {n: value for n, value in model.tensors.items() if not n.startswith(parents)}
    if dialect == "compressed-tensors":
        others = {n.replace("weight_scale_inv", "weight_scale"): v for n, v in others.items()}
    assert found == {**others, **experts_as(model, dialect)}


@both
def test_gate_and_up_share_a_scale_across_shards(dialect: Dialect, tmp_path: Path) -> None:
    """Every tensor in a file of its own; up is much larger than gate, and down by itself."""
    model = qwen3_moe(layers=1)
    for parent in expert_parents(model):
        for kind, power in (("gate_proj", -12), ("up_proj", -4), ("down_proj", -8)):
            rows, columns = model.tensors[f"{parent}.{kind}.weight"].shape
            random = np.random.default_rng(len(kind))
            values = random.standard_normal((rows, columns)).astype(np.float32) * 2.0**power
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            name = f"{parent}.{kind}.weight"
            model.tensors[name] = Tensor("BF16", (rows, columns), bits.tobytes())
    source = model.write(tmp_path / "source", shards=len(model.tensors))
    shard_of = json.loads((source / "model.safetensors.index.json").read_bytes())["weight_map"]
    parent = expert_parents(model)[0]
    assert shard_of[f"{parent}.gate_proj.weight"] != shard_of[f"{parent}.up_proj.weight"]
    assert nvfp4(source, tmp_path / "out", dialect, jobs=2).code == 0
    found, own = read_tensors(tmp_path / "out"), _PARAMETERS[dialect][2]
    for parent in expert_parents(model):
        gate, up, down = (
            found[f"{parent}.{kind}_proj.{own}"].data for kind in ("gate", "up", "down")
        )
        assert gate == up != down
    assert {n: found[n] for n in found if ".experts." in n} == experts_as(model, dialect)


@both
def test_stacked_experts_become_experts_apart(dialect: Dialect, tmp_path: Path) -> None:
    """3-D stacks [E, 2I, H] and [E, H, I]: gate and up are halves of one tensor's rows."""
    model = qwen3_moe(layers=1)
    stacked = replace(model, tensors=dict(model.tensors))
    parents = expert_parents(model)
    at = parents[0].rpartition(".")[0]
    for name, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        parts = [model.tensors[f"{parent}.{k}.weight"] for parent in parents for k in kinds]
        rows, columns = parts[0].shape
        shape = (len(parents), len(kinds) * rows, columns)
        data = b"".join(part.data for part in parts)
        stacked.tensors[f"{at}.{name}"] = Tensor("BF16", shape, data)
    stacked.tensors = without(stacked.tensors, [n for n in model.tensors if ".mlp.experts." in n])
    assert nvfp4(stacked.write(tmp_path / "source"), tmp_path / "out", dialect).code == 0
    found = read_tensors(tmp_path / "out")
    assert {n: found[n] for n in found if ".experts." in n} == experts_as(model, dialect)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_dtypes_are_not_rounded_to_bf16_first(dtype: str, tmp_path: Path) -> None:
    model = qwen3_moe(layers=1)
    parent = expert_parents(model)[0]
    name = f"{parent}.down_proj.weight"
    rows, columns = model.tensors[name].shape
    values = np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32) * 0.02
    data = values.astype(np.float16) if dtype == "F16" else values
    model.tensors[name] = Tensor(dtype, (rows, columns), data.tobytes())
    assert nvfp4(model.write(tmp_path / "source"), tmp_path / "out", "modelopt").code == 0
    found = read_tensors(tmp_path / "out")
    own = np.frombuffer(found[f"{parent}.down_proj.weight_scale_2"].data, np.float32)[0]
    assert own == np.abs(data).max().astype(np.float32) / np.float32(2688)


def test_workers_and_little_memory_make_the_same(tmp_path: Path) -> None:
    source = deepseek_v3().write(tmp_path / "source")
    assert nvfp4(source, tmp_path / "one", "modelopt").code == 0
    assert nvfp4(source, tmp_path / "two", "modelopt", "--memory", "64MiB", jobs=2).code == 0
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_memory_is_of_parts_not_of_matrices(tmp_path: Path) -> None:
    """gate and up are 178 MB of bf16 each, and both are gone through before either is rounded. A part is
    of 128 rows, a row of FP8 blocks, at least."""
    headers.write_sparse(headers.load("qwen3.5-27b-fp8"), tmp_path)
    step = ToNvfp4("compressed-tensors", targets=("Linear",))
    plan = run_passes(Plan.identity(Checkpoint.open(tmp_path)), [step])
    peak = max(unit.peak for unit in prepare(plan, RunOptions(memory=1 << 31)).units)
    assert peak < 12 << 20


@both
def test_shared_scales_of_all_linears(dialect: Dialect, tmp_path: Path) -> None:
    """q, k and v of a layer have one scale; so do in_proj_qkv and in_proj_z."""
    model = qwen3_moe()
    source = model.write(tmp_path / "source")
    assert nvfp4(source, tmp_path / "out", dialect, "--targets", "Linear").code == 0
    found = read_tensors(tmp_path / "out")
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        trio = wanted(model, (f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"), dialect)
        alone = wanted(model, (f"{at}.o_proj",), dialect)
        for name, value in {**trio, **alone}.items():
            assert found[name] == value, name
    kept = [n for n in found if found[n].dtype == "BF16" and len(found[n].shape) == 2]
    assert {n.rpartition(".mlp.gate")[1] or n for n in kept} == {
        "model.embed_tokens.weight", "lm_head.weight", ".mlp.gate",
    }  # fmt: skip


def test_groups_follow_the_kinds() -> None:
    """Whatever modules are called, and under one parent only."""
    modules = {
        "a.q_a_proj": Kind.QUERY_DOWN, "a.kv_b_proj": Kind.KV_UP, "a.other": Kind.KV_DOWN,
        "b.w1": Kind.EXPERT_GATE, "b.w3": Kind.EXPERT_UP, "b.w2": Kind.EXPERT_DOWN,
        "c.up_proj": Kind.UP,
    }  # fmt: skip
    assert shared_groups(modules) == (
        ("a.q_a_proj", "a.other"), ("a.kv_b_proj",), ("b.w1", "b.w3"), ("b.w2",), ("c.up_proj",),
    )  # fmt: skip


def test_part_of_what_shares_a_scale_is_refused(tmp_path: Path) -> None:
    """k_proj of 8 columns fewer would be left, and q and v not. (A made-up layer: no model has one.)"""
    model = qwen3_moe(layers=1)
    model.tensors["model.layers.0.self_attn.k_proj.weight"] = Tensor(
        "BF16", (64, 120), bytes(15360)
    )
    done = nvfp4(
        model.write(tmp_path / "source"), tmp_path / "out", "modelopt", "--targets", "Linear"
    )
    assert done.code == 1
    assert "k_proj" in done.err


# --- configs -----------------------------------------------------------------------------------


@every_model
def test_modelopts_block(kind: str, tmp_path: Path) -> None:
    """Weights only says so; beside FP8 layers each layer is named, as sglang's MIXED_PRECISION reads
    them."""
    model = MODELS[kind]()
    source = model.write(tmp_path / "source")
    assert nvfp4(source, tmp_path / "out", "modelopt").code == 0
    block = quantization(tmp_path / "out")
    beside = json.loads((tmp_path / "out" / "hf_quant_config.json").read_bytes())
    assert beside.keys() == {"producer", "quantization"}
    same = {**block, "exclude_modules": block["ignore"], "kv_cache_quant_algo": None}
    assert beside["quantization"] == without(same, ["quant_method", "ignore"])
    if kind == "bf16":
        assert block == {
            "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16,
            "ignore": [
                "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.self_attn.*",
                "model.layers.1.mlp.gate", "model.layers.1.self_attn.*", "lm_head",
            ],
        }  # fmt: skip
        return
    made = read_tensors(tmp_path / "out")
    layers, left = block.pop("quantized_layers"), block.pop("ignore")
    assert block == {
        **model.config["quantization_config"], "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION", "group_size": 16,
        "kv_cache_quant_algo": None,
    }  # fmt: skip
    packed = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    fp8 = {"quant_algo": "FP8_PB_WO", "group_size": 128}
    wanted_layers = {}
    for name, (dtype, *_) in made.items():
        module = name.removesuffix(".weight")
        holder = module.partition(".experts.")[0] + ".experts" if ".experts." in name else module
        if name.endswith(".weight") and dtype in ("U8", "F8_E4M3"):
            wanted_layers[holder] = packed if dtype == "U8" else fp8
            assert module not in left
    assert {name: layers.get(name) for name in wanted_layers} == wanted_layers
    fused = {name for name in layers if name not in wanted_layers}
    assert all(
        name.startswith("model.decoder.")
        or name.endswith(("qkv_proj", "gate_up_proj", "_with_mqa"))
        for name in fused
    )
    assert ("model.decoder.mlp.experts" in fused) == (kind == "deepseek")
    assert "model.layers.0.mlp.gate_up_proj" in fused or kind != "deepseek"


def test_unquantized_draft_layers_are_ignored_by_both_names(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.config |= {
        "model_type": "deepseek_v3", "first_k_dense_replace": 0, "num_nextn_predict_layers": 1,
        "n_routed_experts": model.config.pop("num_experts"), "num_hidden_layers": 1,
    }  # fmt: skip
    for name in [name for name in model.tensors if ".self_attn." in name]:
        del model.tensors[name]
    for layer in range(2):
        for part in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            model.tensors |= bf16(f"model.layers.{layer}.self_attn.{part}.weight", 48, 32)
    source = model.write(tmp_path / "source")
    for dialect in DIALECTS:
        done = nvfp4(source, tmp_path / dialect, dialect)
        assert done.code == 0, done.err
        listed = quantization(tmp_path / dialect)["ignore"]
        found = read_tensors(tmp_path / dialect)
        name = "model.layers.1.mlp.experts.0.up_proj.weight"
        assert found[name] == model.tensors[name]
        if dialect == "modelopt":
            assert {"model.layers.1.*", "model.decoder.*"} <= set(listed)
        else:
            assert {r"re:model\.layers\.1\..*", r"re:model\.decoder\..*"} <= set(listed)


def test_modelopts_list_keeps_its_own_key() -> None:
    """sglang's modelopt classes read `ignore` and nothing else; names of a fused set stand together."""
    block = {"quant_method": "modelopt", "ignore": ["a.in_proj_b"]}
    made = complete_ignore_lists({"quantization_config": block}, ())["quantization_config"]
    assert made == {**block, "ignore": ["a.in_proj_b", "a.in_proj_a", "a.in_proj_ba"]}


@pytest.mark.parametrize("kind", ["fp8", "deepseek", "mixed"])
def test_all_linears_of_fp8_beside_kept_ones(kind: str, tmp_path: Path) -> None:
    """modelopt's dialect has no place for FP8 layers that stay; compressed-tensors' names all others."""
    model = MODELS[kind]()
    source = model.write(tmp_path / "source")
    done = nvfp4(source, tmp_path / "m", "modelopt", "--targets", "Linear")
    assert (done.code == 1) == (kind == "deepseek")
    if done.code:
        assert "dequantize first" in done.err
    assert nvfp4(source, tmp_path / "c", "compressed-tensors", "--targets", "Linear").code == 0
    block = quantization(tmp_path / "c")
    assert set(block["config_groups"]) == {"group_0"} | ({"group_1"} if done.code else set())


def test_dequantizing_and_quantizing_is_one_read(tmp_path: Path) -> None:
    """Connected nodes of three kinds: FP8 to bf16, maxima and scale, codes."""
    model = deepseek_v3()
    recipe = tmp_path / "both.yaml"
    recipe.write_text(
        "passes:\n  - dequant\n  - nvfp4: {dialect: modelopt, targets: [Linear]}\n",
        encoding="utf-8",
    )
    source = model.write(tmp_path / "source")
    done = run_cli("run", recipe, source, tmp_path / "out", "--jobs", "1")
    assert done.code == 0, done.err
    found = read_tensors(tmp_path / "out")
    for name, value in experts_as(model, "modelopt").items():
        assert found[name] == value, name
    assert quantization(tmp_path / "out")["quant_method"] == "modelopt"
    name = "model.layers.2.mlp.experts.0.up_proj"
    assert found[f"{name}.weight"].data == decoded(model, name)


@pytest.mark.peer
@every_model
@pytest.mark.parametrize("targets", ["experts", "Linear"])
def test_compressed_tensors_parses_the_block_and_finds_the_modules(
    kind: str, targets: str, tmp_path: Path
) -> None:
    """Its own config class, and its own matching: NVFP4 modules go to the first group, FP8 ones to the
    second, bf16 ones to none."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.utils.match import is_match

    dialect: Dialect = "compressed-tensors"
    source = MODELS[kind]().write(tmp_path / "source")
    done = nvfp4(source, tmp_path / "out", dialect, "--targets", targets)
    assert done.code == 0, done.err
    config = QuantizationConfig.model_validate(quantization(tmp_path / "out"))
    first = config.config_groups["group_0"]
    assert first.weights == NVFP4A16["weights"]
    assert first.input_activations is None
    found = read_tensors(tmp_path / "out")
    linear = torch.nn.Linear(1, 1)
    for name, value in found.items():
        module, _, parameter = name.rpartition(".")
        if parameter not in ("weight", "weight_packed") or len(value.shape) != 2:
            continue
        matched = is_match(module, linear, first.targets, config.ignore)
        if targets == "experts" or "group_1" in config.config_groups:
            assert matched == (value.dtype == "U8"), module
        elif value.dtype == "U8":
            assert matched, module
        if "group_1" in config.config_groups and not matched:
            second = config.config_groups["group_1"].targets
            assert is_match(module, linear, second, config.ignore) == (value.dtype == "F8_E4M3")


# --- input scales -------------------------------------------------------------------------------


@both
def test_input_scales_come_from_statistics(dialect: Dialect, tmp_path: Path) -> None:
    """2688 / 21 = 128, 2688 / 42 = 64 divide; 1/128 and 1/64 multiply. Who saw nothing has the largest
    of its layer."""
    model = qwen3_moe()
    stats = write_stats(tmp_path / "stats", [0, 1])
    done = nvfp4(model.write(tmp_path / "source"), tmp_path / "out", dialect, "--stats", str(stats))
    assert done.code == 0, done.err
    assert "1 experts saw no token" in done.err
    found = read_tensors(tmp_path / "out")
    name = "input_global_scale" if dialect == "compressed-tensors" else "input_scale"
    seen = {(0, 0): 128.0, (0, 1): 64.0, (1, 0): 128.0, (1, 1): 128.0}
    for (layer, expert), divisor in seen.items():
        at = f"model.layers.{layer}.mlp.experts.{expert}"
        wanted = {"gate_proj": divisor, "up_proj": divisor, "down_proj": 64.0}
        for kind, value in wanted.items():
            number = value if dialect == "compressed-tensors" else 1 / value
            shape = (1,) if dialect == "compressed-tensors" else ()
            wants = Tensor("F32", shape, np.float32(number).tobytes())
            assert found[f"{at}.{kind}.{name}"] == wants
    block = quantization(tmp_path / "out")
    if dialect == "modelopt":
        assert block["quant_algo"] == "NVFP4"
    else:
        inputs = block["config_groups"]["group_0"]["input_activations"]
        assert (inputs["dynamic"], inputs["num_bits"], inputs["group_size"]) == ("local", 4, 16)


def test_beside_fp8_nvfp4_says_so_once_there_are_input_scales(tmp_path: Path) -> None:
    source = deepseek_v3().write(tmp_path / "source")
    stats = write_stats(tmp_path / "stats", [1])
    assert nvfp4(source, tmp_path / "out", "modelopt", "--stats", str(stats)).code == 0
    block = quantization(tmp_path / "out")
    layers = block["quantized_layers"]
    assert layers["model.layers.1.mlp.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert layers["model.decoder.mlp.experts"]["quant_algo"] == "FP8_PB_WO"


@pytest.mark.peer
def test_compressed_tensors_parses_the_block_with_activations(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import NVFP4

    source = qwen3_moe().write(tmp_path / "source")
    stats = write_stats(tmp_path / "stats", [0, 1])
    done = nvfp4(source, tmp_path / "out", "compressed-tensors", "--stats", str(stats))
    assert done.code == 0, done.err
    group = QuantizationConfig.model_validate(quantization(tmp_path / "out")).config_groups[
        "group_0"
    ]
    assert group.weights == NVFP4["weights"]
    fields = ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "scale_dtype")
    for field in fields:
        wants = getattr(NVFP4["input_activations"], field)
        assert getattr(group.input_activations, field) == wants


def test_statistics_are_read_as_a_calibration_saves_them(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    gate, down = (random.uniform(0, 9, (3, n)).astype(np.float32) for n in (48, 32))
    stats = LayerStats(
        np.array([5, 6, 0]), gate[:, 0], gate * 0, gate, down * 0, down, (), (), {}, ()
    )
    begin(tmp_path / "stats", {"samples": 1})
    save_layer(tmp_path / "stats", 7, stats)
    found = input_maxima(tmp_path / "stats", (7,), 3, 48, 32)
    for expert in range(3):
        assert found.of(7, expert, "gate_proj") == found.of(7, expert, "up_proj")
        assert found.of(7, expert, "up_proj") == gate[expert].max()
        assert found.of(7, expert, "down_proj") == down[expert].max()


def test_the_same_statistics_elsewhere_are_the_same_conversion(tmp_path: Path) -> None:
    source = qwen3_moe().write(tmp_path / "source")
    for name in ("a", "b"):
        stats = write_stats(tmp_path / name, [0, 1])
        assert nvfp4(source, tmp_path / f"out-{name}", "modelopt", "--stats", str(stats)).code == 0
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / f"out-{name}").iterdir()}
        for name in ("a", "b")
    )
    assert first == second


@pytest.mark.parametrize(
    ("layers", "sizes", "words"),
    [
        ([0], {}, "has no layers.1.gate_up.absmax"),
        ([0, 1], {"experts": 3}, "another model's statistics"),
        ([0, 1], {"hidden": 64}, "expected F32 \\[2, 128\\]"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(
    layers: list[int], sizes: dict[str, int], words: str, tmp_path: Path
) -> None:
    model = qwen3_moe()
    stats = write_stats(tmp_path / "stats", layers, **sizes)
    plan = Plan.identity(Checkpoint.open(model.write(tmp_path / "source")))
    with pytest.raises(PlanError, match=words):
        ToNvfp4("modelopt", stats=str(stats))(plan)


def test_statistics_with_nothing_to_give_are_refused() -> None:
    with pytest.raises(PlanError, match="the only use of stats"):
        ToNvfp4("modelopt", weight_only=True, stats="x")
    with pytest.raises(PlanError, match="of routed experts' inputs alone"):
        ToNvfp4("modelopt", targets=("Linear",), stats="x")


@both
@pytest.mark.parametrize("targets", ["experts", "Linear"])
def test_a_constant_input_scale_is_of_all_that_is_quantized(
    dialect: Dialect, targets: str, tmp_path: Path
) -> None:
    """1.5 multiplies, and 1 / 1.5 divides. The card says that no data is behind it."""
    source, out = qwen3_moe().write(tmp_path / "source"), tmp_path / "out"
    done = nvfp4(source, out, dialect, "--input-scale", "1.5", "--targets", targets)
    assert done.code == 0, done.err
    found, (weight, *_) = read_tensors(out), _PARAMETERS[dialect]
    packed = [n.removesuffix(weight) for n, t in found.items() if t.dtype == "U8"]
    assert len(packed) == 12 + (8 if targets == "Linear" else 0)
    modelopt = dialect == "modelopt"
    name, value = ("input_scale", 1.5) if modelopt else ("input_global_scale", 1 / 1.5)
    wants = Tensor("F32", () if modelopt else (1,), np.float32(value).tobytes())
    assert {n: t for n, t in found.items() if "input" in n and "scale" in n} == {
        f"{module}{name}": wants for module in packed
    }
    assert "the constant 1.5, found from no data" in (out / "README.md").read_text()
    block = quantization(out)
    if dialect == "modelopt":
        assert block["quant_algo"] == "NVFP4"
    else:
        assert block["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


@both
def test_a_constant_input_scale_of_mxfp4(dialect: Dialect, tmp_path: Path) -> None:
    """As NVIDIA did for Kimi-K3."""
    source, out = mxfp4_moe().write(tmp_path / "source"), tmp_path / "out"
    done = nvfp4(source, out, dialect, "--input-scale", "1.0")
    assert done.code == 0, done.err
    ends = (".input_scale", ".input_global_scale")
    scales = [t for name, t in read_tensors(out).items() if name.endswith(ends)]
    assert len(scales) == 6
    assert {np.frombuffer(t.data, np.float32)[0] for t in scales} == {1.0}
    if dialect == "modelopt":
        assert quantization(out)["quant_algo"] == "NVFP4"
    else:
        assert quantization(out)["config_groups"]["group_0"]["input_activations"] is not None


def test_a_constant_input_scale_beside_another_word_is_refused() -> None:
    for wrong in (0.0, float("nan")):
        with pytest.raises(PlanError, match="input scale above 0"):
            ToNvfp4(input_scale=wrong)
    with pytest.raises(PlanError, match="weight_only says otherwise"):
        ToNvfp4(input_scale=1.0, weight_only=True)
    with pytest.raises(PlanError, match="stats says otherwise"):
        ToNvfp4(input_scale=1.0, stats="x")
    # What stands in manifests of older versions is unchanged.


# --- MXFP4 --------------------------------------------------------------------------------------

MXFP4_BLOCK = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
                "symmetric": True, "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
}  # fmt: skip


def mxfp4_moe(low: int = 118, high: int = 130) -> Model:
    """Experts as random codes with exponents from `low` to `high`, both of which are there; some blocks
    are zero, with exponents far outside."""
    model = qwen3_moe(layers=1)
    model.config["quantization_config"] = MXFP4_BLOCK
    random = np.random.default_rng(11)
    for name in [n for n in model.tensors if ".mlp.experts." in n]:
        rows, columns = model.tensors.pop(name).shape
        module = name.removesuffix(".weight")
        packed = random.integers(1, 256, (rows, columns // 32, 16)).astype(np.uint8)
        scale = random.integers(low, high + 1, (rows, columns // 32)).astype(np.uint8)
        scale[0, 0], scale[-1, -1] = low, high
        packed[0, 0, 0] = packed[-1, -1, 0] = 0x21
        packed[1, :2] = [[0x00] * 16, [0x80] * 16][:1] * 2
        scale[1, 0], scale[1, 1] = 0, 255
        shape = rows, columns // 2
        model.tensors[f"{module}.weight_packed"] = Tensor("U8", shape, packed.tobytes())
        model.tensors[f"{module}.weight_scale"] = Tensor("U8", scale.shape, scale.tobytes())
    return model


def mx_meaning(model: Model, module: str) -> np.ndarray[Any, Any]:
    packed = model.tensors[f"{module}.weight_packed"]
    scale = model.tensors[f"{module}.weight_scale"]
    codes = np.frombuffer(packed.data, np.uint8).reshape(packed.shape)
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    sizes = np.array(SIZES)[codes & 7] * np.where(codes & 8, -1, 1)
    exponents = np.frombuffer(scale.data, np.uint8).reshape(scale.shape).astype(int)
    factor = np.repeat(np.exp2(np.clip(exponents, 1, 254) - 127.0), 32, axis=1)
    found: np.ndarray[Any, Any] = sizes * factor
    return found


@both
def test_mxfp4_is_relabelled_without_loss(dialect: Dialect, tmp_path: Path) -> None:
    model = mxfp4_moe()
    done = nvfp4(model.write(tmp_path / "source"), tmp_path / "out", dialect)
    assert done.code == 0, done.err
    assert "lossy   0 steps" in done.err
    found = read_tensors(tmp_path / "out")
    weight, scale, own = _PARAMETERS[dialect]
    for parent in expert_parents(model) or ["model.layers.0.mlp.experts.0"]:
        for kind in ("gate_proj", "up_proj", "down_proj"):
            module = f"{parent}.{kind}"
            packed = model.tensors[f"{module}.weight_packed"]
            assert found[f"{module}.{weight}"] == packed
            blocks = found[f"{module}.{scale}"]
            rows, half = packed.shape
            assert (blocks.dtype, blocks.shape) == ("F8_E4M3", (rows, half // 8))
            value = float(np.frombuffer(found[f"{module}.{own}"].data, np.float32)[0])
            # The largest exponent is 130: 2^(130 - 127 - 8) = 2^-5.
            assert value == (2.0**-5 if dialect == "modelopt" else 2.0**5)
            made = inverse(
                np.frombuffer(packed.data, np.uint8).reshape(rows, half),
                np.frombuffer(blocks.data, np.uint8).reshape(rows, half // 8),
                value,
                dialect,
            )
            np.testing.assert_array_equal(made, mx_meaning(model, module))
    block = quantization(tmp_path / "out")
    if dialect == "modelopt":
        assert block["quant_algo"] == "W4A16_NVFP4"
    else:
        assert block["format"] == "nvfp4-pack-quantized"
        assert block["config_groups"]["group_0"]["weights"]["group_size"] == 16
        assert block["ignore"] == MXFP4_BLOCK["ignore"]


@both
def test_exponents_that_spread_too_far_are_refused_with_the_numbers(
    dialect: Dialect, tmp_path: Path
) -> None:
    source = mxfp4_moe(110, 127).write(tmp_path / "source")
    assert nvfp4(source, tmp_path / "fits", dialect).code == 0
    source = mxfp4_moe(110, 128).write(tmp_path / "wider")
    done = nvfp4(source, tmp_path / "out", dialect)
    assert done.code == 1
    assert "exponents go from 110 to 128, a spread of 18" in done.err
    assert "hold 17" in done.err


def test_gate_and_up_spread_together(tmp_path: Path) -> None:
    """Gate alone and up alone would fit."""
    ranges = [buffer(TensorType("U8", (1, 2)), bytes(pair)) for pair in ((100, 110), (112, 125))]
    for pair in ranges:
        run_op(RelabelOwn("modelopt"), [pair])
    with pytest.raises(RunError, match="a spread of 25"):
        run_op(RelabelOwn("modelopt"), ranges)


def test_golden_relabelling() -> None:
    """Exponents 127 (1) and 120 (2^-7) under a largest of 127: own 2^(127 - 135) = 2^-8, so the block
    scales are 2^8 = 256, E4M3 (8 + 7) << 3 = 0x78, and 2^1, (1 + 7) << 3 = 0x40, each twice. 110 is
    2^-9, E4M3's smallest number, 0x01; 111 is 2^-8, 0x02; 113 is 2^-6, the smallest normal, 0x08."""
    scale = buffer(TensorType("U8", (1, 5)), bytes([127, 120, 110, 111, 113]))
    packed = buffer(TensorType("U8", (1, 80)), bytes([0x12] * 80))
    extent = run_op(ExponentRange(), [packed, scale])[0][0]
    assert extent == bytes([110, 127])
    for dialect, own in (("modelopt", 2.0**-8), ("compressed-tensors", 2.0**8)):
        known: Dialect = "modelopt" if dialect == "modelopt" else "compressed-tensors"
        made = run_op(RelabelOwn(known), [buffer(TensorType("U8", (1, 2)), extent)])[0][0]
        assert made == np.float32(own).tobytes()
        args = [scale, buffer(TensorType("F32", (1,)), made)]
        blocks = run_op(RelabelBlocks(known), args)[0][0]
        assert blocks == bytes.fromhex("78784040010102020808")


def test_parts_of_relabelling_change_nothing() -> None:
    random = np.random.default_rng(2)
    packed = buffer(TensorType("U8", (50, 64)), random.integers(0, 256, 3200, np.uint8).tobytes())
    scale = buffer(TensorType("U8", (50, 4)), random.integers(115, 130, 200, np.uint8).tobytes())
    args = [packed, scale]
    assert run_op(ExponentRange(), args)[0] == run_op(ExponentRange(), args, 300)[0]
    own = buffer(TensorType("F32", (1,)), np.float32(2.0**-6).tobytes())
    op = RelabelBlocks("modelopt")
    assert run_op(op, [scale, own])[0] == run_op(op, [scale, own], 50)[0]


def test_a_scale_of_nan_is_refused(tmp_path: Path) -> None:
    model = mxfp4_moe()
    name = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    kind, shape, data = model.tensors[name]
    model.tensors[name] = Tensor(kind, shape, data[:-1] + b"\xff")
    done = nvfp4(model.write(tmp_path / "source"), tmp_path / "out", "modelopt")
    assert done.code == 1
    assert "has a scale of NaN" in done.err
    assert "experts.1.up_proj" in done.err


# --- what is refused, and what is said ----------------------------------------------------------


def test_columns_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    source = qwen3_moe(hidden=128, intermediate=40).write(tmp_path / "source")
    done = nvfp4(source, tmp_path / "out", "modelopt")
    assert done.code == 1
    assert re.search(r"down_proj: .* 16\b.*, found 40", done.err)


def test_a_broken_weight_names_its_row(tmp_path: Path) -> None:
    model = qwen3_moe(layers=1)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    kind, shape, data = model.tensors[name]
    at = 2 * (7 * shape[1] + 3)
    model.tensors[name] = Tensor(kind, shape, data[:at] + b"\x80\x7f" + data[at + 2 :])
    done = nvfp4(model.write(tmp_path / "source"), tmp_path / "out", "modelopt")
    assert done.code == 1
    assert f"{name!r}: row 7" in done.err
    assert "NaN or infinity" in done.err


def test_stats_and_weight_only_contradict_one_another(tmp_path: Path) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    done = nvfp4(source, tmp_path / "out", "modelopt", "--weight-only", "--stats", "x")
    assert done.code == 2
    assert "--weight-only" in done.err


def test_the_plan_names_what_is_read_for_each_scale(tmp_path: Path) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    plan = run_passes(Plan.identity(Checkpoint.open(source)), [ToNvfp4("modelopt")])
    line = next(line for line in dump(plan) if ".experts.0.gate_proj.weight_scale_2" in line)
    assert "experts.0.gate_proj.weight" in line
    assert "experts.0.up_proj.weight" in line
    assert "down_proj" not in line


def test_the_drafts_stay_bf16_where_they_were(tmp_path: Path) -> None:
    """One draft tensor changed must not move a byte of what is quantized."""
    model = deepseek_v3()
    source = model.write(tmp_path / "source")
    assert nvfp4(source, tmp_path / "out", "modelopt").code == 0
    name = "model.layers.2.eh_proj.weight"
    model.tensors |= bf16(name, *model.tensors[name].shape)
    found = read_tensors(tmp_path / "out")
    drafts = {n for n in model.tensors if n.startswith("model.layers.2.")}
    assert drafts <= set(found)
    assert all(found[n] == model.tensors[n] for n in drafts)
