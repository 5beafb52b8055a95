"""The server that forks workers: what it refuses, and that nobody outlives it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
from faults import children, state_of, wait_until_gone

from qconvert.core.errors import RunError
from qconvert.run.forkserver import ForkServer
from qconvert.run.worker import Setup

NOTHING = Setup((), (), 4096, 4096)


def _descriptors() -> set[str]:
    found = list(Path("/proc/self/fd").iterdir())  # one of them is this listing's own, gone by now
    return {f"{fd.name} {fd.readlink()}" for fd in found if fd.exists()}


def test_workers_end_with_their_status_and_nothing_is_left_open() -> None:
    before = _descriptors()
    server = ForkServer()
    try:
        ended, killed = server.fork(()), server.fork((0, 1))
        ended.connection.send(NOTHING)
        ended.connection.send(None)
        assert ended.ended() == 0
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.ended() == -signal.SIGKILL
        assert killed.ended() == -signal.SIGKILL, "asked again"
    finally:
        server.close()
    assert _descriptors() == before


def test_what_a_worker_said_last_is_its_own() -> None:
    server = ForkServer()
    try:
        wrong, right = server.fork(()), server.fork(())
        wrong.connection.send("no setup")
        assert wrong.ended() == 1
        assert "AssertionError" in wrong.last_words()
        assert right.last_words() == ""
    finally:
        server.close()


def test_descriptors_that_the_server_has_no_room_for() -> None:
    server = ForkServer()
    try:
        begun = server.fork(()).pid
        (process,) = [pid for pid in children(os.getpid()) if begun in children(pid)]
        resource.prlimit(process, resource.RLIMIT_NOFILE, (9, 9))
        refused = server.fork([0] * 8)
        with pytest.raises(
            RunError, match=r"cannot be started: Too many open files; raise the limit"
        ):
            _ = refused.pid
    finally:
        server.close()


def test_a_server_that_is_killed_takes_its_workers_along() -> None:
    server = ForkServer()
    try:
        worker = server.fork(())
        (process,) = [pid for pid in children(os.getpid()) if worker.pid in children(pid)]
        os.kill(process, signal.SIGKILL)
        wait_until_gone([worker.pid])
        with pytest.raises(RunError, match=rf"worker process {process} was killed by signal 9"):
            worker.ended()
    finally:
        server.close()


def test_closed_in_the_middle_of_anything() -> None:
    """Ctrl-C may come before an answer is read, and in the middle of one. A worker that was forked
    but has not yet asked to die with the server finds it gone."""
    for asked in (0, 1, 3):
        others = set(children(os.getpid()))
        server = ForkServer()
        try:
            server.preload(["json"], compiled=False)
            workers = [server.fork(()) for _ in range(asked)]
            known = [worker.pid for worker in workers[:1]]
            (process,) = set(children(os.getpid())) - others
            forked = children(process)
        finally:
            server.close()
        assert state_of(process) == ""
        wait_until_gone([*known, *forked])


def test_a_module_that_cannot_be_imported_is_named() -> None:
    server = ForkServer()
    try:
        server.preload(["no_such_module"], compiled=False)
        worker = server.fork(())
        with pytest.raises(RunError, match=r"ended with status 1 \(ModuleNotFoundError: .*no_such"):
            _ = worker.pid
    finally:
        server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not survive it")
def test_what_is_preloaded_is_there_in_a_worker(tmp_path: Path) -> None:
    """Read from what the worker has mapped."""
    numpy = "_multiarray_umath"
    server = ForkServer()
    try:
        assert numpy not in Path(f"/proc/{server.fork(()).pid}/maps").read_text()
        server.preload(["numpy"], compiled=False)
        assert numpy in Path(f"/proc/{server.fork(()).pid}/maps").read_text()
    finally:
        server.close()
