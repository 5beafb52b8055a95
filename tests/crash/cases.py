"""Conversions to kill: ways to convert, what an undisturbed run makes of each, and in which steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import faults
from calibrated_plans import MadeUp, amx_plan
from faults import Counting, Killing, PowerCut, PowerFiles, Tree, differing, in_child, tree

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.pair import pair_plans
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan
from qconvert.run.executor import execute, run_together
from qconvert.run.folder.prepare import prepare_together
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions

OUT, CPU, GPU = "out", "cpu", "gpu"
_SIZES = {"sharded": 40_000, "single": 5_000_000_000}


def _options(kind: str) -> RunOptions:
    """Every unit committed by itself, each folder in several files or in one."""
    return RunOptions(jobs=1, commit_bytes=1, max_shard_size=_SIZES[kind])


def convert_plain(source: Path, root: Path, kind: str, files: Files | None = None) -> None:
    faults.convert(source, root / OUT, faults.options(kind), files)


def convert_pair(source: Path, root: Path, kind: str, files: Files | None = None) -> None:
    """Fill both folders in `root`."""
    start = Plan.identity(Checkpoint.open(source))
    plans = pair_plans(start, ExpertsToAmx("int4", 1), ExpertsToW4A16())
    ready = prepare_together(plans, _options(kind))
    run_together(list(zip(ready, (root / CPU, root / GPU), strict=True)), files=files)


def convert_calibrated(source: Path, root: Path, kind: str, files: Files | None = None) -> None:
    """With codes that a backend solves."""
    execute(amx_plan(source), root / CPU, _options(kind), files=files, backend=MadeUp(128, 128))


Converting = Callable[[Path, Path, str, Files | None], None]
PLAIN = [(convert_plain, kind) for kind in sorted(faults.SHARD_SIZES)]
PAIRS = [(convert_pair, kind) for kind in sorted(_SIZES)]
CASES: list[tuple[Converting, str]] = [*PLAIN, *PAIRS, (convert_calibrated, "sharded")]


@dataclass(frozen=True)
class Case:
    """One way of converting, what an undisturbed run makes in each folder, and its every step."""

    convert: Converting
    source: Path
    kind: str
    wanted: Mapping[str, Tree]
    steps: list[str]

    def run(self, root: Path, files: Files | None = None) -> None:
        self.convert(self.source, root, self.kind, files)

    def killed_at(self, root: Path, at: int) -> int:
        """Run in a process that dies at a step. Returns its exit code."""
        return in_child(lambda: self.run(root, Killing(at)))

    def resume(self, root: Path) -> None:
        """Run to the end, without waiting for the disk: nobody cuts the power here."""
        self.run(root, Counting())

    def until_power_goes(self, root: Path, disk: PowerFiles) -> bool:
        """Convert until the power goes. Returns whether it ended before that."""
        try:
            self.run(root, disk)
        except PowerCut:
            return False
        return True

    def wrong(self, root: Path) -> list[str]:
        """Files that are not as they should be in the end."""
        return [
            f"{side}/{name}"
            for side, files in self.wanted.items()
            for name in differing(tree(root / side), files)
        ]

    def check_visible(self, root: Path) -> bool:
        """Nothing half-made is in sight in any folder, and the first is published last. Returns
        whether it is complete."""
        done = {side: faults.check_visible(root / side, want) for side, want in self.wanted.items()}
        seen = {side: list((root / side).glob("*.safetensors")) for side in self.wanted}
        if self.kind == "single":
            assert {side for side, files in seen.items() if files} == {s for s in done if done[s]}
        if GPU in done and seen[CPU]:
            assert done[GPU], "the CPU folder is in sight before the GPU folder is complete"
        return done[CPU if CPU in done else OUT]

    @property
    def begun(self) -> int:
        """The step after which every journal has its first line: an append has three steps."""
        appends = [at for at, what in enumerate(self.steps) if what == "append"]
        return appends[3 * len(self.wanted) - 1]

    @property
    def publishing(self) -> int:
        return self.steps.index("rename")

    def sample(self, every: int) -> list[int]:
        """Steps spread evenly, and more of those where the folders depend on each other: until both
        are begun, and from the first rename on."""
        close = max(1, every // 4)
        return sorted(
            {
                *range(0, self.begun, close),
                *range(self.begun, self.publishing, every),
                *range(self.publishing, len(self.steps), close),
            }
        )


def case_of(convert: Converting, kind: str, source: Path, folder: Path) -> Case:
    counting = Counting()
    convert(source, folder / "counted", kind, counting)
    convert(source, folder / "made", kind, None)
    wanted = {side.name: tree(side) for side in sorted((folder / "made").iterdir())}
    case = Case(convert, source, kind, wanted, counting.steps)
    assert case.wrong(folder / "counted") == []
    return case
