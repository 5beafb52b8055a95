"""What shards of a validation left, or somebody who says so: files that `validate --merge` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hostile.breaking.forms import FORMS
from hostile.breaking.texts import (
    DIGITS,
    LONG,
    NOT_A_SIZE,
    STEERING,
    SURROGATE,
    Raw,
    dumped,
    nested,
)
from hostile.case import Break, Ground, Mutation, Verdict

GROUP = "parts"
_NEEDS = frozenset({"parts"})
_NO = Verdict.REFUSED
Keys = tuple[str | int, ...]
_NUMBERS: tuple[Keys, ...] = (
    ("shard",), ("tasks",), ("bytes", 1), ("results", 0, 0), ("results", 0),
    ("begun", "ran", 0, 3), ("identity",), ("format",),
)  # fmt: skip
# Texts that are shown, and those that something is known by.
_TOLD: tuple[Keys, ...] = (("begun", "about", "model"), ("begun", "proved", 0), ("results", 0, 2))
_KNOWN: tuple[Keys, ...] = (
    ("qconvert",), ("shard",), ("identity", "folder"), ("begun", "ran", 0, 0), ("results", 0, 1),
)  # fmt: skip
_FIRST, _SECOND = "part-0-of-2.json", "part-1-of-2.json"


def _at(name: str, make: Callable[[Path], object]) -> Break:
    return lambda ground: make(ground.at / name)


def _json(name: str, change: Callable[[Any], object]) -> Break:
    def make(ground: Ground) -> None:
        file = ground.at / name
        found = json.loads(file.read_bytes())
        change(found)
        file.write_bytes(dumped(found))

    return make


def _more(name: str, result: list[Any]) -> Break:
    return _json(name, lambda found: found["results"].append(result))


def _spelled(path: Keys) -> str:
    return "/".join(map(str, path))


def _put(found: Any, *, path: Keys, value: Any) -> None:
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Break, **more: Any) -> Mutation:
        return Mutation(name, GROUP, make, ("part",), needs=_NEEDS, most=1, **more)

    for form, make in FORMS.items():
        for file in (_FIRST, _SECOND):
            yield one(f"{file} {form}", _at(file, make))
    yield one("gone", _at(_SECOND, Path.unlink))
    yield one("a part of another division", _at("part-2-of-3.json", lambda f: f.write_text("{}")))
    yield one("cut short", _at(_FIRST, lambda f: f.write_bytes(f.read_bytes()[:-20])))
    yield one("not UTF-8", _at(_FIRST, lambda f: f.write_bytes(b'{"qconvert": "\xff"}')))
    yield one("deep", _at(_FIRST, lambda f: f.write_bytes(dumped(nested(100_000)))))
    yield one("lists", _at(_FIRST, lambda f: f.write_bytes(b"[" + b"[]," * (2 << 20) + b"[]]")))
    for name, value in NOT_A_SIZE.items():
        for path in _NUMBERS:
            if (name, path[-1]) in (("list", "tasks"), ("object", "identity")):
                continue  # as it could be, or with what is missing named
            yield one(
                f"{_spelled(path)} {name}", _json(_FIRST, partial(_put, path=path, value=value))
            )
    for name, text in {**STEERING, "surrogate": SURROGATE, "long": LONG}.items():
        # What a report says is text of folders anyway; a name that something is known by is not.
        told = Verdict.REFUSED if name == "surrogate" else Verdict.EITHER
        for path, verdict in ((p, v) for some, v in ((_TOLD, told), (_KNOWN, _NO)) for p in some):
            change = partial(_put, path=path, value=text)
            yield one(f"{_spelled(path)} text {name}", _json(_FIRST, change), verdict=verdict)
    for name, value in {"1e999": Raw("1e999"), "digits": Raw(DIGITS), "NaN": Raw("NaN")}.items():
        verdict = _NO if name == "digits" else Verdict.EITHER
        measure = [0, "measure", "t", "r", 0, 0, "f", 1, value, 0, 1]
        yield one(f"a measure of {name}", _more(_FIRST, measure), verdict=verdict)
    yield one("a rule that is none", _more(_SECOND, [0, "finding", "QC999", "error", "x", "y"]))
    yield one("a validator too many", _more(_SECOND, [9999, "read", "x"]))
    yield one("a finding more", _more(_SECOND, [0, "finding", "QC022", "error", "part", "y"]))


MUTATIONS = tuple(_mutations())
