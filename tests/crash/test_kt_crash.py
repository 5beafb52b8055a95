"""A CPU and a GPU folder made together, killed around the moments at which they depend on each other;
test_crash.py and test_powercut.py kill them at any moment."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import faults
import pytest
from faults import (
    Counting,
    children,
    differing,
    tree,
    wait_until_gone,
    workers_of,
)
from models import qwen3_moe

from crash.cases import CPU, GPU, Case
from qconvert.checkpoint.checkpoint import INDEX, WORK_DIR
from qconvert.core.errors import OutputError
from qconvert.run.folder.workspace import clean

pytestmark = pytest.mark.crash

KILLED = -signal.SIGKILL
SIDES = (CPU, GPU)


def test_killed_twice_around_publishing(pair: Case, tmp_path: Path) -> None:
    """The second run finds one folder published and the other not."""
    root, half = tmp_path / "out", tmp_path / "half"
    for at in range(pair.publishing, len(pair.steps), 7):
        assert pair.killed_at(half, at) == KILLED
        for stop in (0, 3, 9, 24):
            shutil.copytree(half, root)
            assert pair.killed_at(root, stop) in (0, KILLED)
            pair.check_visible(root)
            pair.resume(root)
            assert pair.wrong(root) == [], f"killed at {at}, then at {stop}"
            shutil.rmtree(root)
        shutil.rmtree(half)


# --- one half cleaned -------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
def test_one_half_cleaned_wherever_it_was_killed(pair: Case, side: str, tmp_path: Path) -> None:
    """The next run makes the pair, or says which finished half to remove."""
    root = tmp_path / "out"
    for at in pair.sample(32):
        assert pair.killed_at(root, at) == KILLED
        clean(root / side, Counting())
        _make_again(pair, root)
        assert pair.wrong(root) == [], f"killed at {at}, {pair.steps[at]}"
        shutil.rmtree(root)


def _make_again(pair: Case, root: Path) -> None:
    """Run; where a finished half stands in the way, remove what the refusal names and run again."""
    for _ in range(2):
        try:
            pair.resume(root)
        except OutputError as error:
            finished, known, _ = str(error).partition(
                " is finished, and the other folder of its run"
            )
            if not known:
                raise
            shutil.rmtree(finished)
        else:
            return
    pair.resume(root)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("when", ["filling", "publishing"])
def test_killed_after_one_half_was_cleaned(
    pair: Case, side: str, when: str, tmp_path: Path
) -> None:
    """What the other half's journal says of finished units must not be taken for true once this one
    begins anew: its files are empty again."""
    root, half = tmp_path / "out", tmp_path / "half"
    # Of publishing, a moment at which the GPU folder has some of its files and not the last.
    moment = pair.publishing + 3 if when == "publishing" else pair.publishing * 2 // 3
    assert pair.killed_at(half, moment) == KILLED
    assert clean(half / side, Counting())
    counting = Counting()
    shutil.copytree(half, root)
    pair.run(root, counting)
    shutil.rmtree(root)
    wrong: list[str] = []
    for at in [*range(0, pair.begun, 3), *range(pair.begun, len(counting.steps), 40)]:
        shutil.copytree(half, root)
        assert pair.killed_at(root, at) == KILLED
        try:
            _make_again(pair, root)
        except (OutputError, AssertionError) as error:
            wrong.append(f"{at} {counting.steps[at]}: {error}")
        else:
            if pair.wrong(root):
                wrong.append(f"{at} {counting.steps[at]}: {pair.wrong(root)}")
        shutil.rmtree(root)
    assert wrong == []


# --- the command line, with workers -----------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """75 MB of bf16 experts: long enough that workers can be caught at it."""
    folder = tmp_path_factory.mktemp("large")
    model = qwen3_moe(hidden=512, intermediate=512, layers=4, experts=12)
    yield model.write(folder / "source", shards=3)
    shutil.rmtree(folder)


def _command(words: Sequence[str | Path]) -> subprocess.Popen[str]:
    """qconvert with two workers, in a process group of its own."""
    command = [sys.executable, "-m", "qconvert", *map(str, words), "--jobs", "2"]
    return subprocess.Popen(
        [*command, "--max-shard-size", "10MB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _kt(source: Path, root: Path) -> list[str | Path]:
    folders: list[str | Path] = ["--cpu-out", root / CPU, "--gpu-out", root / GPU]
    return ["kt", source, *folders, "--cpu", "int4", "--numa", "2", "--gpu", "w4a16"]


def _killed_after(words: Sequence[str | Path], seconds: float) -> bool:
    """Run a command and kill it with its workers. Returns whether that came before its end."""
    process = _command(words)
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # Stopped first, so that no worker is begun that nobody waits for: it would hold the lock.
        os.killpg(process.pid, signal.SIGSTOP)
        workers = workers_of(process.pid) + children(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until_gone(workers)
        return True
    assert process.returncode == 0
    return False


def test_the_command_killed_at_any_time_goes_on(large: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    whole = _command(_kt(large, tmp_path / "whole"))
    told = whole.communicate()
    assert whole.returncode == 0, told
    seconds = time.monotonic() - begun
    wanted = {side.name: tree(side) for side in (tmp_path / "whole").iterdir()}
    assert all(INDEX in files for files in wanted.values())
    chooser = random.Random(1)
    at_work = kills = rounds = 0
    # Two rounds, more where each kill came before the first file or after the last.
    while rounds < 2 or (not at_work and rounds < 8):
        rounds += 1
        root = tmp_path / "out"
        for _ in range(2):
            if not _killed_after(_kt(large, root), chooser.uniform(0.2, 1.0) * seconds):
                break
            kills += 1
            at_work += any((root / side / WORK_DIR).is_dir() for side in wanted)
            for side, files in wanted.items():
                faults.check_visible(root / side, files)
        done = _command(_kt(large, root))
        told = done.communicate()
        assert done.returncode == 0, told
        for side, files in wanted.items():
            assert differing(tree(root / side), files) == []
        shutil.rmtree(root)
    assert kills
    assert at_work
