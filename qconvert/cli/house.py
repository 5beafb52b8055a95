"""recipes, clean, demo."""

from __future__ import annotations

import re
from pathlib import Path

import click

from qconvert.cli.options import OUT, Folder
from qconvert.core.say import say


@click.group()
def recipes() -> None:
    """List and show the recipes that come with qconvert.

    \b
    Examples:
      qconvert recipes list
      qconvert recipes show dequant-fp8 > mine.yaml
    """


@recipes.command("list")
def list_recipes() -> None:
    """A line a recipe: its name and whom it serves.

    \b
    Example:
      qconvert recipes list
    """
    from qconvert.recipe.recipe import builtin_recipes

    found = builtin_recipes()
    width = max(map(len, found))
    for name, text in found.items():
        comment = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
        served = re.split(r"[.:;](?: |$)", " ".join(comment))[0]
        say(f"{name:<{width}}  {served}")


@recipes.command("show")
@click.argument("name")
def show_recipe(name: str) -> None:
    """Print a recipe, to read or to start one's own from.

    \b
    Example:
      qconvert recipes show dequant-fp8 > mine.yaml
    """
    from qconvert.core.errors import UsageError
    from qconvert.recipe.recipe import builtin_recipes

    found = builtin_recipes()
    if name not in found:
        raise UsageError(f"no built-in recipe {name!r}; there are {', '.join(found)}")
    say(*found[name].splitlines())


@click.command()
@OUT
def clean(out: Path) -> None:
    """Drop the unfinished work of an interrupted run in OUT. A finished result is left alone; one that
    was being repaired is unfinished.

    \b
    Example:
      qconvert clean DeepSeek-V3-bf16
    """
    from qconvert.core.errors import OutputError
    from qconvert.run.files import Files
    from qconvert.run.workspace import clean as drop

    if not out.is_dir():
        raise OutputError(f"{out}: no such folder")
    say(f"dropped unfinished work in {out}" if drop(out, Files()) else "nothing to clean")


@click.command()
@click.argument("folder", required=False, type=Folder())
def demo(folder: Path | None) -> None:
    """Make a small block-FP8 Qwen3.5-MoE checkpoint, fuse it for sglang, dequantize it, validate.

    FOLDER (new or empty) keeps the files; without it they are removed again.

    \b
    Examples:
      qconvert demo
      qconvert demo ./demo-output
    """
    from qconvert.cli.demo import run_demo

    run_demo(folder)
