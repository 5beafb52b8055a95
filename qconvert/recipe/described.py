"""Passes and their options as text, read from their classes: what a recipe may hold."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qconvert.core.options import options_in
from qconvert.plan.plan import Pass
from qconvert.samples.request import Calibration

_RAISES = re.compile(r"(?:^|\s+)Raises \w+Error\b.*\Z", re.DOTALL)
_WORDS = {str: "text", int: "number", float: "number", bool: "true or false"}


def summary(kind: type[Pass]) -> str:
    """The first sentence of what a pass says of itself, in one line."""
    said = " ".join((inspect.getdoc(kind) or "").split())
    return re.split(r"[.:](?:\s|$)", said, maxsplit=1)[0]


def described(kind: type[Any]) -> Iterator[str]:
    """Lines on a pass: what it does, each option with its values and its default, and of a calibration
    those of its settings."""
    for one in kind.__mro__:
        if is_dataclass(one) and (said := one.__dict__.get("__doc__")):
            # What raises which error is for who calls it from Python, as is what a base is of.
            parts = [_RAISES.sub("", part) for part in inspect.cleandoc(said).split("\n\n")]
            shown = "\n\n".join(part for part in parts[one is not kind :] if part)
            yield from (*([] if one is kind or not shown else [""]), *shown.splitlines())
    if fields(kind):
        yield ""
        yield "Options:"
        yield from _options(kind)
    if any(field.name == "calibrate" for field in fields(kind)):
        yield ""
        yield "Settings of `calibrate`, an object:"
        yield from _options(Calibration)


def _options(kind: type) -> Iterator[str]:
    types, helps = get_type_hints(kind), options_in(kind)
    for field in fields(kind):
        about = helps[field.name][1].help if field.name in helps else ""
        null = " or null" if field.default is not None and _may_be_null(types[field.name]) else ""
        line = f"  {field.name}: {_values(types[field.name])}{null} {_default(field)}"
        yield f"{line}  {about}".rstrip()


def _may_be_null(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _values(kind: Any) -> str:
    """Values that a field takes: words of a Literal as they are, types by name."""
    if kind in _WORDS:
        return _WORDS[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(_values(one) for one in inner if one is not NoneType)
    if origin is tuple:
        return f"list of {_values(inner[0])}"
    if isinstance(kind, type) and origin is None:
        return "object"
    return "object of lists" if inner and get_origin(inner[-1]) is tuple else "object"


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "[required]"
    value = field.default
    if value is None:
        return "[default: null]"
    if value == ():
        return "[default: []]"
    shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"[default: {shown.lower() if isinstance(value, bool) else shown}]"
