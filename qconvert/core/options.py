"""Options as fields of dataclasses: each field has its help, and how its text is read, so that the
command line and the API take the same names and refuse the same values with the same words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from textwrap import fill
from typing import Any, TypeVar

from qconvert.core.errors import UsageError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_KEY = "option"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A field as users meet it. `parse` reads its text, or a value that has been read already, and
    raises UsageError or ValueError; without it `kind` names a type of the command line. `shown` stands
    for a default that help cannot print. `rare`: `--help-all` alone shows it. `setting`: `--set
    NAME=VALUE` gives it, no option. `command`: whether the command
    line has it, and not functions alone. `planning`: `qconvert plan`, which runs nothing, has it too."""

    help: str
    kind: str = "text"
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int = 1  # of a count
    most: int | None = None
    words: tuple[str, ...] = ()  # as it is typed, where that is not the field's name
    shown: str | None = None
    repeated: bool = False
    rare: bool = False
    setting: bool = False
    command: bool = True
    planning: bool = False


def option(default: Any, help: str, **more: Any) -> Any:
    """A field of a dataclass that is an Option."""
    return field(default=default, metadata={_KEY: Option(help=help, **more)})


def options_in(kind: type) -> dict[str, tuple[Field[Any], Option]]:
    """Fields of a dataclass that are options, by name, in their order."""
    return {one.name: (one, one.metadata[_KEY]) for one in fields(kind) if _KEY in one.metadata}


def from_keywords(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of options from a function's keywords. Raises TypeError for a name that it does not
    have, UsageError for a value that is none."""
    known = options_in(kind)
    for name in values:
        if name not in known:
            raise TypeError(f"there is no option {name!r}; options are {', '.join(sorted(known))}")
    return kind(**{name: _read(kind, name, value) for name, value in values.items()})


def _read(kind: type, name: str, value: Any) -> Any:
    _, one = options_in(kind)[name]
    if value is None:
        return value
    if one.parse is not None:
        try:
            return one.parse(value)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    if one.choices and value not in one.choices:
        raise UsageError(
            f"{name}: expected one of {', '.join(one.choices)}, found {str(value)[:40]!r}"
        )
    if one.kind == "count" and value < one.least:
        raise UsageError(f"{name}: expected {one.least} or more, found {value}")
    return value


def taking(kind: type, keywords: Mapping[str, Any]) -> Callable[[F], F]:
    """Show the options of a dataclass in the signature of a function, in place of its `**options`.
    `keywords` are their types, as type checkers know them."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = {p.name for p in own}
        types = {name: getattr(one, "__forward_arg__", one) for name, one in keywords.items()}
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=types[name], default=one.default
            )
            for name, (one, _) in options_in(kind).items() if name not in named
        ]  # fmt: skip
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate


def explained(kind: type) -> str:
    """The options of a dataclass that functions take, a paragraph each, for a docstring."""
    return "\n\n".join(
        fill(f"`{name}`: {about.help}{f' [default: {about.shown}]' if about.shown else ''}", 100)
        for name, (_, about) in options_in(kind).items()
    )
