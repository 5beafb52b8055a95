"""A runtime's loader as a server: imported once; then each line of stdin is a folder to load, in a child
that is forked for it, and each line of stdout says what happened."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaders.pretend_cuda import OnCpu

Told = Callable[[str, Any], None]
Load = Callable[[dict[str, Any], Told], None]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.getMessage()[:300]] = None


def _answer(line: str, load: Load) -> dict[str, Any]:
    """What a child reports of one folder."""
    said: dict[str, Any] = {"error": None}
    job = json.loads(line)
    os.environ |= job["environment"]
    watch = _Warnings()
    logging.getLogger().addHandler(watch)
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).propagate = True
    try:
        with OnCpu():
            load(job, said.__setitem__)
    except Exception as error:  # what a loader raises is the answer
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        said |= {"error": f"{type(error).__name__}: {str(error)[:500]}", "at": inside[-4:]}
    said["warnings"] = list(watch.lines)[:60]
    return said


def _in_child(line: str, load: Load) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(2, 1)  # what a loader prints is no answer
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(_answer(line, load), default=str))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"the process ended with {status}", "step": "died"})


def serve(import_all: Callable[[tuple[int, int]], None], load: Load) -> None:
    """Import for a GPU of `--capability`, say so, and answer until stdin ends. `load` loads a folder as
    a rank would, and tells of each fact as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", default="9.0")
    major, _, minor = parser.parse_args().capability.partition(".")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_all((int(major), int(minor)))
    gc.freeze()  # a collection in a child would copy every page of what was imported
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(_in_child(line, load) + "\n")
        answers.flush()
    os._exit(0)  # extensions of packages complain of what is still frozen
