"""What sglang's classes need of quantized folders, as plans and configs have it. The real loader is
asked in tests/loaders/test_sglang_quantized.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli
from loaders.published import published

from qconvert.checkpoint.open import open_source
from qconvert.core.errors import PlanError
from qconvert.core.graph import nodes
from qconvert.core.int_scheme import DEFAULT_GROUP
from qconvert.hub.readme import with_card
from qconvert.models.calibrated import calibrated_op
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.recipe.recipe import parse_recipe
from qconvert.runtimes.shared_experts import NO_FUSION, fuses, kept_apart, loses_shared
from qconvert.samples.request import Calibration

DEEPSEEK, GLM, NEXT = "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM"
V3 = {"n_routed_experts": 256, "n_shared_experts": 1, "num_hidden_layers": 3}
KIMI = "KimiK25ForConditionalGeneration"
KIMI_K2 = {**V3, "n_routed_experts": 384}
NEXT_80B = {
    "shared_expert_intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 2,
}  # fmt: skip
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
EXPERTS = r"re:.*\.mlp\.experts\..*"


def packed(*targets: str, **changes: Any) -> dict[str, Any]:
    """A block of compressed-tensors with one group."""
    group = {"targets": list(targets), "weights": INT4}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **changes}


def modelopt(*ignore: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": list(ignore)}


# --- The condition, as sglang 0.5.23 has it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "config", "block", "fused"),
    [
        (DEEPSEEK, V3, None, True),
        (DEEPSEEK, {**V3, "n_routed_experts": 64}, None, False),
        (DEEPSEEK, {**V3, "n_shared_experts": 2}, None, False),
        (DEEPSEEK, {**V3, "n_routed_experts": 384}, packed(EXPERTS), False),
        (DEEPSEEK, {**V3, "n_routed_experts": 384}, {"quant_method": "quark"}, True),
        (DEEPSEEK, V3, packed(EXPERTS), True),
        (DEEPSEEK, V3, packed("Linear"), False),
        (DEEPSEEK, V3, modelopt("model.layers.0.mlp.shared_experts.*"), False),
        (DEEPSEEK, V3, modelopt("lm_head"), True),
        (GLM, {"n_shared_experts": 1}, packed("Linear"), True),
        (GLM, {"n_shared_experts": 1}, modelopt("model.layers.0.mlp.shared_experts.*"), True),
        (GLM, {"n_shared_experts": 0}, None, False),
        (NEXT, NEXT_80B, packed("Linear"), True),
        (NEXT, {**NEXT_80B, "shared_expert_intermediate_size": 1024}, None, False),
        (NEXT, NEXT_80B, modelopt("model.layers.0.mlp.shared_expert.*"), False),
        (NEXT, NEXT_80B, modelopt("model.layers.0.mlp.shared_expert_gate"), True),
        ("Qwen3_5MoeForCausalLM", NEXT_80B, None, False),
        (KIMI, {"text_config": {**V3, "architectures": [DEEPSEEK]}}, None, True),
        (KIMI, {"text_config": {**KIMI_K2, "architectures": [DEEPSEEK]}}, None, False),
        (KIMI, {"text_config": {**V3, "architectures": ["Other"]}}, None, False),
    ],
)
def test_when_sglang_fuses(
    architecture: str, config: dict[str, Any], block: dict[str, Any] | None, fused: bool
) -> None:
    assert fuses(architecture, config, block) == fused


@pytest.mark.parametrize(
    ("block", "apart"),
    [
        (None, False),
        (packed(EXPERTS), True),
        (packed(EXPERTS, r"re:.*\.mlp\.shared_expert\..*"), False),
        (packed("Linear"), False),
        (packed("Linear", ignore=[r"re:.*\.mlp\.shared_expert\..*"]), True),
        (packed("Linear", ignore=[r"re:.*\.1\.mlp\.shared_expert\..*"]), True),
        (packed(EXPERTS, linear_fp8_config={"quant_method": "fp8"}), True),
        (modelopt("model.layers.1.mlp.shared_expert.*"), True),
        (modelopt("model.layers.1.mlp.shared_expert_gate"), False),
        ({"quant_method": "gptq", "dynamic": {r"-:^(?!.*\.mlp\.experts).*$": {}}}, True),
        ({"quant_method": "gptq", "dynamic": {r"-:^(?!.*\.mlp\.(sh|ex)).*$": {}}}, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, True),
    ],
)  # fmt: skip
def test_when_they_are_stored_apart(block: dict[str, Any] | None, apart: bool) -> None:
    assert kept_apart(NEXT, NEXT_80B, block) == apart


# --- What passes make of it -------------------------------------------------------------------------


def planned(folder: Path, family: str, *steps: Pass, **form: Any) -> Plan:
    start = Plan.identity(open_source(published(family, **form).write(folder / "source")))
    return run_passes(start, steps)


def block_of(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = plan.config["quantization_config"]
    return found


def launch(plan: Plan) -> str:
    card = with_card(plan).new_files["README.md"]
    return next(line for line in card.splitlines() if "launch_server" in line)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
@pytest.mark.parametrize(
    "step", [ExpertsToW4A16(), ToNvfp4("compressed-tensors"), ToNvfp4("modelopt")], ids=str
)
def test_shared_experts_follow_the_routed_ones_where_sglang_fuses(
    family: str, step: ExpertsToW4A16 | ToNvfp4, tmp_path: Path
) -> None:
    """modelopt's list vetoes fusion in Qwen3-Next, so that they need not."""
    plan = planned(tmp_path, family, step)
    shared = [n for n in plan.tensors if ".shared_expert" in n and "_gate" not in n]
    vetoed = family == "qwen3_next" and getattr(step, "dialect", "") == "modelopt"
    own = [n for n in shared if "weight_scale" in n and "layers.1." in n and "mtp" not in n]
    assert bool(own) == (not vetoed)
    assert not loses_shared(plan.config, block_of(plan))
    assert NO_FUSION not in launch(plan)
    said = "of shared experts quantized with the routed ones (kept they would take "
    assert any(said in note for note in plan.log[-1].notes) == (not vetoed)
    expected = plan.log[-1].expected
    assert expected is not None
    assert plan.log[-1].matched == expected


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
@pytest.mark.parametrize(
    "step",
    [
        ExpertsToW4A16(shared_experts="keep"),
        ToNvfp4("compressed-tensors", shared_experts="keep"),
        ExpertsToW4A16(targets=("Linear",), shared_experts="keep"),
        ToNvfp4("compressed-tensors", targets=("Linear",), shared_experts="keep"),
        ExpertsToW4A16(ignore=("re:.*shared_expert.*",)),
    ],
    ids=str,
)
def test_kept_ones_need_sglangs_option(
    family: str, step: ExpertsToW4A16 | ToNvfp4, tmp_path: Path
) -> None:
    """Kept by the option, which is stronger than targets, or by an entry of ignore."""
    plan = planned(tmp_path, family, step)
    assert not [n for n in plan.tensors if ".shared_expert" in n and "scale" in n]
    linears = any(name.endswith("self_attn.q_proj.weight_packed") for name in plan.tensors)
    assert linears == ("Linear" in step.targets)
    assert NO_FUSION in launch(plan)
    assert any(NO_FUSION in note for note in plan.log[-1].notes)


def test_gptqs_pattern_names_what_is_quantized(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3_next", ExpertsToW4A16(packing="gptq"))
    assert "model.layers.1.mlp.shared_expert.up_proj.qweight" in plan.tensors
    assert "model.layers.1.mlp.shared_expert_gate.weight" in plan.tensors
    assert not loses_shared(plan.config, block_of(plan))


def test_a_class_that_does_not_fuse_keeps_them(tmp_path: Path) -> None:
    """DeepSeek's with 4 experts."""
    plan = planned(tmp_path, "deepseek_v3", ExpertsToW4A16())
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in plan.tensors
    assert NO_FUSION not in launch(plan)
    both = run_passes(Plan.identity(plan.checkpoint), [ExpertsToW4A16(shared_experts="quantize")])
    assert "model.layers.1.mlp.shared_experts.up_proj.weight_packed" in both.tensors
    assert "model.layers.3.mlp.shared_experts.up_proj.weight_packed" in both.tensors


def test_calibration_keeps_them_unless_asked(tmp_path: Path) -> None:
    """Asked for, they are solved, but those of the draft layer, whose experts are rounded too."""
    request = Calibration(synthetic=True)
    plan = Plan.identity(open_source(published("glm4_moe").write(tmp_path / "source")))
    chosen = ExpertsToW4A16(calibrate=request).chosen(plan)
    assert chosen.shared == frozenset()
    asked = ExpertsToW4A16(calibrate=request, shared_experts="quantize")
    both = run_passes(Plan.identity(plan.checkpoint), [asked])
    solved = {op.kind for op in map(calibrated_op, nodes(both.tensors.values()))
              if op is not None and op.expert is None}  # fmt: skip
    shared = {name.removesuffix(".weight_packed") for name in both.tensors
              if ".shared_experts." in name and name.endswith("weight_packed")}  # fmt: skip
    drafts = {m for m in shared if both.family.is_mtp(f"{m}.x", plan.role_index.dims)}
    assert drafts
    assert solved == shared - drafts
    assert any("MTP experts are not calibrated" in note for note in both.log[-1].notes)
    with pytest.raises(PlanError, match="quantized shared experts would need input scales"):
        ToNvfp4(stats="somewhere", shared_experts="quantize")


def test_a_model_without_them_has_none_to_quantize(tmp_path: Path) -> None:
    for step in (
        ExpertsToW4A16(shared_experts="quantize"),
        ToNvfp4("modelopt", shared_experts="quantize"),
    ):
        with pytest.raises(PlanError, match="the model has none"):
            planned(tmp_path / step.name, "qwen3_moe", step)


def test_a_recipe_says_the_same(tmp_path: Path) -> None:
    (ours,) = parse_recipe("passes: [w4a16: {shared_experts: keep}]", "r").passes
    assert ours == ExpertsToW4A16(shared_experts="keep")
    text = "passes: [nvfp4: {dialect: modelopt, shared_experts: quantize, tp: 2}]"
    (other,) = parse_recipe(text, "r").passes
    assert other == ToNvfp4("modelopt", shared_experts="quantize", tp=2)


# --- Names ------------------------------------------------------------------------------------------


def test_fused_names_are_ignored_for_classes_without_a_mapping(tmp_path: Path) -> None:
    glm = block_of(planned(tmp_path / "glm", "glm4_moe", ExpertsToW4A16()))["ignore"]
    assert {"model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"} <= set(glm)
    step = ToNvfp4("compressed-tensors")
    deepseek = block_of(planned(tmp_path / "v3", "deepseek_v3", step))["ignore"]
    assert "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa" in deepseek
    assert "model.layers.1.mlp.shared_experts.gate_up_proj" in deepseek
    qwen = block_of(planned(tmp_path / "qwen", "qwen3_moe", ExpertsToW4A16()))["ignore"]
    assert not [name for name in qwen if name.endswith("qkv_proj")]


def test_fused_names_are_targets_beside_fp8(tmp_path: Path) -> None:
    """`Linear` is the class of FP8 ones there, and sglang finds a class before the parts."""
    step = ExpertsToW4A16(targets=("Linear",))
    plan = planned(tmp_path, "glm4_moe", step, fp8=True)
    targets = block_of(plan)["config_groups"]["group_0"]["targets"]
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"} <= set(targets)


def test_draft_layers_that_are_fp8_in_part_are_listed_by_name(tmp_path: Path) -> None:
    """A pattern of all of them would leave their FP8 linears out."""
    ignore = block_of(planned(tmp_path, "glm4_moe", ExpertsToW4A16(), fp8=True))["ignore"]
    assert "model.decoder.eh_proj" in ignore
    assert not [entry for entry in ignore if entry.startswith(r"re:model\.decoder")]


def test_names_of_qwen3_nexts_draft(tmp_path: Path) -> None:
    """It calls its layer `model.layers.0`: attention by name, and experts quantized like the model's."""
    plan = planned(tmp_path, "qwen3_next", ExpertsToW4A16())
    assert r"re:model\.layers\.0\.self_attn\..*" in block_of(plan)["ignore"]
    start = Plan.identity(plan.checkpoint)
    packed_too = run_passes(start, [ToNvfp4("compressed-tensors")])
    assert r"re:model\.layers\.0\.self_attn\..*" in block_of(packed_too)["ignore"]
    assert "mtp.layers.0.mlp.experts.0.up_proj.weight_packed" in packed_too.tensors
    flat = run_passes(start, [ToNvfp4("modelopt")])
    assert {"model.layers.0.self_attn.*", "model.shared_head.head"} <= set(block_of(flat)["ignore"])


def test_modelopts_list_names_the_drafts_head(tmp_path: Path) -> None:
    plan = planned(tmp_path, "glm4_moe", ToNvfp4("modelopt"))
    assert "model.shared_head.head" in block_of(plan)["ignore"]


def test_qwen3_nexts_fused_inputs_stay(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3_next", ExpertsToW4A16(targets=("Linear",)))
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in plan.tensors
    assert "model.layers.0.linear_attn.out_proj.weight_packed" in plan.tensors
    assert "model.layers.0.linear_attn.in_proj_qkvz" in block_of(plan)["ignore"]


# --- Tensor parallelism -----------------------------------------------------------------------------


def test_sizes_at_which_ranks_get_whole_groups(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3_moe", ExpertsToW4A16(group_size=128), inner=256)
    assert plan.facts["tp_sizes"] == [1, 2]
    card = with_card(plan).new_files["README.md"]
    assert "at tensor parallel 1 (3.5 MB a rank), 2 (1.7 MB a rank), as simulated" in card
    assert "Ranks get whole" not in card
    start = Plan.identity(plan.checkpoint)
    assert run_passes(start, [ToNvfp4(tp=16)]).facts["tp_sizes"] == [1, 2, 4, 8, 16]
    with pytest.raises(PlanError, match="at tensor parallel 32 a rank would not get whole blocks"):
        run_passes(start, [ToNvfp4(tp=32)])


def test_kt_refuses_a_gpu_side_that_ranks_would_cut(tmp_path: Path) -> None:
    source = published("qwen3_moe", inner=256).write(tmp_path / "source")
    common = ("kt", source, "--cpu", "int4", "--numa", "1", "--cpu-out", tmp_path / "cpu")
    ranks = str(512 // DEFAULT_GROUP)  # of which each gets half a group
    done = run_cli(*common, "--gpu", "w4a16", "--gpu-out", tmp_path / "gpu", "--tp", ranks)
    assert (done.code, "a rank would not get whole groups" in done.err) == (1, True)
    assert run_cli(*common, "--tp", "4").code == 2


def test_no_launch_line_for_experts_that_sglang_has_not(tmp_path: Path) -> None:
    plan = planned(tmp_path, "qwen3_moe", ExpertsToW4A16(symmetric=False))
    assert "sglang.launch_server" not in with_card(plan).new_files["README.md"]
