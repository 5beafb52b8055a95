"""Many machines fill one folder: each its shard, and the result is one machine's, byte for byte."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import click
import faults
import pytest
from checkpoints import Result, bf16_moe, run_cli
from faults import Tree, convert, differing, tree
from hostile_inputs import no_hang
from models import qwen3_moe

from qconvert import api
from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.cli.main import cli
from qconvert.cli.stages import REFUSED
from qconvert.core.errors import OutputError, UsageError
from qconvert.plan.plan import Plan
from qconvert.run.folder import leases, staging
from qconvert.run.folder.leases import SHARDS, at_work, begin_lease, journals_in
from qconvert.run.folder.prepare import prepare
from qconvert.run.folder.workspace import JOURNAL, LOCK
from qconvert.run.work.division import BLOCK_BYTES, LEFT_TO_FINISH, Shard, divide, parse_shard
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions

_SIZE = ("--max-shard-size", str(faults.SHARD_BYTES), "--jobs", "1")
KINDS = sorted(faults.SHARD_SIZES)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("shards") / "source")


@pytest.fixture(scope="module")
def one(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """What one machine makes."""
    out = tmp_path_factory.mktemp("one") / "out"
    assert run_cli("dequant", source, out, *_SIZE).code == 0
    return tree(out)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are made on a machine, and looked at from another, whose clock is a day behind; a shard
    that gives no sign of life for a second is taken for lost."""
    real = leases.this_process
    monkeypatch.setattr(
        leases, "this_process", lambda: replace(real(), host="b", machine="another boot")
    )
    yesterday = time.time() - 86400
    monkeypatch.setattr(time, "time", lambda: yesterday)
    monkeypatch.setattr(leases, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)


def _shard(source: Path, out: Path, number: str, *more: str) -> Result:
    return run_cli("dequant", source, out, *_SIZE, "--shard", number, *more)


def _lease(out: Path, shard: Shard, start: int = 1) -> leases.Lease:
    """A shard at work, in this process."""
    work = out / WORK_DIR
    found = journals_in(work)[0]
    made = begin_lease(work, shard, start, found.remembered.header, Files())
    assert made is not None
    return made


def _finished_again(out: Path, *parts: Path) -> None:
    """`finish` and `status` take a folder for finished, also where a process was killed while it removed
    the work folder of one of its parts."""
    before = tree(out)
    for part in parts:
        for left in (None, Path.touch, Path.mkdir):  # nothing, its lock, its folder of journals
            if left is not None:
                (part / WORK_DIR).mkdir()
                left(part / WORK_DIR / (LOCK if left == Path.touch else SHARDS))
            assert {folder.state for folder in api.status(out)} == {"finished"}
            assert run_cli("finish", out).out == f"{out} is finished; nothing to do\n"
            assert differing(tree(out), before) == []


# --- the whole way --------------------------------------------------------------------------------


def test_four_shards_make_what_one_machine_makes(source: Path, one: Tree, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (3, 0, 2):
        assert f"shard {number}/4" in (done := _shard(source, out, f"{number}/4")).out, done
        assert set(os.listdir(out)) == {WORK_DIR}
    early = run_cli("finish", out)
    assert early.code == 1
    assert "shard 1/4 has not begun" in early.err
    assert f"qconvert dequant {source} {out}" in early.err
    assert "--shard 1/4" in early.err
    assert set(os.listdir(out)) == {WORK_DIR}
    again = json.loads(_shard(source, out, "3/4", "--json").out)
    assert again["published"] is False
    assert again["resumed_units"] == 3
    assert _shard(source, out, "1/4").code == 0
    (whole,) = api.status(out)
    assert whole.complete
    assert (whole.units_done, whole.bytes_done) == (whole.units, whole.bytes)
    done = run_cli("finish", out, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["published"] is True
    assert differing(tree(out), one) == []
    _finished_again(out, out)
    assert json.loads(_shard(source, out, "1/4", "--json").out)["already_done"] is True


@pytest.mark.parametrize("kind", KINDS)
def test_in_every_way_files_are_made(kind: str, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "one", faults.options(kind))
    how = faults.options(kind)
    for number in range(3):
        convert(source, tmp_path / "out", replace(how, shard=Shard(number, 3)))
    convert(source, tmp_path / "out", replace(how, finish=True))
    assert differing(tree(tmp_path / "out"), tree(tmp_path / "one")) == []


@pytest.mark.parametrize("numbers", [["0/1"], ["0/4", "0/3", "1/3", "2/3"], ["2/4"]], ids=str)
def test_other_divisions_make_the_same(
    numbers: list[str], source: Path, one: Tree, tmp_path: Path
) -> None:
    """Units are what journals know: those that are left may be divided anew, or done by the command
    without --shard."""
    out = tmp_path / "out"
    for number in numbers:
        assert _shard(source, out, number).code == 0
    if numbers == ["2/4"]:
        done = json.loads(run_cli("dequant", source, out, *_SIZE, "--json").out)
        assert done["resumed_units"] == 1
    else:
        assert run_cli("finish", out).code == 0
    assert differing(tree(out), one) == []


def test_units_that_no_shard_does_are_left_to_finish(source: Path, tmp_path: Path) -> None:
    """In one file two hosts would write to one block: the unit after a cut is done at the end."""
    assert run_cli("dequant", source, tmp_path / "one", "--jobs", "1").code == 0
    out = tmp_path / "out"
    shown = run_cli("dequant", source, out, "--jobs", "1", "--shard", "0/3", "--dry-run")
    assert "are left to finish" in shown.out
    for number in range(3):
        assert run_cli("dequant", source, out, "--jobs", "1", "--shard", f"{number}/3").code == 0
    (found,) = api.status(out)
    assert found.units is not None
    assert found.units_done is not None
    assert found.units - found.rest[0] == found.units_done < found.units
    assert f"left to finish: {found.rest[0]} unit" in run_cli("status", out).out
    assert run_cli("finish", out).code == 0
    assert differing(tree(out), tree(tmp_path / "one")) == []


def test_a_pair_of_folders(tmp_path: Path) -> None:
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    sides = ("--cpu", "int8", "--numa", "1", "--gpu", "w4a16")

    def folders(at: Path) -> tuple[str, ...]:
        return ("--cpu-out", str(at / "cpu"), "--gpu-out", str(at / "gpu"))

    one = run_cli("kt", source, *sides, *folders(tmp_path / "one"))
    assert one.code == 0, one.err
    for number in range(2):
        done = run_cli("kt", source, *sides, *folders(tmp_path), "--shard", f"{number}/2")
        assert done.code == 0, done.err
    done = run_cli("finish", tmp_path / "cpu")
    assert done.code == 0, done.err
    for side in ("cpu", "gpu"):
        assert differing(tree(tmp_path / side), tree(tmp_path / "one" / side)) == []


def test_stages(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    assert run_cli("split", source, tmp_path / "one", "--pp", "1,1").code == 0
    for number in range(2):
        done = run_cli("split", source, tmp_path / "out", "--pp", "1,1", "--shard", f"{number}/2")
        assert done.code == 0, done.err
    assert len(json.loads(run_cli("status", tmp_path / "out", "--json").out)) == 2
    done = run_cli("finish", tmp_path / "out")
    assert done.code == 0, done.err
    assert differing(tree(tmp_path / "out"), tree(tmp_path / "one")) == []
    _finished_again(tmp_path / "out", *sorted((tmp_path / "out").iterdir()))


# --- the division ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("size", [40_000, 150_000, 5_000_000_000])
def test_no_two_shards_write_to_a_block(count: int, size: int, source: Path) -> None:
    ready = prepare(faults.plan_of(source), RunOptions(max_shard_size=size))
    division = divide(ready.units, [ready.layout], count)
    owners: dict[tuple[int, int], set[int]] = {}
    for unit, owner in zip(ready.units, division.owner, strict=True):
        for name, output in unit.outputs:
            file, at = ready.layout.places[name]
            for block in range(at // BLOCK_BYTES, (at + output.type.nbytes - 1) // BLOCK_BYTES + 1):
                owners.setdefault((file, block), set()).add(owner)
    assert all(len(found - {LEFT_TO_FINISH}) <= 1 for found in owners.values())
    every = [division.of(Shard(n, count)) for n in range(count)]
    assert sum(map(len, every)) + division.rest[0] == len(ready.units)
    assert sum(share[0] for share in division.shares) + division.rest[0] == len(ready.units)


def test_shares_are_even(tmp_path: Path) -> None:
    tensors = {}
    chooser = random.Random(3)
    for n in range(300):
        tensors[f"model.layers.{n}.up.weight"] = faults.plain((64, chooser.choice((128, 512))), n)
    source = faults.write_checkpoint(tmp_path / "source", tensors, quantized=False)
    ready = prepare(
        Plan.identity(api.open_checkpoint(source)), RunOptions(max_shard_size=1_000_000)
    )
    division = divide(ready.units, [ready.layout], 5)
    sizes = [nbytes for _, nbytes in division.shares]
    whole = sum(sizes) + division.rest[1]
    assert all(abs(size - whole / 5) < 0.08 * whole for size in sizes), sizes
    assert division.rest[0] <= 3 * 4


@pytest.mark.parametrize(
    ("text", "environment", "found"),
    [
        ("2/8", {}, (2, 8)),
        ("auto", {"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ("auto", {"SLURM_PROCID": "1", "SLURM_NTASKS": "6"}, (1, 6)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4",
                  "SLURM_ARRAY_TASK_MIN": "2"}, (3, 4)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8",
                  "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (5, 8)),
        ("auto/12", {"JOB_COMPLETION_INDEX": "11"}, (11, 12)),
        ("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
        ("auto", {"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2"},
         (1, 2)),
    ],
)  # fmt: skip
def test_which_shard_this_is(
    text: str, environment: dict[str, str], found: tuple[int, int]
) -> None:
    assert parse_shard(text, environment) == Shard(*found)


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("4/4", {}, "counted from 0 to 3"),
        ("1", {}, "write I/N"),
        ("0/0", {}, "write N from 1"),
        ("0/99999", {}, "write N from 1"),
        ("-1/4", {}, "write I/N"),
        ("auto", {}, "none of these is set"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, "auto/N"),
        ("auto", {"RANK": "x", "WORLD_SIZE": "4"}, "expected a number"),
        ("auto", {"RANK": "1"}, "WORLD_SIZE is ''"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3",
                  "SLURM_ARRAY_TASK_MIN": "1"}, "no gaps"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_PROCID": "1",
                  "SLURM_NTASKS": "2"}, "both say"),
    ],
)  # fmt: skip
def test_which_shard_cannot_be_told(text: str, environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_shard(text, environment)


def test_the_environment_alone_makes_no_shard(
    source: Path, one: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run_cli("dequant", source, tmp_path / "out", *_SIZE).code == 0
    assert differing(tree(tmp_path / "out"), one) == []
    assert "shard 1/4" in _shard(source, tmp_path / "part", "auto").out


# --- refused --------------------------------------------------------------------------------------


def test_another_plan_version_or_source_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "0/4").code == 0
    before = _work(out)
    plan = run_cli("dequant", source, out, *_SIZE, "--shard", "1/4", "--dtype", "f32")
    assert plan.code == 1
    assert "pass 1 was" in plan.err
    size = run_cli("dequant", source, out, "--max-shard-size", "99999", "--shard", "1/4")
    assert "--max-shard-size was 150 KB, now 99999 B" in size.err
    with monkeypatch.context() as patched:
        patched.setattr(staging, "__version__", "9.9")
        version = _shard(source, out, "1/4")
    assert "the version of qconvert was" in version.err
    other = faults.write_checkpoint(
        tmp_path / "other",
        {**faults.small_tensors(), "model.embed_tokens.weight": faults.plain((40, 256), 99)},
        shards=2,
    )
    changed = _shard(other, out, "1/4")
    assert "the source's weights or side files changed" in changed.err
    assert {plan.code, size.code, version.code, changed.code} == {1}
    assert run_cli("dequant", source, out, "--max-shard-size", "99999").code == 1
    assert differing(_work(out), before) == []


def _work(out: Path) -> Tree:
    """All files, but the lock, which names whoever had it last."""
    return {name: data for name, data in tree(out).items() if not name.endswith("lock")}


def test_a_calibration_is_refused(tmp_path: Path) -> None:
    source = bf16_moe().write(tmp_path / "source")
    words = ("--gptq", "--synthetic", "--group-size", "32", "--shard", "0/2")
    done = run_cli("w4a16", source, tmp_path / "out", *words)
    assert done.code == 1
    assert not (tmp_path / "out").exists()


def test_a_run_without_shards_keeps_shards_out(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killing = faults.Killing(150)
    how = faults.options("sharded")
    assert faults.in_child(lambda: convert(source, out, how, killing)) == -9
    assert (out / WORK_DIR / JOURNAL).is_file()
    with pytest.raises(OutputError, match="go on with the same command without --shard"):
        convert(source, out, replace(how, shard=Shard(0, 4)))


@pytest.mark.parametrize(
    "more",
    [
        ("--family", "mine.py"), ("--family=x.py",), ("--follow-links",), ("--engine", "ray"),
        ("--address=head:6379",), ("--save-stats", "mine"), ("--loader=bin/python",),
    ],
)  # fmt: skip
def test_some_options_are_not_taken_from_a_journal(
    more: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ("dequant", str(source), str(out), *more)
    convert(source, out, replace(faults.options("sharded"), shard=Shard(0, 1), command=command))
    assert "which is not taken from a journal" in run_cli("finish", out).err


def test_options_that_name_a_place_are_not_taken_from_a_journal() -> None:
    """Of every conversion with --shard: what an option writes, or takes for code, is refused."""
    read_only = {"--stats", "--keep"}  # numbers of a calibration, and of experts, as a source is
    held = {"--work-dir"}  # to the folder that is finished
    found: set[str] = set()

    def walk(command: click.Command) -> None:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                walk(inner)
        elif {"shard", "dry_run"} <= {param.name for param in command.params}:
            for param in command.params:
                if isinstance(param, click.Option) and not str(param.name).endswith("_out"):
                    kind = type(param.type).__name__
                    if kind in ("FolderPath", "File", "Path", "Address") or kind.endswith("File"):
                        found.update(param.opts)

    walk(cli)
    assert found - read_only - held <= set(REFUSED)
    assert {"--save-stats", "--family", "--work-dir"} <= found


def test_a_pair_whose_other_side_lies_where_no_shard_was(tmp_path: Path) -> None:
    """The journal of the folder for CPUs names one for GPUs, which `finish` would make."""
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    sides = ("--cpu", "int8", "--numa", "1", "--gpu", "w4a16")
    places = ("--cpu-out", tmp_path / "cpu", "--gpu-out", tmp_path / "home" / "gpu")
    done = run_cli("kt", source, *sides, *places, "--shard", "0/1")
    assert done.code == 0, done.err
    (tmp_path / "home").rename(tmp_path / "away")
    done = run_cli("finish", tmp_path / "cpu")
    assert done.code == 1
    assert f"its journal holds a command for {tmp_path}/cpu, {tmp_path}/home/gpu" in done.err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("start", ["999999", "0999999", "000001"])
def test_a_journal_whose_name_has_all_digits(start: str, source: Path, tmp_path: Path) -> None:
    """The next start has a name, or the shard is refused: it does not look for one for ever."""
    out = tmp_path / "out"
    words = ("dequant", source, out, "--jobs", "1", "--shard", "0/2")
    assert run_cli(*words).code == 0
    shards = out / WORK_DIR / "shards"
    (shards / "0-of-2.1.jsonl").rename(shards / f"0-of-2.{start}.jsonl")
    with no_hang():
        done = run_cli(*words)
    if start == "999999":
        assert done.code == 1
        assert "was started 999,999 times" in done.err
    else:
        assert done.code == 0, done.err


def test_a_name_that_is_taken_by_no_journal(source: Path, tmp_path: Path) -> None:
    """link(2) finds something of the name, and the list of journals does not."""
    out = tmp_path / "out"
    how = replace(faults.options("sharded"), shard=Shard(0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qconvert.run.engines.shard.begin_lease", lambda *of: None)
        patch.setattr("qconvert.run.engines.shard._LISTED_AFTER", 0)
        with pytest.raises(
            OutputError, match="what has the name of start 1 of shard 0/2 is no jour"
        ):
            convert(source, out, how)


@pytest.mark.parametrize("way", ["another folder", "another --work-dir"])
def test_a_journal_cannot_send_a_command_elsewhere(way: str, source: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    store = way == "another --work-dir"
    named = (out.as_uri(), "--work-dir", str(other)) if store else (str(other),)
    how = replace(faults.options("sharded"), shard=Shard(0, 1))
    convert(source, out, replace(how, command=("dequant", str(source), *named)))
    done = run_cli("finish", out)
    assert done.code == 1
    assert f"its journal holds a command for {other}" in done.err
    assert not other.exists()
    convert(source, tmp_path / "clean", replace(how, command=("clean", str(out))))
    assert run_cli("finish", tmp_path / "clean").code == 1
    assert (out / WORK_DIR).is_dir()


def test_lost_files_are_made_again_by_a_run_of_all(source: Path, one: Tree, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in range(4):
        assert _shard(source, out, f"{number}/4").code == 0
    next((out / WORK_DIR / "stage").glob("*.safetensors")).unlink()
    said = [_shard(source, out, f"{number}/4") for number in range(4)]
    refused = [done for done in said if done.code]
    assert refused
    assert all("is missing, and finished work in it may be lost" in done.err for done in refused)
    assert run_cli("finish", out).code == 0
    assert differing(tree(out), one) == []


def test_damaged_units_are_done_again(source: Path, one: Tree, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "1/4").code == 0
    (journal,) = journals_in(out / WORK_DIR)
    (records, *_) = journal.remembered.units.values()
    record = json.loads(records[0])
    path = out / WORK_DIR / "stage" / record["file"]
    with path.open("r+b") as stream:
        stream.seek(record["offset"])
        stream.write(b"\x55" * 8)
    assert json.loads(_shard(source, out, "1/4", "--json").out)["resumed_units"] == 2
    for number in (0, 2, 3):
        assert _shard(source, out, f"{number}/4").code == 0
    assert run_cli("finish", out).code == 0
    assert differing(tree(out), one) == []


# --- leases ---------------------------------------------------------------------------------------


def test_a_shard_that_runs_is_not_run_twice(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "0/4").code == 0
    busy = _lease(out, Shard(1, 4))
    try:
        second = _shard(source, out, "1/4")
        assert second.code == 1
        assert f"shard 1/4 (process {os.getpid()} on " in second.err
        assert "shard 0/3 cannot begin" in _shard(source, out, "0/3").err
        assert "a run without --shard cannot begin" in run_cli("finish", out).err
        assert "it cannot be cleaned" in run_cli("clean", out).err
        assert _shard(source, out, "2/4").code == 0
        states = {row.shard: row.state for row in api.status(out)[0].shards}
        assert states == {"0/4": "done", "1/4": "running", "2/4": "done", "3/4": "not begun"}
    finally:
        busy.end("stopped")
    assert _shard(source, out, "1/4").code == 0


@pytest.mark.usefixtures("elsewhere")
def test_a_shard_of_another_machine_is_observed(source: Path, tmp_path: Path) -> None:
    """Nothing but the growth of its journal tells whether it is at work: no clock, no process."""
    out = tmp_path / "out"
    assert _shard(source, out, "0/4").code == 0
    (done,) = journals_in(out / WORK_DIR)
    assert done.by.host == "b"
    with pytest.MonkeyPatch.context() as there:
        there.setattr(leases, "this_process", lambda: leases.Process("a", "its boot", 7, "1"))
        busy = _lease(out, Shard(1, 4))
    # The file system's clock is neither's.
    os.utime(busy._path, (0, 0))
    told: list[str] = []
    found = [j for j in journals_in(out / WORK_DIR) if j.shard.index == 1]
    assert at_work(found, told.append) == found
    assert told == ["observing shard 1/4 (process 7 on a) for 1 s: is it at work?"]
    busy.end("stopped")
    assert at_work(found, told.append) == []  # it ended while it was observed


@pytest.mark.usefixtures("elsewhere")
def test_a_lost_shard_of_another_machine_is_taken_over(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(source, tmp_path / "one", faults.options("sharded"))
    # The other machine's shard dies in the middle.
    how = replace(faults.options("sharded"), shard=Shard(1, 4))
    with monkeypatch.context() as there:
        there.setattr(leases, "this_process", lambda: leases.Process("a", "its boot", 1, "1"))
        killing = faults.Killing(40)
        assert faults.in_child(lambda: convert(source, out, how, killing)) == -9
    (lost,) = journals_in(out / WORK_DIR)
    assert lost.label == "shard 1/4 (process 1 on a)"
    assert api.status(out)[0].shards[1].state == "unknown"
    began = time.monotonic()
    convert(source, out, how)
    assert time.monotonic() - began >= leases.STALE_SECONDS
    assert [j.start for j in journals_in(out / WORK_DIR)] == [1, 2]
    for number in (0, 2, 3):
        convert(source, out, replace(how, shard=Shard(number, 4)))
    convert(source, out, replace(how, shard=None, finish=True))
    assert differing(tree(out), tree(tmp_path / "one")) == []


def test_one_that_was_taken_for_lost_stops(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "0/4").code == 0
    first = _lease(out, Shard(1, 4))
    first.append([{"beat": 1}])
    second = _lease(out, Shard(1, 4), 2)
    with pytest.raises(api.RunError, match="started again by another process"):
        first.append([{"beat": 1}])
    first.end("stopped")
    second.end("done")
    rows = api.status(out)[0].shards
    assert (rows[1].state, rows[1].starts) == ("done", 2)


def test_one_start_of_many_at_once_wins(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "0/4").code == 0
    header = dict(journals_in(out / WORK_DIR)[0].remembered.header)
    gate = threading.Barrier(8)
    made: list[leases.Lease | None] = []

    def start() -> None:
        gate.wait()
        made.append(begin_lease(out / WORK_DIR, Shard(1, 4), 1, header, Files()))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [each for each in made if each is not None]
    winner.end("done")
    assert len(journals_in(out / WORK_DIR)) == 2
    assert not list((out / WORK_DIR / SHARDS).glob("*.new"))


# --- what is in the work folder -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("by", None), ("by", {"host": 1}), ("command", "dequant"), ("command", [1]), ("shares", [[1]]),
     ("folder", 7)],
)  # fmt: skip
def test_a_first_line_that_qconvert_does_not_write(
    key: str, value: object, source: Path, tmp_path: Path
) -> None:
    from qconvert.run.folder.journal import lines_of

    out = tmp_path / "out"
    assert _shard(source, out, "0/1").code == 0
    (journal,) = journals_in(out / WORK_DIR)
    journal.path.write_bytes(lines_of([{**journal.remembered.header, key: value}]))
    done = run_cli("status", out)
    assert done.code == 1
    assert "was not written by qconvert" in done.err


def test_a_folder_of_journals_that_is_a_link(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "0/1").code == 0
    shards = out / WORK_DIR / SHARDS
    shards.rename(tmp_path / "away")
    shards.symlink_to(tmp_path / "away")
    for command in (("status", out), ("finish", out), ("clean", out)):
        assert run_cli(*command).code == 1
    assert _shard(source, out, "0/1").code == 1
    assert len(list((tmp_path / "away").iterdir())) == 1


def test_clean_drops_the_work_of_shards(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _shard(source, out, "0/2").code == 0
    assert run_cli("clean", out).out == f"dropped unfinished work in {out}\n"
    assert list(out.iterdir()) == []
    with pytest.raises(OutputError, match="no conversion"):
        api.status(out)
