"""Arguments and option types that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Size(click.ParamType[int]):
    """A size in bytes, written as people write it: 512MiB, 5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from qconvert.core.errors import RecipeError
        from qconvert.recipe.recipe import parse_size

        try:
            return parse_size(value)
        except RecipeError as error:
            self.fail(str(error), param, ctx)


class ModelId(click.ParamType[str]):
    """The id of a repo on the Hub, ORG/NAME."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from qconvert.hub.card.front import is_id

        if not is_id(value):
            self.fail(f"{value!r} is no repo's id; write ORG/NAME", param, ctx)
        return str(value)


class Folder(click.Path):
    """A folder's path. An empty one (an unset shell variable) would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the name is empty; name a folder, `.` for this one", param, ctx)
        return super().convert(value, param, ctx)


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order that --help lists them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


SOURCE = click.argument("source", metavar="SRC")
OUT = click.argument("out", type=Folder())
