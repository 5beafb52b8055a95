"""Journals of shards in OUT, from another run or from somebody who says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hostile.breaking.forms import FORMS
from hostile.breaking.leftovers import hashed
from hostile.breaking.texts import STEERING, deep, dumped
from hostile.case import Ground, Mutation, Verdict

_GROUP = "shards"
_NEEDS = frozenset({"shared"})
_NAME = "0-of-2.1.jsonl"


def _folder(ground: Ground) -> Path:
    return ground.out / ".qconvert" / "shards"


def _changed(change: Callable[[list[Any], Ground], object]) -> Callable[[Ground], None]:
    """Change records; each line is hashed again, so that it is believed."""

    def make(ground: Ground) -> None:
        lines = (_folder(ground) / _NAME).read_bytes().splitlines()
        records: list[Any] = [json.loads(line.partition(b" ")[2]) for line in lines]
        change(records, ground)
        data = b"".join(hashed(dumped(record)) for record in records)
        (_folder(ground) / _NAME).write_bytes(data)

    return make


def _linked(ground: Ground) -> None:
    shutil.move(_folder(ground), ground.root / "away")
    _folder(ground).symlink_to(ground.root / "away")


def _update(change: Mapping[str, Any], records: list[Any], _ground: Ground) -> None:
    records[0].update(change)


def _append(line: Any, records: list[Any], _ground: Ground) -> None:
    records.append(line)


def _form(make: Callable[[Path], object], name: str, ground: Ground) -> None:
    make(_folder(ground) / name)


def _named(name: str) -> Callable[[Ground], object]:
    return lambda ground: (_folder(ground) / _NAME).rename(_folder(ground) / name)


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Callable[[Ground], object]) -> Mutation:
        return Mutation(name, _GROUP, make, needs=_NEEDS, verdict=Verdict.EITHER, most=4)

    commands: dict[str, Any] = {
        "null": None, "number": 5, "numbers": [5], "empty": [], "clean": ["clean", "{root}/src"],
        "finish": ["finish", "."], "python": ["dequant", "a", "b", "--family", "x.py"],
        "cluster": ["dequant", "a", "b", "--engine", "ray", "--address", "127.0.0.1:1"],
        "group": ["mtp"], "elsewhere": ["dequant", "{root}/src", "{root}/victim"],
        "steering": [STEERING["newline command"], STEERING["escape"]], "long": ["x" * 100_000],
    }  # fmt: skip
    for name, words in commands.items():

        def command(records: list[Any], ground: Ground, words: Any = words) -> None:
            texts = isinstance(words, list) and all(isinstance(word, str) for word in words)
            at = str(ground.root)
            given = [word.replace("{root}", at) for word in words] if texts else words
            records[0].update(command=given)

        yield one(f"shard's command {name}", _changed(command))
    changes: dict[str, dict[str, Any]] = {
        "by null": {"by": None}, "by list": {"by": []}, "by numbers": {"by": {"host": 1}},
        "host steers": {"by": {"host": STEERING["escape"], "machine": "", "pid": 1, "began": ""}},
        "pid huge": {"by": {"host": "a", "machine": "", "pid": 10**30, "began": ""}},
        "pid negative": {"by": {"host": "a", "machine": "", "pid": -1, "began": ""}},
        "shares null": {"shares": None}, "shares huge": {"shares": [[10**30, 10**30]] * 3},
        "shares negative": {"shares": [[-1, -1]] * 3}, "shares deep": {"shares": deep(3000)},
        "folder": {"folder": "/"}, "folder null": {"folder": None}, "folder nul": {"folder": "a\0"},
        "fingerprint": {"fingerprint": "0" * 32}, "passes steer": {"passes": [STEERING["escape"]]},
    }  # fmt: skip
    for name, change in changes.items():
        yield one(f"shard's {name}", _changed(partial(_update, change)))
    lines: dict[str, Any] = {
        "ended null": {"ended": None}, "beat null": {"beat": None}, "publish": {"publish": ["../x"]},
        "forget all": {"forget": list(range(1000))}, "forget null": {"forget": None},
        "unit huge": {"unit": 10**9, "records": [], "remarks": []},
        "record null": {"unit": 0, "records": ["null"], "remarks": []},
        "record no JSON": {"unit": 0, "records": ["{"], "remarks": []},
    }  # fmt: skip
    for name, line in lines.items():
        yield one(f"shard's line {name}", _changed(partial(_append, line)))
    for form, make in FORMS.items():
        yield one(f"shard's journal {form}", partial(_form, make, _NAME))
        yield one(f"folder of shards {form}", partial(_form, make, ""))
    for name in (
        "3-of-2.1.jsonl",
        "0-of-99999.1.jsonl",
        "0-of-0.1.jsonl",
        "x",
        "0-of-2.999999.jsonl",
    ):
        yield one(f"shard's name {name}", _named(name))
    yield one("folder of shards link", _linked)


MUTATIONS = tuple(_mutations())
