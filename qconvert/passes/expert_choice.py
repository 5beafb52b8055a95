"""Choice of the routed experts that stay, by what a calibration saw of them (`--save-stats DIR`).

Each `layer-*.safetensors` of the folder has, for its layer L, `layers.{L}.counts` I64 [E], the tokens
that the router gave to each expert, and `layers.{L}.saliency` F32 [E]: REAP's, the mean over those
tokens of the router's weight times the L2 norm of the expert's answer (Lasby et al., "REAP the Experts",
2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qconvert.checkpoint.safetensors import Entry, read_header
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, DataError, PlanError

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[tuple[int, ...], np.dtype[Any]]

By = Literal["reap", "frequency"]
_DTYPES = {"I64": "<i8", "F32": "<f4"}


@dataclass(frozen=True)
class Choice:
    """Experts that stay by layer, ascending; what is to be said of it, the digest of the statistics that
    it follows from, and the percentage of what routers chose in them that goes."""

    kept: Mapping[int, tuple[int, ...]]
    notes: tuple[str, ...] = ()
    digest: str | None = None
    share: float | None = None


def chosen(
    folder: str, by: By, layers: Iterable[int], experts: int, keep: int, groups: int
) -> Choice:
    """The `keep` of `experts` that rank first in each layer, the same number of each of `groups`; of
    equals those with the lower numbers. Raises DataError for a folder that cannot be read, PlanError
    where statistics are missing, or of another model."""
    import numpy as np

    where, entries = Path(folder), entries_of(Path(folder))
    kept: dict[int, tuple[int, ...]] = {}
    lost = [0, 0]
    digest = sha256(f"{by} {keep} of {experts} in {groups}".encode())
    for layer in layers:
        counts = _of_layer(where, entries, layer, "counts", TensorType("I64", (experts,)))
        scores = counts
        if by == "reap":
            scores = _of_layer(where, entries, layer, "saliency", TensorType("F32", (experts,)))
        if not np.isfinite(scores).all() or (scores < 0).any() or (counts < 0).any():
            raise PlanError(
                f"{where}: layer {layer}: expected finite numbers from 0 on of each expert"
            )
        digest.update(f"{layer}".encode() + scores.tobytes())
        each = experts // groups
        numbers: list[int] = []
        for first in range(0, experts, each):
            order = np.argsort(-scores[first : first + each], kind="stable")
            numbers += (first + order[: keep // groups]).tolist()
        kept[layer] = tuple(sorted(numbers))
        lost[0] += int(counts.sum() - counts[numbers].sum())
        lost[1] += int(counts.sum())
    what = "REAP's saliency" if by == "reap" else "the tokens that they were given"
    share = 100 * lost[0] / max(1, lost[1])
    notes = (f"chosen by {what}; the router gave {share:.3g} % of what it chose to those that go",)
    return Choice(kept, notes, digest.hexdigest()[:32], share)


def entries_of(folder: Path) -> dict[str, tuple[Path, Entry]]:
    """Tensors of a folder of statistics by name, each with its file. Raises DataError."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder of --save-stats, found none")
    found: dict[str, tuple[Path, Entry]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found.update((entry.name, (file, entry)) for entry in read_header(file).entries)
        except CheckpointError as error:
            raise DataError(str(error)) from error
    return found


def _of_layer(
    folder: Path, entries: Mapping[str, tuple[Path, Entry]], layer: int, what: str, kind: TensorType
) -> Numbers:
    import numpy as np

    name = f"layers.{layer}.{what}"
    if name not in entries:
        other = ", or choose by frequency (--by frequency)" if what == "saliency" else ""
        raise PlanError(
            f"{folder}: has no {name}: let a calibration with --save-stats run to its end{other}"
        )
    file, entry = entries[name]
    if entry.type != kind:
        raise PlanError(
            f"{file}: {name!r}: expected {kind} by the config, found {entry.type}; these are another "
            "model's statistics"
        )
    return np.fromfile(file, _DTYPES[kind.dtype], kind.numel, offset=entry.offset)
