"""The power may go at any moment: what a resumed run makes is what an undisturbed one does."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
from faults import PowerCut, PowerFiles, Tree, convert, differing, tree

from qconvert.core.errors import QConvertError

pytestmark = pytest.mark.crash

# Not an existing folder: the names of all its new parents have to be synced as well.
OUT = "new/deep/out"
Maker = Callable[[Path, int], PowerFiles]


def _run(source: Path, kind: str, disk: PowerFiles, root: Path) -> bool:
    """Convert until the power goes. Returns whether it ended before that."""
    try:
        convert(source, root / OUT, faults.options(kind), disk)
    except PowerCut:
        return False
    return True


def _fresh(root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


def _operations(source: Path, kind: str, root: Path) -> int:
    disk = PowerFiles(_fresh(root), 1 << 30)
    assert _run(source, kind, disk, root)
    return disk.count


def _chances(seed: int) -> list[random.Random | None]:
    """Everything unsynced lost; two ways of losing some of it."""
    return [None, random.Random(seed), random.Random(seed + 1_000_000)]


def test_power_cut_at_every_operation(
    source: Path, kind: str, wanted: Tree, tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    count = _operations(source, kind, root)
    assert count > 80
    for at in faults.moments(count):
        for chance in _chances(at):
            disk = PowerFiles(_fresh(root), at)
            assert not _run(source, kind, disk, root)
            disk.settle(chance)
            faults.check_visible(root / OUT, wanted)
            convert(source, root / OUT, faults.options(kind))
            assert differing(tree(root / OUT), wanted) == [], f"after a cut at {at}"


def test_what_is_done_stays_done(source: Path, kind: str, wanted: Tree, tmp_path: Path) -> None:
    """Once `execute` has returned nothing can be lost, not even of the tidying up."""
    root = tmp_path / "disk"
    for chance in _chances(1):
        disk = PowerFiles(_fresh(root), 1 << 30)
        assert _run(source, kind, disk, root)
        disk.settle(chance)
        assert differing(tree(root / OUT), wanted) == []


def test_power_cut_of_the_resumed_run(
    source: Path, kind: str, wanted: Tree, tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    count = _operations(source, kind, root)
    chooser = random.Random(7)
    for attempt in range(40):
        _fresh(root)
        for _ in range(3):
            disk = PowerFiles(root, chooser.randrange(count))
            ended = _run(source, kind, disk, root)
            disk.settle(None if attempt % 3 == 0 else chooser)
            assert faults.check_visible(root / OUT, wanted) or not ended
        convert(source, root / OUT, faults.options(kind))
        assert differing(tree(root / OUT), wanted) == []


class _NeverSyncsData(PowerFiles):
    def sync(self, fd: int, path: Path) -> None:
        self._step()


class _NeverSyncsNames(PowerFiles):
    def sync_folder(self, path: Path) -> None:
        self._step()


@pytest.mark.parametrize("careless", [_NeverSyncsData, _NeverSyncsNames])
def test_missing_syncs_are_noticed(
    source: Path, kind: str, wanted: Tree, tmp_path: Path, careless: Maker
) -> None:
    """The harness itself: where syncs do nothing, some cut must make wrong bytes or a refusal."""
    root = tmp_path / "disk"
    count = _operations(source, kind, root)
    broken = 0
    for at in [*range(0, count, 3), count]:  # and after all of them: what was finished is lost
        for chance in _chances(at):
            disk = careless(_fresh(root), at)
            ended = _run(source, kind, disk, root)
            disk.settle(chance)
            try:
                faults.check_visible(root / OUT, wanted)
                assert not ended or differing(tree(root / OUT), wanted) == []
                convert(source, root / OUT, faults.options(kind))
                assert differing(tree(root / OUT), wanted) == []
            except (AssertionError, QConvertError):
                broken += 1
    assert broken
