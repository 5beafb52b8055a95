"""Tasks of no validator: one that counts, one that says what it computes in, one that takes its time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qconvert.core.graph import Source
from qconvert.validation.compiled import LOOPS
from qconvert.validation.findings import Finding
from qconvert.validation.workers import CHUNK, Folders, Result


@dataclass(frozen=True, slots=True)
class Count:
    """Says how many bytes of a tensor there are, and their sum."""

    tensor: Source
    scratch: int = 0
    step: int = CHUNK

    @property
    def where(self) -> str:
        return self.tensor.name

    @property
    def nbytes(self) -> int:
        return self.tensor.type.nbytes

    def run(self, folders: Folders) -> Iterator[Result]:
        total = 0
        for start in range(0, self.nbytes, self.step):
            data = memoryview(bytearray(min(self.step, self.nbytes - start)))
            folders.output.read(self.tensor, start, data)
            total += sum(data)
        yield Finding("QC000", "warning", self.where, f"{self.nbytes} bytes, sum {total}")


@dataclass(frozen=True, slots=True)
class Form(Count):
    """Says whether its process computes in compiled loops."""

    computes: bool = True

    def run(self, folders: Folders) -> Iterator[Result]:
        form = "loops" if LOOPS.in_use() is not None else "numpy"
        yield Finding("QC000", "warning", self.where, form)


@dataclass(frozen=True, slots=True)
class Sleep(Count):
    """Says that it has begun, a byte in its process's file, and takes its time; used by
    tests/test_validate_cli.py."""

    def run(self, folders: Folders) -> Iterator[Result]:
        with Path(os.environ["QCONVERT_TEST_ROOM"], f"asleep-{os.getpid()}").open("ab") as begun:
            begun.write(b".")
        time.sleep(2)
        yield from ()
