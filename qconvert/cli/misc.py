"""recipes, clean, demo."""

from __future__ import annotations

import re
from pathlib import Path

import click

from qconvert.cli import completion
from qconvert.cli.command import Command
from qconvert.cli.options import DRY_RUN, FolderPath, option_of
from qconvert.core.say import say
from qconvert.run.work.options import RunOptions


@click.group()
def recipes() -> None:
    """List and show recipes, and passes for them.

    \b
    Examples:
      qconvert recipes list
      qconvert recipes show dequant-fp8 > mine.yaml
      qconvert recipes passes w4a16
    """


@recipes.command("list")
def list_recipes() -> None:
    """List built-in recipes: steps and purpose.

    \b
    Example:
      qconvert recipes list
    """
    from qconvert.recipe.recipe import builtin_recipes, step_names

    found = builtin_recipes()
    width = max(map(len, found))
    for name, text in found.items():
        comment = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
        served = re.split(r"[.:;](?: |$)", " ".join(comment))[0]
        steps = ", ".join(step_names(text, name))
        by = f" ({steps})" if steps else ""
        say(f"{name:<{width}}  {served}{by}")


@recipes.command("show")
@click.argument("name", shell_complete=completion.recipes)
def show_recipe(name: str) -> None:
    """Print a built-in recipe, to read or to edit.

    \b
    Example:
      qconvert recipes show dequant-fp8 > mine.yaml
    """
    from qconvert.core.errors import UsageError
    from qconvert.recipe.recipe import builtin_recipes

    found = builtin_recipes()
    if name not in found:
        raise UsageError(f"unknown built-in recipe {name!r}; recipes are {', '.join(found)}")
    say(*found[name].splitlines())


@recipes.command("passes")
@click.argument("name", required=False)
def list_passes(name: str | None) -> None:
    """List passes, or the options of one.

    \b
    Examples:
      qconvert recipes passes
      qconvert recipes passes w4a16
    """
    from qconvert.core.errors import UsageError
    from qconvert.passes import passes
    from qconvert.recipe.described import described, summary

    known = dict(sorted(passes().items()))
    if name is None:
        width = max(map(len, known))
        say(*(f"{one:<{width}}  {summary(kind)}" for one, kind in known.items()))
    elif name in known:
        say(*described(known[name]))
    else:
        raise UsageError(f"unknown pass {name!r}; passes are {', '.join(known)}")


@click.command(cls=Command)
@click.argument("out", type=FolderPath(repos=True))
@option_of(RunOptions, "work_dir")
@DRY_RUN
def clean(out: Path | str, work_dir: Path | None, dry_run: bool) -> None:
    """Remove unfinished work of an interrupted run.

    A finished result is not touched; one that was being repaired is unfinished.

    Of a repo on the Hub (hf://ORG/NAME) the branches with shards of unfinished results are removed, and
    the folder on this machine that they were made in. A run that is at work there sends them again.

    \b
    Examples:
      qconvert clean DeepSeek-V3-bf16
      qconvert clean hf://me/DeepSeek-V3-bf16 --dry-run
    """
    from qconvert import api

    found = api.clean(out, work_dir=work_dir, dry_run=dry_run)
    said = "" if dry_run else "dropped "
    say(*(f"{said}{one}" for one in found))
    if not found:
        say("nothing to clean")


@click.command(cls=Command)
@click.argument("folder", required=False, type=FolderPath())
def demo(folder: Path | None) -> None:
    """Convert a small sample, step by step.

    A block-FP8 Qwen3.5-MoE checkpoint is made.

    The files are kept in FOLDER (new or empty); without it they are removed.

    \b
    Examples:
      qconvert demo
      qconvert demo ./demo-output
    """
    from qconvert.cli.demo import run_demo

    run_demo(folder)
