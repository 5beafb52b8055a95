"""A process that has everything imported and forks a child for each command it is told to run.

Reads a line of JSON a command from stdin, writes a line of JSON about it to stdout:

    {"arguments": [...], "cwd": "...", "deadline": s, "most": bytes, "tmp": "...", "home": "..."}
    {"code": 1, "signal": null, "stopped": null, "seconds": 0.1, "excess": 4096, "notes": []}

The child's stdout and stderr go to the files `cwd/../stdout` and `stderr`. It is a session of its own,
so that what it started ends with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_UNASKED = ("kernels", "plugin")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_POLL_SECONDS = 0.02
# Beyond what the process has mapped: what the poll below misses must not take the machine down.
_ADDRESSES = 8 << 30
_CPU_SECONDS = 60
_FILE_BYTES = 1 << 30


def _import_all(heavy: bool) -> None:
    import qconvert.cli.main
    import qconvert.run

    for name in ("huggingface_hub", "numpy", "pydantic", "yaml", "xxhash"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(qconvert.__path__, "qconvert."):
        # Kernels import triton, plug-ins sglang: no command does unasked.
        if module.name.endswith("__main__") or any(part in module.name for part in _UNASKED):
            continue
        importlib.import_module(module.name)
    if heavy:
        for name in ("torch", "transformers", "llmcompressor.modifiers.gptq"):
            importlib.import_module(name)


def _resident(pid: int | str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _tree(pid: int) -> list[int]:
    """The process and what it started."""
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
    return found


def _no_network() -> None:
    """Whoever tries to reach another machine is told on."""
    connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX:
            return connect(self, address)
        os.write(2, f"\nHOSTILE: connects to {address!r}\n".encode())
        raise OSError("there is no network here")

    def look_up(*names: Any, **_more: Any) -> Any:
        os.write(2, f"\nHOSTILE: looks up {names[0]!r}\n".encode())
        raise socket.gaierror("there is no network here")

    socket.socket.connect = refuse  # type: ignore[assignment,method-assign]
    socket.getaddrinfo = look_up


def _child(order: dict[str, Any]) -> None:
    """Run the command. Never returns."""
    os.setsid()
    base = Path(order["cwd"]).parent
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for fd, name in ((1, "stdout"), (2, "stderr")):
        opened = os.open(base / name, flags, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.chdir(order["cwd"])
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _ADDRESSES, mapped + _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(HOME=order["home"], TMPDIR=order["tmp"])
    tempfile.tempdir = None  # what was imported may have looked it up before
    _no_network()
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["qconvert", *order["arguments"]]
    code = 0
    try:
        if order["arguments"][:1] == ["--fake"]:  # the oracle's own tests
            exec(order["arguments"][1], {"__name__": "fake"})
        else:
            from qconvert.cli.main import main

            main(list(order["arguments"]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def waited(pids: Sequence[int]) -> float:
    """Seconds in which threads could have run and had no CPU: what others took of it is no hang."""
    total = 0
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                total += int(file.read_text().split()[1])
    return total / 1e9


def _run(order: dict[str, Any]) -> dict[str, Any]:
    before = _resident("self")
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _child(order)
        finally:
            os._exit(70)
    watch = os.pidfd_open(pid)
    stopped = None
    peak = 0
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    while not poller.poll(_POLL_SECONDS * 1000):
        tree = _tree(pid)
        now = sum(map(_resident, tree)) - before
        peak = max(peak, now)
        if now > order["most"]:
            stopped = "memory"
        elif (past := time.monotonic() - begun - order["deadline"]) > 0 and past > waited(tree):
            stopped = "deadline"
        if stopped:
            for one in tree:
                try:
                    os.kill(one, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            break
    _, status, usage = os.wait4(pid, 0)
    os.close(watch)
    seconds = time.monotonic() - begun
    try:
        os.killpg(pid, signal.SIGKILL)  # what it left running
        notes = ["left processes running"] if stopped is None else []
    except (ProcessLookupError, PermissionError):
        notes = []
    # The child began with our pages: what it added is its own. Workers are exec'd and counted in the
    # sum above, and by the largest of them here.
    excess = max(peak, usage.ru_maxrss * 1024 - before)
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": code if code >= 0 else None,
        "signal": -code if code < 0 else None,
        "stopped": stopped,
        "seconds": seconds,
        "excess": excess,
        "notes": notes,
    }


def main(heavy: bool) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _import_all(heavy)
    gc.collect()
    gc.freeze()
    replies.write('{"ready": true}\n')
    replies.flush()
    while line := sys.stdin.readline():
        replies.write(json.dumps(_run(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main("--heavy" in sys.argv)
