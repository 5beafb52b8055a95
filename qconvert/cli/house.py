"""recipes, clean, demo."""

from __future__ import annotations

import re
from pathlib import Path

import click

from qconvert.cli import completion
from qconvert.cli.options import OUT_FOLDER, Folder
from qconvert.core.say import say


@click.group()
def recipes() -> None:
    """List and show the built-in recipes.

    \b
    Examples:
      qconvert recipes list
      qconvert recipes show dequant-fp8 > mine.yaml
    """


@recipes.command("list")
def list_recipes() -> None:
    """List built-in recipes with their purpose, one per line.

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


@click.command()
@OUT_FOLDER
def clean(out: Path) -> None:
    """Remove the unfinished work of an interrupted run from OUT. A finished result is not touched; one
    that was being repaired is unfinished.

    \b
    Example:
      qconvert clean DeepSeek-V3-bf16
    """
    from qconvert import api

    say(f"dropped unfinished work in {out}" if api.clean(out) else "nothing to clean")


@click.command()
@click.argument("folder", required=False, type=Folder())
def demo(folder: Path | None) -> None:
    """Make a small block-FP8 Qwen3.5-MoE checkpoint, fuse it for sglang, dequantize it, validate.

    The files are kept in FOLDER (new or empty); without it they are removed.

    \b
    Examples:
      qconvert demo
      qconvert demo ./demo-output
    """
    from qconvert.cli.demo import run_demo

    run_demo(folder)
