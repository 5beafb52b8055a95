"""The class of all commands: --help shows what most people need, in two groups, on one screen, and
--help-all every option; -q and -v say how much a command tells."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TextIO, TypeVar

import click

from qconvert.cli.options import Rare, rare, stacked
from qconvert.core.say import say

F = TypeVar("F", bound=Callable[..., Any])

# How a command runs, whatever it makes; in the order that help lists them.
_RUNNING = ("memory", "jobs", "until", "validate", "dry_run", "as_json")
_KEY = "qconvert.loudness"
EVERY = "qconvert.help_all"  # of a context whose help shows every option
MOST = 20  # options that --help shows


class Command(click.Command):
    """A command whose help is at most a screen."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if not self._hidden():
            return params
        every = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all,
            help="Show all options and exit.",
        )  # fmt: skip
        return [*params[:-1], every, *params[-1:]]

    def _hidden(self) -> list[click.Option]:
        """Options that --help does not show: none where all fit a screen."""
        options = [one for one in self.params if isinstance(one, click.Option)]
        hidden: list[click.Option] = [one for one in options if isinstance(one, Rare)]
        return hidden if len(options) > MOST else []

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        every = ctx.meta.get(EVERY, False)
        hidden = [] if every else self._hidden()
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        shown = [one for one in options if one not in hidden]
        running = sorted(
            (one for one in shown if one.name in _RUNNING),
            key=lambda one: _RUNNING.index(str(one.name)),
        )
        own = [one for one in shown if one not in running]
        for title, group in (("Options", own), ("Running", running)):
            rows = [row for one in group if (row := one.get_help_record(ctx)) is not None]
            if hidden:
                rows = [(name, _first_sentence(text)) for name, text in rows]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if hidden:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{len(hidden)} rarer options: --help-all.")


def _first_sentence(text: str) -> str:
    """The first sentence of a help text, and the default that stands behind the last one."""
    first, _, rest = text.partition(". ")
    notes = re.findall(r"\[[^\[\]]+\]", rest)
    return " ".join([f"{first.removesuffix('.')}.", *notes]) if rest else text


def _help_all(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[EVERY] = True
        say(*ctx.get_help().splitlines())
        ctx.exit()


# --- `-q` and `-v`: how much a command tells on stderr ---------------------------------------------


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
    rare(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=_set,
        help="Tell no progress, plan or next step: results, warnings and errors alone.",
    ),
    rare(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=_set,
        help="Name all that a plan else counts, and each phase of a run with its time.",
    ),
)  # fmt: skip
