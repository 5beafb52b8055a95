"""Finished units become facts: their files are synced, then the journal says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qconvert.core.profiling import phase
from qconvert.run.files import Files
from qconvert.run.journal import Journal
from qconvert.run.unit_runner import UnitResult

# A sync waits for the disk, so units are committed in batches: after this much output or time.
COMMIT_BYTES = 256 << 20
COMMIT_SECONDS = 5.0


class Committer:
    """Collects finished units and commits them in batches."""

    def __init__(
        self, journal: Journal, files: Files, paths: Sequence[Path], commit_bytes: int
    ) -> None:
        self._journal = journal
        self._files = files
        self._paths = paths
        self._commit_bytes = commit_bytes
        self._waiting: list[tuple[int, UnitResult]] = []
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, number: int, result: UnitResult) -> None:
        self._waiting.append((number, result))
        self._bytes += result.written
        late = time.monotonic() - self._since > COMMIT_SECONDS
        if self._bytes >= self._commit_bytes or late:
            self.commit()

    @phase("commit")
    def commit(self) -> None:
        """Sync every file the waiting units wrote to, then append their journal lines."""
        for number in sorted({file for _, result in self._waiting for file in result.files}):
            path = self._paths[number]
            # Any descriptor will do: syncing is about the file, whoever wrote to it.
            fd = self._files.open(path)
            try:
                self._files.sync(fd, path)
            finally:
                self._files.close(fd)
        if self._waiting:
            self._journal.append([_record(number, result) for number, result in self._waiting])
        self._waiting.clear()
        self._bytes = 0
        self._since = time.monotonic()


def _record(number: int, result: UnitResult) -> dict[str, Any]:
    return {"unit": number, "records": list(result.records), "remarks": list(result.remarks)}
