"""Loops, typed, and compiled by numba at their first call, or loaded from its cache.

Within a loop arrays are in C order and may lie at any address; results are never read only. Callers need
not see to that: an array in another order (a transposed or strided view) is copied, and a loop declines
what it is not typed for.

Integers of numba become 64 bits wide with every operation, and a loop with such in it fills a
quarter of a vector: `np.int32(...)` stands around each. No fast math anywhere: it changes bits.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from qconvert.compiled.choice import cache_folder, numba_or_none

F = TypeVar("F", bound=Callable[..., Any])

_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": index, "float": float, "double": float, "bool": bool,
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """`u2[2]`, an array in C order of two dimensions, `ru2[2]`, one that is only read, or a scalar:
    `int`, `float`, `double`, `bool`."""

    text: str

    @property
    def item(self) -> str:
        """numpy's name of an array's entries."""
        return self.text.partition("[")[0].removeprefix("r")

    @property
    def dimensions(self) -> int:
        return int(self.text.partition("[")[2].removesuffix("]"))

    @property
    def read_only(self) -> bool:
        return self.text.startswith("r") or self.text in _SCALARS

    @cached_property
    def fitted(self) -> Callable[[Any], Any]:
        """Makes of a value what a loop takes: itself, of an array in another order a copy in C order,
        None of one of another type or number of dimensions, or that cannot be written. Raises TypeError
        for a scalar of another kind, which numba would cast."""
        if self.text in _SCALARS:
            return _SCALARS[self.text]
        import numpy as np

        item, dimensions, written = np.dtype(self.item), self.dimensions, not self.read_only

        def fit(value: Any) -> Any:
            if isinstance(value, np.ndarray) and value.dtype == item and value.ndim == dimensions:
                flags = value.flags
                if flags.writeable or not written:
                    return value if flags.c_contiguous else value.copy(order="C")
            return None

        return fit

    def refused(self, value: Any) -> str:
        """Return what is wrong with an array that a loop declines."""
        written = "" if self.read_only else " that can be written"
        dtype = getattr(value, "dtype", None)
        found = repr(type(value).__name__)
        if dtype is not None:
            read_only = "" if value.flags.writeable else ", read only"
            found = f"{dtype.str.lstrip('<|')}[{value.ndim}]{read_only}"
        return f"expected an array {self.item}[{self.dimensions}]{written}, found {found}"

    @property
    def numba_type(self) -> Any:
        import numba
        import numpy as np

        scalars = {
            "int": numba.int64, "float": numba.float32, "double": numba.float64,
            "bool": numba.boolean,
        }  # fmt: skip
        if self.text in scalars:
            return scalars[self.text]
        item = numba.from_dtype(np.dtype(self.item))
        return numba.types.Array(item, self.dimensions, "C", readonly=self.read_only, aligned=False)


def inner(function: F) -> F:
    """A function of one row, which LLVM makes vectors of; it becomes part of the loops that call it."""
    made: Any = _Inner(function)
    kept: F = made
    return kept


class _Inner:
    """Attributes that numba, once it is there, takes for its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.plain = function

    def __call__(self, *args: Any) -> Any:
        return self.plain(*args)

    @property
    def _numba_type_(self) -> Any:
        """Return what numba asks an object for that it does not know."""
        return self._made._numba_type_

    @cached_property
    def _made(self) -> Any:
        import numba

        return numba.njit(nogil=True, error_model="numpy")(self.plain)


def loop(*signature: str) -> Callable[[F], F]:
    """A loop that answers whether it made its results, of arguments as Argument has them."""

    def decorate(function: F) -> F:
        made: Any = _Lazy(function, signature)
        kept: F = made
        return kept

    return decorate


class _Lazy:
    """Compiled when first called."""

    def __init__(self, function: Callable[..., Any], signature: tuple[str, ...]) -> None:
        self.plain = function
        self.arguments = tuple(map(Argument, signature))

    def __call__(self, *args: Any) -> bool:
        """Return whether the loop made its results. The one way in: whatever arrays a caller has, the
        loop gets those that it is typed for, or declines."""
        given = [one.fitted(value) for one, value in zip(self.arguments, args, strict=True)]
        if any(value is None for value in given):
            return False
        answer = bool(self.made(*given))
        for one, value, copy in zip(self.arguments, args, given, strict=True):
            if copy is not value and not one.read_only:
                value[...] = copy
        return answer

    @cached_property
    def made(self) -> Any:
        """numba's dispatcher with its one signature, compiled now unless an earlier process did so."""
        folder = self._folder
        if folder is not None:
            name = self.plain.__name__
            try:
                with ExitStack() as compiling:
                    # Workers that want it at once wait for one that compiles it: 1.5 CPU s each.
                    if not any(folder.rglob(f"*.{name}-*.nbi")):
                        lock = compiling.enter_context(open(folder / f"{name}.lock", "wb"))
                        with suppress(OSError):  # a file system without locks
                            fcntl.flock(lock, fcntl.LOCK_EX)
                    return self._njit(cache=True)
            # What is kept is damaged, or nothing can be written (a full disk): the next process keeps it
            # anew. A fault of the loop itself is met again below.
            except Exception:
                for file in folder.rglob(f"*.{name}-*.nb?"):
                    file.unlink(missing_ok=True)
        return self._njit(cache=False)

    def cache_clear(self) -> None:
        """Forget what was loaded: it, or what it calls, has other lines now."""
        self.__dict__.pop("made", None)

    def _njit(self, *, cache: bool) -> Any:
        numba: Any = numba_or_none()
        types = numba.boolean(*(one.numba_type for one in self.arguments))
        return numba.njit(types, nogil=True, error_model="numpy", cache=cache)(self.plain)

    @property
    def _folder(self) -> Path | None:
        """Return where it is kept. What a test made of other lines is in no file."""
        there = all(Path(one.__code__.co_filename).is_file() for one in _functions(self.plain))
        return cache_folder() if there else None


def _functions(function: Any) -> Iterator[FunctionType]:
    """A function, and all that become part of it."""
    yield function
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, _Inner):
            yield from _functions(called.plain)
