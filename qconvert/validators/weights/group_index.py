"""The group of each column, if it is stored.

QC090 a g_idx names an invalid group, or has groups of unequal sizes, or an order that is not stated.

GPTQ's g_idx and compressed-tensors' weight_g_idx: I32 [K]. Loaders use them only if the config says
desc_act (actorder: group), and kernels that sort columns by group assume equal groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.core.names import split_parameter
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need, Yield
from qconvert.validation.workers import Folders
from qconvert.validators.formats.packed import PackedInts, ints_of
from qconvert.validators.formats.qweight import qweight_ints

_A_FEW = 8


@dataclass(frozen=True)
class GroupIndex:
    """One task per g_idx."""

    name: str = "group_index"
    proves: str = "columns are in the groups that the config gives, where g_idx states them"
    needs: frozenset[Need] = frozenset({"model", "data"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        yield from folder.some(list(_tasks(folder.checkpoint)), _A_FEW)


def _tasks(checkpoint: Checkpoint) -> Iterator[Groups]:
    for name, source in checkpoint.items():
        module, parameter = split_parameter(name)
        stated: PackedInts | None = None
        if parameter == "g_idx":
            found = qweight_ints(checkpoint, module)
            stated = None if found is None else found[0]
        elif parameter == "weight_g_idx":
            stated = ints_of(checkpoint, module)
        kind = source.type
        if stated is None or kind.dtype not in ("I32", "I64") or len(kind.shape) != 1:
            continue  # QC088, QC089
        columns = kind.shape[0]
        width = stated.group or columns
        if columns and columns % width == 0:
            yield Groups(source, width, stated.ordered)


@dataclass(frozen=True, slots=True)
class Groups:
    """One g_idx: groups of `width` columns, adjacent unless `ordered`."""

    index: Source
    width: int
    ordered: bool

    @property
    def where(self) -> str:
        return self.index.name

    @property
    def nbytes(self) -> int:
        return self.index.type.nbytes

    @property
    def scratch(self) -> int:
        return 4 * self.nbytes

    def run(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        raw = np.empty(self.nbytes, np.uint8)
        folders.output.read(self.index, 0, raw.data)
        found = raw.view("<i4" if self.index.type.dtype == "I32" else "<i8")
        count = found.size // self.width
        outside = (found < 0) | (found >= count)
        if outside.any():
            at = int(np.argmax(outside))
            message = f"column {at}: expected a group from 0 to {count - 1}, found {found[at]}"
            yield Finding("QC090", "error", self.where, message)
            return
        sizes = np.bincount(found, minlength=count)
        if (sizes != self.width).any():
            group = int(np.argmax(sizes != self.width))
            message = f"group {group}: expected {self.width} columns, found {sizes[group]}"
            yield Finding("QC090", "error", self.where, message)
            return
        plain = np.arange(found.size) // self.width
        if not self.ordered and not np.array_equal(found, plain):
            at = int(np.argmax(found != plain))
            message = (
                f"column {at}: expected group {plain[at]}, because the config states adjacent groups, "
                f"found {found[at]}"
            )
            yield Finding("QC090", "error", self.where, message)


VALIDATOR = GroupIndex()
