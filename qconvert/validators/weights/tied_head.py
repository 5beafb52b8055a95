"""A head that the config ties to the embeddings, but that is stored all the same.

QC025 a tied head is also stored: the same bytes twice, or others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validation.workers import CHUNK, Folders


@dataclass(frozen=True, slots=True)
class CompareTied:
    """Compares two tensors of one type, byte by byte."""

    head: Source
    embeddings: Source

    @property
    def where(self) -> str:
        return self.head.name

    @property
    def nbytes(self) -> int:
        return 2 * self.head.type.nbytes

    @property
    def scratch(self) -> int:
        return 4 * CHUNK

    def run(self, folders: Folders) -> Iterator[Finding]:
        tied = self.embeddings.name
        ours, other = (memoryview(bytearray(CHUNK)) for _ in range(2))
        size = self.head.type.nbytes
        for at in range(0, size, CHUNK):
            ours, other = ours[: size - at], other[: size - at]
            folders.output.read(self.head, at, ours)
            folders.output.read(self.embeddings, at, other)
            if bytes(ours) != bytes(other):
                message = f"tied to {tied!r} by the config, but other bytes are stored for it"
                yield Finding("QC025", "error", self.head.name, message)
                return
        message = f"tied to {tied!r} by the config; the same bytes are stored twice"
        yield Finding("QC025", "warning", self.head.name, message)


@dataclass(frozen=True)
class TiedHead:
    """Reads both matrices if both are stored."""

    name: str = "tied_head"
    proves: str = "a tied head is not stored in addition to the embeddings"
    needs: frozenset[Need] = frozenset({"model", "data"})

    def __call__(self, folder: Folder) -> Iterator[CompareTied]:
        checkpoint = folder.checkpoint
        role_index = checkpoint.role_index
        if not role_index.dims.tied or role_index.family.tied is None:
            return
        head, embeddings = (role_index.named(role) for role in role_index.family.tied)
        if head is None or embeddings is None:
            return
        one, other = checkpoint[head], checkpoint[embeddings]
        if one.type == other.type:  # else QC014
            yield CompareTied(one, other)


VALIDATOR = TiedHead()
