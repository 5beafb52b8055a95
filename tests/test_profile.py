"""--profile: sums that agree with the plan, every op named, nothing recorded that nobody asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bf16_moe, convert, fp8_moe, run_cli, tree
from models import qwen3_moe

from qconvert import api
from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.cli.profile import without_profile
from qconvert.core import profiling
from qconvert.core.profiling import Meter, phase, recording
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.dequant import Dequant
from qconvert.plan.units import Compute
from qconvert.run.folder.journal import lines_of
from qconvert.run.folder.leases import journals_in
from qconvert.run.profile import Profile, ProfileRow
from qconvert.run.work.meters import kind_of

_ROW = {"step", "times", "seconds", "cpu_seconds", "bytes", "beside"}
_TOP = {"qconvert", "seconds", "cpu_seconds", "machine", "runs", "main", "workers"}
_WORKERS = {"processes", "seconds", "kernels", "waited_for_work", "waited_for_disk", "steps"}
_MACHINE = {"cpu", "cores", "cores_of_machine", "memory", "memory_free", "system", "python",
            "numpy", "numba", "torch"}  # fmt: skip
_RUN = {"kind", "tensors", "units", "units_run", "bytes_to_read", "bytes_to_write", "jobs", "memory",
        "arena", "window", "kernels", "shard", "engine"}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fp8_moe().write(tmp_path_factory.mktemp("profile") / "source")


def _rows(rows: Any) -> dict[str, ProfileRow]:
    return {row.step: row for row in rows}


def _profile(made: api.Result) -> Profile:
    assert made.profile is not None
    return made.profile


def _planned(source: Path, recipe: Any) -> tuple[int, int, set[str]]:
    """Bytes that a plan reads and writes, and the kinds of its ops."""
    units = api.plan(recipe, source).folders[0].ready.units
    steps = [step for unit in units for step in unit.steps if isinstance(step, Compute)]
    kinds = {kind_of(node.op) for step in steps for node in step.nodes}
    return sum(unit.read for unit in units), sum(unit.write for unit in units), kinds


# --- Sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "jobs"),
    [("copy", 1), (Dequant(), 2), (ExpertsToAmx("int8", 1), 1)],
    ids=["copy", "fp8", "amx"],
)
def test_sums_agree_with_the_plan(recipe: Any, jobs: int, tmp_path: Path) -> None:
    source = (bf16_moe() if recipe == "copy" else fp8_moe()).write(tmp_path / "source")
    if isinstance(recipe, ExpertsToAmx):
        source = qwen3_moe("bf16", intermediate=128).write(tmp_path / "amx")
    read, written, kinds = _planned(source, recipe)
    made = api.run(recipe, source, tmp_path / "out", jobs=jobs, profile=True)
    profile = _profile(made)
    steps = _rows(profile.workers)
    assert (steps["read"].bytes, steps["write"].bytes) == (read, written)
    (run,) = profile.runs
    assert (run["bytes_to_read"], run["bytes_to_write"]) == (read, written)
    assert run["units"] == run["units_run"] > 0
    assert (run["jobs"], run["shard"]) == (jobs, None)
    assert {row.step for row in profile.workers if row.step[0].isupper()} == kinds
    assert all(steps[kind].times > 0 and steps[kind].bytes > 0 for kind in kinds)
    assert steps["hash"].bytes >= written
    assert profile.processes == 1 if jobs == 1 else profile.processes in (1, 2)
    assert profile.kernels == ["numpy"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_add_up_to_the_whole(source: Path, jobs: int, tmp_path: Path) -> None:
    """What a thread's clock and the process's say is read at two instants, so nearly."""
    profile = _profile(api.run(Dequant(), source, tmp_path / "out", jobs=jobs, profile=True))
    assert sum(row.seconds for row in profile.main) == pytest.approx(profile.seconds, rel=1e-6)
    serial = [row for row in profile.workers if not row.beside]
    assert sum(row.seconds for row in serial) == pytest.approx(profile.worker_seconds, rel=1e-6)
    assert [row.step for row in profile.workers if row.beside] == ["write"]
    assert all(row.seconds >= 0 and row.cpu_seconds >= 0 for row in (*profile.main, *serial))
    assert {"pass dequant", "check", "prepare", "judge", "stage", "fill", "commit", "publish"} <= {
        row.step for row in profile.main
    }


def test_a_step_within_another_is_its_own() -> None:
    meter = Meter()
    with meter.step("outer", 5):
        with meter.step("inner", 7):
            pass
        with pytest.raises(KeyError), meter.step("inner", 1):
            raise KeyError
    steps = meter.take()
    assert (steps["outer"].times, steps["inner"].times) == (1, 2)
    assert (steps["outer"].nbytes, steps["inner"].nbytes) == (5, 8)
    assert steps["outer"].seconds >= 0
    assert meter.take() == {}


def test_a_resumed_run_counts_what_it_does(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.run(Dequant(), source, out, jobs=1)
    again = _profile(api.run(Dequant(), source, out, jobs=1, profile=True))
    assert (again.runs, again.processes, again.worker_seconds) == ([], 0, 0.0)
    (out / "model.safetensors").unlink()
    read, written, kinds = _planned(source, Dequant())
    mended = _profile(api.run(Dequant(), source, out, jobs=1, profile=True))
    steps = _rows(mended.workers)
    assert (steps["read"].bytes, steps["write"].bytes) == (read, written)
    assert kinds <= steps.keys()


def test_shards_count_their_own(source: Path, tmp_path: Path) -> None:
    """What three shards and finish wrote is what one run writes."""
    out = tmp_path / "out"
    _, written, _ = _planned(source, Dequant())
    total = 0
    for index in range(3):
        file = tmp_path / f"{index}.json"
        done = run_cli(
            "dequant", source, out, "--jobs", "1", "--shard", f"{index}/3", "--profile", file
        )
        assert done.code == 0, done.err
        found = json.loads(file.read_text())
        assert [run["shard"] for run in found["runs"]] in ([f"{index}/3"], [])
        total += sum(run["bytes_to_write"] for run in found["runs"])
        assert sum(run["bytes_to_write"] for run in found["runs"]) == _bytes(found, "write")
    file = tmp_path / "finish.json"
    done = run_cli("finish", out, "--profile", file)
    assert done.code == 0, done.err
    total += _bytes(json.loads(file.read_text()), "write")
    assert total == written
    convert("dequant", source, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


def _bytes(found: Mapping[str, Any], step: str) -> int:
    return sum(row["bytes"] for row in found["workers"]["steps"] if row["step"] == step)


# --- Nothing without the option ------------------------------------------------------------------


def test_nothing_is_recorded_without_the_option(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_given: Any, **_more: Any) -> None:
        raise AssertionError("measured without having been asked to")

    monkeypatch.setattr(profiling, "thread_time", fail)
    made = api.run(Dequant(), source, tmp_path / "out", jobs=1)
    assert made.profile is None
    assert not api.validate(made.folder, source, level="full", jobs=1).errors
    assert recording() is None
    with phase("any"):
        pass
    with pytest.raises(AssertionError, match="measured without"):
        api.run(Dequant(), source, tmp_path / "other", jobs=1, profile=True)
    assert recording() is None


# --- The command line ----------------------------------------------------------------------------


def test_the_keys_of_its_json(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    done = run_cli(
        "dequant", source, tmp_path / "out", "--jobs", "1", "--json", f"--profile={file}"
    )
    found = json.loads(done.out)["profile"]
    assert found.keys() == json.loads(file.read_text()).keys() == _TOP
    assert found["workers"].keys() == _WORKERS
    assert found["machine"].keys() == _MACHINE
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert [run.keys() for run in found["runs"]] == [_RUN]
    rows = (*found["main"], *found["workers"]["steps"])
    assert all(row.keys() == _ROW for row in rows)
    assert [row["step"] for row in found["main"]][:2] == ["start", "import"]
    assert "main process" not in done.err
    assert "profile" not in json.loads(
        run_cli("dequant", source, tmp_path / "out", "--jobs", "1", "--json").out
    )


def test_the_table(source: Path, tmp_path: Path) -> None:
    done = run_cli("dequant", source, tmp_path / "out", "--jobs", "1", "--profile")
    assert done.code == 0
    table = done.err[done.err.index("profile  ") :]
    for text in (
        "main process",
        "publish",
        "1 worker, together",
        "DequantFp8",
        "hash",
        "for the disk",
    ):
        assert text in table, table
    assert "33 of 33 units" in table
    dry = run_cli("dequant", source, tmp_path / "other", "--dry-run", "--profile")
    assert "pass dequant" in dry.err
    assert "together" not in dry.err
    # No path of anybody's is in it: it is made to be sent.
    assert str(tmp_path) not in table


def test_validate_has_it_too(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert("dequant", source, out)
    given = ("validate", out, "--against", source, "--level", "full", "--jobs")
    for jobs in ("1", "2"):
        done = run_cli(*given, jobs, "--json", "--profile")
        found = json.loads(done.out)
        (run,) = found["profile"]["runs"]
        assert run["kind"] == "validation"
        steps = {row["step"]: row for row in found["profile"]["workers"]["steps"]}
        assert {"read", "Compare", "HashTask"} <= steps.keys()
        # Each byte of both sides once, by whoever reads it.
        assert steps["read"]["bytes"] == _data(source) + _data(out)
        assert {"open", "rules", "weights"} <= {row["step"] for row in found["profile"]["main"]}
    assert "profile" not in json.loads(run_cli(*given, "1", "--json").out)


def _data(folder: Path) -> int:
    checkpoint = api.open_checkpoint(folder)
    return sum(checkpoint[name].type.nbytes for name in checkpoint)


def test_a_file_that_is_none(source: Path, tmp_path: Path) -> None:
    """A folder after the option is not taken for its file; a file's folder must be there at once."""
    swallowed = run_cli("dequant", "--profile", source, tmp_path / "out")
    assert (swallowed.code, "--profile alone after the other arguments" in swallowed.err) == (
        2,
        True,
    )
    gone = run_cli("dequant", source, tmp_path / "out", "--profile", tmp_path / "gone" / "p.json")
    assert (gone.code, "gone does not exist" in gone.err) == (1, True)
    assert not (tmp_path / "out").exists()


def test_journals_do_not_hold_it(source: Path, tmp_path: Path) -> None:
    """`finish` runs the command of a journal, which must not name a file to write."""
    words = ["dequant", "s", "o", "--profile", "p.json", "--shard", "0/2", "--profile=q.json"]
    assert without_profile(words) == ("dequant", "s", "o", "--shard", "0/2")
    assert without_profile(["dequant", "s", "o", "--profile"]) == ("dequant", "s", "o")
    assert without_profile(["dequant", "--profile", "--jobs", "1"]) == ("dequant", "--jobs", "1")
    out = tmp_path / "out"
    file = tmp_path / "p.json"
    done = run_cli("dequant", source, out, "--jobs", "1", "--shard", "0/1", "--profile", file)
    assert (done.code, file.exists()) == (0, True)
    (journal,) = journals_in(out / WORK_DIR)
    header = dict(journal.remembered.header)
    assert header["command"] == ["dequant", str(source), str(out), "--jobs", "1", "--shard", "0/1"]
    evil = tmp_path / "evil.json"
    header["command"] = [*header["command"], f"--profile={evil}"]
    journal.path.write_bytes(lines_of([header]))
    refused = run_cli("finish", out)
    assert (refused.code, "with --profile, which is not taken" in refused.err) == (1, True)
    assert not evil.exists()


def test_finish_runs_no_validation(source: Path, tmp_path: Path) -> None:
    """It writes where a journal would say."""
    out, evil = tmp_path / "out", tmp_path / "evil.json"
    assert run_cli("dequant", source, out, "--jobs", "1", "--shard", "0/1").code == 0
    (journal,) = journals_in(out / WORK_DIR)
    command = ["validate", str(source), "--report", str(evil)]
    journal.path.write_bytes(lines_of([{**journal.remembered.header, "command": command}]))
    refused = run_cli("finish", out)
    assert (refused.code, "names no conversion" in refused.err) == (1, True), refused.err
    assert not evil.exists()
