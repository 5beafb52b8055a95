"""Experts for KTransformers' CPU kernels: the tensors must be those that the manifest implies, and
it must be possible that they were made from the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import MANIFEST
from qconvert.core.errors import PlanError
from qconvert.core.names import natural_key
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need, NotChecked
from qconvert.validators.amx.reading import faults, mismatches, read_block
from qconvert.validators.reading.experts import routed_layers


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


@dataclass(frozen=True)
class AmxSource:
    """The manifest against the source's config and headers."""

    name: str = "amx_source"
    proves: str = "experts, sizes and layers are the source's"
    needs: frozenset[Need] = frozenset({"amx", "source"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        assert folder.source is not None
        try:
            block = read_block(folder.checkpoint)
        except PlanError as error:
            raise NotChecked(f"QC040: {MANIFEST}: {error}") from error
        try:
            own, drafts = routed_layers(folder.source)
        except PlanError as error:
            yield Finding("QC043", "error", str(folder.source.root), str(error))
            return
        for text in mismatches(block, folder, own, drafts):
            yield Finding("QC043", "error", MANIFEST, text)


VALIDATORS = AmxHeaders(), AmxSource()
