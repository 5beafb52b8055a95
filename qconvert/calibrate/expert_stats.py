"""A folder of what a calibration saw of the routed experts: `--save-stats DIR`.

    DIR/stats.json                   what was asked for: samples, length, seed, digest of the data, ...
    DIR/layer-00003.safetensors      a file a layer, there once the layer is done
        layers.3.counts              I64 [E]     tokens that the router gave to each expert
        layers.3.saliency            F32 [E]     REAP's: the mean over those tokens of the router's
                                                 weight times the L2 norm of the expert's answer
        layers.3.gate_up.mean_square F32 [E, H]  of each input column of gate and up
        layers.3.gate_up.absmax      F32 [E, H]
        layers.3.down.mean_square    F32 [E, I]  of each input column of down
        layers.3.down.absmax         F32 [E, I]

A file's metadata lists, as JSON, experts that saw few tokens (`few`), that were rounded to nearest
(`rounded`), columns that were always zero (`dead_columns`) and matrices that could not be solved
(`fallbacks`). Nothing in a folder has a time or a path in it.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.settings import LayerStats
from qconvert.checkpoint.safetensors import build_header, read_header
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, DataError, OutputError
from qconvert.core.links import read_regular
from qconvert.run.work.files import PARTIAL, Files, existing_parent, write_whole

if TYPE_CHECKING:
    import numpy as np

    Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


ABOUT = "stats.json"
_LAYER = re.compile(r"layer-([0-9]{5})\.safetensors")
_ARRAYS = {
    "counts": "counts",
    "saliency": "saliency",
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
    write_whole(folder / ABOUT, [_text(about).encode()], files)


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
    write_whole(_file(folder, layer), parts, files or Files())


def _is_partial(file: Path) -> bool:
    """Return whether a file is what an interrupted run left of `write_whole`."""
    return file.name.startswith(".") and file.name.endswith(PARTIAL)


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


# Map of the experts that are used most, in the file that runtimes take with `--init-expert-location`.
# KTransformers' sglang-kt keeps the experts used most on the GPU: --kt-expert-placement-strategy
# frequency --init-expert-location hotness.pt Format (kvcache-ai/sglang, `layers/moe/kt_ep_wrapper.py`
# `_init_kt_gpu_experts_masks`; written there by `eplb/expert_distribution.py`
# `_StatAccumulator.dump`): what torch.save makes of {"logical_count": integers [steps, layers,
# experts]}, a row a hidden layer of the config, those without experts too, of the experts that each
# has. It is summed over steps; then kt_kernel's `generate_gpu_experts_masks` puts the largest numbers
# of all layers together on the GPU, so layers get different numbers of experts. A name must end in .pt
# there; sglang's own expert balancing (`eplb/expert_location.py`) takes the same file, and the same
# keys as .json. Rows of layers without experts are zeros, as the recorder leaves them.


NAME = "hotness.pt"
OPTIONS = "--kt-expert-placement-strategy frequency --init-expert-location"


def logical_count(counts: Mapping[int, Counts], num_layers: int, moe: Collection[int]) -> Counts:
    """Counts by layer, int64 [E] each -> int64 [1, num_layers, E], zeros for layers not in `moe`.

    `num_layers` is the config's num_hidden_layers, without draft layers; `moe` are those of them with
    routed experts. Raises DataError where a layer's counts are missing, of another number of experts,
    or of a layer that has none.
    """
    import numpy as np

    missing = sorted(set(moe) - set(counts))
    if missing or not counts:
        raise DataError(
            f"no token was counted in layer {missing[0] if missing else 0}; let the calibration run to "
            "its end, which counts all layers"
        )
    beyond = sorted(layer for layer in counts if layer not in moe or not 0 <= layer < num_layers)
    if beyond:
        raise DataError(
            f"layer {beyond[0]}: expected counts of layers with routed experts below {num_layers}; "
            "they belong to another model"
        )
    first = min(counts)
    found = np.zeros((1, num_layers, counts[first].size), np.int64)
    for layer, row in counts.items():
        if row.shape != found.shape[2:]:
            raise DataError(
                f"layer {layer}: expected counts of {found.shape[2]} experts as in layer {first}, "
                f"found {list(row.shape)}; they belong to another model"
            )
        found[0, layer] = row
    return found


def contents(found: Counts, suffix: str) -> bytes:
    """The file of [steps, layers, experts], `.pt` or `.json`. Raises DataError for another suffix."""
    if suffix == ".json":
        return (json.dumps({"logical_count": found.tolist()}) + "\n").encode()
    if suffix != ".pt":
        raise DataError(f"expected a name that ends in .pt or .json, found {suffix!r}")
    import torch

    stream = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(found)}, stream)
    return stream.getvalue()


def write_hotness(
    file: Path,
    counts: Mapping[int, Counts],
    num_layers: int,
    moe: Collection[int],
    files: Files | None = None,
) -> None:
    """Write the file, whole or not at all. Raises DataError as `logical_count` and `contents` do,
    OutputError where it cannot be written."""
    found = logical_count(counts, num_layers, moe)
    write_whole(file, [contents(found, file.suffix)], files or Files())


def save_hotness(
    folder: Path, num_layers: int, moe: Collection[int], files: Files | None = None
) -> Path:
    """Write the map of a folder of statistics beside them, once all its layers are there. Raises as
    `load_counts` and `write_hotness` do."""
    file = folder / NAME
    write_hotness(file, load_counts(folder), num_layers, moe, files)
    return file
