"""Zero points as stored, against what the config states about them.

QC087 zero points are not those of the config's symmetry and version.

GPTQ (AutoGPTQ 0.7, GPTQModel) stores zero points for symmetric weights too: the middle of the range,
8 or 128, which its first version (`checkpoint_format: gptq`) stores minus one. Exllama kernels compute
with the stored values, Marlin's and KTransformers' assume the middle (read in sglang,
kt-kernel). Asymmetric weights of the first version may have any zero point but 0, which is stored
as 15 or 255: who adds 1 within the field reads 0, who adds it to a wider number 16 or 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need, Yield
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.formats.qweight import gptq_ints

_A_FEW = 8


@dataclass(frozen=True)
class ZeroPoints:
    """One task per tensor of zero points."""

    name: str = "zero_points"
    proves: str = (
        "GPTQ's zero points of symmetric weights are the middle, as the stated version stores it, and "
        "readers agree on those of asymmetric ones in the first version, where there are any"
    )
    needs: frozenset[Need] = frozenset({"model", "data"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        checkpoint = folder.checkpoint
        names = [name for name in checkpoint if name.endswith(".qzeros")]
        yield from folder.some(list(_tasks(checkpoint, names)), _A_FEW)


def _tasks(checkpoint: Checkpoint, names: list[str]) -> Iterator[Middles]:
    for name in names:
        module = name.removesuffix(".qzeros")
        found = gptq_ints(checkpoint.quantization_configs, module)
        # Else QC012, QC089, or asymmetric weights of the second version, which has a field for each.
        if found is None or not (found[0].symmetric or found[1] == 1):
            continue
        stated, version = found
        middle = (1 << (stated.bits - 1)) - (1 if version == 1 else 0) if stated.symmetric else None
        kind = checkpoint[name].type
        scales = checkpoint.get(f"{module}.scales")
        if kind.dtype != "I32" or len(kind.shape) != 2 or scales is None:
            continue  # QC089
        rows = scales.type.shape[-1] if scales.type.shape else 0
        yield Middles(tensor=checkpoint[name], bits=stated.bits, middle=middle, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Middles(Watch):
    """Zero points of weights of `rows` rows: each must be `middle`, or, where that is None, less than
    the largest number of its bits."""

    bits: int
    middle: int | None
    rows: int
    scratch: ClassVar[int] = 18 * CHUNK

    def look(self) -> _Looking:
        return _Looking(self)


class _Looking:
    def __init__(self, task: Middles) -> None:
        self._task, self._fault = task, ""

    def take(self, at: int, data: memoryview) -> None:
        import numpy as np

        if self._fault:
            return
        task = self._task
        word, line = 32 // task.bits, task.tensor.type.shape[1]
        words = np.frombuffer(data, "<u4")
        if task.middle is not None:
            whole = sum(task.middle << (task.bits * i) for i in range(word))
            if bool((words == np.uint32(whole)).all()):  # nearly always
                return
        most = (1 << task.bits) - 1
        fields = words[:, None] >> (task.bits * np.arange(word, dtype=np.uint32)) & np.uint32(most)
        wrong = fields == most if task.middle is None else fields != task.middle
        if task.rows % word:  # in the last word of a line, values beyond the rows do not count
            ends = (at // 4 + np.arange(words.size)) % line == line - 1
            wrong[ends, task.rows % word :] = False
        if not wrong.any():
            return
        first, number = np.argwhere(wrong)[0].tolist()
        group, place = divmod(at // 4 + first, line)
        where = f"group {group}, row {place * word + number}"
        if task.middle is None:
            self._fault = (
                f"{where}: checkpoint_format gptq, sym false: expected a zero point that is stored as "
                f"{most - 1} at most, found {most}"
            )
            return
        found = int(fields[first, number])
        self._fault = f"{where}: expected the middle, stored as {task.middle}, found {found}"

    def end(self, folders: Folders) -> Iterator[Finding]:
        if self._fault:
            yield Finding("QC087", "error", self._task.where, self._fault)


VALIDATOR = ZeroPoints()
