"""What an earlier run left is looked at before it is built on: a finished folder, staged files, the
source that finished units were made from."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import faults
import pytest
from checkpoints import run_cli
from data_folders import unsealed
from faults import Counting, Killing, Tree, convert, differing, in_child, plan_of, tree
from sampled import sampled

from qconvert.checkpoint.checkpoint import INDEX, MANIFEST, RECEIPT, SINGLE, WORK_DIR, Checkpoint
from qconvert.checkpoint.safetensors import read_header
from qconvert.core.errors import CheckpointError, OutputError, QConvertError
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.pair import pair_plans
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan
from qconvert.run.executor import RunResult, execute, run_together
from qconvert.run.folder.journal import lines_of, read_journal
from qconvert.run.folder.prepare import prepare_together
from qconvert.run.folder.workspace import JOURNAL
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions

KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("trusted") / "source")


@pytest.fixture(scope="module", params=["sharded", "single"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(source: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    convert(source, out, faults.options(kind))
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A finished folder to damage."""
    shutil.copytree(made, tmp_path / "out")
    return tmp_path / "out"


def _flip(file: Path, at: int, bit: int = 0) -> None:
    """One bit, with size and modification time kept."""
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cut(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)


def _first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


# --- a finished folder ------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], None]] = {
    "a shard is deleted": lambda out: _first_shard(out).unlink(),
    "a shard is truncated": lambda out: _cut(_first_shard(out)),
    "a shard has another header": lambda out: _flip(_first_shard(out), 40),
    "config.json is {}": lambda out: void((out / "config.json").write_text("{}")),
    "config.json is deleted": lambda out: (out / "config.json").unlink(),
    "a nested side file is deleted": lambda out: (out / "extra/words/list.txt").unlink(),
    "a folder of side files is deleted": lambda out: shutil.rmtree(out / "extra"),
    "a side file is edited": lambda out: _flip(out / "tokenizer.json", 3),
    "the manifest is deleted": lambda out: (out / MANIFEST).unlink(),
    "the manifest has another bit": lambda out: _flip(out / MANIFEST, 60),
    "the receipt is deleted": lambda out: (out / RECEIPT).unlink(),
    "the receipt has another bit": lambda out: _flip(out / RECEIPT, 200),
    "the receipt has lost its end": lambda out: _cut(out / RECEIPT),
    "a shard is a symbolic link": lambda out: _linked(_first_shard(out)),
}


def void(_: object) -> None:
    pass


def _linked(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_result_is_repaired(
    source: Path, kind: str, made: Path, out: Path, damage: Callable[[Path], None]
) -> None:
    damage(out)
    receipt = execute(plan_of(source), out, faults.options(kind))
    assert not receipt.already_done
    assert receipt.repaired
    assert differing(tree(out), tree(made)) == []
    assert not any(file.is_symlink() for file in out.rglob("*"))
    assert execute(plan_of(source), out, faults.options(kind)).already_done


def test_a_lost_index_is_written_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, faults.options("sharded"))
    wanted = tree(out)
    (out / INDEX).write_text("{}")
    receipt = execute(plan_of(source), out, faults.options("sharded"))
    assert list(receipt.repaired) == [INDEX]
    assert receipt.resumed_units == len(faults.small_tensors()) - 4  # nothing was computed again
    assert differing(tree(out), wanted) == []


def test_only_what_is_lost_is_made_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source, out, faults.options("sharded"))
    wanted, files = tree(out), sorted(out.glob("*.safetensors"))
    inodes = {file: file.stat().st_ino for file in files}
    files[1].unlink()
    receipt = execute(plan_of(source), out, faults.options("sharded"))
    assert list(receipt.repaired) == [files[1].name]
    assert 0 < receipt.resumed_units < len(faults.small_tensors()) - 4
    others = [file for file in files if file != files[1]]
    assert [file.stat().st_ino for file in others] == [inodes[file] for file in others]
    assert differing(tree(out), wanted) == []


def test_verify_finds_other_bytes_in_a_finished_shard(
    source: Path, kind: str, made: Path, out: Path
) -> None:
    _flip(_first_shard(out), _first_shard(out).stat().st_size - 7)
    assert execute(plan_of(source), out, faults.options(kind)).already_done
    how = replace(faults.options(kind), verify=True)
    receipt = execute(plan_of(source), out, how)
    assert [*receipt.repaired] == [_first_shard(out).name]
    assert differing(tree(out), tree(made)) == []
    assert execute(plan_of(source), out, how).already_done


def test_a_readme_that_people_wrote_in_stays(tmp_path: Path) -> None:
    source = faults.write_small(tmp_path / "source")
    (source / "README.md").write_text("theirs\n")
    out = tmp_path / "out"
    convert(source, out, faults.options("sharded"))
    (out / "README.md").write_text("mine\n")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    assert execute(plan_of(source), out, faults.options("sharded")).already_done
    _first_shard(out).unlink()
    assert execute(plan_of(source), out, faults.options("sharded")).repaired
    assert (out / "README.md").read_text() == "mine\n"
    assert (out / ".gitattributes").exists()
    assert execute(plan_of(source), out, faults.options("sharded")).already_done


def test_a_folder_from_before_seals_is_still_this_result(
    source: Path, kind: str, made: Path, out: Path
) -> None:
    unsealed(out)
    assert execute(plan_of(source), out, faults.options(kind)).already_done
    _first_shard(out).unlink()
    assert execute(plan_of(source), out, faults.options(kind)).repaired
    assert differing(tree(out), tree(made)) == []


@pytest.mark.crash
def test_repairs_killed_anywhere_go_on(source: Path, kind: str, made: Path, tmp_path: Path) -> None:
    """Nothing looks finished while it is repaired, and the same command ends it."""
    wanted, damaged, out = tree(made), tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(made, damaged)
    (damaged / "config.json").write_text("{}")
    _cut(max(damaged.glob("*.safetensors")))
    counting = Counting()
    shutil.copytree(damaged, out)
    convert(source, out, faults.options(kind), counting)
    for at in range(0, len(counting.steps), 7):
        shutil.rmtree(out)
        shutil.copytree(damaged, out)
        run = lambda at=at: convert(source, out, faults.options(kind), Killing(at))  # noqa: E731
        assert in_child(run) == KILLED
        commit = INDEX if INDEX in wanted else SINGLE
        begun = (out / WORK_DIR / "stage").exists() and any((out / WORK_DIR / "stage").iterdir())
        assert not (begun and (out / commit).exists() and differing(_seen(out), wanted))
        convert(source, out, faults.options(kind))
        assert differing(tree(out), wanted) == [], f"killed at {at}, {counting.steps[at]}"


def _seen(out: Path) -> Tree:
    return {name: data for name, data in tree(out).items() if not name.startswith(WORK_DIR)}


def test_the_command_says_what_it_repaired(tmp_path: Path) -> None:
    source = faults.write_small(tmp_path / "source")
    words = ["dequant", str(source), str(tmp_path / "out"), "--jobs", "1"]
    assert run_cli(*words).code == 0
    (tmp_path / "out" / "config.json").write_text("{}")
    told = run_cli(*words)
    assert told.code == 0
    assert "repaired" in told.out
    assert "config.json (has bytes that differ from those written)" in told.out
    assert "nothing to do" in run_cli(*words, "--verify").out


# --- two folders from one read ----------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from models import qwen3_moe

    model = qwen3_moe("fp8", intermediate=128, layers=1)
    model.config["vocab_size"] = 8
    return model.write(tmp_path_factory.mktemp("pair") / "source")


def _pair(source: Path, root: Path, files: Files | None = None) -> list[RunResult]:
    start = Plan.identity(Checkpoint.open(source))
    plans = pair_plans(start, ExpertsToAmx("int4", 1), ExpertsToW4A16())
    ready = prepare_together(plans, RunOptions(jobs=1, commit_bytes=1, max_shard_size=40_000))
    return run_together(list(zip(ready, (root / "cpu", root / "gpu"), strict=True)), files=files)


@pytest.fixture(scope="module")
def paired(experts: Path) -> Path:
    _pair(experts, experts.parent / "paired")
    return experts.parent / "paired"


@pytest.mark.parametrize("side", ["cpu", "gpu"])
def test_a_pair_is_repaired_together(
    experts: Path, paired: Path, tmp_path: Path, side: str
) -> None:
    wanted = tree(paired)
    shutil.copytree(paired, tmp_path / "a")
    for damage in (lambda file: file.unlink(), _cut):
        damage(_first_shard(tmp_path / "a" / side))
        receipts = _pair(experts, tmp_path / "a")
        assert {r.out.name for r in receipts if r.repaired} == {side}
        assert differing(tree(tmp_path / "a"), wanted) == []
    assert all(receipt.already_done for receipt in _pair(experts, tmp_path / "a"))


@pytest.mark.crash
def test_a_pair_s_repair_killed_anywhere_goes_on(
    experts: Path, paired: Path, tmp_path: Path
) -> None:
    damaged, root = tmp_path / "damaged", tmp_path / "root"
    shutil.copytree(paired, damaged)
    wanted = tree(damaged)
    _first_shard(damaged / "gpu").unlink()
    shutil.copytree(damaged, root)
    counting = Counting()
    _pair(experts, root, counting)
    assert differing(tree(root), wanted) == []
    for at in range(0, len(counting.steps), 23):
        shutil.rmtree(root)
        shutil.copytree(damaged, root)
        assert in_child(lambda at=at: _pair(experts, root, Killing(at))) == KILLED  # type: ignore[misc]
        _pair(experts, root)
        assert differing(tree(root), wanted) == [], f"killed at {at}, {counting.steps[at]}"


# --- staged files -----------------------------------------------------------------------------


def _unfinished(source: Path, kind: str, out: Path, part: float = 0.6) -> Path:
    """A run killed in its middle. Returns its stage."""
    counting = Counting()
    convert(source, out, faults.options(kind), counting)
    shutil.rmtree(out)
    publishing = counting.steps.index("rename")
    at = int(publishing * part) if part <= 1 else publishing + int(part)
    assert in_child(lambda: convert(source, out, faults.options(kind), Killing(at))) == KILLED
    return out / WORK_DIR / "stage"


ClaimedRun = Callable[..., Path]


@pytest.fixture(scope="module")
def begun(source: Path, tmp_path_factory: pytest.TempPathFactory) -> ClaimedRun:
    """Makes `out` a copy of such a run, each of which is begun once. Returns its stage."""

    @cache
    def killed(kind: str, part: float) -> Path:
        out = tmp_path_factory.mktemp("begun") / "out"
        _unfinished(source, kind, out, part)
        return out

    def copy(kind: str, out: Path, part: float = 0.6) -> Path:
        shutil.copytree(killed(kind, part), out)
        return out / WORK_DIR / "stage"

    return copy


def _finished_bytes(out: Path) -> list[tuple[str, int]]:
    """File and place of a byte of each tensor that the journal vouches for."""
    found = read_journal(out / WORK_DIR / JOURNAL)
    assert found is not None
    assert found.units
    lines = [json.loads(text) for records in found.units.values() for text in records]
    return [(line["file"], line["offset"] + line["nbytes"] // 2) for line in lines]


STAGED: dict[str, Callable[[Path, Path], None]] = {
    "truncated": lambda stage, out: _cut(stage / _finished_bytes(out)[0][0]),
    "a byte of a finished tensor": lambda stage, out: _flip(
        stage / _finished_bytes(out)[0][0], _finished_bytes(out)[0][1]
    ),
    "a byte of the last finished tensor": lambda stage, out: _flip(
        stage / _finished_bytes(out)[-1][0], _finished_bytes(out)[-1][1]
    ),
    "another header": lambda stage, out: _flip(stage / _finished_bytes(out)[0][0], 30),
    "deleted": lambda stage, out: (stage / _finished_bytes(out)[0][0]).unlink(),
    "empty": lambda stage, out: void((stage / _finished_bytes(out)[0][0]).write_bytes(b"")),
    "a link to something else": lambda stage, out: _linked(stage / _finished_bytes(out)[0][0]),
}


@pytest.mark.parametrize("part", [0.6, 1, 3], ids=["filling", "to be published", "publishing"])
@pytest.mark.parametrize("how", sampled(STAGED, 3))
def test_a_damaged_staged_shard_is_made_again(
    source: Path, kind: str, made: Path, begun: ClaimedRun, tmp_path: Path, how: str, part: float
) -> None:
    out = tmp_path / "out"
    stage = begun(kind, out, part)
    names = {name for name, _ in _finished_bytes(out)}
    for name in names:  # some of them may be in sight already: bring damage to what is staged
        if not (stage / name).exists():
            pytest.skip("published already")
    STAGED[how](stage, out)
    convert(source, out, faults.options(kind))
    assert differing(tree(out), tree(made)) == []


@pytest.mark.parametrize("name", ["config.json", MANIFEST, RECEIPT, "tokenizer.json"])
def test_a_damaged_staged_text_is_not_published(
    source: Path, made: Path, kind: str, begun: ClaimedRun, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    stage = begun(kind, out, 0.999)
    if not (stage / name).exists():
        shutil.rmtree(out)
        stage = begun(kind, out, 1)
    (stage / name).write_bytes(b"{")
    convert(source, out, faults.options(kind))
    assert differing(tree(out), tree(made)) == []


def test_the_user_may_ask_for_all_hashes(
    source: Path,
    made: Path,
    kind: str,
    begun: ClaimedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large result only what was written last is hashed unasked."""
    monkeypatch.setattr("qconvert.run.folder.resume.LOOK_BACK", 1)
    out = tmp_path / "out"
    stage = begun(kind, out, 0.9)
    file, at = _finished_bytes(out)[0]
    _flip(stage / file, at)
    execute(plan_of(source), out, replace(faults.options(kind), verify=True))
    assert differing(tree(out), tree(made)) == []


def test_a_staged_shard_with_a_second_name_is_not_written_through(
    source: Path, kind: str, made: Path, begun: ClaimedRun, tmp_path: Path
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    stage = begun(kind, out)
    for file in stage.glob("*.safetensors"):
        victim.unlink(missing_ok=True)
        os.link(file, victim)
    before = victim.read_bytes()
    convert(source, out, faults.options(kind))
    assert victim.read_bytes() == before
    assert differing(tree(out), tree(made)) == []


@pytest.mark.parametrize(
    "line",
    [
        {"unit": 10**9, "records": [], "remarks": []},
        {"unit": 0, "records": ["{"], "remarks": []},
        {"unit": 0, "records": ['{"name": "x"}'], "remarks": []},
        {"publish": ["../victim"]},
    ],
    ids=str,
)
def test_a_journal_of_other_work_is_refused(
    source: Path, begun: ClaimedRun, tmp_path: Path, line: dict[str, object]
) -> None:
    """A unit that is not there, and records of nothing; test_journal.py has lines of other kinds."""
    out = tmp_path / "out"
    begun("single", out)
    with (out / WORK_DIR / JOURNAL).open("ab") as stream:
        stream.write(lines_of([line]))
    with pytest.raises(OutputError, match=r"journal\.jsonl"):
        convert(source, out, faults.options("single"))


# --- the source -------------------------------------------------------------------------------


def _changed_sources(folder: Path, count: int, seed: int) -> list[tuple[str, int, int]]:
    """Places of single bits, evenly over the tensor data of a source's files."""
    chooser = random.Random(seed)
    found = []
    for _ in range(count):
        file = chooser.choice(sorted(folder.glob("*.safetensors")))
        start = read_header(file).data_start
        found.append(
            (file.name, chooser.randrange(start, file.stat().st_size), chooser.randrange(8))
        )
    return found


@pytest.mark.parametrize("seed", sampled(range(6), 3))
def test_a_source_changed_between_kill_and_resume(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Sixty bits, size and time kept: the run is refused, or its result is that of the source as it is
    now. The sample that names a source is kept from seeing them, as in a large one."""
    same, unfinished = tmp_path / "source", tmp_path / "unfinished"
    shutil.copytree(source, same)
    _unfinished(same, "sharded", unfinished, 0.5 + 0.09 * seed)
    known = Checkpoint.open(same)._sampled
    refused = fresh = 0
    for name, at, bit in _changed_sources(same, 10, seed):
        out = tmp_path / "out"
        shutil.copytree(unfinished, out)
        _flip(same / name, at, bit)
        monkeypatch.setattr(Checkpoint, "_sampled", known)
        try:
            execute(plan_of(same), out, faults.options("sharded"))
        except QConvertError as error:
            refused += name in str(error) and not (out / INDEX).exists()
        else:
            execute(plan_of(same), tmp_path / "fresh", faults.options("sharded"))
            fresh += differing(tree(out), tree(tmp_path / "fresh")) == []
            shutil.rmtree(tmp_path / "fresh")
        monkeypatch.undo()
        shutil.rmtree(out)
        _flip(same / name, at, bit)
    assert refused
    assert refused + fresh == 10


def test_a_source_that_is_touched_and_the_same_goes_on(tmp_path: Path, kind: str) -> None:
    """Copies and shared file systems change ctime and inode: that alone is no reason to refuse."""
    source = faults.write_small(tmp_path / "source")
    out = tmp_path / "out"
    _unfinished(source, kind, out)
    for file in source.glob("*.safetensors"):
        before = file.stat()
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").rename(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    execute(plan_of(source), out, faults.options(kind))
    convert(source, tmp_path / "whole", faults.options(kind))
    assert differing(tree(out), tree(tmp_path / "whole")) == []


def test_a_source_changed_in_mid_run_is_refused(tmp_path: Path) -> None:
    source = faults.write_small(tmp_path / "source")
    file = _first_shard(source)
    for act in (
        lambda: os.utime(file, ns=(1, 1)),
        lambda: _flip(file, file.stat().st_size - 1),
        lambda: _copied_over(file),
    ):
        out = tmp_path / "out"
        with pytest.raises(CheckpointError, match="changed while it was being converted") as caught:
            execute(plan_of(source), out, faults.options("single"), events=faults.At(act))
        assert str(file) in str(caught.value)
        assert os.listdir(out) == [WORK_DIR]
        shutil.rmtree(out)


def _copied_over(file: Path) -> None:
    before = file.stat()
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").rename(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["tokenizer.json", "extra/words/list.txt"])
def test_a_side_file_replaced_in_mid_run_is_refused(tmp_path: Path, name: str) -> None:
    source = faults.write_small(tmp_path / "source")
    plan = plan_of(source)
    change = lambda: _flip(source / name, 1)  # noqa: E731
    with pytest.raises(CheckpointError, match="changed while it was being converted") as caught:
        execute(plan, tmp_path / "out", faults.options("single"), events=faults.At(change))
    assert str(source / name) in str(caught.value)
    assert os.listdir(tmp_path / "out") == [WORK_DIR]


def test_bytes_read_again_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of a finished folder is made again from another source of the same sample."""
    source, out = faults.write_small(tmp_path / "source"), tmp_path / "out"
    convert(source, out, faults.options("single"))
    known = Checkpoint.open(source)._sampled
    _flip(_first_shard(source), _first_shard(source).stat().st_size - 1)
    monkeypatch.setattr(Checkpoint, "_sampled", known)
    _cut(out / SINGLE)
    with pytest.raises(
        CheckpointError, match="its bytes changed since finished work was made from it"
    ):
        convert(source, out, faults.options("single"))
    assert not (out / SINGLE).exists()
