"""What a module is decides what is done to it, whatever it is called: kinds of roles, and a class that
calls its experts otherwise than most: Mixtral."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Model, Tensor, run_cli, tensor

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.family import Family, families
from qconvert.core.graph import Apply
from qconvert.core.roles import Cut, Kind, joined_with
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.drop import Drop
from qconvert.passes.experts import Stack, Unstack
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.validation.runner import Report, validate_folder
from qconvert.validators.headers.manifest_claims import _parallel

HIDDEN, EXPERTS, LAYERS = 256, 2, 2
_SIDE = {"tokenizer.json": b"{}\n"}


def bf16(*shape: int) -> Tensor:
    return tensor("BF16", *shape)


# --- The vocabulary ------------------------------------------------------------------------------

# What names say to a reader, written down apart from layouts/.
_READ: tuple[tuple[str, str], ...] = (
    (r"norm\d?$|norm_(embedding|hidden)$", "NORM"),
    (r"embed_tokens$", "EMBEDDING"),
    (r"(lm_head|shared_head\.head)$", "HEAD"),
    (r"pos_emb(ed)?$|\.ape$", "POSITION"),
    (r"(conv1d|patch_embed\.proj)$", "CONV"),
    (r"mlp\.gate$", "ROUTER"),
    (r"(A_log|dt_bias|correction_bias|inv_freq)$", "BUFFER"),
    (r"shared_expert_gate$", "SHARED_WEIGHT"),
    (r"(eh_proj|mtp\.fc)$", "DRAFT_JOIN"),
    (r"(visual|vision_tower|mm_projector)\.", "VISION"),
    (r"indexer\.(weights_proj|compressor\.w(gate|kv))$", "INDEXER_WEIGHTS"),
    (r"\.attn\.indexer\.wq_b$", "INDEXER_QUERY"),
    (r"indexer\.", "INDEXER"),
    (r"experts\.\{E\}\.gate_proj$", "EXPERT_GATE"),
    (r"experts\.\{E\}\.up_proj$", "EXPERT_UP"),
    (r"experts\.\{E\}\.down_proj$", "EXPERT_DOWN"),
    (r"mlp\.experts\.gate_up_proj$", "STACKED_GATE_UP"),
    (r"mlp\.experts\.down_proj$", "STACKED_DOWN"),
    (r"shared_experts?\.gate_proj$", "SHARED_GATE"),
    (r"shared_experts?\.up_proj$", "SHARED_UP"),
    (r"shared_experts?\.down_proj$", "SHARED_DOWN"),
    (r"mlp\.gate_proj$", "GATE"),
    (r"mlp\.up_proj$", "UP"),
    (r"mlp\.down_proj$", "DOWN"),
    (r"q_a_proj$", "QUERY_DOWN"),
    (r"q_b_proj$", "QUERY_UP"),
    (r"kv_a_proj_with_mqa$", "KV_DOWN"),
    (r"kv_b_proj$", "KV_UP"),
    (r"\.q_proj$", "QUERY"),
    (r"k_proj$", "KEY"),
    (r"v_proj$", "VALUE"),
    (r"self_attn\.o_proj$", "OUTPUT"),
    (r"linear_attn\.out_proj$", "GDN_OUTPUT"),
    (r"in_proj_qkvz$", "GDN_QKVZ"),
    (r"in_proj_qkv$", "GDN_QKV"),
    (r"in_proj_z$", "GDN_Z"),
    (r"in_proj_ba$", "GDN_BA"),
    (r"in_proj_b$", "GDN_B"),
    (r"in_proj_a$", "GDN_A"),
)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_role_is_of_the_kind_its_name_says(family: Family) -> None:
    """Where a family's names are those that most makers use: another's may be called anything."""
    for role in family.roles:
        said = next((kind for pattern, kind in _READ if re.search(pattern, role.module)), None)
        assert said in (role.kind.name, None), role


@pytest.mark.parametrize("kind", Kind)
def test_what_may_be_quantized_is_allowed_by_name(kind: Kind) -> None:
    if kind.quantizable:
        assert kind.linear
        assert kind.cut is not Cut.WHOLE
    assert not (kind.never_quantized and kind.linear)
    assert kind in joined_with(kind)
    assert all(joined_with(other) == joined_with(kind) for other in joined_with(kind))


def test_what_is_unknown_is_nothing() -> None:
    for kind in (Kind.UNKNOWN, Kind.EXPERT_UNKNOWN):
        assert not kind.quantizable
        assert not kind.linear
        assert kind.cut is Cut.WHOLE


# --- Models that nobody described ----------------------------------------------------------------


def dense(model_type: str, names: Mapping[str, tuple[int, ...]], **config: Any) -> Model:
    settings = {
        "model_type": model_type, "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "vocab_size": 512, **config,
    }  # fmt: skip
    return Model(settings, {name: bf16(*shape) for name, shape in names.items()}, dict(_SIDE))


def llama(kind: str) -> Model:
    at = "model.layers.0"
    linears = {
        "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256),
        "self_attn.v_proj": (128, 256), "self_attn.o_proj": (256, 256),
        "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512),
    }  # fmt: skip
    return dense(
        kind,
        {
            "model.embed_tokens.weight": (512, HIDDEN),
            **{f"{at}.{name}.weight": shape for name, shape in linears.items()},
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            "model.norm.weight": (HIDDEN,),
            "lm_head.weight": (512, HIDDEN),
        },
    )


def gpt2(kind: str) -> Model:
    """A table of positions, and matrices [inputs, outputs]."""
    names = {
        "wte.weight": (512, HIDDEN), "wpe.weight": (64, HIDDEN), "h.0.ln_1.weight": (HIDDEN,),
        "h.0.attn.c_attn.weight": (HIDDEN, 768), "h.0.mlp.c_fc.weight": (HIDDEN, 1024),
    }  # fmt: skip
    return dense(kind, names)


def routed(kind: str) -> Model:
    """A router beside experts that are called as some of the described families call them."""
    at = "model.layers.0"
    names = {
        "model.embed_tokens.weight": (512, HIDDEN), f"{at}.mlp.router.weight": (EXPERTS, HIDDEN),
        f"{at}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    }  # fmt: skip
    for expert in range(EXPERTS):
        for name, shape in (("gate", (512, 256)), ("up", (512, 256)), ("down", (256, 512))):
            names[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = shape
    return dense(kind, names, num_experts=EXPERTS, moe_intermediate_size=512)


UNKNOWN: list[tuple[str, Callable[[str], Model]]] = [
    ("new_dense", llama), ("new_gpt", gpt2), ("new_moe", routed),
]  # fmt: skip
every_unknown = pytest.mark.parametrize(("kind", "make"), UNKNOWN, ids=[k for k, _ in UNKNOWN])


@every_unknown
@pytest.mark.parametrize(
    "options",
    [
        ("nvfp4", "--dialect", "modelopt", "--targets", "Linear"),
        ("nvfp4", "--dialect", "compressed-tensors", "--targets", "Linear"),
        ("w4a16", "--rtn", "--targets", "Linear"),
        ("w4a16", "--rtn", "--targets", "q_proj"),
    ],
    ids=["modelopt", "compressed-tensors", "Linear", "q_proj"],
)
def test_nothing_of_an_unknown_family_is_quantized(
    kind: str, make: Callable[[str], Model], options: tuple[str, ...], tmp_path: Path
) -> None:
    source, out = make(kind).write(tmp_path / "source", 1), tmp_path / "out"
    command, *more = options
    done = run_cli(command, source, out, *more, "--jobs", "1")
    assert (done.code, out.exists()) == (1, False)
    assert f"model_type '{kind}' is not known" in done.err
    assert "copy, dequant, diff and validate work" in done.err


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_linears_of_a_class_are_quantized_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """As transformers' class says what they are: embeddings and the head are matrices, too."""
    source, out = llama(kind).write(tmp_path / "source", 1), tmp_path / "out"
    done = run_cli("w4a16", source, out, "--rtn", "--targets", "Linear", "--jobs", "1")
    assert done.code == 0, done.err
    packed = {name for name in Checkpoint.open(out) if name.endswith(".weight_packed")}
    linears = {name for name in Checkpoint.open(source) if name.endswith("_proj.weight")}
    assert len(linears) == 7
    assert packed == {f"{name}_packed" for name in linears}


def test_a_class_without_linears_is_refused(tmp_path: Path) -> None:
    """GPT-2 stores its matrices [inputs, outputs], in a class that no runtime quantizes."""
    model = gpt2("gpt2")
    model.tensors = {f"transformer.{name}": one for name, one in model.tensors.items()}
    source = model.write(tmp_path / "source", 1)
    refused = run_cli("w4a16", source, tmp_path / "out", "--rtn", "--targets", "Linear")
    assert refused.code == 1
    assert "matches no weight that can be quantized" in refused.err


def test_a_dense_model_has_no_experts_to_quantize(tmp_path: Path) -> None:
    """Whether its family is known or not: that is the cause."""
    known = llama("qwen3_5_text")
    known.config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    for model in (llama("llama"), known):
        source = model.write(tmp_path / str(model.config["model_type"]), 1)
        for step in (
            ToNvfp4("modelopt"), ExpertsToW4A16(), ExpertsToAmx("int8", 1),
        ):  # fmt: skip
            with pytest.raises(PlanError, match="this model has no experts"):
                run_passes(Plan.identity(Checkpoint.open(source)), [step])


def test_what_a_known_family_does_not_know_is_left(tmp_path: Path) -> None:
    """A matrix of no role in a layer, and a table in a vision tower."""
    model = llama("qwen3_5_text")
    model.config["layer_types"] = ["full_attention"]
    stray = "model.layers.0.self_attn.extra_proj.weight"
    table = "model.visual.pos_embed.weight"
    norms = {f"model.layers.0.self_attn.{n}_norm.weight": bf16(64) for n in "qk"}
    model.tensors |= {stray: bf16(256, 256), table: bf16(64, 256), **norms}
    plan = planned(model, tmp_path, ToNvfp4("compressed-tensors", targets=("Linear",)))
    for name in (stray, table, "model.embed_tokens.weight", "lm_head.weight"):
        assert plan.tensors[name].type.dtype == "BF16"
    assert "model.layers.0.self_attn.q_proj.weight_packed" in plan.tensors


def test_examples_of_quantizing_are_of_families_that_are_known() -> None:
    known = {
        "DeepSeek-V3", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-4.5-Air",
        "Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B", "Qwen3-32B",
    }  # fmt: skip
    for command in ("nvfp4", "w4a16", "amx", "kt"):
        shown = re.findall(rf"^ *qconvert {command} (\S+)", run_cli(command, "--help").out, re.M)
        assert shown
        assert {name.rpartition("/")[2] for name in shown} <= known


def test_the_help_says_which_bytes_are_whose() -> None:
    text = " ".join(run_cli("nvfp4", "--help-all").out.split())
    assert "In the compressed-tensors dialect FP16 weights are converted to FP32 first" in text
    assert "in BF16, byte for byte" in " ".join(run_cli("w4a16", "--help-all").out.split())


# --- A class whose experts are called otherwise --------------------------------------------------


def mixtral_model(intermediate: int = 1536) -> Model:
    """w2 is down, which is cut by columns, and w3 is up."""
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, HIDDEN), "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (512, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        names |= {f"{at}.{n}_layernorm.weight": (HIDDEN,) for n in ("input", "post_attention")}
        names |= {f"{at}.self_attn.{n}_proj.weight": (2048, HIDDEN) for n in "qkv"}
        names[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, 2048)
        moe = f"{at}.block_sparse_moe"
        names[f"{moe}.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("w1", "w3"):
                names[f"{moe}.experts.{expert}.{name}.weight"] = (intermediate, HIDDEN)
            names[f"{moe}.experts.{expert}.w2.weight"] = (HIDDEN, intermediate)
    config = {
        "num_local_experts": EXPERTS, "intermediate_size": intermediate, "num_hidden_layers": LAYERS,
        "hidden_act": "silu", "architectures": ["MixtralForCausalLM"],
    }  # fmt: skip
    return dense("mixtral", names, **config)


def planned(model: Model, tmp_path: Path, *steps: Pass) -> Plan:
    source = tmp_path / "source"
    if not source.exists():
        model.write(source, 1)
    return run_passes(Plan.identity(Checkpoint.open(source)), steps)


def quantization(plan: Plan) -> dict[str, Any]:
    return dict(plan.config["quantization_config"])


def test_stacks_that_a_pass_made_are_experts_of_the_next(tmp_path: Path) -> None:
    """Under the names that the class has for stacks, which are others than those of matrices."""
    source = planned(mixtral_model(), tmp_path)
    back = planned(mixtral_model(), tmp_path, Stack(), Unstack())
    assert back.tensors.keys() == source.tensors.keys()
    packed = planned(mixtral_model(), tmp_path, Stack(), ExpertsToW4A16()).tensors
    assert sum(name.endswith("_packed") for name in packed) == 3 * EXPERTS * LAYERS


def test_targets_match_what_was_quantized(tmp_path: Path) -> None:
    plan = planned(mixtral_model(), tmp_path, ExpertsToW4A16())
    targets = quantization(plan)["config_groups"]["group_0"]["targets"]
    packed = [n.removesuffix(".weight_packed") for n in plan.tensors if n.endswith("_packed")]
    assert len(packed) == 3 * EXPERTS * LAYERS
    assert all(target.startswith("re:") for target in targets)
    for name in plan.tensors:
        module = name.rpartition(".")[0]
        assert any(re.match(t[3:], module) for t in targets) == (module in packed), name
    plan = planned(mixtral_model(), tmp_path, ToNvfp4("compressed-tensors"))
    assert quantization(plan)["config_groups"]["group_0"]["targets"] == targets


def test_down_is_cut_by_columns_whatever_it_is_called(tmp_path: Path) -> None:
    """1536 columns are 192 for each of eight ranks: one group of 128 and a half."""
    plan = planned(mixtral_model(), tmp_path, ExpertsToW4A16(group_size=128))
    assert "ranks get whole groups at tensor parallel 1, 2, 4" in plan.log[-1].notes
    assert "groups of 32 would be whole at 1, 2, 4, 8, 16" in plan.log[-1].notes
    with pytest.raises(
        PlanError, match=r"group 32 fits at 8; ranks get whole ones of this at 1, 2, 4$"
    ):
        planned(mixtral_model(), tmp_path, ExpertsToW4A16(group_size=128, tp=8))


def test_the_validator_cuts_by_role_too(tmp_path: Path) -> None:
    """QC092, of a manifest that says tp=8."""
    source = mixtral_model().write(tmp_path / "source", 1)
    out = tmp_path / "out"
    assert run_cli("w4a16", source, out, "--rtn", "--group-size", "128", "--jobs", "1").code == 0
    claims = {"passes": [{"name": "w4a16", "options": {"tp": 8}}]}
    (found,) = _parallel(Checkpoint.open(out), claims)
    assert (found.rule, ".w2." in found.where) == ("QC092", True)


def test_what_stays_is_named_by_role(tmp_path: Path) -> None:
    """Linears quantized and experts left, and the other way round, in GPTQ's own form."""
    linears = ExpertsToW4A16(targets=(r"re:.*self_attn.*",))
    ignore = quantization(planned(mixtral_model(), tmp_path, linears))["ignore"]
    expert = "model.layers.1.block_sparse_moe.experts.1.w2"
    patterns = [entry[3:] for entry in ignore if entry.startswith("re:")]
    assert any(re.match(pattern, expert) for pattern in patterns)
    assert not any(re.match(pattern, "model.layers.1.self_attn.q_proj") for pattern in patterns)
    plan = planned(mixtral_model(), tmp_path, ExpertsToW4A16(packing="gptq"))
    (left,) = (key.removeprefix("-:") for key in quantization(plan)["dynamic"])
    assert not re.match(left, expert)
    assert re.match(left, "model.layers.1.self_attn.q_proj")


def test_gate_and_up_share_a_scale_whatever_they_are_called(tmp_path: Path) -> None:
    """Among all linears, of which q, k and v share one too."""
    plan = planned(mixtral_model(512), tmp_path, ToNvfp4("modelopt", targets=("Linear",)))

    def own(module: str) -> Apply | None:
        """The node that makes a matrix's own scale."""
        return plan.tensors[f"{module}.weight_scale_2"].node

    at = "model.layers.0"
    expert = f"{at}.block_sparse_moe.experts.1"
    assert own(f"{expert}.w1") is own(f"{expert}.w3") is not None
    assert own(f"{expert}.w1") is not own(f"{expert}.w2")
    assert own(f"{at}.self_attn.q_proj") is own(f"{at}.self_attn.v_proj")
    assert own(f"{at}.self_attn.q_proj") is not own(f"{at}.self_attn.o_proj")
    assert plan.tensors[f"{at}.block_sparse_moe.gate.weight"].type.dtype == "BF16"


def test_part_of_gate_and_up_is_refused_whatever_they_are_called(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"k_proj.* is not|is to be quantized and .*_proj is not"):
        planned(mixtral_model(), tmp_path, ExpertsToW4A16(targets=("q_proj", "o_proj")))
    with pytest.raises(PlanError, match="take one scheme for all experts"):
        planned(mixtral_model(), tmp_path, ExpertsToW4A16(targets=(r"re:.*\.w1$",)))


def test_stacks_have_the_class_s_names(tmp_path: Path) -> None:
    stacked = planned(mixtral_model(512), tmp_path, Stack()).tensors
    at = "model.layers.0.mlp.experts"
    assert stacked[f"{at}.gate_up_proj"].type.shape == (EXPERTS, 1024, HIDDEN)
    assert stacked[f"{at}.down_proj"].type.shape == (EXPERTS, HIDDEN, 512)


def test_experts_leave_whole(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"experts of model\.layers\.0\.block_sparse_moe are kept"):
        planned(mixtral_model(512), tmp_path, Drop(match="*layers.0.*experts.1.*", why="a try"))


def test_amx_experts_are_found_by_role(tmp_path: Path) -> None:
    plan = planned(mixtral_model(512), tmp_path, ExpertsToAmx("int8", 1))
    found = {name.partition(".numa")[0] for name in plan.tensors}
    parts = ("gate", "up", "down")
    assert found == {
        f"blk.{layer}.ffn_{part}_exps.{expert}"
        for layer in range(LAYERS) for part in parts for expert in range(EXPERTS)
    }  # fmt: skip


# --- QC095, which knows nothing of the passes ----------------------------------------------------

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def fp8_of(model: Model, *modules: str) -> Model:
    """The model with these modules in block FP8."""
    for module in modules:
        shape = model.tensors[f"{module}.weight"].shape
        model.tensors[f"{module}.weight"] = tensor("F8_E4M3", *shape)
        grid = [-(-size // 128) for size in shape]
        model.tensors[f"{module}.weight_scale_inv"] = tensor("F32", *grid)
    model.config["quantization_config"] = dict(_FP8)
    return model


def report_of(model: Model, tmp_path: Path) -> Report:
    return validate_folder(model.write(tmp_path / "folder", 1))


def never_quantized(model: Model, tmp_path: Path) -> list[str]:
    report = report_of(model, tmp_path)
    return [finding.where for finding in report.findings if finding.rule == "QC095"]


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (llama, "model.embed_tokens"), (llama, "lm_head"), (gpt2, "wte"), (gpt2, "wpe"),
        (gpt2, "h.0.ln_1"), (llama, "model.norm"), (llama, "model.layers.0.input_layernorm"),
        (routed, "model.layers.0.mlp.router"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_never_quantized_is_an_error_of_unknown_families(
    make: Callable[[str], Model], module: str, tmp_path: Path
) -> None:
    assert never_quantized(fp8_of(make("nobody_s"), module), tmp_path) == [f"{module}.weight"]


def test_a_gate_beside_experts_is_a_router(tmp_path: Path) -> None:
    """And one beside none may be half of an MLP."""
    model = mixtral_model(512)
    model.config["model_type"] = "nobody_s"
    router = "model.layers.1.block_sparse_moe.gate"
    half = "model.layers.1.ffn.gate"
    model.tensors[f"{half}.weight"] = bf16(256, 256)
    assert never_quantized(fp8_of(model, router, half), tmp_path) == [f"{router}.weight"]


@pytest.mark.parametrize("make", [llama, routed], ids=["dense", "experts"])
def test_linears_of_unknown_families_are_no_error(
    make: Callable[[str], Model], tmp_path: Path
) -> None:
    model = make("nobody_s")
    linears = [n.removesuffix(".weight") for n in model.tensors if n.endswith("_proj.weight")]
    assert len(linears) > 5
    assert never_quantized(fp8_of(model, *linears), tmp_path) == []


@pytest.mark.parametrize(
    "last",
    [
        "gate_proj", "gate_up_proj", "embedding_projection", "conv_proj", "in_proj", "dt_proj",
        "router_proj", "lm_head_proj", "linear_fc1", "c_proj", "wo", "position_proj", "norm_proj",
        "output_gate", "g_proj", "x_embedder_proj",
    ],
)  # fmt: skip
def test_names_that_only_sound_so_are_no_error(last: str, tmp_path: Path) -> None:
    model = llama("nobody_s")
    model.tensors[f"model.layers.0.block.{last}.weight"] = bf16(256, 256)
    assert never_quantized(fp8_of(model, f"model.layers.0.block.{last}"), tmp_path) == []


def test_a_head_that_the_config_names_is_its_own_business(tmp_path: Path) -> None:
    group = {
        "targets": ["re:.*lm_head"], "weights": {"num_bits": 8, "type": "float", "strategy": "block",
        "block_structure": [128, 128]},
    }  # fmt: skip
    model = fp8_of(llama("nobody_s"), "lm_head")
    model.tensors["lm_head.weight_scale"] = model.tensors.pop("lm_head.weight_scale_inv")
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group},
    }  # fmt: skip
    assert never_quantized(model, tmp_path) == []
    group["targets"] = ["Linear"]
    assert never_quantized(model, tmp_path) == ["lm_head.weight"]


def test_of_known_families_roles_say_it(tmp_path: Path) -> None:
    model = fp8_of(mixtral_model(512), "model.layers.0.block_sparse_moe.gate", "lm_head")
    found = never_quantized(model, tmp_path)
    assert sorted(found) == ["lm_head.weight", "model.layers.0.block_sparse_moe.gate.weight"]
