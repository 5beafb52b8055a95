"""Several groups in one compressed-tensors block: which speaks of a module. Quantization methods that
are not read here, of which nothing is proved. Sound checkpoints of models that nobody described.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Model, Tensor, bf16_moe, fp8_moe, ran, read_tensors, run_cli, tensor

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.integer_config import packed_scheme
from qconvert.checkpoint.quantization_config import fp8_scheme, groups_of
from qconvert.core.errors import PlanError
from qconvert.validation.runner import validate_folder

AT = "model.layers.1"
EXPERT = f"{AT}.mlp.experts.0.up_proj"
QUERY = f"{AT}.self_attn.q_proj"

Group = tuple[list[str], dict[str, Any]]


def int4(group: int) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group,
        "symmetric": True,
    }


def fp8(block: int | None) -> dict[str, Any]:
    size = {} if block is None else {"block_structure": [block, block]}
    strategy = "channel" if block is None else "block"
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **size}


def block_of(*groups: Group, ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision",
        "quantization_status": "compressed", "ignore": list(ignore),
        "config_groups": {
            f"group_{n}": {"targets": targets, "weights": weights}
            for n, (targets, weights) in enumerate(groups)
        },
    }  # fmt: skip


def opened(block: dict[str, Any], tmp_path: Path) -> Checkpoint:
    model = bf16_moe()
    model.config["quantization_config"] = block
    return Checkpoint.open(model.write(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("groups", "expert", "query"),
    [
        ([(["Linear"], int4(128)), (["re:.*experts.*"], int4(32))], 32, 128),
        ([(["re:.*experts.*"], int4(32)), (["Linear"], int4(128))], 32, 128),
        ([(["re:.*"], int4(64)), ([EXPERT], int4(32))], 32, 64),
        ([(["re:.*up_proj"], int4(64)), (["re:.*experts.*"], int4(32)), (["Module"], int4(8))], 32, 8),
        ([(["Linear"], int4(128)), (["Linear"], int4(32))], 32, 32),
        ([(["Linear"], int4(128)), (["re:.*experts.*"], fp8(128))], 128, 128),
    ],
)  # fmt: skip
def test_the_group_that_speaks_of_a_module(
    groups: list[Group], expert: int, query: int, tmp_path: Path
) -> None:
    """A name before patterns, patterns in the order of their letters, classes last; of a target that two
    groups have the last."""
    checkpoint = opened(block_of(*groups), tmp_path)
    assert packed_scheme(checkpoint, EXPERT).group == expert
    assert packed_scheme(checkpoint, QUERY).group == query


def test_a_module_that_no_group_speaks_of(tmp_path: Path) -> None:
    groups = block_of((["re:.*mlp.*"], int4(128)), ([EXPERT], int4(32)))
    checkpoint = opened(groups, tmp_path)
    with pytest.raises(PlanError, match=r"q_proj' is packed integers.*several, none for it"):
        packed_scheme(checkpoint, QUERY)


def test_a_target_that_is_no_pattern_is_named(tmp_path: Path) -> None:
    checkpoint = opened(block_of((["re:("], int4(128))), tmp_path)
    with pytest.raises(PlanError, match=r"config.json.*'re:\(' is not a valid regular expression"):
        packed_scheme(checkpoint, QUERY)


def test_fp8_groups_are_resolved_by_module(tmp_path: Path) -> None:
    groups = block_of((["Linear"], fp8(128)), (["re:.*experts.*"], fp8(None)))
    checkpoint = opened(groups, tmp_path)
    assert fp8_scheme(checkpoint, EXPERT).block is None
    assert fp8_scheme(checkpoint, QUERY).block == (128, 128)
    with pytest.raises(PlanError, match="different FP8 schemes"):
        fp8_scheme(checkpoint)


def test_fp8_beside_other_floats_is_read(tmp_path: Path) -> None:
    """As NVFP4 experts beside FP8 linears have it."""
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    checkpoint = opened(block_of((["re:.*experts.*"], fp4), (["Linear"], fp8(128))), tmp_path)
    assert fp8_scheme(checkpoint, QUERY).block == (128, 128)


def two_schemes() -> Model:
    """Attention packed in groups of 4 columns, experts in groups of 8; class target first."""
    model = bf16_moe(moe_intermediate_size=8)
    found: dict[str, Tensor] = {}
    for name, value in model.tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = value
            continue
        rows, columns, group = 8, 8, 8 if ".experts." in name else 4
        module = name.removesuffix(".weight")
        found[f"{module}.weight_packed"] = tensor("I32", rows, columns // 8)
        ones = np.full((rows, columns // group), 0x3F80, "<u2").tobytes()
        found[f"{module}.weight_scale"] = Tensor("BF16", (rows, columns // group), ones)
        shape = np.array([rows, columns], np.int64).tobytes()
        found[f"{module}.weight_shape"] = Tensor("I64", (2,), shape)
    model.tensors = found
    groups = block_of((["Linear"], int4(4)), (["re:.*experts.*"], int4(8)), ignore=("lm_head",))
    groups["ignore"].append("re:.*mlp.gate$")
    model.config["quantization_config"] = groups
    return model


def test_a_model_of_two_schemes_is_sound_and_is_read(tmp_path: Path) -> None:
    source = two_schemes().write(tmp_path / "source")
    report = validate_folder(source)
    assert [f for f in report.findings if f.severity == "error"] == []
    done = run_cli("amx", source, tmp_path / "out", "--method", "int8", "--numa", "1", "--dry-run")
    assert "several schemes" not in done.err
    assert "no group size" not in done.err


def test_a_scale_of_the_other_group_s_size_is_found(tmp_path: Path) -> None:
    """QC038, by module: experts with scales for groups of 4."""
    model = two_schemes()
    ones = np.full((8, 2), 0x3F80, "<u2").tobytes()
    model.tensors[f"{EXPERT}.weight_scale"] = Tensor("BF16", (8, 2), ones)
    report = validate_folder(model.write(tmp_path / "source"))
    assert {(f.rule, f.where) for f in report.findings} == {("QC038", f"{EXPERT}.weight_scale")}


def two_blocks() -> Model:
    """FP8: linears in blocks of 4, experts with a scale a row."""
    model = fp8_moe()
    found: dict[str, Tensor] = {}
    for name, value in model.tensors.items():
        new = name.replace("weight_scale_inv", "weight_scale")
        if ".experts." in name and new != name:
            rows = model.tensors[name.removesuffix("_scale_inv")].shape[0]
            value = tensor("F32", rows, 1)
        found[new] = value
    model.tensors = found
    groups = block_of((["Linear"], fp8(4)), (["re:.*experts.*"], fp8(None)), ignore=("lm_head",))
    groups["ignore"].append("re:.*mlp.gate$")
    model.config["quantization_config"] = {**groups, "format": "float-quantized"}
    return model


def test_two_fp8_schemes_are_dequantized_each_by_its_own(tmp_path: Path) -> None:
    source = two_blocks().write(tmp_path / "source")
    assert [f for f in validate_folder(source).findings if f.severity == "error"] == []
    ran("dequant", source, tmp_path / "out", "--jobs", "1")
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    for module in (EXPERT, QUERY):
        weight, scale = before[f"{module}.weight"], before[f"{module}.weight_scale"]
        rows, columns = weight.shape
        scales = np.frombuffer(scale.data, "<f4").reshape(scale.shape)
        across = columns if scale.shape[1] == 1 and module == EXPERT else 4
        down = 1 if module == EXPERT else 4
        each = scales.repeat(down, 0).repeat(across, 1)[:rows, :columns]
        import torch

        codes = torch.frombuffer(bytearray(weight.data), dtype=torch.float8_e4m3fn)
        wanted = (codes.float().reshape(rows, columns) * torch.from_numpy(each)).bfloat16()
        assert after[f"{module}.weight"].data == wanted.view(torch.uint8).numpy().tobytes()


# --- Methods that are not read -------------------------------------------------------------------

_QUANTIZATION = (
    "scales are paired",
    "quantization blocks agree",
    "are not quantized",
    "their formats",
)


def hqq() -> Model:
    """Words of AutoAWQ's names."""
    model = bf16_moe()
    found: dict[str, Tensor] = {}
    for name, value in model.tensors.items():
        if name.endswith("_proj.weight"):
            module, (rows, columns) = name.removesuffix(".weight"), value.shape
            found[f"{module}.qweight"] = tensor("I32", columns, max(1, rows // 8))
            found[f"{module}.qzeros"] = tensor("I32", 1, max(1, rows // 8))
            found[f"{module}.scales"] = tensor("F16", 1, rows)
        else:
            found[name] = value
    model.tensors = found
    model.config["quantization_config"] = {"quant_method": "hqq", "bits": 4, "group_size": 8}
    return model


def torchao() -> Model:
    """A method that names no tensor otherwise than the model does."""
    model = bf16_moe()
    for name in [n for n in model.tensors if n.endswith("_proj.weight")]:
        rows, columns = model.tensors[name].shape
        model.tensors[name] = tensor("I8", rows, columns)
        model.tensors[f"{name.removesuffix('.weight')}.weight_qscale"] = tensor("F32", rows)
    model.config["quantization_config"] = {"quant_method": "torchao"}
    return model


@pytest.mark.parametrize("make", [hqq, torchao], ids=["hqq", "torchao"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_of_a_method_that_is_not_read_nothing_is_proved(
    make: Any, known: bool, tmp_path: Path
) -> None:
    model = make()
    if not known:
        model.config["model_type"] = "nobody_s"
    method = model.config["quantization_config"]["quant_method"]
    report = validate_folder(model.write(tmp_path / "folder"))
    errors = [(f.rule, f.where) for f in report.findings if f.severity == "error"]
    assert errors == [("QC097", "config.json: quantization_config")], "that nothing judges it"
    assert not [text for text in report.proved if any(part in text for part in _QUANTIZATION)]
    said = [
        text for text in report.not_checked if f"quant_method {method!r} is not supported" in text
    ]
    assert len(said) >= 3


# --- Sound checkpoints of families that nobody described ------------------------------------------


def unknown(names: Mapping[str, tuple[int, ...]], **config: Any) -> Model:
    settings = {"model_type": "nobody_s", "hidden_size": 8, "num_hidden_layers": 2, **config}
    tensors = {name: tensor("BF16", *shape) for name, shape in names.items()}
    return Model(settings, tensors, {"tokenizer.json": b"{}\n"})


def ernie4_5_moe() -> Model:
    """The count of experts under a key that few configs have."""
    names = {"model.layers.0.mlp.up_proj.weight": (16, 8), "model.layers.1.mlp.gate.weight": (2, 8)}
    for expert in range(2):
        names[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] = (8, 8)
    return unknown(names, moe_num_experts=2)


def counted_otherwise() -> Model:
    """And under one that none has."""
    model = ernie4_5_moe()
    model.config["how_many_experts"] = model.config.pop("moe_num_experts")
    return model


def longcat_flash() -> Model:
    """Experts without weights of their own, that transformers saves in part, numbered on."""
    names = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": (8, 8) for e in range(4)}
    names |= {f"model.layers.0.mlp.experts.{e}.down_proj.weight": (8, 8) for e in range(2)}
    return unknown(names, n_routed_experts=2, zero_expert_num=2)


def minimax() -> Model:
    """Two kinds of attention."""
    full = {f"model.layers.0.self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"}
    linear = {
        "qkv_proj.weight": (24, 8), "out_proj.weight": (8, 8), "output_gate.weight": (8, 8),
        "norm.weight": (8,),
    }  # fmt: skip
    return unknown(
        {**full, **{f"model.layers.1.self_attn.{n}": shape for n, shape in linear.items()}}
    )


def deepseek_v4() -> Model:
    """A bias in some layers, and none in those that choose experts by a hash."""
    names = {f"model.layers.{n}.ffn.gate.weight": (2, 8) for n in range(2)}
    return unknown(names | {"model.layers.1.ffn.gate.bias": (2,)}, n_routed_experts=2)


def kimi_k25() -> Model:
    """As transformers saves it: another word for `layers` than is published."""
    at, mla = "language_model.model.blocks.0", ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    names: dict[str, tuple[int, ...]] = {f"{at}.self_attn.{name}.weight": (8, 8) for name in mla}
    names |= {f"{at}.{n}.weight": (8,) for n in ("input_layernorm", "post_attention_layernorm")}
    names["language_model.model.embed_tokens.weight"] = (8, 8)
    text = {"hidden_size": 8, "num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": 8}
    return unknown(names, model_type="kimi_k25", text_config=text)


SOUND = [ernie4_5_moe, counted_otherwise, longcat_flash, minimax, deepseek_v4, kimi_k25]


@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_sound_checkpoints_that_nobody_described_have_no_error(make: Any, tmp_path: Path) -> None:
    report = validate_folder(make().write(tmp_path / "folder", 1))
    assert [f for f in report.findings if f.severity == "error"] == []
    assert any("missing (" in text for text in report.not_checked)


def test_half_fused_layers_of_unknown_families_are_found_still(tmp_path: Path) -> None:
    """Layers that are alike but for the projection: a tool fused one of them (QC017)."""
    names = {f"model.layers.0.self_attn.{n}_proj.weight": (8, 8) for n in "qkvo"}
    names |= {"model.layers.1.self_attn.qkv_proj.weight": (24, 8)}
    names["model.layers.1.self_attn.o_proj.weight"] = (8, 8)
    report = validate_folder(unknown(names).write(tmp_path / "folder", 1))
    assert {f.rule for f in report.findings if f.severity == "error"} == {"QC017"}


def test_an_expert_that_is_lost_is_found_still(tmp_path: Path) -> None:
    """QC013, by the config's count; dequant and copy of such a model are the source's own business."""
    model = ernie4_5_moe()
    del model.tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
    report = validate_folder(model.write(tmp_path / "folder", 1))
    assert {f.rule for f in report.findings if f.severity == "error"} == {"QC013"}


# --- compressed-tensors itself -------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(40))
def test_groups_are_resolved_as_compressed_tensors_does(seed: int, tmp_path: Path) -> None:
    """Names, patterns and classes drawn at random, over modules of a small model."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    names = [
        f"model.layers.{n}.{m}" for n in range(2) for m in ("a.q_proj", "mlp.experts.0.up_proj")
    ]
    pool = [
        "Linear", "Module", *names, "re:.*", "re:.*experts.*", "re:.*q_proj", "re:model.layers.1.*",
        "re:.*proj$", "q_proj", "re:experts",
    ]  # fmt: skip
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    for number in range(int(rng.integers(1, 4))):
        count = int(rng.integers(1, 4))
        groups.append(([str(t) for t in rng.choice(pool, count, replace=False)], int4(8 << number)))
    ignore = tuple(str(t) for t in rng.choice(pool[2:], int(rng.integers(0, 2)), replace=False))
    block = block_of(*groups, ignore=ignore)

    class Tree(torch.nn.Module):
        pass

    tree = Tree()
    for name in names:
        at: torch.nn.Module = tree
        *parents, last = name.split(".")
        for part in parents:
            if not hasattr(at, part):
                at.add_module(part, Tree())
            at = getattr(at, part)
        at.add_module(last, torch.nn.Linear(64, 64, bias=False))
    theirs = {**block, "quantization_status": "initialized"}
    apply_quantization_config(tree, QuantizationConfig.model_validate(theirs), show_progress=False)
    (ours,) = groups_of(opened(block, tmp_path))
    for name in names:
        scheme = getattr(tree.get_submodule(name), "quantization_scheme", None)
        weights = ours.weights(name)
        found = None if weights is None else weights["group_size"]
        assert found == (None if scheme is None else scheme.weights.group_size), block
