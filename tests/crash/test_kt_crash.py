"""A CPU and a GPU folder made together, killed or cut from power at any moment: both go on and hold
the same bytes in the end, and neither looks finished early. So with `amx` alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import faults
import pytest
from calibrated_plans import MadeUp, amx_plan
from faults import (
    Counting,
    Killing,
    PowerCut,
    PowerFiles,
    Tree,
    children,
    differing,
    in_child,
    tree,
    wait_until_gone,
    workers_of,
)
from models import qwen3_moe

from qconvert.checkpoint.checkpoint import INDEX, SINGLE, WORK_DIR, Checkpoint
from qconvert.core.errors import OutputError
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.pair import pair_plans
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.executor import execute, run_together
from qconvert.run.folder.prepare import Options, prepare_together
from qconvert.run.folder.workspace import clean
from qconvert.run.work.files import Files

pytestmark = pytest.mark.crash

KILLED = -signal.SIGKILL
CPU, GPU = "cpu", "gpu"
SIDES = (CPU, GPU)
# Each folder in several files, or in one.
SIZES = {"sharded": 40_000, "single": 5_000_000_000}


def options(kind: str) -> Options:
    """Every unit committed by itself."""
    return Options(jobs=1, commit_bytes=1, max_shard_size=SIZES[kind])


def convert_pair(source: Path, root: Path, kind: str, files: Files | None = None) -> None:
    """Fill both folders in `root`."""
    start = Plan.identity(Checkpoint.open(source))
    plans = pair_plans(start, ExpertsToAmx("int4", 1), ExpertsToW4A16())
    ready = prepare_together(plans, options(kind))
    run_together(list(zip(ready, (root / CPU, root / GPU), strict=True)), files=files)


def convert_amx(source: Path, root: Path, kind: str, files: Files | None = None) -> None:
    start = Plan.identity(Checkpoint.open(source))
    plan = run_passes(start, (ExpertsToAmx("int4", 1),))
    execute(plan, root / CPU, options(kind), files=files)


def convert_calibrated(source: Path, root: Path, kind: str, files: Files | None = None) -> None:
    """With codes that a backend solves."""
    backend = MadeUp(128, 128)
    execute(amx_plan(source), root / CPU, options(kind), files=files, backend=backend)


Converting = Callable[[Path, Path, str, Files | None], None]


@dataclass(frozen=True)
class Case:
    """One way of converting, what an undisturbed run makes in each folder, and its every step."""

    convert: Converting
    source: Path
    kind: str
    wanted: dict[str, Tree]
    steps: list[str]

    def run(self, root: Path, files: Files | None = None) -> None:
        self.convert(self.source, root, self.kind, files)

    def killed_at(self, root: Path, at: int) -> int:
        """Run in a process that dies at a step. Returns its exit code."""
        return in_child(lambda: self.run(root, Killing(at)))

    def resume(self, root: Path) -> None:
        """Run to the end, without waiting for the disk: nobody cuts the power here."""
        self.run(root, Counting())

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
        return done[CPU]

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


CASES = [
    (convert_pair, "sharded"),
    (convert_pair, "single"),
    (convert_amx, "sharded"),
    (convert_calibrated, "sharded"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with two experts in FP8, in two files, and a side file."""
    model = qwen3_moe("fp8", intermediate=128, layers=1)
    model.config["vocab_size"] = 8
    del model.side_files["README.md"]
    return model.write(tmp_path_factory.mktemp("crash") / "source")


def case_of(convert: Converting, kind: str, source: Path, folder: Path) -> Case:
    counting = Counting()
    convert(source, folder / "counted", kind, counting)
    convert(source, folder / "out", kind, None)
    wanted = {side.name: tree(side) for side in sorted((folder / "out").iterdir())}
    case = Case(convert, source, kind, wanted, counting.steps)
    assert case.wrong(folder / "counted") == []
    return case


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0].__name__[8:]}-{c[1]}")
def case(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    convert, kind = request.param
    return case_of(convert, kind, source, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module", params=sorted(SIZES))
def pair(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    return case_of(convert_pair, request.param, source, tmp_path_factory.mktemp("undisturbed"))


def test_the_run_is_worth_killing(case: Case) -> None:
    for files in case.wanted.values():
        assert (INDEX in files) == (case.kind == "sharded")
        assert (SINGLE in files) == (case.kind == "single")
        if case.kind == "sharded":
            assert sum(name.startswith("model-") for name in files) >= 2
    assert list(case.wanted) == ([CPU, GPU] if case.convert is convert_pair else [CPU])
    assert {"create", "write", "append", "sync", "sync_folder", "rename"} <= set(case.steps)


def test_killed_at_any_step(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "out"
    before = tree(case.source)
    pair = case.convert is convert_pair
    for at in case.sample(16) if pair else faults.moments(len(case.steps)):
        assert case.killed_at(root, at) == KILLED
        case.check_visible(root)
        case.resume(root)
        assert case.wrong(root) == [], f"killed at {at}, {case.steps[at]}"
        shutil.rmtree(root)
    assert differing(tree(case.source), before) == []


def test_killed_while_resuming(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "out"
    chooser = random.Random(3)
    for _ in range(12):
        for _ in range(3):
            code = case.killed_at(root, chooser.randrange(len(case.steps)))
            # A resumed run has fewer steps: it may end before the one it would die at.
            assert code in (0, KILLED)
            assert case.check_visible(root) or code == KILLED
        case.resume(root)
        assert case.wrong(root) == []
        shutil.rmtree(root)


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


# --- power ------------------------------------------------------------------------------------


def _powered(case: Case, disk: PowerFiles, root: Path) -> bool:
    """Convert until the power goes. Returns whether it ended before that."""
    try:
        case.run(root / "new", disk)
    except PowerCut:
        return False
    return True


def _fresh(root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return root


def _operations(case: Case, root: Path) -> int:
    disk = PowerFiles(_fresh(root), 1 << 30)
    assert _powered(case, disk, root)
    return disk.count


def test_power_cut_at_any_operation(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    for at in range(0, _operations(case, root), 3):
        disk = PowerFiles(_fresh(root), at)
        assert not _powered(case, disk, root)
        # In turn: all that was not synced is lost, or some of it.
        disk.settle(None if at % 2 == 0 else random.Random(at))
        case.check_visible(root / "new")
        case.resume(root / "new")
        assert case.wrong(root / "new") == [], f"after a cut at {at}"


def test_power_cut_of_the_resumed_run(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    count = _operations(case, root)
    chooser = random.Random(5)
    for attempt in range(15):
        _fresh(root)
        for _ in range(3):
            disk = PowerFiles(root, chooser.randrange(count))
            ended = _powered(case, disk, root)
            disk.settle(None if attempt % 3 == 0 else chooser)
            assert case.check_visible(root / "new") or not ended
        case.resume(root / "new")
        assert case.wrong(root / "new") == []


def test_power_cut_after_one_half_was_cleaned(pair: Case, tmp_path: Path) -> None:
    """As a kill there, and the old journal must be gone for good before the files are made anew."""
    root = tmp_path / "disk"
    for at in range(0, pair.begun, 4):
        assert pair.killed_at(_fresh(root) / "new", pair.publishing * 2 // 3) == KILLED
        assert clean(root / "new" / GPU, Counting())
        disk = PowerFiles(root, at)
        assert not _powered(pair, disk, root)
        disk.settle(None if at % 8 == 0 else random.Random(at))
        pair.check_visible(root / "new")
        pair.resume(root / "new")
        assert pair.wrong(root / "new") == [], f"after a cut at {at}"


def test_what_is_done_stays_done(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    for chance in (None, random.Random(1), random.Random(2)):
        disk = PowerFiles(_fresh(root), 1 << 30)
        assert _powered(case, disk, root)
        disk.settle(chance)
        assert case.wrong(root / "new") == []


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


def _amx(source: Path, root: Path) -> list[str | Path]:
    return ["amx", source, root / CPU, "--method", "int8", "--numa", "2"]


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


@pytest.mark.parametrize("words", [_kt, _amx])
def test_the_command_killed_at_any_time_goes_on(
    words: Callable[[Path, Path], list[str | Path]], large: Path, tmp_path: Path
) -> None:
    begun = time.monotonic()
    whole = _command(words(large, tmp_path / "whole"))
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
            if not _killed_after(words(large, root), chooser.uniform(0.2, 1.0) * seconds):
                break
            kills += 1
            at_work += any((root / side / WORK_DIR).is_dir() for side in wanted)
            for side, files in wanted.items():
                faults.check_visible(root / side, files)
        done = _command(words(large, root))
        told = done.communicate()
        assert done.returncode == 0, told
        for side, files in wanted.items():
            assert differing(tree(root / side), files) == []
        shutil.rmtree(root)
    assert kills
    assert at_work
