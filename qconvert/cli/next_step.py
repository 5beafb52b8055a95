"""Advice on a result: the line after a conversion."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from qconvert.cli.verbosity import is_quiet
from qconvert.core.say import say


def tell_next(folders: Sequence[str], source: str, draft: str | None, *, validated: bool) -> None:
    """Name, on stderr, the command that compares the first folder with its source, or, where that has
    been done, the place of the line that serves it. Of two folders the second is the GPU side."""
    if is_quiet():
        return
    first, *others = folders
    if validated:
        say(
            f"next    {first}/README.md says how to serve it, and at which sizes it loads", err=True
        )
        return
    words = ["qconvert", "validate", first, "--against", source]
    if others:
        words += ["--pair", others[0]]
    if draft is not None:
        words += ["--draft", draft]
    say(f"next    {shlex.join([*words, '--level', 'full'])}", err=True)
