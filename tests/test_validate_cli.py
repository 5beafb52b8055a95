"""`qconvert validate` as people and CI call it: options, exit codes, where reports go, and what is never
called proved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import bf16_moe, convert, fp8_moe, run_cli

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.runner import Request, validate_folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    room = tmp_path_factory.mktemp("cli")
    source = fp8_moe().write(room / "source")
    convert("dequant", source, room / "out")
    return source, room / "out"


@pytest.mark.parametrize(
    "words",
    [
        (), ("--level", "full"), ("--kernels", "--against", "x"),
        ("OUT", "--layers", "3-1"), ("OUT", "--layers", "0-99999999999"),
        ("OUT", "--layers", "one"), ("OUT", "--json", "--format", "html"), ("OUT", "--jobs", "0"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], pair: tuple[Path, Path]) -> None:
    result = run_cli("validate", *(str(pair[1]) if word == "OUT" else word for word in words))
    assert result.code == 2
    assert result.out == ""
    assert "Error: " in result.err


def test_a_folder_that_is_not_there_is_the_caller_s_error(tmp_path: Path) -> None:
    result = run_cli("validate", tmp_path / "nowhere")
    assert (result.code, result.out) == (1, "")
    assert result.err == f"qconvert: error: {tmp_path / 'nowhere'}: no such folder\n"


@pytest.mark.parametrize("name", ["page.pdf", "missing/page.html"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    name: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    result = run_cli("validate", pair[1], "--report", tmp_path / name)
    # A suffix that no report has is a fault of the option's own text; a missing folder is not.
    assert (result.code, result.out) == (2 if name.endswith(".pdf") else 1, "")
    assert name.rpartition("/")[2] in result.err


def test_reports_are_written_beside_what_is_printed(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    names = ("a.html", "b.json", "c.xml", "d.sarif", "e.md", "f.txt")
    files = [word for name in names for word in ("--report", tmp_path / name)]
    result = run_cli("validate", pair[1], "--against", pair[0], "--level", "sample", "-v", *files)
    assert result.code == 0
    assert (tmp_path / "f.txt").read_text() == result.out.removesuffix("\n")
    assert json.loads((tmp_path / "b.json").read_text())["verdict"] == "passed"
    assert all((tmp_path / name).stat().st_size for name in names)


def test_within_github_actions(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("of an earlier step\n")
    model = bf16_moe()
    model.config["quantization_config"] = {"quant_method": "fp8"}
    result = run_cli("validate", model.write(tmp_path / "bad"))
    assert result.code == 3
    assert any(line.startswith("::error ") and "QC012" in line for line in result.out.splitlines())
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("of an earlier step\n")
    assert "QC012" in summary
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "summary.md"))
    result = run_cli("validate", pair[1])
    assert result.code == 0
    assert "summary was not written" in result.err


def test_levels_say_how_far_they_looked(pair: tuple[Path, Path]) -> None:
    claim = "every weight is the source's within its format's rounding"
    proved = {
        level: validate_folder(pair[1], str(pair[0]), request=Request(level)).proved
        for level in ("headers", "sample", "full")
    }
    assert not [text for text in proved["headers"] if claim in text]
    assert f"{claim} (in a sample)" in proved["sample"]
    assert claim in proved["full"]


def test_what_had_nothing_to_look_at_proves_nothing(pair: tuple[Path, Path]) -> None:
    """Its head is not tied, and its weights have no global scales."""
    report = validate_folder(pair[1], str(pair[0]), request=Request("full"))
    for claim in ("tied head", "one global scale"):
        assert not [text for text in [*report.proved, *report.not_checked] if claim in text]


_SLEEPERS = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stub_tasks import Count, Sleep
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.workers import run_tasks
folder = Checkpoint.open(sys.argv[2])
tasks = [(0, Sleep(tensor)) for tensor in folder.values()]
if __name__ == "__main__":
    try:
        print(list(run_tasks(tasks, (folder.shards, ()), jobs=2)))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def _workers(parent: int) -> list[int]:
    """Its children that have begun to work: they say so with a file of their number."""
    file = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _until(true: object, what: str) -> None:
    assert callable(true)
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError(f"waited a minute for {what}")


@pytest.mark.crash
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(
    how: signal.Signals, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(_SLEEPERS)
    process = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent), str(pair[1])],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "QCONVERT_TEST_ROOM": str(tmp_path)},
    )  # fmt: skip
    try:
        _until(lambda: len(list(tmp_path.glob("asleep-*"))) == 2, "two workers to sleep")
        children = _workers(process.pid)
        os.killpg(process.pid, how) if how == signal.SIGINT else process.kill()
        _, said = process.communicate(timeout=60)
        assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
        if how == signal.SIGINT:
            assert said.decode() == ""
            # Not what waited for them: all of it was done before, in 18 s.
            begun = sum(path.stat().st_size for path in tmp_path.glob("asleep-*"))
            assert begun < len(Checkpoint.open(pair[1])) // 3
        _until(lambda: all(_gone(pid) for pid in children), "workers to end")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
