"""Families, formats, passes and validators of other packages, found by their entry points."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from acme4 import Floats
from checkpoints import Model, Result, Tensor, read_tensors, tensor, tree
from other_package import installed, python_beside, run_beside
from reading_models import FAMILY_FILE, remote

FORMAT = (Path(__file__).parent / "acme4.py").read_text(encoding="utf-8")
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


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Floats]]:
    """A checkpoint whose experts are in ACME4, and the numbers of each, computed here."""
    model, numbers = acme(), dict[str, Floats]()
    model.config["moe_intermediate_size"] = 64
    random = np.random.default_rng(7)
    for name in [name for name in model.tensors if ".experts." in name]:
        del model.tensors[name]
        codes = random.integers(0, 16, (64, 64), np.uint8)
        scale = random.uniform(0.01, 0.02, (64, 1)).astype(np.float16)
        offset = random.integers(-8, 8, (64, 1)).astype(np.float32) / 64
        numbers[name] = offset + scale.astype(np.float32) * codes
        module = name.removesuffix(".weight")
        model.tensors |= {
            f"{module}.weight_acme": Tensor(
                "U8", (64, 32), (codes[:, :32] | codes[:, 32:] << 4).tobytes()
            ),
            f"{module}.weight_scale": Tensor("F16", (64, 1), scale.tobytes()),
            f"{module}.weight_offset": Tensor(
                "BF16", (64, 1), (offset.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            ),
        }
    return model.write(tmp_path_factory.mktemp("acme4") / "source"), numbers


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_format(
    packed: tuple[Path, Mapping[str, Floats]], dtype: str, site: Path, tmp_path: Path
) -> None:
    source, numbers = packed
    sound(site, "dequant", source, tmp_path / "out", "--dtype", dtype, "--jobs", "1")
    made = read_tensors(tmp_path / "out")
    assert not any("acme" in name or "offset" in name for name in made)
    for name, wanted in numbers.items():
        if dtype == "f32":
            assert made[name].data == wanted.tobytes()
        else:
            bits = np.frombuffer(made[name].data, np.uint16).astype(np.uint32) << 16
            assert np.allclose(bits.view(np.float32), wanted.ravel(), rtol=2**-8, atol=0)
            said = "rounds ACME4 codes x scale + offset to bf16"
            assert said in (tmp_path / "out" / "README.md").read_text()


def test_a_format_is_shown(packed: tuple[Path, Mapping[str, Floats]], site: Path) -> None:
    source, _ = packed
    shown = json.loads(sound(site, "inspect", source, "--json").out)
    assert shown["formats"]["ACME4"]["tensors"] == len(packed[1])
    assert "ACME4 -> BF16" in sound(site, "plan", "dequant-fp8", source).out


def test_a_format_is_quantized_from(
    packed: tuple[Path, Mapping[str, Floats]], site: Path, tmp_path: Path
) -> None:
    source, numbers = packed
    sound(site, "w4a16", source, tmp_path / "w4", "--rtn", "--group-size", "32", "--jobs", "1")
    made = read_tensors(tmp_path / "w4")
    assert {made[f"{name}_packed"].dtype for name in numbers} == {"I32"}
    left = run_beside(site, "mx", source, tmp_path / "mx", "--targets", "o_proj", "--dry-run")
    assert "weight_acme' is packed already and is no target" in left.err


# A conversion, up to the Nth matrix that is encoded.
WRITING = """
import sys
from acme_qc.stored import EncodeAcme4
from qconvert import api

source, out, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
run, left = EncodeAcme4.run, [count]

def counted(self, *rest):
    left[0] -= 1
    if not left[0]:
        raise KeyboardInterrupt
    return run(self, *rest)

EncodeAcme4.run = counted
api.run([api.passes()["quantize"]("acme4")], source, out, jobs=1)
"""


def test_a_format_is_written(site: Path, tmp_path: Path) -> None:
    """By the pass that writes any, planned, judged, resumed, named in the card and validated."""
    model = acme()
    model.config["moe_intermediate_size"] = 64
    weights = {}
    for name in [name for name in model.tensors if ".experts." in name]:
        weights[name] = np.random.default_rng(len(name)).normal(0, 0.02, (64, 64))
        bits = weights[name].astype(np.float32).view(np.uint32) >> 16
        model.tensors[name] = Tensor("BF16", (64, 64), bits.astype(np.uint16).tobytes())
    source = model.write(tmp_path / "source")
    assert python_beside(site, WRITING, source, tmp_path / "out", 0).code == 0
    assert python_beside(site, WRITING, source, tmp_path / "again", 5).code != 0
    assert (tmp_path / "again" / ".qconvert").is_dir()
    assert python_beside(site, WRITING, source, tmp_path / "again", 0).code == 0
    assert tree(tmp_path / "again") == tree(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "acme4")
    assert "ACME4" in (tmp_path / "out" / "README.md").read_text()
    words = ("validate", tmp_path / "out", "--against", source, "--level", "full", "--jobs", "1")
    assert "every weight is the source's within its format's rounding" in sound(site, *words).out
    shown = json.loads(sound(site, "inspect", tmp_path / "out", "--json").out)
    assert shown["formats"]["ACME4"]["tensors"] == len(weights)
    sound(site, "dequant", tmp_path / "out", tmp_path / "f32", "--dtype", "f32", "--jobs", "1")
    made = read_tensors(tmp_path / "f32")
    for name, wanted in weights.items():
        numbers = np.frombuffer(made[name].data, np.float32).reshape(64, 64)
        step = np.ptp(wanted, axis=1, keepdims=True) / 15
        assert (np.abs(numbers - wanted) <= 0.51 * step + 2**-8 * np.abs(wanted)).all()
    refused = run_beside(site, "quantize", source, tmp_path / "o", "--format", "acme5")
    assert "one of acme4, int8, mxfp4, mxfp8; found 'acme5'" in refused.err


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
