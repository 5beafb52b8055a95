"""The folder of all stages of a split, looked at and validated as one set."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copied, edit_json, ran, read_shard, read_tensors, run_cli, write_shard
from loaders.published import published
from models import qwen3_moe

from qconvert.checkpoint.open import open_stages
from qconvert.core.errors import CheckpointError

STAGES = ("stage-00-of-02", "stage-01-of-02")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_moe(layers=2).write(tmp_path_factory.mktemp("set") / "source")


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    out = source.parent / "stages"
    assert run_cli("split", source, out, "--pp", "1,1", "--copy", "--jobs", "1").code == 0
    return out


@pytest.fixture
def stages(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path / "stages")


def validated(folder: Path, *words: str | Path) -> tuple[int, dict[str, Any]]:
    result = run_cli("validate", folder, "--json", *words)
    assert "Traceback" not in result.err
    return result.code, json.loads(result.out)


def rules_of(report: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["rule"], []).append(finding["where"])
    return found


def test_a_sound_set(made: Path, source: Path) -> None:
    code, report = validated(made, "--against", source, "--level", "full")
    assert (code, report["findings"]) == (0, [])
    assert any("one complete split" in text for text in report["proved"])
    assert "every byte has the hash it was written with" in report["proved"]


def test_what_joined_stages_were_made_of_is_their_folder(made: Path, tmp_path: Path) -> None:
    """The plan names it, and the command that `next` says finds nothing."""
    done = run_cli("join", made, tmp_path / "whole", "--jobs", "1")
    assert f"source  {made}: 2 files, " in done.err
    (said,) = [line for line in done.err.splitlines() if line.startswith("next    qconvert ")]
    words = shlex.split(said)[2:]
    assert words[2:4] == ["--against", str(made)]
    assert ran(*words).out.startswith("passed: 0 errors, 0 warnings\n")


def test_a_finding_names_its_stage(stages: Path) -> None:
    (stages / STAGES[1] / "tokenizer.json").write_text("{}")
    code, report = validated(stages)
    assert code == 3
    assert {where for all in rules_of(report).values() for where in all} == {
        f"{STAGES[1]}: tokenizer.json"
    }


@pytest.mark.parametrize(
    "what", ["lost", "other split", "twice", "unfinished", "no receipt", "no stage"]
)
def test_what_is_no_whole_set(what: str, stages: Path, source: Path, tmp_path: Path) -> None:
    last = stages / STAGES[1]
    if what == "lost":
        shutil.rmtree(last)
    elif what == "twice":
        shutil.copytree(last, stages / "stage-02-of-02")
    elif what == "other split":
        other = qwen3_moe(layers=2, experts=4).write(tmp_path / "other")
        assert run_cli("split", other, tmp_path / "o", "--pp", "1,1", "--jobs", "1").code == 0
        shutil.rmtree(last)
        shutil.copytree(tmp_path / "o" / STAGES[1], last)
    elif what == "unfinished":
        (last / ".qconvert").mkdir()
    elif what == "no receipt":
        (last / "qconvert.receipt.jsonl").unlink()
    else:
        edit_json(last / "qconvert.json", lambda value: value.update(stage=5))
    code, report = validated(stages)
    assert (code, "QC120" in rules_of(report)) == (3, True)
    joined = run_cli("inspect", stages)
    assert (joined.code, "Traceback" in joined.err) == (1, False)


def moved(stages: Path, name: str, *, remove: bool) -> None:
    """A tensor of the last stage put into the first as well, or instead."""
    shard = next((stages / STAGES[1]).glob("*.safetensors"))
    metadata = read_shard(shard)[0].pop("__metadata__")
    tensors = read_tensors(stages / STAGES[1])
    taken = tensors[name]
    if remove:
        del tensors[name]
        write_shard(shard, tensors, metadata)
    first = next((stages / STAGES[0]).glob("*.safetensors"))
    write_shard(first, {**read_tensors(stages / STAGES[0]), name: taken}, metadata)


def test_a_tensor_in_the_wrong_stage(stages: Path) -> None:
    moved(stages, "model.norm.weight", remove=True)
    code, report = validated(stages)
    assert (code, rules_of(report)["QC121"]) == (3, ["model.norm.weight"])


def test_a_layer_in_two_stages(stages: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    moved(stages, name, remove=False)
    code, report = validated(stages)
    assert code == 3
    assert rules_of(report).get("QC121") == [name] or "QC120" in rules_of(report)


def test_a_tensor_of_the_source_in_no_stage(stages: Path, source: Path) -> None:
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    receipt = stages / STAGES[0] / "qconvert.receipt.jsonl"
    lines = [line for line in receipt.read_text().splitlines() if f'"{name}"' not in line]
    receipt.write_text("\n".join([*lines, ""]))
    code, report = validated(stages, "--against", source)
    assert (code, rules_of(report)["QC122"]) == (3, [name])


def test_the_set_is_inspected_as_one(made: Path, source: Path) -> None:
    found = json.loads(run_cli("inspect", made, "--json").out)
    plain = json.loads(run_cli("inspect", source, "--json").out)
    for key in ("tensors", "bytes", "roles", "dtypes", "formats"):
        assert found[key] == plain[key], key
    assert [stage["folder"] for stage in found["stages"]] == list(STAGES)
    assert found["path"] == str(made)
    assert "stage" not in found["made_by"]
    text = run_cli("inspect", made).out
    assert f"stage 1  {STAGES[1]}: layers 1-1, " in text
    assert str(made / STAGES[0]) not in text


@pytest.mark.parametrize("line", ["[1]", "{", '{"name": 5}'])
def test_a_broken_receipt_is_one_error(line: str, stages: Path) -> None:
    with (stages / STAGES[0] / "qconvert.receipt.jsonl").open("a") as stream:
        stream.write(line + "\n")
    code, report = validated(stages)
    assert code == 3
    assert "QC120" in rules_of(report)


@pytest.mark.parametrize("stage", [5, {"number": "0", "partition": [1, 1]}, {"number": 0},
                                   {"number": 9, "partition": [1, 1]},
                                   {"number": True, "partition": [1, 1]}])  # fmt: skip
def test_a_stage_that_does_not_say_which(stage: Any, stages: Path) -> None:
    edit_json(stages / STAGES[0] / "qconvert.json", lambda value: value.update(stage=stage))
    says = "does not state which stage it is|expected 'stage' to be an object"
    with pytest.raises(CheckpointError, match=says):
        open_stages(stages)


def test_a_stage_without_a_quantized_tensor_has_the_models_config(tmp_path: Path) -> None:
    """GLM's first layer is dense: alone in a stage, beside packed experts in another."""
    source, packed = published("glm4_moe").write(tmp_path / "source"), tmp_path / "packed"
    assert run_cli("w4a16", source, packed, "--rtn", "--jobs", "1").code == 0
    ran("split", packed, tmp_path / "stages", "--pp", "1,2", "--for", "sglang", "--jobs", "1")
    done = run_cli("validate", tmp_path / "stages" / "stage-00-of-02")
    assert "QC012" not in done.out + done.err
