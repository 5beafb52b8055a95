"""Finished files of a run on their way elsewhere, the work folder that they leave, and the disk that
those on this side take.

A shard is made when the first unit that writes to it is given out, read once more before it is sent,
and removed once it is kept elsewhere and the journal says so (`sent`). A journal line of that kind is
true as any other is: the file's units are finished, and size and hash were seen where it is now. A shard
that is lost there is `unsent`, and its units are forgotten.

Threads hash and send files, and have the outlet keep them; all else is done by the thread that runs the
conversion, when `bell` says that one of them has news: it alone writes journals, makes files and removes
them. Files are made as long as there is room for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

import xxhash

from qconvert.core.errors import OutputError
from qconvert.core.links import open_regular, reading
from qconvert.core.profiling import phase
from qconvert.core.shown import count
from qconvert.run.folder.journal import Journal
from qconvert.run.folder.workspace import Workspace, is_there
from qconvert.run.work.events import Events
from qconvert.run.work.file_layout import OutFile, ShardLayout
from qconvert.run.work.forkserver import AnyConnection
from qconvert.run.work.upload_target import SentFile, UploadTarget


class StreamWorkspace(Workspace):
    """A workspace whose result goes to an outlet, which is given before a run begins."""

    _reserves = False
    outlet: UploadTarget

    def __init__(self, out: Path, *given: Any) -> None:
        self._away: dict[str, SentFile] = {}
        self._journal: Journal | None = None
        super().__init__(out, *given)

    @property
    def away(self) -> Mapping[str, SentFile]:
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

    def note_sent(self, files: Sequence[SentFile]) -> None:
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


_CHUNK = 4 << 20


def hashes_in(records: Iterable[str]) -> dict[str, str]:
    """xxh3-128 of tensors by name, from receipt lines."""
    lines = map(json.loads, records)
    return {line["name"]: line["xxh3"] for line in lines}


def seen_whole(path: Path, file: OutFile, hashes: Mapping[str, str]) -> SentFile:
    """A shard's size and sha256. Raises OutputError where its header is not the planned one, or a
    tensor's bytes have another hash than when they were computed: what goes elsewhere is not looked at
    again."""
    whole = sha256()
    try:
        fd = open_regular(path, follow=False, error=OutputError)
    except FileNotFoundError as error:
        raise OutputError(f"{path}: is gone; run the same command again") from error
    with os.fdopen(fd, "rb", buffering=_CHUNK) as stream:
        header = _read(stream, path, len(file.header))
        whole.update(header)
        if header != file.header:
            raise _changed(path, "its header differs from the plan's")
        for tensor in file.tensors:
            digest, left = xxhash.xxh3_128(), tensor.type.nbytes
            while left:
                chunk = _read(stream, path, min(left, _CHUNK))
                whole.update(chunk)
                digest.update(chunk)
                left -= len(chunk)
            if digest.hexdigest() != hashes[tensor.name]:
                raise _changed(path, f"tensor {tensor.name!r} has other bytes than were computed")
        if stream.read(1):
            raise _changed(path, f"expected {file.size} bytes, found more")
    return SentFile(file.name, file.size, whole.hexdigest())


def _read(stream: IO[bytes], path: Path, size: int) -> bytes:
    with reading(path, OutputError):
        data = stream.read(size)
    if len(data) < size:
        raise _changed(path, "ends early")
    return data


def _changed(path: Path, what: str) -> OutputError:
    return OutputError(f"{path}: {what}; it was not sent. Run the same command again with --verify")


# Files sent at a time. One connection to a store far away does not fill a line.
SENDERS = 3


@dataclass(frozen=True, slots=True)
class QueuedFile:
    """A file of a run: which folder it is of, and what it will be."""

    space: StreamWorkspace
    file: OutFile

    @property
    def path(self) -> Path:
        return self.space.stage / self.file.name

    @property
    def away(self) -> bool:
        return self.file.name in self.space.away


@dataclass(frozen=True, slots=True)
class _Uploaded:
    number: int
    sent: SentFile


@dataclass(frozen=True, slots=True)
class _Kept:
    numbers: Sequence[int]
    files: Sequence[SentFile]


_News = _Uploaded | _Kept | BaseException


class UploadQueue:
    """The files of a run by number, those of all its folders counted through. `room` is how many bytes
    of them may be here at a time; `hashes` gives the xxh3-128 of a file's tensors, once it is
    finished."""

    def __init__(
        self, files: Sequence[QueuedFile], room: int, hashes: Callable[[int], Mapping[str, str]]
    ) -> None:
        self._files = files
        self._room = room
        self._hashes = hashes
        self._here = {n for n, each in enumerate(files) if each.path.is_file() and not each.away}
        self._sending: set[int] = set()
        self._uploaded: dict[int, SentFile] = {}
        self._keeping: set[int] = set()
        self._draining = self._wanted = self._failed = False
        self._largest = max((each.file.size for each in files), default=0)
        self._todo: SimpleQueue[Callable[[], _News] | None] = SimpleQueue()
        self._to_keep: SimpleQueue[Callable[[], _News] | None] = SimpleQueue()
        self._news: SimpleQueue[_News] = SimpleQueue()
        self.bell: AnyConnection
        self.bell, self._rope = Pipe(duplex=False)
        # Nobody waits for them where the run ends early: what they send is sent again.
        for queue in (*[self._todo] * SENDERS, self._to_keep):
            Thread(target=self._serve, args=(queue,), daemon=True).start()

    def _serve(self, queue: SimpleQueue[Callable[[], _News] | None]) -> None:
        # After a failure nothing else is begun: what one request was refused, another would be too.
        while (work := queue.get()) is not None and not self._failed:
            news: _News
            try:
                news = work()
            except BaseException as error:  # raised again by `answer`
                self._failed, news = True, error
            self._news.put(news)
            try:
                self._rope.send_bytes(b"!")
            except OSError:  # closed: nobody listens any more
                return

    def close(self) -> None:
        """Let the threads go, when each has done what it is at."""
        for _ in range(SENDERS):
            self._todo.put(None)
        self._to_keep.put(None)
        self.bell.close()

    @property
    def here(self) -> Sequence[int]:
        """Numbers of files that are on this side."""
        return sorted(self._here)

    @property
    def _used(self) -> int:
        return sum(self._files[number].file.size for number in self._here)

    def admit(self, numbers: Iterable[int], *, idle: bool = False) -> bool:
        """Return whether files may be written to now: they are made where there is room, or where
        nothing would ever make room: the run is `idle`, and nothing is on its way. (It goes on with less
        than it was begun with.)"""
        new = [number for number in numbers if number not in self._here]
        needed = sum(self._files[number].file.size for number in new)
        self._wanted = bool(new) and self._used + needed > self._room
        if self._wanted:
            self._keep()
            if self._busy or not idle:
                return False
        for number in new:
            self._files[number].space.make_file(self._files[number].file)
            self._here.add(number)
        return True

    @property
    def _busy(self) -> bool:
        return bool(self._sending or self._uploaded or self._keeping)

    def send(self, numbers: Iterable[int]) -> None:
        """Have finished files sent, whose units are all in the journal."""
        for number in numbers:
            going = self._files[number]
            if number in self._sending or number in self._uploaded or number in self._keeping:
                continue
            self._sending.add(number)
            hashes = self._hashes(number)
            self._todo.put(lambda n=number, g=going, h=hashes: self._sent(n, g, h))  # type: ignore[misc]

    @staticmethod
    def _sent(number: int, going: QueuedFile, hashes: Mapping[str, str]) -> _News:
        sent = seen_whole(going.path, going.file, hashes)
        going.space.outlet.upload(going.path, sent)
        return _Uploaded(number, sent)

    def answer(self) -> None:
        """Take the news of the threads. Raises what went wrong in one of them."""
        while self.bell.poll():
            self.bell.recv_bytes()
        while not self._news.empty():
            self._take(self._news.get())
        self._keep()

    def _take(self, news: _News) -> None:
        match news:
            case _Uploaded():
                self._sending.remove(news.number)
                self._uploaded[news.number] = news.sent
            case _Kept():
                space = self._files[news.numbers[0]].space
                space.note_sent(news.files)
                self._keeping.difference_update(news.numbers)
                self._here.difference_update(news.numbers)
            case BaseException():
                raise news

    def _keep(self) -> None:
        """Have what was uploaded kept, where its room is wanted: a commit is counted, so there are no
        more of them than that takes."""
        wanted = self._wanted or self._draining or self._used + self._largest > self._room
        if self._keeping or not self._uploaded or not wanted:
            return
        first = next(iter(self._uploaded))
        space = self._files[first].space
        batch = {n: sent for n, sent in self._uploaded.items() if self._files[n].space is space}
        for number in batch:
            del self._uploaded[number]
        self._keeping.update(batch)
        numbers, files, outlet = list(batch), list(batch.values()), space.outlet
        self._to_keep.put(lambda: self._kept(outlet, numbers, files))

    @staticmethod
    def _kept(outlet: UploadTarget, numbers: Sequence[int], files: Sequence[SentFile]) -> _News:
        outlet.keep(files)
        return _Kept(numbers, files)

    def drain(self, events: Events) -> None:
        """Send every file that is not elsewhere yet, all being finished, and return when all are
        kept."""
        left = [number for number, each in enumerate(self._files) if not each.away]
        self._draining = True
        try:
            if left:
                events.phase(f"sending the last {count(len(left), 'shard')}")
            for number in left:
                if self.admit([number], idle=True):  # one without a tensor was made by no unit
                    self.send([number])
            self._keep()
            with phase("send"):
                while self._busy:
                    wait([self.bell])
                    self.answer()
        finally:
            self._draining = False
