"""Parts of a page for people that needs no network and loads nothing: text made safe, sections, tables.

Style and scripts are named in the page's policy by their hashes, so a name from a folder cannot run as a
script even if it gets past the escaping.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from itertools import zip_longest
from pathlib import Path

from qconvert import __version__
from qconvert.core.shown import printable
from qconvert.validation.findings import Table
from qconvert.validation.reports.words import is_figure

# The page must stay small enough to be mailed.
MOST_ROWS = 500
_LONGEST = 2000
# GitHub runs a line of a log that begins so, and a page may be printed.
_COMMAND = re.compile(r"(?m)^(\s*)::")


def document(title: str, body: Iterable[str], script: str = "", data: str = "") -> str:
    """A whole page in the house style, `title` being text; `data` is JSON that the script reads."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src {hashed(style)}"
    scripts = []
    if script:
        policy += f"; script-src {hashed(script)}"
        scripts = [
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{script}</script>",
        ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
            *body,
            f"</main>\n<footer>qconvert {text(__version__)}</footer>",
            *scripts,
            "</body>\n</html>",
        ]
    )


def hashed(source: str) -> str:
    """A style or script as a policy names it."""
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


def text(plain: str) -> str:
    """Text, or the value of an attribute in double quotes."""
    whole = plain if len(plain) <= _LONGEST else plain[:_LONGEST] + " ..."
    shown = escape(printable(whole, "\n")).replace("##", "&#35;#")
    return _COMMAND.sub(r"\1&#58;:", shown)


def large(figures: Iterable[tuple[str, str]]) -> str:
    """Labels and their figures, markup both, in large type."""
    parts = (f"<div><b>{value}</b><span>{label}</span></div>" for label, value in figures)
    return f'<div class="large">{"".join(parts)}</div>'


def section(title: str, *parts: str, id: str = "") -> str:
    """`title` and `parts` are markup."""
    name = f' id="{id}"' if id else ""
    return "\n".join([f"<section{name}>\n<h2>{title}</h2>", *parts, "</section>"])


def table(shown: Table) -> str:
    """Columns of figures are aligned to the right; at most 500 rows."""
    kinds = [
        "figure" if all(map(is_figure, column)) else "" for column in zip(*shown.rows, strict=True)
    ]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (
            f'<{tag} class="{kind}">{text(cell)}</{tag}>'
            for kind, cell in zip_longest(kinds, row, fillvalue="")
        )
        return f"<tr>{''.join(cells)}</tr>"

    rows = "".join(line("td", row) for row in shown.rows[:MOST_ROWS])
    more = len(shown.rows) - MOST_ROWS
    note = [f'<p class="quiet">{text(shown.note)}</p>'] if shown.note else []
    note += [f'<p class="quiet">... and {more:,} more rows</p>'] if more > 0 else []
    head = f"<thead>{line('th', shown.columns)}</thead>"
    body = f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'
    return "\n".join([body, *note])
