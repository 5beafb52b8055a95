"""A runtime's loader as a server: imported once for all processes of the tests, each of which has a
connection; a line of it is a folder to load, in a child that is forked for it, and the line that comes
back says what happened."""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

from .from_headers import FromHeaders, read_headers_alone
from .held import ByBytes
from .parse_lines import parsed
from .pretend_cuda import OnCpu

Told = Callable[[str, Any], None]
Watch = ByBytes | FromHeaders
Load = Callable[[dict[str, Any], Told, Watch], None]
Parser = Callable[[], argparse.ArgumentParser]
# How often a server looks whether anybody is still connected.
_SECONDS = 0.5
_MOST_CPU = 1800  # seconds, of each process


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.getMessage()[:300]] = None


def _answer(line: str, load: Load, parser: Parser) -> dict[str, Any]:
    """Report of a child on one folder, or on serving lines."""
    said: dict[str, Any] = {"error": None}
    job = json.loads(line)
    if "lines" in job:
        taker = parser()
        return {"parsed": [parsed(taker, words) for words in job["lines"]]}
    os.environ |= job["environment"]
    watch: Watch = ByBytes()
    if job.get("headers"):
        watch = FromHeaders()
        read_headers_alone()
    heard = _Warnings()
    logging.getLogger().addHandler(heard)
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).propagate = True
    try:
        with OnCpu(), watch if isinstance(watch, FromHeaders) else nullcontext():
            load(job, said.__setitem__, watch)
    except Exception as error:  # what a loader raises is the answer
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        said |= {"error": f"{type(error).__name__}: {str(error)[:500]}", "at": inside[-4:]}
    said["warnings"] = list(heard.lines)[:60]
    return said


def _in_child(line: str, load: Load, parser: Parser) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(2, 1)  # what a loader prints is no answer
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(_answer(line, load, parser), default=str))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"the process ended with {status}", "step": "died"})


def _serve_one(connection: socket.socket, load: Load, parser: Parser) -> None:
    """Answer one process of the tests until it has closed its end."""
    with connection.makefile("rw") as lines:
        for line in iter(lines.readline, ""):
            lines.write(_in_child(line, load, parser) + "\n")
            lines.flush()


def _serve_all(listening: socket.socket, lock: Path, load: Load, parser: Parser) -> None:
    """A child for each connection, until there is none left. Who connects holds the lock, so none comes
    while this ends."""
    served, children = False, 0
    while True:
        if select.select([listening], [], [], _SECONDS)[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _serve_one(connection, load, parser)
                os._exit(0)
            connection.close()
            served, children = True, children + 1
        while children and os.waitpid(-1, os.WNOHANG)[0]:
            children -= 1
        if served and not children:
            if not lock.exists():
                return  # nobody can come: the room is gone
            with lock.open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not select.select([listening], [], [], 0)[0]:
                    Path(listening.getsockname()).unlink()
                    return


def _end_with(parent: int) -> None:
    """End this process and all of its group once its parent has."""
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os.killpg(0, signal.SIGKILL)


def serve(import_all: Callable[[tuple[int, int]], None], load: Load, parser: Parser) -> None:
    """Import for a GPU of `--capability`, say so, and answer at `--at` until nobody is connected. `load`
    loads a folder as a rank would, and tells of each fact as soon as it is known; `parser` makes the
    runtime's own of its serving lines."""
    takes = argparse.ArgumentParser()
    takes.add_argument("--capability", default="9.0")
    takes.add_argument("--at", type=Path, required=True)
    takes.add_argument(
        "--memory", type=int, help="bytes; and end with the process that started this"
    )
    asked = takes.parse_args()
    if asked.memory:
        # Anonymous memory: libraries of GPUs reserve more addresses than a machine has memory.
        resource.setrlimit(resource.RLIMIT_DATA, (asked.memory, asked.memory))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU, _MOST_CPU))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    major, _, minor = asked.capability.partition(".")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all((int(major), int(minor)))
    gc.freeze()  # a collection in a child would copy every page of what was imported
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(asked.at))
    listening.listen()
    with answers:
        answers.write("ready\n")
    _serve_all(listening, asked.at.with_suffix(".lock"), load, parser)
    os._exit(0)  # extensions of packages complain of what is still frozen
