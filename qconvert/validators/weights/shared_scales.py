"""Global scales of weights that a runtime fuses at load: it keeps one for all.

QC069 the global scales of a fused group differ.

In two-level formats (NVFP4: block scales in FP8 under one global scale per tensor) the block scales are
stored in units of the global one, and vLLM and sglang take the largest for all, or the
first: the others' weights are wrong by the ratio. For single-level FP8, runtimes requantize with the
largest, and for activations the largest is harmless, so those are warnings.

The float32 scales of NVFP4 matrices: numbers above 0, in the convention that their names state.

QC100 a global scale or an input scale is not a finite number above 0.
QC103 a global scale gives weights beyond any model's: a divisor under a multiplier's name, or the
      other way round.

QC069 checks whether gate and up, or q, k and v, share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind, joined_with
from qconvert.validation.findings import Finding, Severity
from qconvert.validation.runner import Folder, validator
from qconvert.validation.workers import Folders
from qconvert.validators.formats.fp8 import fp8_block_of
from qconvert.validators.formats.nvfp4 import MOST, Parts, all_parts, fault
from qconvert.validators.reading.decode import SCALES, scale_floats
from qconvert.validators.reading.forms import GlobalScale
from qconvert.validators.reading.quantization_tensors import ACTIVATIONS

_ABSURD = 2.0**15  # no weight of a trained model is as large


@validator(
    "global and input scales of NVFP4 matrices are plausible numbers", "data", "model", "nvfp4"
)
def nvfp4_scales(folder: Folder) -> Iterator[ReadScales]:
    sound = [parts for parts in all_parts(folder.checkpoint) if fault(parts) is None]
    for start in range(0, len(sound), _BATCH):
        yield ReadScales(tuple(sound[start : start + _BATCH]))


@dataclass(frozen=True, slots=True)
class ReadScales:
    matrices: tuple[Parts, ...]
    scratch: ClassVar[int] = 0

    @property
    def where(self) -> str:
        return self.matrices[0].weight.name

    @property
    def nbytes(self) -> int:
        return sum(scale.type.nbytes for parts in self.matrices for scale in _scales(parts))

    def run(self, folders: Folders) -> Iterator[Finding]:
        for parts in self.matrices:
            for scale in _scales(parts):
                global_scale = GlobalScale(scale, parts.dialect.divisor)
                value = float(global_scale.value(folders.output))
                if not (isfinite(value) and value > 0):
                    message = f"expected a finite number above 0, found {value:g}"
                    yield Finding("QC100", "error", scale.name, message)
                elif (
                    scale is parts.global_scale
                    and MOST * global_scale.unit(folders.output) > _ABSURD
                ):
                    other = "multiplier" if parts.dialect.divisor else "divisor"
                    message = (
                        f"{value:.9g} gives weights of up to "
                        f"{MOST * global_scale.unit(folders.output):.3g}; as a {other}, which is the "
                        "other dialect's, it would not"
                    )
                    yield Finding("QC103", "error", scale.name, message)


def _scales(parts: Parts) -> list[Source]:
    return [scale for scale in (parts.global_scale, parts.input) if scale is not None]


_TWO_LEVEL = ("weight_scale_2", "weight_global_scale")
_BATCH = 256  # matrices, or groups, per task


@dataclass(frozen=True, slots=True)
class Group:
    """One scale for each of the modules that become one."""

    severity: Severity
    scales: tuple[Source, ...]


@validator(
    "weights that are fused at load have one global scale, where they have any", "data", "model"
)
def shared_scales(folder: Folder) -> Iterator[Scalars]:
    groups = list(_groups(folder.checkpoint))
    for start in range(0, len(groups), _BATCH):
        yield Scalars(tuple(groups[start : start + _BATCH]))


def _groups(checkpoint: Checkpoint) -> Iterator[Group]:
    """Every set of global scales of one kind that belong to a fused group."""
    sets: dict[tuple[str, tuple[Kind, ...], str], dict[Kind, Source]] = {}
    for name, source in checkpoint.items():
        module, parameter = split_parameter(name)
        if parameter == "weight_scale" and fp8_block_of(checkpoint, module) is not None:
            continue  # the only block of a small matrix
        if parameter not in (*_TWO_LEVEL, *ACTIVATIONS, "weight_scale"):
            continue
        kind = checkpoint.role_index.kind(name)
        joined = joined_with(kind)
        if len(joined) > 1:
            at = module.rpartition(".")[0], joined, parameter
            sets.setdefault(at, {})[kind] = source
    for (_, joined, parameter), members in sets.items():
        found = tuple(members[kind] for kind in joined if kind in members)
        if len(found) > 1 and all(_is_number(scale) for scale in found):
            yield Group("error" if parameter in _TWO_LEVEL else "warning", found)


def _is_number(scale: Source) -> bool:
    return scale.type.numel == 1 and scale.type.dtype in SCALES[:3]


@dataclass(frozen=True, slots=True)
class Scalars:
    groups: tuple[Group, ...]
    scratch: ClassVar[int] = 0

    @property
    def where(self) -> str:
        return self.groups[0].scales[0].name

    @property
    def nbytes(self) -> int:
        return sum(scale.type.nbytes for group in self.groups for scale in group.scales)

    def run(self, folders: Folders) -> Iterator[Finding]:
        for group in self.groups:
            values = [_read(folders, scale) for scale in group.scales]
            if len(set(values)) > 1:
                spelled = ", ".join(
                    f"{split_parameter(scale.name)[0].rpartition('.')[2]} {value:.9g}"
                    for scale, value in zip(group.scales, values, strict=True)
                )
                message = f"expected one scale for weights that are fused at load, found {spelled}"
                if group.severity == "warning":
                    message += "; runtimes take the largest"
                yield Finding("QC069", group.severity, group.scales[0].name, message)


def _read(folders: Folders, scale: Source) -> float:
    import numpy as np

    data = np.empty(scale.type.nbytes, np.uint8)
    folders.output.read(scale, 0, data.data)
    return float(scale_floats(data, scale.type.dtype)[0])
