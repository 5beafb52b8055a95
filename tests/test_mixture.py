"""Mixtures: steps of one recipe, or conversions of a converted folder, each with a group of its own in
the config. Tensors are those that each step alone writes; what the runtimes' loaders do with them:
tests/loaders/test_mixture.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Tensor, edit_json, ran, read_tensors, refused, run_cli
from loaders.published import published
from made_once import made_once
from sampled import sampled

from qconvert import api
from qconvert.core.errors import PlanError
from qconvert.core.graph import nodes
from qconvert.models.calibrated import calibrated_op
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.samples.request import Calibration

ATTENTION = "re:.*self_attn.*"
# Options of commands that take the attention, and what their group states.
STEPS: dict[str, tuple[tuple[str, ...], str]] = {
    "fp8 by row": (("fp8", "--channel"), "float-quantized"),
    "fp8 by block": (("fp8", "--dialect", "compressed-tensors"), "float-quantized"),
    "int8": (("int8",), "int-quantized"),
    "int8 packed": (("w4a16", "--rtn", "--bits", "8"), "pack-quantized"),
    "nvfp4": (("nvfp4", "--dialect", "compressed-tensors"), "nvfp4-pack-quantized"),
    "mxfp8": (("mx", "--bits", "8"), "mxfp8-quantized"),
}
EXPERTS = ("w4a16", "--rtn", "--group-size", "32")


@pytest.fixture(scope="module")
def source() -> Path:
    return made_once("mixture-source", lambda at: published("qwen3_moe", inner=256).write(at))


def block_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    return found


def converted(source: Path, out: Path, words: tuple[str, ...], *more: str) -> Path:
    ran(words[0], source, out, *words[1:], *more, "--jobs", "1")
    return out


def attention(folder: Path) -> dict[str, Tensor]:
    return {name: one for name, one in read_tensors(folder).items() if ".self_attn." in name}


@pytest.mark.parametrize("step", sampled(STEPS, 3))
def test_each_part_is_as_its_step_alone_writes_it(step: str, source: Path, tmp_path: Path) -> None:
    """In either order, with one block but for the order of groups; and judged by all rules."""
    words, form = STEPS[step]
    experts = converted(source, tmp_path / "experts", EXPERTS)
    alone = converted(source, tmp_path / "alone", words, "--targets", ATTENTION)
    first = converted(alone, tmp_path / "first", EXPERTS)
    last = converted(experts, tmp_path / "last", words, "--targets", ATTENTION)
    expected = {**read_tensors(experts), **attention(alone)}
    for name in attention(source).keys() - attention(alone).keys():
        del expected[name]
    assert read_tensors(first) == read_tensors(last) == expected

    one, other = block_of(first), block_of(last)
    assert sorted(one["ignore"]) == sorted(other["ignore"])
    assert (
        one["format"] == other["format"] == "pack-quantized"
    )  # which sglang wants of INT4 experts
    groups = list(one["config_groups"].values())
    assert groups == list(other["config_groups"].values())[::-1]
    assert [group["format"] for group in groups] == ["pack-quantized", form]
    assert "Linear" not in [target for group in groups for target in group["targets"]]
    ran("validate", first, "--against", alone, "--level", "full")
    if step != "int8":  # of which both encoders round alike, but not in the same steps
        ran("dequant", first, tmp_path / "bf16", "--jobs", "1")
        ran("dequant", alone, tmp_path / "bf16-alone", "--jobs", "1")
        assert attention(tmp_path / "bf16") == attention(tmp_path / "bf16-alone")


def test_steps_of_one_recipe(source: Path, tmp_path: Path) -> None:
    """A later step takes what its targets name of what is left."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "passes:\n  - w4a16: {group_size: 32}\n"
        "  - fp8: {dialect: compressed-tensors, block: null, targets: [Linear]}\n"
    )
    ran("run", recipe, source, tmp_path / "out", "--jobs", "1")
    experts = converted(source, tmp_path / "experts", EXPERTS)
    converted(experts, tmp_path / "again", ("fp8", "--channel"), "--targets", ATTENTION)
    made = read_tensors(tmp_path / "out")
    assert made == read_tensors(tmp_path / "again")
    assert made["model.layers.0.self_attn.q_proj.weight"].dtype == "F8_E4M3"
    assert "model.layers.0.mlp.experts.0.up_proj.weight_packed" in made
    assert json.loads((tmp_path / "out/qconvert.json").read_bytes())["tp_sizes"] == [1, 2, 4, 8]


def test_steps_share_a_calibration(source: Path) -> None:
    """Steps that ask for the same have one: each matrix is solved as its own step says, in one run."""
    same = Calibration(synthetic=True, samples=2, length=8)
    steps = (
        ExpertsToW4A16(group_size=64, targets=("o_proj",), calibrate=same),
        ExpertsToW4A16(group_size=32, calibrate=same),
    )
    plan = run_passes(Plan.identity(api.open_checkpoint(source)), steps)
    assert plan.calibration is not None
    assert plan.calibration.linears
    assert plan.calibration.request == replace(same, propagated_error="ignore")
    assert plan.facts["calibration"]["propagated_error"] == "ignore"
    found = [calibrated_op(node) for node in nodes(plan.tensors.values())]
    ops = [op for op in found if op is not None]
    groups = {op.kind.rpartition(".")[2]: op.packers[0].scheme_of(128).groups(128) for op in ops}
    assert groups == {"o_proj": 2, "gate_proj": 4, "up_proj": 4, "down_proj": 4}
    assert len({op.request for op in ops}) == 1
    other = replace(steps[1], calibrate=replace(same, samples=3))
    with pytest.raises(PlanError, match="samples 2 there, 3 here"):
        run_passes(Plan.identity(api.open_checkpoint(source)), (steps[0], other))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            ["w4a16: {group_size: 32}", "w4a16: {bits: 8}"],
            ["'experts'", "result of an earlier step"],
        ),
        (
            ["w4a16: {group_size: 32}", "nvfp4: {dialect: modelopt, targets: [Linear]}"],
            ["stays quantized", "dialect (or packing) compressed-tensors"],
        ),
        (["w4a16: {group_size: 32}", "fp8"], ["stays quantized", "compressed-tensors"]),
        (
            [
                "w4a16: {bits: 8, targets: [q_proj, k_proj, v_proj]}",
                "w4a16: {bits: 8, group_size: 32, targets: [up_proj]}",
            ],
            ["down_proj", "other routed experts"],
        ),
        (
            [f"w4a16: {{bits: 8, targets: ['{ATTENTION}'], ignore: [q_proj]}}"],
            ["q_proj"],
        ),
        (
            [
                "w4a16: {bits: 8, targets: [o_proj], calibrate: {synthetic: true}}",
                "w4a16: {group_size: 32, calibrate: {synthetic: true, samples: 9}}",
            ],
            ["one calibration", "samples 512 there, 9 here"],
        ),
        (
            [
                "w4a16: {group_size: 32, calibrate: {synthetic: true}}",
                "w4a16: {bits: 8, targets: [o_proj], calibrate: {synthetic: true}}",
            ],
            ["one calibration", "propagated_error 'correct' there, 'ignore' here"],
        ),
        (["fp8: {targets: [o_proj]}"], ["'o_proj'", "dialect compressed-tensors"]),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    steps: list[str], says: list[str], source: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("passes:\n" + "".join(f"  - {step}\n" for step in steps))
    told = refused("run", recipe, source, tmp_path / "out", "--jobs", "1")
    for part in says:
        assert part in told, told


FIRST, SECOND = (rf"re:.*layers\.{layer}\..*experts.*" for layer in (0, 1))


def experts_of(folder: Path, layer: int) -> dict[str, Tensor]:
    at = f"model.layers.{layer}.mlp.experts."
    return {name: one for name, one in read_tensors(folder).items() if name.startswith(at)}


def test_experts_of_single_layers(source: Path, tmp_path: Path) -> None:
    """Each as its step alone writes them, or as they are; ignored by their layer, and loaded by both."""
    one = converted(source, tmp_path / "one", (*EXPERTS, "--targets", FIRST))
    whole = converted(source, tmp_path / "whole", EXPERTS)
    assert experts_of(one, 0) == experts_of(whole, 0)
    assert experts_of(one, 1) == experts_of(source, 1)
    block = block_of(one)
    assert r"re:.*\.layers\.(?:1)\.mlp\.experts(\..*)?$" in block["ignore"]
    assert block["config_groups"]["group_0"]["targets"] == [
        r"re:.*\.layers\.(?:0)\.mlp\.experts\..*"
    ]
    two = converted(
        one, tmp_path / "two", ("nvfp4", "--dialect", "compressed-tensors"), "--targets", SECOND
    )
    nvfp4 = converted(source, tmp_path / "nvfp4", ("nvfp4", "--dialect", "compressed-tensors"))
    assert experts_of(two, 0) == experts_of(whole, 0)
    assert experts_of(two, 1) == experts_of(nvfp4, 1)
    assert not any("experts" in entry for entry in block_of(two)["ignore"])
    for folder, before in ((one, source), (two, one)):
        ran("validate", folder, "--against", before, "--level", "full")
    for runtime in ("sglang", "vllm==0.33.0"):
        ran("validate", one, "--for", runtime, "--tp", "1")
    ran("dequant", two, tmp_path / "bf16", "--jobs", "1")
    ran("dequant", whole, tmp_path / "whole-bf16", "--jobs", "1")
    assert experts_of(tmp_path / "bf16", 0) == experts_of(tmp_path / "whole-bf16", 0)


@pytest.mark.parametrize(
    "words",
    [
        ("w4a16", "--rtn", "--packing", "gptq", "--targets", FIRST),
        ("nvfp4", "--dialect", "modelopt", "--ignore", FIRST),
    ],
)
def test_experts_of_single_layers_need_a_config_that_has_place(
    words: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    told = refused(words[0], source, tmp_path / "out", *words[1:], "--jobs", "1")
    assert "experts of other layers are not" in told
    assert "compressed-tensors" in told


def test_a_part_of_what_is_quantized_is_quantized_anew(source: Path, tmp_path: Path) -> None:
    """Of a folder in which `Linear` means all: what stays is named."""
    every = ("--targets", "Linear", "--targets", "experts")
    whole = converted(source, tmp_path / "whole", ("w4a16", "--rtn", "--bits", "8"), *every)
    assert [group["targets"] for group in block_of(whole)["config_groups"].values()] == [["Linear"]]
    out = converted(whole, tmp_path / "out", ("fp8", "--channel"), "--targets", ATTENTION)
    first, second = block_of(out)["config_groups"].values()
    assert first["format"] == "float-quantized"
    assert second["targets"] == [r"re:.*\.mlp\.experts\..*"]
    made, before = read_tensors(out), read_tensors(whole)
    assert {n: one for n, one in made.items() if ".experts." in n} == {
        n: one for n, one in before.items() if ".experts." in n
    }
    ran("validate", out, "--against", whole, "--level", "full")


def test_another_groups_modules_are_found(source: Path, tmp_path: Path) -> None:
    """A group of the mixture that loses its modules, or its scheme, is told of by validate."""
    alone = converted(source, tmp_path / "alone", ("fp8", "--channel"), "--targets", ATTENTION)
    out = converted(alone, tmp_path / "out", EXPERTS)

    def without_targets(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_1"]["targets"] = ["re:nothing"]

    edit_json(out / "config.json", without_targets)
    assert run_cli("validate", out, "--against", alone).code == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda block: block.pop("config_groups"), "without config_groups"),
        (lambda block: block["config_groups"]["group_0"].update(targets=["re:["]), "'re:['"),
        (lambda block: block["config_groups"]["group_0"].pop("weights"), "nothing about weights"),
    ],
)
def test_groups_of_a_source_that_are_none(
    change: Callable[[dict[str, Any]], object], says: str, source: Path, tmp_path: Path
) -> None:
    experts = converted(source, tmp_path / "experts", EXPERTS)

    def broken(config: dict[str, Any]) -> None:
        change(config["quantization_config"])

    edit_json(experts / "config.json", broken)
    told = refused("fp8", experts, tmp_path / "out", "--channel", "--targets", ATTENTION)
    assert says in told, told


def test_shared_experts_are_taken_as_named_alone(tmp_path: Path) -> None:
    """Of one layer each, by two steps, beside routed ones: those of other layers stay."""
    source = made_once("mixture-shared", lambda at: published("glm4_moe", inner=256).write(at))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "passes:\n"
        r"  - w4a16: {bits: 8, targets: ['re:.*layers\.1\.mlp\.shared_experts.*'], "
        "shared_experts: named}\n"
        r"  - nvfp4: {dialect: compressed-tensors, targets: ['re:.*layers\.2\.mlp\..*experts.*'], "
        "shared_experts: named}\n"
    )
    ran("run", recipe, source, tmp_path / "out", "--jobs", "1")
    made, before = read_tensors(tmp_path / "out"), read_tensors(source)
    shared = {name: one for name, one in before.items() if ".shared_experts." in name}
    kept = {name for name in shared if made.get(name) == shared[name]}
    assert {name.split(".")[2] for name in shared.keys() - kept} == {"1", "2"}
    assert kept
    assert "model.layers.1.mlp.shared_experts.up_proj.weight_shape" in made
    assert "model.layers.2.mlp.shared_experts.up_proj.weight_global_scale" in made
