"""A checkpoint whose own class is remote code, read as another class or by a family of the user's."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensor, edit_json, run_cli, tensor, tree
from reading_models import FAMILY_FILE, remote
from sampled import sampled

from qconvert import api
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.reading import reading_as
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.roles import Kind

ALIKE = "MixtralForCausalLM"
W4A16 = ("--rtn", "--group-size", "32", "--jobs", "1")


def test_a_class_with_the_same_layout_is_all_that_it_takes(tmp_path: Path) -> None:
    source, out = remote().write(tmp_path / "source"), tmp_path / "out"
    refused = run_cli("w4a16", source, out, *W4A16)
    assert refused.code == 1
    assert "model_type 'acme_moe' is not known" in refused.err
    for name in (ALIKE, "mixtral"):
        made = run_cli("w4a16", source, tmp_path / name, *W4A16, "--architecture", name)
        assert made.code == 0, made.err
    manifest = json.loads((tmp_path / ALIKE / "qconvert.json").read_bytes())
    assert manifest["reading"] == {"architecture": ALIKE}
    assert manifest["family"] == "mixtral"
    packed = [n for n in api.open_checkpoint(tmp_path / ALIKE) if n.endswith(".weight_packed")]
    assert len(packed) == 2 * 2 * 3
    assert all(".experts." in name for name in packed)
    # The model is still what it was.
    config = json.loads((tmp_path / ALIKE / "config.json").read_bytes())
    assert (config["model_type"], config["architectures"]) == ("acme_moe", ["AcmeForCausalLM"])


def test_what_was_made_is_resumed_and_validated(tmp_path: Path) -> None:
    source, out = remote().write(tmp_path / "source"), tmp_path / "out"
    asked = (*W4A16, "--architecture", ALIKE)
    assert run_cli("w4a16", source, out, *asked).code == 0
    before = tree(out)
    again = run_cli("w4a16", source, out, *asked)
    assert again.code == 0, again.err
    assert tree(out) == before
    other = run_cli("w4a16", source, out, *W4A16, "--architecture", "mixtral")
    assert other.code == 1, "another reading is another plan"
    # The manifest says whose layout it is, and the source is read as the folder is.
    checked = run_cli(
        "validate", out, "--against", source, "--level", "full", "--json", "--jobs", "1"
    )
    report = json.loads(checked.out)
    assert checked.code == 0, report["findings"]
    assert "mixtral" in json.dumps(report)
    packed = [one for one in report["measures"] if one["tensor"].endswith("weight_packed")]
    assert len(packed) == 2 * 2 * 3, "a matrix of the source for each that was packed"
    assert api.open_checkpoint(out).role_index.kind(
        "model.layers.1.block_sparse_moe.experts.0.w2.weight_packed"
    ) is Kind.EXPERT_DOWN  # fmt: skip


@pytest.mark.parametrize(
    "words",
    sampled([
        ("inspect", "{src}"), ("plan", "copy", "{src}"),
        ("validate", "{src}"), ("split", "{src}", "{out}", "--pp", "1,1"),
        ("experts", "stack", "{src}", "{out}"),
        ("nvfp4", "{src}", "{out}", "--dialect", "modelopt"),
        ("amx", "{src}", "{out}", "--method", "int8", "--numa", "1"),
        ("advise", "{src}", "--for", "sglang"),
    ], name=lambda words: words[0]),
)  # fmt: skip
def test_every_command_takes_it(words: tuple[str, ...], tmp_path: Path) -> None:
    """And refuses a checkpoint with a name that the class does not have."""
    model = remote()
    source = model.write(tmp_path / "source")
    model.tensors["model.layers.1.odd.weight"] = tensor("BF16", 8)
    odd = model.write(tmp_path / "odd")
    for src in (source, odd):
        given = [w.format(src=src, out=tmp_path / f"out of {src.name}") for w in words]
        said = run_cli(*given, "--architecture", ALIKE)
        text = said.err + said.out
        if src is odd:
            assert (
                "tensor 'model.layers.1.odd.weight': --architecture MixtralForCausalLM has no "
                in (text)
            )
            assert said.code in (1, 3)
        elif words[0] not in (
            "amx",
            "advise",
        ):  # which have refusals of their own for a model so small
            assert said.code == 0, text
        else:
            assert "--architecture" not in text


def test_a_cpu_folder_says_whose_layout_it_is(tmp_path: Path) -> None:
    model, random = remote(hidden=256, width=256), np.random.default_rng(0)
    for (
        name,
        value,
    ) in model.tensors.items():  # ordinary ones: where kt-kernel is installed, it computes
        if ".experts." in name:
            numbers = random.normal(0, 0.02, value.shape).astype("<f4").view("<u4") >> 16
            model.tensors[name] = Tensor("BF16", value.shape, numbers.astype("<u2").tobytes())
    source, out = model.write(tmp_path / "source"), tmp_path / "out"
    asked = ("amx", source, out, "--method", "int8", "--numa", "1", "--jobs", "1")
    made = run_cli(*asked, "--architecture", ALIKE)
    assert made.code == 0, made.err
    assert json.loads((out / "qconvert.json").read_bytes())["reading"] == {"architecture": ALIKE}
    checked = run_cli(
        "validate", out, "--against", source, "--level", "full", "--json", "--jobs", "1"
    )
    report = json.loads(checked.out)
    assert checked.code == 0, report["findings"]
    assert len(report["measures"]) == 2 * 2 * 3, "the source is read as the folder was made"
    other = run_cli("validate", out, "--architecture", "mixtral", "--level", "headers")
    assert "says it was made with --architecture MixtralForCausalLM, and it is read " in other.out


def test_names_that_are_not_its_own_are_refused(tmp_path: Path) -> None:
    source = remote("moe", "chooser", "g d u").write(tmp_path / "source")
    said = run_cli("inspect", source, "--architecture", "qwen3_moe")
    assert said.code == 1
    assert "--architecture qwen3_moe has no such module" in said.err
    with api.reading_as(architecture=ALIKE):
        opened = api.open_checkpoint(source)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.0\.moe\.chooser\.weight'"):
        _ = opened.family


def test_a_hand_written_family_is_one_too(tmp_path: Path) -> None:
    words = "gate_proj down_proj up_proj"
    model = remote("mlp", "gate", words)
    model.config |= {"num_experts": 2, "moe_intermediate_size": 96}
    for layer in range(2):
        for one in ("q_norm", "k_norm"):
            model.tensors[f"model.layers.{layer}.self_attn.{one}.weight"] = tensor("BF16", 32)
    source = model.write(tmp_path / "source")
    with api.reading_as(architecture="Qwen3MoeForCausalLM"):
        found = api.open_checkpoint(source)
    assert (found.family.name, found.family.class_name) == ("qwen3_moe", "")
    assert found.absent() == []


def test_families_reach_the_processes_that_calibrate(tmp_path: Path) -> None:
    """Of a class that was read from transformers, and in a file: each process has what this one has."""
    file = tmp_path / "acme.py"
    file.write_text(
        FAMILY_FILE.replace("qwen_dims,\n    roles", "lambda c: qwen_dims(c),\n    roles")
    )
    told = "import pickle, sys; o = pickle.load(sys.stdin.buffer); print(o.family.dims(o.config))"
    source = remote().write(tmp_path / "source")
    for asked in ({"architecture": ALIKE}, {"family": file}):
        with reading_as(**asked):
            one = Checkpoint.open(source)
            assert "lambda" in file.read_text()
            assert one.family.dims(one.config).num_experts
        words = [sys.executable, "-c", told]
        done = subprocess.run(words, input=pickle.dumps(one), capture_output=True, check=True)
        assert done.stdout.decode().strip() == str(one.family.dims(one.config))


def test_a_family_in_a_file(tmp_path: Path) -> None:
    source = remote("moe", "chooser", "g d u").write(tmp_path / "source")
    edit_json(source / "config.json", lambda c: c.update(num_experts=2, moe_intermediate_size=96))
    file, out = tmp_path / "acme.py", tmp_path / "out"
    file.write_text(FAMILY_FILE)
    asked = ("w4a16", source, out, *W4A16, "--family", file)
    made = run_cli(*asked)
    assert made.code == 0, made.err
    before = tree(out)
    assert run_cli(*asked).code == 0
    assert tree(out) == before
    reading = json.loads((out / "qconvert.json").read_bytes())["reading"]
    assert reading["family_file"] == "acme.py"
    against = ("validate", out, "--against", source, "--level", "full", "--jobs", "1")
    checked = run_cli(*against, "--family", file)
    assert checked.code == 0, checked.out
    # Code is never taken from a folder: without the file nothing is known of the family.
    found = api.open_checkpoint(out)
    assert found.family.undescribed == "it was made with --family acme.py; name that file again"
    # Another file makes another plan, and is said.
    assert "it was made" not in checked.out
    file.write_text(FAMILY_FILE + "# changed\n")
    edited = run_cli(*against, "--family", file)
    assert edited.code == 0
    assert (
        "warning QC053 qconvert.json: says it was made with --family acme.py (sha256 " in edited.out
    )
    assert run_cli(*asked).code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "cannot be run: ZeroDivisionError"),
        ("def (", "cannot be run: SyntaxError"),
        ("FAMILY = 3", "expected FAMILY = Family(...), found int"),
        ("", "found NoneType"),
    ],
)
def test_a_file_that_is_no_family(text: str, said: str, tmp_path: Path) -> None:
    source, file = remote().write(tmp_path / "source"), tmp_path / "mine.py"
    file.write_text(text)
    refused = run_cli("inspect", source, "--family", file)
    assert refused.code == 1
    assert said in refused.err
    assert "mine.py" in refused.err


def test_both_exclude_one_another(tmp_path: Path) -> None:
    file = tmp_path / "acme.py"
    file.write_text(FAMILY_FILE)
    both = run_cli("inspect", tmp_path, "--architecture", ALIKE, "--family", file)
    assert both.code == 2
    with pytest.raises(UsageError, match="exclude"), api.reading_as(ALIKE, file):
        pass
