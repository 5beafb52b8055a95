"""Experts for KTransformers' CPU kernels: the tensors must be those that the manifest implies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import MANIFEST
from qconvert.core.errors import PlanError
from qconvert.core.names import natural_key
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validators.amx.reading import faults, read_block


@dataclass(frozen=True)
class AmxHeaders:
    """Headers against the manifest."""

    name: str = "amx_headers"
    proves: str = "the experts' tensors are those that method, NUMA count and sizes imply"
    needs: frozenset[Need] = frozenset({"amx"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        try:
            block = read_block(folder.checkpoint)
        except PlanError as error:
            yield Finding("QC040", "error", MANIFEST, str(error))
            return
        found = dict(faults(block, folder.checkpoint))
        for name in sorted(found, key=natural_key):
            yield Finding("QC040", "error", name, found[name])


VALIDATOR = AmxHeaders()
