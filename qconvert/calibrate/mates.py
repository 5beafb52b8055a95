"""A process for each accelerator of a calibration: started, listened to and ended by the one that writes
what they find. What they do together: team.py.

They are interpreters of their own, not forks: CUDA does not survive one, and the main process need not
import torch at all. They are started before there is a plan, because torch and transformers take 4 to
6 s to import.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Lock, Thread
from typing import IO, TYPE_CHECKING, Any

from qconvert.calibrate.apart import apart
from qconvert.calibrate.clock import Clock
from qconvert.calibrate.devices import Machine, each_once, guessed_devices, kind_of
from qconvert.calibrate.packing import Packed, Packers
from qconvert.calibrate.settings import ExpertSchemes, LayerDone, Matrix, Settings, Shared
from qconvert.calibrate.work import Work, added
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core import errors, own_process
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.int_scheme import IntScheme, Scheme
from qconvert.plan.plan import Plan
from qconvert.run.exchange import Exchange
from qconvert.run.files import Files
from qconvert.run.forkserver import cannot_start, undisturbed
from qconvert.run.until import Until

if TYPE_CHECKING:
    from qconvert.calibrate.engine import Event
    from qconvert.calibrate.team import Team
    from qconvert.samples.data import Ids
    from qconvert.samples.request import Calibration

_AHEAD = 32  # matrices that a process may be ahead of their being packed
_LAST_WORDS = 4096
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
    exchange: Exchange | None = None


def calibrate_given(given: Given, device: str, **more: Any) -> Generator[Event]:
    """What `engine.calibrate` yields in this process; `more` are other arguments of it."""
    from qconvert.calibrate.engine import calibrate  # imports torch

    asked = {field.name: getattr(given, field.name) for field in fields(given)}
    source = Plan.identity(asked.pop("checkpoint"))
    tokens, schemes, settings = (asked.pop(name) for name in ("tokens", "schemes", "settings"))
    return calibrate(source, tokens, schemes, settings, device=device, **asked, **more)


@dataclass(frozen=True)
class _Begin:
    """What a process is to do, and who packs what it finds."""

    given: Given
    packers: Packers


@dataclass(frozen=True)
class _Said:
    """What a process says: an event, None once it is done; how many bytes follow, by result of a packed
    matrix; and the work since it last said something: kinds, amounts and seconds."""

    event: Event | Packed | None
    sizes: Sequence[int]
    work: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class _Failed:
    """Why a process ends: an error's class in qconvert.core.errors, "" for a fault in the program."""

    kind: str
    text: str


class Mates:
    """A process for each of `devices`, which are all of one kind. Whoever starts them ends them; they
    die with the thread that did (prctl(2), PR_SET_PDEATHSIG)."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._meeting = TemporaryDirectory(prefix="qconvert-team-")
        self._all: list[_Mate] = []
        try:
            for rank in range(len(self.devices)):
                self._all.append(_Mate(rank, self.devices, self._meeting.name))
        except BaseException:
            self.end()
            raise

    @property
    def are_there(self) -> bool:
        return bool(self._all)

    @property
    def machine(self) -> Machine:
        """What torch finds here: waits for its import. Raises RunError where that fails."""
        return self._all[0].machine

    def calibrate(
        self, given: Given, packers: Packers, clock: Clock, works: Sequence[Work]
    ) -> Generator[Event | Packed]:
        """What `engine.calibrate` yields, matrices packed. `clock` is told of what is done, and `works`
        are what each layer takes.

        Raises what one of the processes raises; RunError where one dies.
        """
        if given.exchange is not None:  # other files than these may be known to this process alone
            given = replace(given, exchange=replace(given.exchange, files=Files()))
        for mate in self._all:
            _ = mate.machine
            mate.send(_Begin(given, packers))
        yield from _heard(self._all, clock, works)
        # Nothing is left to do for any of them, and a GPU's memory takes a second to be given back.
        self.end(waits=False)

    def end(self, *, waits: bool = True) -> None:
        """End them, whatever they do: what they leave is gone on from. Again does nothing."""
        for mate in self._all:
            mate.end(waits=waits)
        self._all.clear()
        self._meeting.cleanup()


_early: list[Mates] = []


def started_for(asked: Calibration) -> AbstractContextManager[None]:
    """`started_early` for a calibration on GPUs, those that it names or that there probably are."""
    names = each_once(asked.devices) or guessed_devices()
    return nullcontext() if kind_of(names) == "cpu" else started_early(names)


@contextmanager
def started_early(devices: Sequence[str]) -> Iterator[None]:
    """Within this `early` finds processes for these devices, which begin their imports at once."""
    mates = Mates(devices)
    _early.append(mates)
    try:
        yield
    finally:
        _early.remove(mates)
        mates.end()


def early() -> Mates | None:
    """Processes that were started early, and that `started_early` ends; None where they have ended."""
    return _early[-1] if _early and _early[-1].are_there else None


def _heard(
    mates: Sequence[_Mate], clock: Clock, works: Sequence[Work]
) -> Generator[Event | Packed]:
    """What all of them say: what each has solved, the rest of the first one, and that a layer is done
    once all of them have said so."""
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
            elif isinstance(event, Packed | Shared) or mate is first:
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

    def __init__(self, rank: int, devices: Sequence[str], meeting: str) -> None:
        self.device = devices[rank]
        try:
            self._said = TemporaryFile()  # noqa: SIM115 - closed by `end`
            self.connection, theirs = Pipe()
            about = _Place(theirs.fileno(), os.getpid(), rank, tuple(devices), meeting)
            code = f"from qconvert.calibrate.mates import _Place, main; main({about!r})"
            try:
                with undisturbed():
                    self._process = subprocess.Popen(
                        **own_process.python("-c", code), stdin=subprocess.DEVNULL,
                        stderr=self._said, pass_fds=(theirs.fileno(),),
                    )  # fmt: skip
            finally:
                theirs.close()
        except (OSError, MemoryError) as error:
            raise cannot_start(error) from error

    @cached_property
    def machine(self) -> Machine:
        """The first thing it says."""
        said = self._receive()
        if isinstance(said, _Failed):
            raise _cause(said, self, [])
        assert isinstance(said, Machine)
        return said

    def send(self, what: _Begin | None) -> None:
        try:
            self.connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            raise self.died() from None

    def hear(self, clock: Clock) -> Event | Packed | None:
        """The next thing it says; None once it is done."""
        said = self._receive()
        if isinstance(said, _Failed):
            raise _Raised(said)
        for kind, amount, seconds in said.work:
            clock.told(kind, amount, seconds)
        if not isinstance(said.event, Packed):
            event: Event | None = said.event
            return event
        data = [bytearray(size) for size in said.sizes]
        for one in data:
            self._in_time(partial(self.connection.recv_bytes_into, one))
        return replace(said.event, data=data)

    def _receive(self) -> Any:
        return self._in_time(self.connection.recv)

    def _in_time(self, receive: Callable[[], Any]) -> Any:
        """What is received of a process that has not died."""
        try:
            return receive()
        except (EOFError, ConnectionResetError):
            raise self.died() from None

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

    def end(self, *, waits: bool) -> None:
        """End it, whatever it does."""
        self._process.kill()
        if waits:
            self._process.wait()
        else:
            Thread(target=self._process.wait, name="wait for a process's end").start()
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


@dataclass(frozen=True)
class _Place:
    """A process among others: the descriptor of its pipe, who started it, its number, the devices of all
    of them, and a folder to meet in."""

    descriptor: int
    parent: int
    rank: int
    devices: tuple[str, ...]
    meeting: str


def main(place: _Place) -> None:
    """Calibrate what is asked for at the other end of an inherited pipe."""
    from qconvert.run.worker import die_with

    own_process.declare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(place.parent)
    connection: Connection[Any, Any] = Connection(place.descriptor)
    # The other end is closed where the main process is ended while this one imports.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _serve(connection, place)
        except QConvertError as error:
            connection.send(_Failed(type(error).__name__, str(error)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:  # a fault of the program, whose traceback is for who reports it
            connection.send(_Failed("", traceback.format_exc()))


# Of NCCL and Gloo, where the user says nothing: all processes are on this host; NVLink's multicast,
# which a broadcast does not need, fails in containers that were not given it.
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


def _serve(connection: Connection[Any, Any], place: _Place) -> None:
    device = place.devices[place.rank]
    for name, value in _NETWORK.items():
        os.environ.setdefault(name, value)
    team = _ready(connection, place)
    begin: _Begin = connection.recv()
    notes = _Notes()
    events = calibrate_given(begin.given, device, clock=Clock(notes.add), team=team)
    # Codes are packed and sent by this thread while another one computes.
    events = apart(events, _AHEAD, lambda event: isinstance(event, LayerDone))
    with closing(events):
        for event in events:
            if isinstance(event, Matrix):
                packed = begin.packers.pack(event)
                data, packed = packed.data, replace(packed, data=())
                _say(connection, _Said(packed, [len(one) for one in data], notes.take()))
                for one in data:
                    connection.send_bytes(one)
                del packed, data
            else:
                _say(connection, _Said(event, (), notes.take()))
            if isinstance(event, LayerDone):
                connection.recv()
            del event
    _say(connection, _Said(None, (), notes.take()))
    connection.recv()  # all are done: until then none must lose another


def _say(connection: Connection[Any, Any], said: _Said) -> None:
    connection.send_bytes(pickle.dumps(said, protocol=5))


def _ready(connection: Connection[Any, Any], place: _Place) -> Team:
    """Import what solving needs, and meet the others."""
    from qconvert.calibrate.backend import hush_transformers
    from qconvert.calibrate.devices import get_ready, this_machine, use_device
    from qconvert.calibrate.library import load_shared

    device, count = place.devices[place.rank], len(place.devices)
    connection.send(this_machine())
    get_ready(device)
    load_shared()
    hush_transformers()
    from qconvert.calibrate.team import ALONE, Processes

    use_device(device)
    return ALONE if count == 1 else Processes(place.rank, count, device, place.meeting)
