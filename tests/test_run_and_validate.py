"""`--validate`: a conversion that checks what it wrote against its source."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from checkpoints import run_cli
from models import deepseek_v3, qwen3_moe

from qconvert import api
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Report


def test_says_what_each_role_lost(tmp_path: Path) -> None:
    """The same measures as `qconvert validate --against`."""
    source, out = qwen3_moe().write(tmp_path / "source"), tmp_path / "out"
    said = run_cli("fp8", str(source), str(out), "--validate", "full")
    assert said.code == 0, said.err
    report = api.validate(out, source, level="full")
    assert report.errors == 0
    assert report.measures
    assert "wrote" in said.out
    for role in ("q_proj", "down_proj"):
        assert role in said.out.partition("wrote")[2]


def test_as_json(tmp_path: Path) -> None:
    source, out = deepseek_v3().write(tmp_path / "source"), tmp_path / "out"
    said = run_cli("dequant", str(source), str(out), "--validate", "sample", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["out"] == str(out)
    assert found["validation"]["findings"] == []
    assert found["validation"]["measures"]


def test_of_a_pair_both_folders_are_checked(tmp_path: Path) -> None:
    source = qwen3_moe(hidden=256, intermediate=128).write(tmp_path / "source")
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    said = run_cli(
        "kt", str(source), "--cpu-out", str(cpu), "--cpu", "int4", "--numa", "1", "--gpu", "w4a16",
        "--gpu-out", str(gpu), "--validate", "headers", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert ["validation" in one for one in json.loads(said.out)] == [True, True]


def test_of_stages_the_whole_set_is_checked(tmp_path: Path) -> None:
    source, out = deepseek_v3().write(tmp_path / "source"), tmp_path / "out"
    asked = ["split", str(source), str(out), "--pp", "2", "--for", "vllm", "--validate", "headers"]
    said = run_cli(*asked)
    assert said.code == 0, said.err
    assert "every stage" in said.out or "stages" in said.out
    said = run_cli(*asked, "--json")
    assert said.code == 2
    assert "--validate and --json" in said.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_error_is_exit_code_3(tmp_path: Path, form: tuple[str, ...]) -> None:
    source, out = deepseek_v3().write(tmp_path / "source"), tmp_path / "out"
    report = Report(findings=[Finding("QC015", "error", "model.norm.weight", "is wrong")])
    with mock.patch.object(api, "validate", return_value=report):
        said = run_cli("dequant", str(source), str(out), "--validate", "headers", *form)
    assert said.code == 3, said.err
    assert "QC015" in said.out
    assert (out / "config.json").is_file()


def test_a_dry_run_checks_nothing(tmp_path: Path) -> None:
    source, out = deepseek_v3().write(tmp_path / "source"), tmp_path / "out"
    said = run_cli("dequant", str(source), str(out), "--validate", "full", "--dry-run")
    assert said.code == 0, said.err
    assert not out.exists()
