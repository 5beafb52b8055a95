"""The power may go at any moment: what a resumed run makes is what an undisturbed one does."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
from faults import Counting, PowerFiles

from crash.cases import GPU, OUT, Case
from qconvert.core.errors import QConvertError
from qconvert.run.folder.workspace import clean

pytestmark = pytest.mark.crash

# Not an existing folder: the names of all its new parents have to be synced as well.
NEW = "new/deep"
Maker = Callable[[Path, int], PowerFiles]


def _fresh(root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


def _operations(case: Case, disk: Path) -> int:
    files = PowerFiles(_fresh(disk), 1 << 30)
    assert case.until_power_goes(disk / NEW, files)
    return files.count


def _chances(seed: int) -> list[random.Random | None]:
    """Everything unsynced lost; two ways of losing some of it."""
    return [None, random.Random(seed), random.Random(seed + 1_000_000)]


def test_power_cut_at_any_operation(case: Case, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    count = _operations(case, disk)
    assert count > 80
    one_folder = OUT in case.wanted
    for at in faults.moments(count, 2 if one_folder else 3):
        for chance in _chances(at) if one_folder else [_chances(at)[at % 2]]:
            files = PowerFiles(_fresh(disk), at)
            assert not case.until_power_goes(disk / NEW, files)
            files.settle(chance)
            case.check_visible(disk / NEW)
            case.resume(disk / NEW)
            assert case.wrong(disk / NEW) == [], f"after a cut at {at}"


def test_what_is_done_stays_done(case: Case, tmp_path: Path) -> None:
    """Once `execute` has returned nothing can be lost, not even of the tidying up."""
    disk = tmp_path / "disk"
    for chance in _chances(1):
        files = PowerFiles(_fresh(disk), 1 << 30)
        assert case.until_power_goes(disk / NEW, files)
        files.settle(chance)
        assert case.wrong(disk / NEW) == []


def test_power_cut_of_the_resumed_run(case: Case, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    count = _operations(case, disk)
    chooser = random.Random(7)
    for attempt in range(40 if OUT in case.wanted else 15):
        _fresh(disk)
        for _ in range(3):
            files = PowerFiles(disk, chooser.randrange(count))
            ended = case.until_power_goes(disk / NEW, files)
            files.settle(None if attempt % 3 == 0 else chooser)
            assert case.check_visible(disk / NEW) or not ended
        case.resume(disk / NEW)
        assert case.wrong(disk / NEW) == []


def test_power_cut_after_one_half_was_cleaned(pair: Case, tmp_path: Path) -> None:
    """As a kill there (test_kt_crash.py), and the old journal must be gone for good before the files
    are made anew."""
    disk = tmp_path / "disk"
    for at in range(0, pair.begun, 4):
        assert pair.killed_at(_fresh(disk) / NEW, pair.publishing * 2 // 3) == -signal.SIGKILL
        assert clean(disk / NEW / GPU, Counting())
        files = PowerFiles(disk, at)
        assert not pair.until_power_goes(disk / NEW, files)
        files.settle(None if at % 8 == 0 else random.Random(at))
        pair.check_visible(disk / NEW)
        pair.resume(disk / NEW)
        assert pair.wrong(disk / NEW) == [], f"after a cut at {at}"


class _NeverSyncsData(PowerFiles):
    def sync(self, fd: int, path: Path) -> None:
        self._step()


class _NeverSyncsNames(PowerFiles):
    def sync_folder(self, path: Path) -> None:
        self._step()


@pytest.mark.parametrize("careless", [_NeverSyncsData, _NeverSyncsNames])
def test_missing_syncs_are_noticed(plain: Case, tmp_path: Path, careless: Maker) -> None:
    """The harness itself: where syncs do nothing, some cut must make wrong bytes or a refusal."""
    disk = tmp_path / "disk"
    count = _operations(plain, disk)
    broken = 0
    for at in [*range(0, count, 3), count]:  # and after all of them: what was finished is lost
        for chance in _chances(at):
            files = careless(_fresh(disk), at)
            ended = plain.until_power_goes(disk / NEW, files)
            files.settle(chance)
            try:
                plain.check_visible(disk / NEW)
                assert not ended or plain.wrong(disk / NEW) == []
                plain.resume(disk / NEW)
                assert plain.wrong(disk / NEW) == []
            except (AssertionError, QConvertError):
                broken += 1
    assert broken
