"""What a journal says of a run that is not its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qconvert.core.errors import OutputError
from qconvert.run.folder.journal import Journal, first_difference, lines_of, read_journal
from qconvert.run.work.files import Files
from qconvert.run.work.upload_target import SentFile

HEADER: dict[str, Any] = {
    "source": "s", "passes": [{"name": "dequant", "options": {}}], "qconvert": "0.1.0",
    "sha256": False, "fingerprint": "a",
}  # fmt: skip


def test_a_plan_that_differs_in_nothing_else_points_to_the_card() -> None:
    said = first_difference(HEADER, {**HEADER, "fingerprint": "b"})
    assert said is not None
    assert said.startswith("the plan was a, now b")
    assert "--base-model" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"passes": [{"name": "fuse", "options": {}}]}, "pass 1 was `dequant`, now `fuse`"),
        ({"passes": []}, "pass 1 was `dequant`, now no pass"),
        ({"source": "t"}, "the source changed since that run began"),
        ({"sha256": True}, "--sha256 was False, now True"),
    ],
)
def test_what_else_differs_is_said_first(change: dict[str, Any], words: str) -> None:
    assert first_difference(HEADER, {**HEADER, "fingerprint": "b", **change}) == words


def test_the_same_run_differs_in_nothing() -> None:
    assert first_difference(HEADER, dict(HEADER)) is None


def test_files_that_were_sent(tmp_path: Path) -> None:
    """The last line about a file is the one that counts."""
    path = tmp_path / "journal.jsonl"
    path.touch()
    journal = Journal(path, Files(), 0)
    one, two = SentFile("a.safetensors", 5, "1" * 64), SentFile("b.safetensors", 6, "2" * 64)
    journal.append([{**HEADER, "run": "r"}, {"sent": [one.as_json(), two.as_json()]}])
    journal.append([{"unsent": [one.name]}])
    journal.close()
    found = read_journal(path)
    assert found is not None
    assert found.sent == {two.name: two}
    assert found.length == path.stat().st_size


@pytest.mark.parametrize(
    "line",
    [
        5, {"surprise": 1},
        {"unit": -1, "records": [], "remarks": []}, {"unit": 0},
        {"unit": 0, "records": "x", "remarks": []}, {"unit": 0, "records": [5], "remarks": []},
        {"unit": 0, "records": [], "remarks": 7}, {"forget": ["all"]},
        {"publish": "config.json"}, {"publish": [5]}, {"publish": ["../victim"]},
        {"publish": ["/etc/passwd"]}, {"withdraw": [".qconvert/lock"], "edited": []},
        {"sent": None}, {"sent": [5]}, {"unsent": None}, {"unsent": ["../a"]},
        {"sent": [{"name": "../a", "size": 1, "sha256": "0"}]},
        {"sent": [{"name": "a", "size": -1, "sha256": "0"}]},
        {"sent": [{"name": "a", "size": 1, "sha256": None}]},
    ],
    ids=str,
)  # fmt: skip
def test_lines_that_qconvert_does_not_write(line: Any, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines_of([{**HEADER, "run": "r"}, line]))
    with pytest.raises(OutputError, match=r"journal\.jsonl: line 2 was not written by qconvert"):
        read_journal(path)


@pytest.mark.parametrize(
    "change", [{"run": []}, {"run": 5}, {"fingerprint": {}}, {"passes": [None]}], ids=str
)
def test_a_header_that_qconvert_does_not_write(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(lines_of([{**HEADER, "run": "r", **change}]))
    with pytest.raises(OutputError, match=r"journal\.jsonl: line 1 was not written by qconvert"):
        read_journal(path)
