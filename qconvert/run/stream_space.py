"""The work folder of a result that is sent while it is made: its files come one by one, and go.

A shard is made when the first unit that writes to it is given out, and removed once it is kept
elsewhere and the journal says so (`sent`). A journal line of that kind is true as any other is: the
file's units are finished, and size and hash were seen where it is now. A shard that is lost there is
`unsent`, and its units are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qconvert.core.errors import OutputError
from qconvert.run.journal import Journal
from qconvert.run.outlet import Outlet, Sent
from qconvert.run.shards import OutFile, ShardLayout
from qconvert.run.workspace import Workspace, is_there


class StreamSpace(Workspace):
    """A workspace whose result goes to an outlet, which is given before a run begins."""

    _reserves = False
    outlet: Outlet

    def __init__(self, out: Path, *given: Any) -> None:
        self._away: dict[str, Sent] = {}
        self._journal: Journal | None = None
        super().__init__(out, *given)

    @property
    def away(self) -> Mapping[str, Sent]:
        return self._away

    def begin(self, layout: ShardLayout, run: str) -> Journal:
        self._away = {}
        self._journal = super().begin(layout, run)
        return self._journal

    def resume(self) -> Journal:
        """The journal; it learns which of the files that were sent are there no more."""
        journal = self._journal = super().resume()
        assert self.remembered is not None
        self._away = dict(self.remembered.sent)
        self.lose(self.missing())
        for name in self._away:  # killed before it was removed
            self._remove_if_there(self.stage / name)
        return journal

    def missing(self) -> list[str]:
        """Files that were sent, and are not kept as they were sent."""
        if not self._away:
            return []
        there = self.outlet.there()
        return [name for name, sent in self._away.items() if there.get(name) != sent]

    def lose(self, names: Sequence[str]) -> None:
        """Take files for not sent: what they hold has to be made again."""
        if names:
            assert self._journal is not None
            self._journal.append([{"unsent": list(names)}])
            for name in names:
                del self._away[name]

    def note_sent(self, files: Sequence[Sent]) -> None:
        """Journal that files are kept elsewhere, then remove them here."""
        assert self._journal is not None
        self._journal.append([{"sent": [file.as_json() for file in files]}])
        for file in files:
            self._away[file.name] = file
            self._drop(file.name)
        self._files.sync_folder(self.stage)

    def _drop(self, name: str) -> None:
        """Remove a staged file, and give its blocks back now: a worker may have it open."""
        path = self.stage / name
        fd = self._files.open(path)
        try:
            self._files.truncate(fd, path, 0)
        finally:
            self._files.close(fd)
        self._files.remove(path)

    def make_file(self, file: OutFile) -> None:
        """Create a shard at full size with its header. One that is there is kept."""
        if not is_there(self.stage / file.name):
            self._place(file)
            self._files.sync_folder(self.stage)

    def make_again(self, file: OutFile) -> None:
        """A shard's bytes are not what they were: it is made when its first unit is run again."""
        if file.name in self._away:
            self.lose([file.name])
        self._remove_if_there(self.stage / file.name)
        self._files.sync_folder(self.stage)

    def publish(self, names: Sequence[str], journal: Journal) -> None:
        others = [name for name in names if name not in self._away]
        self.outlet.publish(list(self._away.values()), self.stage, others)

    def tidy(self) -> None:
        """Remove the work folder, and the folder it is in: the result is elsewhere."""
        super().tidy()
        with suppress(OutputError):  # it holds something that is not ours
            self._files.remove(self.out)
