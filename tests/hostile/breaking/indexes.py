"""model.safetensors.index.json: where it points, what it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from hostile.breaking.texts import DIGITS, LONG, STEERING, SURROGATE, Raw, deep, dumped, nested
from hostile.case import Break, Ground, Mutation, Verdict

GROUP = "index"
INDEX = "model.safetensors.index.json"


def _index(ground: Ground) -> dict[str, Any]:
    """The folder's index, or one of its files, beside which a mutation may have put a link."""
    file = ground.at / INDEX
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_bytes())
        return found
    from checkpoints import read_shard

    files = sorted(f for f in ground.at.glob("*.safetensors") if not f.is_symlink())
    of_files = {
        name: file.name for file in files for name in read_shard(file)[0] if name != "__metadata__"
    }
    return {"metadata": {}, "weight_map": of_files}


def _edit(change: Callable[[dict[str, Any], Ground], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        index = _index(ground)
        change(index, ground)
        (ground.at / INDEX).write_bytes(dumped(index))

    return make


def _points(where: Any) -> Callable[[Ground], None]:
    """One tensor is said to be elsewhere."""

    def change(index: dict[str, Any], ground: Ground) -> None:
        name = ground.random.choice(list(index["weight_map"]))
        index["weight_map"][name] = str(ground.root / where[6:]) if (
            isinstance(where, str) and where.startswith("{root}")) else where  # fmt: skip

    return _edit(change)


def _all_point(where: str) -> Callable[[Ground], None]:
    def change(index: dict[str, Any], _ground: Ground) -> None:
        index["weight_map"] = dict.fromkeys(index["weight_map"], where)

    return _edit(change)


def _whole(data: bytes) -> Break:
    return lambda ground: (ground.at / INDEX).write_bytes(data)


def _metadata(value: Any) -> Break:
    return _edit(lambda index, _ground: index.update(metadata=value))


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Break, **more: Any) -> Mutation:
        more.setdefault("culprit", (INDEX, "tensor"))
        return Mutation(name, GROUP, make, **more)

    places: dict[str, Any] = {
        "parent": "../beside/model.safetensors", "absolute": "{root}/beside/model.safetensors",
        "etc passwd": "/etc/passwd", "dev zero": "/dev/zero", "pickle": "pytorch_model.bin",
        "missing": "model-00009-of-00002.safetensors", "empty": "", "dot": ".", "dot dot": "..",
        "itself": INDEX, "backslash": "..\\beside\\model.safetensors", "list": ["a"], "null": None,
        "number": 5, "object": {"a": 1}, "deep": deep(2000), "long": LONG + ".safetensors",
        "long path": "a/" * 3000 + "b.safetensors", "surrogate": SURROGATE + ".safetensors",
        "nul": "a\x00b.safetensors", "folder in folder": "sub/../../beside/model.safetensors",
        "URL": "https://example.com/model.safetensors", "home": "~/model.safetensors",
    }  # fmt: skip
    for name, where in places.items():
        yield one(f"points {name}", _points(where))
    for name, text in STEERING.items():
        yield one(f"points to {name}", _points(f"{text}.safetensors"), most=4)
    yield one("all point out", _all_point("../beside/model.safetensors"))
    yield one("all point to a missing one", _all_point("gone.safetensors"))

    def linked_out(ground: Ground) -> None:
        """A link in the folder that leads to another's weights."""
        (ground.at / "x.safetensors").symlink_to(ground.root / "beside" / "model.safetensors")
        _points("x.safetensors")(ground)

    yield one("points to a link out", linked_out, culprit=(INDEX, "x.safetensors", "tensor"))

    whole: dict[str, Any] = {
        "list": [], "null": None, "number": 1, "text": "x", "empty": {},
        "weight_map list": {"weight_map": ["a"]}, "weight_map null": {"weight_map": None},
        "weight_map empty": {"weight_map": {}}, "weight_map text": {"weight_map": "a"},
        "weight_map deep": {"weight_map": deep(3000)}, "deep": deep(30_000),
        "nested": nested(100_000),
    }  # fmt: skip
    for name, value in whole.items():
        yield one(f"whole {name}", _whole(dumped(value)))
    forms = {
        "newline": b"\n", "no JSON": b"{", "invalid UTF-8": b'{"weight_map": {"\xff": "\xfe"}}',
        "nul bytes": bytes(1000), "a pickle": b"\x80\x04K\x01.",
        "doubled keys": b'{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}',
    }  # fmt: skip
    for name, data in forms.items():
        yield one(f"form {name}", _whole(data))

    more: dict[str, Callable[[dict[str, Any], Ground], object]] = {
        "a tensor more": lambda i,
        _g: i["weight_map"].update(ghost=next(iter(i["weight_map"].values()))),
        "a tensor less": lambda i, g: i["weight_map"].pop(g.random.choice(list(i["weight_map"]))),
        "200,000 ghosts": lambda i, _g: i["weight_map"].update(
            {f"ghost.{n}": f"g{n % 7}.safetensors" for n in range(200_000)}),
        "200,000 files": lambda i, _g: i["weight_map"].update(
            {f"ghost.{n}": f"g{n}.safetensors" for n in range(200_000)}),
        "a ghost that steers": lambda i, _g: i["weight_map"].update(
            {STEERING["newline command"]: next(iter(i["weight_map"].values()))}),
        "a ghost of 1,000,000 characters": lambda i, _g: i["weight_map"].update(
            {LONG * 200: next(iter(i["weight_map"].values()))}),
    }  # fmt: skip
    for name, change in more.items():
        yield one(name, _edit(change))
    metadata: dict[str, Any] = {
        "list": [1], "null": None, "text": "x", "total 5,000 digits": {"total_size": Raw(DIGITS)},
        "total NaN": {"total_size": Raw("NaN")}, "total negative": {"total_size": -5},
        "total text": {"total_size": STEERING["newline command"]},
        "total list": {"total_size": [[]]},
        "total 1e30": {"total_size": 10**30}, "deep": deep(3000),
        "total long": {"total_size": LONG},
    }  # fmt: skip
    for name, value in metadata.items():
        yield one(f"metadata {name}", _metadata(value),
                  verdict=Verdict.EITHER, culprit=())  # fmt: skip


MUTATIONS = tuple(_mutations())
