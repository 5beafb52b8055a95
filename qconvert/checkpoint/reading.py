"""Layout that a checkpoint is read with, where its config does not say: that of a class of transformers
(`--architecture`), or that of a family in a file of the user's (`--family`).

Who opens a checkpoint states it once, with `reading_as`; `Checkpoint.open` keeps it. What is made from
such a checkpoint says so in its manifest, by the class or by name and hash of the file: a class is taken
from there, but a file is code, and is only run if the user names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from qconvert.checkpoint.stated_as import stating
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.family import Config, Dims, Family, generic, role_index
from qconvert.core.links import read_regular
from qconvert.core.names import parse
from qconvert.layouts.derived.find import architecture as architecture_of
from qconvert.layouts.derived.find import family_for

FACT = "reading"  # of the manifest


@dataclass(frozen=True, slots=True)
class Reading:
    """`architecture` is a model_type or a class of transformers. `family` is that of the file that is
    called `file` and has this `digest`, None where only a manifest names the file."""

    architecture: str = ""
    file: str = ""
    digest: str = ""
    family: Family | None = None

    @property
    def fact(self) -> dict[str, str]:
        """Return what a manifest keeps of it."""
        if self.architecture:
            return {"architecture": self.architecture}
        return {"family_file": self.file, "sha256": self.digest}


_STATED: ContextVar[Reading | None] = ContextVar("reading", default=None)


@contextmanager
def reading_as(
    architecture: str | None = None,
    family: str | Path | None = None,
    scheme: str | None = None,
) -> Iterator[None]:
    """Checkpoints that are opened within are read as `architecture`, a model_type or class of
    transformers with the same layout, or as the family in the file `family`, which is run; those whose
    config states no quantization as stored in `scheme` (`fp8-block:128x128`).

    Raises UsageError for an architecture or a scheme that nobody knows and for both layouts at once,
    CheckpointError for a file without a FAMILY. A checkpoint with a name that the class does not have is
    refused with CheckpointError when it is read; what qconvert made from it may have other names. So is
    one that is not stored in the scheme, when it is opened.
    """
    if scheme is not None:
        with stating(scheme), reading_as(architecture, family):
            yield
        return
    if architecture is None and family is None:
        yield
        return
    if _STATED.get() is not None or (architecture is not None and family is not None):
        raise UsageError("--architecture and --family exclude one another: name one of them")
    stated = None
    if architecture is not None:
        _known(architecture)
        stated = Reading(architecture)
    elif family is not None:
        stated = _from_file(Path(family))
    token = _STATED.set(stated)
    try:
        yield
    finally:
        _STATED.reset(token)


def stated() -> Reading | None:
    """Return what `reading_as` states here."""
    return _STATED.get()


def of_manifest(manifest: Mapping[str, Any] | None) -> Reading | None:
    """Return what a folder that qconvert made says of it."""
    fact = (manifest or {}).get(FACT)
    if fact is None:
        return None
    return Reading(
        fact.get("architecture", ""), fact.get("family_file", ""), fact.get("sha256", "")
    )


def read_family(
    reading: Reading | None, config: Config, names: Iterable[str], *, made: bool
) -> Family:
    """The family of a checkpoint; `made`: by qconvert, so that tensors may be called as a format calls
    them. Raises CheckpointError for a name that the stated class does not have."""
    if reading is None:
        return family_for(config, names)
    if reading.family is not None:
        return reading.family
    names = list(names)
    if not reading.architecture:
        return generic(names, f"it was made with --family {reading.file}; name that file again")
    model_type, class_name = _known(reading.architecture)
    alike = {
        **config,
        "model_type": model_type,
        "architectures": [class_name] if class_name else [],
    }
    family = family_for(alike, names)
    where = f"--architecture {reading.architecture}"
    if made:
        return family
    if family.undescribed:
        raise CheckpointError(f"{where}: {family.undescribed}; name a class with the same layout")
    index = role_index(family, config, names)
    layers = index.dims.num_layers
    for name in index.unknown:
        template, layer, _ = parse(name)
        of_draft = template.startswith(("mtp.", "model.mtp.")) or family.is_mtp(name, index.dims)
        if not of_draft and not (layer is not None and layer >= layers > 0):
            raise CheckpointError(
                f"tensor {name!r}: {where} has no such module; name a class with the same layout, or "
                "describe the family in a file, for --family"
            )
    return family


def _known(architecture: str) -> tuple[str, str]:
    """The model_type and the class of an architecture. Raises UsageError."""
    return architecture_of(architecture)


def _from_file(file: Path) -> Reading:
    """The family in a file, whose code is run. Raises CheckpointError."""
    try:
        text = read_regular(file)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: no such file; --family names a file with a FAMILY"
        ) from error
    digest = sha256(text).hexdigest()
    name = f"qconvert_family_{digest[:16]}"
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(text, str(file), "exec"), module.__dict__)
    except Exception as error:  # the user's code may raise anything: the message says it
        raise CheckpointError(
            f"{file}: cannot be run: {type(error).__name__}: {error}; mend the file"
        ) from error
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, Family):
        raise CheckpointError(
            f"{file}: expected FAMILY = Family(...), found {type(family).__name__}; "
            "qconvert/layouts/qwen3_moe.py is a short one"
        )
    dims = _DimsOfFile(file.absolute(), family.dims)
    return Reading("", file.name, digest, replace(family, dims=dims))


@dataclass(frozen=True)
class _DimsOfFile:
    """`dims` of a family in a file. A process that calibrates, which it is sent to, runs the file again:
    the functions of its module have no other place."""

    file: Path
    dims: Callable[[Config], Dims]

    def __call__(self, config: Config) -> Dims:
        return self.dims(config)

    def __reduce__(self) -> tuple[Callable[[Path], _DimsOfFile], tuple[Path]]:
        return _dims_of, (self.file,)


def _dims_of(file: Path) -> _DimsOfFile:
    family = _from_file(file).family
    assert family is not None
    assert isinstance(family.dims, _DimsOfFile)
    return family.dims
