"""A process that imports once what every worker needs, and forks them.

A worker that is an interpreter of its own spends 0.25 s of CPU on imports, and 0.75 s where it loads
compiled loops: sixteen of them 12 s, for a run whose arithmetic takes 10. Forked ones spend 0.01 s and
share their pages. This server is a fresh interpreter, not a fork of its caller: that may have threads,
torch's among them, and a process with threads must not fork. The server has none. multiprocessing's
would run the caller's __main__ again, outlive the run, import for the first run alone, and need a socket
in TMPDIR.

It ignores Ctrl-C, as workers do, and dies with the process that started it; workers die with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn, TypeAlias

from qconvert.compiled.choice import LOOP_BYTES
from qconvert.compiled.choice import wanted as loops_wanted
from qconvert.core import own_process
from qconvert.core.errors import RunError
from qconvert.core.shown import message

AnyConnection: TypeAlias = "Connection[Any, Any]"

# Of one message (SCM_MAX_FD of Linux is 253).
_MOST_DESCRIPTORS = 200
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
    """So many workers, with descriptors of as many pipes and of locks."""

    workers: int
    descriptors: int


class ForkServer:
    """The server's process, seen from the one that started it. Raises RunError where it cannot start.

    Its answers (the workers' numbers, then the end of each) are read when they are needed: workers are
    forked while the caller goes on."""

    def __init__(self) -> None:
        try:
            # What the interpreter and workers say where they cannot go on, for one message of ours.
            self._said = TemporaryFile()  # noqa: SIM115 - closed by close
            self._socket, theirs = socket.socketpair()
        except OSError as error:
            raise cannot_start(error) from error
        self._connection: AnyConnection = Connection(os.dup(self._socket.fileno()))
        self._workers: list[AnyConnection] = []
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        # -c, not -m: run as __main__, the worker's message classes would not be those of the module.
        code = (
            f"from qconvert.run.work.forkserver import main; main({theirs.fileno()}, {os.getpid()})"
        )
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
        """Import modules, and what runs compiled loops, before workers are forked."""
        with self._while_there():
            self._connection.send(_Preload(tuple(modules), compiled))

    def fork(self, count: int, locks: Sequence[int]) -> list[AnyConnection]:
        """Pipes to workers that wait for their Setup, with these descriptors in addition. Once."""
        theirs: list[AnyConnection] = []
        try:
            for _ in range(count):
                pipe = Pipe()
                self._workers.append(pipe[0])
                theirs.append(pipe[1])
            descriptors = [*(one.fileno() for one in theirs), *locks]
            with self._while_there():
                self._connection.send(_Fork(count, len(descriptors)))
                for at in range(0, len(descriptors), _MOST_DESCRIPTORS):
                    some = descriptors[at : at + _MOST_DESCRIPTORS]
                    socket.send_fds(self._socket, [b"d"], some)
        except OSError as error:
            raise cannot_start(error) from error
        finally:
            for one in theirs:
                one.close()
        return self._workers

    def pids(self) -> list[int]:
        """Waits until workers are forked. Raises RunError where they could not be."""
        if not self._pids:
            answer = self._receive()
            if isinstance(answer, OSError):
                raise cannot_start(answer)
            self._pids = answer
        return self._pids

    def ended(self, worker: int) -> int:
        """Waits for a worker's end: its exit status, or less than 0, the signal that killed it."""
        pid = self.pids()[worker]
        while pid not in self._codes:
            self._codes.update([self._receive()])
        return self._codes[pid]

    def why_ended(self, worker: int) -> RunError:
        """Return what is said of a worker that went without a word."""
        try:
            return ended(self.pids()[worker], self.ended(worker), _last_words(self._said))
        except RunError as error:  # of the server: it went, and its workers with it
            return error

    def finish(self) -> None:
        """Wait until workers that were told to end have ended. The server waits for each, so that what
        they used is counted where children of this process are."""
        self._process.wait()

    def close(self) -> None:
        """End it and its workers, whatever they do, and wait for their end."""
        for pid in self._pids:  # Linux ends them with the server
            if pid not in self._codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        self._process.terminate()
        self._process.wait()
        self._connection.close()
        self._socket.close()
        self._said.close()
        for one in self._workers:
            # No other process holds the other end. (Ctrl-C may have come in the middle of an answer of
            # the server's, so that is not asked any more.)
            with suppress(OSError):
                while os.read(one.fileno(), 1 << 16):
                    pass
            one.close()

    def _receive(self) -> Any:
        with self._while_there():
            return self._connection.recv()

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code, words = self._process.wait(), _last_words(self._said)
            raise ended(self._process.pid, code, words) from None


_early: ForkServer | None = None


@contextmanager
def started_early(nbytes: int, memory: int | None, imports: Sequence[str] = ()) -> Iterator[None]:
    """Within this, the first run that needs a server finds one that began its imports at once, for a
    run over this many bytes: 0.75 s that pass while the plan is made and judged. `imports` are of its
    source. Compiled loops are left out for a run whose `memory` may have no room for them."""
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
    """Return what is said of a worker that went without a word."""
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
    """Answer requests at the other end of an inherited socket until workers are forked, and wait for
    these."""
    from qconvert.run.work.worker import die_with

    # It was blocked until now: what came meanwhile is dropped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(parent)
    control = socket.socket(fileno=descriptor)
    connection: AnyConnection = Connection(os.dup(descriptor))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while isinstance(request := connection.recv(), _Preload):
            _preload(request)
        try:
            connection.send(_forked(control, connection, request))
        except OSError as error:
            connection.send(error)
            return
        with suppress(ChildProcessError):
            while True:
                pid, status = os.wait()
                connection.send((pid, os.waitstatus_to_exitcode(status)))


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
        from qconvert.ops.compiled import load

        # Who asked for numba outright, and cannot have it, is told by the worker that needs it.
        with suppress(RunError):
            load()
    gc.freeze()  # a collection in a worker would copy every page of what was imported


def _forked(control: socket.socket, connection: AnyConnection, request: _Fork) -> list[int]:
    """Fork workers with the descriptors that come now. Returns their numbers."""
    import errno

    given: list[int] = []
    while len(given) < request.descriptors:
        _, more, flags, _ = socket.recv_fds(control, 1, _MOST_DESCRIPTORS)
        given += more
        if not more or flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    server = os.getpid()
    pids: list[int] = []
    for own in given[: request.workers]:
        pid = os.fork()
        if not pid:
            others = [pipe for pipe in given[: request.workers] if pipe != own]
            _work(own, server, [control.fileno(), connection.fileno(), *others])
        pids.append(pid)
    for one in given:
        os.close(one)
    return pids


def _work(pipe: int, server: int, others: Sequence[int]) -> NoReturn:
    """A worker's life; `others` are descriptors that are not its."""
    from qconvert.run.work.worker import die_with
    from qconvert.run.work.worker import main as work

    code = 1
    try:
        die_with(server)
        for one in others:
            os.close(one)
        work(pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
