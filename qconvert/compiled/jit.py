"""numba's decorators, typed, and what compiling costs paid once.

A loop is compiled for one signature at its first call, or loaded from where an earlier process left
it: while one process compiles, others that want the same loop wait for it. Arrays are in C order and
may lie at any address; results are never read only.

Integers of numba become 64 bits wide with every operation, and a loop with such in it fills a
quarter of a vector: `np.int32(...)` stands around each. No fast math anywhere: it changes bits.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

_ITEMS = {
    "i1": numba.int8, "u1": numba.uint8, "u2": numba.uint16, "i4": numba.int32, "u4": numba.uint32,
    "f4": numba.float32, "f8": numba.float64,
}  # fmt: skip
_ALL: list[_Lazy] = []
_SCALARS = {
    "int": numba.int64, "float": numba.float32, "double": numba.float64, "bool": numba.boolean,
}  # fmt: skip


def inner(function: F) -> F:
    """A function of one row, which LLVM makes vectors of; it becomes part of the loops that call it."""
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    kept: F = made
    return kept


def loop(*signature: str) -> Callable[[F], F]:
    """A loop that answers whether it made its results. An argument is written `u2[2]`, an array of two
    dimensions, `ru2[2]`, one that is only read, or `int`, `float`, `double`,
    `bool`."""

    def decorate(function: F) -> F:
        made: Any = _Lazy(function, signature)
        _ALL.append(made)
        kept: F = made
        return kept

    return decorate


def load_kept() -> None:
    """Load all loops that an earlier process left on disk."""
    for one in _ALL:
        if one.kept:
            _ = one.made


class _Lazy:
    """Compiled when first called."""

    def __init__(self, function: Callable[..., Any], signature: tuple[str, ...]) -> None:
        self.plain, self._signature = function, signature
        self._made: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.made(*args)

    @property
    def made(self) -> Any:
        """numba's dispatcher, with its one signature compiled."""
        if self._made is None:
            types = numba.boolean(*map(_type, self._signature))
            folder, keep = self._folder, self._keep
            # Sixteen workers that load what is there in turn took 5 s; who finds none waits for whoever
            # compiles it.
            lock = folder / f"{self.plain.__name__}.lock" if keep and not self.kept else None
            with _alone(lock):
                self._made = numba.njit(types, nogil=True, error_model="numpy", cache=keep)(
                    self.plain
                )
        return self._made

    @property
    def kept(self) -> bool:
        """Whether an earlier process left it on disk."""
        version = f"py{sys.version_info.major}{sys.version_info.minor}"
        return self._keep and any(self._folder.rglob(f"*.{self.plain.__name__}-*.{version}.nbi"))

    @property
    def _folder(self) -> Path:
        return Path(vars(numba.config)["CACHE_DIR"])

    @property
    def _keep(self) -> bool:
        """What a test made of other lines is in no file."""
        there = Path(self.plain.__code__.co_filename).is_file()
        return bool(vars(numba.config)["CACHE_DIR"]) and there


def _type(text: str) -> Any:
    if text in _SCALARS:
        return _SCALARS[text]
    item, _, dimensions = text.removesuffix("]").partition("[")
    return numba.types.Array(
        _ITEMS[item.removeprefix("r")], int(dimensions), "C", readonly=item.startswith("r"),
        aligned=False,
    )  # fmt: skip


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
