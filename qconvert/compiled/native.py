"""Compiled loops as files of object code, which llvmlite loads and ctypes calls, without numba.

Importing numba and loading what it kept take a process .75 to .95 s of CPU, loading these files .06.
A file holds its key (of sources, signature, versions and CPU) and a checksum: one that is cut, damaged
or of something else is as good as none, and the loop is compiled anew. The checksum is no signature:
what lies in the folder is loaded as code, and `cache_folder` of choice.py takes only one that nobody
else can write to. A file must be this user's, too.

A loop takes one pointer, to slots of 8 bytes: of an array where numpy's array interface of it lies (the
C struct of `__array_struct__`: address, shape), of anything else the value. What numba's dispatcher
would refuse is refused here, before the call. ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import qconvert
from qconvert.core.errors import RunError
from qconvert.core.regular import open_regular

ENTRY = "qconvert_loop"  # what every file defines
# What a loop may ask of the process: scratch memory, and what LLVM makes of loops that fill or copy.
IMPORTS = ("malloc", "free", "memset", "memcpy", "memmove")
DECLINED, DONE = 0, 1  # all else that a loop returns is an error within it

_MAGIC = b"qconvert loop 1\n"
_HEADER = struct.Struct(f"<{len(_MAGIC)}s16s16s")  # key and checksum
_SCALARS = ("int", "float", "double", "bool")
# Settings of numba that change no code.
_NOT_CODE = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER"}


@dataclass(frozen=True)
class Argument:
    """`u2[2]`, an array in C order of two dimensions, `ru2[2]`, one that is only read, or a scalar:
    `int`, `float`, `double`, `bool`."""

    text: str

    @property
    def is_array(self) -> bool:
        return self.text not in _SCALARS

    @property
    def item(self) -> str:
        """numpy's name of an array's entries."""
        return self.text.partition("[")[0].removeprefix("r")

    @property
    def dimensions(self) -> int:
        return int(self.text.partition("[")[2].removesuffix("]"))

    @property
    def read_only(self) -> bool:
        return self.text.startswith("r")

    @cached_property
    def fitted(self) -> Callable[[Any], Any]:
        """Makes of a value what a loop takes: itself, of an array in another order a copy in C order,
        None of one of another type or number of dimensions, or that cannot be written."""
        if not self.is_array:
            return lambda value: value
        import numpy as np

        item, dimensions, written = np.dtype(self.item), self.dimensions, not self.read_only

        def fit(value: Any) -> Any:
            if isinstance(value, np.ndarray) and value.dtype == item and value.ndim == dimensions:
                flags = value.flags
                if flags.writeable or not written:
                    return value if flags.c_contiguous else value.copy(order="C")
            return None

        return fit

    def taker(self) -> Callable[[Any], Any]:
        """What makes a slot of a value, or raises TypeError."""
        if not self.is_array:
            return {"int": index, "bool": bool}.get(self.text, float)
        fitted = self.fitted

        def take(value: Any) -> Any:
            if value is not None and fitted(value) is value:
                return value.__array_struct__
            raise TypeError(self.refused(value))

        return take

    def refused(self, value: Any) -> str:
        """What is wrong with a value."""
        return f"expected {self._described()}, found {_found(value)}"

    def _described(self) -> str:
        what = f"an array {self.item}[{self.dimensions}] in C order"
        return what if self.read_only else f"{what} that can be written"


def _found(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return repr(type(value).__name__)
    kind = f"{dtype.str.lstrip('<|')}[{value.ndim}]"
    order = "" if value.flags.c_contiguous else " not in C order"
    return f"{kind}{order}{'' if value.flags.writeable else ', read only'}"


class Native:
    """A loop that was loaded."""

    def __init__(
        self, name: str, arguments: Sequence[Argument], address: int, code: object,
        again: Callable[..., Any],
    ) -> None:  # fmt: skip
        """`code` keeps the loop in memory. `again` is numba's form, which says what is wrong where the
        loop ends with an error."""
        self.name, self._code, self._again = name, code, again
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p)(address)
        self._takers = tuple(one.taker() for one in arguments)
        self._arrays = tuple(number for number, one in enumerate(arguments) if one.is_array)
        kinds = ("d" if one.text in ("float", "double") else "q" for one in arguments)
        self._pack = struct.Struct("=" + "".join(kinds)).pack
        self._pointer = _capsule_pointer()

    def __call__(self, *args: Any) -> bool:
        try:
            slots = [take(value) for take, value in zip(self._takers, args, strict=True)]
        except (TypeError, ValueError):
            raise self._refused(args) from None
        infos = tuple(slots)  # alive until the loop has ended
        for at in self._arrays:
            slots[at] = self._pointer(infos[at], None)
        said = self._call(self._pack(*slots))
        return bool(said) if said in (DECLINED, DONE) else bool(self._again(*args))

    def _refused(self, args: Sequence[Any]) -> TypeError:
        if len(args) != len(self._takers):
            takes = len(self._takers)
            return TypeError(f"{self.name}: expected {takes} arguments, found {len(args)}")
        for number, (take, value) in enumerate(zip(self._takers, args, strict=True), 1):
            try:
                take(value)
            except (TypeError, ValueError) as error:
                return TypeError(f"{self.name}, argument {number}: {error}")
        raise AssertionError("every argument is as expected")


@cache
def _capsule_pointer() -> Callable[[Any, None], int]:
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    made: Any = kind(("PyCapsule_GetPointer", ctypes.pythonapi))
    return made  # type: ignore[no-any-return]


# --- Files ---------------------------------------------------------------------------------------


@cache
def environment() -> str | None:
    """A digest of all that object code depends on beside sources: versions, numba's settings, the CPU.
    None: llvmlite or numba is not there."""
    try:
        import llvmlite
        import llvmlite.binding as llvm

        cpu = (llvm.get_process_triple(), llvm.get_host_cpu_name())
        features = llvm.get_host_cpu_features().flatten()
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("NUMBA_") and name not in _NOT_CODE
    )
    numba = _numba_version()
    if numba is None:
        return None
    parts = (
        qconvert.__version__, sys.implementation.cache_tag or "", sys.version, numba,
        llvmlite.__version__, *cpu, features, *settings,
    )  # fmt: skip
    return _digest(parts).hex()


def _digest(parts: Iterable[str]) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest("\0".join(parts).encode())


def _numba_version() -> str | None:
    """The text of its version and revision, without importing it (importlib.metadata takes 20 ms)."""
    from importlib.util import find_spec

    with suppress(ImportError, ValueError, OSError):
        found = find_spec("numba")
        if found is not None and found.origin is not None:
            return (Path(found.origin).parent / "_version.py").read_text(encoding="utf-8")
    return None


@dataclass(frozen=True)
class Place:
    """Where the object code of a loop lies, and what it must be of."""

    path: Path
    key: bytes


def place(folder: Path, name: str, signature: Sequence[str]) -> Place | None:
    """Of the loop of this full name, in the folder of the present sources. None: llvmlite or numba is
    not there."""
    where = environment()
    if where is None:
        return None
    return Place(folder / f"{name}-{where}.o", _digest((folder.name, where, name, *signature)))


def any_kept(folder: Path, package: str) -> bool:
    """Whether an earlier process left a loop of this package that this one can load."""
    where = environment()
    return where is not None and any(folder.glob(f"{package}.*-{where}.o"))


def keep(at: Place, code: bytes) -> None:
    """Leave object code for other processes. Two may do so at once; where the disk is full none does."""
    import tempfile

    import xxhash

    header = _HEADER.pack(_MAGIC, at.key, xxhash.xxh3_128_digest(code))
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=".loop-", dir=at.path.parent)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(header + code)
            os.replace(name, at.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def kept(at: Place) -> bytes | None:
    """The object code that an earlier process left; None where there is none, or it is not whole."""
    import xxhash

    try:
        descriptor = open_regular(at.path, follow=False, error=RunError)
    except (FileNotFoundError, RunError):
        return None
    with suppress(OSError), open(descriptor, "rb") as stream:
        seen = os.fstat(descriptor)
        if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
            return None
        data = stream.read()
        if len(data) > _HEADER.size:
            magic, key, checksum = _HEADER.unpack_from(data)
            code = data[_HEADER.size :]
            whole = xxhash.xxh3_128_digest(code) == checksum
            return code if whole and (magic, key) == (_MAGIC, at.key) else None
    return None


# --- Loading -------------------------------------------------------------------------------------


def load(
    name: str, signature: Sequence[str], code: bytes, again: Callable[..., Any]
) -> Native | None:
    """The loop of this object code; None where llvmlite does not load it."""
    try:
        import llvmlite.binding as llvm

        builder = llvm.JITLibraryBuilder().add_object_img(code).export_symbol(ENTRY)
        for symbol, address in _symbols().items():
            builder.import_symbol(symbol, address)
        made = builder.link(_linker(), f"{name}-{next(_numbers)}")
        address = made[ENTRY]
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    return Native(name, [*map(Argument, signature)], address, made, again) if address else None


_numbers = count()


@cache
def _linker() -> Any:
    """LLVM's linker of this process. Unlike MCJIT it says what is missing, and does not abort."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(suppress_errors=True)


@cache
def _symbols() -> dict[str, int]:
    own = ctypes.CDLL(None)
    found = {name: ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in IMPORTS}
    return {name: address for name, address in found.items() if address is not None}
