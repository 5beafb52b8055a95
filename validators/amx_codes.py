"""Experts for KTransformers' CPU kernels: codes and scales must be such as the format has.

QC041 a code out of the format's range (int4 -8, int8 -128), or a scale that is negative, NaN or
      infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.formats.amx import Method
from qconvert.graph import Source
from qconvert.run.reader import Reader
from qconvert.validation import Finding, Folder, Need
from qconvert.validators._amx import sound_block

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_CHUNK = 4 << 20
_OUT_OF_RANGE = {"int4": -8, "int8": -128}


@dataclass(frozen=True)
class AmxCodes:
    """Reads every tensor once, a chunk at a time."""

    name: str = "amx_codes"
    proves: str = "every code is in the format's range, every scale a finite number of 0 or more"
    needs: frozenset[Need] = frozenset({"amx", "data"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        block = sound_block(folder.checkpoint)
        reader = Reader(folder.checkpoint.shards)
        buffer = memoryview(bytearray(_CHUNK))
        try:
            for name, kind in block.tensors():
                source = folder.checkpoint[name]
                if kind.dtype == "F32":
                    fault = _scale_fault(reader, source, buffer)
                else:
                    fault = _code_fault(reader, source, buffer, block.method)
                if fault is not None:
                    yield Finding("QC041", "error", name, fault)
        finally:
            reader.close()


def _chunks(reader: Reader, source: Source, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, source.type.nbytes, _CHUNK):
        chunk = buffer[: min(_CHUNK, source.type.nbytes - start)]
        reader.read(source, start, chunk)
        yield start, chunk


def _scale_fault(reader: Reader, source: Source, buffer: memoryview) -> str | None:
    import numpy as np

    for start, chunk in _chunks(reader, source, buffer):
        scales = np.frombuffer(chunk, np.float32)
        wrong = ~((scales >= 0) & (scales < np.inf))
        if wrong.any():
            row = int(np.argmax(wrong))
            return f"row {start // 4 + row}: expected a finite scale >= 0, found {scales[row]:g}"
    return None


def _code_fault(reader: Reader, source: Source, buffer: memoryview, method: Method) -> str | None:
    import numpy as np

    for start, chunk in _chunks(reader, source, buffer):
        wrong = _out_of_range(np.frombuffer(chunk, np.uint8), method)
        if wrong.any():
            code = _OUT_OF_RANGE[method]
            return (
                f"byte {start + int(np.argmax(wrong))}: expected codes from {code + 1} to "
                f"{-code - 1}, found {code}"
            )
    return None


def _out_of_range(data: Bytes, method: Method) -> Bools:
    """Which bytes hold the code that two's complement has and the format has not."""
    int4 = method == "int4"
    wrong: Bools = ((data & 0x0F == 0x08) | (data & 0xF0 == 0x80)) if int4 else data == 0x80
    return wrong


VALIDATOR = AmxCodes()
