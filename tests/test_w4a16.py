"""`qconvert w4a16`: what is taken and what is left, what the config says of both, which sizes are
refused and with which advice, and that every form is read back as what it means.

The oracle for reading is int_forms.py (words taken apart one field at a time); that transformers and
llm-compressor agree: test_w4a16_peer.py and test_w4a16_rtn_peer.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import int_forms
import numpy as np
import pytest
from checkpoints import Model, Tensor, edit_json, read_tensors, run_cli, unjudged
from int_forms import bf16_bits, to_array, weight
from loaders.published import published
from models import bf16, deepseek_v3, qwen3_moe, with_exponents

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.roles import Kind
from qconvert.models.experts import STALE_RULE
from qconvert.passes.ranks import loads_at
from qconvert.passes.selection import Sized
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.recipe.recipe import parse_recipe
from qconvert.runtimes.ktransformers import reads_as_it_is

FORMS: dict[str, list[str]] = {
    "W4": [],
    "W4 asymmetric": ["--asymmetric", "--group-size", "32"],
    "W8": ["--bits", "8", "--group-size", "channel"],
    "W8 asymmetric": ["--bits", "8", "--group-size", "64", "--asymmetric"],
    "gptq": ["--packing", "gptq"],
    "gptq-v2": ["--packing", "gptq-v2"],
    "gptq-v2 asymmetric": ["--packing", "gptq-v2", "--asymmetric", "--group-size", "32"],
    "gptq W8": ["--packing", "gptq", "--bits", "8", "--group-size", "channel"],
}


def ordinary() -> Model:
    """Heavy tails, and nothing that fp16 scales or asymmetric ranges cannot hold."""
    model = qwen3_moe()
    for number, (name, (_, shape, _)) in enumerate(model.tensors.items()):
        if len(shape) == 2:
            data = bytes(weight(*shape, number).data)
            model.tensors[name] = Tensor("BF16", shape, data)
    return model


def rtn(source: Path, out: Path, *options: str) -> Path:
    done = run_cli("w4a16", source, out, "--rtn", *options, "--jobs", "1")
    assert done.code == 0, done.err
    return out


def refused(source: Path, out: Path, *options: str) -> str:
    done = run_cli("w4a16", source, out, "--rtn", *options, "--jobs", "1")
    assert (done.code, out.exists()) == (1, False)
    return done.err


def quantization(folder: Path) -> dict[str, Any]:
    block: dict[str, Any] = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    return block


def parts_of(tensors: dict[str, Tensor], module: str) -> dict[str, Any]:
    found = {}
    for name, value in tensors.items():
        if name.startswith(f"{module}.") and value.dtype != "I64":
            kind = TensorType(value.dtype, value.shape)
            found[name.removeprefix(f"{module}.")] = to_array(value.data, kind)
    return found


def meaning(folder: Path, module: str) -> Any:
    """The bf16 bits of a packed matrix, by the oracle."""
    block, parts = quantization(folder), parts_of(read_tensors(folder), module)
    if block["quant_method"] == "gptq":
        version = 1 if block["checkpoint_format"] == "gptq" else 2
        return bf16_bits(int_forms.from_gptq(parts, block["bits"], version))
    bits = block["config_groups"]["group_0"]["weights"]["num_bits"]
    columns = 32 // bits * parts["weight_packed"].shape[1]
    return bf16_bits(int_forms.from_compressed_tensors(parts, bits, columns))


def decoded(folder: Path, source: Model) -> Model:
    """The folder as a checkpoint of bf16 weights."""
    found = dict(source.tensors)
    for name, value in source.tensors.items():
        module = name.removesuffix(".weight")
        if ".mlp.experts." in name and name.endswith(".weight"):
            found[name] = Tensor("BF16", value.shape, meaning(folder, module).tobytes())
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    return Model(config, found)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_what_it_means(form: str, tmp_path: Path) -> None:
    """The CPU kernel's folder of a packed model is that of the same model in bf16."""
    model = ordinary()
    out = rtn(model.write(tmp_path / "source"), tmp_path / "out", *FORMS[form])
    plain = decoded(out, model).write(tmp_path / "plain")
    made = []
    for source in (out, plain):
        into = tmp_path / f"cpu-{source.name}"
        done = run_cli("amx", source, into, "--method", "int8", "--numa", "2", "--jobs", "1")
        assert done.code == 0, done.err
        made.append(read_tensors(into))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "form",
    [
        form if form in ("W4", "gptq-v2 asymmetric") else pytest.param(form, marks=pytest.mark.big)
        for form in FORMS
    ],
)
def test_workers_and_memory_change_nothing(form: str, tmp_path: Path) -> None:
    source = ordinary().write(tmp_path / "source")
    first = read_tensors(rtn(source, tmp_path / "a", *FORMS[form]))
    done = run_cli(
        "w4a16", source, tmp_path / "b", "--rtn", *FORMS[form], "--jobs", "2", "--memory", "300MiB"
    )
    assert done.code == 0, done.err
    assert read_tensors(tmp_path / "b") == first


def test_fp8_linears_beside_packed_experts_are_read(tmp_path: Path) -> None:
    """Both forms of the config: two groups, and, for scales that are exponents, one that all linears are
    FP8 by. `dequant` gives of the packed folder's linears what it gives of the source's."""
    for name, model in (
        ("deepseek", deepseek_v3()),
        ("mixed", qwen3_moe("fp8", bf16_modules=("1.self_attn.o_proj",))),
        ("exponents", with_exponents(qwen3_moe("fp8"))),
    ):
        source = model.write(tmp_path / name)
        out = rtn(source, tmp_path / f"{name}-w4a16")
        block, exponents = quantization(out), name == "exponents"
        assert ("linear_fp8_config" in block) is exponents
        assert ("group_1" in block["config_groups"]) is not exponents
        kept = {n.rpartition(".")[2] for n in read_tensors(out) if ".self_attn." in n}
        assert ("weight_scale_inv" in kept) is exponents
        assert ("weight_scale" in kept) is not exponents
        cpu = run_cli(
            "amx", out, tmp_path / f"{name}-cpu", "--method", "int4", "--numa", "1", "--jobs", "1"
        )
        assert cpu.code == 0, cpu.err
        before, after = tmp_path / f"{name}-bf16", tmp_path / f"{name}-w4a16-bf16"
        for folder, into in ((source, before), (out, after)):
            # The packed experts stay packed, and no config says so any more: the command line refuses.
            unjudged("passes: [dequant]", folder, into)
        expected, found = read_tensors(before), read_tensors(after)
        others = {n for n in expected if ".mlp.experts." not in n}
        assert {n: found[n] for n in others} == {n: expected[n] for n in others}
        assert not any(n.endswith("_scale_inv") for n in found)


# --- what is taken, and what the config says ----------------------------------------------------


def test_by_default_the_experts_alone(tmp_path: Path) -> None:
    model = qwen3_moe()
    out = rtn(model.write(tmp_path / "source"), tmp_path / "out")
    tensors = read_tensors(out)
    for name, value in model.tensors.items():
        assert (name in tensors) is (".mlp.experts." not in name)
        if name in tensors:
            assert tensors[name] == value
    block = quantization(out)
    assert block["config_groups"]["group_0"]["targets"] == [r"re:.*\.mlp\.experts\..*"]
    assert set(block["config_groups"]) == {"group_0"}
    assert "model.layers.0.self_attn.q_proj" in block["ignore"]


def test_linears_are_taken_where_targets_say_so(tmp_path: Path) -> None:
    model = qwen3_moe()
    out = rtn(model.write(tmp_path / "source"), tmp_path / "out", "--targets", "Linear")
    tensors = read_tensors(out)
    packed = {name.removesuffix(".weight_packed") for name in tensors if name.endswith("_packed")}
    linears = {
        name.removesuffix(".weight")
        for name, value in model.tensors.items()
        if "_proj.weight" in name and len(value.shape) == 2
    }
    assert packed == linears
    block = quantization(out)
    assert block["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert set(block["ignore"]) == {
        "model.embed_tokens", "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate",
    }  # fmt: skip


def test_what_is_ignored_stays_and_is_listed(tmp_path: Path) -> None:
    model = qwen3_moe()
    out = rtn(
        model.write(tmp_path / "source"), tmp_path / "out", "--targets", "Linear", "--ignore",
        r"re:.*\.layers\.0\.self_attn\..*", "--ignore", "1.self_attn.o_proj",
    )  # fmt: skip
    tensors, ignored = read_tensors(out), quantization(out)["ignore"]
    for module in (*(f"0.self_attn.{n}_proj" for n in "qkvo"), "1.self_attn.o_proj"):
        name = f"model.layers.{module}"
        assert tensors[f"{name}.weight"] == model.tensors[f"{name}.weight"]
        assert name in ignored
    assert "model.layers.1.self_attn.q_proj.weight_packed" in tensors


def test_attention_alone_leaves_the_experts(tmp_path: Path) -> None:
    model = qwen3_moe()
    target = r"re:.*self_attn\..*"
    out = rtn(model.write(tmp_path / "source"), tmp_path / "out", "--targets", target)
    tensors, block = read_tensors(out), quantization(out)
    assert all(tensors[n] == v for n, v in model.tensors.items() if ".mlp." in n)
    assert sum(name.endswith(".weight_packed") for name in tensors) == 8
    (pattern,) = (entry for entry in block["ignore"] if entry.startswith("re:"))
    for name in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts.3.down_proj"):
        assert re.match(pattern[3:], name)
    assert not re.match(pattern[3:], "model.layers.0.self_attn.q_proj")


def test_fp8_linears_that_are_targets_become_integers(tmp_path: Path) -> None:
    """Latent attention keeps what runtimes take apart or join; that stays FP8, a group of its own."""
    out = rtn(deepseek_v3().write(tmp_path / "source"), tmp_path / "out", "--targets", "Linear",
              "--group-size", "32")  # fmt: skip
    tensors, block = read_tensors(out), quantization(out)
    attn = "model.layers.0.self_attn"
    assert {f"{attn}.q_b_proj.weight_packed", f"{attn}.o_proj.weight_packed"} <= tensors.keys()
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        assert tensors[f"{attn}.{name}.weight"].dtype == "F8_E4M3"
        assert f"{attn}.{name}.weight_scale" in tensors
    targets = block["config_groups"]["group_0"]["targets"]
    assert {r"re:.*\.mlp\.experts\..*", f"{attn}.o_proj"} <= set(targets)
    assert "Linear" not in targets
    assert block["config_groups"]["group_1"]["targets"] == ["Linear"]
    assert "linear_fp8_config" not in block
    draft = "model.layers.2.self_attn.o_proj"
    assert tensors[f"{draft}.weight"].dtype == "F8_E4M3", "a draft layer's linears stay"
    assert "model.layers.2.mlp.experts.0.up_proj.weight_packed" in tensors


def test_gptq_drafts_have_no_group_indices(tmp_path: Path) -> None:
    """vLLM's draft classes fail with them. They are read and validated without."""
    source = published("glm4_moe", inner=128).write(tmp_path / "source")
    out = rtn(source, tmp_path / "out", "--packing", "gptq")
    tensors = read_tensors(out)
    packed = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    drafts = {module for module in packed if module.startswith("model.layers.3.")}
    assert drafts
    assert drafts < packed
    ordered = {name.removesuffix(".g_idx") for name in tensors if name.endswith(".g_idx")}
    assert ordered == packed - drafts
    checked = run_cli("validate", out, "--against", source, "--level", "full")
    assert checked.code == 0, checked.out
    cpu = run_cli("amx", out, tmp_path / "cpu", "--method", "int4", "--numa", "1", "--jobs", "1")
    assert cpu.code == 0, cpu.err


def test_gptq_names_drafts_as_runtimes_ask_for_them(tmp_path: Path) -> None:
    """No pattern spells `mtp`, at which vLLM builds the whole draft of Qwen3.5 unquantized."""
    for family, left in (
        ("qwen3_5_moe_text", "mtp.layers.0.self_attn.q_proj"),
        ("qwen3_next", "model.layers.0.self_attn.qkv_proj"),
        ("glm4_moe", "model.decoder.self_attn.qkv_proj"),
    ):
        source = published(family, inner=128).write(tmp_path / family)
        words = ("--packing", "gptq", "--targets", "Linear", "--tp", "1")
        patterns = quantization(rtn(source, tmp_path / f"{family} out", *words))["dynamic"]
        assert not any("mtp" in pattern for pattern in patterns)
        assert any(re.match(pattern.removeprefix("-:"), left) for pattern in patterns)


@pytest.mark.parametrize(("form", "stated"), [("gptq", "gptq"), ("gptq-v2", "gptq_v2")])
def test_a_gptq_config_says_its_version_and_leaves_the_rest(
    form: str, stated: str, tmp_path: Path
) -> None:
    source = ordinary().write(tmp_path / "source")
    out = rtn(source, tmp_path / "experts", "--packing", form, "--group-size", "128")
    block = quantization(out)
    assert block["checkpoint_format"] == stated
    expected = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False}
    assert {key: block[key] for key in expected} == expected
    (pattern,) = (key.removeprefix("-:") for key in block["dynamic"])
    layer = "model.layers.0"
    for name in (f"{layer}.self_attn.qkv_proj", f"{layer}.mlp.gate", "lm_head"):
        assert re.match(pattern, name)
    for name in (f"{layer}.mlp.experts", f"{layer}.mlp.experts.1.up_proj"):
        assert not re.match(pattern, name)
    parts = parts_of(read_tensors(out), f"{layer}.mlp.experts.0.down_proj")
    zeros = {"gptq": 0x77777777, "gptq_v2": -0x77777778}[stated]
    assert np.all(parts["qzeros"] == zeros)
    assert parts["scales"].dtype == np.float16
    assert np.array_equal(parts["g_idx"], np.arange(256) // 128)


def test_a_gptq_config_of_linears_names_fused_ones_too(tmp_path: Path) -> None:
    source = ordinary().write(tmp_path / "source")
    out = rtn(source, tmp_path / "out", "--packing", "gptq", "--targets", "Linear", "--ignore",
              "re:.*0.self_attn.[qkv]_proj")  # fmt: skip
    (pattern,) = (key.removeprefix("-:") for key in quantization(out)["dynamic"])
    for name in ("qkv_proj", "q_proj"):
        assert re.match(pattern, f"model.layers.0.self_attn.{name}")
    for name in ("0.self_attn.o_proj", "1.self_attn.qkv_proj", "0.mlp.experts"):
        assert not re.match(pattern, f"model.layers.{name}")


# --- what is refused, and with which advice -----------------------------------------------------


def test_part_of_what_is_fused_is_refused(tmp_path: Path) -> None:
    source = qwen3_moe().write(tmp_path / "source")
    err = refused(source, tmp_path / "out", "--targets", "Linear", "--ignore", "q_proj")
    assert "q_proj is not; runtimes make one layer of them: target or ignore both" in err
    err = refused(source, tmp_path / "out", "--ignore", "re:.*experts.1.*")
    assert "'model.layers.0.mlp.experts.1.down_proj' is no target or is ignored" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--targets", "Linear", "--targets", "no_proj"], "'no_proj' matches no weight"),
        (["--targets", "lm_head"], "'lm_head' matches no weight that can be quantized"),
        (["--packing", "gptq", "--asymmetric"], "take gptq-v2, or symmetric weights"),
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str], says: str, tmp_path: Path) -> None:
    source = qwen3_moe().write(tmp_path / "source")
    assert says in refused(source, tmp_path / "out", *options)


def test_gptq_has_no_place_for_fp8(tmp_path: Path) -> None:
    source = deepseek_v3().write(tmp_path / "source")
    err = refused(source, tmp_path / "out", "--packing", "gptq")
    assert "is FP8, and GPTQ's form has no place for it: dequantize" in err


def test_a_tensor_parallel_size_is_checked_and_the_group_that_loads_is_named(
    tmp_path: Path,
) -> None:
    """256 columns in groups of 128 are two ranks' at most; in groups of 32, eight."""
    source = qwen3_moe().write(tmp_path / "source")
    err = refused(source, tmp_path / "out", "--tp", "4", "--group-size", "128")
    assert "group 32 fits at 4; ranks get whole ones of this at 1, 2\n" in err
    err = refused(source, tmp_path / "out", "--tp", "16", "--group-size", "128")
    assert "no group size fits at 16; ranks get whole ones of this at 1, 2\n" in err
    rtn(source, tmp_path / "out", "--tp", "8", "--group-size", "32")


def test_the_plan_says_at_which_sizes_it_loads(tmp_path: Path) -> None:
    source = qwen3_moe().write(tmp_path / "source")
    words = ("--rtn", "--group-size", "128", "--dry-run")
    done = run_cli("w4a16", source, tmp_path / "out", *words)
    assert (
        "ranks get whole groups at tensor parallel 1, 2, groups of 32 would be whole at 1, 2, 4, 8\n"
        in done.out
    )
    done = run_cli("w4a16", source, tmp_path / "out", "--rtn", "--asymmetric", "--dry-run")
    assert "no experts so in sglang" in done.out


# (I / tp) % group, for the intermediate sizes of published models.
@pytest.mark.parametrize(
    ("size", "at_128", "at_32"),
    [
        (2048, [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
        (1536, [1, 2, 4], [1, 2, 4, 8, 16]),
        (1024, [1, 2, 4, 8], [1, 2, 4, 8, 16]),
        (512, [1, 2, 4], [1, 2, 4, 8, 16]),
        (1408, [1], [1, 2, 4]),
    ],
)
def test_sizes_of_published_models(size: int, at_128: list[int], at_32: list[int]) -> None:
    at = "model.layers.0.mlp.experts.0"
    matrices = [
        Sized(f"{at}.down_proj", Kind.EXPERT_DOWN, 4096, size),
        Sized(f"{at}.up_proj", Kind.EXPERT_UP, size, 4096),
    ]
    for group, expected in ((128, at_128), (32, at_32)):
        assert loads_at(matrices, ExpertsToW4A16(group).grid) == expected


def test_zero_points_are_dealt_out_in_whole_words() -> None:
    """96 rows are 12 a rank of eight: one word and a half, where 4-bit zero points are packed along
    them. A word of 8-bit ones is four."""
    rows = [Sized("up_proj", Kind.EXPERT_UP, 96, 256)]
    for step, expected in (
        (ExpertsToW4A16(), [8]),
        (ExpertsToW4A16(packing="gptq"), []),
        (ExpertsToW4A16(symmetric=False), []),
        (ExpertsToW4A16(bits=8, symmetric=False), [8]),
    ):
        assert loads_at(rows, step.grid, (8,)) == expected
    assert not loads_at([rows[0]._replace(rows=90)], ExpertsToW4A16().grid, (4,))
    narrow = Sized("o_proj", Kind.OUTPUT, 256, 160)
    assert not loads_at([narrow], ExpertsToW4A16(None, 8).grid, (2,))


def test_columns_that_are_no_groups_are_refused_or_left(tmp_path: Path) -> None:
    """Experts cannot be left; of another linear the option leaves it, with what is fused to it."""
    narrow = qwen3_moe(intermediate=192).write(tmp_path / "narrow")
    for options in ([], ["--leave-bf16"]):
        err = refused(narrow, tmp_path / "out", "--group-size", "128", *options)
        assert re.search(r"down_proj: .* 128\b.*, found 192; group 32 is", err)
    model = qwen3_moe()
    for name in ("q_proj", "k_proj", "v_proj"):
        module = f"model.layers.0.self_attn.{name}.weight"
        model.tensors |= bf16(module, 64, 96)
    source = model.write(tmp_path / "source")
    words = ("--targets", "Linear", "--group-size", "128")
    err = refused(source, tmp_path / "out", *words)
    assert "found 96; group 32 is supported, or --leave-bf16 leaves such a matrix as it is" in err
    out = rtn(source, tmp_path / "out", *words, "--leave-bf16")
    tensors, ignored = read_tensors(out), quantization(out)["ignore"]
    for name in ("q_proj", "k_proj", "v_proj"):
        module = f"model.layers.0.self_attn.{name}"
        assert tensors[f"{module}.weight"] == model.tensors[f"{module}.weight"]
        assert module in ignored


def test_what_stays_packed_is_refused(tmp_path: Path) -> None:
    """Attention was packed before, in a form whose config has no place for another."""
    source = ordinary().write(tmp_path / "source")
    packed = ("--targets", r"re:.*self_attn\..*", "--packing", "gptq-v2")
    first = rtn(source, tmp_path / "first", *packed)
    err = refused(first, tmp_path / "out")
    assert "self_attn.k_proj.qweight' is packed already and is no target" in err
    again = rtn(first, tmp_path / "again", "--targets", "Linear", "--bits", "8")
    assert "model.layers.0.self_attn.k_proj.weight_packed" in read_tensors(again)


def test_a_model_nobody_has_described_is_refused(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.config["model_type"] = "unheard_of"
    source = model.write(tmp_path / "source")
    for target in ("experts", "Linear"):
        assert "'unheard_of' is not known" in refused(source, tmp_path / "out", "--targets", target)


def test_what_has_no_known_role_is_left(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.tensors |= bf16("model.layers.0.extra.weight", 64, 128)
    out = rtn(model.write(tmp_path / "source"), tmp_path / "out", "--targets", "Linear")
    assert read_tensors(out)["model.layers.0.extra.weight"].dtype == "BF16"
    assert "model.layers.0.extra" in quantization(out)["ignore"]


def test_rounding_must_be_asked_for(tmp_path: Path) -> None:
    source = qwen3_moe().write(tmp_path / "source")
    done = run_cli("w4a16", source, tmp_path / "out")
    assert (done.code, "--rtn" in done.err) == (2, True)
    assert run_cli("w4a16", source, tmp_path / "out", "--rtn", "--dry-run").code == 0


def test_a_recipe_has_all_options(tmp_path: Path) -> None:
    source = qwen3_moe().write(tmp_path / "source")
    done = run_cli(
        "w4a16", source, tmp_path / "out", "--rtn", "--bits", "8", "--group-size", "channel",
        "--packing", "gptq-v2", "--asymmetric", "--targets", "Linear", "--ignore", "lm_head", "--tp",
        "2", "--leave-bf16", "--print-recipe",
    )  # fmt: skip
    (step,) = parse_recipe(done.out, "printed").passes
    assert step == ExpertsToW4A16(
        None, 8, False, None, "gptq-v2", True, targets=("Linear",), ignore=("lm_head",), tp=2
    )


def test_actorder_needs_calibration(tmp_path: Path) -> None:
    plan = Plan.identity(Checkpoint.open(qwen3_moe().write(tmp_path / "source")))
    with pytest.raises(PlanError, match="or calibrate"):
        run_passes(plan, [ExpertsToW4A16(actorder="static")])


# --- reading what others wrote ------------------------------------------------------------------


def test_what_kt_kernel_reads_of_integers(tmp_path: Path) -> None:
    source = ordinary().write(tmp_path / "source")
    methods = {
        form: reads_as_it_is(Checkpoint.open(rtn(source, tmp_path / f"{number}", *FORMS[form])))
        for number, form in enumerate(FORMS)
    }
    assert methods == {
        "W4": None, "W4 asymmetric": None, "W8": None, "W8 asymmetric": None,
        "gptq": "GPTQ_INT4", "gptq-v2": "GPTQ_INT4", "gptq-v2 asymmetric": None, "gptq W8": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        ("W4 asymmetric", {"symmetric": True}, "the config says symmetric: one of them is wrong"),
        ("W4", {"symmetric": "yes"}, "expected symmetric true or false, found 'yes'"),
        ("W8", {"num_bits": 4}, "expected"),
        ("gptq", {"bits": 9}, "2 to 8 bits, found 9"),
        ("gptq", {"group_size": 0}, "expected a group_size, found 0"),
        ("gptq", {"group_size": 16}, "in groups of 16"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq or gptq_v2, found 'marlin'"),
        ("gptq", {"dynamic": {"-:.*experts.*": {}}}, "leaves 'model.layers.0.mlp.experts"),
        ("gptq", {"dynamic": {"+:.*experts.*": {"group_size": 0}}}, "a group_size, found 0"),
        ("gptq", {"dynamic": {"+:.*experts.*": 8}}, "expected settings for dynamic"),
        ("gptq", {"dynamic": {"+:*": {"bits": 8}}}, "is not a valid regular expression"),
        (
            "gptq",
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "expected AWQ version gemm",
        ),
    ],
)
def test_what_the_config_says_wrongly_is_refused(
    form: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    out = rtn(ordinary().write(tmp_path / "source"), tmp_path / "out", *FORMS[form])

    def edit(config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        if "config_groups" in block:
            block = block["config_groups"]["group_0"]["weights"]
        block.update(change)

    edit_json(out / "config.json", edit)
    done = run_cli("amx", out, tmp_path / "cpu", "--method", "int4", "--numa", "1", "--jobs", "1")
    assert done.code == 1
    assert says in done.err


@pytest.mark.parametrize("command", ["w4a16", "nvfp4"])
def test_what_described_the_old_weights_goes(command: str, tmp_path: Path) -> None:
    """Scales of activations that were static FP8, of a linear too, and side files of a quantization."""
    model = qwen3_moe()
    scale = Tensor("F32", (), np.float32(0.5).tobytes())
    for name in [name for name in model.tensors if name.endswith("o_proj.weight")]:
        shape = model.tensors[name].shape
        model.tensors[name] = Tensor("F8_E4M3", shape, b"\x38" * (shape[0] * shape[1]))
        model.tensors[f"{name}_scale"] = scale
        model.tensors[f"{name.removesuffix('weight')}input_scale"] = scale
    model.config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    model.side_files["quantize_config.json"] = b"{}"
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    if command == "w4a16":
        rtn(source, out, "--targets", "Linear")
    else:
        done = run_cli(
            "nvfp4", source, out, "--dialect", "compressed-tensors", "--targets", "Linear"
        )
        assert done.code == 0, done.err
    assert [name for name in read_tensors(out) if name.endswith("input_scale")] == []
    dropped = json.loads((out / "qconvert.json").read_bytes())
    assert STALE_RULE in dropped["dropped"]
    assert not (out / "quantize_config.json").exists()
    assert "quantize_config.json" in dropped["dropped_files"]
