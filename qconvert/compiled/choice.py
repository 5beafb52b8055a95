"""Whether a run computes in compiled loops: the one place that decides, for ops and for validators.

QCONVERT_KERNELS says it outright (`numpy`, `numba`); `auto`, the default, takes loops where numba is
installed and the run is long enough to pay for compiling them once.
"""

from __future__ import annotations

import os
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
# load what was compiled before costs .08 s of CPU, once, in the process that forks workers, while the
# plan is made; to import numba and compile, in a machine's first run, 3 s and more. A GB saves .45 s
# (FP8 to BF16) to 1 s (BF16 to FP8 blocks).
ENOUGH_BYTES = 768 << 20
# What loops add to a process's memory: 8 MiB to load all of ops, 180 MiB to compile them all, of which a
# run needs two or three (tests/test_compiled.py).
LOOP_BYTES = 128 << 20

# Of the current folder, which may be a foreign model's: numba reads it when it is imported.
_NUMBA_SETTINGS = ".numba_config.yaml"

# Where loops stand, and what compiles them: with other lines they are compiled anew.
_SOURCES = ("compiled/*.py", "ops/compiled/loops/*.py", "validators/loops/*.py")


def wanted(nbytes: int, enough: int | None = None) -> bool:
    """Whether a run over this many bytes should compute in compiled loops; `enough` (ENOUGH_BYTES) pay
    for them. Raises RunError for a choice
    that is none, or that this environment cannot follow."""
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
        """What this process computes in from now on."""
        self.on = on

    def in_use(self) -> ModuleType | None:
        """The compiled loops, if this process is to use them."""
        return self._loops if self.on else None

    def load(self) -> None:
        """Load every loop that an earlier process left on disk. Raises RunError as `in_use` does."""
        if self._loops is not None:
            from qconvert.compiled.jit import load_kept

            load_kept()

    @cached_property
    def _loops(self) -> ModuleType | None:
        """None where nothing was compiled before and numba cannot be imported, and nobody asked for it.
        Raises RunError where QCONVERT_KERNELS does."""
        from qconvert.compiled.native import any_kept

        folder = cache_folder()
        compiled = folder is not None and any_kept(folder, self._package)
        if not compiled and numba_or_none() is None:
            return None
        return import_module(self._package)


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
        vars(numba.config)["CACHE_DIR"] = str(folder)
    return numba


@cache
def cache_folder() -> Path | None:
    """Where compiled loops are kept from run to run, one folder for each state of their sources: in
    the user's cache, else among temporary files, in a folder that nobody else can write to (what lies
    there is loaded as code). None: neither can be written, and each process compiles for itself."""
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
        for made in (folder.parent, folder):
            seen = made.lstat()
            if seen.st_uid != os.getuid() or made.is_symlink():
                _refused.append(f"{made} is another user's, or a link; remove it")
                return False
            if seen.st_mode & 0o022:
                _refused.append(f"others may write to {made}; run chmod go-w {made}")
                return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        _refused.append(f"{folder}: cannot be written: {error.strerror or error}")
        return False
