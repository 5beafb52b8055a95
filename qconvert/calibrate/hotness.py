"""Map of the experts that are used most, in the file that runtimes take with `--init-expert-location`.

KTransformers' sglang-kt keeps the experts used most on the GPU:

    --kt-expert-placement-strategy frequency --init-expert-location hotness.pt

Format (kvcache-ai/sglang, `layers/moe/kt_ep_wrapper.py` `_init_kt_gpu_experts_masks`; written there by
`eplb/expert_distribution.py` `_StatAccumulator.dump`): what torch.save makes of {"logical_count":
integers [steps, layers, experts]}, a row a hidden layer of the config, those without experts too, of
the experts that each has. It is summed over steps; then kt_kernel's `generate_gpu_experts_masks` puts
the largest numbers of all layers together on the GPU, so layers get different numbers of experts. A
name must end in .pt there; sglang's own expert balancing (`eplb/expert_location.py`) takes the same
file, and the same keys as .json. Rows of layers without experts are zeros, as the recorder leaves them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate.stats import load_counts, write_whole
from qconvert.core.errors import DataError
from qconvert.run.files import Files

if TYPE_CHECKING:
    import numpy as np

    Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

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
    write_whole(file, contents(found, file.suffix), files or Files())


def save_hotness(
    folder: Path, num_layers: int, moe: Collection[int], files: Files | None = None
) -> Path:
    """Write the map of a folder of statistics beside them, once all its layers are there. Raises as
    `load_counts` and `write_hotness` do."""
    file = folder / NAME
    write_hotness(file, load_counts(folder), num_layers, moe, files)
    return file
