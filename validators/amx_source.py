"""Experts for KTransformers' CPU kernels: the source must be one they can have been made from.

QC043 the source's expert count, hidden size, intermediate size or layers are not the manifest's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint import MANIFEST
from qconvert.errors import PlanError
from qconvert.validation import Finding, Folder, Need, NotChecked
from qconvert.validators._amx import mismatches, read_block, source_experts


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
            experts = source_experts(folder)
        except PlanError as error:
            yield Finding("QC043", "error", str(folder.source.root), str(error))
            return
        for text in mismatches(block, folder, experts):
            yield Finding("QC043", "error", MANIFEST, text)


VALIDATOR = AmxSource()
