"""The class of all commands: --help shows what most people need, in two groups, on one screen, and
--help-all every option; -q and -v say how much a command tells."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from enum import Enum
from inspect import cleandoc
from typing import Any, TextIO, TypeVar

import click

from qconvert.cli.options import Rare, rare, stacked
from qconvert.core.say import say

F = TypeVar("F", bound=Callable[..., Any])

# How a command runs, whatever it makes; in the order that help lists them.
_RUNNING = ("memory", "jobs", "until", "validate", "dry_run", "as_json")
_KEY = "qconvert.loudness"
EVERY = "qconvert.help_all"  # of a context whose help shows every option
_DETAIL = "qconvert.help_detail"
SCREEN = 45  # lines of --help
_EXAMPLES = 3


class Command(click.Command):
    """A command whose help is at most a screen: where it would be longer, less of it is shown, by
    degrees, and --help-all shows the rest."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        every = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all,
            help="Show all options and exit.", hidden=not ctx.meta.get(_DETAIL),
        )  # fmt: skip
        return [*params[:-1], every, *params[-1:]]

    def get_help(self, ctx: click.Context) -> str:
        text = ""
        for detail in range(1 if ctx.meta.get(EVERY) else _LEAST + 1):
            ctx.meta[_DETAIL] = detail
            text = super().get_help(ctx)
            if len(text.splitlines()) <= SCREEN:
                break
        return text

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        said, detail = self.help, ctx.meta.get(_DETAIL, 0)
        self.help = _shortened(said or "", detail)
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = said

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        detail = ctx.meta.get(_DETAIL, 0)
        least = detail >= _NAMES
        params = self.params if least else self.get_params(ctx)  # --help and --help-all are below
        options = [one for one in params if isinstance(one, click.Option)]
        shown = [one for one in options if detail < _USUAL or not isinstance(one, Rare)]
        running = sorted(
            (one for one in shown if one.name in _RUNNING),
            key=lambda one: _RUNNING.index(str(one.name)),
        )
        own = [one for one in shown if one not in running]
        for title, group in (("Options", own), ("Running", running)):
            rows = [row for one in group if (row := one.get_help_record(ctx)) is not None]
            if rows and not (least and title == "Running"):
                if detail >= _USUAL:
                    rows = [(name, _first_sentence(text)) for name, text in rows]
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=20 if least else 30)
        if detail:
            rare = len(options) - len(shown)
            more = f"{rare} rarer options: --help-all." if rare else "All texts: --help-all."
            names = ", ".join(one.opts[0] for one in running) if least else ""
            formatter.write_paragraph()
            formatter.write_text(f"{title}: {names}. {more}" if names else more)


# What help leaves out, by degrees: nothing; paragraphs of the text; rare options, and all but the first
# sentence of the others; what the options of every run do, and all but a few examples.
_BRIEF, _USUAL, _NAMES = 1, 2, 3
_LEAST = _NAMES


def _shortened(text: str, detail: int) -> str:
    """A command's text: its summary, what that is of, and the examples; all of it with full detail."""
    paragraphs = cleandoc(text).split("\n\n")
    if detail < _BRIEF:
        return text
    kept = [one for one in paragraphs if one.startswith("\b")]
    if detail >= _NAMES:
        kept = ["\n".join(one.splitlines()[: 2 + _EXAMPLES]) for one in kept]
    return "\n\n".join([*(one for one in paragraphs[:2] if one not in kept), *kept])


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
        help="Print results, warnings and errors alone: no progress, plan or next step.",
    ),
    rare(
        "-v", "--verbose", is_flag=True, expose_value=False, callback=_set,
        help="List what a plan otherwise only counts, and each phase of a run with its time.",
    ),
)  # fmt: skip
