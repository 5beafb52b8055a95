"""The simulator of sglang's loader, without the loader: cells with their answers, and what must hold for
any folder. That it says what the loader says is shown by tests/loaders/test_simulator_sglang.py."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli, unjudged
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders.published import FAMILIES, published
from sampled import sampled
from simulated_folders import (
    JUNK,
    LINEARS,
    Config,
    Tensors,
    folder,
    in_any_form,
    integers,
    large,
    mixed,
    places,
)

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.advisories import advisories
from qconvert.runtimes.consumers import parse_consumer, refused_form
from qconvert.runtimes.loading import load_weights
from qconvert.runtimes.loading.setting import BLACKWELL, LoadRefused, NotSimulated, Setting
from qconvert.runtimes.serving import NO_FUSION, Offered, loads, served
from qconvert.runtimes.sglang.ignore_matching import (
    Compressed,
    SkipList,
    is_layer_excluded,
    is_layer_skipped,
)

simulate = in_any_form("sglang")


@pytest.mark.parametrize("tp", sampled([4, 2, 1], 3))
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_published_checkpoints_load_whole(family: str, fp8: bool, tp: int) -> None:
    config, tensors = folder(family, fp8=fp8)
    answer = simulate(config, tensors, Setting(tp=tp, rank=tp - 1))
    if (family, fp8, tp) == ("deepseek_v3", True, 4):  # heads of 192 rows
        assert answer.refused is not None
        assert "192 is not divisible by weight quantization block_n = 128" in answer.refused.says
        return
    assert answer.whole
    assert answer.ignored == ()
    draft = "model.layers.3." if family in ("deepseek_v3", "glm4_moe") else "mtp."
    assert all(name.startswith(draft) for name in answer.unread)


@pytest.mark.parametrize(
    ("family", "key", "saved"),
    [("qwen3_moe", "num_experts", "num_local_experts"),
     ("qwen3_vl_moe", "num_experts", "num_local_experts"),
     ("glm4_moe", "n_routed_experts", "num_local_experts"),
     ("glm4_moe", "num_nextn_predict_layers", "num_mtp_layers"),
     ("deepseek_v3", "num_nextn_predict_layers", "num_mtp_layers")],
)  # fmt: skip
def test_keys_that_a_class_of_transformers_takes_for_others(
    family: str, key: str, saved: str
) -> None:
    """What transformers 5 saves of a fine-tune, and what it reads alike, is what the runtime reads."""
    config, tensors = folder(family)
    stated = loads(config, tensors, {})
    text = config.get("text_config", config)
    text[saved] = text.pop(key)
    assert loads(config, tensors, {}) == stated
    assert stated["sglang"].sizes


@pytest.mark.parametrize(
    ("family", "key"),
    [("deepseek_v3", "moe_layer_freq"), ("deepseek_v3", "topk_method"),
     ("deepseek_v3", "scoring_func"), ("qwen3_next", "full_attention_interval"),
     ("qwen3_5", "full_attention_interval"), ("qwen3_5_moe_text", "full_attention_interval")],
)  # fmt: skip
def test_keys_that_a_class_asks_for_and_transformers_5_does_not_save(family: str, key: str) -> None:
    config, tensors = folder(family)
    del config.get("text_config", config)[key]
    refused = simulate(config, tensors).refused
    assert refused is not None
    assert refused.kind == "AttributeError"
    assert refused.says == f"has no attribute '{key}'"


def test_a_tower_gets_three_mergers_where_none_are_stated() -> None:
    """They would stay empty, so that a config without the key is not taken."""
    config, tensors = folder("qwen3_5")
    del config["vision_config"]["deepstack_visual_indexes"]
    answer = simulate(config, tensors)
    assert answer.refused is not None
    assert "vision_config.deepstack_visual_indexes" in answer.refused.why


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_their_share(family: str) -> None:
    config, tensors = folder(family)
    whole = simulate(config, tensors)
    read = sum(kind.nbytes for name, kind in tensors.items() if name not in whole.unread)
    half = simulate(config, tensors, Setting(tp=2))
    assert read <= whole.nbytes <= 1.01 * read  # routers are held in other types
    assert whole.nbytes / 2 < half.nbytes < 0.6 * whole.nbytes


def test_stages_hold_all_layers_once() -> None:
    config, tensors = folder("glm4_moe")
    stages = [simulate(config, tensors, Setting(pp=3, stage=stage)) for stage in range(3)]
    layers = [{n.split(".")[2] for n in s.parameters if ".layers." in n} for s in stages]
    assert layers == [{"0"}, {"1"}, {"2"}]
    assert all("lm_head.weight" in stage.parameters for stage in stages)  # on every stage
    told = simulate(config, tensors, Setting(pp=2, stage=0, partition=(2, 1)))
    assert {n.split(".")[2] for n in told.parameters if ".layers." in n} == {"0", "1"}


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        (Setting(pp=4), "AssertionError"),
        (Setting(pp=2, partition=(1, 3)), "ValueError"),
        (Setting(tp=3), "AssertionError"),
        (Setting(tp=2, ep=2), ""),
        (Setting(tp=8), "AssertionError"),
    ],
)
def test_sizes_that_no_folder_fits(setting: Setting, kind: str) -> None:
    """Three layers, four heads, four experts."""
    refused = simulate(*folder("glm4_moe"), setting).refused
    assert (refused.kind if refused else "") == kind


@pytest.mark.parametrize(
    ("family", "setting", "fused"),
    [
        ("glm4_moe", Setting(), True),
        ("glm4_moe", Setting(disable_shared_experts_fusion=True), False),
        ("glm4_moe", Setting(tp=2, ep=2), False),
        ("glm4_moe", Setting(a2a="deepep"), False),
        ("glm4_moe", Setting(capability=(7, 5)), False),
        ("glm4_moe", Setting(capability=BLACKWELL), False),  # the trtllm runner
        ("qwen3_next", Setting(), True),
        ("qwen3_next", Setting(a2a="mori"), False),
        ("qwen3_5_moe", Setting(), False),
        ("deepseek_v3", Setting(), False),  # 4 experts, not 256
    ],
)
def test_where_shared_experts_are_loaded_as_routed_ones(
    family: str, setting: Setting, fused: bool
) -> None:
    answer = simulate(*folder(family), setting)
    assert answer.shared_fused is fused
    assert answer.whole


def test_shared_experts_of_another_scheme_are_lost() -> None:
    packed = integers(*folder("glm4_moe"), ".experts.", 32, ignore=LINEARS)
    answer = simulate(*packed)
    assert answer.refused is None
    assert not answer.whole
    assert {name.split(".")[4] for name in answer.ignored} == {"shared_experts"}
    assert len(answer.ignored) == 6
    assert set(answer.missing) == {
        f"model.layers.{layer}.mlp.experts.{which}_weight_{what}"
        for layer in (1, 2)
        for which in ("w13", "w2")
        for what in ("packed", "scale")
    }
    assert served(Offered(*packed), Setting()).required_flag == NO_FUSION
    assert simulate(*packed, Setting(disable_shared_experts_fusion=True)).whole


def test_a_strict_class_refuses_them() -> None:
    ignore = [r"re:.*self_attn\..*", r"re:.*linear_attn\..*", r"re:.*shared_expert.*"]
    packed = integers(*folder("qwen3_next"), ".experts.", 32, ignore=ignore)
    answer = simulate(*packed)
    assert answer.refused is not None
    assert ".shared_expert." in answer.refused.where
    assert served(Offered(*packed), Setting()).required_flag == NO_FUSION


def test_an_ignore_list_without_fused_names_is_refused() -> None:
    split = [r"re:.*self_attn\.[qkvo]_proj$", r"re:.*\.mlp\.(gate|up|down)_proj$"]
    config, tensors = integers(*folder("glm4_moe"), ".experts.", 32, ignore=split)
    refused = simulate(config, tensors).refused
    assert refused is not None
    assert refused.where.endswith(("qkv_proj", "gate_up_proj"))
    # A class that maps fused names to their parts needs none.
    config, tensors = integers(*folder("qwen3_moe"), ".experts.", 32, ignore=split)
    assert simulate(config, tensors).whole


@pytest.mark.parametrize(("tp", "empty", "misread"), [(1, 0, 0), (4, 0, 0), (8, 2, 0), (3, 0, 0)])
def test_groups_of_an_expert_among_ranks(tp: int, empty: int, misread: int) -> None:
    """512 columns in groups of 128."""
    config, tensors = integers(*folder("qwen3_moe"), ".experts.", 128, ignore=LINEARS)
    config = {**config, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    tensors["model.layers.0.self_attn.q_norm.weight"] = TensorType("BF16", (64,))
    answer = simulate(config, tensors, Setting(tp=tp))
    if tp in (3, 8):
        # More ranks than the 4 experts, or heads that they cannot divide.
        assert answer.refused is not None
        return
    assert (len(answer.empty), len(answer.misread)) == (empty, misread)


def test_blocks_that_ranks_cut_are_refused() -> None:
    config, tensors = folder("qwen3_moe", fp8=True, experts=8)
    config = {**config, "num_attention_heads": 8}
    answer = simulate(config, tensors, Setting(tp=8))
    assert answer.refused is not None
    assert answer.refused.kind == "ValueError"


@pytest.mark.parametrize(
    ("family", "groups", "wrong"),
    [("qwen3_5_moe_text", 1, 0), ("qwen3_5_moe_text", 4, 6), ("qwen3_5_moe_text", None, 0),
     ("qwen3_next", 4, 0), ("qwen3_next", 1, 6)],
)  # fmt: skip
def test_stated_order_of_fused_rows(family: str, groups: int | None, wrong: int) -> None:
    config, tensors = folder("qwen3_next")
    if family != "qwen3_next":
        config, _ = folder(family)
    answer = simulate(config, tensors, groups=groups)
    assert answer.refused is None
    assert len(answer.misread) == wrong


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "not recorded"),
        ({}, "not recorded"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
        ({"hidden_size": "256"}, "hidden_size"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
            "no NVFP4",
        ),
    ],
)
def test_what_it_has_no_rule_for_gets_no_answer(config: Config, why: str) -> None:
    known, tensors = folder("qwen3_moe")
    with pytest.raises(NotSimulated, match=why):
        simulate({**known, **config} if config else {}, tensors)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_moe"])
def test_drafts_load_whole(family: str) -> None:
    """The layer behind the model's, by a class of its own; embeddings and head are the model's."""
    config, tensors = folder(family)
    answer = simulate(config, tensors, Setting(tp=2, rank=1), draft=True)
    assert answer.whole
    assert answer.ignored == ()
    layer = "model.layers.3." if family in ("deepseek_v3", "glm4_moe") else "mtp."
    left = {name.removeprefix(layer) for name in answer.unread if name.startswith(layer)}
    assert left <= {"embed_tokens.weight", "shared_head.head.weight"}
    read = sum(tensors[n].nbytes for n in tensors if n.startswith(layer)) - sum(
        tensors[layer + name].nbytes for name in left
    )
    assert read / 2 < answer.nbytes < read


def test_a_draft_in_stages_has_no_answer() -> None:
    with pytest.raises(NotSimulated, match="stages"):
        simulate(*folder("glm4_moe"), Setting(pp=2), draft=True)
    with pytest.raises(NotSimulated, match="Qwen3MoeForCausalLM"):
        simulate(*folder("qwen3_moe"), draft=True)


def test_a_draft_of_several_layers_is_refused() -> None:
    config, tensors = folder("glm4_moe")
    answer = simulate({**config, "num_nextn_predict_layers": 2}, tensors, draft=True)
    assert answer.refused is not None
    assert "Only 1 nextn layer is supported" in answer.refused.says


def test_parts_of_a_fused_module_with_two_entries() -> None:
    config, tensors = mixed(*folder("qwen3_5_moe_text", fp8=True))
    layers = config["quantization_config"]["quantized_layers"]
    layers["model.layers.3.self_attn.k_proj"]["quant_algo"] = "NVFP4"
    answer = simulate(config, tensors)
    assert answer.refused is not None
    assert answer.refused.says == "Mixed quant_algo within fused layer"


# --- Names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "name", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_up_proj", False),
        ("model.layers.0.mlp", "model.layers.0.mlp.down_proj", False),  # a prefix is no match
        (r"re:.*\.mlp\.gate", "model.layers.0.mlp.gate_up_proj", True),  # re.match has no end
        (r"re:mlp", "model.layers.0.mlp.gate", False),  # nor a search
    ],
)
def test_ignore_of_compressed_tensors(entry: str, name: str, ignored: bool) -> None:
    assert Compressed([entry], [], {}).ignored(name) is ignored


def test_parts_of_a_fused_module_must_agree() -> None:
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    with pytest.raises(LoadRefused, match="names some"):
        Compressed(["self_attn.q_proj"], [], fused).ignored("model.layers.0.self_attn.qkv_proj")
    with pytest.raises(LoadRefused, match="names some"):
        is_layer_skipped("model.layers.0.self_attn.qkv_proj", SkipList(["self_attn.q_proj"]), {})


def test_a_class_that_maps_no_names_is_refused() -> None:
    """As sglang's Solar: pairs of a name and a place."""
    fused: Any = {"qkv_proj": [["q_proj", "q"], ["k_proj", "k"], ["v_proj", "v"]]}
    name = "model.layers.0.self_attn.qkv_proj"
    rules = Compressed(["lm_head"], ["re:none"], fused)
    for ask in (rules.ignored, lambda one: rules.target(one, "QKVParallelLinear")):
        with pytest.raises(LoadRefused, match="pairs of a name and a place"):
            ask(name)
    with pytest.raises(LoadRefused, match="pairs of a name and a place"):
        is_layer_skipped(name, SkipList(["lm_head"]), fused)


def test_targets_by_name_then_class_then_parts() -> None:
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    rules = Compressed([], ["Linear", r"re:.*q_proj", r"re:.*o_proj$"], fused)
    assert rules.target("a.o_proj", "RowParallelLinear") == r"re:.*o_proj$"
    assert rules.target("a.gate_up_proj", "MergedColumnParallelLinear") == "Linear"
    few = Compressed([], [r"re:.*q_proj"], fused)
    with pytest.raises(LoadRefused, match="neither"):
        few.target("a.b.down_proj", "RowParallelLinear")


def test_modelopts_list_takes_globs_and_parts() -> None:
    name = "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa"
    assert is_layer_excluded(name, ["model.layers.0.self_attn*"])
    assert is_layer_excluded(name, ["model.layers.0.self_attn.kv_a_proj_with_mqa"])
    # Though the runtime's comment says so: `q_a_proj` is no part of `fused_qkv_a_proj_with_mqa`.
    assert not is_layer_excluded(name, ["model.layers.0.self_attn.q_a_proj"])
    assert is_layer_excluded("mtp.fc", ["mtp*"])
    assert not is_layer_excluded(name, ["model.layers.1.self_attn*"])


# --- Properties ----------------------------------------------------------------------------------

_SOME = {
    family: folder(family) for family in ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
}


@settings(max_examples=15)
@given(st.sampled_from(sorted(_SOME)), st.data())
def test_every_tensor_that_is_read_counts(family: str, data: st.DataObject) -> None:
    """Without any one of them, a parameter is not written whole."""
    config, tensors = _SOME[family]
    draft = family != "qwen3_moe" and data.draw(st.booleans())
    before = simulate(config, tensors, draft=draft)
    name = data.draw(st.sampled_from([n for n in tensors if n not in before.unread]))
    left = {n: kind for n, kind in tensors.items() if n != name}
    after = simulate(config, left, draft=draft)
    assert not after.whole
    assert after.missing


@settings(max_examples=10)
@given(st.sampled_from(sorted(_SOME)), st.randoms(use_true_random=False))
def test_the_order_of_tensors_does_not_matter(family: str, random: Any) -> None:
    config, tensors = _SOME[family]
    names = list(tensors)
    random.shuffle(names)
    one, other = simulate(config, tensors), simulate(config, {n: tensors[n] for n in names})
    assert set(one.unread) == set(other.unread)
    assert one.unwritten == other.unwritten
    assert one.parameters == other.parameters


@settings(max_examples=40)
@given(st.sampled_from(sorted(_SOME)), st.data())
def test_any_other_shape_is_refused_or_said(family: str, data: st.DataObject) -> None:
    config, tensors = _SOME[family]
    before = simulate(config, tensors)
    name = data.draw(st.sampled_from([n for n in tensors if n not in before.unread]))
    kind = tensors[name]
    axis = data.draw(st.integers(0, len(kind.shape) - 1))
    size = data.draw(st.integers(2, 700).filter(lambda n: n != kind.shape[axis]))
    shape = (*kind.shape[:axis], size, *kind.shape[axis + 1 :])
    after = simulate(config, {**tensors, name: TensorType(kind.dtype, shape)}, Setting(tp=1))
    assert after.refused is not None or name in after.misread or after.missing


@settings(max_examples=40)
@given(st.sampled_from(sorted(_SOME)), st.data())
def test_any_type_gets_an_answer(family: str, data: st.DataObject) -> None:
    config, tensors = _SOME[family]
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 4, 256, 512]), max_size=4)))
    dtype = data.draw(st.sampled_from(["BF16", "F8_E4M3", "I32", "F32", "U8"]))
    other = data.draw(
        st.sampled_from(["{}", "{}.bias", "{}_scale", "x.{}", "{}.experts.99999.up_proj.x"])
    )
    changed = {**tensors, other.format(name): TensorType(dtype, shape)}
    draft = family != "qwen3_moe" and data.draw(st.booleans())
    setting = Setting(tp=data.draw(st.sampled_from([1, 2])))
    try:
        answer = simulate(config, changed, setting, draft=draft)
    except NotSimulated as reason:  # of a name that nobody recorded, or of codes in moved rows
        said = str(reason)
        assert other.format(name) in said or "its class moves rows" in said
    else:
        assert answer.refused is not None or answer.parameters


_CONFIGS = [
    folder("glm4_moe", fp8=True),
    integers(*folder("glm4_moe"), ".experts.", 32, ignore=LINEARS),
    folder("qwen3_5_moe"),
    folder("deepseek_v3"),
    folder("qwen3_next"),
    mixed(*folder("qwen3_5_moe_text", fp8=True)),
]


@settings(max_examples=60)
@given(st.sampled_from(_CONFIGS), st.data())
def test_any_config_gets_an_answer_or_none(
    found: tuple[Config, Tensors], data: st.DataObject
) -> None:
    config, tensors = json.loads(json.dumps(found[0])), found[1]
    *path, key = data.draw(st.sampled_from(places(config)))
    inner = config
    for part in path:
        inner = inner[part]
    inner[key] = data.draw(JUNK)
    setting = Setting(tp=data.draw(st.sampled_from([1, 2])))
    with suppress(NotSimulated):
        simulate(config, tensors, setting, draft=data.draw(st.booleans()))


# --- 95,000 tensors, and the command line --------------------------------------------------------


@pytest.mark.big
def test_a_model_of_ninety_thousand_tensors() -> None:
    config, tensors = large()
    assert len(tensors) > 90_000
    answer = simulate(config, tensors, Setting(tp=2, rank=1))
    assert answer.whole
    assert answer.shared_fused
    assert answer.unread == ()


def test_it_answers_without_torch() -> None:
    code = (
        "import sys; import qconvert.runtimes.serving, qconvert.validators.headers.for_runtime; "
        "print([m for m in ('torch', 'numpy', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def validated(where: Path, *options: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    done = run_cli("validate", where, *options, "--json")
    report = json.loads(done.out)
    return done.code, report["findings"], report


def test_validate_for_a_runtime(tmp_path: Path) -> None:
    where = published("glm4_moe", fp8=True).write(tmp_path / "glm")
    code, found, report = validated(where, "--for", "sglang==0.5.23", "--tp", "2")
    assert (code, found) == (0, [])
    assert any("H200 (capability 9.0), no other options" in text for text in report["read"])
    assert any("sglang 0.5.23 loads the folder whole" in text for text in report["proved"])


@pytest.mark.parametrize(
    ("rule", "family", "tp"),
    [("QC130", "qwen3_moe", "8"), ("QC131", "qwen3_moe", "1"), ("QC132", "qwen3_moe", "1"),
     ("QC133", "qwen3_5_moe_text", "1")],
)  # fmt: skip
def test_each_rule(rule: str, family: str, tp: str, tmp_path: Path) -> None:
    model = published(family)
    if rule == "QC131":
        del model.tensors["model.norm.weight"]
    if rule == "QC132":
        model.tensors["model.layers.0.other.weight"] = model.tensors["model.norm.weight"]
    where = model.write(tmp_path / "broken")
    if rule == "QC133":
        where = tmp_path / "interleaved"
        unjudged("passes: [fuse: {groups: 4}]", tmp_path / "broken", where)
    code, found, _ = validated(where, "--for", "sglang==0.5.23", "--tp", tp)
    assert code == 3
    assert rule in {finding["rule"] for finding in found}


def test_a_draft_that_is_not_whole_is_a_warning(tmp_path: Path) -> None:
    """The model is served without it, too."""
    model = published("glm4_moe")
    where = model.write(tmp_path / "glm")
    _, found, report = validated(where, "--for", "sglang==0.5.23", "--tp", "2")
    assert found == []
    assert any("loads the folder's draft model" in text for text in report["proved"])
    del model.tensors["model.layers.3.eh_proj.weight"]
    where = model.write(tmp_path / "without")
    _, found, report = validated(where, "--for", "sglang==0.5.23", "--tp", "2")
    (one,) = [finding for finding in found if finding["rule"] == "QC131"]
    assert one["severity"] == "warning"
    assert one["message"].startswith("draft, rank 0 of 2: 1 parameter")
    assert not any("draft" in text for text in report["proved"])
    headers = {n: TensorType(t.dtype, t.shape) for n, t in model.tensors.items()}
    said = loads(model.config, headers, {})["sglang"]
    assert said.draft.startswith("does not load its draft at tp 1: model.eh_proj.weight")
    assert said.least == (1, "")
    assert said.lines()[-1].endswith(said.draft)


def test_a_version_known_to_serve_it_wrong(tmp_path: Path) -> None:
    config, _ = folder("qwen3_5_moe_text")
    where = published("qwen3_5_moe_text").write(tmp_path / "qwen")
    _, found, _ = validated(where, "--for", "sglang==0.5.10.dev1")
    assert [finding["rule"] for finding in found] == ["QC134"]
    assert advisories(parse_consumer("sglang==0.5.23"), config) == ()
    assert advisories(parse_consumer("vllm==0.20"), config) == ()


@pytest.mark.parametrize(
    ("asked", "of_it"), [("vllm", False), ("vllm==0.32.0", True), ("vllm==0.33.0", None)]
)
def test_an_error_of_other_versions_is_no_finding(
    asked: str, of_it: bool | None, tmp_path: Path
) -> None:
    """And hides no answer to what was asked."""
    source = published("qwen3_moe").write(tmp_path / "source")
    words = ("--dialect", "compressed-tensors", "--jobs", "1")
    assert run_cli("nvfp4", source, tmp_path / "out", *words).code == 0
    _, found, report = validated(tmp_path / "out", "--for", asked)
    assert [finding["rule"] for finding in found] == ["QC134"] * (of_it is True)
    older = [text for text in report["read"] if "versions before 0.33" in text]
    assert [text.endswith("; 0.33.0 is none of them") for text in older] == [True] * (
        of_it is False
    )
    whole = [text for text in report["proved"] if "loads the folder whole" in text]
    assert len(whole) == 1


def test_nvfp4_of_a_dense_model_is_served_right_and_read_by_transformers() -> None:
    """Known errors are about experts."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    block = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    config = {"quantization_config": block}
    sparse = {**config, "num_experts": 8}
    of_vllm = parse_consumer("vllm==0.32.0")
    assert [one.before for one in advisories(of_vllm, sparse)] == ["0.33"]
    assert advisories(of_vllm, config) == ()
    assert refused_form("transformers", sparse, {"experts": 8})
    assert not refused_form("transformers", config, {"experts": 0})
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert refused_form("transformers", gptq, {"experts": 8})
    assert not refused_form("transformers", gptq, {})
    modelopt = {"quantization_config": {"quant_method": "modelopt"}}
    assert refused_form("transformers", modelopt, {})


@pytest.mark.parametrize(
    ("block", "concerned"),
    [
        ({"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, True),
        ({"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}, False),
        ({"config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}}, False),
        ({"quant_method": "gptq", "bits": 4}, True),
        ({"quant_method": "awq", "w_bit": 4}, True),
        ({"quant_method": "fp8"}, False),
    ],
)
def test_int4_experts_are_not_for_int8_inputs_of_marlin(
    block: dict[str, Any], concerned: bool
) -> None:
    for version in ("", "==0.33.0"):
        for more in ({"num_experts": 8}, {"text_config": {"n_routed_experts": 8}}):
            config = {"quantization_config": block, **more}
            found = advisories(parse_consumer(f"vllm{version}"), config)
            settings = [one.setting for one in found if one.setting]
            assert settings == ["VLLM_MARLIN_INPUT_DTYPE=int8"] * concerned
            assert advisories(parse_consumer("sglang"), config) == ()
        dense = advisories(parse_consumer(f"vllm{version}"), {"quantization_config": block})
        assert not any(one.setting for one in dense)


def test_a_setting_that_serves_it_wrong_is_told_of(tmp_path: Path) -> None:
    """Not as a warning: who does not set it is served right."""
    source = published("qwen3_moe").write(tmp_path / "source")
    assert run_cli("w4a16", source, tmp_path / "out", "--rtn", "--jobs", "1").code == 0
    _, found, report = validated(tmp_path / "out", "--for", "vllm==0.33.0")
    assert "QC134" not in {finding["rule"] for finding in found}
    assert any(
        "that VLLM_MARLIN_INPUT_DTYPE=int8 is not set" in one for one in report["not_checked"]
    )


def test_sizes_without_a_runtime_are_a_mistake(tmp_path: Path) -> None:
    where = published("qwen3_moe").write(tmp_path / "qwen")
    assert run_cli("validate", where, "--tp", "2").code == 2
    assert run_cli("validate", where, "--for", "transformers").code == 2


def test_a_runtime_that_is_not_simulated_is_said(tmp_path: Path) -> None:
    where = published("qwen3_moe").write(tmp_path / "qwen")
    done = run_cli("validate", where, "--for", "transformers")
    assert done.code == 2
    assert "'transformers' is not one of sglang, vllm" in done.err


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_experts_are_offered_together_as_they_are_one_by_one(
    tp: int, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one lacks a tensor, one has another type, and one is not counted by the config."""
    config, tensors = folder("deepseek_v3", fp8=True)
    of_experts = [name for name in tensors if ".experts.3." in name and name.endswith("weight")]
    gone, other, *_ = of_experts
    del tensors[gone]
    tensors[other] = TensorType("F32", tensors[other].shape)
    tensors[other.replace(".experts.3.", ".experts.999.")] = tensors[other]
    setting = Setting(tp=tp, ep=ep, rank=tp - 1)
    together = simulate(config, tensors, setting)
    monkeypatch.setattr(load_weights, "_others", lambda *given: None)
    assert simulate(config, tensors, setting) == together
    assert together.refused is None
    assert together.unwritten


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe_text", "deepseek_v3"])
def test_a_head_beside_tied_embeddings(family: str) -> None:
    """One class writes it into the embeddings, others pass over it, whose last stage has a head of its
    own that no tensor comes to."""
    config, tensors = folder(family)
    for values in (config, config.get("text_config", {})):
        values["tie_word_embeddings"] = True
    answer = simulate(config, tensors, Setting())
    assert answer.whole
    assert ("lm_head.weight" in answer.unread) == (family != "qwen3_5")
    says = "embeddings of another name" if family == "qwen3_5" else "tied embeddings in pipeline"
    with pytest.raises(NotSimulated, match=says):
        simulate(config, tensors, Setting(pp=2, stage=1))


def test_names_that_a_class_was_not_offered() -> None:
    """A bias beside a linear is passed over, one of a module that has none was not tried."""
    config, tensors = folder("qwen3_moe")
    norm = "model.layers.0.input_layernorm.weight"
    for added, known in (("other.bias", True), ("mlp.bias", False)):
        more = tensors | {norm.replace("input_layernorm.weight", added): tensors[norm]}
        if known:
            assert simulate(config, more, Setting()).refused is None
            continue
        with pytest.raises(NotSimulated, match=r"mlp\.bias: a bias of a module that has none"):
            simulate(config, more, Setting())
