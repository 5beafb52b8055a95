"""Families, formats, passes and validators of other packages, found by their entry points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import Model, Result, read_tensors, tensor
from other_package import installed, run_beside
from reading_models import FAMILY_FILE, remote

FORMAT = '''
"""Weights in F16 under the name that packed ones have."""
from qconvert.formats.base import Format, Stored
from qconvert.ops.cast import ToBf16


def read(plan, module):
    name = f"{module}.weight_packed"
    found = plan.tensors.get(name)
    if found is None or found.type.dtype != "F16":
        return None
    rows, columns = found.type.shape
    return Stored(ToBf16(), (found,), rows, columns), (name,)


FORMAT = Format(
    name="halves", title="halves", parameters=("weight_packed",), codes=("F16",),
    cut=(1, 1), equals="acme", read=read,
)
'''
PASS = '''
from dataclasses import dataclass
from typing import ClassVar

from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan


@dataclass(frozen=True, slots=True)
class Noted:
    """A file beside the weights."""

    name: ClassVar[str] = "acme_note"
    text: str = "Acme"

    def __call__(self, plan: Plan) -> Plan:
        entry = LogEntry(self.name, options_of(self), 1, 1)
        return plan.logged(entry, new_files={**plan.new_files, "acme.txt": self.text})


PASSES = (Noted,)
'''
VALIDATOR = """
from qconvert.validation.findings import Finding, Rule

RULES = (Rule("ACME1", "the head is too small", "It was cut.", "Copy it again."),)


class Head:
    name = "acme_head"
    proves = "the head has 64 rows, as Acme wants"
    needs = frozenset({"model"})

    def __call__(self, folder):
        rows = folder.checkpoint["lm_head.weight"].type.shape[0]
        if rows != 64:
            yield Finding("ACME1", "error", "lm_head.weight", f"expected 64 rows, found {rows}")


VALIDATOR = Head()
"""
POINTS = {
    "qconvert.families": "family", "qconvert.formats": "stored", "qconvert.passes": "steps",
    "qconvert.validators": "checks",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = {"family": FAMILY_FILE, "stored": FORMAT, "steps": PASS, "checks": VALIDATOR}
    return installed(tmp_path_factory.mktemp("site"), "acme_qc", modules, POINTS)


def acme() -> Model:
    model = remote("moe", "chooser", "g d u")
    model.config |= {"num_experts": 2, "moe_intermediate_size": 96}
    return model


def test_a_family(site: Path, tmp_path: Path) -> None:
    source = acme().write(tmp_path / "source")
    assert "acme_moe (family acme): 2 layers, 2 experts" in sound(site, "inspect", source).out


def test_a_pass(site: Path, tmp_path: Path) -> None:
    source, recipe = acme().write(tmp_path / "source"), tmp_path / "mine.yaml"
    recipe.write_text("passes:\n  - acme_note: {text: hello}\n")
    sound(site, "run", recipe, source, tmp_path / "out", "--jobs", "1")
    assert (tmp_path / "out" / "acme.txt").read_text() == "hello"
    manifest = json.loads((tmp_path / "out" / "qconvert.json").read_bytes())
    assert manifest["passes"][0]["options"] == {"text": "hello"}


def test_a_format(site: Path, tmp_path: Path) -> None:
    model = acme()
    for name in [name for name in model.tensors if ".experts." in name]:
        _, shape, data = model.tensors.pop(name)
        packed = name.replace(".weight", ".weight_packed")
        model.tensors[packed] = tensor("F16", *shape)._replace(
            data=bytes(byte & 0x3F for byte in data)
        )
    source = model.write(tmp_path / "source")
    sound(site, "dequant", source, tmp_path / "bf16", "--jobs", "1")
    made = read_tensors(tmp_path / "bf16")
    name = "model.layers.1.moe.experts.1.d.weight"
    assert (made[name].dtype, made[name].shape) == ("BF16", (64, 96))
    assert not any(name.endswith("weight_packed") for name in made)
    # And it is quantized from, like any format.
    sound(site, "w4a16", source, tmp_path / "w4", "--rtn", "--group-size", "32", "--jobs", "1")
    assert read_tensors(tmp_path / "w4")[f"{name}_packed"].dtype == "I32"


def test_a_validator(site: Path, tmp_path: Path) -> None:
    model = acme()
    source = model.write(tmp_path / "source")
    assert "the head has 64 rows, as Acme wants" in sound(site, "validate", source).out
    model.tensors["lm_head.weight"] = tensor("BF16", 60, 64)
    found = run_beside(site, "validate", model.write(tmp_path / "cut"))
    assert found.code == 3
    assert "ACME1" in found.out
    assert "Copy it again." in sound(site, "validate", "--explain", "ACME1").out


def sound(site: Path, *words: str | Path) -> Result:
    result = run_beside(site, *words)
    assert result.code == 0, result.out + result.err
    return result


@pytest.mark.parametrize(
    ("group", "text", "words", "said"),
    [
        ("families", "import nowhere", ("inspect", "{src}"), "No module named 'nowhere'"),
        ("passes", "x = 1 / 0", ("plan", "dequant-fp8", "{src}"), "ZeroDivisionError"),
        ("validators", "", ("validate", "{src}"), "has no VALIDATOR"),
        ("formats", "", ("dequant", "{src}", "{src}-out"), "has no FORMAT"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)  # fmt: skip
def test_a_broken_one_is_one_error(
    group: str, text: str, words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    source = remote().write(tmp_path / "source")
    broken = {f"qconvert.{group}": "mine"}
    site = installed(tmp_path / "site", "acme_bad", {"mine": text}, broken)
    refused = run_beside(site, *(word.format(src=source) for word in words))
    assert refused.code == 1
    assert refused.err.count("\n") == 1, refused.err
    where = f"package acme_bad 1.0: its entry point 'acme_bad' of qconvert.{group}"
    assert where in refused.err
    assert said in refused.err


def test_two_of_one_name_are_refused(tmp_path: Path) -> None:
    source = remote().write(tmp_path / "source")
    again = PASS.replace('"acme_note"', '"drop"')
    site = installed(tmp_path / "site", "acme_two", {"steps": again}, {"qconvert.passes": "steps"})
    refused = run_beside(site, "plan", "dequant-fp8", source)
    assert refused.code == 1
    assert "pass 'drop' is defined by qconvert.passes.drop and acme_two.steps" in refused.err
