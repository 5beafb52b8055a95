"""Finished files of a run on their way elsewhere, and the disk that those on this side take.

Threads hash and send files, and have the outlet keep them; all else is done by the thread that runs the
conversion, when `bell` says that one of them has news: it alone writes journals, makes files and removes
them. Files are made as long as there is room for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from qconvert.core.profiling import phase
from qconvert.core.shown import count
from qconvert.run.events import Events
from qconvert.run.file_hash import seen_whole
from qconvert.run.outlet import Outlet, Sent
from qconvert.run.pool import AnyConnection
from qconvert.run.shards import OutFile
from qconvert.run.stream_space import StreamSpace

# Files sent at a time. One connection to a store far away does not fill a line.
SENDERS = 3


@dataclass(frozen=True, slots=True)
class Going:
    """A file of a run: which folder it is of, and what it will be."""

    space: StreamSpace
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
    sent: Sent


@dataclass(frozen=True, slots=True)
class _Kept:
    numbers: Sequence[int]
    files: Sequence[Sent]


_News = _Uploaded | _Kept | BaseException


class Outflow:
    """The files of a run by number, those of all its folders counted through. `room` is how many bytes
    of them may be here at a time; `hashes` gives the xxh3-128 of a file's tensors, once it is
    finished."""

    def __init__(
        self, files: Sequence[Going], room: int, hashes: Callable[[int], Mapping[str, str]]
    ) -> None:
        self._files = files
        self._room = room
        self._hashes = hashes
        self._here = {n for n, each in enumerate(files) if each.path.is_file() and not each.away}
        self._sending: set[int] = set()
        self._uploaded: dict[int, Sent] = {}
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
        """Whether files may be written to now: they are made where there is room, or where nothing would
        ever make room: the run is `idle`, and nothing is on its way. (It goes on with less than it was
        begun with.)"""
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
    def _sent(number: int, going: Going, hashes: Mapping[str, str]) -> _News:
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
    def _kept(outlet: Outlet, numbers: Sequence[int], files: Sequence[Sent]) -> _News:
        outlet.keep(files)
        return _Kept(numbers, files)

    def drain(self, told: Events) -> None:
        """Send every file that is not elsewhere yet, all being finished, and return when all are
        kept."""
        left = [number for number, each in enumerate(self._files) if not each.away]
        self._draining = True
        try:
            if left:
                told.phase(f"sending the last {count(len(left), 'shard')}")
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
