"""Experts that shards of a calibration solved, in OUT, of another run or of somebody who says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hostile.breaking.forms import FORMS
from hostile.breaking.texts import STEERING, deep, dumped
from hostile.case import Ground, Mutation, Verdict

_GROUP = "solved"
_NEEDS = frozenset({"solved"})
_NAME = "0-0"


def _folder(ground: Ground) -> Path:
    return ground.out / ".qconvert" / "solved"


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Ground], None]:
    """Change the header; the file is hashed again, so that it is believed."""

    def make(ground: Ground) -> None:
        path = _folder(ground) / _NAME
        text, _, rest = path.read_bytes()[:-16].partition(b"\n")
        header = json.loads(text)
        change(header)
        body = dumped(header) + b"\n" + rest
        path.write_bytes(body + xxhash.xxh3_128(body).digest())

    return make


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        path = _folder(ground) / _NAME
        path.write_bytes(change(path.read_bytes()))

    return make


def _linked(ground: Ground) -> None:
    shutil.move(_folder(ground), ground.root / "away")
    _folder(ground).symlink_to(ground.root / "away")


def _form(make: Callable[[Path], object], name: str, ground: Ground) -> None:
    make(_folder(ground) / name)


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Callable[[Ground], object]) -> Mutation:
        return Mutation(name, _GROUP, make, needs=_NEEDS, verdict=Verdict.EITHER, most=3)

    headers: dict[str, dict[str, Any]] = {
        "key": {"key": STEERING["escape"]}, "kind": {"kind": STEERING["newline command"]},
        "layer": {"layer": 10**30}, "about null": {"about": None}, "about deep": {"about": deep(3000)},
        "about empty": {"about": {}}, "arrays null": {"arrays": None},
        "arrays huge": {"arrays": [["x", "int8", [1 << 31, 1 << 31]]]},
        "arrays negative": {"arrays": [["x", "int8", [-1]]]},
        "arrays objects": {"arrays": [["x", "object", [1]]]},
        "arrays none": {"arrays": []}, "arrays steer": {"arrays": [[STEERING["escape"], "O", []]]},
    }  # fmt: skip
    for name, change in headers.items():
        yield one(f"solved {name}", _changed(_up(change)))
    yield one("solved cut short", _bytes(lambda data: data[: len(data) // 2]))
    yield one("solved bit", _bytes(lambda data: data[:-40] + bytes([data[-40] ^ 4]) + data[-39:]))
    yield one("solved no header", _bytes(lambda data: data[-16:]))
    for form, make in FORMS.items():
        yield one(f"solved expert {form}", partial(_form, make, _NAME))
        yield one(f"folder of solved {form}", partial(_form, make, ""))
    yield one("folder of solved link", _linked)


def _up(change: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update(change)


MUTATIONS = tuple(_mutations())
