"""Names, dtypes and config must agree: what a header alone can tell.

QC010 the index states another total_size than the tensors add up to.
QC011 a scale without its weight, or an FP8 weight without a scale.
QC012 a quantization block is stated and no tensor is quantized (or FP8 and no block is).
QC013 a tensor that the family requires is missing.
QC015 a block-scale grid is not ceil(shape / block).
QC014 embeddings are tied by the config and differ in type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint import INDEX
from qconvert.names import scale_candidates, weight_candidates
from qconvert.quantization import grid_fault, stated_block
from qconvert.validation import Finding, Folder, Need

_FP8 = ("F8_E4M3", "F8_E5M2")
# Dtypes or parameters only quantized checkpoints have.
_PACKED = (".weight_packed", ".qweight", "_blocks")


@dataclass(frozen=True)
class Structure:
    """Header-level rules."""

    name: str = "structure"
    proves: str = "scales are paired, config and tensors agree, no required tensor is missing"
    needs: frozenset[Need] = frozenset()

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        yield from _total_size(folder)
        yield from _scales(folder)
        yield from _quantization(folder)
        yield from _family(folder)


def _total_size(folder: Folder) -> Iterator[Finding]:
    for text in folder.checkpoint.warnings:
        if "total_size" in text:
            yield Finding("QC010", "error", INDEX, text)


def _scales(folder: Folder) -> Iterator[Finding]:
    names = folder.checkpoint
    block = stated_block(names.quantization_configs)
    for name, source in names.items():
        weights = weight_candidates(name)
        if weights and not any(weight in names for weight in weights):
            yield Finding("QC011", "error", name, f"no weight beside it ({' or '.join(weights)})")
        if source.type.dtype in _FP8 and not weights:
            scales = [scale for scale in scale_candidates(name) if scale in names]
            if not scales:
                tried = " or ".join(scale_candidates(name))
                yield Finding("QC011", "error", name, f"FP8 without a scale ({tried})")
            elif block is not None and len(source.type.shape) >= 2:
                fault = grid_fault(source.type, names[scales[0]].type, block)
                if fault is not None:
                    yield Finding("QC015", "error", scales[0], fault)


def _quantization(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    quantized = next(
        (
            name
            for name, source in checkpoint.items()
            if (source.type.dtype in (*_FP8, "F4") and not weight_candidates(name))
            or name.endswith(_PACKED)
        ),
        None,
    )
    blocks = checkpoint.quantization_configs
    if blocks and quantized is None:
        for block in blocks:
            yield Finding("QC012", "error", block.where, "states a quantization no tensor has")
    if quantized is not None and not blocks:
        yield Finding("QC012", "error", quantized, "is quantized, but no config block says how")


def _family(folder: Folder) -> Iterator[Finding]:
    census = folder.checkpoint.census
    for name in folder.checkpoint.absent():
        yield Finding(
            "QC013", "error", name, f"missing: family {census.family.name} requires it by config"
        )
    if census.dims.tied and census.family.tied is not None:
        names = [n for role in census.family.tied if (n := census.named(role)) is not None]
        if len({folder.checkpoint[name].type for name in names}) > 1:
            yield Finding("QC014", "error", names[0], f"tied to {names[1]} and of another type")


VALIDATOR = Structure()
