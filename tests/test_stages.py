"""Pipeline stages: the runtimes' own rules, and nothing lost or held twice without reason."""

from __future__ import annotations

from dataclasses import replace

import headers
import pytest
from header_checkpoints import published

from qconvert.core.errors import PlanError
from qconvert.passes.stages import split_plan
from qconvert.plan.plan import Plan
from qconvert.runtimes.classes.modules import stage_of
from qconvert.runtimes.pipeline import (
    NORM_EVERYWHERE,
    check_partition,
    default_partition,
    one_stage,
)

# What the runtimes' own get_pp_indices gives, worked out from L = q * stages + rem:
# sglang +1 to the last rem stages, vLLM to rem stages from the second-last backwards.
_SGLANG = {
    (60, 8): "7,7,7,7,8,8,8,8", (61, 4): "15,15,15,16", (48, 4): "12,12,12,12",
    (40, 3): "13,13,14", (94, 8): "11,11,12,12,12,12,12,12", (62, 4): "15,15,16,16",
    (5, 5): "1,1,1,1,1", (7, 2): "3,4", (24, 1): "24", (64, 6): "10,10,11,11,11,11",
    (36, 5): "7,7,7,7,8", (46, 4): "11,11,12,12", (92, 3): "30,31,31", (32, 3): "10,11,11",
    (28, 8): "3,3,3,3,4,4,4,4", (61, 2): "30,31", (61, 7): "8,8,9,9,9,9,9", (80, 6): "13,13,13,13,14,14",
    (30, 4): "7,7,8,8", (48, 5): "9,9,10,10,10",
}  # fmt: skip
_VLLM = {
    (60, 8): "7,7,7,8,8,8,8,7", (61, 4): "15,15,16,15", (48, 4): "12,12,12,12",
    (40, 3): "13,14,13", (94, 8): "11,12,12,12,12,12,12,11", (62, 4): "15,16,16,15",
    (5, 5): "1,1,1,1,1", (7, 2): "4,3", (24, 1): "24", (64, 6): "10,11,11,11,11,10",
    (36, 5): "7,7,7,8,7", (46, 4): "11,12,12,11", (92, 3): "31,31,30", (32, 3): "11,11,10",
    (28, 8): "3,3,3,4,4,4,4,3", (61, 2): "31,30", (61, 7): "8,9,9,9,9,9,8", (80, 6): "13,13,13,14,14,13",
    (30, 4): "7,8,8,7", (48, 5): "9,10,10,10,9",
}  # fmt: skip


@pytest.mark.parametrize("pair", sorted(_SGLANG))
def test_default_partitions(pair: tuple[int, int]) -> None:
    for runtime, table in (("sglang", _SGLANG), ("vllm", _VLLM)):
        found = default_partition(*pair, runtime)  # type: ignore[arg-type]
        assert ",".join(map(str, found)) == table[pair]
        assert check_partition(found, pair[0]) == found


def test_wrong_partitions_are_refused_with_the_runtimes_condition() -> None:
    with pytest.raises(PlanError, match=r"15,15 is 30, it must equal num_hidden_layers = 61"):
        check_partition([15, 15], 61)
    with pytest.raises(PlanError, match="every stage needs a layer"):
        check_partition([61, 0], 61)
    with pytest.raises(PlanError, match="4 layers cannot be cut into 5 stages"):
        default_partition(4, 5, "sglang")


def stage_names(model: str, stages: int, runtime: str | None) -> list[set[str]]:
    plan = Plan.identity(published(model))
    layers = plan.role_index.dims.num_layers
    partition = default_partition(layers, stages, "vllm" if runtime == "vllm" else "sglang")
    return [
        set(stage.check().tensors)
        for stage in split_plan(plan, partition, runtime)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
@pytest.mark.parametrize("model", headers.names())
def test_stages_hold_everything_and_share_only_what_may_be_shared(model: str, runtime: str) -> None:
    if one_stage(runtime, published(model).config):
        with pytest.raises(PlanError, match="runs in one pipeline stage only in sglang; use vllm"):
            stage_names(model, 4, runtime)
        return
    found = stage_names(model, 4, runtime)
    assert set().union(*found) == set(published(model))
    taken = published(model).role_index
    drafts = {name for name in taken.places if taken.family.is_mtp(name, taken.dims)}
    for name in published(model):
        holders = [i for i, names in enumerate(found) if name in names]
        if "visual." in name:
            assert holders == [0, 1, 2, 3]
        elif name.endswith("embed_tokens.weight") and ".layers." not in name:
            apart = (
                [0, 3] if drafts or taken.dims.tied else [0]
            )  # draft layers and a tied head embed tokens too
            assert holders == ([0, 1, 2, 3] if runtime == "vllm" else apart)
        elif (
            taken.places[name].role.name == "norm"
            and taken.family.name in NORM_EVERYWHERE
            and runtime == "vllm"
        ):
            assert holders == [0, 1, 2, 3]  # its class builds the norm in every stage
        else:
            assert len(holders) == 1, name
            if name in drafts or name.startswith(("lm_head", "model.norm")):
                assert holders == [3]


def test_a_tied_text_only_model_gets_a_head_in_its_last_stage() -> None:
    base = published("qwen3.5-0.8b")
    config = {key: value for key, value in base.config.items() if key != "vision_config"}
    text = {name: source for name, source in base.items() if "visual." not in name}
    plan = Plan.identity(replace(base, config=config, sources=text))
    stages = split_plan(plan, default_partition(24, 2, "sglang"), "sglang")
    head = stages[-1].check().tensors["lm_head.weight"]
    assert head.type == plan.tensors["model.language_model.embed_tokens.weight"].type
    assert stages[-1].config["text_config"]["tie_word_embeddings"] is False
    assert stages[0].config == plan.config
    assert "lm_head.weight" not in stages[0].tensors


@pytest.mark.parametrize(
    ("architecture", "tensor", "stage"),
    [
        ("Lfm2MoeForCausalLM", "model.embedding_norm.weight", "last"),
        ("LlamaForCausalLM", "model.embed_tokens.weight", "first"),
        ("OPTForCausalLM", "model.decoder.project_out.weight", ""),
        ("OddForCausalLM", "model.odd.weight", ""),
    ],
)
def test_what_lies_beside_the_layers(architecture: str, tensor: str, stage: str) -> None:
    assert stage_of(architecture, "vllm", tensor) == stage
    assert stage_of(architecture, "", tensor) == ""


def test_a_tensor_without_a_place_is_refused() -> None:
    base = published("qwen3.5-0.8b")
    odd = replace(base["lm_head.weight"] if "lm_head.weight" in base else next(iter(base.values())))
    sources = {**base.sources, "model.odd.weight": replace(odd, name="model.odd.weight")}
    with pytest.raises(PlanError, match=r"'model\.odd\.weight': not described by family qwen3_5"):
        split_plan(Plan.identity(replace(base, sources=sources)), [12, 12], "vllm")
