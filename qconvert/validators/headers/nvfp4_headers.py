"""NVFP4 weights against the block that describes them, by their headers.

QC101 the config says that activations are quantized, but input scales are missing.
QC102 the config says weights only, but there are input scales.
QC103 the config states no NVFP4, or another dialect than the tensors' (by names; by numbers in
      nvfp4_scales).

Dialects as sglang (`modelopt_quant.py`) and compressed-tensors (`nvfp4-pack-quantized`)
have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validators.formats.nvfp4 import (
    Parts,
    Stated,
    all_parts,
    speaks_of_nvfp4,
    stated,
)
from qconvert.validators.reading.quantization import judged, scheme_of


@dataclass(frozen=True)
class Nvfp4Headers:
    """Names, types and shapes; no numbers."""

    name: str = "nvfp4_headers"
    proves: str = (
        "NVFP4 matrices are in the config's dialect, with the scales of activations it states"
    )
    needs: frozenset[Need] = frozenset({"model", "nvfp4"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        found = list(all_parts(folder.checkpoint))
        block = judged(folder.checkpoint.quantization_configs)
        if block is not None and found and not speaks_of_nvfp4(block):
            message = (
                f"{len(found)} matrices are NVFP4, but {block.where} states none: expected a quant_algo "
                "of NVFP4, or in compressed-tensors a group of 4-bit floats with strategy tensor_group"
            )
            yield Finding("QC103", "error", found[0].weight.name, message)
        said = None if block is None else stated(block)
        if said is None:
            return  # QC012, QC037, or a form of config that is not read here
        others = [parts for parts in found if parts.dialect is not said.dialect]
        if others:
            first = others[0]
            message = (
                f"{said.where} states {said.dialect.name}, whose codes are *.{said.dialect.weight} with "
                f"*.{said.dialect.global_scale}; found those of {first.dialect.name} in {len(others)} "
                f"of {len(found)} matrices"
            )
            yield Finding("QC103", "error", first.weight.name, message)
            return
        yield from _inputs(folder.checkpoint, said, found)


def _inputs(checkpoint: Checkpoint, said: Stated, found: Sequence[Parts]) -> Iterator[Finding]:
    """One finding for all matrices: the block is wrong. modelopt's table says it of each."""
    end = said.dialect.input
    asked = [
        (scheme_of(checkpoint, parts.module) or {}).get("inputs", said.inputs) for parts in found
    ]
    lacking = [p for p, inputs in zip(found, asked, strict=True) if inputs and p.input is None]
    if lacking:
        message = (
            f"{said.where} says that activations are quantized; {len(lacking)} of {len(found)} "
            f"matrices have no {end}"
        )
        yield Finding("QC101", "error", lacking[0].weight.name, message)
    given = [
        p.input.name
        for p, inputs in zip(found, asked, strict=True)
        if not inputs and p.input is not None
    ]
    if given:
        message = (
            f"{said.where} says weights only; {len(given)} of {len(found)} matrices have {end}"
        )
        yield Finding("QC102", "warning", given[0], message)


VALIDATOR = Nvfp4Headers()
