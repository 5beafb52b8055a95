"""README's picture of a terminal, docs/terminal.svg: what `qconvert demo` prints, but for its last part.

`python docs/terminal.py` writes it (make picture); tests/test_docs.py compares it with the demo.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap

FILE = Path(__file__).parent / "terminal.svg"
_COLUMNS, _WIDTH, _HEIGHT, _MARGIN = 104, 7.8, 18, 16
_COLOURS = {"$": "#7ee787", "#": "#8b949e", ".": "#8b949e", "next": "#79c0ff"}


def shown(printed: str) -> list[str]:
    """Lines of the demo that the picture has."""
    return printed.partition("\n\n$ qconvert dequant")[0].splitlines()


def svg(lines: Sequence[str]) -> str:
    """The lines on a dark ground, long ones broken between words."""
    rows = [
        (part, next((c for begin, c in _COLOURS.items() if line.startswith(begin)), "#e6edf3"))
        for line in lines
        for part in (wrap(line, _COLUMNS, subsequent_indent="    ", break_on_hyphens=False) or [""])
    ]
    width, height = round(_COLUMNS * _WIDTH + 2 * _MARGIN), len(rows) * _HEIGHT + 2 * _MARGIN
    texts = [
        f'<text x="{_MARGIN}" y="{_MARGIN + 13 + number * _HEIGHT}" fill="{colour}">{escape(row)}</text>'
        for number, (row, colour) in enumerate(rows)
        if row
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">'
    )
    # Browsers give text a rule of its own, which an attribute of the picture does not change.
    style = "<style>text { white-space: pre }</style>"
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
    return "\n".join((head, style, ground, *texts, "</svg>", ""))


if __name__ == "__main__":
    command = [str(Path(sys.executable).parent / "qconvert"), "demo"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    FILE.write_text(svg(shown(printed)), encoding="utf-8")
