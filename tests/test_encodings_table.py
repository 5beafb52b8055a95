"""The table of docs/encodings.md is what commands make (encodings_table.py writes it)."""

from __future__ import annotations

from pathlib import Path

import pytest
from encodings_table import ENCODINGS, head, line, row
from sampled import sampled

_PAGE = (Path(__file__).parent.parent / "docs" / "encodings.md").read_text(encoding="utf-8")
_ROWS = {one.split(" | ")[0].removeprefix("| "): one for one in _PAGE.splitlines(keepends=True)}


def test_the_page_has_a_row_for_each_encoding() -> None:
    table = _PAGE.partition(head())[2]
    assert [one.split(" | ")[0] for one in table.splitlines()] == [
        f"| {name}" for name in ENCODINGS
    ]


@pytest.mark.parametrize("name", sampled(ENCODINGS, 8))
def test_a_row_is_what_commands_make(name: str, tmp_path: Path) -> None:
    assert _ROWS[name] == line(row(name, tmp_path))
