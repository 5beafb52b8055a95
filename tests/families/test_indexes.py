"""Every name of public indexes has a role, whatever its weight is encoded as, and an expert beyond the
config's count is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import headers
import pytest
import yaml
from checkpoints import run_cli

from qconvert.core.family import Role, RoleIndex, role_index
from qconvert.core.names import split_parameter
from qconvert.layouts.derived.find import family_for

_FILE = Path(__file__).parent / "indexes.yaml"
INDEXES: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
# What the tensors of a module are called instead of `weight`.
ENCODINGS = (
    "weight_scale_inv", "weight_scale", "weight_packed", "weight_shape", "qweight", "scales",
)  # fmt: skip
# Of the quantized indexes, the tensors of a linear: those of a draft are not quantized.
ENCODED = {
    "deepseek-r1-awq": {frozenset({"qweight", "qzeros", "scales"}), frozenset({"weight"})},
    "deepseek-v3-draft-fp8": {frozenset({"weight", "weight_scale_inv"})},
}


@cache
def names_of(index: str) -> tuple[str, ...]:
    return tuple(
        f"{line['at']}{name}{end}".replace("{L}", str(layer)).replace("{E}", str(expert))
        for line in INDEXES[index]["names"]
        for layer in headers.numbers(str(line.get("layers", "0")))
        for expert in range(line.get("experts", 1))
        for name in line["names"]
        for end in [f".{parameter}" for parameter in line.get("parameters", ())] or [""]
    )


def _taken(index: str, names: tuple[str, ...]) -> RoleIndex:
    config = INDEXES[index]["config"]
    return role_index(family_for(config, names), config, names)


@pytest.mark.parametrize("index", INDEXES)
def test_every_name_has_a_role(index: str) -> None:
    names = names_of(index)
    assert len(set(names)) == len(names) == INDEXES[index]["count"]
    taken = _taken(index, names)
    assert sorted(taken.unknown) == INDEXES[index].get("unknown", [])
    assert taken.absent() == []


@pytest.mark.parametrize("index", ENCODED)
def test_encodings_are_no_part_of_a_name(index: str) -> None:
    """Of a quantized index, a linear's tensors have one role."""
    taken = _taken(index, names_of(index))
    found: dict[tuple[Role, str], set[str]] = {}
    for name, place in taken.places.items():
        if place.role.kind.linear:
            at = place.role, split_parameter(name)[0]
            found.setdefault(at, set()).add(place.parameter)
    forms = {frozenset(parameters) for parameters in found.values()}
    assert forms == ENCODED[index]


@pytest.mark.parametrize("index", [index for index in INDEXES if index not in ENCODED])
def test_encoded_names_have_the_role_of_their_weight(index: str) -> None:
    plain = _taken(index, names_of(index))
    quantized = [name for name, place in plain.places.items() if place.role.kind.quantizable]
    for encoding in ENCODINGS:
        names = {name: f"{name.removesuffix('weight')}{encoding}" for name in quantized}
        taken = _taken(index, (*(n for n in plain.places if n not in names), *names.values()))
        assert taken.unknown == ()
        for name, encoded in names.items():
            assert taken.places[encoded].role == plain.places[name].role
            assert taken.places[encoded].parameter == encoding


def test_an_expert_beyond_the_config_is_refused(tmp_path: Path) -> None:
    """On a sound folder with the names of an index there is no finding."""
    found = headers.with_few(headers.read(_FILE.parent / "published" / "mixtral-8x22b.yaml"))
    assert len(headers.read(_FILE.parent / "published" / "mixtral-8x22b.yaml").tensors) == 1739
    sound, wrong = tmp_path / "sound", tmp_path / "wrong"
    for folder in (sound, wrong):
        folder.mkdir()
    headers.write_sparse(found, sound)
    assert run_cli("validate", sound, "--level", "headers").code == 0
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    beyond = name.replace("experts.2", "experts.9999")
    more = replace(found, tensors={**found.tensors, beyond: found.tensors[name]})
    headers.write_sparse(more, wrong)
    checked = run_cli("validate", wrong, "--level", "headers")
    assert checked.code == 3
    assert "9999" in checked.out
    refused = run_cli("w4a16", wrong, tmp_path / "out", "--rtn", "--dry-run")
    assert refused.code == 1
    assert "9999" in refused.err
