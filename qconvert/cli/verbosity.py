"""`-q` and `-v`: how much a command tells on stderr. Either stands behind the command's name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TextIO, TypeVar

import click

from qconvert.cli.options import stacked

F = TypeVar("F", bound=Callable[..., Any])

_KEY = "qconvert.loudness"


class Loudness(Enum):
    """Level of what is printed beside results, warnings and errors."""

    QUIET = "-q"
    USUAL = ""
    VERBOSE = "-v"


def loudness() -> Loudness:
    """Of the command that runs; outside of one, as usual."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.meta.get(_KEY)
    return found if isinstance(found, Loudness) else Loudness.USUAL


def is_quiet() -> bool:
    return loudness() is Loudness.QUIET


def is_verbose() -> bool:
    return loudness() is Loudness.VERBOSE


def without_verbosity(words: Sequence[str]) -> list[str]:
    """A command line without -q and -v, which are of one start alone."""
    return [word for word in words if word not in ("-q", "--quiet", "-v", "--verbose")]


def columns(stream: TextIO) -> int | None:
    """Characters in a line of a terminal, None for what is none."""
    if not stream.isatty():
        return None
    return shutil.get_terminal_size().columns


def _set(context: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    asked = Loudness.QUIET if param.name == "quiet" else Loudness.VERBOSE
    if context.meta.setdefault(_KEY, asked) is not asked:
        raise click.UsageError("-q and -v exclude one another", context)


VERBOSITY: Callable[[F], F] = stacked(
    click.option(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=_set,
        help="Tell no progress, plan or next step: results, warnings and errors alone.",
    ),
    click.option(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=_set,
        help="Name all that a plan else counts, and each phase of a run with its time.",
    ),
)  # fmt: skip
