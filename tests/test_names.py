"""Names: templates, scale pairs, and the order people expect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.names import (
    Parsed,
    is_scale,
    natural_key,
    parse,
    scale_candidates,
    split_parameter,
    weight_candidates,
)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        (
            "model.layers.3.mlp.experts.17.up_proj.weight",
            Parsed("model.layers.{L}.mlp.experts.{E}.up_proj.weight", 3, 17),
        ),
        (
            "mtp.layers.0.mlp.experts.gate_up_proj",
            Parsed("mtp.layers.{L}.mlp.experts.gate_up_proj", 0, None),
        ),
        (
            "model.visual.blocks.2.mlp.0.weight",
            Parsed("model.visual.blocks.{L}.mlp.{I}.weight", 2, None),
        ),
        ("lm_head.weight", Parsed("lm_head.weight", None, None)),
        ("model.layers.٣.weight", Parsed("model.layers.٣.weight", None, None)),
    ],
)
def test_parse(name: str, parsed: Parsed) -> None:
    assert parse(name) == parsed


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


@given(st.lists(st.text("ab019.", min_size=1, max_size=8), max_size=20))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    assert sorted(names, key=natural_key) == sorted(names, key=natural_key)


@pytest.mark.parametrize("weight", ["a.b.weight", "a.experts.gate_up_proj", "a.experts.down_proj"])
def test_scales_and_weights_find_each_other(weight: str) -> None:
    for scale in scale_candidates(weight):
        assert weight in weight_candidates(scale)
        assert is_scale(scale)


def test_other_names_are_nobodys_scale() -> None:
    for name in ("a.k_proj.k_scale", "a.input_scale", "a.weight", "a.logit_scale"):
        assert weight_candidates(name) == ()
        assert not is_scale(name)
