"""Tables of classes: sizes, what is built from them, where names go; and that a simulator fed with one
says what the simulator says that knows the class by hand."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from class_tables import qwen3_moe
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_folders import JUNK, LINEARS, folder, integers, places

from qconvert.core.dtypes import TensorType
from qconvert.core.versions import RELEASES
from qconvert.runtimes import pipeline
from qconvert.runtimes.classes import record as records
from qconvert.runtimes.classes.build import (
    built,
    filled,
    numbers_of,
    pattern_of,
    with_shared_routed,
)
from qconvert.runtimes.classes.expressions import Sizes, parsed
from qconvert.runtimes.classes.names import RecordedNames
from qconvert.runtimes.classes.record import STAGES, check_form, form_of, record_of, recorded
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loading.building import RankBuild
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.mxfp4 import Mxfp4
from qconvert.runtimes.loading.schemes import Moe, NoQuantization, Unquantized
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting
from qconvert.runtimes.serving import NotKnown, Offered, asked
from qconvert.runtimes.sglang import simulator as sglang
from qconvert.runtimes.vllm import simulator as vllm
from qconvert.runtimes.vllm.ignore_matching import Renames

CONFIG: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "sizes": [3, 5], "vision_config": {"depth": 7},
    "text": "x",
}  # fmt: skip
SIMULATE = {"sglang": sglang, "vllm": vllm}
TWICE = tuple(f"model.layers.{layer}.mlp.experts.gate.weight" for layer in range(3))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("hidden_size", 64), ("2 * hidden_size + 1", 129), ("hidden_size // num_attention_heads", 16),
        ("vision_config.depth - 2", 5), ("sizes[layer]", 5), ("head_dim", 16),
        ("num_key_value_heads * (head_dim + 1)", 68), ("given", 9), (12, 12),
    ],
)  # fmt: skip
def test_sizes(expression: str, value: int) -> None:
    assert Sizes(CONFIG, {"given": 9}).of(expression, layer=1) == value


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("other", "config.json states no other"), ("text", "states no text that a model has"),
        ("sizes[layer]", "states no sizes of each layer"), ("1 - hidden_size", "which is no size"),
        ("hidden_size // (2 - 2)", "states 0 for 2 - 2"),
    ],
)  # fmt: skip
def test_sizes_that_a_config_does_not_state(expression: str, says: str) -> None:
    with pytest.raises(NotSimulated, match=says.replace("(", r"\(")):
        Sizes(CONFIG, {}).of(expression, layer=2)


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"count": 2, "block": {"ids": [1]}}, 2), ({"block": {"ids": [1, 5]}}, 2), ({}, 3),
        ({"count": None}, None), ({"block": {"ids": "1"}}, None),
    ],
)  # fmt: skip
def test_what_counts_in_place_of_a_size(config: dict[str, Any], value: int | None) -> None:
    """The first expression that a config states, where it leaves a key out; null is no such place."""
    sizes = Sizes(config, {}, {}, {"count": ("len(block.ids)", 3), "len(other.ids)": ("count",)})
    for expression in ("count", "len(other.ids)"):
        if value is None:
            with pytest.raises(NotSimulated, match=r"config.json states"):
                sizes.of(expression)
        else:
            assert sizes.of(expression) == value


@pytest.mark.parametrize("expression", ["f(1)", "a ** 2", "a[0]", "a +", "'x'", "1.5"])
def test_what_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expected keys|asked for its number|no expression"):
        parsed(expression)


def test_patterns_of_names() -> None:
    name = "model.layers.12.mlp.experts.3.w1.weight_scale_2"
    assert pattern_of(name) == "model.layers.*.mlp.experts.*.w1.weight_scale_2"
    assert numbers_of(name) == [12, 3]
    assert filled("layers.*.experts", [12, 3]) == "layers.12.experts"


def by_table(runtime: str, config: Any, tensors: Any, at: Setting) -> SimulatedLoad:
    """What the simulator says that has the class from a table alone."""
    said: SimulatedLoad = SIMULATE[runtime].by_table(
        record_of(qwen3_moe(runtime)), config, tensors, at
    )
    return said


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("at", [Setting(), Setting(tp=2, rank=1), Setting(pp=2, stage=1)], ids=str)
@pytest.mark.parametrize("runtime", SIMULATE)
def test_a_table_by_hand_says_what_the_recorded_one_does(
    runtime: str, at: Setting, form: str
) -> None:
    config, tensors = folder("qwen3_moe", fp8=form == "fp8")
    if form == "int4":
        config, tensors = integers(config, tensors, ".experts.", 32, ignore=LINEARS)
    seen = SIMULATE[runtime].simulate(config, tensors, at)
    said = by_table(runtime, config, tensors, at)
    assert said.whole
    # A module of vLLM's holds some a second time.
    assert {n: one for n, one in seen.parameters.items() if n not in TWICE} == said.parameters
    assert said.unread == seen.unread
    assert replace(seen, parameters=said.parameters) == said


@pytest.mark.parametrize(("runtime", "refused"), [("vllm", True), ("sglang", False)])
def test_a_parameter_that_is_not_there(runtime: str, refused: bool) -> None:
    config, tensors = folder("qwen3_moe")
    name = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    tensors[name] = TensorType("F32", (1, 1))
    said = by_table(runtime, config, tensors, Setting())
    assert (said.refused is not None and said.refused.where == name) is refused
    assert (name in said.ignored) is not refused


def names_in(table: dict[str, Any], tensors: dict[str, TensorType]) -> RecordedNames:
    config, _ = folder("qwen3_moe")
    record, plain = record_of(table), Unquantized("BF16")
    build = RankBuild(Setting(), NoQuantization(plain), "BF16")
    made = built(record, build, Sizes(config, record.defaults), tensors)
    return RecordedNames(made)


def test_names_beside_the_usual() -> None:
    """Stacks of experts, names that are passed over, rows that the class moves, and other names."""
    table = qwen3_moe("vllm")
    at = "model.layers.*.mlp.experts"
    stack = {"stack": True, "to": f"{at}.routed_experts"}
    table["names"] += [
        {"from": f"{at}.gate_up_proj", "shard": "w13", "transposed": True, **stack},
        {"from": f"{at}.down_proj", "shard": "w2", **stack},
    ]
    table["names"][0]["rows"] = "moved"
    table["passed"] = ["tower.*", "model.layers.*.masked_bias"]
    _, tensors = folder("qwen3_moe")
    finder = names_in(table, tensors)
    up = list(
        finder.find("model.layers.1.mlp.experts.gate_up_proj", TensorType("BF16", (4, 8, 12)))
    )
    assert [one.shard for one in up[3:5]] == [(3, "w1"), (0, "w3")]
    assert {one.part for one in up} == {(6, 8)}
    down = list(finder.find("model.layers.1.mlp.experts.down_proj", TensorType("BF16", (4, 8, 12))))
    assert [one.part for one in down] == [(8, 12)] * 4
    norm = "model.layers.*.self_attn.q_norm.weight"
    table["names"].append({"from": norm, "to": norm, "parameter": True, "rows": "squeezed"})
    stored = TensorType("BF16", (1, 16))
    (held,) = names_in(table, tensors).find(norm.replace("*", "1"), stored)
    assert held.part == (16,)
    one = TensorType("BF16", (4,))
    with pytest.raises(LoadRefused, match="expected 4 experts"):
        finder.find("model.layers.1.mlp.experts.down_proj", one)
    for name in (
        "tower.0.weight", "model.layers.3.masked_bias", "mtp.layers.0.fc.weight",
        "model.layers.3.rotary_emb.inv_freq",
    ):  # fmt: skip
        assert finder.find(name, one) == ()
    with pytest.raises(LoadRefused, match="builds no parameter"):
        finder.find("model.layers.9.self_attn.q_proj.weight", one)
    for name, says in (
        ("model.layers.1.other.weight", "is not among the names"),
        ("model.layers.1.mlp.experts.4.up_proj.weight", "the config counts 4 experts"),
    ):
        with pytest.raises(NotSimulated, match=says):
            finder.find(name, one)
    query = "model.layers.1.self_attn.q_proj"
    assert [found.shard for found in finder.find(f"{query}.weight", one)] == ["q"]
    with pytest.raises(NotSimulated, match="moves rows"):
        finder.find(f"{query}.weight", TensorType("F8_E4M3", (4,)))


def test_a_tensor_that_is_keys_and_values() -> None:
    table = qwen3_moe("sglang")
    table["names"][1] |= {"shard": ["k", "v"], "rows": "twice"}
    del table["names"][2]
    _, tensors = folder("qwen3_moe")
    key = "model.layers.1.self_attn.k_proj.weight"
    found = names_in(table, tensors).find(key, TensorType("BF16", (64, 64)))
    assert [(one.name, one.shard) for one in found] == [
        ("model.layers.1.self_attn.qkv_proj.weight", part) for part in "kv"
    ]


def test_experts_in_a_form_that_a_class_refuses() -> None:
    table = qwen3_moe("vllm")
    table["refused"] = ["model.layers.*.mlp.experts.gate_up_proj"]
    _, tensors = folder("qwen3_moe")
    with pytest.raises(LoadRefused, match="has no parameter for it, and ends the load"):
        names_in(table, tensors).find(
            "model.layers.1.mlp.experts.gate_up_proj", TensorType("BF16", (4, 8, 12))
        )


@pytest.mark.parametrize("kept", [True, False])
def test_rows_moved_within_blocks_of_fp8(kept: bool) -> None:
    """A block of 128 rows keeps its scale where whole heads lie in it, and not in a head of them all."""
    table = qwen3_moe("vllm")
    table["names"][0]["rows"] = "moved in heads"
    if not kept:
        qkv = next(one for one in table["modules"] if one["kind"] == "qkv")
        qkv |= {"heads": 1, "kv_heads": 1, "head_size": "num_attention_heads * head_dim"}
    config, tensors = folder("qwen3_moe", fp8=True)
    if kept:
        assert by_table_of("vllm", table, config, tensors).refused is None
        return
    with pytest.raises(NotSimulated, match="moves rows"):
        by_table_of("vllm", table, config, tensors)


def by_table_of(runtime: str, table: dict[str, Any], config: Any, tensors: Any) -> SimulatedLoad:
    said: SimulatedLoad = SIMULATE[runtime].by_table(record_of(table), config, tensors, Setting())
    return said


@pytest.mark.parametrize("runtime", SIMULATE)
def test_experts_without_a_gate(runtime: str) -> None:
    """Their first matrix has the rows of one, and a third matrix is none of theirs."""
    table = qwen3_moe(runtime)
    experts = next(one for one in table["modules"] if one["kind"] == "experts")
    experts["gated"] = False
    table["names"] = [one for one in table["names"] if one.get("shard") != "w3"]
    config, tensors = folder("qwen3_moe")
    kept = {name: one for name, one in tensors.items() if not _of_up(name)}
    said = by_table_of(runtime, table, config, kept)
    inner, hidden = config["moe_intermediate_size"], config["hidden_size"]
    name = experts["name"].replace("*", "1") + ".w13_weight"
    assert said.parameters[name].shape == (config["num_experts"], inner, hidden)
    assert said.whole


def _of_up(name: str) -> bool:
    return ".experts." in name and "up_proj" in name


@pytest.mark.parametrize(("tp", "rows", "left"), [(1, 2880, 0.0), (4, 768, 0.125), (8, 384, 0.5)])
def test_mxfp4_is_padded(tp: int, rows: int, left: float) -> None:
    """gpt-oss-120b's 90 blocks of 32 rows as both loaders divide them; padding is no lack."""
    moe = Moe(4, 0, 2880, 2880, 1, 0, tp, rank=tp - 1)
    made = dict(Mxfp4("", "bias").experts(moe))
    weight = made["w13_weight"]
    assert weight.shape == (4, 2 * rows, 1440)
    assert weight.lacks
    assert weight.write(TensorType("U8", (4, 5760, 90, 16)), None) is None
    assert weight.unwritten == pytest.approx(left)
    assert not weight.lacks
    with pytest.raises(LoadRefused, match="of which a rank takes its share"):
        made["w2_weight"].write(TensorType("U8", (4, 2880, 45, 16)), None)


def test_mappers_one_after_another() -> None:
    inner = Renames(starts=(("b.", "c."),), ends=((".old", ".new"),))
    assert Renames(starts=(("a.", "b."),), then=inner).of("a.x.old") == "c.x.new"


def test_a_layer_of_no_recorded_kind() -> None:
    _, tensors = folder("qwen3_moe")
    kept = {name: one for name, one in tensors.items() if ".1.mlp." not in name}
    with pytest.raises(NotSimulated, match=r"model\.layers\.1 is of no kind of layer"):
        names_in(qwen3_moe("vllm"), kept)


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({}, "unquantized"), ({"fp8": True}, "fp8 in blocks of linears and experts"),
        ({"stacked": True}, "unquantized with stacks"),
    ],
)  # fmt: skip
def test_forms(how: dict[str, bool], form: str) -> None:
    assert form_of(*folder("qwen3_5_moe", **how)) == form
    made = integers(*folder("qwen3_moe"), ".experts.", 32, ignore=LINEARS)
    assert form_of(*made) == "compressed-tensors int4 by group in pack-quantized of experts"


def test_only_forms_that_were_compared_are_answered() -> None:
    record = record_of(qwen3_moe("vllm"))
    for tp in (1, 2, 8):
        check_form(record, *folder("qwen3_moe"), Setting(tp=tp))
    with pytest.raises(NotSimulated, match="not tried with fp8 in blocks"):
        check_form(record, *folder("qwen3_moe", fp8=True), Setting())
    fp8 = "fp8 in blocks of linears and experts"
    divided = replace(record, agrees={**record.agrees, fp8: (1,)})
    check_form(divided, *folder("qwen3_moe", fp8=True), Setting(tp=8))
    one = replace(record, agrees={"unquantized": (1,), fp8: (1,)})
    with pytest.raises(NotSimulated, match="not tried with"):
        check_form(one, *folder("qwen3_moe", fp8=True), Setting(tp=8))
    for setting in (Setting(tp=2), Setting(pp=2)):
        with pytest.raises(NotSimulated, match="not tried with"):
            check_form(one, *folder("qwen3_moe"), setting)
    check_form(
        replace(one, agrees={**one.agrees, STAGES: (1,)}), *folder("qwen3_moe"), Setting(pp=2)
    )


def test_a_class_and_a_version_without_tables() -> None:
    assert recorded("vllm", "../Qwen3MoeForCausalLM") is None
    assert recorded("vllm", "not_recorded") is None
    assert recorded("vllm", "Qwen3MoeForCausalLM", "0.1") is None
    config, tensors = folder("qwen3_moe")
    said = asked(
        Consumer("vllm"), Offered({**config, "architectures": ["OtherModel"]}, tensors), Setting()
    )
    assert isinstance(said, NotKnown)
    assert "not recorded" in said.why
    said = asked(Consumer("vllm", "0.1"), Offered(config, tensors), Setting())
    assert isinstance(said, NotKnown)
    assert "known" in said.why


def test_a_class_with_the_code_of_another_has_its_table(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_TABLES", tmp_path)
    versions = tmp_path / f"vllm-{RELEASES['vllm'].version}"
    versions.mkdir()
    table = {**qwen3_moe("vllm"), "agrees": {"unquantized": [1, 2]}}
    same = {"architecture": "OtherForCausalLM", "same_as": table["architecture"]}
    (versions / "OtherForCausalLM.json").write_text(json.dumps(same))
    records.reread()
    assert recorded("vllm", "OtherForCausalLM") is None
    records.reread()
    (versions / f"{table['architecture']}.json").write_text(json.dumps(table))
    found = recorded("vllm", "OtherForCausalLM")
    assert found == replace(record_of(table), architecture="OtherForCausalLM")
    records.reread()


def test_a_config_that_states_what_its_class_was_recorded_without() -> None:
    record = replace(record_of(qwen3_moe("vllm")), keys=frozenset({"hidden_size"}))
    record.sizes({"hidden_size": 64, "use_bias": False, "bias_rank": True, "head_dim": None})
    for stated in ({"qkv_bias": True}, {"bias": True}, {"head_dim": 64}):
        with pytest.raises(NotSimulated, match="its class was recorded without it"):
            record.sizes({"hidden_size": 64, **stated})


def test_a_class_that_refuses_stages_of_a_tied_head(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = {"otherwise": {"tie_word_embeddings=true": {"stages": "one"}}}
    table = record_of({**qwen3_moe("vllm"), "stages": "many", **tied})
    monkeypatch.setattr(pipeline, "recorded", lambda *_: table)
    config, _ = folder("qwen3_moe")
    assert pipeline.one_stage("vllm", {**config, "tie_word_embeddings": True})
    assert not pipeline.one_stage("vllm", {**config, "tie_word_embeddings": False})


def test_shared_experts_that_are_loaded_as_routed_ones() -> None:
    """Their linears are gone, and their matrices are those of one more expert."""
    apart = records.class_record("sglang", "Qwen3NextForCausalLM")
    record = with_shared_routed(apart)
    gone = {one.name for one in apart.modules} - {one.name for one in record.modules}
    at = "model.layers.*.mlp.shared_expert"
    assert gone == {f"{at}.gate_up_proj", f"{at}.down_proj"}
    shared = {one.source: (one.to, one.shard) for one in record.names if one.shared}
    to = "model.layers.*.mlp.experts"
    assert shared == {
        f"{at}.gate_proj": (to, "w1"), f"{at}.up_proj": (to, "w3"), f"{at}.down_proj": (to, "w2"),
    }  # fmt: skip
    config, tensors = folder("qwen3_next")
    answer = sglang.by_table(apart, config, tensors, Setting())
    assert answer.whole
    assert answer.shared_fused
    assert answer.parameters["model.layers.0.mlp.experts.w2_weight"].shape[0] == 5


def test_what_a_class_reads_and_what_a_config_must_state() -> None:
    table = qwen3_moe("sglang")
    for one in table["modules"]:
        if one["name"].endswith("o_proj"):
            one["reads"] = "build"
    config, tensors = integers(
        *folder("qwen3_moe"), ".self_attn.o_proj", 32, ignore=[r"re:.*(?<!o_proj)$"]
    )
    said = sglang.by_table(record_of(table), config, tensors, Setting())
    assert said.refused is not None
    assert "leave o_proj unquantized" in said.refused.why
    record = replace(record_of(qwen3_moe("sglang")), asks=("norm_topk_prob", "missing_key"))
    said = sglang.by_table(record, {**config, "norm_topk_prob": True}, tensors, Setting())
    assert said.refused is not None
    assert "states no missing_key" in said.refused.why


def test_a_table_under_settings_of_a_config() -> None:
    """Names, what is passed over and what is tied, each where a setting says so."""
    table = qwen3_moe("vllm")
    table["names"][-1]["when"] = {"tie_word_embeddings": False}
    table["otherwise"] = {
        "tie_word_embeddings=true": {"tied": [["model.embed_tokens.weight", "lm_head.weight"]]}
    }
    record = record_of(table)
    config, tensors = folder("qwen3_moe")
    apart = record.under(Sizes({**config, "tie_word_embeddings": False}, {}))
    assert (apart.tied, len(apart.names)) == ((), len(record.names))
    tied = {**config, "tie_word_embeddings": True}
    one = record.under(Sizes(tied, {}))
    assert len(one.names) == len(record.names) - 1
    build = RankBuild(Setting(), NoQuantization(Unquantized("BF16")), "BF16")
    built(record, build, Sizes(tied, record.defaults), tensors)
    assert build.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(NotSimulated, match="does not state tie_word_embeddings"):
        record.under(Sizes({}, {}))
    assert Sizes({"q_lora_rank": 8}, {}).has("q_lora_rank", "set")
    assert not Sizes({}, {}).has("q_lora_rank", "set")


def test_layers_that_a_list_of_the_config_tells_apart() -> None:
    """Kinds of layers with the same names; without the list nothing is known."""
    table = qwen3_moe("vllm")
    kinds: list[dict[str, Any]] = [
        {"names": [], "key": "layer_types", "value": value} for value in ("local", "full")
    ]
    table["variants"] = {"model.layers": kinds}
    config, tensors = folder("qwen3_moe")
    config["layer_types"] = ["full", "local", "full", "local"][: config["num_hidden_layers"]]
    build = RankBuild(Setting(), NoQuantization(Unquantized("BF16")), "BF16")
    record = record_of(table)
    made = built(record, build, Sizes(config, record.defaults), tensors)
    assert made.layers.kinds["model.layers"][0] == 1
    assert "model.layers.0.mlp.experts.routed_experts" in made.modules
    assert "model.layers.1.mlp.gate_up_proj" in made.modules
    del config["layer_types"]
    with pytest.raises(NotSimulated, match="is of no kind of layer"):
        built(record, build, Sizes(config, record.defaults), tensors)


def test_keys_under_other_names_and_keys_that_nobody_recorded() -> None:
    table = {**qwen3_moe("vllm"), "attribute_map": {"num_local_experts": "num_experts"}}
    table["keys"] = ["hidden_size", "num_local_experts", "head_dim"]
    record = record_of(table)
    for key in ("num_experts", "num_local_experts"):
        assert record.sizes({key: 4, "eos_token_id": 5, "head_dim": 1}).of("num_experts") == 4
    with pytest.raises(NotSimulated, match="states v_head_dim, and its class was recorded without"):
        record.sizes({"v_head_dim": 4})


def test_two_tensors_that_a_class_concatenates() -> None:
    table = qwen3_moe("sglang")
    gate = next(one for one in table["modules"] if one["name"].endswith("mlp.gate"))
    gate["parts"] = ["num_experts // 2"] * 2
    gone = [one for one in table["names"] if not one["from"].endswith("mlp.gate")]
    halves = [
        {"from": f"model.layers.*.mlp.gate.{side}", "to": gate["name"], "shard": shard}
        for shard, side in enumerate(("left", "right"))
    ]
    table["names"] = [*gone, *halves]
    _, tensors = folder("qwen3_moe")
    finder = names_in(table, tensors)
    gate_name, half = "model.layers.1.mlp.gate", TensorType("BF16", (2, 8))
    assert finder.find(f"{gate_name}.left.weight", half) == ()
    (both,) = finder.find(f"{gate_name}.right.weight", half)
    assert (both.name, both.part) == (f"{gate_name}.weight", (4, 8))
    assert both.beside == f"{gate_name}.left.weight"
    finder.find(f"{gate_name}.left.weight", half)
    with pytest.raises(LoadRefused, match="cannot be concatenated"):
        finder.find(f"{gate_name}.right.weight", TensorType("BF16", (2, 4)))


def test_what_agrees_is_what_was_loaded() -> None:
    """A form that differs at any size is none; several ranks count where some folder was loaded."""
    from loaders.agree_classes import Compared, agreed

    found = [
        Compared("a", "same", 1, (), loaded=True), Compared("a", "same", 2, (), loaded=True),
        Compared("a", "same", 8, ()), Compared("b", "refused", 1, ()), Compared("b", "refused", 2, ()),
        Compared("c", "differs", 1, ("unread",), loaded=True), Compared("c", "differs", 2, ()),
    ]  # fmt: skip
    assert agreed(found) == {"same": [1, 2], "refused": [1, 2]}


def test_a_head_that_embeddings_are_copied_to() -> None:
    config, tensors = folder("qwen3_moe")
    tensors.pop("lm_head.weight")
    table = qwen3_moe("sglang")
    assert sglang.by_table(record_of(table), config, tensors, Setting()).unwritten
    table["names"].append({"from": "model.embed_tokens", "to": "lm_head"})
    assert not sglang.by_table(record_of(table), config, tensors, Setting()).unwritten


def test_convolutions_and_parameters_under_two_names() -> None:
    table = qwen3_moe("sglang")
    conv = {
        "name": "model.layers.*.conv1d", "kind": "column", "asked": None, "inputs": "1",
        "outputs": ["1"], "shape": ["3 * head_dim", 1, 4], "parts": ["head_dim", "2 * head_dim"],
    }  # fmt: skip
    table["modules"].insert(1, conv)
    norm = "model.layers.*.input_layernorm.weight"
    table["tied"] = [[norm, "model.layers.*.other.norm"]]
    config, tensors = folder("qwen3_moe")
    record, size = record_of(table), config["head_dim"]
    build = RankBuild(Setting(tp=2, rank=1), NoQuantization(Unquantized("BF16")), "BF16")
    built(record, build, record.sizes(config), tensors)
    weight = build.parameters["model.layers.1.conv1d.weight"]
    assert weight.shape == (3 * size // 2, 1, 4)
    assert weight.write(TensorType("BF16", (3 * size, 1, 4)), None) is None
    assert build.aliases["model.layers.1.other.norm"] == "model.layers.1.input_layernorm.weight"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_config_gets_an_answer_or_none(data: st.DataObject) -> None:
    """No value of a config ends otherwise, nor takes long."""
    config, tensors = folder("qwen3_moe", fp8=data.draw(st.booleans()))
    *path, key = data.draw(st.sampled_from(places(config)))
    inner = config
    for part in path:
        inner = inner[part]
    inner[key] = data.draw(JUNK)
    runtime, tp = data.draw(st.sampled_from(sorted(SIMULATE))), data.draw(st.sampled_from([1, 2]))
    with suppress(NotSimulated):
        by_table(runtime, config, tensors, Setting(tp=tp))
