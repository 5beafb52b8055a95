"""The server that forks workers: what it refuses, and that nobody outlives it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest
from faults import children, state_of, wait_until_gone

from qconvert.core.errors import RunError
from qconvert.run.work.forkserver import _MOST_DESCRIPTORS, ForkServer
from qconvert.run.work.worker import WorkerSetup

NOTHING = WorkerSetup((), (), 4096, 4096)


def _descriptors() -> set[str]:
    found = list(Path("/proc/self/fd").iterdir())  # one of them is this listing's own, gone by now
    return {f"{fd.name} {fd.readlink()}" for fd in found if fd.exists()}


def test_workers_end_with_their_status_and_nothing_is_left_open() -> None:
    before = _descriptors()
    with closing(ForkServer()) as server:
        connection, _ = server.fork(2, (0, 1))
        os.kill(server.pids()[1], signal.SIGKILL)
        assert server.ended(1) == -signal.SIGKILL
        connection.send(NOTHING)
        connection.send(None)
        assert server.ended(0) == 0
        assert server.ended(1) == -signal.SIGKILL, "asked again"
        server.finish()
    assert _descriptors() == before


def test_more_descriptors_than_one_message_takes() -> None:
    """Each has only its own pipe: its end is seen while all others live."""
    with closing(ForkServer()) as server:
        connections = server.fork(5, [0] * (_MOST_DESCRIPTORS + 20))
        assert len({*server.pids()}) == 5
        os.kill(server.pids()[-1], signal.SIGKILL)
        with pytest.raises(EOFError):
            connections[-1].recv()
        assert not connections[0].poll()


def test_what_a_worker_said_last_is_told() -> None:
    with closing(ForkServer()) as server:
        (connection,) = server.fork(1, ())
        connection.send("no setup")
        assert "ended with status 1 (AssertionError" in str(server.why_ended(0))


def test_descriptors_that_the_server_has_no_room_for() -> None:
    others = set(children(os.getpid()))
    with closing(ForkServer()) as server:
        (process,) = set(children(os.getpid())) - others
        resource.prlimit(process, resource.RLIMIT_NOFILE, (9, 9))
        server.fork(1, [0] * 8)
        with pytest.raises(
            RunError, match=r"cannot be started: Too many open files; raise the limit"
        ):
            server.pids()


def test_a_server_that_is_killed_takes_its_workers_along() -> None:
    with closing(ForkServer()) as server:
        server.fork(1, ())
        (worker,) = server.pids()
        (process,) = [pid for pid in children(os.getpid()) if worker in children(pid)]
        os.kill(process, signal.SIGKILL)
        wait_until_gone([worker])
        with pytest.raises(RunError, match=rf"worker process {process} was killed by signal 9"):
            server.ended(0)


def test_closed_in_the_middle_of_anything() -> None:
    """Ctrl-C may come before an answer is read, and in the middle of one. A worker that was forked
    but has not yet asked to die with the server finds it gone."""
    for asked in (0, 1, 3):
        for read in (False, True):
            others = set(children(os.getpid()))
            with closing(ForkServer()) as server:
                server.preload(["json"], compiled=False)
                if asked:
                    server.fork(asked, ())
                known = server.pids() if asked and read else []
                (process,) = set(children(os.getpid())) - others
                forked = children(process)
            assert state_of(process) == ""
            wait_until_gone([*known, *forked])


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with closing(ForkServer()) as server:
        server.preload(["no_such_module"], compiled=False)
        server.fork(1, ())
        with pytest.raises(RunError, match=r"ended with status 1 \(ModuleNotFoundError: .*no_such"):
            server.pids()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not survive it")
@pytest.mark.parametrize("modules", [[], ["numpy"]])
def test_what_is_preloaded_is_there_in_a_worker(modules: list[str]) -> None:
    """Read from what the worker has mapped."""
    with closing(ForkServer()) as server:
        server.preload(modules, compiled=False)
        server.fork(1, ())
        mapped = Path(f"/proc/{server.pids()[0]}/maps").read_text()
        assert ("_multiarray_umath" in mapped) == bool(modules)
