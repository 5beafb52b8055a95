"""`--for NAME[==VERSION]`: who will load the result."""

from __future__ import annotations

from typing import Any

import click


class ConsumerName(click.ParamType[str]):
    """A consumer that layouts are known for, and the version of it, as they were written. `only` are the
    names that a command takes."""

    name = "consumer"

    def __init__(self, *only: str) -> None:
        self._only = only

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from qconvert.core.errors import PlanError
        from qconvert.runtimes.consumers import parse_consumer

        try:
            consumer = parse_consumer(str(value))
        except PlanError as error:
            self.fail(str(error), param, ctx)
        if self._only and consumer.name not in self._only:
            self.fail(f"{consumer.name!r} is not one of {', '.join(self._only)}", param, ctx)
        return str(value)
