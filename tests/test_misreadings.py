"""What classes of runtimes are known to misread is said by plan, card, `validate --for` and `advise`,
and is not written for a runtime that is asked for (their loaders: tests/loaders/test_misreadings.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import read_tensors, run_cli
from families.tiny import saved

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loading.setting import NotSimulated, Setting
from qconvert.runtimes.misreadings import (
    fp8_experts,
    integer_groups,
    misread,
    misread_of_ranks,
    refused_by_gpu,
)
from qconvert.runtimes.serving import Offered, loads, served

_AT = "model.layers.0.self_attn"
_LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models") / "llama", {})


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Mistral3ForConditionalGeneration",
     "InternLM3ForCausalLM", "Ministral3ForCausalLM", "VoxtralForConditionalGeneration"],
)  # fmt: skip
def test_block_scales_that_are_looked_for_under_another_name(name: str) -> None:
    config = {"architectures": [name]}
    scale = f"{_AT}.o_proj.weight_scale_inv"
    blocks = {f"{_AT}.o_proj.weight": TensorType("F8_E4M3", (256, 256)),
              scale: TensorType("F32", (2, 2))}  # fmt: skip
    assert misread("sglang", config, blocks).unread == (scale,)
    assert not misread("vllm", config, blocks)
    assert not misread("sglang", {"architectures": ["Qwen2ForCausalLM"]}, blocks)
    # A scale a matrix has that name in Mistral's own releases, and is what the class looks for.
    assert not misread("sglang", config, {scale: TensorType("F32", ())})
    answer = served(Offered(config, blocks), Setting())
    assert not answer.whole
    assert answer.cure


def test_a_text_model_by_its_config() -> None:
    scale = {f"language_model.{_AT}.o_proj.weight_scale_inv": TensorType("F32", (2, 2))}
    config = {"architectures": ["LlavaForConditionalGeneration"]}
    assert misread("sglang", {**config, "text_config": {"model_type": "mistral"}}, scale)
    assert not misread("sglang", {**config, "text_config": {"model_type": "qwen2"}}, scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_experts_in_gptq_packing_have_scales_of_another_type(
    method: str, dtype: str | None
) -> None:
    scale = "model.layers.0.mlp.experts.0.up_proj.scales"
    tensors = {
        scale: TensorType("F16", (2, 256)),
        f"{_AT}.q_proj.scales": TensorType("F16", (2, 64)),
    }
    config = {"quantization_config": {"quant_method": method}, "dtype": dtype}
    concerned = method == "gptq" and dtype != "float16"
    found = misread("sglang", config, tensors)
    assert [*found.wrong] == [scale] * concerned
    assert ("--packing compressed-tensors" in found.cure) == concerned
    assert misread("sglang", {"text_config": config, **config}, tensors) == found
    assert not misread("vllm", config, tensors)


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_experts_of_which_a_rank_has_one_group(form: str) -> None:
    """Their first scales are put into another order, with four ranks and with no others; those of a
    layer whose experts have other groups are not."""
    at, other = (f"model.layers.{layer}.mlp.experts.0" for layer in (0, 1))
    packed = form == "compressed-tensors"
    codes, scales = ("weight_packed", "weight_scale") if packed else ("qweight", "scales")
    tensors = {}
    for part, groups in (("gate_proj", 16), ("up_proj", 16), ("down_proj", 4)):
        shape = (512, groups) if packed else (groups, 512)
        tensors[f"{at}.{part}.{codes}"] = TensorType("I32", (512, 64))
        tensors[f"{at}.{part}.{scales}"] = TensorType("BF16", shape)
        finer = (512, 4 * groups) if packed else (4 * groups, 512)
        tensors[f"{other}.{part}.{codes}"] = TensorType("I32", (512, 64))
        tensors[f"{other}.{part}.{scales}"] = TensorType("BF16", finer)
    config: dict[str, Any] = {"dtype": "float16"}
    for runtime, concerned in (("vllm", True), ("sglang", not packed)):
        for ranks in (1, 2, 4, 8):
            found = misread_of_ranks(runtime, integer_groups(runtime, config, tensors), ranks)
            wrong = [f"{at}.{part}.{scales}" for part in ("gate_proj", "up_proj")]
            assert [*found.wrong] == (wrong if concerned and ranks == 4 else [])
            assert bool(found.cure) == bool(found.wrong)
    codes_of_floats = {name: TensorType("U8", one.shape) if "packed" in name else one
                       for name, one in tensors.items()}  # fmt: skip
    if packed:
        assert not misread_of_ranks("vllm", integer_groups("vllm", config, codes_of_floats), 4)


def test_experts_in_fp8_on_a_gpu_without_its_units() -> None:
    """Triton has no E4M3 there, and sglang no Marlin for experts; linear layers have it."""
    kind = TensorType("F8_E4M3", (256, 256))
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors = {f"{_AT}.q_proj.weight": kind, expert: kind}
    experts = fp8_experts({}, tensors)
    assert experts == (expert,)
    for runtime, capability, refused in (
        ("sglang", (8, 0), True),
        ("sglang", (8, 6), True),
        ("sglang", (8, 9), False),
        ("vllm", (8, 0), False),
    ):
        found = refused_by_gpu(runtime, experts, capability)
        assert (found is not None) == refused
        assert found is None or found.where == expert
    assert refused_by_gpu("sglang", (), (8, 0)) is None


def test_a_size_at_which_experts_are_read_wrong(tmp_path: Path) -> None:
    """A plan names the sizes at which it is served right, and the one at which it is not."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 512, "head_dim": 64,
             "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    source = saved("qwen3_moe", tmp_path / "source", {}, sizes)
    done = run_cli("w4a16", source, tmp_path / "out", "--rtn", "--dry-run")
    said = next(
        line for line in done.out.splitlines() if "vllm 0.33.0" in line and "not at" in line
    )
    assert "not at tp 2" in said
    assert "order of a single group" in said
    assert "--enable-expert-parallel" in said
    assert ", or smaller groups, or start vllm" in said
    finer = ("w4a16", source, tmp_path / "finer", "--rtn", "--group-size", "32", "--dry-run")
    (told,) = (
        line for line in run_cli(*finer).out.splitlines() if "vllm 0.33.0 (H200) not at" in line
    )
    assert "not at tp 8" in told
    assert "or groups of 16 (in a recipe `w4a16: {group_size: 16}`)" in told
    assert run_cli("w4a16", source, tmp_path / "out", "--rtn", "--jobs", "1").code == 0
    for more, code in ((("--tp", "2"), 3), (("--tp", "1"), 0), (("--tp", "2", "--ep", "2"), 0)):
        found = run_cli("validate", tmp_path / "out", "--for", "vllm", *more)
        assert found.code == code, (more, found.out, found.err)


# Tensors of q_proj, and of which runtimes read them in the order of the matrix's rows.
ROWS: dict[str, tuple[dict[str, tuple[str, tuple[int, ...]]], tuple[str, ...]]] = {
    "bf16": ({"weight": ("BF16", (256, 256))}, ("sglang", "vllm")),
    "fp8 blocks": (
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale_inv": ("F32", (2, 2))}, ("sglang", "vllm"),
    ),
    "fp8 blocks of fewer rows than a head": (
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale_inv": ("F32", (8, 2))}, (),
    ),
    "fp8 rows": (
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("BF16", (256, 1))}, ("vllm",),
    ),
    "fp8 tensor": (
        {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (1,))}, ("sglang", "vllm"),
    ),
    "w4a16": (
        {"weight_packed": ("I32", (256, 32)), "weight_scale": ("BF16", (256, 2)),
         "weight_shape": ("I64", (2,))}, ("vllm",),
    ),
    "w4a16 asymmetric": (
        {"weight_packed": ("I32", (256, 32)), "weight_scale": ("BF16", (256, 2)),
         "weight_zero_point": ("I32", (32, 2))}, (),
    ),
    "nvfp4": (
        {"weight_packed": ("U8", (256, 128)), "weight_scale": ("F8_E4M3", (256, 16)),
         "weight_global_scale": ("F32", (1,))}, ("vllm",),
    ),
    "gptq": (
        {"qweight": ("I32", (32, 256)), "scales": ("F16", (2, 256)), "qzeros": ("I32", (2, 32)),
         "g_idx": ("I32", (256,))}, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("part", ["q_proj", "k_proj"])
def test_rows_that_are_moved_without_their_scales(form: str, part: str) -> None:
    config = _LLAMA4
    if part == "k_proj":
        config = {**config, "text_config": {**config["text_config"], "num_key_value_heads": 4}}
    stated, right = ROWS[form]
    tensors = {
        f"language_model.{_AT}.{part}.{leaf}": TensorType(*one) for leaf, one in stated.items()
    }
    for runtime in ("sglang", "vllm"):
        assert bool(misread(runtime, config, tensors)) is (runtime not in right)
    # Other projections, and the tower's, keep their order.
    for other in (f"language_model.{_AT}.v_proj", f"vision_model.{_AT}.q_proj"):
        alike = {f"{other}.{leaf}": TensorType(*one) for leaf, one in stated.items()}
        assert not misread("sglang", config, alike)


def test_experts_of_a_text_model_that_has_none() -> None:
    experts = {"model.layers.0.feed_forward.experts.gate_up_proj": TensorType("BF16", (4, 64, 64))}
    assert misread("sglang", {"architectures": ["Llama4ForCausalLM"]}, experts)
    assert not misread("sglang", _LLAMA4, experts)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8"])
def test_experts_that_are_computed_with_without_scales(dtype: str) -> None:
    config = {"architectures": ["AfmoeForCausalLM"]}
    expert = "model.layers.1.mlp.experts.0.up_proj"
    codes = {f"{expert}.weight": TensorType(dtype, (256, 256))}
    assert set(misread("sglang", config, codes).wrong) == set(codes)
    packed = {f"{expert}.weight_packed": TensorType("I32", (256, 32))}
    assert misread("sglang", config, packed).unread == tuple(packed)
    assert not misread("vllm", config, codes)
    shared = {"model.layers.1.mlp.shared_experts.up_proj.weight": TensorType(dtype, (256, 256))}
    assert not misread("sglang", config, shared)
    assert not misread("sglang", config, {f"{expert}.weight": TensorType("BF16", (256, 256))})


@pytest.mark.parametrize(
    ("runtime", "name"), [("sglang", "OlmoeForCausalLM"), ("vllm", "Zamba2ForCausalLM")]
)
def test_a_class_that_runs_in_one_stage(runtime: str, name: str) -> None:
    answer = served(Offered({"architectures": [name]}, {}), Setting(pp=2), Consumer(runtime))
    assert answer.verdict == "does not load"
    assert answer.refused is not None
    assert "one pipeline stage only" in str(answer.refused.refused)
    with pytest.raises(NotSimulated):
        served(Offered({"architectures": [name]}, {}), Setting(), Consumer(runtime))


def test_a_folder_that_is_misread(llama: Path, tmp_path: Path) -> None:
    made = run_cli("fp8", llama, tmp_path / "out", "--jobs", "1")
    assert made.code == 0, made.err
    assert "sglang 0.5.23 (H200) does not load it right" in made.err
    assert "--for sglang" in made.err
    assert "launch_server" not in (tmp_path / "out" / "README.md").read_text()
    checked = run_cli("validate", tmp_path / "out", "--for", "sglang")
    assert checked.code == 3
    assert "weight_scale_inv" in checked.out
    advice = run_cli("advise", tmp_path / "out", "--for", "sglang")
    assert "would not be read" in advice.out


def test_what_a_class_reads_is_written_for_it(llama: Path, tmp_path: Path) -> None:
    made = run_cli("fp8", llama, tmp_path / "out", "--for", "sglang", "--jobs", "1")
    assert made.code == 0, made.err
    names = read_tensors(tmp_path / "out")
    assert not [name for name in names if name.endswith("_scale_inv")]
    assert any(name.endswith("q_proj.weight_scale") for name in names)
    other = run_cli("fp8", llama, tmp_path / "other", "--for", "vllm", "--jobs", "1")
    assert other.code == 0, other.err
    assert any(name.endswith("_scale_inv") for name in read_tensors(tmp_path / "other"))
    # A published one, too, which is otherwise refused as what it is already.
    again = run_cli("fp8", tmp_path / "other", tmp_path / "again", "--for", "sglang", "--jobs", "1")
    assert again.code == 0, again.err
    assert not [name for name in read_tensors(tmp_path / "again") if name.endswith("_scale_inv")]
    refused = run_cli("fp8", llama, tmp_path / "none", "--ue8m0", "--for", "sglang")
    assert refused.code == 1
    assert "weight_scale_inv" in refused.err


def test_sizes_are_not_said_of_a_folder_that_is_misread() -> None:
    config = {"architectures": ["LlamaForCausalLM"]}
    scales = {f"{_AT}.o_proj.weight_scale_inv": TensorType("F32", (2, 2))}
    said = loads(config, scales, {})["sglang"]
    assert said.verdict == "does not load"
    assert not said.sizes


_MLP, _MLA = "model.layers.0.mlp", "model.layers.0.self_attn"
_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
# Rows of matrices in FP8 blocks of 128, and which of them puts what follows out of step.
PARTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "heads": ({f"{_AT}.{p}_proj": n for p, n in zip("qkv", (576, 192, 192), strict=True)},
              ("q_proj", "k_proj")),
    "keys alone": ({f"{_AT}.{p}_proj": n for p, n in zip("qkv", (512, 64, 64), strict=True)},
                   ("k_proj",)),
    "gate and up": ({f"{_MLP}.gate_proj": 704, f"{_MLP}.up_proj": 704}, ("gate_proj",)),
    "a shared expert": ({f"{_MLP}.shared_experts.gate_proj": 320,
                         f"{_MLP}.shared_experts.up_proj": 320}, ("gate_proj",)),
    "latent": ({f"{_MLA}.q_a_proj": 192, f"{_MLA}.kv_a_proj_with_mqa": 576}, ("q_a_proj",)),
    "the last of latent ones": ({f"{_MLA}.q_a_proj": 256, f"{_MLA}.kv_a_proj_with_mqa": 576}, ()),
    "stored as one": ({f"{_AT}.qkv_proj": 960}, ("qkv_proj",)),
    "gate and up stored as one": ({f"{_MLP}.gate_up_proj": 1408}, ("gate_up_proj",)),
    "whole blocks": ({f"{_AT}.qkv_proj": 1920, f"{_MLP}.gate_up_proj": 512}, ()),
    "alone": ({f"{_AT}.o_proj": 576, f"{_MLP}.down_proj": 576}, ()),
    "routed": ({f"{_MLP}.experts.0.gate_proj": 192, f"{_MLP}.experts.0.up_proj": 192}, ()),
}  # fmt: skip
BLOCKS: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"weights": {"strategy": "block", "block_structure": [128, 128]}}}},
]  # fmt: skip


@pytest.mark.parametrize("block", BLOCKS, ids=["fp8", "compressed-tensors"])
@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_fused_matrices_that_cut_blocks(
    parts: str, runtime: str, block: dict[str, Any]
) -> None:
    rows, cut = PARTS[parts]
    tensors = {f"{name}.weight": TensorType("F8_E4M3", (n, 256)) for name, n in rows.items()}
    config = {"architectures": ["Qwen2ForCausalLM"], **_HEADS, "quantization_config": block}
    found = misread(runtime, config, tensors)
    assert {name.split(".")[-2] for name in found.wrong} == set(cut)
    assert bool(found.cure) == bool(cut)
    channel = {"quant_method": "compressed-tensors", "config_groups": {
        "group_0": {"weights": {"strategy": "channel"}}}}  # fmt: skip
    assert not misread(runtime, {**config, "quantization_config": channel}, tensors)


def test_a_plan_of_odd_heads_says_that_no_rank_gets_whole_blocks(tmp_path: Path) -> None:
    odd = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576}
    where, out = saved("qwen2", tmp_path / "odd", {}, odd), tmp_path / "out"
    done = run_cli("fp8", where, out, "--dry-run")
    assert "ranks get whole blocks at none of the usual tensor-parallel sizes" in done.out
    assert "192 rows, no whole blocks of 128, and runtimes fuse it" in done.out
    assert [line[8:23] for line in done.out.splitlines() if line.startswith("loads ")]
    assert "does not load it right: " in done.out
    refused = run_cli("fp8", where, out, "--tp", "1", "--dry-run")
    assert (refused.code, "at tensor parallel 1 a rank would not" in refused.err) == (1, True)
    assert run_cli("fp8", where, out, "--jobs", "1").code == 0
    text = (out / "README.md").read_text()
    assert "launch_server" not in text
    assert "vllm serve" not in text
    assert run_cli("validate", out, "--for", "vllm").code == 3
    channel = run_cli("fp8", where, tmp_path / "rows", "--channel", "--dry-run")
    assert "ranks get whole rows at tensor parallel 1" in channel.out
