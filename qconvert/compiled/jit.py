"""Loops, typed, and what compiling them costs paid once.

A loop is compiled by numba for one signature at its first call, or loaded from where an earlier process
left it, which takes no numba (native.py): while one process compiles, others that want the same loop
wait for it. Within a loop arrays are in C order and may lie at any address; results are never read only.
Callers need not see to that: an array in another order (a transposed or strided view) is copied, and a
loop declines what it is not typed for.

Integers of numba become 64 bits wide with every operation, and a loop with such in it fills a
quarter of a vector: `np.int32(...)` stands around each. No fast math anywhere: it changes bits.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from qconvert.compiled import native
from qconvert.compiled.choice import cache_folder, numba_or_none

F = TypeVar("F", bound=Callable[..., Any])

_ALL: list[_Lazy] = []


def inner(function: F) -> F:
    """A function of one row, which LLVM makes vectors of; it becomes part of the loops that call it."""
    made: Any = _Inner(function)
    kept: F = made
    return kept


class _Inner:
    """What numba, once it is there, takes for its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function

    def __call__(self, *args: Any) -> Any:
        return self.plain(*args)

    @property
    def _numba_type_(self) -> Any:
        """What numba asks an object for that it does not know."""
        return self._made._numba_type_

    @cached_property
    def _made(self) -> Any:
        import numba

        return numba.njit(nogil=True, error_model="numpy")(self.plain)


def loop(*signature: str) -> Callable[[F], F]:
    """A loop that answers whether it made its results, of arguments as native.Argument has them."""

    def decorate(function: F) -> F:
        made: Any = _Lazy(function, signature)
        _ALL.append(made)
        kept: F = made
        return kept

    return decorate


def load_kept() -> None:
    """Load all loops that an earlier process left on disk."""
    for one in _ALL:
        one.load()


class _Lazy:
    """Compiled when first called."""

    def __init__(self, function: Callable[..., Any], signature: tuple[str, ...]) -> None:
        self.plain, self._signature = function, signature
        self.arguments = tuple(map(native.Argument, signature))
        self._made: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> bool:
        """Whether the loop made its results. The one way in: whatever arrays a caller has, the loop gets
        those that it is typed for, or declines."""
        given = [one.fitted(value) for one, value in zip(self.arguments, args, strict=True)]
        if any(value is None for value in given):
            return False
        answer = bool(self.made(*given))
        for one, value, copy in zip(self.arguments, args, given, strict=True):
            if copy is not value and not one.read_only:
                value[...] = copy
        return answer

    @property
    def made(self) -> Callable[..., Any]:
        """What runs it, compiled now unless an earlier process did so."""
        if self._made is None and not self.load():
            # Sixteen workers that load what is there in turn took 5 s; who finds none waits for whoever
            # compiles it.
            folder = self._folder
            lock = None if folder is None else folder / f"{self.plain.__name__}.lock"
            with _alone(lock):
                if not self.load():
                    self._made = self._native(compiled=True) or self._by_numba
        assert self._made is not None
        return self._made

    def load(self) -> bool:
        """Load it, if an earlier process left it on disk. Returns whether it is loaded."""
        if self._made is None:
            self._made = self._native(compiled=False)
        if self._made is None and self._kept_by_numba and numba_or_none() is not None:
            self._made = self._by_numba
        return self._made is not None

    def cache_clear(self) -> None:
        """Forget what was loaded: it, or what it calls, has other lines now."""
        self._made = None
        self.__dict__.pop("_by_numba", None)

    def _native(self, *, compiled: bool) -> Callable[..., Any] | None:
        """The loop as object code: as an earlier process left it, or `compiled` now and left for others.
        None: it is not there, or it cannot be made, and numba is to run the loop."""
        folder = self._folder
        name = f"{self.plain.__module__}.{self.plain.__name__}"
        at = None if folder is None else native.place(folder, name, self._signature)
        if at is None:
            return None
        code = native.kept(at)
        if compiled and code is None:
            code = self._object_code()
            if code is not None:
                native.keep(at, code)
        if code is None:
            return None
        return native.load(name, self._signature, code, lambda *args: self._by_numba(*args))

    def _object_code(self) -> bytes | None:
        if numba_or_none() is None:
            return None
        from qconvert.compiled import emit

        options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        try:
            (result,) = self._njit(**options).overloads.values()
            return emit.object_code(result, self.arguments)
        # A numba that has other names, and whatever LLVM says: numba runs it, as it always can.
        except (emit.NotNative, AttributeError, ImportError, RuntimeError, TypeError, ValueError):
            return None

    @cached_property
    def _by_numba(self) -> Callable[..., Any]:
        """numba's dispatcher, with its one signature compiled, or what declines where numba cannot be
        imported. Raises RunError where it was asked for."""
        if numba_or_none() is None:
            return lambda *_: False
        made: Callable[..., Any] = self._njit(cache=self._folder is not None)
        return made

    def _njit(self, **options: bool) -> Any:
        import numba

        njit: Any = numba.njit  # its annotations leave out options that it has
        types = numba.boolean(*map(_type, self._signature))
        return njit(types, nogil=True, error_model="numpy", **options)(self.plain)

    @property
    def _kept_by_numba(self) -> bool:
        version = f"py{sys.version_info.major}{sys.version_info.minor}"
        pattern = f"*.{self.plain.__name__}-*.{version}.nbi"
        return self._folder is not None and any(self._folder.rglob(pattern))

    @property
    def _folder(self) -> Path | None:
        """Where it is kept. What a test made of other lines is in no file."""
        there = all(Path(one.__code__.co_filename).is_file() for one in _functions(self.plain))
        return cache_folder() if there else None


def _functions(function: Any) -> Iterator[FunctionType]:
    """A function, and all that become part of it."""
    yield function
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, _Inner):
            yield from _functions(called.plain)


def _type(text: str) -> Any:
    import numba

    scalars = {
        "int": numba.int64, "float": numba.float32, "double": numba.float64, "bool": numba.boolean,
    }  # fmt: skip
    if text in scalars:
        return scalars[text]
    items = {
        "i1": numba.int8, "u1": numba.uint8, "u2": numba.uint16, "i4": numba.int32,
        "u4": numba.uint32, "f4": numba.float32, "f8": numba.float64,
    }  # fmt: skip
    one = native.Argument(text)
    return numba.types.Array(
        items[one.item], one.dimensions, "C", readonly=one.read_only, aligned=False
    )


@contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """One process at a time; where a file system has no locks, each for itself: what numba keeps it
    puts in place by renaming."""
    if lock is None:
        yield
        return
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
