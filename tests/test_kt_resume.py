"""`qconvert kt`: an interrupted pair goes on, and a half of another pair is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoints import published, read_tensors, run_cli, tree, watched_reads
from kt_pair import Pair, kt
from models import qwen3_moe

from qconvert.cli.progress import Bar
from qconvert.run.work.files import Files


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bf16 source, for what does not depend on how weights are stored."""
    return qwen3_moe(layers=1).write(tmp_path_factory.mktemp("plain") / "source")


def test_halves_of_two_interrupted_pairs_do_not_make_one(
    plain: Path,
    tmp_path: Path,
    undisturbed: tuple[object, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are of the same plan, and each has done another part of it."""
    a, b, c, d = (tmp_path / name for name in "abcd")
    Pair(plain, a, b).interrupted(14, monkeypatch)
    Pair(plain, c, d).interrupted(4, monkeypatch)
    crossed = Pair(plain, a, d)
    done = crossed.run()
    assert done.code == 0, done.err
    assert crossed.trees == undisturbed


def test_both_folders_must_fit_on_one_disk(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for either is not room for both."""
    pair = Pair(plain, tmp_path / "cpu", tmp_path / "gpu")
    assert pair.run().code == 0
    sizes = [sum(f.stat().st_size for f in folder.iterdir()) for folder in (pair.cpu, pair.gpu)]
    free = max(sizes) + min(sizes) // 2
    real = os.statvfs(tmp_path)

    class Tight:
        f_bavail, f_frsize = free // real.f_frsize, real.f_frsize

    monkeypatch.setattr("qconvert.run.folder.workspace.os.statvfs", lambda _path: Tight)
    done = Pair(plain, tmp_path / "cpu2", tmp_path / "gpu2").run()
    assert done.code == 1
    assert "bytes), the disk has" in done.err


def test_workers_hold_the_locks_of_both_folders(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def noted(_setup: object, _jobs: int, _batches: object, locks: list[int]) -> object:
        held.extend(locks)
        raise KeyboardInterrupt

    monkeypatch.setattr("qconvert.run.engines.local.run_workers", noted)
    done = kt(plain, tmp_path / "cpu", tmp_path / "gpu", jobs=2)
    assert done.code == 130
    assert len(set(held)) == 2


@pytest.fixture(scope="module")
def undisturbed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    pair = Pair(plain, folder / "cpu", folder / "gpu")
    assert pair.run().code == 0
    return pair.trees


@pytest.fixture
def pair(plain: Path, tmp_path: Path) -> Pair:
    return Pair(plain, tmp_path / "cpu", tmp_path / "gpu")


@pytest.mark.parametrize("at", [1, 2, 9, 20])
def test_an_interrupted_pair_goes_on(
    at: int, pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Written in turn: a unit counts when it is on the disk, which else a thread sees to in its own time.
    monkeypatch.setattr(Files, "beside", False)
    pair.interrupted(at, monkeypatch)
    reads = watched_reads(monkeypatch)
    done = pair.run()
    assert done.code == 0, done.err
    assert (" from before" in done.out) is (at > 1)
    assert pair.trees == undisturbed
    size = sum(len(value.data) for value in read_tensors(pair.source).values())
    assert (sum(reads) < size) is (at > 1), "what was written is not read again"


def test_interrupted_as_publishing_begins(
    pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def phase(_bar: Bar, _text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "phase", phase)
        assert pair.run().code == 130
    assert published(pair.cpu) == published(pair.gpu) == []
    reads = watched_reads(monkeypatch)
    assert pair.run().code == 0
    assert reads == []
    assert pair.trees == undisturbed


def test_a_finished_pair_is_left_alone(
    pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.run().code == 0
    reads = watched_reads(monkeypatch)
    done = pair.run()
    assert done.code == 0
    for folder in (pair.cpu, pair.gpu):
        how = "headers and sizes; --verify hashes every byte"
        assert f"{folder} already holds this result ({how}); nothing to do" in done.out
    assert reads == []
    assert pair.trees == undisturbed


@pytest.mark.parametrize("gone", ["cpu", "gpu"])
def test_one_half_alone_is_refused_naming_both(
    gone: str, pair: Pair, undisturbed: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could belong to files that are not the source's any more; both are made again."""
    assert pair.run().code == 0
    lost, left = (pair.cpu, pair.gpu) if gone == "cpu" else (pair.gpu, pair.cpu)
    shutil.rmtree(lost)
    before = tree(left)
    reads = watched_reads(monkeypatch)
    done = pair.run()
    assert done.code == 1
    assert f"{left} is finished, and the other folder of its run, {lost}, is not" in done.err
    assert reads == []
    assert tree(left) == before
    assert not lost.exists() or os.listdir(lost) == [], "no work folder is left behind"
    shutil.rmtree(left)
    assert pair.run().code == 0
    assert pair.trees == undisturbed


@pytest.mark.parametrize("sides", [("cpu",), ("gpu",), ("cpu", "gpu")])
@pytest.mark.parametrize("at", [1, 9])
def test_cleaned_on_either_side_it_begins_anew(
    at: int,
    sides: tuple[str, ...],
    pair: Pair,
    undisturbed: tuple[object, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair.interrupted(at, monkeypatch)
    for side in sides:
        assert "dropped unfinished work" in run_cli("clean", getattr(pair, side)).out
    done = pair.run()
    assert done.code == 0, done.err
    assert "units from before" not in done.out
    assert pair.trees == undisturbed


def test_unfinished_work_of_another_pair_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.interrupted(9, monkeypatch)
    before = pair.trees
    done = kt(pair.source, pair.cpu, pair.gpu, "--max-shard-size", "200KB", numa=1)
    assert done.code == 1
    assert "holds unfinished work of another plan" in done.err
    assert "numa: 1" in done.err
    assert pair.trees == before


def test_a_finished_half_of_another_pair_is_refused(pair: Pair) -> None:
    """Same bytes, another id: its CPU folder is for another count of NUMA nodes."""
    elsewhere = pair.cpu.parent / "elsewhere"
    assert kt(pair.source, elsewhere, pair.gpu, numa=1).code == 0
    before = tree(pair.gpu)
    done = kt(pair.source, pair.cpu, pair.gpu, numa=2)
    assert done.code == 1
    assert "already holds the finished result of another plan" in done.err
    assert tree(pair.gpu) == before
