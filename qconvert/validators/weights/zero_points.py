"""Zero points as stored, against what the config states about them.

QC087 zero points are not those of the config's symmetry and version.

GPTQ (AutoGPTQ 0.7, GPTQModel) stores zero points for symmetric weights too: the middle of the range, 8
of 4 bits, which its first version (`checkpoint_format: gptq`) stores minus one. Exllama kernels
compute with the stored values, Marlin's and KTransformers' assume the middle (read in sglang,
kt-kernel). Asymmetric weights of the first version may have any zero point but 0, which is stored
as 15 or 255: who adds 1 within the field reads 0, who adds it to a wider number 16 or 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Yield, validator
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.formats.qweight import qweight_ints
from qconvert.validators.reading.decode import fields_of

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Words

_A_FEW = 8
_SOME = 1 << 14  # words that are taken apart at a time


@validator(
    "GPTQ's zero points of symmetric weights are the middle, as the stated version stores it, and "
    "readers agree on those of asymmetric ones in the first version, where there are any",
    "data",
    "model",
)
def zero_points(folder: Folder) -> Iterator[Yield]:
    checkpoint = folder.checkpoint
    names = [name for name in checkpoint if name.endswith(".qzeros")]
    yield from folder.some(list(_tasks(checkpoint, names)), _A_FEW)


def _tasks(checkpoint: Checkpoint, names: list[str]) -> Iterator[Middles]:
    for name in names:
        module = name.removesuffix(".qzeros")
        found = qweight_ints(checkpoint, module)
        # Else QC012, QC089, AutoAWQ's, or asymmetric weights of the second version, which has a field
        # for each.
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
    """Lines of words, one a group, each looked at whole."""

    def __init__(self, task: Middles) -> None:
        self._task, self._fault, self._line = task, "", 0
        self._rest: Words | None = None

    def take(self, at: int, data: memoryview) -> None:
        import numpy as np

        if self._fault:
            return
        bits, width = self._task.bits, self._task.tensor.type.shape[1]
        words: Words = np.frombuffer(data, "<u4")
        if self._rest is not None and self._rest.size:
            words = np.concatenate([self._rest, words])
        count = words.size // width
        self._rest = words[count * width :].copy()
        lines = words[: count * width].reshape(count, width)
        middle, first = self._task.middle, self._line
        self._line += count
        if middle is not None and 32 % bits == 0:
            whole = sum(middle << shift for shift in range(0, 32, bits))
            if bool((lines == np.uint32(whole)).all()):  # nearly always
                return
        height = max(1, _SOME // width)
        for start in range(0, count, height):
            if not self._fault:
                self._look_at(lines[start : start + height], first + start)

    def _look_at(self, lines: Words, first: int) -> None:
        import numpy as np

        task = self._task
        most = (1 << task.bits) - 1
        rows = min(task.rows, lines.shape[1] * 32 // task.bits)  # else QC089
        fields = fields_of(lines, task.bits, 0, rows)
        wrong = fields == most if task.middle is None else fields != task.middle
        if not wrong.any():
            return
        line, row = np.argwhere(wrong)[0].tolist()
        where = f"group {first + line}, row {row}"
        if task.middle is None:
            self._fault = (
                f"{where}: checkpoint_format gptq, sym false: expected a zero point that is stored as "
                f"{most - 1} at most, found {most}"
            )
            return
        found = int(fields[line, row])
        self._fault = f"{where}: expected the middle, stored as {task.middle}, found {found}"

    def end(self, folders: Folders) -> Iterator[Finding]:
        if self._fault:
            yield Finding("QC087", "error", self._task.where, self._fault)
