"""`--kv-scale`: one constant for keys and values of each layer, under the names that loaders read (the
loaders themselves: tests/loaders), beside a config that says so."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bf16_moe, edit_json, ran, read_tensors, refused, run_cli, tensor
from loaders.published import published
from sampled import sampled

from qconvert import api
from qconvert.core.errors import PlanError
from qconvert.passes.kv_scale import KvScale
from qconvert.passes.replace_weights import OF_CACHE_RULE, replace_weights
from qconvert.plan.plan import LogEntry, Plan

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
COMMANDS = {
    "fp8": ("fp8",),
    "rows": ("fp8", "--channel"),
    "modelopt": ("nvfp4", "--dialect", "modelopt"),
    "int8": ("int8",),
    "w4a16": ("w4a16", "--rtn"),
    "nvfp4": ("nvfp4", "--dialect", "compressed-tensors"),
}


def made(
    folder: Path, *words: str, family: str = "qwen3_moe", value: str = "0.375"
) -> tuple[Path, Path]:
    source = folder / "source"
    if not source.exists():
        published(family).write(source)
    out = folder / "out"
    ran(words[0], source, out, *words[1:], "--kv-scale", value, "--jobs", "1")
    return source, out


@pytest.mark.parametrize("form", sampled(COMMANDS, 2))
def test_each_layer_has_two_scales_and_the_config_says_so(form: str, tmp_path: Path) -> None:
    source, out = made(tmp_path, *COMMANDS[form])
    scales = {n: t for n, t in read_tensors(out).items() if n.endswith((".k_scale", ".v_scale"))}
    assert sorted(scales) == [
        f"model.layers.{layer}.self_attn.{which}_proj.{which}_scale"
        for layer in range(2) for which in "kv"
    ]  # fmt: skip
    for scale in scales.values():
        assert (scale.dtype, scale.shape, scale.data) == ("F32", (), struct.pack("<f", 0.375))
    config = json.loads((out / "config.json").read_bytes())["quantization_config"]
    modelopt = {key: SCHEME[key] for key in ("num_bits", "type", "dynamic")}
    wanted = {"fp8": None, "modelopt": modelopt}.get(config["quant_method"], SCHEME)
    assert config.get("kv_cache_scheme") == wanted
    if form == "modelopt":
        stated = json.loads((out / "hf_quant_config.json").read_bytes())["quantization"]
        assert stated["kv_cache_quant_algo"] == "FP8"
    assert "`--kv-cache-dtype fp8_e4m3` keeps keys and values" in (out / "README.md").read_text()
    done = run_cli("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    assert done.code == 0, done.out
    assert "proved: scales of activations and of the KV cache are those of the source" in done.out


@pytest.mark.parametrize("family", ["qwen3_5_moe", "glm4_moe", "deepseek_v3"])
def test_draft_layers_and_linear_attention_have_none(family: str, tmp_path: Path) -> None:
    # Of latent attention, only 1 is right.
    _, out = made(tmp_path, "fp8", family=family, value="1" if family == "deepseek_v3" else "0.5")
    scales = [name for name in read_tensors(out) if name.endswith(".k_scale")]
    index = api.open_checkpoint(out).role_index
    attention = {
        place.layer for name, place in index.places.items()
        if ".self_attn." in name and not index.family.is_mtp(name, index.dims)
    }  # fmt: skip
    assert {int(name.split("layers.")[1].split(".")[0]) for name in scales} == attention
    assert len(scales) == len(attention) > 0


def test_the_plan_says_which_class_reads_none_of_them(tmp_path: Path) -> None:
    source = published("qwen3_moe").write(tmp_path / "source")
    done = run_cli("fp8", source, tmp_path / "out", "--kv-scale", "1", "--dry-run")
    assert "divided by the constant 1, found from no data" in done.out
    assert "--kv-cache-dtype fp8_e4m3" in done.out
    unread = [line for line in done.out.splitlines() if "does not read" in line]
    assert len(unread) == 1
    assert "sglang" in unread[0]
    assert "4 scales of the KV cache" in unread[0]
    assert "sglang 0.5.23 (H200) at tp 1, 2, 4" in done.out


def test_a_recipe_is_the_same(tmp_path: Path) -> None:
    source, out = made(tmp_path, "fp8", "--channel")
    words = ("fp8", source, out, "--channel", "--kv-scale", "0.375", "--print-recipe")
    (tmp_path / "recipe.yaml").write_text(run_cli(*words).out)
    ran("run", tmp_path / "recipe.yaml", source, tmp_path / "again", "--jobs", "1")
    assert read_tensors(tmp_path / "again") == read_tensors(out)


def test_another_quantization_still_states_them(tmp_path: Path) -> None:
    """Scales that a source has stay, and a config that does not state them would have none read them."""
    _, source = made(tmp_path, "fp8", "--channel")
    out = tmp_path / "again"
    ran("w4a16", source, out, "--rtn", "--targets", "Linear", "--group-size", "32", "--jobs", "1")
    block = json.loads((out / "config.json").read_bytes())["quantization_config"]
    assert block["kv_cache_scheme"] == SCHEME
    held = [name for name in read_tensors(out) if name.endswith(".k_scale")]
    assert len(held) == 2
    done = run_cli("validate", out, "--against", source, "--level", "full")
    assert (done.code, "QC111" in done.out) == (0, False), done.out


def test_a_gain_of_a_name_like_theirs_stays(tmp_path: Path) -> None:
    """A vector may be the model's own."""
    names = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"
    model = bf16_moe()
    model.tensors |= {names[0]: tensor("F32", 8), names[1]: tensor("F32")}
    plan = Plan.identity(api.open_checkpoint(model.write(tmp_path / "source")))
    entry = LogEntry("any", {}, 1, None)
    done = replace_weights(plan, entry, plan.tensors, dropped={})
    assert [name in done.tensors for name in names] == [True, False]
    assert done.dropped == {names[1]: OF_CACHE_RULE}


def test_dequant_leaves_them_out(tmp_path: Path) -> None:
    """vLLM ends the load of an unquantized folder that has them, and sglang passes over them."""
    _, out = made(tmp_path, "fp8", "--channel")
    back = tmp_path / "back"
    said = ran("dequant", out, back, "--dry-run").out
    ran("dequant", out, back, "--jobs", "1")
    assert not [name for name in read_tensors(back) if name.endswith((".k_scale", ".v_scale"))]
    assert "loads   vllm 0.33.0 (H200) at tp 1" in said, said
    (names,) = json.loads((back / "qconvert.json").read_bytes())["dropped"].values()
    assert len(names) == 4
    done = run_cli("validate", back, "--against", out, "--level", "full")
    assert "0 errors, 0 warnings" in done.out, done.out


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_value_that_is_no_scale_is_refused(value: float) -> None:
    with pytest.raises(PlanError, match="above 0"):
        KvScale(value)


def test_what_cannot_have_them_is_refused(tmp_path: Path) -> None:
    source = published("qwen3_moe").write(tmp_path / "source")
    words = ("w4a16", source, tmp_path / "out", "--rtn", "--packing", "gptq", "--kv-scale", "1")
    assert "quant_method 'gptq' has no scales of a KV cache" in refused(*words)
    model = bf16_moe()
    model.tensors["model.layers.0.self_attn.k_proj.k_scale"] = tensor("F32")
    assert "k_proj.k_scale': scales of a KV cache are there already" in refused(
        "fp8", model.write(tmp_path / "has"), tmp_path / "out", "--kv-scale", "1"
    )


def test_a_config_that_is_silent_is_a_warning(tmp_path: Path) -> None:
    _, out = made(tmp_path, "fp8", "--channel")

    def forget(config: dict[str, Any]) -> None:
        del config["quantization_config"]["kv_cache_scheme"]

    edit_json(out / "config.json", forget)
    report = api.validate(out, level="headers")
    (found,) = [finding for finding in report.findings if finding.rule == "QC111"]
    assert found.severity == "warning"
    assert "sglang reads none of them" in found.message
