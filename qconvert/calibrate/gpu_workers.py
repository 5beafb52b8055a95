"""A process for each accelerator of a calibration: started, listened to and ended by the one that writes
what they find. What they do together: distributed.py.

Those of other hosts are started there by the same command, as torchrun or Slurm says who it is, and
connect to the one that leads: the first one's, which alone writes. Who loses one of them ends, and says
so to those that are left.

They are interpreters of their own, not forks: CUDA does not survive one, and the main process need not
import torch at all. They are started before there is a plan, because torch and transformers take 4 to
6 s to import.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    Pipe,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Lock, Thread
from typing import IO, TYPE_CHECKING, Any

from qconvert.calibrate.devices import Machine, each_once, guessed_devices, kind_of
from qconvert.calibrate.distributed import Launched, LostError
from qconvert.calibrate.packing import Packed, Packers, run_in_thread
from qconvert.calibrate.progress import Clock, Work, added
from qconvert.calibrate.settings import LayerDone, Matrix, Schemes, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core import errors, own_process
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.int_scheme import IntScheme
from qconvert.plan.plan import Plan
from qconvert.run.work.backend import Phase
from qconvert.run.work.forkserver import cannot_start, undisturbed
from qconvert.run.work.options import Until

if TYPE_CHECKING:
    from qconvert.calibrate.distributed import Communicator, Rendezvous
    from qconvert.calibrate.engine import Event
    from qconvert.samples.data import Ids
    from qconvert.samples.request import Calibration

_AHEAD = 32  # matrices that a process may be ahead of their being packed
_LAST_WORDS = 4096
_SECONDS = 1.0  # from the loss of a connection to the end of the process at its other end
_WORD = 10.0  # seconds in which the process that leads says which one was lost
_GREETING = 60  # seconds that one of another host takes to connect


@dataclass(frozen=True)
class CalibrationArgs:
    """Request for a calibration: arguments of `engine.calibrate`. `memory` is what each process may
    take."""

    checkpoint: Checkpoint
    tokens: Sequence[Ids]
    schemes: Schemes | Mapping[int, Schemes]
    settings: Settings
    work_dir: Path
    memory: int | None
    key: str
    last: int | None = None
    linears: Mapping[str, Sequence[IntScheme]] | None = None
    caches: Mapping[int, str] | None = None
    statistics: bool = True
    until: Until | None = None


def calibrate_with(given: CalibrationArgs, device: str, **more: Any) -> Generator[Event]:
    """Return what `engine.calibrate` yields in this process; `more` are other arguments of it."""
    from qconvert.calibrate.engine import calibrate  # imports torch

    asked = {field.name: getattr(given, field.name) for field in fields(given)}
    source = Plan.identity(asked.pop("checkpoint"))
    tokens, schemes, settings = (asked.pop(name) for name in ("tokens", "schemes", "settings"))
    return calibrate(source, tokens, schemes, settings, device=device, **asked, **more)


@dataclass(frozen=True)
class _Begin:
    """Task of a process, None where nothing is left to do, and who packs what it finds; `door`:
    the port and the key of the process that leads."""

    given: CalibrationArgs | None
    packers: Packers
    door: tuple[int, bytes] | None = None


@dataclass(frozen=True)
class _AwaitPeers:
    """So many processes of other hosts will connect."""

    count: int


@dataclass(frozen=True)
class _AllDone:
    """All processes are done."""


@dataclass(frozen=True)
class _WorkerMessage:
    """Message of a process: an event, None once it is done; how many bytes follow, by result of a packed
    matrix; and the work since it last said something: kinds, amounts and seconds."""

    event: Event | Packed | _AwaitPeers | None
    sizes: Sequence[int]
    work: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class _Failed:
    """Why a process ends: an error's class in qconvert.core.errors, "" for a fault in the program."""

    kind: str
    text: str


class WorkerPool:
    """A process for each of `devices`, which are all of one kind. Whoever starts them ends them; they
    die with the thread that did (prctl(2), PR_SET_PDEATHSIG). With `launched` they are some of those of
    several hosts; `times` counts the calibrations of one command."""

    def __init__(
        self, devices: Sequence[str], launched: Launched | None = None, times: int = 0
    ) -> None:
        self.devices = tuple(devices)
        self._meeting = TemporaryDirectory(prefix="qconvert-team-")
        self._all: list[_Worker] = []
        self._door = _Listener() if launched is not None and launched.leads else None
        try:
            for rank in range(len(self.devices)):
                self._all.append(_Worker(rank, self.devices, self._meeting.name, launched, times))
        except BaseException:
            self.end()
            raise

    @property
    def are_there(self) -> bool:
        return bool(self._all)

    @property
    def machine(self) -> Machine:
        """Return what torch finds here: waits for its import. Raises RunError where that fails."""
        return self._all[0].machine

    def calibrate(
        self, given: CalibrationArgs | None, packers: Packers, clock: Clock, works: Sequence[Work]
    ) -> Generator[Event | Packed]:
        """Return what `engine.calibrate` yields, matrices packed; on another host than the first one
        only what its processes are doing. `clock` is told of what is done, and `works` are what each
        layer takes. None: nothing is left to do, which the others are told.

        Raises what one of the processes raises; RunError where one dies.
        """
        door = None if self._door is None else (self._door.port, self._door.key)
        for worker in self._all:
            _ = worker.machine
            worker.send(_Begin(given, packers, door))
        others: list[_Other] = []
        try:
            yield from _heard(self._all, others, self._door, clock, works)
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, QConvertError) else "RunError"
            for other in others:
                with suppress(QConvertError):
                    other.send(_Failed(kind, str(error)))
            raise
        else:
            for other in others:
                other.send(_AllDone())
        finally:
            for other in others:
                other.connection.close()
        # Nothing is left to do for any of them, and a GPU's memory takes a second to be given back.
        self.end(waits=False)

    def end(self, *, waits: bool = True) -> None:
        """End them, whatever they do: what they leave is gone on from. Again does nothing."""
        for worker in self._all:
            worker.end(waits=waits)
        self._all.clear()
        if self._door is not None:
            self._door.close()
        self._meeting.cleanup()


_early: list[WorkerPool] = []


def started_for(asked: Calibration) -> AbstractContextManager[None]:
    """`started_early` for a calibration on GPUs, those that it names or that there probably are. On
    several hosts none is started that others would meet and that may not be meant."""
    names = each_once(asked.devices) or guessed_devices()
    late = kind_of(names) == "cpu" or asked.distributed
    return nullcontext() if late else started_early(names)


@contextmanager
def started_early(devices: Sequence[str]) -> Iterator[None]:
    """Within this `early` finds processes for these devices, which begin their imports at once."""
    workers = WorkerPool(devices)
    _early.append(workers)
    try:
        yield
    finally:
        _early.remove(workers)
        workers.end()


def early() -> WorkerPool | None:
    """Processes that were started early, and that `started_early` ends; None where they have ended."""
    return _early[-1] if _early and _early[-1].are_there else None


def _heard(
    own: Sequence[_Worker],
    others: list[_Other],
    door: _Listener | None,
    clock: Clock,
    works: Sequence[Work],
) -> Generator[Event | Packed]:
    """Return what all of them say: what each has solved, the rest of the first one, and that a layer is
    done once all of them have said so. Those of other hosts are added to `others` as they come."""
    listened: dict[Any, _Peer] = {worker.connection: worker for worker in own}
    first = own[0]
    layer, before = 0, dict(clock.work)
    done: list[_Peer] = []
    ended: LayerDone | None = None
    while listened:
        for connection in wait(list(listened)):
            worker = listened[connection]
            try:
                event = worker.hear(clock)
            except _Raised as raised:
                raise _cause(raised.failed, worker, [*own, *others]) from None
            if event is None:
                del listened[worker.connection]
            elif isinstance(event, _AwaitPeers):
                assert door is not None
                for other in door.accepted(event.count):
                    others.append(other)
                    listened[other.connection] = other
            elif isinstance(event, LayerDone):
                # What it says of the next layer is not listened to yet.
                del listened[worker.connection]
                done.append(worker)
                ended = event if worker is first or ended is None else ended
            elif isinstance(event, Packed) or worker is first:
                yield event
            del event
        if ended is not None and len(done) == len(own) + len(others):
            if works:
                clock.layer_done(added([*works[layer : ended.layer + 1]]), before)
                layer, before = ended.layer + 1, dict(clock.work)
            yield ended
            ended = None
            for worker in done:  # the consumer has asked for more: the layer's matrices are kept
                worker.send(None)
                listened[worker.connection] = worker
            done.clear()


class _Raised(Exception):
    """A process has said why it ends."""

    def __init__(self, failed: _Failed) -> None:
        super().__init__(failed.text)
        self.failed = failed


def _cause(failed: _Failed, worker: _Peer, workers: Sequence[_Peer]) -> Exception:
    """Why one fails: the end of another, of which it has lost the connection, or what it says."""
    if failed.kind and failed.kind != LostError.__name__:
        made: QConvertError = getattr(errors, failed.kind)(failed.text)
        return made
    for other in workers:
        if other is not worker and other.ends_within(_SECONDS):
            return other.died()
    if failed.kind:
        return RunError(failed.text)
    return RuntimeError(f"calibrating on {worker.device}:\n{failed.text}")


class _Peer:
    """A process, seen from the one that listens to it."""

    device: str
    connection: Connection[Any, Any]

    def died(self) -> QConvertError:
        """Return what its end tells."""
        raise NotImplementedError

    def ends_within(self, seconds: float) -> bool:
        raise NotImplementedError

    def send(self, what: _Begin | _Failed | _AllDone | None) -> None:
        try:
            self.connection.send(what)
        except OSError:
            raise self.died() from None

    def hear(self, clock: Clock) -> Event | Packed | _AwaitPeers | None:
        """The next thing it says; None once it is done."""
        said = self._receive()
        if isinstance(said, _Failed):
            raise _Raised(said)
        for kind, amount, seconds in said.work:
            clock.worked(kind, amount, seconds)
        if not isinstance(said.event, Packed):
            event: Event | _AwaitPeers | None = said.event
            return event
        data = [bytearray(size) for size in said.sizes]
        for one in data:
            self._in_time(partial(self.connection.recv_bytes_into, one))
        return replace(said.event, data=data)

    def _receive(self) -> Any:
        return self._in_time(self.connection.recv)

    def _in_time(self, receive: Callable[[], Any]) -> Any:
        """Return what is received of a process that has not died."""
        try:
            return receive()
        except (EOFError, OSError):
            raise self.died() from None


class _Other(_Peer):
    """A process of another host, which that one's command has started."""

    def __init__(self, connection: Connection[Any, Any], rank: int, device: str, host: str) -> None:
        self.connection, self.device = connection, device
        self._who = f"process {rank} of the calibration, on {device} of {host},"

    def ends_within(self, seconds: float) -> bool:
        try:
            while self.connection.poll(seconds):
                self.connection.recv_bytes()
        except (EOFError, OSError):
            return True
        return False

    def died(self) -> QConvertError:
        return RunError(
            f"{self._who} is lost: see what it says there; run the same command again to go on, with as "
            "many processes as there are"
        )


class _Listener:
    """Address where processes of other hosts connect to the one that leads."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port: int = self._server.getsockname()[1]
        self.key = secrets.token_bytes(32)

    def accepted(self, count: int) -> Iterator[_Other]:
        """So many, which have met already. Raises RunError where one does not come."""
        self._server.settimeout(_GREETING)
        while count:
            try:
                made, _ = self._server.accept()
            except TimeoutError:
                raise RunError(
                    f"{count} of the processes of other hosts did not connect to port {self.port} of "
                    "this one: is it closed by a firewall?"
                ) from None
            connection = _greeted(made, self.key, first=True)
            if connection is not None:  # a stranger is no matter
                yield _Other(connection, *connection.recv())
                count -= 1

    def close(self) -> None:
        self._server.close()


def _greeted(made: socket.socket, key: bytes, *, first: bool) -> Connection[Any, Any] | None:
    """A connection whose other end knows the key, too; None where it does not. A host that is gone is
    noticed within a minute."""
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 4), (socket.TCP_USER_TIMEOUT, 60_000),
    ):  # fmt: skip
        made.setsockopt(socket.IPPROTO_TCP, name, value)
    # The one that leads does not wait for a stranger; the others wait until it has time for them.
    limit = struct.pack("ll", _GREETING if first else 0, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection: Connection[Any, Any] = Connection(made.detach())
    steps = [deliver_challenge, answer_challenge]
    try:
        for step in steps if first else steps[::-1]:
            step(connection, key)
    except (AuthenticationError, EOFError, OSError):
        connection.close()
        return None
    if first:
        with socket.socket(fileno=os.dup(connection.fileno())) as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


class _Worker(_Peer):
    """A process of this host, seen from the one that started it."""

    def __init__(
        self, rank: int, devices: Sequence[str], meeting: str, launched: Launched | None, times: int
    ) -> None:
        self.device = devices[rank]
        try:
            self._said = TemporaryFile()  # noqa: SIM115 - closed by `end`
            self.connection, theirs = Pipe()
            about = _ProcessArgs(
                theirs.fileno(), os.getpid(), rank, tuple(devices), meeting, launched, times
            )
            names = ", ".join(one.__name__ for one in (Launched, _ProcessArgs, main))
            code = f"from qconvert.calibrate.gpu_workers import {names}; main({about!r})"
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

    def ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def died(self) -> QConvertError:
        """Return what its end tells."""
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
class _ProcessArgs:
    """A process among others: the descriptor of its pipe, who started it, its number, the devices of all
    of them, and a folder to meet in; or how those of several hosts meet."""

    descriptor: int
    parent: int
    rank: int
    devices: tuple[str, ...]
    meeting: str
    launched: Launched | None
    times: int


class _Connection:
    """A connection to who listens to this process: its own thread and others say things."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._lock = Lock()

    def say(self, said: _WorkerMessage | _Failed, data: Sequence[bytes | bytearray] = ()) -> None:
        with self._lock:
            self.connection.send_bytes(pickle.dumps(said, protocol=5))
            for one in data:
                self.connection.send_bytes(one)

    def recv(self) -> Any:
        return self.connection.recv()


class _Leader(_Connection):
    """The process that leads, on another host. A thread hears it: where it is lost, or says that another
    one is, this process ends, whatever it waits for."""

    def __init__(self, connection: Connection[Any, Any], home: _Connection, where: str) -> None:
        super().__init__(connection)
        self._home, self._where = home, where
        self._words: Queue[Any] = Queue()
        Thread(target=self._hear, name="hear the process that leads", daemon=True).start()

    def say(self, said: _WorkerMessage | _Failed, data: Sequence[bytes | bytearray] = ()) -> None:
        try:
            super().say(said, data)
        except OSError as error:
            raise LostError(
                f"the process that leads, on {self._where}, is lost: {error}"
            ) from error

    def recv(self) -> Any:
        return self._words.get()

    def _hear(self) -> None:
        word: Any = None
        while not isinstance(word, _AllDone):
            try:
                word = self.connection.recv()
            except (EOFError, OSError):
                word = _Failed(
                    "RunError",
                    f"the process that leads the calibration, on {self._where}, is lost: see what it "
                    "says there; run the same command again to go on",
                )
            if isinstance(word, _Failed):
                with suppress(OSError):
                    self._home.say(word)
                os._exit(1)
            self._words.put(word)


def main(place: _ProcessArgs) -> None:
    """Calibrate what is asked for at the other end of an inherited pipe."""
    from qconvert.run.work.worker import die_with

    own_process.declare()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(place.parent)
    home = _Connection(Connection(place.descriptor))
    lines = [home]
    # The other end is closed where the main process is ended while this one imports.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            _serve(lines, place)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            failed = _Failed(type(error).__name__, str(error))
            if isinstance(error, LostError) and len(lines) > 1:
                time.sleep(
                    _WORD
                )  # the one that leads knows which, and ends this process with its word
            elif not isinstance(error, QConvertError):  # a fault of the program: for who reports it
                failed = _Failed("", traceback.format_exc())
            for line in reversed(lines):
                with suppress(OSError, LostError):
                    line.say(failed)
            if len(lines) > 1:
                time.sleep(_WORD)  # both have heard it, and end this process


# Of NCCL and Gloo, where the user says nothing: NVLink's multicast, which a broadcast does not need,
# fails in containers that were not given it; processes of one host need no other interface.
_NETWORK = {"NCCL_NVLS_ENABLE": "0"}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def _serve(lines: list[_Connection], place: _ProcessArgs) -> None:
    home = lines[0]
    device, launched = place.devices[place.rank], place.launched
    _set_network(launched)
    _import(device, home)
    comm = _met_here(place) if launched is None else None
    rendezvous: Rendezvous | None = None
    if launched is not None:
        from qconvert.calibrate.distributed import Rendezvous

        rendezvous = Rendezvous(launched, place.rank, place.times)
    begin: _Begin = home.recv()
    if comm is None:
        assert launched is not None
        assert rendezvous is not None
        comm = _met(rendezvous, launched, place, begin, lines)
    to = lines[-1]
    if not _agreed(comm, begin):
        to.say(_WorkerMessage(None, (), ()))
    else:
        assert begin.given is not None
        _calibrate(begin.given, begin.packers, device, comm, lines)
    while not isinstance(to.recv(), _AllDone):  # until then none must lose another
        pass
    home.say(_WorkerMessage(None, (), ()))
    home.recv()


def _calibrate(
    given: CalibrationArgs,
    packers: Packers,
    device: str,
    comm: Communicator,
    lines: Sequence[_Connection],
) -> None:
    home, to = lines[0], lines[-1]
    notes = _Notes()
    events = calibrate_with(given, device, clock=Clock(notes.add), comm=comm)
    # Codes are packed and sent by this thread while another one computes.
    events = run_in_thread(events, _AHEAD, lambda event: isinstance(event, LayerDone))
    with closing(events):
        for event in events:
            if isinstance(event, Matrix):
                packed = packers.pack(event)
                data, packed = packed.data, replace(packed, data=())
                to.say(_WorkerMessage(packed, [len(one) for one in data], notes.take()), data)
                del packed, data
            else:
                if to is not home and isinstance(event, Phase):
                    home.say(_WorkerMessage(event, (), ()))
                to.say(_WorkerMessage(event, (), notes.take()))
            if isinstance(event, LayerDone):
                to.recv()
            del event
    to.say(_WorkerMessage(None, (), notes.take()))


def _set_network(launched: Launched | None) -> None:
    from qconvert.calibrate.distributed import interface_to

    names = dict(_NETWORK)
    interface = "lo" if launched is None else interface_to(launched.address)
    names.update(dict.fromkeys(_INTERFACES, interface) if interface else {})
    for name, value in names.items():
        os.environ.setdefault(name, value)


def _import(device: str, home: _Connection) -> None:
    """Import what solving needs, and say what is found of it."""
    from qconvert.calibrate.backend import silence_transformers
    from qconvert.calibrate.devices import get_ready, this_machine
    from qconvert.calibrate.library import load_shared

    home.connection.send(this_machine())
    get_ready(device)
    load_shared()
    silence_transformers()


def _met_here(place: _ProcessArgs) -> Communicator:
    """The team of one host."""
    from qconvert.calibrate.devices import use_device
    from qconvert.calibrate.distributed import SINGLE_PROCESS, ProcessGroup, file_store

    device, count = place.devices[place.rank], len(place.devices)
    use_device(device)
    if count == 1:
        return SINGLE_PROCESS
    return ProcessGroup(place.rank, count, device, file_store(place.meeting, count))


def _met(
    rendezvous: Rendezvous,
    launched: Launched,
    place: _ProcessArgs,
    begin: _Begin,
    lines: list[_Connection],
) -> Communicator:
    """The team of all hosts. One of another host than the first connects to that, which is then the last
    of `lines`."""
    from qconvert.calibrate.devices import use_device
    from qconvert.calibrate.distributed import ProcessGroup

    device = place.devices[place.rank]
    use_device(device)
    if begin.door is not None and place.rank == 0:
        port, key = begin.door
        rendezvous.store.set("door", f"{port} {key.hex()}")
    found = rendezvous.devices(place.devices)
    rank = rendezvous.first + place.rank
    if launched.leads:
        if rank == 0:
            lines[0].say(_WorkerMessage(_AwaitPeers(len(found) - len(place.devices)), (), ()))
    else:
        said = rendezvous.get("door", "the first one").decode().split()
        try:
            made = socket.create_connection((launched.address, int(said[0])), _GREETING)
        except OSError as error:
            raise RunError(
                f"--distributed: port {said[0]} of {launched.address} cannot be reached: {error}; "
                "calibrations on several hosts need ports that no firewall closes"
            ) from error
        connection = _greeted(made, bytes.fromhex(said[1]), first=False)
        if connection is None:
            raise LostError(f"the process that leads, on {launched.address}, is gone")
        connection.send((rank, device, found[rank][0]))
        lines.append(_Leader(connection, lines[0], found[0][0]))
    return ProcessGroup(rank, len(found), device, rendezvous.store)


def _agreed(comm: Communicator, begin: _Begin) -> bool:
    """Return whether there is something to do. Raises RunError where processes are to do other
    things."""
    import torch

    from qconvert import __version__

    key = None if begin.given is None else begin.given.key
    told = comm.gathered((__version__, str(torch.__version__), key))
    if told[0][2] is None:
        return False
    for rank, one in enumerate(told):
        for what, mine, first in zip(
            ("qconvert", "torch", "plan, data and devices"), one, told[0], strict=True
        ):
            if mine != first:
                raise RunError(
                    f"--distributed: {what} of process {rank} are {mine!r}, and of the first one "
                    f"{first!r}; give all machines the same versions, source and options"
                )
    return True
