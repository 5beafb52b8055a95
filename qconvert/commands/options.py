"""Arguments and option types that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class Size(click.ParamType[int]):
    """A size in bytes, written as people write it: 512MiB, 5GB."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        from qconvert.errors import RecipeError
        from qconvert.recipe import parse_size

        try:
            return parse_size(value)
        except RecipeError as error:
            self.fail(str(error), param, ctx)


SOURCE = click.argument("source", metavar="SRC")
OUT = click.argument("out", type=click.Path(path_type=Path))
