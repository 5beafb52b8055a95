"""Shards that are cut, extended or another's, and numbers in them that cannot be."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoints import read_shard

from hostile.breaking.headers import rewrite, shard
from hostile.case import Ground, Mutation, Verdict

GROUP = "contents"


def _file(change: Callable[[Path, Ground], object]) -> Callable[[Ground], None]:
    return lambda ground: (change(shard(ground), ground), None)[1]


def _cut(by: Callable[[int, Ground], int]) -> Callable[[Ground], None]:
    return _file(lambda f, g: os.truncate(f, by(f.stat().st_size, g)))


def _swapped(ground: Ground) -> None:
    """Two shards under each other's names; another's file where there is but one."""
    files = sorted(ground.at.glob("*.safetensors"))
    if len(files) < 2:
        shutil.copy(ground.root / "beside" / "model.safetensors", files[0])
        return
    held = files[0].read_bytes()
    shutil.copy(files[1], files[0])
    files[1].write_bytes(held)


def _flipped(ground: Ground) -> None:
    file = shard(ground)
    table, data = read_shard(file)
    changed = bytearray(data)
    changed[ground.random.randrange(len(changed))] ^= 1 << ground.random.randrange(8)
    rewrite(file, json.dumps(table).encode(), bytes(changed))


def _filled(dtype: str, pattern: bytes, one: bool) -> Callable[[Ground], None]:
    """One element, or all, of a tensor of a type in some shard."""

    def make(ground: Ground) -> None:
        files = sorted(ground.at.glob("*.safetensors"))
        ground.random.shuffle(files)
        for file in files:
            table, data = read_shard(file)
            names = [n for n, e in table.items() if n != "__metadata__" and e["dtype"] == dtype
                     and e["data_offsets"][1] > e["data_offsets"][0]]  # fmt: skip
            if not names:
                continue
            start, stop = table[ground.random.choice(names)]["data_offsets"]
            changed = bytearray(data)
            if one:
                place = start + ground.random.randrange((stop - start) // len(pattern)) * len(
                    pattern
                )
                changed[place : place + len(pattern)] = pattern
            else:
                changed[start:stop] = pattern * ((stop - start) // len(pattern))
            rewrite(file, json.dumps(table).encode(), bytes(changed))
            return
        raise ValueError(f"no tensor of type {dtype}")

    return make


def _mutations() -> Iterator[Mutation]:
    def one(name: str, make: Callable[[Ground], Any], **more: Any) -> Mutation:
        more.setdefault("culprit", ("model",))
        return Mutation(name, GROUP, make, **more)

    cuts: dict[str, Callable[[int, Ground], int]] = {
        "cut to nothing": lambda _s, _g: 0, "cut to 4 bytes": lambda _s, _g: 4,
        "cut to 8 bytes": lambda _s, _g: 8,
        "cut to 100 bytes": lambda _s, _g: 100, "cut in half": lambda s, _g: s // 2,
        "cut by a byte": lambda s, _g: s - 1, "longer by a byte": lambda s, _g: s + 1,
        "longer by 1 MB": lambda s, _g: s + 10**6, "cut anywhere": lambda s,
        g: g.random.randrange(s),
    }  # fmt: skip
    for name, by in cuts.items():
        yield one(name, _cut(by), most=8)
    yield one("gone", _file(lambda f, _g: f.unlink()), most=8, culprit=())
    yield one("swapped", _swapped, most=8)
    yield one(
        "a pickle",
        _file(lambda f, _g: f.write_bytes(b"\x80\x04cos\nsystem\n(S'touch victim'\ntR.")),
        most=8,
    )
    yield one("a zip", _file(lambda f, _g: f.write_bytes(b"PK\x03\x04" + bytes(100))), most=4)
    yield one("twice the header", _file(lambda f, _g: f.write_bytes(f.read_bytes() * 2)), most=4)
    yield one("random bytes", _file(lambda f, g: f.write_bytes(g.random.randbytes(5000))), most=6)
    yield one("another shard more",
        _file(lambda f, _g: shutil.copy(f, f.with_name("model-00009-of-00009.safetensors"))),
              verdict=Verdict.EITHER, culprit=(), most=6)  # fmt: skip
    yield one("a bit flipped", _flipped, verdict=Verdict.EITHER, culprit=(), most=10,
              needs=frozenset({"checkpoint", "data"}))  # fmt: skip
    halves = {"NaN": 0x7FC0, "inf": 0x7F80, "-inf": 0xFF80, "largest": 0x7F7F, "subnormal": 0x0001}
    for name, bits in halves.items():
        for count in ("one", "all"):
            yield one(f"BF16 {count} {name}",
                _filled("BF16", struct.pack("<H", bits), count == "one"),
                      needs=frozenset({"checkpoint", "data"}), verdict=Verdict.EITHER, culprit=(),
                      most=5)  # fmt: skip
    scales = {"NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "zero": 0.0,
        "negative": -1.0,
              "largest": 3.4e38, "subnormal": 1e-45}  # fmt: skip
    for name, value in scales.items():
        for count in ("one", "all"):
            yield one(f"FP8 scale {count} {name}",
                _filled("F32", struct.pack("<f", value), count == "one"),
                      needs=frozenset({"checkpoint", "data", "fp8"}), verdict=Verdict.EITHER,
                      culprit=(), most=2)  # fmt: skip
    # What cannot be BF16, or no number, is never written.
    for name in ("NaN", "inf", "-inf", "largest"):
        for count in ("one", "all"):
            yield one(f"dequant of scale {count} {name}",
                      _filled("F32", struct.pack("<f", scales[name]), count == "one"),
                      needs=frozenset({"checkpoint", "data", "fp8"}), only=frozenset({"dequant"}),
                      culprit=("model.layers",))  # fmt: skip
    for code in (0x7F, 0xFF, 0x80):
        yield one(f"FP8 code {code:#x}", _filled("F8_E4M3", bytes([code]), False),
                  needs=frozenset({"checkpoint", "data", "fp8"}), verdict=Verdict.EITHER,
                  culprit=(), most=2)  # fmt: skip


MUTATIONS = tuple(_mutations())
