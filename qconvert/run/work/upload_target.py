"""Target of finished files of a run that is still at work: what is asked of such a place.

The Hub is one (hub/upload_target.py). Files get there before anything refers to them as a checkpoint;
what makes them one is published at the end, in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

# What is there of a result: nothing, a part, or all of it.
Found = Literal["new", "begun", "finished"]


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file that is elsewhere: its name in the result, its size in bytes, and its sha256."""

    name: str
    size: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        """As a journal keeps it."""
        return {"name": self.name, "size": self.size, "sha256": self.sha256}


class UploadTarget(Protocol):
    """The place of one result. Its methods ask a server, and raise OutputError for what it refuses or
    holds already, RunError where it fails for too long. `upload` may be called by several threads at a
    time, the others by one."""

    @property
    def url(self) -> str:
        """Return what the user named it by."""

    def look(self) -> Found:
        """Return what is there. Raises OutputError for anything that is not of this result."""

    def tidy(self) -> None:
        """Drop what was kept out of sight for a finished result: a run may have been killed between its
        last step and that."""

    def prepare(self) -> None:
        """Make the place ready for files, so that a missing permission shows now."""

    def there(self) -> Mapping[str, SentFile]:
        """Files of the result that are kept there, by name."""

    def upload(self, file: Path, sent: SentFile) -> None:
        """Send a file's bytes. Nothing refers to them before `keep`."""

    def keep(self, files: Sequence[SentFile]) -> None:
        """Have files that were uploaded kept out of sight, and see by size and hash that they are: once
        this returns, they need not be here any more."""

    def publish(self, sent: Sequence[SentFile], folder: Path, others: Sequence[str]) -> None:
        """Show the whole result in one step: what was kept, and the `others` from a folder; then see by
        size and hash that all of it is there. What was kept out of sight for it goes."""
