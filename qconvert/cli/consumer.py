"""`--for NAME[==VERSION]`: the runtime or model class that will load the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.cli import completion

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class ConsumerName(click.ParamType[str]):
    """A consumer with known layouts, with or without its version. `only` are the names that a command
    takes."""

    name = "consumer"

    def __init__(self, *only: str) -> None:
        self._only = only

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from qconvert.core.errors import PlanError
        from qconvert.runtimes.consumers import parse_consumer

        if str(value) in self._only:  # a runtime may be no consumer of layouts: ktransformers
            return str(value)
        try:
            consumer = parse_consumer(str(value))
        except PlanError as error:
            self.fail(str(error), param, ctx)
        if self._only and consumer.name not in self._only:
            self.fail(f"{consumer.name!r} is not one of {', '.join(self._only)}", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completion.consumers(incomplete, self._only)


def made_for(names: str, *only: str) -> Callable[[F], F]:
    """`--for`; `names` are those that the command has layouts for, `only` the ones that it takes."""
    return click.option(
        "--for", "consumer", type=ConsumerName(*only), metavar="NAME[==VERSION]",
        help=f"The runtime or model class that will load the result. [{names}]",
    )  # fmt: skip
