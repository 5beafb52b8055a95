"""The simulator of vLLM's loader, without the loader: cells with their answers, and what must hold for
any folder. That it says what the loader says is shown by tests/loaders/test_simulator_vllm.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli
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

import qconvert
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.parameter_names import Dialect
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.plan.plan import Plan, run_passes
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loading.setting import BLACKWELL, LoadRefused, NotSimulated, Setting
from qconvert.runtimes.serving import SIMULATED, Offered, loads, served
from qconvert.runtimes.vllm.ignore_matching import excluded, ignored, skipped, target

simulate = in_any_form("vllm")


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
    draft = "model.layers.3." if family in ("deepseek_v3", "glm4_moe") else "mtp."
    assert all(name.startswith(draft) for name in answer.unread)


def test_stages_own_a_layer_more_from_the_second_last() -> None:
    config, tensors = folder("qwen3_5_moe_text")
    stages = [simulate(config, tensors, Setting(pp=3, stage=stage)) for stage in range(3)]
    layers = [{n.split(".")[2] for n in s.parameters if ".layers." in n} for s in stages]
    assert layers == [{"0"}, {"1", "2"}, {"3"}]
    assert all("model.embed_tokens.weight" in stage.parameters for stage in stages)
    last = simulate(*folder("qwen3_moe"), Setting(pp=3, stage=2)).refused
    assert last is not None
    assert "must have a layer with experts" in last.why


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        (Setting(pp=2, partition=(1, 3)), "ValueError"),
        (Setting(tp=3), "ValidationError"),
        (Setting(tp=2, ep=2), ""),
    ],
)
def test_sizes_that_no_folder_fits(setting: Setting, kind: str) -> None:
    refused = simulate(*folder("glm4_moe"), setting).refused
    assert (refused.kind if refused else "") == kind


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_moe"])
def test_experts_in_integers(family: str) -> None:
    config, tensors = integers(*folder(family), ".experts.", 32, ignore=LINEARS)
    answer = simulate(config, tensors)
    assert answer.whole
    assert "CompressedTensorsWNA16MoEMethod" in answer.schemes.values()


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_all_layers_in_nvfp4(dialect: Dialect, tmp_path: Path) -> None:
    """Each dialect's parameters by their names."""
    source = published("qwen3_moe").write(tmp_path / "source")
    step = ToNvfp4(dialect, targets=("Linear",), weight_only=True)
    plan = run_passes(Plan.identity(Checkpoint.open(source)), [step])
    assert simulate(plan.config, {n: o.type for n, o in plan.tensors.items()}).whole


@pytest.mark.parametrize(("tp", "refused"), [(1, ""), (2, ""), (4, "cut groups of 128")])
def test_groups_of_an_expert_among_ranks(tp: int, refused: str) -> None:
    """256 rows: four ranks have 64 each."""
    config, tensors = integers(*folder("qwen3_moe", inner=256), ".experts.", 128, ignore=LINEARS)
    answer = simulate(config, tensors, Setting(tp=tp)).refused
    assert refused in str(answer)
    assert bool(refused) is (answer is not None)


def test_blocks_of_experts_that_ranks_cut_are_taken_for_smaller_ones() -> None:
    config, tensors = folder("qwen3_moe", fp8=True, inner=384)
    answer = simulate(config, tensors, Setting(tp=4, rank=3))
    assert answer.whole
    scale = "model.layers.0.mlp.experts.routed_experts.w2_weight_scale_inv"
    assert answer.parameters[scale].shape == (4, 8, 3)  # 96 rows in blocks of 32


def test_norms_without_tensors() -> None:
    """Unquantized models are checked when all is read, quantized ones are not."""
    for fp8 in (False, True):
        config, tensors = folder("glm4_moe", fp8=fp8)
        del tensors["model.layers.0.input_layernorm.weight"]
        answer = simulate(config, tensors)
        assert (answer.refused is None) is fp8
        assert not answer.whole
        assert not fp8 or answer.missing == ("model.layers.0.input_layernorm.weight",)


def test_a_name_that_leads_nowhere_ends_the_load() -> None:
    for family in ("glm4_moe", "deepseek_v3"):
        config, tensors = folder(family)
        tensors["model.layers.0.other.weight"] = TensorType("BF16", (4,))
        refused = simulate(config, tensors).refused
        assert refused is not None
        assert refused.where == "model.layers.0.other.weight"


def test_fused_projections_are_refused_by_a_class_that_fuses() -> None:
    config, tensors = folder("qwen3_5_moe_text", fp8=True)
    config = {**config, "quantization_config": {"quant_method": "compressed-tensors"}}
    refused = simulate(config, tensors).refused
    assert refused is not None
    assert "builds no parameter" in refused.why
    assert ".in_proj_qkvz." in refused.why


@pytest.mark.parametrize(("groups", "wrong"), [(None, 0), (4, 0), (1, 6)])
def test_stated_order_of_fused_rows(groups: int | None, wrong: int) -> None:
    assert len(simulate(*folder("qwen3_next"), groups=groups).misread) == wrong


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8"),
        ({"quant_method": "gptq", "bits": 4}, "group_size"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:("]}, "pattern"),
    ],
)
def test_what_it_has_no_rule_for_gets_no_answer(block: dict[str, Any], why: str) -> None:
    config, tensors = folder("qwen3_moe")
    with pytest.raises(NotSimulated, match=why):
        simulate({**config, "quantization_config": block}, tensors)


@pytest.mark.parametrize(
    "setting", [Setting(capability=BLACKWELL), Setting(tp=4, ep=2), Setting(moe_runner="triton")]
)
def test_settings_without_rules_get_no_answer(setting: Setting) -> None:
    with pytest.raises(NotSimulated):
        simulate(*folder("qwen3_moe"), setting)
    with pytest.raises(NotSimulated, match="stages"):
        simulate(*folder("glm4_moe"), Setting(pp=2), draft=True)


# --- Names ---------------------------------------------------------------------------------------

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def test_lists_of_each_dialect() -> None:
    assert ignored("a.q_proj", ["a.q_proj"], {})
    assert ignored("a.q_proj", ["re:.*q_proj"], {})
    assert not ignored("model.a.q_proj", ["a.q_proj"], {})  # no tails of names
    assert ignored("a.qkv_proj", ["a.q_proj", "a.k_proj", "a.v_proj"], FUSED)
    assert ignored("a.qkv_proj", ["a.qkv_proj"], FUSED)
    with pytest.raises(LoadRefused, match="names some"):
        ignored("a.qkv_proj", ["a.q_proj"], FUSED)
    assert skipped("a.experts", ["a.experts.0.up_proj"], {})
    assert not skipped("a.experts", ["a"], {})
    with pytest.raises(LoadRefused, match="names some"):
        skipped("a.qkv_proj", ["a.k_proj"], FUSED)
    assert excluded("model.a.q_proj", ["a.*"], {}) is False
    assert excluded("model.a.q_proj", ["model.a*"], {})
    assert excluded("model.a.q_proj", ["a.q_"], {})  # any part of the name


def test_targets_by_name_then_parts_then_class() -> None:
    assert target("a.q_proj", "Linear", ["Linear", "re:.*q_proj"], {}) == "re:.*q_proj"
    assert target("a.qkv_proj", "QKVParallelLinear", ["Linear", r"re:.*\.[qkv]_proj"], FUSED) == (
        r"re:.*\.[qkv]_proj"
    )
    assert target("a.b", "ReplicatedLinear", ["Linear"], {}) == "Linear"
    assert target("a.b", "ParallelLMHead", ["Linear"], {}) is None


# --- Any folder ----------------------------------------------------------------------------------

_SOME = {name: folder(name, fp8=True) for name in ("glm4_moe", "qwen3_5_moe", "deepseek_v3")}


@settings(max_examples=20)
@given(st.sampled_from(sorted(_SOME)), st.data())
def test_every_tensor_that_is_read_counts(family: str, data: st.DataObject) -> None:
    config, tensors = _SOME[family]
    before = simulate(config, tensors)
    name = data.draw(st.sampled_from([n for n in tensors if n not in before.unread]))
    after = simulate(config, {n: kind for n, kind in tensors.items() if n != name})
    assert not after.whole


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
    try:
        answer = simulate(config, changed, Setting(tp=data.draw(st.sampled_from([1, 2]))))
    except NotSimulated as reason:  # of a name that nobody recorded, or of codes in moved rows
        said = str(reason)
        assert other.format(name) in said or "its class moves rows" in said
    else:
        assert answer.refused is not None or answer.parameters


def gptq(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The folder with its experts in GPTQ's packing."""
    made: Tensors = {}
    for name, kind in tensors.items():
        if ".experts." not in name:
            made[name] = kind
            continue
        rows, columns = kind.shape
        stem = name.removesuffix("weight")
        made[f"{stem}qweight"] = TensorType("I32", (columns // 8, rows))
        made[f"{stem}scales"] = TensorType("BF16", (columns // 128, rows))
        made[f"{stem}qzeros"] = TensorType("I32", (columns // 128, rows // 8))
    block = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
             "dynamic": {"-:.*self_attn.*": {}}}  # fmt: skip
    return {**config, "quantization_config": block}, made


def test_experts_in_gptqs_packing() -> None:
    for tp in (1, 2):
        answer = simulate(*gptq(*folder("qwen3_moe")), Setting(tp=tp, rank=tp - 1))
        assert answer.whole
        assert all(name.endswith("_bias") for name in answer.unwritten)


_CONFIGS = [
    folder("glm4_moe", fp8=True),
    integers(*folder("glm4_moe"), ".experts.", 32, ignore=LINEARS),
    folder("qwen3_5_moe"),
    folder("deepseek_v3"),
    gptq(*folder("qwen3_moe")),
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
        simulate(config, tensors, setting)


# --- Commands ------------------------------------------------------------------------------------


@pytest.mark.big
def test_a_model_of_ninety_thousand_tensors() -> None:
    config, tensors = large()
    answer = simulate(config, tensors, Setting(tp=2, rank=1))
    assert answer.whole
    assert answer.unread == ()


def test_it_answers_without_torch() -> None:
    code = (
        "import sys; import qconvert.runtimes.vllm.simulator; "
        "print([m for m in ('torch', 'numpy', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_runtimes_are_asked() -> None:
    config, tensors = folder("qwen3_moe", fp8=True)
    said = loads(config, tensors, {})
    assert tuple(said) == (*SIMULATED, "transformers")
    assert tuple(said["vllm"].sizes[""]) == (1, 2, 4)
    assert "not at tp 8" in said["vllm"].failed
    whole = served(Offered(config, tensors), Setting(tp=2), Consumer("vllm"))
    assert whole.nbytes == said["vllm"].sizes[""][2]


def test_what_is_not_simulated_is_said(tmp_path: Path) -> None:
    """In the plan, in --json and in the card, a line for each runtime, with the cause."""
    model = published("qwen3_moe", fp8=True)
    model.config["architectures"] = ["OtherForCausalLM"]
    where, out = model.write(tmp_path / "other"), tmp_path / "out"
    causes = dict.fromkeys(
        ("sglang 0.5.23", "vllm 0.33.0"),
        "not known for OtherForCausalLM: not recorded: --loader PYTHON asks it",
    )
    said = [f"{name} (H200): {cause}" for name, cause in causes.items()]
    planned = run_cli("dequant", where, out, "--dry-run")
    lines = [line[8:] for line in planned.out.splitlines() if line.startswith("loads ")]
    assert lines == said
    report = json.loads(run_cli("dequant", where, out, "--dry-run", "--json").out)
    assert report["loads"] == said
    assert run_cli("dequant", where, out, "--jobs", "1").code == 0
    text = (out / "README.md").read_text()
    for name, cause in causes.items():
        assert f"{name}: {cause}." in text.replace("\\", "")
    doubt = text.index("Not known for `OtherForCausalLM`: whether sglang 0.5.23 and vllm 0.33.0 ")
    assert doubt < text.index("--model-path REPO\n")  # without a size
    assert doubt < text.index("vllm serve REPO\n")
    assert "loads it whole" not in text


def test_a_size_that_is_not_simulated_is_said() -> None:
    """FP8 blocks of experts that two ranks' shares cut too small; one rank's is simulated."""
    config, tensors = folder("qwen3_moe", fp8=True)
    config = {**config, "moe_intermediate_size": 48}
    narrow = {
        name: TensorType(
            one.dtype, tuple(48 if n == 256 and ".experts." in name else n for n in one.shape)
        )
        for name, one in tensors.items()
    }
    said = loads(config, narrow, {})["vllm"]
    assert said.unknown.startswith(("not known for Qwen3MoeForCausalLM: ", "at tp "))
    assert said.lines()[-1] == f"vllm 0.33.0 (H200): {said.unknown}"


def test_validate_for_vllm(tmp_path: Path) -> None:
    where = published("glm4_moe", fp8=True).write(tmp_path / "glm")
    done = run_cli("validate", where, "--for", "vllm==0.33.0", "--tp", "2", "--pp", "2", "--json")
    report = json.loads(done.out)
    assert (done.code, report["findings"]) == (0, [])
    assert any("vllm 0.33.0 loads the folder whole" in text for text in report["proved"])
    again = run_cli("validate", where, "--for", "vllm", "--tp", "3", "--json")
    assert again.code == 3
    assert {found["rule"] for found in json.loads(again.out)["findings"]} == {"QC130"}


def test_advise_for_vllm(tmp_path: Path) -> None:
    where = published("glm4_moe", fp8=True).write(tmp_path / "glm")
    done = run_cli("advise", where, "--for", "vllm", "--gpus", "2")
    assert done.code == 0
    assert "nothing: serve it as it is" in done.out
    assert f"vllm serve {where} --tensor-parallel-size 2" in done.out.replace("'", "")


# --- Not known ------------------------------------------------------------------------------------

VERSIONS = ["9.9", "0.5.23.post1", "0.5.23rc1", "0.5.23.dev0", "0.5", "0.5.21", "0.5.23.1"]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_a_class_that_is_not_simulated_has_an_exit_code(
    runtime: str, form: str, tmp_path: Path
) -> None:
    model = published("qwen3_moe")
    model.config["architectures"] = ["OtherForCausalLM"]
    where = model.write(tmp_path / "other")
    done = run_cli("validate", where, "--for", runtime, "--format", form)
    why = "not known for OtherForCausalLM: not recorded: --loader PYTHON asks it"
    assert done.code == 5
    assert f"{runtime} 0" not in done.out.replace(why, "")  # no word of a version's proof
    if form == "text":
        last = f"0 errors, 0 warnings; whether it loads is {why}"
        assert done.out.rstrip().splitlines()[-1] == last
    else:
        report = json.loads(done.out)
        assert (report["verdict"], report["exit_code"]) == ("not known", 5)
        assert report["not_known"] == why
    assert run_cli("validate", where).code == 0
    advice = run_cli("advise", where, "--for", runtime, "--json")
    assert advice.code == 5
    assert json.loads(advice.out)["not_known"] == why
    assert json.loads(advice.out)["lines"] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_not_answered_with_the_proof_of_another(version: str, tmp_path: Path) -> None:
    where = published("qwen3_moe").write(tmp_path / "sound")
    done = run_cli("validate", where, "--for", f"sglang=={version}")
    assert done.code == 5
    assert "loads the folder whole: " not in done.out
    last = done.out.rstrip().splitlines()[-1]
    known = "this version is not known; known are sglang 0.5.22 and 0.5.23"
    said = f"not known for sglang {version}: {known}"
    assert last == f"0 errors, 0 warnings; whether it loads is {said}"
    advice = run_cli("advise", where, "--for", f"sglang=={version}")
    assert advice.code == 5
    assert said in advice.out
    assert "launch_server" not in advice.out


@pytest.mark.parametrize("version", ["0.5.23", "v0.5.23", "0.5.23.0", "0.5.23+cu128"])
def test_the_same_version_in_another_spelling_is_answered(version: str, tmp_path: Path) -> None:
    where = published("qwen3_moe").write(tmp_path / "sound")
    assert run_cli("validate", where, "--for", f"sglang=={version}").code == 0
    assert run_cli("validate", where, "--for", "vllm==0.33.1").code == 5


def test_errors_come_before_what_is_not_known(tmp_path: Path) -> None:
    model = published("qwen3_moe")
    model.config["architectures"] = ["OtherForCausalLM"]
    model.config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    done = run_cli("validate", model.write(tmp_path / "broken"), "--for", "sglang")
    assert done.code == 3
    assert "; whether it loads is not known for " in done.out.splitlines()[-1]


def test_a_folder_made_for_a_version_that_is_not_known(tmp_path: Path) -> None:
    """Neither its plan nor its card says what another version does."""
    where, out = published("qwen3_5_moe").write(tmp_path / "model"), tmp_path / "out"
    done = run_cli("fuse", where, out, "--for", "sglang==9.9", "--dry-run")
    assert run_cli("fuse", where, out, "--for", "sglang==9.9", "--jobs", "1").code == 0
    loads_lines = [line for line in done.out.splitlines() if line.startswith("loads ")]
    assert "sglang 9.9 (H200): not known for sglang 9.9: this version is not kno" in loads_lines[0]
    text = (out / "README.md").read_text()
    assert "sglang 0.5.23 on H200s" not in text
    assert text.index("whether sglang 9.9") < text.index("sglang.launch_server")


def test_a_draft_alone_is_started_with_a_caveat_where_nothing_is_known(tmp_path: Path) -> None:
    where, out = published("glm4_moe").write(tmp_path / "model"), tmp_path / "out"
    assert run_cli("mtp", "extract", where, out, "--jobs", "1").code == 0
    text = (out / "README.md").read_text()
    assert text.index("sglang.launch_server") < text.index("whether vllm 0.33.0")
    assert text.index("whether vllm 0.33.0") < text.index("vllm serve MODEL")


def test_one_place_writes_launch_lines_and_asks_simulators() -> None:
    """What else printed one would not say what is known of the class."""
    root = Path(qconvert.__file__).parent
    allowed = {
        "runtimes/serving.py", "runtimes/ktransformers.py", "contrib/trtllm_gen/layout.py",
    }  # fmt: skip
    words = re.compile(r"launch_server|vllm serve|\bserved\(|loads at tensor")
    asked = re.compile(r"\bdraft_alone\(")  # validators read that of a config themselves
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if words.search(text := path.read_text())
        or (asked.search(text) and "validators" not in path.parts)
    }
    assert found <= allowed, found - allowed


def packed(**weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "num_bits": 4, "group_size": 128} | weights,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
# Quantization configs that vLLM 0.33 refuses as it reads them, and neighbours that it may take.
REFUSED = [
    packed(actorder="group"), packed(actorder="dynamic"), packed(actorder=True), GPTQ | {"sym": False},
    GPTQ | {"sym": False, "bits": 8}, GPTQ | {"desc_act": True}, GPTQ | {"bits": 3}, GPTQ | {"bits": 2},
    GPTQ | {"dynamic": {"+:.*down.*": {"desc_act": True}}},
    GPTQ | {"dynamic": {".*down.*": {"desc_act": True, "group_size": 32}}},
    GPTQ | {"desc_act": True, "group_size": -1, "dynamic": {"+:.*up.*": {"group_size": 64}}},
]  # fmt: skip
TAKEN = [
    packed(), packed(actorder="weight"), packed(actorder="static"), packed(symmetric=False), GPTQ,
    GPTQ | {"bits": 8}, GPTQ | {"desc_act": True, "group_size": -1},
    GPTQ | {"dynamic": {"-:.*down.*": {"desc_act": True}}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForConditionalGeneration"])
def test_quantization_that_is_refused_whatever_the_class(name: str) -> None:
    for block in REFUSED:
        said = loads({"architectures": [name], "quantization_config": block}, {}, {})["vllm"]
        assert (said.verdict, said.draft) == ("does not load", ""), block
        assert "not at any tp: config.json: " in said.failed
    for block in TAKEN:
        said = loads({"architectures": [name], "quantization_config": block}, {}, {})["vllm"]
        assert said.verdict == "not known", block


_AT, _EXPERT = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts.0.down_proj"
_INT8 = {"type": "int", "num_bits": 8, "strategy": "channel"}
_TOKENS = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
_FP8 = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}


def _stated(form: str | None, weights: Any, inputs: Any = None, **block: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    own = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"0": group}}
    return own | block


# The same, for what a linear or an expert has: the config, the tensor, a part of the answer.
UNSERVED = [
    (GPTQ | {"group_size": 16}, f"{_AT}.qweight", "groups of 16 columns"),
    (GPTQ | {"group_size": 256}, f"{_AT}.qweight", "groups of 256 columns"),
    (_stated("int-quantized", _INT8), f"{_AT}.weight_scale", "no input_activations are stated"),
    (_stated("int-quantized", _INT8), f"{_EXPERT}.weight_scale", "no input_activations are stated"),
    (_stated(None, _INT8), f"{_AT}.weight_scale", "there is no class for integers of 8 bits"),
    (_stated(None, _INT8, _TOKENS), f"{_AT}.weight_scale", "there is no class for integers"),
    (_stated("int-quantized", _INT8 | {"symmetric": False}, _TOKENS), f"{_AT}.weight_scale", "no class"),
    (_stated("int-quantized", _INT8, _FP8), f"{_AT}.weight_scale", "no class"),
    (
        _stated("float-quantized", {"type": "float", "strategy": "group", "group_size": 128}),
        f"{_AT}.weight_scale", "there is no class for floats of 8 bits",
    ),
]  # fmt: skip
SERVED = [
    (GPTQ | {"group_size": 64}, f"{_AT}.qweight"),
    (GPTQ | {"group_size": 16}, f"{_EXPERT}.qweight"),
    (GPTQ | {"group_size": 16, "dynamic": {"+:.*": {"group_size": 32}}}, f"{_AT}.qweight"),
    (_stated("int-quantized", _INT8, _TOKENS), f"{_AT}.weight_scale"),
    (_stated("pack-quantized", _INT8), f"{_AT}.weight_scale"),
    (_stated("pack-quantized", _INT8, _TOKENS), f"{_AT}.weight_scale"),
    (
        _stated("pack-quantized", {"type": "int", "num_bits": 4, "group_size": 128}, _FP8),
        f"{_AT}.weight_scale",
    ),
    (
        _stated("float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}),
        f"{_AT}.weight_scale",
    ),
    (_stated(None, _INT8, ignore=["re:.*down_proj"]), f"{_AT}.weight_scale"),
    (_stated(None, _INT8), f"{_EXPERT}.weight_scale"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForConditionalGeneration"])
def test_forms_that_no_class_or_kernel_takes(name: str) -> None:
    for block, tensor, why in UNSERVED:
        config = {"architectures": [name], "quantization_config": block}
        said = loads(config, {tensor: TensorType("BF16", (256, 1))}, {})["vllm"]
        assert said.verdict == "does not load", block
        assert why in said.failed
    for block, tensor in SERVED:
        config = {"architectures": [name], "quantization_config": block}
        said = loads(config, {tensor: TensorType("BF16", (256, 1))}, {})["vllm"]
        assert said.verdict == "not known", block


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"num_bits": 8, "group_size": 128, "symmetric": False}, "8 bits with zero points"),
        ({"num_bits": 4, "group_size": 8}, "groups of 8 columns"),
        ({"num_bits": 4, "strategy": "channel"}, "a hidden size that 128 divides"),
        ({"num_bits": 4, "group_size": 128, "symmetric": False}, ""),
        ({"num_bits": 4, "group_size": 16}, ""),
        ({"num_bits": 4, "group_size": -2}, None),
    ],
)
def test_integers_without_a_kernel(weights: dict[str, Any], why: str | None) -> None:
    """Experts and linears of a class that is simulated."""
    config, tensors = folder("qwen3_moe")
    config["quantization_config"] = _stated("pack-quantized", {"type": "int"} | weights)
    if why is None:
        with pytest.raises(NotSimulated):
            simulate(config, tensors)
        return
    if "hidden" in why:
        config["hidden_size"] += 64
    refused = str(simulate(config, tensors).refused)
    assert why in refused if why else "kernel" not in refused


def test_a_dense_model_in_a_form_that_is_refused(tmp_path: Path) -> None:
    model = published("qwen3_5_text")
    model.config["architectures"] = ["OtherForCausalLM"]
    where, out = model.write(tmp_path / "dense"), tmp_path / "out"
    words = ("--rtn", "--packing", "gptq-v2", "--asymmetric", "--targets", "Linear", "--jobs", "1")
    assert run_cli("w4a16", where, out, *words).code == 0
    assert "vllm serve" not in (out / "README.md").read_text()
    done = run_cli("validate", out, "--for", "vllm", "--json")
    assert done.code == 3
    assert [found["rule"] for found in json.loads(done.out)["findings"]] == ["QC130"]
