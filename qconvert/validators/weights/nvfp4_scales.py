"""The float32 scales of NVFP4 matrices: numbers above 0, in the convention that their names state.

QC100 a global scale or an input scale is not a finite number above 0.
QC103 a global scale gives weights beyond any model's: a divisor under a multiplier's name, or the
      other way round.

QC069 checks whether gate and up, or q, k and v, share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validation.workers import Folders
from qconvert.validators.formats.nvfp4 import MOST, Parts, all_parts, fault
from qconvert.validators.reading.forms import GlobalScale

_ABSURD = 2.0**15  # no weight of a trained model is as large
_BATCH = 256  # matrices per task


@dataclass(frozen=True)
class Nvfp4Scales:
    """Few bytes per matrix, but many matrices."""

    name: str = "nvfp4_scales"
    proves: str = "global and input scales of NVFP4 matrices are plausible numbers"
    needs: frozenset[Need] = frozenset({"model", "data", "nvfp4"})

    def __call__(self, folder: Folder) -> Iterator[ReadScales]:
        sound = [parts for parts in all_parts(folder.checkpoint) if fault(parts) is None]
        for start in range(0, len(sound), _BATCH):
            yield ReadScales(tuple(sound[start : start + _BATCH]))


@dataclass(frozen=True, slots=True)
class ReadScales:
    """The scales of some matrices, one after another."""

    matrices: tuple[Parts, ...]

    @property
    def where(self) -> str:
        return self.matrices[0].weight.name

    @property
    def nbytes(self) -> int:
        return sum(scale.type.nbytes for parts in self.matrices for scale in _scales(parts))

    @property
    def scratch(self) -> int:
        return 0

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


VALIDATOR = Nvfp4Scales()
