"""docs/troubleshooting.md: every message that it explains is one that the code has, and is not a common
phrase; rules are quoted with their titles' subject."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import qconvert
from qconvert.validation.runner import rules

_PACKAGE = Path(qconvert.__file__).parent
_PAGE = (_PACKAGE.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_HEADINGS = re.findall(r"^### (.+)$", _PAGE, re.MULTILINE)
# What the system says, not qconvert.
_SYSTEM = {os.strerror(errno.ENOSPC): errno.ENOSPC}


@cache
def texts() -> tuple[str, ...]:
    """Fixed words of the package's strings, docstrings left out, what is put in as a newline."""
    found: list[str] = []
    for file in sorted(_PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
            for part in node.values
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (n.value if isinstance(n, ast.Constant) else "\n" for n in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and id(node) not in docs | inside:
                found += [node.value] if isinstance(node.value, str) else []
    return tuple(found)


def sections() -> Iterator[tuple[str, str]]:
    for part in _PAGE.split("\n### ")[1:]:
        title, _, text = part.partition("\n")
        yield title, text.partition("\n## ")[0]


@pytest.mark.parametrize("title", [title for title in _HEADINGS if title not in _SYSTEM])
def test_a_message_that_is_explained_exists(title: str) -> None:
    if re.fullmatch(r"QC\d{3}", title):
        assert title in rules()
        return
    assert len(title) >= 10, "too common to be looked up"
    assert any(title in text for text in texts()), title


def test_messages_that_are_raised_no_more_would_be_found() -> None:
    assert not any("reads such files with its own class only" in text for text in texts())
    assert len(_HEADINGS) >= 12
    assert len(set(_HEADINGS)) == len(_HEADINGS)


@pytest.mark.parametrize(("title", "text"), list(sections()))
def test_every_message_has_its_cause_and_what_to_do(title: str, text: str) -> None:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(prose.split()) >= 8, title
    assert "qconvert " in text or "`" in text, title


def test_rules_that_are_named_exist() -> None:
    assert set(re.findall(r"QC\d{3}", _PAGE)) <= set(rules())
