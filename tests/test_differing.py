"""Bytes that an earlier run left are hashed again, in whatever order they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from qconvert.run.folder import verify
from qconvert.run.folder.verify import Part, differing


def _hash(part: Part) -> str:
    path, at, size = part
    return xxhash.xxh3_128(path.read_bytes()[at : at + size]).hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(3)
    found = [tmp_path / name for name in ("b", "a")]
    for path in found:
        path.write_bytes(rng.bytes(10_000))
    return found


def _parts(files: Sequence[Path], seed: int) -> list[Part]:
    """Parts side by side, parts with others between them, parts that overlap, empty ones."""
    rng = np.random.default_rng(seed)
    parts = []
    for path in files:
        ends = np.sort(rng.integers(0, 10_001, 60))
        parts += [(path, int(a), int(b - a)) for a, b in pairwise(ends)]
        parts += [(path, int(a), int(rng.integers(0, 10_001 - a))) for a in ends[::7]]
    return [parts[n] for n in rng.permutation(len(parts))[: len(parts) * 3 // 4]]


@pytest.mark.parametrize("chunk", [1, 37, 4096, 1 << 20])
@pytest.mark.parametrize("together", [1, 5, 1000])
def test_wrong_bytes_are_found_wherever_they_are(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, chunk: int, together: int
) -> None:
    monkeypatch.setattr(verify, "_CHUNK", chunk)
    monkeypatch.setattr(verify, "_TOGETHER", together)
    parts = _parts(files, chunk + together)
    asked = [(n, part, _hash(part)) for n, part in enumerate(parts)]
    assert list(differing(asked)) == []
    victim = files[0]
    data = bytearray(victim.read_bytes())
    wrong = next(at for path, at, size in parts if path == victim and size)
    data[wrong] ^= 1
    victim.write_bytes(data)
    held = {
        n for n, (path, at, size) in enumerate(parts) if path == victim and at <= wrong < at + size
    }
    assert set(differing(asked)) == held


def test_what_is_short_or_missing_differs(files: list[Path], tmp_path: Path) -> None:
    parts = [(files[0], 0, 100), (files[0], 100, 9_900), (files[1], 9_000, 1_000)]
    asked = [(n, part, _hash(part)) for n, part in enumerate(parts)]
    os.truncate(files[0], 9_999)
    assert set(differing(asked)) == {1}
    os.truncate(files[0], 0)
    assert set(differing(asked)) == {0, 1}
    files[1].unlink()
    assert set(differing(asked)) == {0, 1, 2}
    link = tmp_path / "link"
    link.symlink_to(files[0])
    empty = (link, 0, 0)
    assert list(differing([("linked", empty, _hash(empty))])) == ["linked"]


def test_parts_side_by_side_are_read_together(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    real = os.preadv

    def counted(*arguments: object) -> int:
        nonlocal reads
        reads += 1
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", counted)
    parts = [(path, at, 100) for at in range(9_900, -1, -100) for path in files]
    assert list(differing((n, part, _hash(part)) for n, part in enumerate(parts))) == []
    assert reads == len(files)
