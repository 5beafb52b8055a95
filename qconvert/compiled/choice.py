"""Choice of compiled loops for a run: the one place that decides, for ops and for validators.

QCONVERT_KERNELS says it outright (`numpy`, `numba`); `auto`, the default, takes loops where numba is
installed and the run is long enough to pay for compiling them once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from qconvert.core import own_process
from qconvert.core.errors import RunError
from qconvert.core.extras import is_installed, require
from qconvert.core.say import say

if TYPE_CHECKING:
    from pathlib import Path

_refused: list[str] = []  # why loops are not kept in each place that was tried

VARIABLE = "QCONVERT_KERNELS"
_CHOICES = ("auto", "numpy", "numba")

# What a run reads or writes of computed tensors, whichever is more, from which on `auto` takes loops. To
# import numba and load what was compiled before costs 0.55 s of CPU, once, in the process that forks
# workers, while the plan is made; to compile, in a machine's first run, 3 s and more. A GB saves 0.45 s
# (FP8 to BF16) to 1 s (BF16 to FP8 blocks).
ENOUGH_BYTES = 768 << 20
# What loops add to a process's memory: 60 MiB to load all of ops, 170 MiB to compile
# them all, of which a run needs two or three (tests/test_compiled.py).
LOOP_BYTES = 128 << 20

# Of the current folder, which may be a foreign model's: numba reads it when it is imported.
_NUMBA_SETTINGS = ".numba_config.yaml"

# Where loops stand, and what compiles them: with other lines they are compiled anew.
_SOURCES = ("compiled/*.py", "ops/compiled/loops/*.py", "validators/compiled_loops/*.py")


def wanted(nbytes: int, enough: int | None = None) -> bool:
    """Return whether a run over this many bytes should compute in compiled loops; `enough`
    (ENOUGH_BYTES) pay for them. Raises RunError for a choice that is none, or that this environment
    cannot follow."""
    asked = os.environ.get(VARIABLE) or "auto"
    if asked not in _CHOICES:
        raise RunError(f"{VARIABLE} is {asked!r}; expected one of {', '.join(_CHOICES)}")
    if asked == "numpy" or (
        asked == "auto" and nbytes < (ENOUGH_BYTES if enough is None else enough)
    ):
        return False
    if asked == "numba":
        require("fast", f"{VARIABLE} asks for numba (unset it, or install numba)", error=RunError)
    return is_installed("numba") and _place_told()


@cache
def _place_told() -> bool:
    """Once a command: where loops cannot be kept, each run compiles them again. Returns True."""
    if own_process.is_own() and cache_folder() is None:
        say(
            f"warning: compiled loops are not kept, and each run compiles them anew: {_refused[0]}",
            err=True,
        )
    return True


class Loops:
    """A package of compiled loops, and whether this process computes in them."""

    def __init__(self, package: str) -> None:
        self._package, self.on = package, False

    def use(self, on: bool) -> None:
        """Return what this process computes in from now on."""
        self.on = on

    def in_use(self) -> ModuleType | None:
        """The compiled loops, if this process is to use them."""
        return self._loops if self.on else None

    def load(self) -> None:
        """Do once what a process does before its first loop: forks of it need not. Raises RunError as
        `in_use` does."""
        if self._loops is not None:
            from numba.core.registry import cpu_target

            cpu_target.typing_context.refresh()
            cpu_target.target_context.refresh()

    @cached_property
    def _loops(self) -> ModuleType | None:
        """None where numba cannot be imported, and nobody asked for it. Raises RunError where
        QCONVERT_KERNELS does."""
        return None if numba_or_none() is None else import_module(self._package)


@cache
def numba_or_none() -> ModuleType | None:
    """numba, imported, which keeps what it compiles in our folder. None where it is there and cannot be
    imported (it refuses versions of numpy that it does not know). Raises RunError where QCONVERT_KERNELS
    asks for it."""
    try:
        if os.path.lexists(_NUMBA_SETTINGS):
            raise ImportError(
                f"it would take settings from {_NUMBA_SETTINGS} of the current folder"
            )
        import numba
    except ImportError as error:
        if os.environ.get(VARIABLE) == "numba":
            raise RunError(
                f"{VARIABLE} asks for numba, which cannot be imported: {error}; install the "
                "version that it names, start in another folder, or unset it"
            ) from error
        return None
    folder = cache_folder()
    if folder is not None:
        vars(numba.config)["CACHE_DIR"] = str(folder / _machine())
    return numba


def _machine() -> str:
    """numba's index of a loop lists code for each CPU and version, and is not locked: where machines
    share a folder each kind has an index of its own."""
    import llvmlite.binding as llvm
    import numba
    import xxhash

    features = llvm.get_host_cpu_features().flatten()
    parts = (numba.__version__, sys.version, llvm.get_host_cpu_name(), features)
    return xxhash.xxh3_64_hexdigest("\0".join(parts).encode())


@cache
def cache_folder() -> Path | None:
    """The folder of numba's cache, one for each state of the loops' sources: in the user's cache, else
    among temporary files, for this user alone (what lies there is loaded as code). None: neither can be
    used, and each process compiles for itself."""
    import tempfile
    from pathlib import Path

    name = f"loops-{_state()}"
    places = [Path(tempfile.gettempdir()) / f"qconvert-{os.getuid()}" / name]
    with suppress(RuntimeError):  # nobody knows this user's home
        places.insert(0, own_process.cache_root() / name)
    return next((place for place in places if _usable(place)), None)


def _state() -> str:
    """numba looks at the file of an outer function alone to see whether what it kept is current."""
    from pathlib import Path

    import xxhash

    digest = xxhash.xxh3_64()
    root = Path(__file__).parent.parent
    for file in sorted(file for pattern in _SOURCES for file in root.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _usable(folder: Path) -> bool:
    import tempfile

    try:
        own_process.make_private(folder)
        for made, forbidden in ((folder.parent, 0o022), (folder, 0o077)):
            seen = made.lstat()
            if seen.st_uid != os.getuid() or made.is_symlink():
                _refused.append(f"{made} is another user's, or a link; remove it")
                return False
            if seen.st_mode & forbidden:
                _refused.append(f"others may write to {made}; run chmod 700 {made}")
                return False
        if theirs := [one for one in folder.rglob("*") if one.lstat().st_uid != os.getuid()]:
            _refused.append(f"{theirs[0]} is another user's; remove it")
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        _refused.append(f"{folder}: cannot be written: {error.strerror or error}")
        return False
