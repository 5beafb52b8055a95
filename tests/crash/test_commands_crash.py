"""Every command that makes or changes a folder, killed at any of its changes to the disk: nothing
half-made is in sight, and the same command ends in the same bytes."""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, tree
from commands import COMMANDS, Command
from faults import in_child

pytestmark = pytest.mark.crash

KILLED = -signal.SIGKILL
# Of one path, of two, of a descriptor; those of a file's bytes are cut in two.
_NAMES = ("mkdir", "unlink", "remove", "rmdir", "truncate", "replace", "rename", "link", "symlink")
_SYNCS = ("fsync", "fdatasync")
_BLOCK = 4096
_WORK = (".qconvert", ".qconvert-repair")


class Deaths:
    """The changes to the disk that this process makes from now on, whoever makes them; at the one of
    number `at` it dies."""

    def __init__(self, at: int | None) -> None:
        self.steps: list[str] = []
        self._at = at
        self._real: dict[str, Callable[..., Any]] = {}

    def step(self, what: str) -> None:
        if len(self.steps) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps.append(what)

    def watch(self) -> None:
        for name in (*_NAMES, *_SYNCS, "write", "pwrite"):
            self._real[name] = getattr(os, name)
        for name in _NAMES:
            setattr(os, name, self._named(name))
        for name in _SYNCS:  # what a process has written outlives it, synced or not
            setattr(os, name, lambda fd, name=name: self.step(name))
        os.write = self._write
        os.pwrite = self._pwrite
        own = io.open

        def opened(file: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
            if not set(mode) & set("wxa+") or isinstance(file, int):
                return own(file, mode, *given, **more)
            self.step("open")
            return _Torn(own(file, mode, *given, **more), self)

        io.open = builtins.open = opened

    def _named(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            self.step(name)
            found = self._real[name](*given, **more)
            self.step(name)
            return found

        return call

    def _write(self, fd: int, data: Any) -> int:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return int(self._real["write"](fd, data))
        view = memoryview(data).cast("B")
        self.step("write")
        half = int(self._real["write"](fd, view[: view.nbytes // 2]))
        self.step("write")
        return half + int(self._real["write"](fd, view[half:]))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        view = memoryview(data).cast("B")
        half = view.nbytes // 2 // _BLOCK * _BLOCK
        self.step("pwrite")
        if half:
            self._real["pwrite"](fd, view[:half], offset)
            self.step("pwrite")
        return half + int(self._real["pwrite"](fd, view[half:], offset + half))


class _Torn:
    """A file that is written in halves."""

    def __init__(self, file: Any, deaths: Deaths) -> None:
        self._file, self._deaths = file, deaths

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._deaths.step("half a file")
        self._file.write(data[half:])
        self._file.flush()
        self._deaths.step("a file")
        return len(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)


# --- One command ------------------------------------------------------------------------------------

Tree = Mapping[str, Any]


def steps_of(command: Command, sources: Path, room: Path) -> list[str]:
    """What an undisturbed run changes, one after another."""
    assert in_child(lambda: command.begin(sources, room)) == 0
    noted = room / "steps.json"

    def count() -> None:
        deaths = Deaths(None)
        kept = noted.open("w")  # before it is watched
        deaths.watch()
        command.run(sources, room)
        kept.write(json.dumps(deaths.steps))
        kept.close()

    assert in_child(count) == 0, command.words
    found: list[str] = json.loads(noted.read_text())
    noted.unlink()
    return found


def half_made(command: Command, room: Path, wanted: Tree, before: Tree) -> list[str]:
    """Names in sight that are not as they should be: of a folder that is made, those that differ from
    the whole's, and all that miss once the file is there that makes it a checkpoint; of one that is
    changed, those that are neither as before nor as after."""
    seen = {
        name: data
        for name, data in command.result(room).items()
        if data is not None and not set(name.split("/")) & set(_WORK)
    }
    if command.inside:
        return [n for n, data in seen.items() if data not in (wanted.get(n), before.get(n))]
    wrong = [name for name, data in seen.items() if wanted.get(name) != data]
    for made in command.made:
        at = made.removeprefix("out").lstrip("/")
        prefix = f"{at}/" if at else ""
        whole = [n for n, d in wanted.items() if n.startswith(prefix) and d is not None]
        commit = next(n for n in (f"{prefix}{INDEX}", f"{prefix}model.safetensors") if n in whole)
        if commit in seen:
            wrong += [name for name in whole if name not in seen]
    return wrong


def moments(count: int, many: int, first: int) -> list[int]:
    """So many numbers of steps, evenly spread from one of the first on, the last among them."""
    if many >= count:
        return list(range(count))
    return sorted({count - 1, *((first + n * count // many) % count for n in range(many))})


def kill(
    command: Command, sources: Path, room: Path, chosen: Callable[[list[str]], list[int]]
) -> Counter[str]:
    """Kill a command at chosen steps, and run it again each time. Returns how often it died at which
    kind of step; raises AssertionError where it did not go on to the same bytes."""
    command.begin(sources, room)
    command.run(sources, room)  # here, so that children need not import what it imports
    assert "torch" not in sys.modules, "whose threads no child has"
    wanted = command.result(room)
    shutil.rmtree(room)
    before_sources = tree(sources)
    steps = steps_of(command, sources, room)
    assert command.result(room) == wanted
    died: Counter[str] = Counter()
    for at in chosen(steps):
        shutil.rmtree(room)
        assert in_child(lambda: command.begin(sources, room)) == 0
        before = command.result(room)

        def die(at: int = at) -> None:
            Deaths(at).watch()
            command.run(sources, room)

        code = in_child(die)
        where = f"{command.words}: killed at {at} of {len(steps)}, {steps[at]}"
        assert code in (KILLED, 0), where
        if code:
            died[steps[at]] += 1
        assert half_made(command, room, wanted, before) == [], where
        assert in_child(lambda: command.run(sources, room)) == 0, f"{where}: it did not go on"
        after = command.result(room)
        names = sorted({*after, *wanted})
        assert [n for n in names if after.get(n) != wanted.get(n)] == [], where
    after_sources = tree(sources)
    assert [n for n in before_sources if after_sources.get(n) != before_sources[n]] == []
    return died


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "sources"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda n: COMMANDS[n].words)
def test_killed_it_goes_on(number: int, sources: Path, tmp_path: Path) -> None:
    """Every command at a few moments, of each one others; QCONVERT_ALL=1: at 24."""
    many = 24 if os.environ.get("QCONVERT_ALL") else 3
    died = kill(
        COMMANDS[number], sources, tmp_path / "room",
        lambda steps: moments(len(steps), many, number * 7),
    )  # fmt: skip
    assert died.total() >= many // 2


@pytest.mark.parametrize("words", ["finish OUT", "eval OUT --write", "repair OUT"])
def test_killed_between_files(words: str, sources: Path, tmp_path: Path) -> None:
    """At each moment around the files that a command replaces and the folders that it removes: where
    what is in sight is neither as before nor as after."""
    (command,) = (one for one in COMMANDS if one.words == words)
    died = kill(
        command, sources, tmp_path / "room",
        lambda steps: [at for at, what in enumerate(steps) if what in ("replace", "rmdir")],
    )  # fmt: skip
    assert died.total() >= 6
