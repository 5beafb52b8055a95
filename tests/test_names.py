"""Names: templates, scale pairs, and the order people expect."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qconvert.core.family import Dims, Family
from qconvert.core.names import (
    ParsedName,
    in_model_order,
    is_scale,
    layer_in,
    natural_key,
    parse,
    scale_candidates,
    scales_alone,
    split_parameter,
    weight_candidates,
)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        (
            "model.layers.3.mlp.experts.17.up_proj.weight",
            ParsedName("model.layers.{L}.mlp.experts.{E}.up_proj.weight", 3, 17),
        ),
        (
            "mtp.layers.0.mlp.experts.gate_up_proj",
            ParsedName("mtp.layers.{L}.mlp.experts.gate_up_proj", 0, None),
        ),
        (
            "model.visual.blocks.2.mlp.0.weight",
            ParsedName("model.visual.blocks.{L}.mlp.{I}.weight", 2, None),
        ),
        ("lm_head.weight", ParsedName("lm_head.weight", None, None)),
        ("model.layers.٣.weight", ParsedName("model.layers.٣.weight", None, None)),
    ],
)
def test_parse(name: str, parsed: ParsedName) -> None:
    assert parse(name) == parsed


_PARTS = st.sampled_from(
    ("model", "layers", "experts", "mtp", "up_proj", "weight", "0", "07", "61")
)


@given(st.lists(_PARTS, min_size=1, max_size=8).map(".".join))
@example("model.layers.61.mlp.experts.7.up_proj.weight")
@example("model.experts.3.layers.61.experts.7.weight")
def test_layers_are_found_alike(name: str) -> None:
    """The quick ways, and the definition."""
    assert layer_in(name) == parse(name).layer
    dims = Dims(7, 61, 8, 1, {})
    found = parse(name)
    wanted = ".layers.{L}." in f".{found.template}" and found.layer == 61
    assert Family("x", (), lambda config: dims, ()).is_mtp(name, dims) == wanted


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("a.q_proj.weight_scale_inv", ("a.q_proj", "weight_scale_inv")),
        ("a.linear_attn.A_log", ("a.linear_attn.A_log", "")),
        ("weight", ("weight", "")),
    ],
)
def test_split_parameter(name: str, pair: tuple[str, str]) -> None:
    assert split_parameter(name) == pair


def test_order_is_that_of_a_run() -> None:
    ordered = [
        "model.visual.blocks.2.norm.weight",
        "model.visual.blocks.10.norm.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.2.mlp.experts.9.up_proj.weight",
        "model.language_model.layers.2.mlp.experts.10.up_proj.weight",
        "model.language_model.layers.10.mlp.gate.weight",
        "lm_head.weight",
        "model.language_model.norm.weight",
        "mtp.layers.0.mlp.gate.weight",
    ]
    assert sorted(ordered, key=natural_key) == ordered


@pytest.mark.parametrize("begin", ["model.layers.", "blk.", "mtp.layers.", "a.visual.layers."])
@pytest.mark.parametrize("rest", ["", "embed", "layers.1", "vision"])
def test_layers_alike_are_in_the_order_defined(begin: str, rest: str) -> None:
    """Sorted once for all of them, also where one has a name more, another end, or other neighbours."""
    ends = ["x.10.scale", "x.9.weight", "b", "x.9.scale", f"{rest}.c", "3", "03"]
    names = [f"{begin}{layer}.{end}" for layer in (10, 9, 2, "02", "2a") for end in ends]
    names += [f"{begin}3.{end}" for end in ends[:-1]] + [f"{begin}4.{end}" for end in ends[::-1]]
    names += [f"{begin}2.d", "lm_head.weight", f"{begin}2", f"{begin}9.x.8.weight", "a.embed.b"]
    assert in_model_order(names) == sorted(names, key=_order)


@given(st.sets(st.lists(st.sampled_from(["a", "weight", "scale"]), max_size=4).map(".".join)))
def test_scales_without_weights(names: set[str]) -> None:
    alone = [name for name in names if is_scale(name) and names.isdisjoint(weight_candidates(name))]
    assert scales_alone(names) == alone


def _order(name: str) -> tuple[int, int, list[tuple[int, int | str]]]:
    """The order as it is defined: by the part of the model, by layer, then component by component."""
    rank, layer = 3, 0
    if name.startswith(("mtp.", "model.mtp.")):
        rank = 4
    elif "visual." in name or "vision" in name:
        rank = 0
    elif ".layers." in name:
        rank = 2
        found = re.match(r"[0-9]{1,9}", name.split(".layers.", 1)[1])
        layer = int(found[0]) if found else 0
    elif "embed" in name:
        rank = 1
    parts = name.split(".")
    return rank, layer, [(0, int(p)) if re.fullmatch("[0-9]{1,9}", p) else (1, p) for p in parts]


_PARTS = st.sampled_from(
    ["layers", "mtp", "model", "visual", "embed", "9", "10", "09", "1234567890", "a", "ab", ""]
)


@given(st.lists(st.one_of(st.text(), st.lists(_PARTS).map(".".join)), max_size=10))
@example(["a", "a.", "a.\0", "a\0b", "a\1.b", "a\3", "a\4", "a.b", "a.1", "a.02", "a.2", "", "."])
@example(["x.layers.10", "x.layers.9", "x.layers.999999999.b", "x.layers.1234567890", "x.layers.a"])
def test_any_names_are_in_the_order_defined(names: list[str]) -> None:
    assert sorted(names, key=natural_key) == sorted(names, key=_order)
    assert in_model_order(names) == sorted(names, key=_order)
    for one, other in itertools.combinations(names, 2):
        assert (natural_key(one) == natural_key(other)) == (_order(one) == _order(other))


_WEIGHT_OF_SCALE: tuple[tuple[str, tuple[str, ...]], ...] = (
    (".weight_scale_inv", (".weight",)),
    (".weight_scale", (".weight", ".weight_packed")),
    (".weight_scale_2", (".weight",)),
    (".weight_global_scale", (".weight_packed",)),
    (".scale", (".weight",)),
    ("_proj_scale_inv", ("_proj",)),
    ("_proj_scale", ("_proj",)),
    (".w13_weight_scale", (".w13_weight", ".w13_weight_packed")),
    (".w2_weight_scale", (".w2_weight", ".w2_weight_packed")),
)
_ENDS = st.sampled_from(
    [suffix for suffix, _ in _WEIGHT_OF_SCALE] + ["weight", ".bias", "scale", "."]
)


@given(st.text("ab._", max_size=6), _ENDS)
def test_a_scale_is_what_the_longest_suffix_says(stem: str, end: str) -> None:
    """By the whole name, where the code looks at its last component."""
    name = stem + end
    found = [(ends, own) for ends, own in _WEIGHT_OF_SCALE if name.endswith(ends)]
    assert is_scale(name) == bool(found)
    wanted = [name.removesuffix(found[0][0]) + own for own in found[0][1]] if found else []
    assert weight_candidates(name) == tuple(wanted)


@pytest.mark.parametrize("weight", ["a.b.weight", "a.experts.gate_up_proj", "a.experts.down_proj"])
def test_scales_and_weights_find_each_other(weight: str) -> None:
    for scale in scale_candidates(weight):
        assert weight in weight_candidates(scale)
        assert is_scale(scale)


def test_other_names_are_nobodys_scale() -> None:
    for name in ("a.k_proj.k_scale", "a.input_scale", "a.weight", "a.logit_scale"):
        assert weight_candidates(name) == ()
        assert not is_scale(name)
