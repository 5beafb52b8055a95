"""The tables of docs/models.md are what the simulators say of the headers of named models.

`QCONVERT_UPDATE_TABLE=1 pytest -m rest tests/test_named_table.py` writes them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from named_table import COLUMNS, MODELS, RUNTIMES, cells, page, row

_PAGE = Path(__file__).parent.parent / "docs" / "models.md"
_UPDATE = bool(os.environ.get("QCONVERT_UPDATE_TABLE"))
_LINES = _PAGE.read_text(encoding="utf-8").splitlines()
_TABLES = _LINES[_LINES.index("## SGLang 0.5.23") :]  # below the table of advice


def _noted() -> dict[str, int]:
    """Notes of the page, by their texts."""
    start = _LINES.index("## Notes")
    found = (re.fullmatch(r"([0-9]+)\. (.*)", line) for line in _LINES[start:])
    return {one[2]: int(one[1]) for one in found if one}


def test_every_model_has_a_line_for_each_runtime() -> None:
    for name in MODELS.values():
        lines = [line for line in _TABLES if line.startswith(f"| {name} |")]
        assert [line.count(" | ") for line in lines] == [len(COLUMNS)] * len(RUNTIMES)


def test_what_is_not_known_has_a_note() -> None:
    rows = [line for line in _TABLES if line.startswith("| ")]
    assert [line for line in rows if "not known" in line.replace("not known [", "")] == []


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("model", ["gpt-oss-120b", "llama-3.3-70b"])
def test_lines_of_the_table(model: str, runtime: str) -> None:
    assert row(model, cells(model, runtime), _noted()) in _TABLES


@pytest.mark.rest
@pytest.mark.skipif(os.environ.get("QCONVERT_ALL") != "1" and not _UPDATE, reason="CPU minutes")
def test_all_of_the_table() -> None:
    made = page({(model, one): cells(model, one) for model in MODELS for one in RUNTIMES})
    if _UPDATE:
        kept = _LINES[: _LINES.index(made[0])]
        _PAGE.write_text("\n".join([*kept, *made]) + "\n", encoding="utf-8")
    assert "\n".join(made) in _PAGE.read_text(encoding="utf-8")
