"""The work folder may come with a folder that is anyone's: nothing outside OUT is touched, whatever it
holds. Also what stops a run at its edges: limits of the system, Ctrl-C; and who may read the result."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
import xxhash
from checkpoints import run_cli
from faults import convert, plan_of, tree

from qconvert.checkpoint.checkpoint import WORK_DIR, Checkpoint
from qconvert.core.errors import CheckpointError, OutputError, RunError
from qconvert.hub.readme import account_for_readme
from qconvert.run.executor import execute
from qconvert.run.folder.workspace import JOURNAL, LOCK, STAGE, Workspace, clean
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("own") / "source")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Something beside OUT that is nobody's to touch."""
    folder = tmp_path / "victim"
    (folder / "sub").mkdir(parents=True)
    (folder / "letter").write_text("dear\n")
    (folder / "sub" / "letter").write_text("dear\n")
    return folder


def _line(record: object) -> bytes:
    text = json.dumps(record).encode()
    return xxhash.xxh3_64(text).hexdigest().encode() + b" " + text + b"\n"


def _work(out: Path, *records: object) -> Path:
    """A work folder as an attacker would make it."""
    (out / WORK_DIR / STAGE).mkdir(parents=True)
    (out / WORK_DIR / STAGE / "config.json").write_text("{}")
    lines = b"".join(map(_line, [{"fingerprint": "x", "passes": []}, *records]))
    (out / WORK_DIR / JOURNAL).write_bytes(lines)
    return out / WORK_DIR


# --- crafted journals -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../victim/letter", "{victim}/letter", "a/../../victim/letter"])
@pytest.mark.parametrize("kind", ["publish", "withdraw"])
def test_clean_removes_nothing_outside(tmp_path: Path, victim: Path, name: str, kind: str) -> None:
    out, before = tmp_path / "out", tree(victim)
    names = [name.format(victim=victim), "config.json"]
    _work(out, {kind: names, "edited": []})
    with pytest.raises(OutputError, match="is not inside the folder"):
        clean(out, Files())
    assert tree(victim) == before
    told = run_cli("clean", str(out))
    assert told.code == 1
    assert "Traceback" not in told.err


def test_clean_removes_nothing_through_a_linked_folder(tmp_path: Path, victim: Path) -> None:
    out, before = tmp_path / "out", tree(victim)
    _work(out, {"publish": ["sub/letter", "config.json"]})
    (out / "sub").symlink_to(victim / "sub")
    with pytest.raises(OutputError, match="found a symbolic link"):
        clean(out, Files())
    assert tree(victim) == before


def test_clean_enters_no_linked_stage(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    _work(victim, {"publish": ["letter", "config.json"]})
    (out / "stage-00-of-01").symlink_to(victim)
    before = tree(victim)
    assert not clean(out, Files())
    assert tree(victim) == before


def test_cleaning_nothing_fails(tmp_path: Path) -> None:
    told = run_cli("clean", str(tmp_path / "nosuch"))
    assert told.code == 1
    assert "nosuch: no such folder" in told.err
    (tmp_path / "file").write_text("")
    assert run_cli("clean", str(tmp_path / "file")).code == 1


# --- links in place of our own files ----------------------------------------------------------


@pytest.mark.parametrize("what", ["", STAGE, "calibration", LOCK, JOURNAL])
@pytest.mark.parametrize("then", ["convert", "clean"])
def test_a_link_in_place_of_our_own_is_refused(
    source: Path, tmp_path: Path, victim: Path, what: str, then: str
) -> None:
    out, before = tmp_path / "out", tree(victim)
    out.mkdir()
    link = out / WORK_DIR / what
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim / "letter" if what in (LOCK, JOURNAL) else victim)
    acts: dict[str, Callable[[], object]] = {
        "clean": lambda: clean(out, Files()),
        "convert": lambda: convert(source, out, faults.options("single")),
    }
    with pytest.raises(OutputError) as caught:
        acts[then]()
    assert str(link) in str(caught.value)
    assert tree(victim) == before
    assert not list(out.glob("*.safetensors"))


@pytest.mark.parametrize("what", [LOCK, JOURNAL])
def test_a_second_name_of_a_file_is_not_written_to(
    source: Path, tmp_path: Path, victim: Path, what: str
) -> None:
    """A hard link reaches as far as a symbolic one."""
    out, before = tmp_path / "out", tree(victim)
    (out / WORK_DIR).mkdir(parents=True)
    os.link(victim / "letter", out / WORK_DIR / what)
    if what == LOCK:
        with pytest.raises(OutputError, match="expected a regular file with one name"):
            convert(source, out, faults.options("single"))
    else:
        convert(source, out, faults.options("single"))
    assert tree(victim) == before


@pytest.mark.parametrize("what", [LOCK, JOURNAL])
def test_a_pipe_in_place_of_our_own_is_refused(source: Path, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    (out / WORK_DIR).mkdir(parents=True)
    os.mkfifo(out / WORK_DIR / what)
    with pytest.raises(OutputError, match="expected a regular file"):
        convert(source, out, faults.options("single"))


def test_a_journal_without_an_end_takes_no_memory(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / WORK_DIR).mkdir(parents=True)
    with (out / WORK_DIR / JOURNAL).open("wb") as stream:
        stream.truncate(3 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert(source, out, faults.options("single"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


# --- errors that say what they are about ------------------------------------------------------


def test_the_real_error_is_told(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tidying up after a refusal fails as well: that is not what the user must hear of."""

    class Stuck(Files):
        def remove_tree(self, path: Path) -> None:
            raise OutputError(f"{path}: cannot remove: Permission denied")

    def refuse(self: Workspace, *_: object) -> None:
        raise OutputError("the real reason")

    monkeypatch.setattr(Workspace, "begin", refuse)
    with pytest.raises(OutputError, match="the real reason"):
        execute(plan_of(source), tmp_path / "out", RunOptions(jobs=1), files=Stuck())


def test_a_side_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO comes from reading and names no file by itself."""
    source = faults.write_small(tmp_path / "source")
    opened = Checkpoint.open_file

    def failing(self: Checkpoint, name: str) -> object:
        stream = opened(self, name)
        if name == "tokenizer.json":
            stream.close()
            return _Broken()
        return stream

    monkeypatch.setattr(Checkpoint, "open_file", failing)
    fresh = plan_of(source)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        _ = fresh.checkpoint.sample_digest


class _Broken:
    def __enter__(self) -> _Broken:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, *_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_too_many_open_files_is_told_with_its_limit(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("qconvert.run.work.forkserver.Pipe", none_left)
    with pytest.raises(RunError, match="worker process cannot be started: Too many open files"):
        execute(plan_of(source), tmp_path / "out", RunOptions(jobs=2, memory=512 << 20))


# --- permissions ------------------------------------------------------------------------------


def _modes(folder: Path) -> dict[str, int]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {f.relative_to(folder).as_posix(): stat.S_IMODE(f.stat().st_mode) for f in files}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_the_result_is_no_more_open_than_its_source(tmp_path: Path, mode: int) -> None:
    source, out = faults.write_small(tmp_path / "source"), tmp_path / "out"
    min(source.glob("*.safetensors")).chmod(mode)
    (source / "tokenizer.json").chmod(0o600)
    before = os.umask(0o022)
    try:
        convert(source, out, faults.options("sharded"))
    finally:
        os.umask(before)
    (out / "README.md").write_text("mine\n")
    (out / "README.md").chmod(mode)
    for rewritten in (False, True):  # the receipt, in which the card is another now
        assert not rewritten or account_for_readme(out)
        found = _modes(out)
        assert found.pop("tokenizer.json") == 0o600
        assert found.pop("extra/words/list.txt") == 0o644
        assert set(found.values()) == {mode}


def test_work_in_progress_is_nobody_else_s_to_read(tmp_path: Path) -> None:
    source, out = faults.write_small(tmp_path / "source"), tmp_path / "out"
    for file in source.glob("*.safetensors"):
        file.chmod(0o600)

    class Failing(Files):
        def rename(self, old: Path, new: Path) -> None:
            raise OutputError("not today")

    with pytest.raises(OutputError, match="not today"):
        convert(source, out, faults.options("single"), Failing())
    assert stat.S_IMODE((out / WORK_DIR).stat().st_mode) == 0o700


# --- limits and interruptions -----------------------------------------------------------------


def _command(source: Path, out: Path, limit: int | None = None) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "qconvert", "dequant", str(source), str(out), "--jobs", "2"]
    if limit is not None:
        words = ["sh", "-c", f'ulimit -v {limit}; exec "$@"', "sh", *words]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.big
def test_workers_without_room_end_in_one_message(source: Path, tmp_path: Path) -> None:
    """Where exactly there is too little room depends on the machine; at the first limit always."""
    codes = []
    for kib in (60_000, 90_000, 120_000):
        process = _command(source, tmp_path / str(kib), kib)
        _, told = process.communicate()
        codes.append(process.returncode)
        assert "Traceback" not in told
        if process.returncode:
            assert process.returncode == 1
            assert told.count("qconvert: error: ") == 1
            assert told.strip().splitlines()[-1].startswith("qconvert: error: ")
            assert "ulimit" in told
    assert codes[0] == 1


@pytest.mark.crash
def test_interrupted_while_workers_start(source: Path, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole process group, and a worker in its imports must not answer it."""
    interrupted = 0
    for attempt in range(3):
        out = tmp_path / f"out{attempt}"
        process = _command(source, out)
        while process.poll() is None and not faults.children(process.pid):
            time.sleep(0.001)
        if process.poll() is None:
            time.sleep(0.02 * attempt)
            os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate()
        assert "Traceback" not in told
        assert process.returncode in (0, 130)
        interrupted += process.returncode == 130
    assert interrupted
