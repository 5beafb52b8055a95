"""Arguments and option types that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class Size(click.ParamType[int]):
    """A size in bytes, written as people write it: 512MiB, 5GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from qconvert.errors import RecipeError
        from qconvert.recipe import parse_size

        try:
            return parse_size(value)
        except RecipeError as error:
            self.fail(str(error), param, ctx)


class Folder(click.Path):
    """A folder's path. An empty one (an unset shell variable) would mean the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the name is empty; name a folder, `.` for this one", param, ctx)
        return super().convert(value, param, ctx)


SOURCE = click.argument("source", metavar="SRC")
OUT = click.argument("out", type=Folder())
