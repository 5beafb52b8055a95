"""Loops as numba compiles them: what calls take and decline, and what is kept from run to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import both_forms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.compiled import choice as deciding
from qconvert.compiled import jit

pytest.importorskip("numba")

from qconvert.compiled.jit import inner, loop

SIGNATURE = ("ru2[2]", "int", "float", "double", "bool", "u2[2]", "f8[1]")


@inner
def _row(row: Any, more: int, out: Any) -> None:
    for column in range(row.size):
        out[column] = np.uint16(row[column] * 2 + more)


def _all_kinds(
    values: Any, more: int, short: float, wide: float, yes: bool, out: Any, seen: Any
) -> bool:
    scratch = np.empty((values.shape[1], 3), np.uint8)
    flat = scratch.reshape(scratch.size)
    flat[:] = np.uint8(1)
    for row in range(values.shape[0]):
        _row(values[row], more, out[row])
    seen[0], seen[1], seen[2] = short, wide, flat.sum()
    return yes


all_kinds: Any = loop(*SIGNATURE)(_all_kinds)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of this test's own."""
    made = tmp_path / "loops-of-a-test"
    made.mkdir(mode=0o700)
    numba = deciding.numba_or_none()
    assert numba is not None
    monkeypatch.setattr(jit, "cache_folder", lambda: made)
    monkeypatch.setitem(vars(numba.config), "CACHE_DIR", str(made))
    all_kinds.cache_clear()
    yield made
    all_kinds.cache_clear()


def call(function: Callable[..., Any], rows: int = 3, columns: int = 5) -> tuple[Any, ...]:
    """Its answer, and what it made."""
    values = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    values.flags.writeable = False
    out, seen = np.zeros_like(values), np.zeros(3)
    answer = function(values, 7, np.float32(0.1), 0.1, True, out, seen)
    return answer, out.tobytes(), seen.tobytes()


def expected(rows: int = 3, columns: int = 5) -> tuple[Any, ...]:
    out = np.arange(rows * columns, dtype=np.uint16) * np.uint16(2) + np.uint16(7)
    return True, out.tobytes(), np.array([np.float32(0.1), 0.1, 3 * columns]).tobytes()


# --- Calls ---------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(0, 40))
def test_of_any_shape(rows: int, columns: int) -> None:
    """Scratch arrays of no bytes, too."""
    assert call(all_kinds, rows, columns) == expected(rows, columns)


@pytest.mark.parametrize(("at", "value"), [(1, "7"), (1, 1.5), (2, None), (2, "x")])
def test_scalars_of_another_kind_are_refused(at: int, value: Any) -> None:
    """numba would make 1 of 1.5."""
    out = np.zeros((1, 1), np.uint16)
    args: list[Any] = [out, 7, 0.5, 0.5, True, out, np.zeros(3)]
    args[at] = value
    with pytest.raises((TypeError, ValueError)):
        all_kinds(*args)


@pytest.mark.parametrize(
    "value",
    [np.zeros((1, 1), np.int16), np.zeros((1, 1), ">u2"), np.zeros(1, np.uint16), None],
    ids=["signed", "other byte order", "flat", "none"],
)
def test_what_a_loop_has_no_type_for_it_declines(value: Any) -> None:
    """And results that cannot be written: numpy's form answers, and a run goes on."""
    out = np.zeros((1, 1), np.uint16)
    call_it = both_forms.really_call
    assert not call_it(all_kinds, value, 7, 0.5, 0.5, True, out, np.zeros(3))
    assert not call_it(
        all_kinds, out, 7, 0.5, 0.5, True, np.broadcast_to(np.uint16(1), (1, 1)), np.zeros(3)
    )
    with pytest.raises(AssertionError, match="argument 1: expected an array"):
        all_kinds(value, 7, 0.5, 0.5, True, out, np.zeros(3))


_ORDERS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda given: np.ascontiguousarray(given.T).T,
    "every other column": lambda given: np.repeat(given, 2, axis=1)[:, ::2],
    "every other row": lambda given: np.repeat(given, 2, axis=0)[::2],
    "backwards": lambda given: np.ascontiguousarray(given[::-1])[::-1],
    "one row repeated": lambda given: np.broadcast_to(given[:1], given.shape),
    "at an odd address": lambda given: (
        np.frombuffer(bytearray(b"\0" + given.tobytes()), given.dtype, offset=1)
        if given.size
        else given.copy()
    ).reshape(given.shape),
}


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (3, 1), (0, 5), (3, 0)])
@pytest.mark.parametrize("order", _ORDERS)
def test_arrays_in_any_order_are_taken(order: str, shape: tuple[int, int]) -> None:
    """As arguments and, but for repeated ones, as results."""
    plain = np.arange(shape[0] * shape[1], dtype=np.uint16).reshape(shape)
    values = _ORDERS[order](plain)
    wanted = np.array(values) * np.uint16(2) + np.uint16(7)
    out = np.zeros_like(plain)
    if order != "one row repeated":
        out = _ORDERS[order](out)
    kept = values.tobytes()
    assert all_kinds(values, 7, 0.5, 0.5, True, out, np.zeros(3))
    assert np.array_equal(out, wanted)
    assert values.tobytes() == kept
    assert not all_kinds(values, 7, 0.5, 0.5, False, np.zeros_like(plain), np.zeros(3))


# --- Files ---------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*.nb?")}


_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "empty": lambda data: b"",
    "of another kind": lambda data: b"\x7fELF" + bytes(5000),
}


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("kind", [".nbi", ".nbc"])
def test_a_damaged_file_is_made_anew(damage: str, kind: str, folder: Path) -> None:
    """By the next process; this one compiles for itself."""
    assert call(all_kinds) == expected()
    files = _files(folder)
    assert {one.suffix for one in files} == {".nbi", ".nbc"}
    (hit,) = (one for one in files if one.suffix == kind)
    hit.write_bytes(_DAMAGES[damage](files[hit]))
    for left in ({}, files):
        all_kinds.cache_clear()
        assert call(all_kinds) == expected()
        assert _files(folder).keys() == left.keys()


def test_what_is_kept_is_loaded(folder: Path) -> None:
    assert call(all_kinds) == expected()
    files = _files(folder)
    all_kinds.cache_clear()
    assert call(all_kinds) == expected()
    assert [*all_kinds.made.stats.cache_hits.values()] == [1]
    assert _files(folder) == files


def test_a_full_disk_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert call(all_kinds) == expected()
    assert [one.suffix for one in folder.rglob("*") if one.is_file()] == [".lock"]


def test_other_lines_are_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop, of what it calls, and of what compiles and calls it."""
    files = ("compiled/jit.py", "ops/compiled/loops/bits.py", "validators/compiled_loops/judge.py")
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("1\n")
    monkeypatch.setattr(deciding, "__file__", str(tmp_path / "compiled" / "choice.py"))
    states = {deciding._state()}
    for file in files:
        (tmp_path / file).write_text("2\n")
        states.add(deciding._state())
    assert len(states) == 4


def test_lines_that_are_in_no_file_are_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a loop that calls such: its file would be of other lines."""
    made: dict[str, Any] = {}
    text = "def _row(row, more, out):\n    out[:] = np.uint16(3)\n"
    exec(compile(text, "<test>", "exec"), {"np": np}, made)
    monkeypatch.setitem(globals(), "_row", inner(made["_row"]))
    assert call(all_kinds)[1] == np.full(15, 3, np.uint16).tobytes()
    assert [*folder.iterdir()] == []
    monkeypatch.undo()
    all_kinds.cache_clear()
