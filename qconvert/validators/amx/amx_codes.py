"""Experts for KTransformers' CPU kernels: codes and scales must be valid for the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.amx.reading import sound_block
from qconvert.validators.reading.amx import Method

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Bools

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_OUT_OF_RANGE = {"int4": -8, "int8": -128}


@dataclass(frozen=True)
class AmxCodes:
    """Reads every tensor once, a chunk at a time."""

    name: str = "amx_codes"
    proves: str = "every code is in the format's range, every scale is finite and 0 or more"
    needs: frozenset[Need] = frozenset({"amx", "data"})

    def __call__(self, folder: Folder) -> Iterator[CodesTask]:
        block = sound_block(folder.checkpoint)
        for name, kind in folder.some(list(block.tensors())):
            method = None if kind.dtype == "F32" else block.method
            yield CodesTask(tensor=folder.checkpoint[name], method=method)


@dataclass(frozen=True, kw_only=True)
class CodesTask(Watch):
    """One tensor: codes of `method`, or (None) scales."""

    method: Method | None
    scratch: ClassVar[int] = 4 * CHUNK

    def look(self) -> _Looking:
        return _Looking(self)


class _Looking:
    def __init__(self, task: CodesTask) -> None:
        self._task, self._fault = task, ""

    def take(self, at: int, data: memoryview) -> None:
        if not self._fault:
            method = self._task.method
            found = _scale_fault(at, data) if method is None else _code_fault(at, data, method)
            self._fault = found or ""

    def end(self, folders: Folders) -> Iterator[Finding]:
        if self._fault:
            yield Finding("QC041", "error", self._task.where, self._fault)


def _scale_fault(start: int, data: memoryview) -> str | None:
    import numpy as np

    scales = np.frombuffer(data, np.float32)
    wrong = ~((scales >= 0) & (scales < np.inf))
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return f"row {start // 4 + row}: expected a finite scale >= 0, found {scales[row]:g}"


def _code_fault(start: int, data: memoryview, method: Method) -> str | None:
    import numpy as np

    wrong = _out_of_range(np.frombuffer(data, np.uint8), method)
    if not wrong.any():
        return None
    code = _OUT_OF_RANGE[method]
    return (
        f"byte {start + int(np.argmax(wrong))}: expected codes from {code + 1} to {-code - 1}, "
        f"found {code}"
    )


def _out_of_range(data: Bytes, method: Method) -> Bools:
    """Return which bytes hold the code that two's complement has but the format does not."""
    int4 = method == "int4"
    wrong: Bools = ((data & 0x0F == 0x08) | (data & 0xF0 == 0x80)) if int4 else data == 0x80
    return wrong


VALIDATOR = AmxCodes()
