"""Rules that tables of classes leave to code: experts that are modules of their own, scales of a cache,
heads with a bias, gpt-oss's stacks, and MXFP4 under names that sglang does not read."""

from __future__ import annotations

from typing import Any

import pytest
from class_tables import Table, qwen3_moe
from loaders.agree_classes import Compared, joined
from simulated_folders import Config, Tensors, folder

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.classes.record import record_of
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.setting import NotSimulated, Setting
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm

FIRST = "model.layers.0.mlp.experts"


def simulated(table: Table, config: Config, tensors: Tensors, tp: int = 1) -> SimulatedLoad:
    by_table = {"sglang": sglang.by_table, "vllm": vllm.by_table}[table["runtime"]]
    return by_table(record_of(table), config, tensors, Setting(tp=tp))


def with_own_modules() -> Table:
    """A table whose experts are modules of two linears each."""
    table, at = qwen3_moe("sglang"), "model.layers.*.mlp.experts.*"
    number = next(i for i, one in enumerate(table["modules"]) if one["kind"] == "experts")
    sizes = {"gate_up_proj": ("hidden_size", "moe_intermediate_size", "moe_intermediate_size"),
             "down_proj": ("moe_intermediate_size", "hidden_size")}  # fmt: skip
    table["modules"][number : number + 1] = [
        {"name": f"{at}.{name}", "asked": f"{at}.{name}", "kind": kind, "inputs": inputs,
         "outputs": outputs, "variant": [1]}
        for (name, (inputs, *outputs)), kind in zip(sizes.items(), ("merged", "row"), strict=True)
    ]  # fmt: skip
    table["names"] = [one for one in table["names"] if ".experts." not in one["from"]]
    table["names"] += [
        {"from": f"{at}.{part}_proj", "to": f"{at}.gate_up_proj", "shard": shard}
        for shard, part in enumerate(("gate", "up"))
    ] + [{"from": f"{at}.down_proj", "to": f"{at}.down_proj"}]
    return table


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_that_are_modules_of_their_own(tp: int) -> None:
    """As many as the config counts, each of its rows among the ranks."""
    config, tensors = folder("qwen3_moe")
    done = simulated(with_own_modules(), config, tensors, tp)
    assert done.whole
    assert not done.unread
    inner, hidden = config["moe_intermediate_size"], config["hidden_size"]
    for expert in range(config["num_experts"]):
        shape = done.parameters[f"{FIRST}.{expert}.gate_up_proj.weight"].shape
        assert shape == (2 * inner // tp, hidden)
    lacks = simulated(with_own_modules(), {**config, "num_experts": 5}, tensors)
    assert f"{FIRST}.4.down_proj.weight" in lacks.unwritten


def test_other_lists_in_layers_have_no_rule() -> None:
    table = with_own_modules()
    for one in (*table["modules"], *table["names"]):
        for key in ("name", "asked", "to"):
            if one.get(key):
                one[key] = one[key].replace(".experts.*", ".blocks.*")
    with pytest.raises(NotSimulated, match="layers in layers have no rule"):
        simulated(table, *folder("qwen3_moe"))


@pytest.mark.parametrize(("caches", "fused"), [(True, "warn"), (False, "warn"), (False, "error")])
def test_scales_of_a_cache_beside_a_projection(caches: bool, fused: str) -> None:
    """A class takes them, leaves them unread, or ends the load; which was recorded of it."""
    table = qwen3_moe("sglang")
    at = "model.layers.*.self_attn"
    table["modules"].insert(2, {"name": f"{at}.attn", "kind": "attention", "asked": f"{at}.attn"})
    table["unknown"]["fused"] = {"": fused}
    if not caches:
        table["caches"] = False
    config, tensors = folder("qwen3_moe", fp8=True)
    scale = "model.layers.0.self_attn.k_proj.k_scale"
    done = simulated(table, config, {**tensors, scale: TensorType("F32", (1,))})
    assert (done.refused is None) == (fused == "warn")
    if done.refused is None:
        assert (scale in done.unread) != caches


@pytest.mark.parametrize("dtype", ["model", "float32"])
def test_a_head_with_a_bias_and_a_type_of_its_own(dtype: str) -> None:
    table = qwen3_moe("sglang")
    head = next(one for one in table["modules"] if one["kind"] == "head")
    head |= {"bias": True, "dtype": dtype}
    config, tensors = folder("qwen3_moe")
    rows = config["vocab_size"]
    done = simulated(table, config, {**tensors, "lm_head.bias": TensorType("BF16", (rows,))}, 2)
    wanted = "F32" if dtype == "float32" else "BF16"
    assert done.whole
    assert done.parameters["lm_head.bias"] == TensorType(wanted, (rows // 2,))
    assert done.parameters["lm_head.weight"].dtype == wanted
    assert "lm_head.bias" in simulated(table, config, tensors).unwritten


def test_an_embedding_whose_rows_follow_from_no_key() -> None:
    table = qwen3_moe("sglang")
    table["modules"][0]["rows"] = ""
    config, tensors = folder("qwen3_moe")
    assert simulated(table, config, tensors).whole


def test_mxfp4_under_names_of_compressed_tensors_stays_unread() -> None:
    """sglang builds its own MXFP4 experts, whose codes have another name, and a bias."""
    config, tensors = folder("qwen3_moe")
    made: Tensors = {}
    for name, one in tensors.items():
        if ".experts." not in name:
            made[name] = one
            continue
        rows, columns = one.shape
        module = name.removesuffix(".weight")
        made[f"{module}.weight_packed"] = TensorType("U8", (rows, columns // 2))
        made[f"{module}.weight_scale"] = TensorType("U8", (rows, columns // 32))
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
               "symmetric": True, "scale_dtype": "torch.uint8"}  # fmt: skip
    block: dict[str, Any] = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": [r"re:.*\.experts\..*"], "weights": weights}},
        "ignore": [r"re:.*self_attn\..*", r"re:.*\.mlp\.gate$"],
    }  # fmt: skip
    done = simulated(qwen3_moe("sglang"), {**config, "quantization_config": block}, made)
    assert done.refused is None
    assert not done.whole
    assert f"{FIRST}.w13_weight" in done.unwritten
    assert f"{FIRST}.w2_weight_bias" in done.unwritten
    assert f"{FIRST}.w13_weight_scale" not in done.unwritten
    assert f"{FIRST}.0.up_proj.weight_packed" in done.unread
    assert f"{FIRST}.0.up_proj.weight_scale" not in done.unread
    config |= {"quantization_config": block, "moe_intermediate_size": 96}
    with pytest.raises(NotSimulated, match="of sizes that are padded"):
        simulated(qwen3_moe("sglang"), config, made)


@pytest.mark.parametrize("tp", [1, 2])
def test_stacks_of_gpt_oss_in_bf16(tp: int) -> None:
    """Its runner in sglang holds matrices as they are published, transposed."""
    table = qwen3_moe("sglang") | {"architecture": "GptOssForCausalLM"}
    config, tensors = folder("qwen3_moe")
    kept = {name: one for name, one in tensors.items() if ".experts." not in name}
    inner, hidden, count = (
        config[key] for key in ("moe_intermediate_size", "hidden_size", "num_experts")
    )
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        kept[f"{at}.gate_up_proj"] = TensorType("BF16", (count, hidden, 2 * inner))
        kept[f"{at}.down_proj"] = TensorType("BF16", (count, inner, hidden))
    to = "model.layers.*.mlp.experts"
    table["names"] += [
        {"from": f"{to}.{part}", "to": to, "shard": shard, "stack": True, "leaf": f"{held}_weight"}
        for part, shard, held in (("gate_up_proj", "w13", "w13"), ("down_proj", "w2", "w2"))
    ]
    done = simulated(table, config, kept, tp)
    assert done.whole
    assert done.parameters[f"{FIRST}.w13_weight"].shape == (count, hidden, 2 * inner // tp)
    assert done.parameters[f"{FIRST}.w2_weight"].shape == (count, inner // tp, hidden)


def test_forms_that_other_tests_saw_to_stay() -> None:
    """A form that differs now is none, whoever saw it agree."""
    found = [Compared("a", "same", 1, (), loaded=True), Compared("b", "differs", 1, ("unread",))]
    before = {"same": [1, 4], "other": [2], "differs": [1, 2]}
    assert joined(before, found) == {"other": [2], "same": [1, 4]}
