"""Background writer: hidden states in an accelerator's memory, or in the host's where
they are more, and in the file from which an interrupted calibration goes on. Written in between, they
kept a GPU waiting for two thirds of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.activation_store import InFiles
from qconvert.calibrate.distributed import Communicator

if TYPE_CHECKING:
    import torch

_ROWS = 1 << 14  # copied at a time where all are kept


class BackgroundWriter:
    """Does things in the order in which they are asked for, in one thread of its own. What goes wrong in
    one is raised by a later call, and nothing after it is done."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "qconvert-behind")
        self._asked: deque[Future[None]] = deque()
        self._broken = False

    def later(self, do: Callable[[], None]) -> Future[None]:
        while self._asked and self._asked[0].done():
            self._asked.popleft().result()
        found = self._pool.submit(self._run, do)
        self._asked.append(found)
        return found

    def _run(self, do: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            do()
        except BaseException:
            self._broken = True
            raise

    def wait(self) -> None:
        """Until all is done."""
        while self._asked:
            self._asked.popleft().result()

    def close(self) -> None:
        """Let what was asked for end, and the thread with it."""
        self._pool.shutdown()


class WrittenBehind:
    """Rows in an accelerator's memory (`there`) or in the host's, and in `file`, if they are kept, which
    is written behind. `before` are rows that lie in the same memory, and whose file must be whole
    before it is written over."""

    def __init__(
        self, rows: torch.Tensor, file: InFiles | None, behind: BackgroundWriter,
        before: WrittenBehind | None, *, there: bool,
    ) -> None:  # fmt: skip
        import torch

        self.rows, self.file = rows, file
        self._behind, self._before = behind, before
        cuda: Any = torch.cuda  # its streams are typed for nobody
        self._stream = cuda.Stream(rows.device) if there else None
        self._written: list[Future[None]] = []

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.rows[start:stop]

    def write(self, start: int, rows: torch.Tensor) -> None:
        before = self._before
        if before is not None:
            for done in before._written:
                done.result()
            self._before = None
        stop = start + rows.shape[0]
        self.rows[start:stop] = rows
        if self.file is not None:
            self._write(self.file, start, stop)

    def keep(self, file: InFiles, first: int, last: int) -> None:
        """Keep these rows, which were not."""
        self.file = file
        for start in range(first, last, _ROWS):
            self._write(file, start, min(start + _ROWS, last))

    def gather(self, comm: Communicator, cuts: Sequence[tuple[int, int]]) -> None:
        """Rows of all processes of a team, each of which has its own: cuts[rank]."""
        for source, (start, stop) in enumerate(cuts if comm.count > 1 else ()):
            comm.send(self.rows[start:stop], source)

    def _write(self, file: InFiles, start: int, stop: int) -> None:
        import torch

        made: Any = None
        if self._stream is not None:  # what is copied to the host's memory is there
            cuda: Any = torch.cuda
            made = cuda.Event()
            made.record(torch.cuda.current_stream(self.rows.device))
        self._written.append(self._behind.later(lambda: self._keep(file, start, stop, made)))

    def _keep(self, file: InFiles, start: int, stop: int, made: Any) -> None:
        import torch

        if self._stream is None:
            file.write(start, self.rows[start:stop])
            return
        with torch.cuda.device(self.rows.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            rows = self.rows[start:stop]
            kept = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            kept.copy_(rows, non_blocking=True)
            self._stream.synchronize()
        file.write(start, kept)

    def sync(self) -> None:
        """Make what was written survive a power cut. Called behind, after it."""
        if self.file is not None:
            self.file.sync()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
