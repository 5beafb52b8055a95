"""The class of all commands: --help shows what most people need, in two groups, on one screen, and
--help-all every option."""

from __future__ import annotations

import re

import click

from qconvert.core.say import say

# How a command runs, whatever it makes; in the order that help lists them.
_RUNNING = ("memory", "jobs", "until", "validate", "dry_run", "as_json")
# What --help leaves to --help-all.
_RARE = frozenset({
    "actorder", "address", "architecture", "base_model", "column", "disk_budget", "dump_after", "engine",
    "family", "follow_links", "kv_scale", "leave_bf16", "length", "log_json", "max_shard_size",
    "print_recipe", "private", "profile", "quiet", "save_stats", "seed", "settings", "sha256", "shard",
    "shared_experts", "solver", "synthetic", "verbose", "verify", "work_dir",
})  # fmt: skip
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
        rare = [one for one in options if one.name in _RARE]
        return rare if len(options) > MOST else []

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
