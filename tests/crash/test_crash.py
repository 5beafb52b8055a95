"""Killed at any moment, a conversion goes on where it stopped and makes the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import faults
import pytest
from faults import (
    Counting,
    Killing,
    Tree,
    children,
    convert,
    differing,
    in_child,
    state_of,
    tree,
    wait_until_gone,
    workers_of,
)

from crash.cases import GPU, OUT, Case
from qconvert.checkpoint.checkpoint import INDEX, MANIFEST, SINGLE, WORK_DIR, Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import OutputError
from qconvert.passes.dequant import Dequant
from qconvert.passes.drop import Drop
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.executor import execute
from qconvert.run.folder import leases
from qconvert.run.folder.journal import read_journal
from qconvert.run.folder.leases import take_lock
from qconvert.run.folder.workspace import JOURNAL, LOCK, clean
from qconvert.run.work.files import Files

pytestmark = pytest.mark.crash

KILLED = -signal.SIGKILL


def _killed_at(source: Path, kind: str, out: Path, at: int) -> int:
    """Run in a process that dies at a step. Returns its exit code."""
    return in_child(lambda: convert(source, out, faults.options(kind), Killing(at)))


def test_the_run_is_worth_killing(case: Case) -> None:
    for files in case.wanted.values():
        assert (INDEX in files) == (case.kind != "single")
        assert (SINGLE in files) == (case.kind == "single")
        assert case.kind == "single" or sum(name.startswith("model-") for name in files) >= 2
    assert OUT not in case.wanted or "extra/words/list.txt" in case.wanted[OUT]
    assert ("link" in case.steps) == (case.kind == "linked")
    assert {"create", "write", "append", "sync", "sync_folder", "rename"} <= set(case.steps)


def test_killed_at_any_step(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "out"
    before = tree(case.source)
    pair = GPU in case.wanted
    for at in case.sample(16) if pair else faults.moments(len(case.steps)):
        assert case.killed_at(root, at) == KILLED
        case.check_visible(root)
        case.resume(root)
        assert case.wrong(root) == [], f"killed at {at}, {case.steps[at]}"
        shutil.rmtree(root)
    assert differing(tree(case.source), before) == []


def test_killed_while_resuming(case: Case, tmp_path: Path) -> None:
    root = tmp_path / "out"
    chooser = random.Random(11)
    for _ in range(16):
        for _ in range(3):
            code = case.killed_at(root, chooser.randrange(len(case.steps)))
            # A resumed run has fewer steps: it may end before the one it would die at.
            assert code in (0, KILLED)
            assert case.check_visible(root) or code == KILLED
        case.resume(root)
        assert case.wrong(root) == []
        shutil.rmtree(root)


def test_resuming_keeps_finished_units(source: Path, tmp_path: Path) -> None:
    """Each unit the journal knows is not done again."""
    options = faults.options("single")
    counting = Counting()
    convert(source, tmp_path / "whole", options, counting)
    appends = [i for i, what in enumerate(counting.steps) if what == "append"]
    # Three steps an append; the first is the header, the last the order to publish.
    ends = appends[2::3]
    plan = faults.plan_of(source)
    for done, at in enumerate(ends[:-1]):
        out = tmp_path / f"out{done}"
        assert _killed_at(source, "single", out, at) == KILLED
        assert execute(plan, out, options).resumed_units == done


# --- clean ------------------------------------------------------------------------------------


def test_clean_at_every_kill_point(plain: Case, tmp_path: Path) -> None:
    """The folder is left empty, or, where all had been published, finished."""
    wanted, root = plain.wanted[OUT], tmp_path / "root"
    for at in faults.moments(len(plain.steps), 3):
        assert plain.killed_at(root, at) == KILLED
        finished = plain.check_visible(root)
        clean(root / OUT, Files())
        assert differing(tree(root / OUT), wanted if finished else {}) == [], f"killed at {at}"
        if at % 5 == 0:
            plain.resume(root)
            assert plain.wrong(root) == []
        shutil.rmtree(root, ignore_errors=True)  # killed at first, there is none yet


def _asks_to_clean(plain: Case, root: Path) -> bool:
    """Run; whether it was refused with the advice to clean. Any other refusal is raised."""
    try:
        plain.run(root)
    except OutputError as error:
        if "qconvert clean" in str(error):
            return True
        raise
    return False


def test_clean_killed_itself(plain: Case, tmp_path: Path) -> None:
    """Cleaning again finishes it; a run after it starts afresh or says to clean, nothing else."""
    root, half = tmp_path / "root", tmp_path / "half"
    for at in [len(plain.steps) // 3, *range(plain.publishing, len(plain.steps), 7)]:
        assert plain.killed_at(half, at) == KILLED
        finished = plain.check_visible(half)
        code, stop = KILLED, 0
        while code == KILLED:
            shutil.copytree(half, root)
            code = in_child(partial(clean, root / OUT, Killing(stop)))
            stop += 1
            if _asks_to_clean(plain, root):
                clean(root / OUT, Files())
                assert tree(root / OUT) == ({} if not finished else plain.wanted[OUT])
                plain.run(root)
            assert plain.wrong(root) == []
            shutil.rmtree(root)
        shutil.rmtree(half)


def test_clean_leaves_a_finished_result_and_strangers_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, faults.options("single"))
    before = tree(out)
    assert not clean(out, Files())
    assert tree(out) == before
    strangers = tmp_path / "strangers"
    strangers.mkdir()
    (strangers / "letter.txt").write_text("dear")
    assert not clean(strangers, Files())
    assert tree(strangers) == {"letter.txt": b"dear"}


# --- what is refused ---------------------------------------------------------------------------


@pytest.fixture
def unfinished(source: Path, tmp_path: Path) -> Path:
    """A sharded run killed half-way through its units."""
    out = tmp_path / "unfinished"
    counting = Counting()
    convert(source, tmp_path / "counted", faults.options("sharded"), counting)
    middle = counting.steps.index("rename") // 2
    assert _killed_at(source, "sharded", out, middle) == KILLED
    return out


def _refused(run: Callable[[], object], out: Path) -> str:
    """The sentence a run is refused with; the unfinished work must be as it was."""
    before = tree(out / WORK_DIR / "stage"), (out / WORK_DIR / JOURNAL).read_bytes()
    with pytest.raises(OutputError) as caught:
        run()
    assert (tree(out / WORK_DIR / "stage"), (out / WORK_DIR / JOURNAL).read_bytes()) == before
    return str(caught.value)


def test_another_plan_is_refused_naming_the_first_pass(source: Path, unfinished: Path) -> None:
    start = Plan.identity(Checkpoint.open(source))
    drop = Drop(match="lm_head.*", why="not needed")
    line = "`drop: {match: lm_head.*, why: not needed}`"
    others = {
        f"pass 1 was `dequant`, now {line}": run_passes(start, (drop, Dequant())),
        f"pass 2 was no pass, now {line}": run_passes(start, (Dequant(), drop)),
        "pass 1 was `dequant`, now no pass": start,
    }
    for said, other in others.items():
        run = partial(execute, other, unfinished, faults.options("sharded"))
        told = _refused(run, unfinished)
        assert said in told
        assert f"qconvert clean {unfinished}" in told


def test_other_options_are_refused(source: Path, unfinished: Path) -> None:
    options = faults.options("sharded")
    other_size = replace(options, max_shard_size=faults.SHARD_BYTES + 1)
    told = _refused(lambda: convert(source, unfinished, other_size), unfinished)
    assert "--max-shard-size was 150 KB, now 150001 B" in told
    told = _refused(lambda: convert(source, unfinished, replace(options, sha256=True)), unfinished)
    assert "--sha256 was False, now True" in told


def test_jobs_and_memory_may_change_between_runs(
    source: Path, unfinished: Path, tmp_path: Path
) -> None:
    options = replace(faults.options("sharded"), jobs=2, memory=400 << 20, commit_bytes=1 << 30)
    convert(source, unfinished, options)
    assert differing(tree(unfinished), tree(tmp_path / "counted")) == []


def test_a_changed_source_is_refused(tmp_path: Path) -> None:
    source = faults.write_small(tmp_path / "source")
    out = tmp_path / "out"
    assert _killed_at(source, "single", out, 60) == KILLED
    assert (out / WORK_DIR / JOURNAL).stat().st_size
    shard = source / "model-00001-of-00002.safetensors"
    was = shard.stat()
    os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    run = partial(convert, source, out, faults.options("single"))
    assert "the source's files (size or time) changed" in _refused(run, out)
    os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns))
    config = source / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    assert "the plan was" in _refused(run, out)


def test_the_lock_refuses_a_second_run(source: Path, unfinished: Path) -> None:
    lock = take_lock(unfinished / WORK_DIR / LOCK)
    assert lock is not None
    told = _refused(lambda: convert(source, unfinished, faults.options("sharded")), unfinished)
    assert f"another qconvert (process {os.getpid()})" in told
    with pytest.raises(OutputError, match="another qconvert"):
        clean(unfinished, Files())
    lock.close()
    convert(source, unfinished, faults.options("sharded"))


def test_a_lock_that_workers_of_a_killed_run_still_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine they take longer to die than is waited for a run that is at work."""
    monkeypatch.setattr(leases, "_TRIES", 2)

    def killed() -> None:
        assert take_lock(tmp_path / "lock") is not None
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == KILLED
    taken = take_lock(tmp_path / "lock")
    assert taken is not None
    with pytest.raises(OutputError, match=f"process {os.getpid()}"):
        take_lock(tmp_path / "lock")
    taken.close()


def test_a_lock_whose_folder_went_is_no_lock(tmp_path: Path) -> None:
    """A run that waits for another which then finishes must not hold on to a removed file."""
    folder = tmp_path / WORK_DIR
    assert take_lock(folder / LOCK) is None
    folder.mkdir()
    first = take_lock(folder / LOCK)
    assert first is not None
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(take_lock, folder / LOCK)
        while _opened(folder / LOCK) < 2:
            assert not second.done()
        shutil.rmtree(folder)
        first.close()
        assert second.result() is None


def _opened(file: Path) -> int:
    """How many descriptors of this process are open on a file."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(link) == str(file.resolve()) for link in links)


def test_the_same_command_again_does_nothing(plain: Case, tmp_path: Path) -> None:
    plain.run(tmp_path)
    counting = Counting()
    plain.run(tmp_path, counting)
    assert counting.steps == []
    assert plain.wrong(tmp_path) == []
    if plain.kind == "linked":
        return
    with pytest.raises(OutputError, match="finished result of another plan"):
        execute(
            Plan.identity(Checkpoint.open(plain.source)), tmp_path / OUT, faults.options(plain.kind)
        )
    assert plain.wrong(tmp_path) == []


def test_foreign_folders_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, text in (("letter.txt", "dear"), (MANIFEST, "{"), ("model.safetensors", "")):
        (out / name).write_text(text)
        before = tree(out)
        with pytest.raises(OutputError, match=r"is not a folder of qconvert's|of another plan"):
            convert(source, out, faults.options("single"))
        assert tree(out) == before


TORN: dict[str, Callable[[bytes], bytes]] = {
    "half of the last line": lambda line: line[: len(line) // 2],
    "no newline": lambda line: line[:-1],
    "a flipped bit": lambda line: line[:40] + bytes([line[40] ^ 1]) + line[41:],
    "zeros": lambda line: bytes(len(line)),
    "nothing but a newline": lambda _: b"\n",
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN.keys())
def test_a_torn_journal_line_is_cut(
    source: Path, unfinished: Path, tmp_path: Path, tear: Callable[[bytes], bytes]
) -> None:
    journal = unfinished / WORK_DIR / JOURNAL
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    journal.write_bytes(b"".join(lines) + tear(last))
    # What the next run adds must not stand behind the torn line, where it could not be read.
    assert _killed_at(source, "sharded", unfinished, 25) == KILLED
    again = read_journal(journal)
    assert again is not None
    assert len(again.units) > len(lines) - 1
    receipt = execute(faults.plan_of(source), unfinished, faults.options("sharded"))
    assert receipt.resumed_units == len(again.units)
    assert differing(tree(unfinished), tree(tmp_path / "counted")) == []


def test_a_torn_header_starts_afresh(source: Path, unfinished: Path, tmp_path: Path) -> None:
    journal = unfinished / WORK_DIR / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-1][:30])
    receipt = execute(faults.plan_of(source), unfinished, faults.options("sharded"))
    assert receipt.resumed_units == 0
    assert differing(tree(unfinished), tree(tmp_path / "counted")) == []


# --- the command line, with workers -------------------------------------------------------------

# Enough that the workers are still at it when the first units have been committed: the command
# line commits after 256 MiB.
WEIGHTS, SIDE = 72, 2048


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """300 MB of random FP8."""
    folder = tmp_path_factory.mktemp("large")
    one = faults.fp8((SIDE, SIDE), 0)
    tensors = {}
    for i in range(WEIGHTS):
        made = faults.weight(f"model.layers.{i // 36}.w{i % 36}.weight", (SIDE, 128), i)
        (name, _), (scale, _) = made.items()
        shape = (SIDE, SIDE)
        kinds = TensorType("F8_E4M3", shape), TensorType("F32", faults.grid(shape))
        # Turning the same codes is as good as new ones, and much faster to make.
        tensors[name] = kinds[0], one[i * 1009 :] + one[: i * 1009]
        tensors[scale] = kinds[1], faults.scales(shape, i)
    yield faults.write_checkpoint(folder / "source", tensors, shards=3)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def large_wanted(large: Path) -> Tree:
    out = large.parent / "undisturbed"
    assert _cli(large, out).wait() == 0
    return tree(out)


def _cli(source: Path, out: Path) -> subprocess.Popen[str]:
    """`qconvert dequant` with two workers, in a process group of its own."""
    command = [sys.executable, "-m", "qconvert", "dequant", str(source), str(out)]
    command += ["--jobs", "2", "--max-shard-size", "200MB"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _lines(out: Path) -> list[str]:
    """What the journal says so far, one word a line."""
    try:
        data = (out / WORK_DIR / JOURNAL).read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    records = [json.loads(line[17:]) for line in whole.splitlines()]
    return [next(iter(record)) if i else "header" for i, record in enumerate(records)]


def _caught(
    large: Path, out: Path, wanted: Callable[[], bool], counts: Sequence[int] = (0, 1, 2)
) -> tuple[subprocess.Popen[str], list[int]]:
    """The command, stopped with its workers (`counts` of them, and then the server that forked them) at
    a moment when `wanted` holds. How fast the machine is decides whether the moment can be seen at all,
    so a run that got past it is thrown away and begun again."""
    for _ in range(30):
        process = _cli(large, out)
        while process.poll() is None and not wanted():
            time.sleep(0.0005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGSTOP)
            while (state := state_of(process.pid)) not in ("T", "Z", ""):
                if state == "D":
                    # It waits for a worker it has just forked to become another program, which
                    # stopped it never would: let both go on a little.
                    os.killpg(process.pid, signal.SIGCONT)
                    time.sleep(0.0005)
                    os.killpg(process.pid, signal.SIGSTOP)
                time.sleep(0.0005)
        there = state_of(process.pid) == "T"
        workers = workers_of(process.pid) if there else []
        server = children(process.pid) if there else []
        if there and wanted() and len(workers) in counts:
            return process, workers + server
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until_gone(workers + server)
        shutil.rmtree(out, ignore_errors=True)
    raise AssertionError("the command was never caught at that moment")


def _finish(large: Path, out: Path, wanted: Tree) -> None:
    process = _cli(large, out)
    told = process.communicate()
    assert process.returncode == 0, told
    assert differing(tree(out), wanted) == []


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "shards made": lambda out: "header" in _lines(out),
    "units committed": lambda out: "unit" in _lines(out),
    "publishing": lambda out: "publish" in _lines(out),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_command_goes_on(
    large: Path, large_wanted: Tree, tmp_path: Path, moment: str
) -> None:
    out = tmp_path / "out"
    process, workers = _caught(large, out, lambda: MOMENTS[moment](out))
    process.kill()
    process.wait()
    wait_until_gone(workers)
    faults.check_visible(out, large_wanted)
    _finish(large, out, large_wanted)


def _working(out: Path) -> bool:
    """Some units are committed, and not all."""
    lines = _lines(out)
    return "unit" in lines and "publish" not in lines


def test_interrupted_command_says_so_and_goes_on(
    large: Path, large_wanted: Tree, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process, workers = _caught(large, out, lambda: _working(out), [2])
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGCONT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert "finished work is kept" in told.strip().splitlines()[-1]
    assert "Traceback" not in told
    wait_until_gone(workers)
    assert not faults.check_visible(out, large_wanted)
    _finish(large, out, large_wanted)


@pytest.mark.parametrize("which", [0, -1], ids=["a worker", "their server"])
def test_killed_worker_is_named_and_the_command_goes_on(
    large: Path, large_wanted: Tree, tmp_path: Path, which: int
) -> None:
    out = tmp_path / "out"
    process, family = _caught(large, out, lambda: _working(out), [2])
    victim = family[which]
    os.kill(victim, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGCONT)
    _, told = process.communicate()
    assert process.returncode == 1
    assert f"worker process {victim} was killed by signal 9" in told
    assert "Traceback" not in told
    wait_until_gone(family)
    assert not faults.check_visible(out, large_wanted)
    _finish(large, out, large_wanted)


def test_second_command_is_refused_and_the_first_ends_well(
    large: Path, large_wanted: Tree, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first, _ = _caught(large, out, lambda: "header" in _lines(out))
    second = _cli(large, out)
    _, told = second.communicate()
    assert second.returncode == 1
    assert f"another qconvert (process {first.pid}) is running there" in told
    os.killpg(first.pid, signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0
    assert differing(tree(out), large_wanted) == []


def test_finished_command_says_there_is_nothing_to_do(large: Path, large_wanted: Tree) -> None:
    process = _cli(large, large.parent / "undisturbed")
    told, _ = process.communicate()
    assert process.returncode == 0
    assert "nothing to do" in told
    assert differing(tree(large.parent / "undisturbed"), large_wanted) == []
