"""A process that imports once what every worker needs, and forks them.

A worker that is an interpreter of its own spends .25 s of CPU on imports, and .75 s where it loads
compiled loops: sixteen of them 12 s, for a run whose arithmetic takes 10. Forked ones spend .01 s and
share their pages. This server is a fresh interpreter, not a fork of its caller: that may have threads,
torch's among them, and a process with threads must not fork. The server has none.

It ignores Ctrl-C, as workers do, and dies with the process that started it; workers die with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from tempfile import TemporaryFile
from typing import IO, Any

from qconvert.core import own_process
from qconvert.core.errors import RunError
from qconvert.core.shown import message
from qconvert.ops.compiled.choice import LOOP_BYTES
from qconvert.ops.compiled.choice import wanted as loops_wanted

# Most descriptors that a worker is given: its pipe, its stderr, and locks of output folders.
_MOST_DESCRIPTORS = 64
# Of a source: below this, a conversion is done by this process, or is over before imports pay.
_WORTH_IT = 256 << 20
_ROOM_FOR_LOOPS = 4 * LOOP_BYTES
_LAST_WORDS = 4096
# In what Python, numpy and the loader say where an address space is full.
_OF_MEMORY = ("memory", "cannot allocate", "failed to map", "can't start new thread", "enomem")


@dataclass(frozen=True, slots=True)
class _Preload:
    modules: tuple[str, ...]
    compiled: bool


@dataclass(frozen=True, slots=True)
class _Fork:
    descriptors: int


@dataclass(frozen=True, slots=True)
class _Wait:
    pid: int


@dataclass(frozen=True, slots=True)
class _Refused:
    """Why no worker could be forked."""

    number: int
    why: str


class Forked:
    """A worker: the pipe to it, and what it says where it cannot even begin."""

    def __init__(
        self, server: ForkServer, connection: Connection[Any, Any], said: IO[bytes]
    ) -> None:
        self.connection = connection
        self._server, self._said = server, said
        self._pid: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Waits until it is forked. Raises RunError where it could not be."""
        while self._pid is None:
            self._server.answer()
        return self._pid

    def begun(self, pid: int) -> None:
        self._pid = pid

    def ended(self) -> int:
        """Waits for its end: its exit status, or less than 0, the signal that killed it."""
        if self._code is None:
            self._code = self._server.wait(self.pid)
        return self._code

    def last_words(self) -> str:
        return _last_words(self._said)

    def stop(self) -> None:
        """Ask it to end. Linux does so when the server ends; elsewhere it is known by its number."""
        if self._code is None and self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def close(self) -> None:
        """Wait for its end: no other process holds the other end of its pipe. (Ctrl-C may have come in
        the middle of an answer of the server's, so that is not asked any more.)"""
        with suppress(OSError):
            while os.read(self.connection.fileno(), 1 << 16):
                pass
        self.connection.close()
        self._said.close()


class ForkServer:
    """The server's process, seen from the one that started it. Raises RunError where it cannot start.

    Requests are answered in their order, and answers are read when they are needed: workers are
    forked while the caller goes on."""

    def __init__(self) -> None:
        try:
            # What the interpreter says where it cannot even start: kept, for one message of ours.
            self._said = TemporaryFile()  # noqa: SIM115 - closed by close
            self._socket, theirs = socket.socketpair()
        except OSError as error:
            raise cannot_start(error) from error
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._workers: list[Forked] = []
        self._answered = 0
        # -c, not -m: run as __main__, the worker's message classes would not be those of the module.
        code = f"from qconvert.run.forkserver import main; main({theirs.fileno()}, {os.getpid()})"
        # Parts are too small to share out among threads, which numpy and torch would start.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with undisturbed():
                self._process = subprocess.Popen(
                    **own_process.python("-c", code, **threads),
                    stdin=subprocess.DEVNULL,
                    stderr=self._said,
                    pass_fds=(theirs.fileno(),),
                )
        except (OSError, MemoryError) as error:
            self._connection.close()
            self._socket.close()
            self._said.close()
            raise cannot_start(error) from error
        finally:
            theirs.close()

    def preload(self, modules: Sequence[str], *, compiled: bool) -> None:
        """Import modules, and compiled loops that are kept on disk, before the next worker is forked."""
        self._send(_Preload(tuple(modules), compiled))

    def fork(self, locks: Sequence[int]) -> Forked:
        """A worker that waits for its Setup, with these descriptors in addition."""
        try:
            ours, theirs = Pipe()
            said = TemporaryFile()  # noqa: SIM115 - closed by Forked.stop
        except OSError as error:
            raise cannot_start(error) from error
        descriptors = [theirs.fileno(), said.fileno(), *locks]
        assert len(descriptors) <= _MOST_DESCRIPTORS
        self._workers.append(Forked(self, ours, said))
        try:
            self._send(_Fork(len(descriptors)))
            with self._while_there():
                socket.send_fds(self._socket, [b"d"], descriptors)
        finally:
            theirs.close()
        return self._workers[-1]

    def answer(self) -> None:
        """Read the answer to the first request for a worker that was not read yet."""
        answer = self._receive()
        self._answered += 1
        if isinstance(answer, _Refused):
            raise cannot_start(OSError(answer.number, answer.why))
        self._workers[self._answered - 1].begun(answer)

    def wait(self, pid: int) -> int:
        """As `Forked.ended`."""
        while self._answered < len(self._workers):
            self.answer()
        self._send(_Wait(pid))
        code: int = self._receive()
        return code

    def died(self) -> RunError:
        """Why the server went."""
        return ended(self._process.pid, self._process.wait(), _last_words(self._said))

    def finish(self) -> None:
        """Wait until workers that were told to end have ended. The server waits for each, so that what
        they used is counted where children of this process are."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def close(self) -> None:
        """End it and its workers, whatever they do, and wait for their end."""
        for one in self._workers:
            one.stop()
        self._process.terminate()
        self._process.wait()
        self._connection.close()
        self._socket.close()
        self._said.close()
        for one in self._workers:
            one.close()

    def _send(self, request: _Preload | _Fork | _Wait) -> None:
        with self._while_there():
            self._connection.send(request)

    def _receive(self) -> Any:
        with self._while_there():
            return self._connection.recv()

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self.died() from None


_early: ForkServer | None = None


@contextmanager
def started_early(nbytes: int, memory: int | None, imports: Sequence[str] = ()) -> Iterator[None]:
    """Within this, the first run that needs a server finds one that began its imports at once, for a run
    over this many bytes: .75 s that pass while the plan is made and judged. `imports` are of its source.
    Compiled loops are left out for a run whose `memory` may have no room for them."""
    global _early
    if len(os.sched_getaffinity(0)) > 1 and nbytes >= _WORTH_IT:
        _early = ForkServer()
        room = memory is None or memory >= _ROOM_FOR_LOOPS
        _early.preload(["numpy", "xxhash", *imports], compiled=room and loops_wanted(nbytes))
    try:
        yield
    finally:
        server, _early = _early, None
        if server is not None:
            server.close()


def server_for_a_run() -> ForkServer:
    """A server, which the caller closes."""
    global _early
    server, _early = _early, None
    return server or ForkServer()


def ended(pid: int, code: int, last_words: str) -> RunError:
    """What is said of a worker that went without a word."""
    why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    hint = _HINTS.get(-code, last_words)
    return RunError(f"worker process {pid} {why}{hint}; run the same command again to go on")


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory? try fewer --jobs)",
    # Of a mapped page, which the file no longer has, or the disk does not give.
    signal.SIGBUS: " (a source file became shorter while it was read, or its disk has an error)",
}


def cannot_start(error: OSError | MemoryError) -> RunError:
    what = error.strerror if isinstance(error, OSError) else "out of memory"
    return RunError(
        f"a worker process cannot be started: {what or error}; raise the limit (`ulimit -n`, "
        "`ulimit -u`, `ulimit -v`), or give --jobs 1. Run the same command again to go on"
    )


def _last_words(said: IO[bytes]) -> str:
    """The last line that the interpreter wrote: what it could not do."""
    size = os.fstat(said.fileno()).st_size
    lines = os.pread(said.fileno(), _LAST_WORDS, max(0, size - _LAST_WORDS))
    found = [line.strip() for line in lines.decode(errors="replace").split("\n") if line.strip()]
    if not found:
        return ""
    short = any(word in found[-1].lower() for word in _OF_MEMORY)
    hint = "; there is too little memory for it, see `ulimit -v`, or give --jobs 1" if short else ""
    return f" ({message(found[-1])}){hint}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """A process is started without Ctrl-C, which is this one's to answer: in the middle of its imports
    it would end in a traceback of its own. A Ctrl-C meanwhile comes as soon as this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the server's own process -----------------------------------------------------------------


def main(descriptor: int, parent: int) -> None:
    """Answer requests at the other end of an inherited socket until that is closed."""
    from qconvert.run.worker import die_with
    from qconvert.run.worker import main as work

    # It was blocked until now: what came meanwhile is dropped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(parent)
    control = socket.socket(fileno=descriptor)
    connection: Connection[Any, Any] = Connection(os.dup(descriptor))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request = connection.recv()
            if isinstance(request, _Preload):
                _preload(request)
            elif isinstance(request, _Wait):
                connection.send(os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1]))
            else:
                connection.send(_forked(control, connection, request.descriptors, work))
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _preload(request: _Preload) -> None:
    """Import what workers would import each. macOS frameworks that numpy loads do not survive a fork:
    there each worker imports for itself."""
    import gc
    from importlib import import_module

    if sys.platform == "darwin":
        return
    for name in request.modules:
        import_module(name)
    if request.compiled:
        from qconvert.ops.compiled.choice import load

        # Who asked for numba outright, and cannot have it, is told by the worker that needs it.
        with suppress(RunError):
            load()
    gc.freeze()  # a collection in a worker would copy every page of what was imported


def _forked(
    control: socket.socket,
    connection: Connection[Any, Any],
    expected: int,
    work: Callable[[int], None],
) -> int | _Refused:
    """Fork a worker with the descriptors that come now. Returns its number."""
    import errno

    _, descriptors, flags, _ = socket.recv_fds(control, 1, expected)
    try:
        if len(descriptors) < expected or flags & socket.MSG_CTRUNC:
            return _Refused(errno.EMFILE, os.strerror(errno.EMFILE))
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            from qconvert.run.worker import die_with

            die_with(server)
            control.close()
            connection.close()
            pipe, said, *_ = descriptors
            os.dup2(said, 2)
            os.close(said)
            work(pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    except OSError as error:
        return _Refused(error.errno or 0, error.strerror or str(error))
    finally:
        for one in descriptors:
            os.close(one)
