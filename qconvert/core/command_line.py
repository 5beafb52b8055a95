"""Command lines as lists of words."""

from __future__ import annotations

from collections.abc import Sequence


def without_option(command: Sequence[str], name: str) -> list[str]:
    """A command line without an option and its value."""
    words: list[str] = []
    skip = False
    for word in command:
        if not skip and word != name and not word.startswith(f"{name}="):
            words.append(word)
        skip = not skip and word == name
    return words
