"""Loops as object code: what their files hold and refuse, what calls refuse, and numba instead of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from math import ldexp
from pathlib import Path
from typing import Any

import both_forms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.compiled import choice as deciding
from qconvert.compiled import jit, native
from qconvert.compiled.native import Argument, Native

pytest.importorskip("numba")

from qconvert.compiled import emit
from qconvert.compiled.jit import inner, loop

LOOP = "tests.doubled"
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


def only(folder: Path) -> Path:
    (found,) = folder.glob("*.o")
    return found


# --- Both forms ----------------------------------------------------------------------------------


def test_native_and_numba_make_the_same(folder: Path) -> None:
    assert isinstance(all_kinds.made, Native)
    assert call(all_kinds) == call(all_kinds._by_numba) == expected()


@given(st.integers(0, 9), st.integers(0, 40))
def test_of_any_shape(rows: int, columns: int) -> None:
    """Scratch arrays of no bytes, too."""
    assert isinstance(all_kinds.made, Native)
    assert call(all_kinds, rows, columns) == expected(rows, columns)


def test_scalars_are_taken_as_numba_takes_them(folder: Path) -> None:
    values, out = np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.uint16)
    for yes in (True, False, np.True_, 1, 0):
        for more, short in ((np.int32(3), 1e60), (-1, float("nan")), (True, np.float64(1 / 3))):
            found = []
            for form in (all_kinds.made, all_kinds._by_numba):
                seen = np.zeros(3)
                with np.errstate(over="ignore"):
                    answer = form(values, more, short, np.float32(0.5), yes, out, seen)
                found.append((answer, seen.tobytes(), out.tobytes()))
            assert found[0] == found[1]


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, np.zeros((1, 1), np.int16), r"argument 1: expected an array u2\[2\] .*, found i2\[2\]"),
        (0, np.zeros((1, 1), ">u2"), r"argument 1: .*, found >u2\[2\]"),
        (0, np.zeros(1, np.uint16), r"argument 1: .*, found u2\[1\]"),
        (0, np.zeros((4, 4), np.uint16)[:, ::2], r"argument 1: .*, found u2\[2\] not in C order"),
        (0, None, "argument 1: .*, found 'NoneType'"),
        (1, "7", "argument 2: .*str"),
        (1, 1.5, "argument 2: .*float"),
        (2, None, "argument 3: .*NoneType"),
        (5, np.broadcast_to(np.uint16(1), (1, 1)), "argument 6: .* written, found .*, read only"),
        (None, None, "expected 7 arguments, found 6"),
    ],
)
def test_what_it_does_not_take(folder: Path, at: int | None, value: Any, says: str) -> None:
    """numba's dispatcher refuses these, too; object code would read what is not there. A caller gets an
    array in C order made of its own, or is declined."""
    out = np.zeros((1, 1), np.uint16)
    args: list[Any] = [out, 7, 0.5, 0.5, True, out, np.zeros(3)]
    if at is None:
        args.pop()
    else:
        args[at] = value
    with pytest.raises(TypeError, match=says):
        all_kinds.made(*args)


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


def test_an_error_within_a_loop_is_numbas_to_tell() -> None:
    """Object code says only that there was one."""
    returned = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p)(lambda slots: -1)
    address = ctypes.cast(returned, ctypes.c_void_p).value

    def again(*args: Any) -> bool:
        raise MemoryError(f"of {args}")

    assert address is not None
    with pytest.raises(MemoryError, match="of \\(3,\\)"):
        Native("x", [Argument("int")], address, returned, again)(3)


# --- Files ---------------------------------------------------------------------------------------


def _linked(file: Path) -> None:
    file.symlink_to(file.rename(file.with_suffix(".x")))


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "cut within the header": lambda file: file.write_bytes(file.read_bytes()[:20]),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "one bit": lambda file: file.write_bytes(_turned(file.read_bytes(), -100)),
    "of another key": lambda file: file.write_bytes(_turned(file.read_bytes(), 20)),
    "of another kind": lambda file: file.write_bytes(b"\x7fELF" + bytes(5000)),
    "that others can write": lambda file: file.chmod(0o622),
    "a link": _linked,
    "a pipe": _pipe,
}


def _turned(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_file_that_is_not_whole_is_as_good_as_none(damage: str, tmp_path: Path) -> None:
    at = native.Place(tmp_path / "x.o", bytes(range(16)))
    native.keep(at, bytes(5000))
    assert native.kept(at) == bytes(5000)
    _DAMAGES[damage](at.path)
    assert native.kept(at) is None
    native.keep(at, bytes(6000))
    assert native.kept(at) == bytes(6000)


def test_a_damaged_loop_is_compiled_anew(folder: Path) -> None:
    assert call(all_kinds) == expected()
    at = native.place(folder, f"{__name__}._all_kinds", SIGNATURE)
    assert at is not None
    assert at.path == only(folder)
    _DAMAGES["one bit"](at.path)
    all_kinds.cache_clear()
    assert not all_kinds.load()
    assert call(all_kinds) == expected()
    assert isinstance(all_kinds.made, Native)
    assert native.kept(at) is not None
    all_kinds.cache_clear()
    assert all_kinds.load()


def test_whole_files_that_are_no_object_code_are_not_loaded(folder: Path) -> None:
    """Their key and checksum are right: LLVM says no, or does not find the loop in it. numba runs it,
    for a file that was made again would be no better."""
    assert isinstance(all_kinds.made, Native)
    at = native.place(folder, f"{__name__}._all_kinds", SIGNATURE)
    assert at is not None
    for code in (b"no object code", _missing_symbol(), _no_loop()):
        native.keep(at, code)
        assert native.kept(at) == code
        assert native.load(LOOP, SIGNATURE, code, all_kinds) is None
        all_kinds.cache_clear()
        assert call(all_kinds) == expected()
        assert not isinstance(all_kinds.made, Native)


def _object(text: str) -> bytes:
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(text)
    code: bytes = emit._machine().emit_object(module)
    return code


def _missing_symbol() -> bytes:
    text = f"declare i32 @no_such_thing(ptr)\ndefine i32 @{native.ENTRY}(ptr %x) {{\n"
    return _object(text + "  %y = call i32 @no_such_thing(ptr %x)\n  ret i32 %y\n}\n")


def _no_loop() -> bytes:
    return _object("define i32 @other() {\n  ret i32 1\n}\n")


def test_keeping_leaves_nothing_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = native.Place(folder / "x.o", bytes(16))
    native.keep(at, b"code")
    assert native.kept(at) == b"code"
    assert at.path.stat().st_mode & 0o077 == 0

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    native.keep(at, b"other")
    assert [*folder.iterdir()] == [at.path]
    assert native.kept(at) == b"code"
    native.keep(native.Place(folder / "none" / "x.o", bytes(16)), b"code")  # no folder: no error


def test_a_key_is_of_sources_loop_signature_versions_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys() -> set[Any]:
        native.environment.cache_clear()
        places = [
            native.place(tmp_path / folder, name, signature)
            for folder in ("loops-1", "loops-2")
            for name in ("a.b", "a.c")
            for signature in (("int",), ("int", "bool"))
        ]
        return {(place.path.name, place.key) for place in places if place is not None}

    try:
        found = keys()
        assert len(found) == 8
        monkeypatch.setenv("NUMBA_NUM_THREADS", "2")
        assert keys() == found
        changes: tuple[Callable[[], None], ...] = (
            lambda: monkeypatch.setenv("NUMBA_OPT", "1"),
            lambda: monkeypatch.setattr("qconvert.__version__", "9"),
            lambda: monkeypatch.setattr("llvmlite.__version__", "9"),
            lambda: monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "z80"),
            lambda: monkeypatch.setattr(native, "_numba_version", lambda: "9"),
        )
        for change in changes:
            change()
            now = keys()
            assert len(now) == 8
            assert not now & found
            found |= now
        monkeypatch.setattr(native, "_numba_version", lambda: None)
        assert keys() == set()
    finally:
        native.environment.cache_clear()


def test_other_lines_are_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop, of what it calls, and of what compiles and calls it."""
    files = ("compiled/native.py", "ops/compiled/loops/bits.py", "validators/loops/sums.py")
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


# --- Without object code -------------------------------------------------------------------------


def test_a_numba_that_is_laid_out_otherwise_runs_loops_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compiled once for that, and then loaded as numba keeps it."""
    monkeypatch.setattr(emit, "_ARRAY", ("data", "shape"))
    assert call(all_kinds) == expected()
    assert not isinstance(all_kinds.made, Native)
    assert [*folder.glob("*.o")] == []
    assert [*folder.rglob("*.nbc")] != []
    all_kinds.cache_clear()
    monkeypatch.setattr(type(all_kinds), "_object_code", None)
    assert all_kinds.load()
    assert call(all_kinds) == expected()


def test_without_llvmlite_numba_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "environment", lambda: None)
    assert native.place(folder, "x", ()) is None
    assert not native.any_kept(folder, "x")
    assert call(all_kinds) == expected()
    assert not isinstance(all_kinds.made, Native)


def test_no_object_code_of_what_needs_more_of_numba() -> None:
    import numba

    def scaled(values: Any) -> bool:
        values[0] = ldexp(values[0], 2)
        return True

    def result(function: Any) -> Any:
        array = numba.types.Array(numba.float64, 1, "C", aligned=False)
        (found,) = numba.njit(numba.boolean(array))(function).overloads.values()
        return found

    made = result(scaled)
    with pytest.raises(emit.NotNative, match="needs numba_ldexp of numba's runtime"):
        emit.object_code(made, [Argument("f8[1]")])
    with pytest.raises(emit.NotNative, match=r"numba passes arguments as .*; expected"):
        emit.object_code(made, [Argument("f8[2]")])
