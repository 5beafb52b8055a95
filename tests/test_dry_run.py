"""A dry run says what the run would refuse, by the run's own checks, and writes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import Result, fp8_moe, run_cli, tree
from models import qwen3_moe

from qconvert.run.work.files import Files


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("dry") / "source")


@pytest.fixture(scope="module")
def finished(source: Path) -> Path:
    out = source.parent / "finished"
    assert run_cli("dequant", source, out, "--jobs", "1").code == 0
    return out


def interrupted(source: Path, out: Path, *words: str) -> Path:
    """What a run leaves that was stopped right before its files were published."""
    publish = Files.rename

    def stop(self: Files, old: Path, new: Path) -> None:
        raise KeyboardInterrupt

    Files.rename = stop  # type: ignore[method-assign]
    try:
        assert run_cli("dequant", source, out, "--jobs", "1", *words).code == 130
    finally:
        Files.rename = publish  # type: ignore[method-assign]
    return out


class Case(NamedTuple):
    name: str
    prepare: Callable[[Path, Path], Any]
    says: str
    words: tuple[str, ...] = ()


def foreign(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def another_finished(source: Path, out: Path) -> None:
    assert run_cli("dequant", source, out, "--jobs", "1", "--max-shard-size", "1GB").code == 0


def a_file(source: Path, out: Path) -> None:
    out.write_text("no folder")


_CASES = [
    Case("foreign file", foreign, "is not empty (notes.txt) and is not a folder of qconvert's"),
    Case("another plan's result", another_finished, "already holds the finished result of another"),
    Case(
        "another plan's work", lambda s, o: interrupted(s, o, "--max-shard-size", "1KB"),
        "holds unfinished work of another plan",
    ),
    Case("a file", a_file, "is not a folder"),
]  # fmt: skip


def refused_alike(source: Path, out: Path, says: str, *words: str) -> Result:
    """The dry run ends as the run does, having printed the plan, and touches nothing."""
    before = tree(out.parent)
    dry = run_cli("dequant", source, out, "--dry-run", *words)
    assert (dry.code, says in dry.err) == (1, True), dry.err
    assert dry.err.startswith("qconvert: error: ")
    assert dry.err.count("\n") == 1
    assert "\nbytes   " in dry.out, "the plan comes first"
    planned = run_cli("plan", "dequant-fp8", source, out, *words, "--json")
    assert (planned.code, planned.err) == (1, dry.err)
    assert f"qconvert: error: {'; '.join(json.loads(planned.out)['refusals'])}\n" == dry.err
    assert tree(out.parent) == before
    run = run_cli("dequant", source, out, "--jobs", "1", *words)
    assert (run.code, run.err.splitlines()[-1] + "\n") == (1, dry.err)
    return dry


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_what_the_run_refuses_the_dry_run_refuses(case: Case, source: Path, tmp_path: Path) -> None:
    case.prepare(source, tmp_path / "out")
    refused_alike(source, tmp_path / "out", case.says, *case.words)


@pytest.mark.parametrize("below", ["", "sub/folder", ".."])
def test_a_folder_on_its_source(below: str, source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "above" / "source"
    shutil.copytree(source, mine)
    before = tree(tmp_path)
    dry = run_cli("dequant", mine, mine / below, "--dry-run")
    assert (dry.code, "must lie apart from the source" in dry.err) == (1, True)
    assert "\nbytes   " in dry.out
    assert tree(tmp_path) == before


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, real.f_frsize

    monkeypatch.setattr("os.statvfs", lambda path: Full())
    refused_alike(source, tmp_path / "out", f"free ({real.f_frsize}); nothing was written")


def test_a_folder_that_takes_no_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode, **more: Path(path) != tmp_path)
    dry = run_cli("dequant", source, tmp_path / "new" / "out", "--dry-run")
    assert (dry.code, f"{tmp_path}: cannot be written to" in dry.err) == (1, True)


def test_a_lock_that_is_held(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qconvert.run.folder.leases._PAUSE_SECONDS", 0)
    out = interrupted(source, tmp_path / "out")
    lock = out / ".qconvert" / "lock"
    with lock.open("rb+") as stream:
        stream.truncate(0)
        stream.write(b"4711")
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        refused_alike(source, out, "another qconvert (process 4711) is running there")
    dry = run_cli("dequant", source, out, "--dry-run")
    assert (dry.code, lock.read_bytes()) == (0, b"4711"), "looked at, not taken"


def test_a_finished_result_and_unfinished_work_are_told(
    source: Path, finished: Path, tmp_path: Path
) -> None:
    dry = run_cli("dequant", source, finished, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    how = "headers and sizes; --verify hashes every byte"
    assert dry.out.endswith(f"{finished} already holds this result ({how}); nothing to do\n")
    told = json.loads(run_cli("plan", "dequant-fp8", source, finished, "--json").out)
    assert (told["out"]["state"], told["refusals"]) == ("finished", [])

    out = interrupted(source, tmp_path / "out")
    before = tree(out)
    told = json.loads(run_cli("dequant", source, out, "--dry-run", "--json").out)["out"]
    assert (told["state"], told["done"]) == ("unfinished", told["units"])
    status = run_cli("status", out).out
    assert status.startswith(
        f"{out}: unfinished, {told['units']} units done; the command that began it, run again, does the"
    )
    looked = run_cli("inspect", out)
    assert looked.code == 1
    assert "its conversion is unfinished (.qconvert/ exists)" in looked.err
    assert tree(out) == before
    assert run_cli("dequant", source, out, "--jobs", "1").code == 0

    fresh = run_cli("dequant", source, tmp_path / "new", "--dry-run", "--json")
    assert json.loads(fresh.out)["out"]["state"] == "new"
    assert json.loads(run_cli("plan", "dequant-fp8", source, "--json").out)["out"] is None
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_moe(layers=2).write(tmp_path_factory.mktemp("dry") / "moe")


def test_both_folders_of_a_pair(moe: Path, tmp_path: Path) -> None:
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    words = ("kt", moe, "--cpu", "int4", "--numa", "1", "--gpu", "w4a16", "--cpu-out", cpu)
    foreign(moe, gpu)
    dry = run_cli(*words, "--gpu-out", gpu, "--dry-run", "--json")
    assert (dry.code, "is not empty (notes.txt)" in dry.err) == (1, True)
    assert [bool(plan["refusals"]) for plan in json.loads(dry.out)] == [False, True]
    inside = run_cli(*words, "--gpu-out", cpu / "gpu", "--dry-run")
    assert (inside.code, "must lie apart from the other" in inside.err) == (1, True)
    shutil.rmtree(gpu)
    assert run_cli(*words, "--gpu-out", gpu, "--jobs", "1").code == 0
    dry = run_cli(*words, "--gpu-out", gpu, "--dry-run")
    assert (dry.code, dry.out.count("already holds this result")) == (0, 2)
    shutil.rmtree(gpu)
    dry = run_cli(*words, "--gpu-out", gpu, "--dry-run")
    assert (dry.code, f"the other folder of its run, {gpu}, is not" in dry.err) == (1, True)


def test_folders_of_stages_and_join(moe: Path, tmp_path: Path) -> None:
    out = tmp_path / "stages"
    words = ("split", moe, out, "--pp", "1,1", "--dry-run")
    foreign(moe, out)
    dry = run_cli(*words)
    assert (dry.code, "holds notes.txt, which is not part of this split" in dry.err) == (1, True)
    assert dry.out.count("stage-0") == 2
    (out / "notes.txt").unlink()
    foreign(moe, out / "stage-01-of-02")
    dry = run_cli(*words, "--json")
    told = json.loads(dry.out)
    assert dry.code == 1
    assert [bool(stage["refusals"]) for stage in told["stages"]] == [False, True]
    assert len(told["refusals"]) == 1
    shutil.rmtree(out)
    assert run_cli(*words[:-1], "--jobs", "1").code == 0
    assert run_cli(*words).out.count("already holds this result") == 2
    before = tree(tmp_path)
    dry = run_cli("join", out, out / "whole", "--dry-run")
    assert dry.code == 0, dry.err
    dry = run_cli("join", out, out / "stage-00-of-02" / "whole", "--dry-run")
    assert (dry.code, "must lie apart from the source" in dry.err) == (1, True)
    assert tree(tmp_path) == before
