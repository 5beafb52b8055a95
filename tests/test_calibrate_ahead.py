"""What a calibration on a GPU does beside computing: matrices read ahead, states written behind, codes
packed apart; and FP8 decoded as formats/fp8/decode.py decodes it."""

from __future__ import annotations

import json
import threading
import time
import types
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.calibrate import work_dir
from qconvert.calibrate.activation_store import InFiles
from qconvert.calibrate.background_writer import BackgroundWriter, WrittenBehind
from qconvert.calibrate.packing import run_in_thread
from qconvert.calibrate.reading import Fetched, ReadAhead, decode
from qconvert.calibrate.work_dir import CalibrationDir
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RunError
from qconvert.core.graph import Buffer
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.run.work.files import Files


class _Room:
    """Bytes that are read and not taken."""

    def __init__(self) -> None:
        self.held = self.most = 0
        self.lock = threading.Lock()

    def read(self, number: int, size: int) -> int:
        with self.lock:
            self.held += size
            self.most = max(self.most, self.held)
        return number


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
@settings(max_examples=25, deadline=None)
def test_reads_in_order_within_its_room(sizes: list[int], room: int) -> None:
    held = _Room()
    order = [(f"m{n}", size, partial(held.read, n, size)) for n, size in enumerate(sizes)]
    ahead = ReadAhead(order, room)
    ahead.begin()
    for number, size in enumerate(sizes):
        assert ahead.take("another") is None
        assert ahead.take(f"m{number}") == number
        with held.lock:
            held.held -= size
    assert ahead.take("m0") is None
    ahead.close()
    # One more than there is room for, and one that was let in as another was taken.
    assert held.most <= room + 2 * max(sizes, default=0)


def test_what_a_read_raises_is_raised_where_it_is_taken() -> None:
    def broken() -> int:
        raise OSError("the disk is gone")

    ahead = ReadAhead([("a", 1, lambda: 1), ("b", 1, broken)], 10)
    ahead.begin()
    assert ahead.take("a") == 1
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.take("b")
    ahead.close()


def test_behind_does_things_in_order_and_stops_at_a_failure() -> None:
    done: list[int] = []
    behind = BackgroundWriter()

    def fail() -> None:
        raise OSError("no space left")

    for number in range(50):
        behind.later(partial(done.append, number))
    behind.wait()
    assert done == list(range(50))
    behind.later(fail)
    behind.later(partial(done.append, 50))
    with pytest.raises(OSError, match="no space left"):
        behind.wait()
    behind.close()
    assert done == list(range(50))


def test_a_stream_apart_waits_where_it_is_told_to() -> None:
    """What follows an item that is waited for is not begun before that is worked on."""
    seen: list[str] = []

    def stream() -> Generator[int]:
        for number in range(12):
            seen.append(f"made {number}")
            yield number

    for number in run_in_thread(stream(), 3, lambda item: item % 4 == 3):
        if number % 4 == 3:
            assert f"made {number + 1}" not in seen
        seen.append(f"took {number}")
    assert [word for word in seen if word.startswith("took")] == [f"took {n}" for n in range(12)]


def test_a_stream_apart_raises_and_closes() -> None:
    closed = threading.Event()

    def stream() -> Generator[int]:
        try:
            yield 1
            raise ValueError("broken")
        finally:
            closed.set()

    found = run_in_thread(stream(), 2, lambda _: False)
    assert next(found) == 1
    with pytest.raises(ValueError, match="broken"):
        next(found)
    assert closed.is_set()
    closed.clear()
    early = run_in_thread(stream(), 2, lambda _: True)
    assert next(early) == 1
    early.close()
    assert closed.is_set()


@pytest.mark.parametrize("scales", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(("shape", "block"), [((130, 200), (128, 128)), ((6, 40), (1, 40))])
def test_fp8_is_decoded_to_the_bits_of_the_op(
    scales: str, shape: tuple[int, int], block: tuple[int, int], tmp_path: Path
) -> None:
    """Every code that is a number, under scales from tiny to large."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    rows, columns = shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    scale = torch.from_numpy(random.uniform(1e-4, 4, grid).astype(np.float32))
    scale = scale.to({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[scales])
    op = DequantFp8(block)
    ins = [
        Buffer(TensorType("F8_E4M3", shape), memoryview(codes.tobytes())),
        Buffer(TensorType(scales, grid), memoryview(scale.view(torch.uint8).numpy().tobytes())),
    ]
    made = bytearray(2 * rows * columns)
    types = [one.type for one in ins]
    scratch = memoryview(bytearray(op.scratch(*types)))
    op.run(ins, [Buffer(TensorType("BF16", shape), memoryview(made))], scratch)
    there = torch.empty(shape, dtype=torch.bfloat16)
    data = torch.from_numpy(codes.reshape(-1)).view(torch.float8_e4m3fn)
    decode(Fetched(data, scale, block, []), there)
    assert there.view(torch.uint8).numpy().tobytes() == bytes(made)


class _Remembered(WrittenBehind):
    """What is remembered is kept."""

    def sync(self) -> None:
        assert self.file is not None
        super().sync()


@pytest.mark.parametrize("paired", [False, True])
def test_states_are_kept_after_some_seconds_and_where_a_run_ends(
    paired: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(work_dir, "WrittenBehind", _Remembered)
    # No accelerator is there to lock memory for.
    locks = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: locks)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    behind = BackgroundWriter()

    def opened() -> CalibrationDir:
        return CalibrationDir(tmp_path, "key", 3, 2, Files(), paired, "cpu", behind)

    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    def of(layer: int) -> set[str]:
        plain = {f"hidden.{layer}.plain.0.rows"} if paired else set()
        return {"state.json", f"hidden.{layer}.0.rows", *plain}

    kept = opened()
    assert kept.layer() is None
    assert kept.due()
    states = kept.states(0, new=True)
    kept.remember(0, states)
    # Seconds at which layers end: those within 20 of the last that was kept are not.
    for layer, (end, due) in enumerate([(2, False), (19, False), (21, True), (23, False)], 1):
        now[0] = end
        assert kept.due() == due
        following = kept.states(layer, new=True, before=states, keeps=due)
        following.write(0, torch.full((3, 2), layer, dtype=torch.bfloat16))
        if due:
            kept.remember(layer, following)
        kept.let_go(states)
        kept.flush()
        states = following
        assert names() == of(3 if layer >= 3 else 0)
    # The run goes on where it was kept, unless it is told to keep what it has.
    assert opened().layer() == 3
    kept.keep(4, states)
    kept.flush()
    assert names() == of(4)
    again = opened()
    assert again.layer() == 4
    for one in again.states(4, new=False).all:
        assert isinstance(one, _Remembered)
        assert one.rows.eq(4).all()
    assert again.due(), "nothing was kept by this run"
    kept.let_go(states)
    behind.close()


@pytest.mark.parametrize(
    "cuts", [None, [], [[0, 2]], [[0, 4]], [[1, 3]], [[0, 2], [1, 3]], [[0, True], [1, 3]], [[0]]]
)
def test_ranges_that_are_not_of_all_tokens_are_refused(cuts: Any, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"key": "key", "layer": 1, "cuts": cuts}))
    with pytest.raises(RunError, match="expected ranges of 3 tokens"):
        CalibrationDir(tmp_path, "key", 3, 2, Files()).layer()


def test_what_several_processes_wrote_is_read_by_another_number(tmp_path: Path) -> None:
    rows = torch.arange(22, dtype=torch.bfloat16).view(11, 2)
    cuts = [(0, 4), (4, 4), (4, 11)]
    for own in cuts:
        files = InFiles(tmp_path / "hidden", cuts, own, 2, torch.bfloat16, Files())
        files.write(own[0], rows[slice(*own)])
        files.sync()
        files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hidden.0.rows", "hidden.4.rows"]
    again = InFiles(tmp_path / "hidden", cuts, None, 2, torch.bfloat16, Files())
    for start, stop in ((0, 11), (0, 4), (2, 6), (4, 11), (5, 9)):
        assert torch.equal(again.read(start, stop), rows[start:stop])
    again.close()
