"""Who loads a result: versions of --for are read, and cards name only what loads the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gdn_models
import pytest
from checkpoints import bf16_moe, run_cli, tensor

from qconvert.core.errors import PlanError
from qconvert.hub.card import split_front_matter
from qconvert.hub.card.front import command, library, takers
from qconvert.runtimes.consumers import CHECKED, parse_consumer
from qconvert.runtimes.serving import loads

# --- Versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["banana", "", "0.5.x", "1..2", "0.5.23 ", "-1", "9" * 5000])
@pytest.mark.parametrize("words", [("fuse",), ("unfuse",), ("split", "--pp", "2,2")])
def test_what_is_no_version_is_a_usage_error(
    version: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    name, *options = words
    done = run_cli(name, tmp_path, tmp_path / "out", *options, "--for", f"sglang=={version}")
    assert done.code == 2
    assert "is not a version of sglang" in done.err


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_a_model_class_has_no_version(name: str, tmp_path: Path) -> None:
    done = run_cli("fuse", tmp_path, tmp_path / "out", "--for", f"{name}==1.0")
    assert done.code == 2
    assert "is a model class and has no version" in done.err


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        ("sglang==0.5.23", True), ("sglang==0.5.23.post1", True), ("sglang==0.5.23+cu128", True),
        ("sglang==0.5.23rc1", False), ("sglang==0.4.1", False), ("sglang==0.5", False),
        ("vllm==0.33.0", True), ("vllm==0.33.2", True), ("vllm==0.34", False),
        ("transformers==5.17.0", True), ("transformers==5.17.0.dev0", False), ("sglang", True),
    ],
)  # fmt: skip
def test_versions_are_compared_with_what_was_checked(text: str, checked: bool) -> None:
    said = parse_consumer(text).unchecked
    assert (said is None) == checked
    name, _, version = text.partition("==")
    if said is not None:
        assert said == (
            f"the rules were checked with {name} {CHECKED[name]}; {version} was not checked"
        )


@pytest.mark.parametrize("how", ["fuse", "recipe", "split"])
def test_an_unchecked_version_is_said_aloud(how: str, tmp_path: Path) -> None:
    source, out = gdn_models.model("qwen3_5_moe_text").write(tmp_path / "source"), tmp_path / "out"
    (tmp_path / "mine.yaml").write_text("passes:\n- fuse: {consumer: sglang==0.4.1}\n")
    words: dict[str, tuple[Any, ...]] = {
        "fuse": ("fuse", source, out, "--for", "sglang==0.4.1", "--dry-run"),
        "recipe": ("plan", tmp_path / "mine.yaml", source, out),
        "split": ("split", source, out, "--pp", "2,2", "--for", "sglang==0.4.1", "--dry-run"),
    }
    done = run_cli(*words[how])
    assert done.code == 0, done.err
    assert "the rules were checked with sglang 0.5.23; 0.4.1 was not checked" in done.out


def test_a_version_in_a_recipe_that_is_none(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("passes:\n- fuse: {consumer: sglang==banana}\n")
    done = run_cli("plan", recipe, tmp_path)
    assert done.code in (1, 2)
    assert f"{recipe}:2" in done.err
    assert "is not a version of sglang" in done.err
    with pytest.raises(PlanError):
        parse_consumer("sglang==")


# --- Cards ----------------------------------------------------------------------------------------


def readme(folder: Path) -> tuple[dict[str, Any], str]:
    return split_front_matter((folder / "README.md").read_text(encoding="utf-8"))


def test_what_is_fused_for_sglang_is_not_called_transformers(tmp_path: Path) -> None:
    model = gdn_models.model("qwen3_5_moe")
    model.side_files["README.md"] = b"---\nlibrary_name: transformers\n---\n# A model\n"
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    assert run_cli("fuse", source, out, "--for", "sglang", "--jobs", "1").code == 0
    front, text = readme(out)
    assert front["library_name"] == "sglang"
    assert "sglang.launch_server" in text
    assert "vllm serve" not in text
    assert "from_pretrained" not in text


def test_groups_of_ones_own_are_said_to_be_loaded_by_nothing(tmp_path: Path) -> None:
    source, out = gdn_models.model("qwen3_5_moe_text").write(tmp_path / "s"), tmp_path / "out"
    assert run_cli("fuse", source, out, "--groups", "2", "--jobs", "1").code == 0
    front, text = readme(out)
    assert "library_name" not in front
    assert "No released runtime is known to load it" in text
    assert "fused in 2 groups" in text
    assert "sglang.launch_server" not in text


def test_what_all_load_is_called_transformers(tmp_path: Path) -> None:
    source, out = gdn_models.model("qwen3_next").write(tmp_path / "source"), tmp_path / "out"
    assert run_cli("unfuse", source, out, "--for", "qwen3.5", "--jobs", "1").code == 0
    front, text = readme(out)
    assert front["library_name"] == "transformers"
    assert "It has the model class `qwen3_5_moe_text`" in text


@pytest.mark.parametrize(("runtime", "other"), [("sglang", "vllm"), ("vllm", "sglang")])
def test_a_stage_is_for_the_runtime_it_is_cut_for(runtime: str, other: str, tmp_path: Path) -> None:
    """vLLM wants embeddings in every stage, and transformers would make up the other layers."""
    out = tmp_path / "out"
    source = bf16_moe().write(tmp_path / "source")
    assert run_cli("split", source, out, "--pp", "1,1", "--for", runtime, "--jobs", "1").code == 0
    for folder in sorted(out.iterdir()):
        front, text = readme(folder)
        assert front["library_name"] == runtime
        assert f"{runtime.upper()}_PP_LAYER_PARTITION=1,1" in text
        assert other.upper() not in text
        assert "from_pretrained" not in text
        assert ("--pp-size 2" if runtime == "sglang" else "--pipeline-parallel-size 2") in text


MANIFEST: dict[str, Any] = {"passes": [], "family": "qwen3_moe"}
INT4 = {"type": "int", "num_bits": 4, "symmetric": True}


# Of whose experts the quantization may be.
SPARSE = {"experts": 8}


def block(**weights: Any) -> dict[str, Any]:
    groups = {"config_groups": {"group_0": {"weights": {**INT4, **weights}}}}
    return {"quantization_config": {"quant_method": "compressed-tensors", **groups}}


@pytest.mark.parametrize(
    ("changes", "config", "by", "name"),
    [
        ({}, {}, ("sglang", "vllm", "transformers"), "transformers"),
        ({}, block(), ("sglang", "vllm", "transformers"), "transformers"),
        ({}, block(symmetric=False), ("sglang", "vllm", "transformers"), "transformers"),
        (SPARSE, block(symmetric=False), ("vllm",), "vllm"),
        (SPARSE, block(actorder="group"), ("sglang",), "sglang"),
        (SPARSE, block(type="float"), ("sglang", "vllm"), "sglang"),
        ({}, block(type="float"), ("sglang", "vllm", "transformers"), "transformers"),
        ({}, {"quantization_config": {"quant_method": "modelopt"}}, ("sglang", "vllm"), "sglang"),
        ({"trtllm_gen": {}}, {}, (), None),
        ({"amx": {"method": "AMXINT4"}}, {}, ("ktransformers",), "ktransformers"),
    ],
)
def test_who_may_take_what(
    changes: dict[str, Any], config: dict[str, Any], by: tuple[str, ...], name: str | None
) -> None:
    made = {**MANIFEST, **changes}
    said = loads({"architectures": ["OtherForCausalLM"], **config}, {}, made)
    assert takers(made, said, "not known") == by
    assert not [one for one in said.values() if one.verdict == "loads"]
    assert library(made, said) == name


def test_a_shared_expert_beside_quantized_ones_keeps_its_form() -> None:
    """sglang fuses it with the routed ones by default and then reads none of its weights."""
    config = {
        "model_type": "glm4_moe", "n_shared_experts": 1, "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    group = {"targets": [r"re:.*\.mlp\.experts\..*"], "weights": {"type": "int", "num_bits": 4}}
    block: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    apart = {**config, "quantization_config": block}
    assert "--disable-shared-experts-fusion" in command("sglang", MANIFEST, apart)
    alike = {**group, "targets": [*group["targets"], r"re:.*\.shared_experts\..*"]}
    same = {**config, "quantization_config": {**block, "config_groups": {"a": alike}}}
    assert "--disable" not in command("sglang", MANIFEST, same)
    assert "--disable" not in command("sglang", MANIFEST, config)


def test_each_half_of_a_pair_lists_its_own_losses(tmp_path: Path) -> None:
    model = bf16_moe(hidden_size=128, moe_intermediate_size=128)
    for name, held in list(model.tensors.items()):
        if ".experts." in name:
            model.tensors[name] = tensor(held.dtype, 128, 128)
    source, cpu, gpu = model.write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu"
    done = run_cli(
        "kt", source, "--cpu-out", cpu, "--cpu", "int8", "--numa", "1", "--gpu", "w4a16",
        "--gpu-out", gpu, "--jobs", "1",
    )  # fmt: skip
    assert done.code == 0, done.err
    losses = [json.loads((f / "qconvert.json").read_bytes())["lossy_steps"] for f in (cpu, gpu)]
    assert [len(found) for found in losses] == [1, 1]
    (of_cpu,), (of_gpu,) = losses
    assert of_cpu != of_gpu
    assert ";" not in of_cpu + of_gpu
    for folder, own, other in ((cpu, of_cpu, of_gpu), (gpu, of_gpu, of_cpu)):
        text = readme(folder)[1].replace("\\", "")
        assert own in text
        assert other not in text
