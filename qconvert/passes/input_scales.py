"""Scales of activations: one constant, or those that follow from the largest inputs of routed experts
in a calibration, read from a folder of `--save-stats`.

Each `layer-*.safetensors` in it has, for its layer L, `layers.{L}.gate_up.absmax` F32 [E, H] and
`layers.{L}.down.absmax` F32 [E, I]: of each input column the largest magnitude seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any

from qconvert.checkpoint.safetensors import Entry
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.models.experts import Projection
from qconvert.passes.expert_choice import entries_of
from qconvert.passes.selection import Selection
from qconvert.plan.plan import Plan


@dataclass(frozen=True)
class InputScales:
    """Source of the input scales of all that a pass quantizes: one `constant`, the `largest`
    input of each expert, by layer and `gate_up` or `down`, or neither, and none are stored. `unseen`
    counts experts that saw no token, which have the largest of their layer's others."""

    constant: float | None = None
    largest: Mapping[tuple[int, str], tuple[float, ...]] = field(default_factory=dict)
    unseen: int = 0

    def of(self, layer: int, expert: int, kind: str) -> float:
        """The largest input of a projection, by its kind: gate_proj, up_proj or down_proj."""
        return self.largest[layer, "down" if kind == "down_proj" else "gate_up"][expert]

    def scales(
        self,
        chosen: Selection,
        of: Callable[[float], float],
        constant: Callable[[float], float] = lambda value: value,
    ) -> dict[str, float]:
        """The scale of each module: `of` the largest input, or of the `constant`; none where none are
        stored."""
        if self.largest:
            return {p.module: of(self.of(p.layer, p.expert, p.kind)) for p in chosen.projections}
        if self.constant is None:
            return {}
        return {module: constant(self.constant) for module, _, _ in chosen}

    @property
    def digest(self) -> str | None:
        """Of the statistics that were read, wherever they lay: what stands for the folder in a pass's
        identity."""
        if not self.largest:
            return None
        return sha256(repr(sorted(self.largest.items())).encode()).hexdigest()[:32]

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest, with which validators compare the scales that follow: the constant, or by
        `LAYER.KIND` the largest input of each expert, F32 as hexadecimal text."""
        if not self.largest:
            return {} if self.constant is None else {"input_scale": self.constant}
        recorded = {
            f"{layer}.{kind}": pack(f"<{len(values)}f", *values).hex()
            for (layer, kind), values in sorted(self.largest.items())
        }
        return {"input_maxima": recorded}

    def notes(self) -> list[str]:
        """For a pass's log entry."""
        if not self.largest:
            if self.constant is None:
                return []
            return [f"input scales are the constant {self.constant:g}, found from no data"]
        found = ["activations quantized with the statistics' input scales"]
        if self.unseen:
            found.append(f"{self.unseen} experts saw no token and take their layer's largest")
        return found


NO_INPUTS = InputScales()


def maxima_of(plan: Plan, stats: str, projections: Sequence[Projection]) -> InputScales:
    """The statistics in folder `stats` of these experts of a plan. Raises PlanError for draft layers,
    of which there are none, and as `input_maxima` does."""
    draft = next((one.module for one in projections if one.draft), None)
    if draft is not None:
        raise PlanError(
            f"{draft!r}: statistics are of the model's experts, and those of its draft layers would "
            "need input scales too: drop the layers (a recipe of `drop: {what: mtp}` and this step), or "
            "leave stats out"
        )
    dims = plan.role_index.dims
    layers = tuple(dict.fromkeys(p.layer for p in projections))
    return input_maxima(
        Path(stats), layers, dims.num_experts, dims.hidden_size, dims.moe_intermediate_size
    )


def input_maxima(
    folder: Path, layers: tuple[int, ...], experts: int, hidden: int, intermediate: int
) -> InputScales:
    """Read the statistics of these layers. Raises DataError for a folder that cannot be read, PlanError
    where a layer is missing, of another model's shape, not finite, or saw nothing."""
    entries = entries_of(folder)
    largest: dict[tuple[int, str], tuple[float, ...]] = {}
    unseen = 0
    for layer in layers:
        for kind, width in (("gate_up", hidden), ("down", intermediate)):
            name = f"layers.{layer}.{kind}.absmax"
            if name not in entries:
                raise PlanError(
                    f"{folder}: has no {name}; the model's experts of layer "
                    f"{layer} need input scales: calibrate with --save-stats to the end, or leave "
                    "--stats out for weights only"
                )
            file, entry = entries[name]
            wanted = TensorType("F32", (experts, width))
            if entry.type != wanted:
                raise PlanError(
                    f"{file}: {entry.name!r}: expected {wanted} by the config, found {entry.type}; "
                    "these are another model's statistics"
                )
            values, zeros = _largest(file, entry)
            largest[layer, kind] = values
            unseen += zeros if kind == "down" else 0
    return InputScales(None, largest, unseen)


def _largest(file: Path, entry: Entry) -> tuple[tuple[float, ...], int]:
    """The largest of each row, and how many rows had none."""
    import numpy as np

    rows = np.memmap(file, "<f4", "r", entry.offset, entry.type.shape).max(axis=1)
    if not np.isfinite(rows).all() or (rows < 0).any():
        expert = int(np.flatnonzero(~np.isfinite(rows) | (rows < 0))[0])
        raise PlanError(f"{file}: {entry.name!r}: expert {expert} has no finite largest input")
    most = float(rows.max())
    if most == 0:
        raise PlanError(f"{file}: {entry.name!r}: no expert of this layer saw any token")
    found = tuple(float(value) if value else most for value in rows.tolist())
    return found, int((rows == 0).sum())
