"""The families know every name of the published checkpoints, and miss what is missing."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import headers
import pytest
from checkpoints import read_tensors

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.family import Family, Role, RoleIndex, families, role_index
from qconvert.core.names import parse
from qconvert.layouts.derived.find import family_for
from qconvert.passes.experts import Stack, Unstack
from qconvert.plan.plan import Plan, run_passes

FAMILY_OF = {
    "deepseek-v3": "deepseek_v3", "glm-4.5-air": "glm4_moe", "kimi-k2-thinking": "kimi_k2",
    "qwen3-30b-a3b-fp8": "qwen3_moe", "qwen3-next-80b-a3b": "qwen3_next",
    "qwen3-next-80b-a3b-fp8": "qwen3_next", "qwen3-vl-30b-a3b": "qwen3_vl_moe",
    "qwen3.5-0.8b": "qwen3_5", "qwen3.5-27b-fp8": "qwen3_5", "qwen3.5-35b-a3b": "qwen3_5",
    "qwen3.5-35b-a3b-fp8": "qwen3_5",
}  # fmt: skip
# Tensors of the published files, and their elements. Of GLM-4.5-Air and Qwen3-VL the elements alone
# are published, and Kimi-K2-Thinking's are those of Kimi-K2.5 without its tower and projector.
PUBLISHED = {
    "deepseek-v3": (91_991, 684_531_386_000),
    "glm-4.5-air": (18_329, 110_468_824_832),
    "kimi-k2-thinking": (208_550 - 335, 170_738_182_128 - 471_143_920),
    "qwen3-30b-a3b-fp8": (37_491, 30_533_947_392),
    "qwen3-next-80b-a3b": (75_944, 81_324_862_720),
    "qwen3-vl-30b-a3b": (882, 31_070_754_032),
    "qwen3.5-0.8b": (488, 873_438_784),
    "qwen3.5-35b-a3b": (1_811, 35_951_822_704),
}
EXPERTS = 3
MTP_TENSORS = {  # of a model that is not listed: none
    "deepseek-v3": 14 + 2 * 3 * (EXPERTS + 1) + 2 + 6,
    "glm-4.5-air": 9 + 3 * (EXPERTS + 1) + 2 + 6,
    "kimi-k2-thinking": 0,
    "qwen3-30b-a3b-fp8": 0,
    "qwen3-next-80b-a3b": 17 + 3 * EXPERTS,
    "qwen3-next-80b-a3b-fp8": 17 + 7 + 2 * 3 * EXPERTS,
    "qwen3-vl-30b-a3b": 0,
    "qwen3.5-0.8b": 15,
    "qwen3.5-27b-fp8": 15 + 7,
    "qwen3.5-35b-a3b": 17 + 3 * EXPERTS,
    "qwen3.5-35b-a3b-fp8": 17 + 7 + 2 * 3 * EXPERTS,
}
every_model = pytest.mark.parametrize("model", headers.names())


def _family(name: str) -> Family:
    return next(family for family in families() if family.name == name)


@cache
def _role_index(model: str) -> RoleIndex:
    """Of the model with EXPERTS experts: one more costs time and shows nothing new."""
    found = headers.few(model, EXPERTS)
    return role_index(family_for(found.config, ()), found.config, found.tensors)


def _by_role(taken: RoleIndex) -> dict[tuple[Role, str], list[str]]:
    """Names by role and parameter, in checkpoint order."""
    grouped: dict[tuple[Role, str], list[str]] = {}
    for name, place in taken.places.items():
        grouped.setdefault((place.role, place.parameter), []).append(name)
    return grouped


def test_discovery_finds_the_families() -> None:
    found = {family.name: family.model_types for family in families()}
    assert (
        found.items()
        >= {
            "deepseek_v3": ("deepseek_v3", "deepseek_v32"),
            "deepseek_v4": ("deepseek_v4",),
            "glm4_moe": ("glm4_moe",),
            "kimi_k2": ("kimi_k2", "kimi_k25"),
            "qwen3_5": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
            "qwen3_moe": ("qwen3_moe",),
            "qwen3_next": ("qwen3_next",),
            "qwen3_vl_moe": ("qwen3_vl_moe",),
        }.items()
    )


def test_every_header_set_is_tested() -> None:
    """A model that is not listed is of the family that answers to its model_type."""
    assert set(headers.names()) >= set(FAMILY_OF)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_role_names_are_unique(family: Family) -> None:
    twice = [name for name, times in Counter(r.name for r in family.roles).items() if times > 1]
    assert not twice


@pytest.mark.parametrize("model", sorted(PUBLISHED))
def test_header_sets_add_up_to_what_was_published(model: str) -> None:
    tensors = headers.load(model).tensors
    assert (len(tensors), sum(t.numel for t in tensors.values())) == PUBLISHED[model]


@every_model
def test_every_name_has_one_role(model: str) -> None:
    taken = _role_index(model)
    stated = headers.load(model).config["model_type"]
    assert (
        taken.family.name == FAMILY_OF[model]
        if model in FAMILY_OF
        else stated in (taken.family.model_types)
    )
    assert taken.unknown == ()
    assert list(taken.places) == list(headers.few(model, EXPERTS).tensors)
    for name in taken.places:
        roles, layer, _, _ = taken.family.candidates(name)
        groups = taken.dims.groups
        fitting = [r for r in roles if not r.layers or layer in groups.get(r.layers, ())]
        assert len(fitting) == 1, name


@every_model
def test_nothing_is_missing(model: str) -> None:
    assert _role_index(model).absent() == []


@every_model
@pytest.mark.parametrize("several", [True, False], ids=["of several", "of one"])
def test_a_lost_tensor_is_missed(model: str, several: bool) -> None:
    """Lose one tensor of every role that has several, or the only one of those that have one, of which
    nothing is left to take the name from: each role misses its own and no other."""
    found, grouped = headers.few(model, EXPERTS), _by_role(_role_index(model))
    lost = {
        key: names[len(names) // 2] for key, names in grouped.items() if (len(names) > 1) == several
    }
    left = found.tensors.keys() - set(lost.values())
    taken = role_index(_role_index(model).family, found.config, sorted(left))
    assert {key: taken.missing(*key) for key in lost} == {key: [n] for key, n in lost.items()}


def test_deepseek_v3_counts() -> None:
    taken = _role_index("deepseek-v3")
    weights = Counter(p.role.name for p in taken.places.values() if p.parameter == "weight")
    scales = Counter(
        p.role.name for p in taken.places.values() if p.parameter == "weight_scale_inv"
    )
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert weights[f"experts.{name}"] == scales[f"experts.{name}"] == 58 * EXPERTS
        assert weights[f"mtp.experts.{name}"] == scales[f"mtp.experts.{name}"] == EXPERTS
        assert weights[f"mlp.{name}"] == 3
        assert weights[f"shared_experts.{name}"] == 58
    assert weights["attn.q_a_proj"] == 61
    assert weights["mtp.attn.q_a_proj"] == weights["mtp.eh_proj"] == 1
    assert scales["mtp.eh_proj"] == 0


@every_model
def test_draft_tensors(model: str) -> None:
    taken = _role_index(model)
    draft = [name for name in taken.places if taken.family.is_mtp(name, taken.dims)]
    assert len(draft) == MTP_TENSORS.get(model, 0)
    assert draft == [n for n, place in taken.places.items() if place.role.name.startswith("mtp.")]


def test_dims() -> None:
    deepseek = _role_index("deepseek-v3").dims
    assert (deepseek.num_layers, deepseek.num_experts, deepseek.mtp_layers) == (61, EXPERTS, 1)
    assert deepseek.groups["moe"] == tuple(range(3, 61))
    assert deepseek.gdn is None
    dense = _role_index("qwen3.5-27b-fp8").dims
    assert (dense.num_layers, dense.num_experts, dense.hidden_size) == (64, 0, 5120)
    assert dense.gdn == (16, 48, 128, 128)
    assert dense.groups["full_attention"] == tuple(range(3, 64, 4))
    assert not dense.tied
    assert _role_index("qwen3.5-0.8b").dims.tied
    assert _role_index("qwen3-next-80b-a3b").dims.mtp_layers == 1


@pytest.mark.parametrize("silent", ["layer_types", "full_attention_interval"])
@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "qwen3.5-35b-a3b"])
def test_either_way_of_stating_the_full_attention_layers_will_do(model: str, silent: str) -> None:
    """transformers 4 wrote an interval, transformers 5 writes the kinds of all layers."""
    config = headers.few(model, EXPERTS).config
    text = dict(config.get("text_config", config))
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    text["layer_types"] = kinds * (text["num_hidden_layers"] // 4)
    del text[silent]
    restated = {**config, "text_config": text} if "text_config" in config else text
    assert _role_index(model).family.dims(restated) == _role_index(model).dims


def test_dense_layers_of_a_moe_model() -> None:
    config = {"num_hidden_layers": 6, "num_experts": 8, "decoder_sparse_step": 2}
    groups = _family("qwen3_moe").dims({**config, "mlp_only_layers": [3]}).groups
    assert (groups["moe"], groups["dense"]) == ((1, 5), (0, 2, 3, 4))
    config = {"num_hidden_layers": 5, "n_routed_experts": 8, "moe_layer_freq": 2}
    groups = _family("deepseek_v3").dims({**config, "first_k_dense_replace": 1}).groups
    assert (groups["moe"], groups["dense"]) == ((2, 4), (0, 1, 3))


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        ("qwen3.5-35b-a3b", "model.language_model.layers.4"),
        ("qwen3-next-80b-a3b", "model.layers.4"),
    ],
)
def test_both_forms_of_linear_attention_have_roles(model: str, layer: str) -> None:
    taken = _role_index(model)
    for name in ("qkvz", "ba", "qkv", "z", "b", "a"):
        place = taken.family.place(f"{layer}.linear_attn.in_proj_{name}.weight", taken.dims)
        assert place is not None
        assert (place.role.name, place.layer) == (f"gdn.in_proj_{name}", 4)


def test_scales_of_stacked_experts_have_roles() -> None:
    taken = _role_index("qwen3.5-35b-a3b")
    name = "model.language_model.layers.7.mlp.experts.gate_up_proj_scale_inv"
    place = taken.family.place(name, taken.dims)
    assert place is not None
    assert (place.role.name, place.layer) == ("stacked_experts.gate_up_proj", 7)


def test_a_lost_scale_of_stacked_experts_is_missed() -> None:
    config, taken = headers.few("qwen3.5-35b-a3b", EXPERTS).config, _role_index("qwen3.5-35b-a3b")
    stacked = [n for n, p in taken.places.items() if p.role.name == "stacked_experts.down_proj"]
    scales = [f"{name}_scale_inv" for name in stacked]
    scaled = role_index(taken.family, config, [*taken.places, *scales[:-1]])
    role = taken.places[stacked[0]].role
    assert scaled.missing(role, "weight_scale_inv") == scales[-1:]


def test_layers_beyond_the_config_have_no_role() -> None:
    taken = _role_index("deepseek-v3")
    for layer in ("62", "1000"):
        assert taken.family.place(f"model.layers.{layer}.mlp.gate.weight", taken.dims) is None
    assert taken.family.place("model.layers.0.mlp.gate.weight", taken.dims) is None


def test_int4_experts_of_kimi_k2_thinking() -> None:
    taken = _role_index("kimi-k2-thinking")
    for name in ("gate_proj", "up_proj", "down_proj"):
        found = taken.present[f"experts.{name}"]
        assert sorted(found) == ["weight_packed", "weight_scale", "weight_shape"]
        assert {len(pairs) for pairs in found.values()} == {60 * EXPERTS}


def test_kimi_k25_is_kimi_k2_under_another_prefix() -> None:
    """With the tower and the projector of the published files; two layers and experts will do."""
    text = headers.load("kimi-k2-thinking").config | {"num_hidden_layers": 2, "n_routed_experts": 2}
    vision = {"vt_num_hidden_layers": 2}
    config = {"model_type": "kimi_k25", "text_config": text, "vision_config": vision}
    small = [
        n for n in headers.load("kimi-k2-thinking").tensors if _is_within(n, layers=2, experts=2)
    ]
    tower = [
        f"vision_tower.encoder.blocks.{block}.{name}"
        for block in range(2)
        for name in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
    ]
    tower += ["vision_tower.encoder.final_layernorm", "vision_tower.patch_embed.proj"]
    tower += ["mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"]
    names = [f"language_model.{name}" for name in small]
    names += [f"{name}.{parameter}" for name in tower for parameter in ("weight", "bias")]
    names += ["vision_tower.patch_embed.pos_emb.weight"]
    taken = role_index(family_for(config, ()), config, names)
    assert (taken.family.name, taken.unknown, taken.absent()) == ("kimi_k2", (), [])
    assert sum(p.role.name.startswith("vision.") for p in taken.places.values()) == 2 * 12 + 11
    for lost in (
        "language_model.lm_head.weight",
        "language_model.model.layers.1.mlp.experts.1.up_proj.weight_scale",
        "vision_tower.encoder.blocks.1.wqkv.bias",
        "mm_projector.proj.2.weight",
    ):
        assert role_index(taken.family, config, set(names) - {lost}).absent() == [lost]


def _is_within(name: str, layers: int, experts: int) -> bool:
    found = parse(name)
    return (found.layer or 0) < layers and (found.expert or 0) < experts


def test_glm_norms_queries_and_keys_where_the_config_says_so() -> None:
    config = headers.load("glm-4.5-air").config
    name = "model.layers.{}.self_attn.q_norm.weight"
    for said, roles in ((False, [None, None]), (True, ["attn.q_norm", "mtp.attn.q_norm"])):
        dims = _family("glm4_moe").dims(config | {"use_qk_norm": said})
        places = [_family("glm4_moe").place(name.format(layer), dims) for layer in (45, 46)]
        assert [place and place.role.name for place in places] == roles


@pytest.mark.parametrize("step", [Unstack(), Unstack(optional=True), Stack()])
def test_experts_stacked_by_columns_are_left_alone(step: Unstack | Stack, tmp_path: Path) -> None:
    headers.write_sparse(headers.load("qwen3-vl-30b-a3b"), tmp_path)
    plan = Plan.identity(Checkpoint.open(tmp_path))
    with pytest.raises(PlanError, match=r"qwen3_vl_moe checkpoints .* \[E, H, 2I\] .*columns"):
        run_passes(plan, (step,))


# Sizes of models small enough to be made: some layers of each kind, some experts.
_LAYERS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {"shared_expert_intermediate_size": 16}
_GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_GDN |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DENSE = _LAYERS | _HEADS | _GDN
_MOE = _DENSE | _EXPERTS | _SHARED
_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
_VISION |= {"out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 4}
_MLA = {
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_DEEPSEEK = _LAYERS | _MLA | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2}
_DEEPSEEK |= {"moe_intermediate_size": 16, "topk_group": 1, "first_k_dense_replace": 2}
_GLM = _LAYERS | _HEADS | {"n_routed_experts": 8, "num_experts_per_tok": 2}
_GLM |= {"moe_intermediate_size": 16, "first_k_dense_replace": 2}
TINY: list[tuple[str, str, dict[str, Any], str]] = [
    ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK, "deepseek_v3"),
    ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK | {"q_lora_rank": None}, "deepseek_v3"),
    ("DeepseekV32ForCausalLM", "DeepseekV32Config",
     _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 8}, "deepseek_v3"),
    ("Glm4MoeForCausalLM", "Glm4MoeConfig", _GLM | {"attention_bias": True}, "glm4_moe"),
    ("Glm4MoeForCausalLM", "Glm4MoeConfig", _GLM | {"use_qk_norm": True}, "glm4_moe"),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig",
     _LAYERS | _HEADS | _EXPERTS | {"decoder_sparse_step": 2, "attention_bias": True}, "qwen3_moe"),
    ("Qwen3NextForCausalLM", "Qwen3NextConfig", _MOE | {"mlp_only_layers": [1]}, "qwen3_next"),
    ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DENSE, "qwen3_5"),
    ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DENSE | {"tie_word_embeddings": True}, "qwen3_5"),
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", _MOE, "qwen3_5"),
    ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config",
     {"text_config": _DENSE, "vision_config": _VISION}, "qwen3_5"),
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
     {"text_config": _MOE, "vision_config": _VISION}, "qwen3_5"),
    ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig",
     {"text_config": _LAYERS | _HEADS | _EXPERTS,
      "vision_config": _VISION | {"deepstack_visual_indexes": [0, 1]}}, "qwen3_vl_moe"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "sizes", "family"),
    TINY,
    ids=[f"{i}-{row[0]}" for i, row in enumerate(TINY)],
)
def test_what_transformers_saves_has_roles(
    model: str, config: str, sizes: dict[str, Any], family: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    names = list(read_tensors(tmp_path))
    taken = role_index(family_for(saved, ()), saved, names)
    assert taken.family.name == family
    assert taken.unknown == ()
    assert taken.absent() == []
