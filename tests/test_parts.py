"""validate --shard: parts of several machines make the report of one, or are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken_repos import overwrite
from checkpoints import bf16_moe, convert, edit_json, fp8_moe, read_tensors, run_cli, tree

import qconvert
from qconvert import api
from qconvert.cli.demo_checkpoint import write_sample
from qconvert.core.errors import CheckpointError
from qconvert.run.division import Shard
from qconvert.validation.findings import Finding, Measure, OnlyRead
from qconvert.validation.parts import Part, read_part, write_part

SHARDS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("parts") / "source")


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    convert("dequant", source, source.parent / "made")
    return source.parent / "made"


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts for CPUs: other validators, other names."""
    folder = tmp_path_factory.mktemp("amx")
    write_sample(folder / "source")
    words = ("amx", folder / "source", folder / "amx", "--method", "int8", "--numa", "2")
    done = run_cli(*words, "--jobs", "1")
    assert done.code == 0, done.err
    return folder / "amx"


def _shards(
    folder: Path, parts: Path, source: Path | None, *more: str, level: str = "full"
) -> None:
    for index in range(SHARDS):
        against = () if source is None else ("--against", source)
        done = run_cli(
            "validate", folder, *against, "--level", level, "--shard", f"{index}/{SHARDS}",
            "--parts", parts, "--jobs", "1", *more,
        )  # fmt: skip
        assert done.code == 0, done.err
        assert f"shard {index}/{SHARDS}: " in done.out


def _agree(
    folder: Path, parts: Path, source: Path | None, *more: str, level: str = "full"
) -> api.Report:
    """All parts merged are what one machine prints, in text and in JSON, and end alike."""
    _shards(folder, parts, source, *more, level=level)
    against = () if source is None else ("--against", source)
    words = ("validate", folder, *against, "--level", level, "--jobs", "1", *more)
    for form in ("text", "json", "html"):
        whole, merged = (
            run_cli(*words, "--format", form),
            run_cli("validate", "--merge", parts, "--format", form),
        )
        assert (merged.out, merged.code) == (whole.out, whole.code)
    return api.merge_parts([parts])


# --- Equal to one machine's -----------------------------------------------------------------------


@pytest.mark.parametrize("level", ["full", "sample"])
def test_a_sound_folder(level: str, made: Path, source: Path, tmp_path: Path) -> None:
    before = tree(made)
    report = _agree(made, tmp_path / "parts", source, level=level)
    assert report.errors == 0
    assert len(report.measures) == 33
    assert any("every weight is the source's" in text for text in report.proved)
    assert tree(made) == before, "nothing is written into OUT"
    shares = [read_part(file) for file in sorted((tmp_path / "parts").iterdir())]
    assert sum(part.tasks for part in shares) == shares[0].of_tasks > 100
    assert sum(part.nbytes for part in shares) == shares[0].of_bytes
    assert all(part.tasks > 0 for part in shares)
    assert max(part.nbytes for part in shares) < 2 * min(part.nbytes for part in shares)


def test_without_a_source(made: Path, tmp_path: Path) -> None:
    report = _agree(made, tmp_path / "parts", None, "--for", "vllm==0.33.0")
    assert any("--against" in text for text in report.not_checked)


def _numbers_changed(folder: Path) -> None:
    """NaN in the first weight of matrices of both layers, and one weight of the head halved."""
    names = [f"model.layers.{layer}.mlp.experts.1.up_proj.weight" for layer in (0, 1)]
    for name, data in [*((name, b"\xc0\x7f") for name in names), ("lm_head.weight", b"\x00\x3f")]:
        overwrite(folder, name, data)


def _config_and_order(folder: Path) -> None:
    """A layer that the config has not, and two experts' matrices exchanged."""
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=3))
    (folder / "qconvert.receipt.jsonl").unlink()
    names = [f"model.layers.1.mlp.experts.{n}.up_proj.weight" for n in (0, 1)]
    found = read_tensors(folder)
    for name, other in zip(names, reversed(names), strict=True):
        overwrite(folder, name, found[other].data)


def _truncated(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("break_it", "rules"),
    [
        (_numbers_changed, {"QC022"}),
        (_config_and_order, {"QC083", "QC013", "QC060"}),
        (_truncated, {"QC001"}),
    ],
)
def test_a_broken_folder(
    break_it: Callable[[Path], None], rules: set[str], made: Path, source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made, tmp_path / "broken")
    break_it(folder)
    report = _agree(folder, tmp_path / "parts", source)
    assert rules <= {finding.rule for finding in report.findings}, report.findings
    by_part = [read_part(file).errors for file in sorted((tmp_path / "parts").iterdir())]
    if break_it is _numbers_changed:
        assert sum(count > 0 for count in by_part) >= 2, "more than one part found something"


def test_experts_for_cpus(amx: Path, tmp_path: Path) -> None:
    """(Level full has kt-kernel compute, where it is installed: half a minute.)"""
    report = _agree(amx, tmp_path / "parts", amx.parent / "source", level="sample")
    assert report.errors == 0
    assert {measure.format for measure in report.measures} == {"amxint8"}


def test_a_folder_in_a_store(
    made: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each machine reads headers into a cache of its own, which shows nowhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shutil.copytree(made, tmp_path / "broken")
    _numbers_changed(folder)
    for index in range(SHARDS):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{index}"))
        words = ("--level", "full", "--shard", f"{index}/{SHARDS}", "--parts", tmp_path / "parts")
        done = run_cli("validate", f"file://{folder}", "--against", source, *words, "--jobs", "1")
        assert done.code == 0, done.err
    whole = api.validate(f"file://{folder}", source, level="full", jobs=1)
    merged = api.merge_parts([tmp_path / "parts"])
    assert merged == whole
    assert merged.errors > 0
    assert "cache" not in repr(merged)


def test_jobs_do_not_show(made: Path, source: Path, tmp_path: Path) -> None:
    """Nor does a part that was done again, beside the first under another name."""
    _shards(made, tmp_path / "one", source)
    api.validate_part(made, source, shard="1/3", parts=tmp_path / "two", jobs=2)
    one, two = (tmp_path / name / "part-1-of-3.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    merged = api.merge_parts([tmp_path / "one", two])
    assert merged == api.merge_parts([tmp_path / "one"])


def test_more_shards_than_work(tmp_path: Path, source: Path, made: Path) -> None:
    for index in range(400):
        if index % 100 == 0 or index == 399:
            part = api.validate_part(made, shard=f"{index}/400", parts=tmp_path, jobs=1)
            assert part.tasks <= 8
    with pytest.raises(CheckpointError, match=r"395 parts of 400 missing: 1/400, .* and 387 more"):
        api.merge_parts([tmp_path])


# --- Refused --------------------------------------------------------------------------------------


@pytest.fixture
def parts(made: Path, source: Path, tmp_path: Path, master: Path) -> Path:
    return shutil.copytree(master, tmp_path / "parts")


@pytest.fixture(scope="module")
def master(made: Path, source: Path) -> Path:
    _shards(made, source.parent / "found", source)
    return source.parent / "found"


def _refused(parts: Path, *texts: str) -> None:
    done = run_cli("validate", "--merge", parts)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    for text in texts:
        assert text in done.err, done.err


def test_a_missing_part_is_named(parts: Path) -> None:
    (parts / "part-1-of-3.json").unlink()
    _refused(parts, "1 part of 3 missing: 1/3", "--shard 1/3")
    (parts / "part-0-of-3.json").unlink()
    _refused(parts, "2 parts of 3 missing: 0/3, 1/3")
    (parts / "part-2-of-3.json").unlink()
    _refused(parts, "holds no part of a validation")
    shutil.rmtree(parts)
    _refused(parts, "no such file")


def test_doubled_parts(parts: Path) -> None:
    """Equal ones are harmless; of two that differ neither is believed."""
    whole = run_cli("validate", "--merge", parts)
    copy = parts / "part-2-of-3-again-of-.json"
    shutil.copy(parts / "part-2-of-3.json", copy)
    assert run_cli("validate", "--merge", parts).out == whole.out
    found = json.loads(copy.read_text())
    found["results"].pop()
    copy.write_text(json.dumps(found))
    _refused(parts, "part-2-of-3.json", "is of shard 2/3", "differs from it")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("folder", "0" * 64, "the folder was another one, or in another state"),
        ("against", "", "the source was another one"),
        ("level", "sample", "another --level was given"),
        ("request", "(None, 1)", "other options were given"),
        ("tasks", "0" * 64, "the checks were others"),
        ("beside", "", "--pair or --draft was another one"),
    ],
)
def test_parts_of_another_validation(key: str, value: str, said: str, parts: Path) -> None:
    edit_json(parts / "part-1-of-3.json", lambda found: found["identity"].update({key: value}))
    _refused(parts, "part-1-of-3.json: is of another validation", said)


def test_parts_that_really_are_of_others(
    parts: Path, made: Path, source: Path, tmp_path: Path
) -> None:
    """As those that were made up: another folder, source, level, runtime; one that changed since."""
    other = bf16_moe().write(tmp_path / "other")
    changed = shutil.copytree(made, tmp_path / "changed")
    overwrite(changed, "lm_head.weight", b"\x00\x3f")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (other, {"against": source}, "the folder was another one"),
        (changed, {"against": source}, "the folder was another one, or in another state"),
        (made, {"against": other}, "the source was another one"),
        (made, {"against": source, "level": "sample"}, "another --level was given"),
        (made, {"against": source, "runtime": "vllm==0.33.0"}, "other options were given"),
    ]
    for folder, more, said in cases:
        given: dict[str, Any] = {"shard": "1/3", "parts": parts, "jobs": 1, **more}
        api.validate_part(folder, **given)
        _refused(parts, said)


def test_parts_of_another_version_or_division(parts: Path) -> None:
    file = parts / "part-1-of-3.json"
    edit_json(file, lambda found: found.update(qconvert="0.0.9"))
    _refused(parts, f"made by qconvert 0.0.9, this is {qconvert.__version__}")
    edit_json(file, lambda found: found.update(qconvert=qconvert.__version__, shard="1/2"))
    _refused(parts, "is one of 2 parts, ", "one of 3")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(shard="3/3"),
        lambda found: found.update(shard="1/" + "9" * 400),
        lambda found: found.update(begun=None),
        lambda found: found["begun"]["ran"].append(["nobody", [], [], 0, ""]),
        lambda found: found["begun"].update(about={"folder": 1}),
        lambda found: found["begun"]["tables"].append(["t", ["a"], [["b", "c"]], ""]),
        lambda found: found["results"].append([0, "finding", "QC022", "fatal", "x", "y"]),
        lambda found: found["results"].append([0, "finding", "QC999", "error", "x", "y"]),
        lambda found: found["results"].append([0, "measure", "x"]),
        lambda found: found["results"].append([9999, "read", "x"]),
        lambda found: found["results"].append([-1, "read", "x"]),
        lambda found: found["results"].append([True, "read", "x"]),
        lambda found: found["results"].append([0, "table", "x"]),
        lambda found: found["results"].append(7),
        lambda found: found["results"].append([]),
        lambda found: found.update(tasks=[3, 2]),
        lambda found: found.update(tasks=[0, found["tasks"][1]]),
        lambda found: found["identity"].update(level="headers"),
        lambda found: found.update(identity=[]),
    ],
)
def test_what_is_no_part(change: Callable[[Any], None], parts: Path) -> None:
    edit_json(parts / "part-0-of-3.json", change)
    _refused(parts, "part-0-of-3.json")


def test_a_part_cut_short(parts: Path) -> None:
    file = parts / "part-2-of-3.json"
    file.write_bytes(file.read_bytes()[:-9])
    _refused(parts, "part-2-of-3.json", "not valid JSON")


def test_what_a_part_holds_comes_back(tmp_path: Path) -> None:
    results = (
        (0, Finding("QC022", "error", "a", "b\n\u202e")),
        (1, Measure("t", "q", None, 3, "fp8", 5, float("inf"), 0.1, float("nan"))),
        (2, OnlyRead("text")),
    )
    names = ("folder", "against", "beside", "level", "request", "tasks")
    identity = {name: "full" if name == "level" else "x" for name in names}
    part = Part(Shard(1, 2), identity, 1, 2, 3, 4, results, None)
    assert repr(read_part(write_part(part, tmp_path / "new" / "folder"))) == repr(part)


@pytest.mark.parametrize(
    "line",
    [
        "validate o --level full --shard 0/2",
        "validate o --level full --parts p",
        "validate o --shard 0/2 --parts p",
        "validate o --level full --shard 0/2 --parts p --against s --attribute",
        "validate o --level full --shard 0/2 --parts p --kernels",
        "validate o --level full --shard 0/2 --parts p --report r.html",
        "validate o --level full --shard 0/2 --parts p --format json",
        "validate o --merge p",
        "validate --merge p --level full",
        "validate --merge p --shard 0/2",
    ],
)
def test_options_that_exclude_one_another(line: str) -> None:
    done = run_cli(*line.split())
    assert (done.code, "Error: " in done.err, done.out) == (2, True, ""), done.err


def test_stages_are_validated_each(source: Path, tmp_path: Path) -> None:
    stages = tmp_path / "stages"
    done = run_cli("split", source, stages, "--pp", "1,1", "--for", "vllm", "--jobs", "1")
    assert done.code == 0, done.err
    words = ("--level", "full", "--shard", "0/2", "--parts", tmp_path / "parts")
    refused = run_cli("validate", stages, *words)
    assert (refused.code, "not with stages" in refused.err) == (2, True), refused.err
    assert run_cli("validate", stages / "stage-01-of-02", *words).code == 0
