"""A process for each accelerator of a calibration: started, listened to and ended by the one that writes
what they find. What they do together: team.py.

They are interpreters of their own, not forks: CUDA does not survive one, and the main process need not
import torch at all.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Lock
from typing import IO, TYPE_CHECKING, Any

from qconvert.calibrate.apart import apart
from qconvert.calibrate.clock import Clock
from qconvert.calibrate.settings import ExpertSchemes, LayerDone, Matrix, Settings
from qconvert.calibrate.work import Work, added
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core import errors
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.int_scheme import IntScheme, Scheme
from qconvert.plan.plan import Plan
from qconvert.run.forkserver import cannot_start, undisturbed
from qconvert.run.until import Until

if TYPE_CHECKING:
    from qconvert.calibrate.engine import Event
    from qconvert.samples.data import Ids

_AHEAD = 16  # matrices that a process may be ahead of their being sent
_LAST_WORDS = 4096
_PATIENCE = 10.0  # seconds for a process to end by itself
_SECONDS = 1.0  # from the loss of a connection to the end of the process at its other end


@dataclass(frozen=True)
class Given:
    """What is calibrated: arguments of `engine.calibrate`. `memory` is what each process may take."""

    checkpoint: Checkpoint
    tokens: Sequence[Ids]
    schemes: Sequence[Scheme | ExpertSchemes]
    settings: Settings
    work_dir: Path
    memory: int | None
    key: str
    last: int | None = None
    linears: Mapping[str, Sequence[IntScheme]] | None = None
    statistics: bool = True
    until: Until | None = None


def calibrate_given(given: Given, devices: Sequence[str], **more: Any) -> Generator[Event]:
    """What `engine.calibrate` yields in this process; `more` are other arguments of it."""
    from qconvert.calibrate.engine import calibrate  # imports torch

    asked = {field.name: getattr(given, field.name) for field in fields(given)}
    source = Plan.identity(asked.pop("checkpoint"))
    tokens, schemes, settings = (asked.pop(name) for name in ("tokens", "schemes", "settings"))
    return calibrate(source, tokens, schemes, settings, device=devices[0], **asked, **more)


@dataclass(frozen=True)
class _Begin:
    """What a process is told: its place among the others, its device, and a folder to meet them in."""

    given: Given
    rank: int
    count: int
    device: str
    meeting: str


@dataclass(frozen=True)
class _Said:
    """What a process says: an event, None once it is done, and the work since it last said something:
    kinds, amounts and seconds."""

    event: Event | None
    work: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class _Failed:
    """Why a process ends: an error's class in qconvert.core.errors, "" for a fault in the program."""

    kind: str
    text: str


def calibrate_together(
    given: Given, devices: Sequence[str], clock: Clock, works: Sequence[Work]
) -> Generator[Event]:
    """What `engine.calibrate` yields, by a process for each of `devices`, which are all of one kind.
    `clock` is told of what they do, and `works` are what each layer takes.

    Raises what one of them raises; RunError where one dies, or cannot be started.
    """
    with TemporaryDirectory(prefix="qconvert-team-") as meeting:
        mates: list[_Mate] = []
        try:
            for device in devices:
                mates.append(_Mate(device))
            for rank, mate in enumerate(mates):
                mate.send(_Begin(given, rank, len(devices), mate.device, meeting))
            yield from _heard(mates, clock, works)
            for mate in mates:
                mate.send(None)
            for mate in mates:
                mate.ends_within(_PATIENCE)
        finally:
            for mate in mates:
                mate.end()


def _heard(mates: Sequence[_Mate], clock: Clock, works: Sequence[Work]) -> Generator[Event]:
    """What all of them say: matrices of each, the rest of the first one, and that a layer is done once
    all of them have said so."""
    listened = {mate.connection: mate for mate in mates}
    first = mates[0]
    layer, before = 0, dict(clock.work)
    done: list[_Mate] = []
    ended: LayerDone | None = None
    while listened:
        for connection in wait(list(listened)):
            mate = listened[connection]  # type: ignore[index]
            try:
                event = mate.hear(clock)
            except _Raised as raised:
                raise _cause(raised.failed, mate, mates) from None
            if event is None:
                del listened[mate.connection]
            elif isinstance(event, LayerDone):
                # What it says of the next layer is not listened to yet.
                del listened[mate.connection]
                done.append(mate)
                ended = event if mate is first or ended is None else ended
            elif isinstance(event, Matrix) or mate is first:
                yield event
            del event
        if ended is not None and len(done) == len(mates):
            if works:
                clock.layer_done(added([*works[layer : ended.layer + 1]]), before)
                layer, before = ended.layer + 1, dict(clock.work)
            yield ended
            ended = None
            for mate in done:  # the consumer has asked for more: the layer's matrices are kept
                mate.send(None)
                listened[mate.connection] = mate
            done.clear()


class _Raised(Exception):
    """A process has said why it ends."""

    def __init__(self, failed: _Failed) -> None:
        super().__init__(failed.text)
        self.failed = failed


def _cause(failed: _Failed, mate: _Mate, mates: Sequence[_Mate]) -> Exception:
    """Why one fails: the end of another, of which it has lost the connection, or what it says."""
    if failed.kind:
        made: QConvertError = getattr(errors, failed.kind)(failed.text)
        return made
    for other in mates:
        if other is not mate and other.ends_within(_SECONDS):
            return other.died()
    return RuntimeError(f"calibrating on {mate.device}:\n{failed.text}")


class _Mate:
    """A process, seen from the one that started it."""

    def __init__(self, device: str) -> None:
        self.device = device
        try:
            self._said = TemporaryFile()  # noqa: SIM115 - closed by `end`
            self.connection, theirs = Pipe()
            code = (
                f"from qconvert.calibrate.mates import main; main({theirs.fileno()}, {os.getpid()})"
            )
            try:
                with undisturbed():
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL,
                        stderr=self._said, pass_fds=(theirs.fileno(),),
                    )  # fmt: skip
            finally:
                theirs.close()
        except (OSError, MemoryError) as error:
            raise cannot_start(error) from error

    def send(self, what: _Begin | None) -> None:
        try:
            self.connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            raise self.died() from None

    def hear(self, clock: Clock) -> Event | None:
        """The next thing it says; None once it is done."""
        try:
            said: _Said | _Failed = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self.died() from None
        if isinstance(said, _Failed):
            raise _Raised(said)
        for kind, amount, seconds in said.work:
            clock.told(kind, amount, seconds)
        return said.event

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def died(self) -> QConvertError:
        """What its end tells."""
        code = self._process.wait()
        why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        if -code == signal.SIGKILL:
            why += " (out of memory?)"
        return RunError(
            f"the process that calibrates on {self.device} {why}{_last_words(self._said)}; run the same "
            "command again to go on"
        )

    def end(self) -> None:
        """End it, whatever it does: what it leaves is gone on from."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._said.close()


def _last_words(said: IO[bytes]) -> str:
    """The last line that a process wrote to stderr."""
    size = os.fstat(said.fileno()).st_size
    text = os.pread(said.fileno(), _LAST_WORDS, max(0, size - _LAST_WORDS)).decode(errors="replace")
    found = [line.strip() for line in text.split("\n") if line.strip()]
    return f": {found[-1]}" if found else ""


# --- a process of the team --------------------------------------------------------------------


class _Notes:
    """Work that is to be told of with the next event."""

    def __init__(self) -> None:
        self._some: list[tuple[str, float, float]] = []
        self._lock = Lock()

    def add(self, kind: str, amount: float, seconds: float) -> None:
        with self._lock:
            self._some.append((kind, amount, seconds))

    def take(self) -> list[tuple[str, float, float]]:
        """By kind, as few as there are."""
        with self._lock:
            some, self._some = self._some, []
        sums: dict[str, tuple[float, float]] = {}
        for kind, amount, seconds in some:
            before = sums.get(kind, (0.0, 0.0))
            sums[kind] = before[0] + amount, before[1] + seconds
        return [(kind, *both) for kind, both in sums.items()]


def main(descriptor: int, parent: int) -> None:
    """Calibrate what is asked for at the other end of an inherited pipe."""
    from qconvert.core import own_process
    from qconvert.run.worker import die_with

    own_process.declare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(parent)
    connection: Connection[Any, Any] = Connection(descriptor)
    # The other end is closed where the main process is ended while this one imports.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        begin: _Begin = connection.recv()
        try:
            _serve(connection, begin)
        except QConvertError as error:
            connection.send(_Failed(type(error).__name__, str(error)))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception:  # a fault of the program, whose traceback is for who reports it
            connection.send(_Failed("", traceback.format_exc()))


# Of NCCL and Gloo, where the user says nothing: all processes are on this host; NVLink's multicast,
# which a broadcast does not need, fails in containers that were not given it.
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


def _serve(connection: Connection[Any, Any], begin: _Begin) -> None:
    from qconvert.calibrate.backend import hush_transformers
    from qconvert.calibrate.devices import get_ready, use_device
    from qconvert.calibrate.library import load_shared

    given, device = begin.given, begin.device
    for name, value in _NETWORK.items():
        os.environ.setdefault(name, value)
    get_ready([device])
    load_shared()
    hush_transformers()
    from qconvert.calibrate.team import Processes

    use_device(device)
    team = Processes(begin.rank, begin.count, device, begin.meeting)
    notes = _Notes()
    events = calibrate_given(given, (device,), clock=Clock(notes.add), team=team)
    # Codes are pickled and sent by this thread while another one computes.
    events = apart(events, _AHEAD, lambda event: isinstance(event, LayerDone))
    with closing(events):
        for event in events:
            connection.send_bytes(pickle.dumps(_Said(event, notes.take()), protocol=5))
            if isinstance(event, LayerDone):
                connection.recv()
            del event
    connection.send(_Said(None, notes.take()))
    connection.recv()  # all are done: a group must not lose one before
    team.close()
