"""Scales of activations: one constant, or those that follow from the largest inputs of routed experts
in a calibration, read from a folder of `--save-stats`.

Each `layer-*.safetensors` in it has, for its layer L, `layers.{L}.gate_up.absmax` F32 [E, H] and
`layers.{L}.down.absmax` F32 [E, I]: of each input column the largest magnitude seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any

from qconvert.checkpoint.safetensors import Entry, read_header
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, DataError, PlanError
from qconvert.models.experts import Projection
from qconvert.plan.plan import Plan

_NAME = re.compile(r"layers\.([0-9]{1,9})\.(gate_up|down)\.absmax")


@dataclass(frozen=True)
class InputMaxima:
    """The largest input of each expert, by layer and `gate_up` or `down`. `unseen` counts those that
    saw no token, which have the largest of their layer's others."""

    largest: Mapping[tuple[int, str], tuple[float, ...]]
    unseen: int

    def of(self, layer: int, expert: int, kind: str) -> float:
        """For a projection's kind: gate_proj, up_proj or down_proj."""
        return self.largest[layer, "down" if kind == "down_proj" else "gate_up"][expert]

    @property
    def digest(self) -> str:
        """Of what was read, wherever it lay: what stands for the folder in a pass's identity."""
        return sha256(repr(sorted(self.largest.items())).encode()).hexdigest()[:32]

    @property
    def recorded(self) -> dict[str, str]:
        """For the manifest, with which validators compare the scales that follow: by `LAYER.KIND` the
        largest input of each expert, F32 as hexadecimal text."""
        return {
            f"{layer}.{kind}": pack(f"<{len(values)}f", *values).hex()
            for (layer, kind), values in sorted(self.largest.items())
        }

    def notes(self) -> list[str]:
        """For a pass's log entry."""
        found = ["activations quantized with the statistics' input scales"]
        if self.unseen:
            found.append(f"{self.unseen} experts saw no token and take their layer's largest")
        return found


@dataclass(frozen=True)
class InputScales:
    """What the input scales of all that a pass quantizes follow from: one constant, statistics, or
    (neither) none are stored."""

    constant: float | None = None
    maxima: InputMaxima | None = None

    @property
    def digest(self) -> str | None:
        """That of statistics."""
        return None if self.maxima is None else self.maxima.digest

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        if self.maxima is not None:
            return {"input_maxima": self.maxima.recorded}
        return {} if self.constant is None else {"input_scale": self.constant}

    def notes(self) -> list[str]:
        """For a pass's log entry."""
        if self.maxima is not None:
            return self.maxima.notes()
        if self.constant is None:
            return []
        return [f"input scales are the constant {self.constant:g}, found from no data"]


NO_INPUTS = InputScales()


def maxima_of(plan: Plan, stats: str, projections: Sequence[Projection]) -> InputMaxima:
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
) -> InputMaxima:
    """Read the statistics of these layers. Raises DataError for a folder that cannot be read, PlanError
    where a layer is missing, of another model's shape, not finite, or saw nothing."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder of --save-stats, found none")
    entries: dict[tuple[int, str], tuple[Path, Entry]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found = read_header(file).entries
        except CheckpointError as error:
            raise DataError(str(error)) from error
        for entry in found:
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                entries[int(match[1]), match[2]] = file, entry
    largest: dict[tuple[int, str], tuple[float, ...]] = {}
    unseen = 0
    for layer in layers:
        for kind, width in (("gate_up", hidden), ("down", intermediate)):
            if (layer, kind) not in entries:
                raise PlanError(
                    f"{folder}: has no layers.{layer}.{kind}.absmax; the model's experts of layer "
                    f"{layer} need input scales: calibrate with --save-stats to the end, or leave "
                    "--stats out for weights only"
                )
            file, entry = entries[layer, kind]
            wanted = TensorType("F32", (experts, width))
            if entry.type != wanted:
                raise PlanError(
                    f"{file}: {entry.name!r}: expected {wanted} by the config, found {entry.type}; "
                    "these are another model's statistics"
                )
            values, zeros = _largest(file, entry)
            largest[layer, kind] = values
            unseen += zeros if kind == "down" else 0
    return InputMaxima(largest, unseen)


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
