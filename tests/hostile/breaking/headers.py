"""safetensors headers: lengths, forms of JSON, entries, names."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from checkpoints import read_shard

from hostile.breaking.texts import DIGITS, LONG, STEERING, Raw, deep, dumped, nested
from hostile.case import Ground, Mutation, Verdict

Table = dict[str, Any]
GROUP = "headers"


def shard(ground: Ground) -> Path:
    """One of the shards."""
    return ground.random.choice(sorted(ground.at.glob("*.safetensors")))


def _entry_name(table: Table, random: Random) -> str:
    return random.choice([name for name in table if name != "__metadata__"])


def rewrite(file: Path, text: bytes, data: bytes, length: int | None = None) -> None:
    size = len(text) if length is None else length
    file.write_bytes(struct.pack("<Q", size) + text + data)


def _with_text(change: Callable[[bytes, Random], bytes]) -> Callable[[Ground], None]:
    """Change the header as bytes."""

    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        rewrite(file, change(json.dumps(table).encode(), ground.random), data)

    return make


def _with_length(change: Callable[[int, int], int]) -> Callable[[Ground], None]:
    """Another length before the same header; given the header's and the file's size."""

    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        text = json.dumps(table).encode()
        size = 8 + len(text) + len(data)
        rewrite(file, text, data, change(len(text), size) % 2**64)

    return make


def _with_entry(change: Callable[[Table, Random], object]) -> Callable[[Ground], None]:
    """Change one tensor's entry."""

    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        change(table[_entry_name(table, ground.random)], ground.random)
        rewrite(file, dumped(table), data)

    return make


def _with_table(change: Callable[[Table, Random], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        change(table, ground.random)
        rewrite(file, dumped(table), data)

    return make


def _renamed(new: Callable[[str], str]) -> Callable[[Ground], None]:
    """A tensor renamed in header and index alike, so that both agree."""

    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        old = _entry_name(table, ground.random)
        name = new(old)
        rewrite(file, dumped({(name if key == old else key): v for key, v in table.items()}), data)
        index = ground.at / "model.safetensors.index.json"
        if index.exists():
            found = json.loads(index.read_bytes())
            found["weight_map"] = {
                (name if key == old else key): v for key, v in found["weight_map"].items()
            }
            index.write_bytes(dumped(found))

    return make


def _metadata(value: Any) -> Callable[[Table, Random], object]:
    return lambda table, _random: table.update(__metadata__=value)


def _suffix(text: str) -> Callable[[str], str]:
    return lambda old: old + text


def _duplicates(count: int, *, last: bool) -> Callable[[Ground], None]:
    """`count` keys of no bytes, and one of them again: the last, or one by chance."""

    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        end = len(data)
        entry = json.dumps({"dtype": "U8", "shape": [0], "data_offsets": [end, end]})
        names = [f"x.{number}" for number in range(count)]
        names.append(names[-1] if last else ground.random.choice(names))
        more = ", ".join(f'"{name}": {entry}' for name in names)
        text = json.dumps(table)[:-1] + ", " + more + "}"
        rewrite(file, text.encode(), data)

    return make


def _many_entries(count: int) -> Callable[[Ground], None]:
    """Tensors of no elements, which say nothing and are read one by one."""

    def make(ground: Ground) -> None:
        file = shard(ground)
        table, data = read_shard(file)
        for number in range(count):
            table[f"y.{number}"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(data)] * 2}
        rewrite(file, dumped(table), data)

    return make


def _mutations() -> Iterator[Mutation]:
    file = ("model-0000", "model.safetensors")

    def one(name: str, make: Callable[[Ground], None], **more: Any) -> Mutation:
        more.setdefault("culprit", file)
        return Mutation(name, GROUP, make, **more)

    lengths: dict[str, Callable[[int, int], int]] = {
        "length 0": lambda _h, _s: 0, "length 1": lambda _h, _s: 1,
        "length 2^63": lambda _h, _s: 2**63, "length 2^64-1": lambda _h, _s: -1,
        "length 100 MB": lambda _h, _s: 100_000_001, "length of the file": lambda _h, s: s,
        "length one less": lambda h, _s: h - 1, "length one more": lambda h, _s: h + 1,
        "length 2 GiB": lambda _h, _s: 2**31, "length to the last byte": lambda _h, s: s - 8,
    }  # fmt: skip
    for name, change in lengths.items():
        yield one(name, _with_length(change))

    texts: dict[str, Callable[[bytes, Random], bytes]] = {
        "empty header": lambda _t, _r: b"",
        "a list": lambda _t, _r: b"[]",
        "a number": lambda _t, _r: b"1",
        "null": lambda _t, _r: b"null",
        "no JSON": lambda _t, _r: b"{not json}",
        "BOM": lambda t, _r: b"\xef\xbb\xbf" + t,
        "UTF-16": lambda t, _r: t.decode().encode("utf-16"),
        "UTF-32": lambda t, _r: t.decode().encode("utf-32"),
        "invalid UTF-8": lambda t, _r: t.replace(b"model", b"mod\xff\xfe", 1),
        "cut off": lambda t, r: t[: r.randrange(1, len(t))],
        "trailing text": lambda t, _r: t + b" {}",
        "trailing comma": lambda t, _r: t[:-1] + b",}",
        "leading spaces": lambda t, _r: b"  \n" + t[:-1] + b",",
        "comment": lambda t, _r: b"/* hello */" + t,
        "single quotes": lambda t, _r: t.replace(b'"', b"'"),
        "nested lists": lambda _t, _r: b"[" * 100_000 + b"]" * 100_000,
        "nested objects": lambda _t, _r: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "nested in an entry": lambda t,
        _r: t[:-1] + b',"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        "a bit": lambda t, r: _bit(t, r),
        "bytes": lambda t, r: _bytes(t, r),
        "zeros": lambda t, _r: bytes(len(t)),
    }  # fmt: skip
    for name, rewritten in texts.items():
        # A flipped bit may change metadata, or nothing that a reader of one tensor sees.
        either = {"verdict": Verdict.EITHER, "culprit": ()} if name in ("a bit", "bytes") else {}
        yield one(name, _with_text(rewritten), **either)

    entries: dict[str, Any] = {
        "no dtype": lambda e, _r: e.pop("dtype"),
        "no shape": lambda e, _r: e.pop("shape"),
        "no offsets": lambda e, _r: e.pop("data_offsets"),
        "extra key": lambda e, _r: e.update(path="/etc/passwd"),
        "dtype unknown": lambda e, _r: e.update(dtype="F7"),
        "dtype empty": lambda e, _r: e.update(dtype=""),
        "dtype list": lambda e, _r: e.update(dtype=["F32"]),
        "dtype number": lambda e, _r: e.update(dtype=16),
        "dtype object": lambda e, _r: e.update(dtype={}),
        "dtype long": lambda e, _r: e.update(dtype=LONG),
        "dtype steers": lambda e, _r: e.update(dtype=STEERING["newline command"]),
        "shape text": lambda e, _r: e.update(shape="8"),
        "shape object": lambda e, _r: e.update(shape={"0": 8}),
        "shape null": lambda e, _r: e.update(shape=None),
        "shape negative": lambda e, _r: e.update(shape=[-s for s in e["shape"]] or [-1]),
        "shape two negatives": lambda e, _r: e.update(shape=[-1, -1, *e["shape"]]),
        "shape huge": lambda e, _r: e.update(shape=[2**62, 2**62, *e["shape"]]),
        "shape wraps to zero": lambda e, _r: e.update(shape=[2**32, 2**32]),
        "shape 4,000 digits": lambda e, _r: e.update(shape=[Raw("9" * 4000), *e["shape"]]),
        "shape 5,000 digits": lambda e, _r: e.update(shape=[Raw(DIGITS)]),
        "shape of 4,000-digit product": lambda e, _r: e.update(shape=[10**40] * 100),
        "shape floats": lambda e, _r: e.update(shape=[float(s) for s in e["shape"]] or [1.0]),
        "shape NaN": lambda e, _r: e.update(shape=[Raw("NaN")]),
        "shape infinite": lambda e, _r: e.update(shape=[Raw("1e999")]),
        "shape booleans": lambda e, _r: e.update(shape=[True, *e["shape"]]),
        "shape nested": lambda e, _r: e.update(shape=[e["shape"]]),
        "shape of texts": lambda e, _r: e.update(shape=[str(s) for s in e["shape"]] or ["1"]),
        "shape of 100,000 sizes": lambda e, _r: e.update(shape=[1] * 100_000 + [2]),
        "shape deep": lambda e, _r: e.update(shape=nested(2000)),
        "offsets swapped": lambda e, _r: e["data_offsets"].reverse(),
        "offsets negative": lambda e, _r: e.update(data_offsets=[-8, e["data_offsets"][1]]),
        "offsets huge": lambda e, _r: e.update(data_offsets=[2**64, 2**64 + 8]),
        "offsets 5,000 digits": lambda e, _r: e.update(data_offsets=[0, Raw(DIGITS)]),
        "offsets floats": lambda e,
        _r: e.update(data_offsets=[float(x) + 0.5 for x in e["data_offsets"]]),
        "offsets booleans": lambda e, _r: e.update(data_offsets=[False, True]),
        "offsets three": lambda e, _r: e["data_offsets"].append(0),
        "offsets one": lambda e, _r: e["data_offsets"].pop(),
        "offsets texts": lambda e, _r: e.update(data_offsets=["0", "8"]),
        "offsets null": lambda e, _r: e.update(data_offsets=None),
        "offsets beyond": lambda e,
        _r: e.update(data_offsets=[10**9, 10**9 + e["data_offsets"][1] - e["data_offsets"][0]]),
        "offsets shifted": lambda e,
        r: e.update(data_offsets=[x + r.choice((-1, 1)) for x in e["data_offsets"]]),
    }  # fmt: skip
    for name, entry in entries.items():
        yield one(name, _with_entry(entry), culprit=(*file, "tensor", "model.", "lm_head"))

    def replaced(value: Any) -> Callable[[Table, Random], object]:
        return lambda t, r: t.update({_entry_name(t, r): value})

    tables: dict[str, Any] = {
        "entry null": replaced(None),
        "entry list": replaced([]),
        "entry text": replaced("F32"),
        "entry number": replaced(7),
        "entry deep": replaced(deep(2000)),
        "entry gone": lambda t, r: t.pop(_entry_name(t, r)),
        "two on the same bytes": lambda t, r: t.update(copy=dict(t[_entry_name(t, r)])),
        "metadata list": lambda t, _r: t.update(__metadata__=[1]),
        "metadata null": lambda t, _r: t.update(__metadata__=None),
        "metadata text": lambda t, _r: t.update(__metadata__="pt"),
        "metadata of numbers": lambda t, _r: t.update(__metadata__={"format": 1}),
        "metadata of objects": lambda t, _r: t.update(__metadata__={"format": {"a": {}}}),
        "metadata deep": lambda t, _r: t.update(__metadata__={"format": deep(2000)}),
    }  # fmt: skip
    may_pass = {"metadata null"}
    for name, table in tables.items():
        verdict = Verdict.EITHER if name in may_pass else Verdict.REFUSED
        yield one(name, _with_table(table), culprit=(*file, "tensor"), verdict=verdict)
    for name, text in STEERING.items():
        yield one(f"metadata {name}", _with_table(_metadata({"format": "pt", text: text})), culprit=(),
            verdict=Verdict.EITHER)  # fmt: skip
    yield one(
        "metadata of 1,000,000 characters",
        _with_table(lambda t, _r: t.update(__metadata__={"x": LONG * 200})),
        culprit=(),
        verdict=Verdict.EITHER,
    )

    names = {
        **{f"name {key}": _suffix(text) for key, text in STEERING.items()},
        "name empty": lambda _old: "",
        "name surrogate": lambda old: old + "\ud800",
        "name of 5,000 characters": lambda old: old + LONG,
        "name of 1,000,000 characters": lambda old: old + LONG * 200,
        "name traversal": lambda old: f"../../{old}",
        "name of 5,000 dots": lambda old: old + ".1" * 5000,
        "name of a layer of 5,000 digits": lambda _old: f"model.layers.{DIGITS}.mlp.gate.weight",
        "name of a layer 10^18": lambda _old: f"model.layers.{10**18}.mlp.gate.weight",
        "name of an expert 10^18": lambda _old: (
            f"model.layers.0.mlp.experts.{10**18}.up_proj.weight"
        ),
        "name of a negative layer": lambda _old: "model.layers.-1.mlp.gate.weight",
        "name with a digit of another script": lambda _old: "model.layers.\u0663.mlp.gate.weight",
        "name dunder": lambda _old: "__class__",
    }
    for name, new in names.items():
        yield one(name, _renamed(new), culprit=(), verdict=Verdict.EITHER)
    for count in (2, 1000, 60_000):
        for last in (True, False):
            which = "last" if last else "any"
            yield one(f"{count} keys, {which} doubled", _duplicates(count, last=last),
                      culprit=(*file, "tensor", "x."))  # fmt: skip
    yield one("60,000 keys of no bytes", _many_entries(60_000), culprit=(), verdict=Verdict.EITHER)


def _bit(text: bytes, random: Random) -> bytes:
    at, bit = random.randrange(len(text)), 1 << random.randrange(8)
    return text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :]


def _bytes(text: bytes, random: Random) -> bytes:
    at = random.randrange(len(text))
    return text[:at] + random.randbytes(random.randrange(1, 9)) + text[at:]


MUTATIONS = tuple(_mutations())
