"""Calibration data, and folders of statistics."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoints import read_shard

from hostile.breaking.forms import FORMS
from hostile.breaking.headers import rewrite
from hostile.breaking.texts import DIGITS, LONG, NOT_A_SIZE, STEERING, Raw, brief, deep, dumped
from hostile.case import Break, Ground, Mutation, Verdict

_DATA = frozenset({"calibration"})
_STATS = frozenset({"stats"})


def _data(ground: Ground, suffix: str = ".jsonl") -> Path:
    return ground.root / f"data{suffix}"


def _at(name: str, make: Callable[[Path], object]) -> Break:
    return lambda ground: make(ground.root / name)


def _jsonl() -> Iterator[Mutation]:
    def one(name: str, data: bytes, **more: Any) -> Mutation:
        more.setdefault("culprit", ("data.jsonl", "tokenizer"))
        return Mutation(
            name, "calibration", lambda g: _data(g).write_bytes(data), needs=_DATA, **more
        )

    lines: dict[str, bytes] = {
        "blank": b"\n\n\n", "no JSON": b"{\n", "list": b"[1, 2]\n", "null": b"null\n",
        "number": b"5\n", "no key": b'{"words": "a"}\n', "nul bytes": bytes(1000) + b"\n",
        "invalid UTF-8": b'{"text": "\xff\xfe"}\n',
        "UTF-16": '{"input_ids": [1]}\n'.encode("utf-16"),
        "nested": b"[" * 100_000 + b"\n", "nested objects": b'{"a":' * 100_000 + b"\n",
        "ids text": b'{"input_ids": "abc"}\n', "ids null": b'{"input_ids": null}\n',
        "ids object": b'{"input_ids": {"0": 1}}\n', "ids nested": b'{"input_ids": [[1]]}\n',
        "ids of texts": b'{"input_ids": ["1"]}\n', "ids negative": b'{"input_ids": [-1]}\n',
        "ids huge": b'{"input_ids": [' + b"1" + b"0" * 30 + b"]}\n",
        "ids floats": b'{"input_ids": [1.5]}\n',
        "ids 5,000 digits": b'{"input_ids": [' + DIGITS.encode() + b"]}\n",
        "ids NaN": b'{"input_ids": [NaN]}\n',
        "ids booleans": b'{"input_ids": [true]}\n', "ids outside": b'{"input_ids": [999999]}\n',
        "ids infinite": b'{"input_ids": [1e999]}\n',
        "ids deep": b'{"input_ids": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
        "ids empty": b'{"input_ids": []}\n' * 3, "surrogate": b'{"text": "\\ud800"}\n',
        "text number": b'{"text": 5}\n', "text list": b'{"text": ["a"]}\n',
        "messages text": b'{"messages": "a"}\n',
        "messages null": b'{"messages": [null]}\n',
        "messages deep": b'{"messages": [{"role": ' + b"[" * 2000 + b"]" * 2000 + b"}]}\n",
        "role steers": json.dumps({"conversations": [{"from": STEERING["newline command"],
            "value": "a"}]}).encode() + b"\n",
        "key steers": json.dumps({STEERING["escape"]: "a"}).encode() + b"\n",
        "a pickle": b"\x80\x04K\x01.\n",
        "one line of 20 MB": b'{"input_ids": [' + b"1," * 10_000_000 + b"1]}",
    }  # fmt: skip
    for name, data in lines.items():
        # Booleans are numbers to some readers, and what is cut at a length may be read no further.
        verdict = Verdict.EITHER if name in ("one line of 20 MB", "UTF-16") else Verdict.REFUSED
        yield one(f"jsonl {name}", data, verdict=verdict, most=1)
    for form, make in FORMS.items():
        yield Mutation(f"data {form}", "calibration", _at("data.jsonl", make),
            ("data.jsonl",),
                       needs=_DATA, most=1)  # fmt: skip
    missing = {
        "gone.jsonl": "no such file",
        "data.bin": "no known form",
        "": "no name",
        "data.jsonl\x1b[2J": "escape",
    }
    for words, name in missing.items():
        yield Mutation(f"data {name}", "calibration", lambda _g: None, (), needs=_DATA,
                       arguments=("--data", f"{{root}}/{words}" if words else ""),
                       most=2)  # fmt: skip
    for options in (("--samples", "0"), ("--samples", "-1"), ("--samples", "1e9"),
        ("--length", "0"),
                    ("--length", "9" * 400), ("--seed", "-1"), ("--seed", "9" * 5000),
                    ("--set", "dampening_frac=nan"),
                    ("--set", "dampening_frac=-1"), ("--set", "dampening_frac=1e999"),
                    ("--set", "min_tokens=0"), ("--set", "refit"), ("--set", "nope=1"),
                    ("--device", "gpu"), ("--solver", "gptq"), ("--solver", ""),
                    ("--set", "propagated_error=half"), ("--set", "propagated_error="),
                    ("--set", "signs=negative"), ("--scales", "mse"), ("--set", "order=natural"),
                    ("--set", "refit=-1"), ("--set", "refit=" + "9" * 400), ("--set", "descent=nan"),
                    ("--device", "a\x1b[2J"), ("--device", "cuda:99"),
                    ("--column", STEERING["newline command"]),
                    ("--data", "hf-dataset:"), ("--data", "hf-dataset:a:b:c:d"),
                    ("--data", "hf-dataset:../../etc"),
                    ("--save-stats", "{src}"), ("--save-stats", "{root}/victim.txt"),
                    ("--save-stats", "{out}/in")):  # fmt: skip
        yield Mutation(f"option {brief(' '.join(options))}", "calibration", lambda _g: None, (),
                       needs=_DATA, arguments=options, most=1)  # fmt: skip
    yield from _tokens()


def _tokens() -> Iterator[Mutation]:
    """Tokenized data, in a safetensors file."""

    def one(name: str, entry: dict[str, Any], body: bytes = bytes(64)) -> Mutation:
        text = dumped({"input_ids": entry})

        def make(ground: Ground) -> None:
            _data(ground, ".safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)

        return Mutation(f"tokens {name}", "calibration", make, ("data.safetensors",), needs=_DATA,
                        arguments=("--data", "{root}/data.safetensors"), most=2)  # fmt: skip

    good: dict[str, Any] = {"dtype": "I64", "shape": [2, 4], "data_offsets": [0, 64]}
    yield one("shape negative", {**good, "shape": [-2, -4]})
    yield one("shape 4,000 digits", {**good, "shape": [Raw("9" * 4000), 1]})
    yield one("shape too large", {**good, "shape": [2**31, 2**31]})
    yield one("shape of one size", {**good, "shape": [8]})
    yield one("dtype", {**good, "dtype": "F64"})
    yield one("dtype unknown", {**good, "dtype": STEERING["escape"]})
    yield one("offsets", {**good, "data_offsets": [0, 10**12]})
    yield one("ids outside", good, b"\x7f" * 64)
    yield one("entry deep", deep(2000))  # type: ignore[arg-type]


def _layer(change: Callable[[dict[str, Any]], object]) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        file = ground.root / "stats" / "layer-00000.safetensors"
        table, data = read_shard(file)
        change(table)
        rewrite(file, dumped(table), data)

    return make


def _filled(value: float) -> Callable[[Ground], None]:
    def make(ground: Ground) -> None:
        for file in sorted((ground.root / "stats").glob("*.safetensors")):
            table, data = read_shard(file)
            changed = bytearray(data)
            for name, entry in table.items():
                if name != "__metadata__" and entry["dtype"] == "F32":
                    start, stop = entry["data_offsets"]
                    changed[start:stop] = struct.pack("<f", value) * ((stop - start) // 4)
            rewrite(file, json.dumps(table).encode(), bytes(changed))

    return make


def _stats() -> Iterator[Mutation]:
    def one(name: str, make: Callable[[Ground], Any], **more: Any) -> Mutation:
        return Mutation(
            name, "stats", make, more.pop("culprit", ("stats",)), needs=_STATS, most=1, **more
        )

    for file in ("stats.json", "layer-00000.safetensors"):
        for form, make in FORMS.items():
            # What stats.json says is for people, its being there is what counts.
            verdict = Verdict.EITHER if file == "stats.json" else Verdict.REFUSED
            yield one(f"{file} {form}", _at(f"stats/{file}", make), verdict=verdict)
        yield one(f"{file} gone", _at(f"stats/{file}", Path.unlink), verdict=verdict)
    for name, value in {
        "NaN": float("nan"),
        "inf": float("inf"),
        "negative": -1.0,
        "zero": 0.0,
    }.items():
        verdict = Verdict.EITHER if name == "zero" else Verdict.REFUSED
        yield one(
            f"numbers {name}", _filled(value), verdict=verdict, culprit=("stats", "expert", "layer")
        )

    def changed(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
        return lambda table: next(
            e for n, e in table.items() if n.endswith("gate_up.absmax")
        ).update({key: value})

    for key in ("shape", "dtype", "data_offsets"):
        for name, value in NOT_A_SIZE.items():
            yield one(f"{key} {name}", _layer(changed(key, value)))
    yield one("a matrix less", _layer(lambda t: t.pop("layers.0.down.absmax", None)))
    yield one(
        "notes deep",
        _layer(lambda t: t.update(__metadata__={"few": "[" * 100_000})),
        verdict=Verdict.EITHER,
    )
    yield one("layer huge",
        lambda g: (g.root / "stats" / "layer-99999.safetensors").write_bytes(b""),
              verdict=Verdict.EITHER)  # fmt: skip
    yield one("a folder gone", lambda g: (g.root / "stats").rename(g.root / LONG[:100]))


MUTATIONS = (*_jsonl(), *_stats())
