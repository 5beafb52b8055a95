"""Every rule of validation is broken in turn, and says so; a sound folder breaks none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken_repos import edit_receipt, resized, sealed_again
from checkpoints import (
    INDEX,
    Model,
    Tensor,
    bf16_moe,
    convert,
    copied,
    edit_header,
    edit_json,
    fp8_moe,
    run_cli,
    tensor,
    tree,
    unjudged,
    without,
    write_shard,
)

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.reports import render
from qconvert.validation.runner import Folder, Report, Request, rules, validate_folder

MANIFEST, RECEIPT = "qconvert.json", "qconvert.receipt.jsonl"
HEAD = "lm_head.weight"
Q = "model.layers.0.self_attn.q_proj"
DROP_HEAD = "passes:\n- drop: {match: lm_head.weight, why: a base model}\n- dequant\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("validate") / "source")


@pytest.fixture(scope="module")
def master(source: Path) -> Path:
    """Several shards, so with an index, and side files."""
    out = source.parent / "out"
    convert("dequant", source, out, "--max-shard-size", "1KB")
    return out


@pytest.fixture
def out(master: Path, tmp_path: Path) -> Path:
    """A sound output to break."""
    return copied(master, tmp_path / "out")


def found_in(out: Path, against: Path | None = None, *, full: bool = False) -> list[str]:
    """Rules broken, by API and by command line alike."""
    report = validate_folder(
        out,
        None if against is None else str(against),
        request=Request("full" if full else "headers"),
    )
    flags: list[str | Path] = ["--level", "full"] if full else []
    flags += ["--against", against] if against else []
    result = run_cli("validate", out, *flags, "--json")
    assert json.loads(result.out) == json.loads(render(report, "json"))
    assert result.err == ""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert result.code == (3 if errors else 0)
    return [finding.rule for finding in report.findings]


# --- Sound folders -------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--max-shard-size", "1KB"), ("--sha256",)])
@pytest.mark.parametrize("command", ["dequant", "copy"])
def test_a_sound_output_has_no_finding(
    command: str, flags: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    convert(command, source, out, *flags)
    before = tree(out)
    report = validate_folder(out, str(source), request=Request("full"))
    assert report.findings == []
    # What costs more, or needs a GPU to be quick, is only done where it is asked for.
    assert all("(give --" in text for text in report.not_checked), report.not_checked
    assert len(report.proved) >= 12
    assert found_in(out, source, full=True) == []
    assert tree(out) == before


def test_dropped_tensors_are_accounted_for(source: Path, tmp_path: Path) -> None:
    unjudged(DROP_HEAD, source, tmp_path / "out")
    report = validate_folder(tmp_path / "out", str(source), request=Request("full"))
    assert [(f.rule, f.where) for f in report.findings] == [("QC013", HEAD)]
    assert "every source byte was used, or dropped by a named rule" in report.proved


def test_a_source_is_sound_without_a_receipt(source: Path) -> None:
    report = validate_folder(source)
    assert report.findings == []
    assert [text for text in report.not_checked if "no qconvert.receipt.jsonl" in text]


def test_what_was_not_looked_at_is_said(out: Path) -> None:
    report = validate_folder(out)
    for option in ("--against SRC", "--level sample or full", "--kernels"):
        assert any(option in text for text in report.not_checked), option
    assert len(set(report.not_checked)) == len(report.not_checked)


def test_for_people(out: Path, source: Path) -> None:
    result = run_cli("validate", out, "--against", source)
    lines = result.out.splitlines()
    assert result.code == 0
    assert lines[0].startswith("passed at level headers: 0 errors, 0 warnings; bytes of weights")
    assert lines[-1] == "0 errors, 0 warnings"
    assert all(line.startswith("proved: ") for line in lines[1:-2])
    every = run_cli("validate", out, "--against", source, "-v").out.splitlines()
    left = [line for line in every if line.startswith("not checked: ")]
    assert lines[-2] == f"not checked: {len(left)} claims, which -v lists"
    (out / "tokenizer.json").unlink()
    result = run_cli("validate", out, "--against", source)
    assert result.code == 3
    rules = [line.split()[:3] for line in result.out.splitlines()[1:3]]
    assert rules == [["error", "QC032", "tokenizer.json:"], ["error", "QC020", "tokenizer.json:"]]
    assert result.out.splitlines()[-1] == "2 errors, 0 warnings"


# --- One rule each -------------------------------------------------------------------------------

Break = Callable[[Path], object]
BROKEN: list[tuple[str, str, Break, str]] = []  # rule, what for, how, what the finding names


def breaks(rule: str, where: str) -> Callable[[Break], Break]:
    """Note how a rule is broken in a copy of the sound output."""

    def note(how: Break) -> Break:
        BROKEN.append((rule, how.__name__.strip("_"), how, where))
        return how

    return note


def home(out: Path, name: str) -> Path:
    index = json.loads((out / INDEX).read_bytes())
    return out / str(index["weight_map"][name])


def flip(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


@breaks("QC001", "out")
def _a_shard_is_cut(out: Path) -> None:
    file = home(out, HEAD)
    file.write_bytes(file.read_bytes()[:-1])


@breaks("QC001", "out")
def _the_receipt_is_no_json(out: Path) -> None:
    (out / RECEIPT).write_text("{}\n{")


@breaks("QC001", "out")
def _the_receipt_is_another_program_s(out: Path) -> None:
    (out / RECEIPT).write_text('{"paid": 5}\n')


@breaks("QC001", "out")
def _a_receipt_line_lacks_its_type(out: Path) -> None:
    edit_receipt(out, lambda line: line.pop("dtype", None) and None)


@breaks("QC001", "out")
def _a_receipt_line_is_a_list(out: Path) -> None:
    with (out / RECEIPT).open("a") as stream:
        stream.write("[]\n")


@breaks("QC001", "out")
def _a_receipt_source_is_broken(out: Path) -> None:
    edit_receipt(out, lambda line: line.update(sources=[{"name": 5}]) if "name" in line else None)


@breaks("QC001", "out")
def _the_receipt_is_no_text(out: Path) -> None:
    (out / RECEIPT).write_bytes(b"\xff\xfe\n")


@breaks("QC001", "out")
def _the_manifest_is_no_json(out: Path) -> None:
    (out / MANIFEST).write_text("{")


@breaks("QC001", "out")
def _the_manifest_is_another_program_s(out: Path) -> None:
    (out / MANIFEST).write_text('{"identity": []}')


@breaks("QC001", "out")
def _the_manifest_s_rules_are_broken(out: Path) -> None:
    edit_json(out / MANIFEST, lambda manifest: manifest.update(dropped={"rule": 1}))


@breaks("QC001", "out")
def _hf_quant_config_is_broken(out: Path) -> None:
    (out / "hf_quant_config.json").write_text("[]")


@breaks("QC002", "out")
def _a_workroom_is_left(out: Path) -> None:
    (out / ".qconvert").mkdir()


@breaks("QC010", INDEX)
def _the_index_miscounts(out: Path) -> None:
    edit_json(out / INDEX, lambda index: index["metadata"].update(total_size=9999))
    resized(out, INDEX)


@breaks("QC020", HEAD)
def _a_tensor_is_not_in_the_receipt(out: Path) -> None:
    edit_receipt(out, lambda line: line.get("name") != HEAD)


@breaks("QC020", "ghost")
def _a_tensor_of_the_receipt_is_not_there(out: Path) -> None:
    lines = (out / RECEIPT).read_text().splitlines(keepends=True)
    ghost = {**json.loads(lines[0]), "name": "ghost"}
    (out / RECEIPT).write_text("".join([*lines, json.dumps(ghost) + "\n"]))
    sealed_again(out)


@breaks("QC020", "tokenizer.json")
def _a_side_file_is_gone(out: Path) -> None:
    (out / "tokenizer.json").unlink()


@breaks("QC020", "more.safetensors")
def _a_shard_was_added(out: Path) -> None:
    write_shard(out / "more.safetensors", {"a": tensor("U8", 1)})


@breaks("QC021", "tokenizer.json")
def _a_side_file_grew(out: Path) -> None:
    with (out / "tokenizer.json").open("a") as stream:
        stream.write("\n")


@breaks("QC021", HEAD)
def _the_receipt_has_another_type(out: Path) -> None:
    edit_receipt(out, lambda line: line.update(dtype="F16") if line.get("name") == HEAD else None)


@breaks("QC021", HEAD)
def _a_header_has_another_type(out: Path) -> None:
    file = home(out, HEAD)
    size = file.stat().st_size
    edit_header(file, lambda table: table[HEAD].update(dtype="I16"))
    # Headers are padded to a block; the writer of tests does not pad, so the place differs too.
    assert file.stat().st_size != size
    resized(out, file.name)


@pytest.mark.parametrize(
    ("rule", "how", "where"),
    [pytest.param(rule, how, where, id=f"{rule}-{name}") for rule, name, how, where in BROKEN],
)
def test_headers_alone(rule: str, how: Break, where: str, out: Path) -> None:
    how(out)
    report = validate_folder(out)
    assert [finding.rule for finding in report.findings] == [rule] * len(report.findings)
    assert report.findings[0].severity == "error"
    wanted = str(out) if where == "out" else where
    assert wanted in {finding.where for finding in report.findings}
    assert all(finding.message for finding in report.findings)
    assert set(found_in(out)) == {rule}


def test_unfinished_work_alone(source: Path, tmp_path: Path) -> None:
    """A run that was interrupted: not a checkpoint, and why."""
    (tmp_path / "out" / ".qconvert").mkdir(parents=True)
    assert found_in(tmp_path / "out") == ["QC002", "QC001"]


def test_another_file_is_only_a_warning(out: Path) -> None:
    (out / "NOTES.md").write_text("# Mine\n")
    report = validate_folder(out)
    assert [(f.rule, f.severity, f.where) for f in report.findings] == [
        ("QC020", "warning", "NOTES.md")
    ]
    assert found_in(out) == ["QC020"]


def test_files_of_git_are_passed_over(out: Path) -> None:
    """A repository that holds the folder has its workflows beside the weights."""
    (out / ".github" / "workflows").mkdir(parents=True)
    (out / ".github" / "workflows" / "validate.yml").write_text("name: validate\n")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    assert validate_folder(out).findings == []


def test_an_added_shard_that_is_read_first_is_of_two_rules(out: Path) -> None:
    """A file that was not written, which transformers reads instead of the index's shards."""
    write_shard(out / "model.safetensors", {"a": tensor("U8", 1)})
    found = [(f.rule, f.severity, f.where) for f in validate_folder(out).findings]
    assert found == [(rule, "error", "model.safetensors") for rule in ("QC020", "QC098")]


class Sources:
    """Plain checkpoints, which need no receipt, with one thing wrong."""

    @staticmethod
    def rules(model: Model, folder: Path) -> list[tuple[str, str]]:
        report: Report = validate_folder(model.write(folder))
        assert found_in(folder) == [finding.rule for finding in report.findings]
        return [(finding.rule, finding.where) for finding in report.findings]


def test_qc011_a_weight_without_its_scale(tmp_path: Path) -> None:
    model = fp8_moe()
    model.tensors = without(model.tensors, [f"{Q}.weight_scale_inv"])
    rules = Sources.rules(model, tmp_path / "x")
    # The scale of a layer's projection is also one that the family misses.
    assert ("QC011", f"{Q}.weight") in rules
    assert {rule for rule, _ in rules} <= {"QC011", "QC013"}


def test_qc011_a_scale_without_its_weight(tmp_path: Path) -> None:
    model = fp8_moe()
    model.tensors["model.stray.weight_scale_inv"] = tensor("F32", 1, 1)
    assert Sources.rules(model, tmp_path / "x") == [("QC011", "model.stray.weight_scale_inv")]


def test_qc012_a_block_without_quantized_tensors(tmp_path: Path) -> None:
    model = bf16_moe()
    model.config["quantization_config"] = fp8_moe().config["quantization_config"]
    rules = Sources.rules(model, tmp_path / "x")
    assert rules == [("QC012", "config.json: quantization_config")]


def test_qc012_a_nested_stale_block(tmp_path: Path) -> None:
    """Some runtimes let it override the root's."""
    model = bf16_moe(text_config={"quantization_config": {"quant_method": "fp8"}})
    rules = Sources.rules(model, tmp_path / "x")
    assert rules == [("QC012", "config.json: text_config: quantization_config")]


def test_qc012_quantized_tensors_without_a_block(tmp_path: Path) -> None:
    model = fp8_moe()
    del model.config["quantization_config"]
    ((rule, where),) = Sources.rules(model, tmp_path / "x")
    assert rule == "QC012"
    assert model.tensors[where].dtype == "F8_E4M3"


def test_qc013_a_missing_tensor(tmp_path: Path) -> None:
    model = bf16_moe()
    gone = "model.layers.1.mlp.experts.1.up_proj.weight"
    model.tensors = without(model.tensors, [gone])
    assert Sources.rules(model, tmp_path / "x") == [("QC013", gone)]


def test_qc014_tied_and_unlike(tmp_path: Path) -> None:
    model = bf16_moe(tie_word_embeddings=True)
    shape = model.tensors[HEAD].shape
    assert Sources.rules(model, tmp_path / "x") == []
    model.tensors[HEAD] = tensor("F32", *shape)
    ((rule, where),) = Sources.rules(model, tmp_path / "y")
    assert (rule, where) == ("QC014", HEAD)


def test_qc022_a_flipped_bit(out: Path) -> None:
    flip(home(out, HEAD), -1)
    assert found_in(out) == []  # headers cannot tell
    report = validate_folder(out, request=Request("full"))
    assert [finding.rule for finding in report.findings] == ["QC022"]
    assert found_in(out, full=True) == ["QC022"]


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", INDEX])
def test_qc022_a_changed_side_file(name: str, out: Path) -> None:
    if name == INDEX:  # as JSON it says the same
        raw = (out / name).read_bytes()
        (out / name).write_bytes(raw.replace(b"{\n", b"{\t", 1))
    else:
        flip(out / name, 5)
    report = validate_folder(out, request=Request("full"))
    assert [(finding.rule, finding.where) for finding in report.findings] == [("QC022", name)]


def test_a_card_edited_by_hand_and_the_hub_s_own_file_are_no_faults(
    out: Path, source: Path, tmp_path: Path
) -> None:
    its_own = copied(source, tmp_path / "source")
    (its_own / "README.md").write_text("# A model\n")
    carded = tmp_path / "carded"
    assert run_cli("dequant", its_own, carded).code == 0
    (carded / "README.md").write_text("# Another text\n")
    (carded / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    found = run_cli("validate", carded, "--against", its_own, "--level", "full")
    assert found.code == 0, found.out
    assert "0 errors, 0 warnings" in found.out


def test_qc022_every_tensor_is_hashed(out: Path) -> None:
    """A flipped bit in any tensor is found, and only there."""
    for name in json.loads((out / INDEX).read_bytes())["weight_map"]:
        lines = map(json.loads, (out / RECEIPT).read_text().splitlines())
        (offset,) = [line["offset"] for line in lines if line.get("name") == name]
        flip(home(out, name), offset)
        report = validate_folder(out, request=Request("full"))
        assert [(finding.rule, finding.where) for finding in report.findings] == [("QC022", name)]
        flip(home(out, name), offset)


def test_hashes_of_a_sample_are_counted(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was not read is not said to be checked."""
    monkeypatch.setattr(Folder.some, "__defaults__", (3,))
    names = json.loads((out / INDEX).read_bytes())["weight_map"]
    report = validate_folder(out, request=Request("sample"))
    said = f"3 of {len(names)} tensors have the hash they were written with (in a sample)"
    assert said in report.proved
    assert f"bytes of the other {len(names) - 3} tensors (give --level full)" in report.not_checked
    whole = validate_folder(out, request=Request("full"))
    assert "every byte has the hash it was written with" in whole.proved


def test_qc030_lost_bytes(out: Path, source: Path) -> None:
    """The receipt of the head says that only half of it was read."""

    def halve(line: dict[str, Any]) -> None:
        for part in line.get("sources", ()):
            if part["name"] == HEAD:
                part["stop"] //= 2

    edit_receipt(out, halve)
    report = validate_folder(out, str(source))
    assert [(finding.rule, finding.where) for finding in report.findings] == [("QC030", HEAD)]
    assert "bytes from 80 of 160" in report.findings[0].message
    assert found_in(out, source) == ["QC030"]


def test_qc030_bytes_lost_in_the_middle(out: Path, source: Path) -> None:
    def pierce(line: dict[str, Any]) -> None:
        if line.get("name") == HEAD:
            (part,) = line["sources"]
            line["sources"] = [{**part, "stop": 10}, {**part, "start": 12}]

    edit_receipt(out, pierce)
    report = validate_folder(out, str(source))
    assert [(finding.rule, finding.where) for finding in report.findings] == [("QC030", HEAD)]
    assert "bytes from 10" in report.findings[0].message


def test_qc031_another_source(out: Path, tmp_path: Path) -> None:
    model = fp8_moe()
    model.tensors[HEAD] = Tensor("I16", model.tensors[HEAD].shape, model.tensors[HEAD].data)
    other = model.write(tmp_path / "other")
    report = validate_folder(out, str(other))
    assert [(finding.rule, finding.where) for finding in report.findings] == [("QC031", str(other))]
    assert found_in(out, other) == ["QC031"]


def test_qc031_the_same_headers_with_other_weights(out: Path, source: Path, tmp_path: Path) -> None:
    """Two fine-tunes of one base: headers alone cannot tell them apart."""
    other = copied(source, tmp_path / "other")
    file = next(iter(sorted(other.glob("*.safetensors"))))
    flip(file, file.stat().st_size - 1)
    assert found_in(out, other) == ["QC031"]


def test_qc031_speaks_of_other_files_only_where_all_tensors_are_there(
    out: Path, tmp_path: Path
) -> None:
    model = fp8_moe()
    other = model.write(tmp_path / "resharded", 1)
    (finding,) = validate_folder(out, str(other)).findings
    assert (finding.rule, "in other files" in finding.message) == ("QC031", True)
    del model.tensors[HEAD]
    less = model.write(tmp_path / "less", 1)
    (finding, *_) = [f for f in validate_folder(out, str(less)).findings if f.rule == "QC031"]
    assert "in other files" not in finding.message


def test_qc033_a_source_that_changed_where_no_sample_fell(
    out: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source of a large model is only sampled by name; --level full reads it all again."""
    other = copied(source, tmp_path / "other")
    file = next(iter(sorted(other.glob("*.safetensors"))))
    known = Checkpoint.open(source).sample_digest
    flip(file, file.stat().st_size - 1)
    monkeypatch.setattr(Checkpoint, "sample_digest", known)
    report = validate_folder(out, str(other), request=Request("full"))
    # The folder's weights are no longer this source's, of course.
    assert sorted(finding.rule for finding in report.findings) == ["QC033", "QC060"]
    assert len({f.where.removesuffix("_scale_inv") for f in report.findings}) == 1
    assert sorted(found_in(out, other, full=True)) == ["QC033", "QC060"]


def test_qc015_a_grid_that_does_not_fit(tmp_path: Path) -> None:
    """Columns of a [2, 3] grid for 128-wide blocks of a 256-wide weight."""
    model = fp8_moe()
    name = f"{Q}.weight_scale_inv"
    old = model.tensors[name]
    rows, columns = old.shape
    model.tensors[name] = tensor("F32", rows, columns + 1)
    folder = model.write(tmp_path / "source")
    report = validate_folder(folder)
    found = [(finding.rule, finding.where) for finding in report.findings]
    assert found == [("QC015", name)]
    assert found_in(folder) == ["QC015"]


def test_qc032_a_side_file_that_did_not_come_along(out: Path, source: Path) -> None:
    name = "tokenizer.json"
    (out / name).unlink()
    edit_receipt(out, lambda line: line["file"] != name)
    report = validate_folder(out, str(source))
    assert [(finding.rule, finding.where) for finding in report.findings] == [("QC032", name)]
    assert found_in(out, source) == ["QC032"]


def test_a_source_that_cannot_be_opened_is_the_caller_s_error(out: Path, tmp_path: Path) -> None:
    """Not a finding: it says nothing of the folder."""
    result = run_cli("validate", out, "--against", tmp_path / "gone")
    assert result.code == 1
    assert result.err.startswith("qconvert: error: ")


def test_every_rule_is_tested() -> None:
    """Each id stands in a test that breaks it; tests of reports name what they like."""
    here = Path(__file__).parent
    others = [file for file in here.glob("*.py") if file.name != "test_reports.py"]
    named = {rule for f in others for rule in re.findall(r'"(QC\d{3})"', f.read_text("utf-8"))}
    assert set(rules()) <= named, sorted(set(rules()) - named)
