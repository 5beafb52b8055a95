"""A folder of what a calibration saw of the routed experts: `--save-stats DIR`.

    DIR/stats.json                   what was asked for: samples, length, seed, digest of the data, ...
    DIR/layer-00003.safetensors      a file a layer, there once the layer is done
        layers.3.counts              I64 [E]     tokens that the router gave to each expert
        layers.3.gate_up.mean_square F32 [E, H]  of each input column of gate and up
        layers.3.gate_up.absmax      F32 [E, H]
        layers.3.down.mean_square    F32 [E, I]  of each input column of down
        layers.3.down.absmax         F32 [E, I]

A file's metadata lists, as JSON, experts that saw few tokens (`few`), that were rounded to nearest
(`rounded`), columns that were always zero (`dead_columns`) and matrices that could not be solved
(`fallbacks`). Nothing in a folder has a time or a path in it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.settings import LayerStats
from qconvert.checkpoint.safetensors import build_header, read_header
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, DataError, OutputError
from qconvert.core.regular import read_regular
from qconvert.run.files import Files, existing_parent

if TYPE_CHECKING:
    import numpy as np

    Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

ABOUT = "stats.json"
_PARTIAL = ".partial"
_LAYER = re.compile(r"layer-([0-9]{5})\.safetensors")
_ARRAYS = {
    "counts": "counts",
    "gate_up.mean_square": "gate_up_mean_square",
    "gate_up.absmax": "gate_up_absmax",
    "down.mean_square": "down_mean_square",
    "down.absmax": "down_absmax",
}
_DTYPES = {"I64": "<i8", "F32": "<f4"}


def begin(folder: Path, about: Mapping[str, Any], files: Files | None = None) -> None:
    """Make the folder and say in it what its numbers are of. A folder of the same calibration is
    continued. Raises OutputError where it holds anything else."""
    files = files or Files()
    if check_claim(folder, about):
        return
    files.make_folder(folder)
    write_whole(folder / ABOUT, _text(about).encode(), files)


def check_claim(folder: Path, about: Mapping[str, Any]) -> bool:
    """Return whether `begin` was called before for this calibration. Raises OutputError where it would
    refuse the folder, or could not write there; writes nothing."""
    file = folder / ABOUT
    there = existing_parent(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(
            f"{folder}: cannot write statistics there: {there} is not a writable folder; choose another "
            "--save-stats"
        )
    if file.is_file():
        if read_regular(file, error=OutputError) != _text(about).encode():
            raise OutputError(
                f"{folder}: holds statistics of another calibration; choose another folder, or "
                "remove it"
            )
        return True
    if folder.is_dir() and any(not _is_partial(there) for there in folder.iterdir()):
        raise OutputError(f"{folder}: is not empty and holds no {ABOUT}; choose a new folder")
    return False


def _text(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=2, sort_keys=True) + "\n"


def save_layer(folder: Path, layer: int, stats: LayerStats, files: Files | None = None) -> None:
    """Write a layer's file, whole or not at all; safe on disk when this returns. Raises OutputError."""
    import numpy as np

    arrays = {
        f"layers.{layer}.{name}": getattr(stats, attribute) for name, attribute in _ARRAYS.items()
    }
    kinds = [
        (name, TensorType("I64" if name.endswith("counts") else "F32", array.shape))
        for name, array in arrays.items()
    ]
    notes = {
        "few": list(stats.few),
        "rounded": list(stats.rounded),
        "dead_columns": dict(stats.dead_columns),
        "fallbacks": [list(fallback) for fallback in stats.fallbacks],
    }
    header, _ = build_header(kinds, {key: json.dumps(value) for key, value in notes.items()})
    parts = [header]
    for (_, kind), array in zip(kinds, arrays.values(), strict=True):
        parts.append(np.ascontiguousarray(array, dtype=_DTYPES[kind.dtype]).tobytes())
    write_whole(_file(folder, layer), b"".join(parts), files or Files())


def write_whole(file: Path, content: bytes, files: Files) -> None:
    """A file that is there whole, after a power cut too, or not at all. Raises OutputError."""
    beside = file.with_name(f".{file.name}{_PARTIAL}")
    files.create(beside, len(content))
    fd = files.open(beside)
    try:
        files.write(fd, beside, memoryview(content), 0)
        files.sync(fd, beside)
    finally:
        files.close(fd)
    files.rename(beside, file)
    files.sync_folder(file.parent)


def _is_partial(file: Path) -> bool:
    """Return whether a file is what an interrupted run left of `write_whole`."""
    return file.name.startswith(".") and file.name.endswith(_PARTIAL)


def layers(folder: Path) -> list[int]:
    """Layers that a folder has a file of, ascending. Raises DataError where it is no such folder."""
    if not (folder / ABOUT).is_file():
        raise DataError(f"{folder}: expected a folder of --save-stats, found no {ABOUT} in it")
    found = [_LAYER.fullmatch(file.name) for file in folder.iterdir()]
    return sorted(int(match[1]) for match in found if match is not None)


def load_layer(folder: Path, layer: int) -> dict[str, Array]:
    """A layer's arrays by their names without the layer: counts, gate_up.mean_square, ... They are
    mapped, not read. Raises DataError where the file is missing or broken."""
    import numpy as np

    file = _file(folder, layer)
    try:
        entries = {entry.name: entry for entry in read_header(file).entries}
    except CheckpointError as error:
        raise DataError(str(error)) from error
    found: dict[str, Array] = {}
    for name in _ARRAYS:
        entry = entries.get(f"layers.{layer}.{name}")
        kind = "I64" if name == "counts" else "F32"
        if entry is None or entry.type.dtype != kind:
            raise DataError(
                f"{file}: expected {kind} 'layers.{layer}.{name}', found "
                f"{'none' if entry is None else entry.type}; calibrate again with --save-stats"
            )
        found[name] = np.memmap(file, _DTYPES[kind], "r", entry.offset, entry.type.shape)
    return found


def load_counts(folder: Path) -> dict[int, Counts]:
    """Tokens that each expert was given, int64 [E], by layer. Raises DataError as `layers` and
    `load_layer` do."""
    import numpy as np

    return {layer: np.array(load_layer(folder, layer)["counts"]) for layer in layers(folder)}


def _file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05d}.safetensors"
