"""What a hand-written family says of a published model, and what is derived from its class: of every
name, of its experts, its layers, its ties, and of what may be quantized. Where a file says more, or
otherwise, the reason is here."""

from __future__ import annotations

from functools import cache
from importlib import resources

import headers
import pytest

from qconvert.core.family import RoleIndex, role_index
from qconvert.core.roles import Kind
from qconvert.layouts.derived.find import derive, family_for

EXPERTS = 3
# By kind, hand-written then derived: what a file calls otherwise than the class's modules show.
OTHERWISE = {
    (Kind.GDN_QKVZ, Kind.LINEAR): "how linear attention is fused, no class of transformers says",
    (Kind.GDN_BA, Kind.LINEAR): "as above",
    (Kind.GDN_QKV, Kind.LINEAR): "as above",
    (Kind.GDN_Z, Kind.LINEAR): "as above",
    (Kind.GDN_B, Kind.LINEAR): "as above",
    (Kind.GDN_A, Kind.LINEAR): "as above",
    (Kind.GDN_OUTPUT, Kind.LINEAR): "as above; runtimes load it quantized, so the file allows it",
}
# Which class a model without one of its own is read as: that of its `architectures`.
AS = {"kimi_k2": "deepseek_v3"}


def _class_of(model: str) -> str:
    model_type = headers.model_type(model)
    return AS.get(model_type, model_type)


CLASSES = {
    path.name for path in resources.files("qconvert.layouts.derived").joinpath("classes").iterdir()
}
MODELS = [model for model in headers.names() if f"{_class_of(model)}.json" in CLASSES]
# Stacks are published [E, H, 2I], and the class has [E, 2I, H]: transformers turns them on loading where
# shapes differ (conversion_mapping.py, "qwen3_vl_moe"; 5.17), which no attribute of the class says.
TURNED = {"qwen3-vl-30b-a3b"}
# Of these kinds a file allows to quantize what is only copied where it is derived.
FILE_ALLOWS = {Kind.GDN_QKVZ, Kind.GDN_QKV, Kind.GDN_Z, Kind.GDN_OUTPUT}


@cache
def both(model: str) -> tuple[RoleIndex, RoleIndex]:
    found = headers.few(model, EXPERTS)
    names = list(found.tensors)
    by_hand = role_index(family_for(found.config, names), found.config, names)
    derived = derive({**found.config, "model_type": _class_of(model)}, names)
    assert not isinstance(derived, str), derived
    assert by_hand.family.class_name == ""
    return by_hand, role_index(derived, found.config, names)


def _draft(index: RoleIndex, name: str) -> bool:
    return index.family.is_mtp(name, index.dims)


@pytest.mark.parametrize("model", MODELS)
def test_every_name_is_the_same(model: str) -> None:
    by_hand, derived = both(model)
    wrong = {}
    for name in by_hand.places:
        if _draft(by_hand, name):
            continue
        pair = (by_hand.kind(name), derived.kind(name))
        if pair[0] is not pair[1] and pair not in OTHERWISE:
            wrong[pair] = name
    assert wrong == {}


@pytest.mark.parametrize("model", MODELS)
def test_the_same_may_be_quantized(model: str) -> None:
    by_hand, derived = both(model)
    for name in by_hand.places:
        ours, theirs = by_hand.kind(name), derived.kind(name)
        if not _draft(by_hand, name) and ours not in FILE_ALLOWS:
            assert ours.quantizable == theirs.quantizable, name
            assert ours.never_quantized == theirs.never_quantized, name


@pytest.mark.parametrize("model", MODELS)
def test_layers_experts_and_ties_are_the_same(model: str) -> None:
    by_hand, derived = both(model)
    assert derived.dims.num_layers == by_hand.dims.num_layers
    assert derived.dims.num_experts == by_hand.dims.num_experts
    if by_hand.dims.num_experts:
        assert derived.dims.moe_intermediate_size == by_hand.dims.moe_intermediate_size
        layers = set(by_hand.dims.groups["moe"]) | set(by_hand.dims.groups.get("mtp_moe", ()))
        assert set(by_hand.dims.groups["moe"]) <= set(derived.dims.groups["moe"]) <= layers
    assert derived.dims.tied == by_hand.dims.tied
    assert derived.family.tied == by_hand.family.tied
    same = derived.family.stacked_transposed == by_hand.family.stacked_transposed
    assert same == (model not in TURNED)


@pytest.mark.parametrize("model", MODELS)
def test_experts_stand_in_the_same_places(model: str) -> None:
    by_hand, derived = both(model)
    ends = {
        kind: {
            role.module.rpartition("{L}")[2] for role in by_hand.family.roles if role.kind is kind
        }
        for kind in derived.family.expert_templates
    }
    for kind, template in derived.family.expert_templates.items():
        if by_hand.dims.num_experts:
            assert template.rpartition("{L}")[2] in ends[kind]


def test_every_exception_is_one() -> None:
    """An exception that no model needs any longer is removed."""
    found = set()
    for model in MODELS:
        by_hand, derived = both(model)
        found |= {
            (by_hand.kind(name), derived.kind(name))
            for name in by_hand.places
            if not _draft(by_hand, name)
        }
    assert set(OTHERWISE) <= found
