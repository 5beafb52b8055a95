"""Plays cases: a folder each, a forked child each, what it did and what it changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hostile.bases import Bases
from hostile.case import DEADLINE_SECONDS, EXTRA_BYTES, Case, Ground, Played, Scene
from hostile.trees import Entry, changes, digest, tree

_TESTS = Path(__file__).resolve().parent.parent
# What the neighbours of SRC and OUT are; nothing of it may change.
_CANARIES = {
    "victim.txt": b"keep me\n",
    "beside/model.safetensors": b"another's weights\n",
    "beside/config.json": b'{"model_type": "anothers"}\n',
    "beside/.qconvert/journal.jsonl": b"another's work\n",
}
# A secret outside of all folders of a case: it must never be in an output.
SECRET = "hostile-secret-7f3a"


class Zygote:
    """A process that forks a child a command; see zygote.py."""

    def __init__(self, heavy: bool) -> None:
        self._home = tempfile.mkdtemp(prefix="hostile-hub-")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent)]),
            "HF_HOME": self._home,
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "HF_TOKEN", "COLUMNS"):
            env.pop(name, None)
        command = [sys.executable, "-P", "-m", "hostile.zygote", *(["--heavy"] if heavy else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the zygote ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._home)


@dataclass(frozen=True)
class Outcome:
    """A case as it was played. `input` tells distinct hostile inputs apart; `folder` is where it was
    played, if it was kept."""

    case: Case
    played: Played
    input: str
    folder: Path | None


class Stage:
    """Where cases are played, one after another. `heavy` commands get a zygote with torch in it."""

    def __init__(self, bases: Bases, keep: Path | None = None) -> None:
        self.bases = bases
        self._keep = keep
        self._zygotes: dict[bool, Zygote] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="hostile-"))
        self._number = 0
        self._usual: dict[Scene, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for zygote in self._zygotes.values():
            zygote.close()
        _remove(self._scratch)

    def ground(self, scene: Scene, case: Case | None = None) -> Path:
        """A fresh folder with the scene's bases and canaries in it."""
        self._number += 1
        if self._keep is not None and case is not None:
            root = self._keep / case.name.replace("/", "~")
            if root.exists():
                _remove(root)
            root = root / "case"
        else:
            root = self._scratch / str(self._number) / "case"
        root.mkdir(parents=True)
        for name, data in _CANARIES.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        (root.parent / "secret.txt").write_text(SECRET)
        for folder, base in scene.bases:
            shutil.copytree(self.bases.folder(base), root / folder, symlinks=True)
        if scene.has & {"recipe"}:
            shutil.copy(self.bases.folder("recipe.yaml"), root / "recipe.yaml")
        if any("{root}/data.jsonl" in word for word in scene.arguments):
            shutil.copy(self.bases.folder("data.jsonl"), root / "data.jsonl")
        for name in ("tmp", "home"):
            (root.parent / name).mkdir()
        return root

    def usual(self, scene: Scene) -> int:
        """The excess of the scene on a sound input, in bytes: what a hostile one is compared with."""
        if scene not in self._usual:
            told = blake2b(repr(scene).encode(), digest_size=16).hexdigest()
            known = self.bases.root / f"usual-{told}"
            if not known.exists():
                root = self.ground(scene)
                words = self.arguments(scene.arguments, root)
                reply = self._order(scene, root, words, EXTRA_BYTES * 8)
                _remove(root.parent)
                self.bases.root.mkdir(parents=True, exist_ok=True)
                writing = known.with_suffix(f".{os.getpid()}")
                writing.write_text(f"{max(0, reply['excess'] - scene.budget)}")
                writing.rename(known)
            self._usual[scene] = int(known.read_text())
        return self._usual[scene]

    def arguments(self, words: Sequence[str], root: Path) -> tuple[str, ...]:
        places = {
            "root": root, "src": root / "src", "out": root / "out",
            "good": root / "good", "outside": root.parent,
        }  # fmt: skip
        return tuple(_filled(word, places) for word in words)

    def _order(
        self, scene: Scene, root: Path, arguments: Sequence[str], most: int
    ) -> dict[str, Any]:
        zygote = self._zygotes.get(scene.heavy)
        if zygote is None:
            zygote = self._zygotes[scene.heavy] = Zygote(scene.heavy)
        return zygote.run({
            "arguments": list(arguments),
            "cwd": str(root),
            "deadline": DEADLINE_SECONDS,
            "most": most,
            "tmp": str(root.parent / "tmp"),
            "home": str(root.parent / "home"),
        })  # fmt: skip

    def play(self, case: Case) -> Outcome:
        """Break a fresh folder, run the command, look at what it did."""
        scene = case.scene
        most = self.usual(scene) + scene.budget + EXTRA_BYTES
        root = self.ground(scene, case)
        case.mutation.make(Ground(root, root / scene.broken, case.random))
        words = (*scene.arguments, *case.mutation.arguments)
        arguments = self.arguments(words, root)
        before = tree(root.parent)
        reply = self._order(scene, root, arguments, most)
        folder = root.parent
        after = tree(folder)
        for name in ("stdout", "stderr"):
            after.pop(name, None)
        changed = changes(before, after)
        result = tree(self.bases.folder(scene.result)) if scene.result else {}
        done = Played(
            arguments,
            reply["code"],
            (folder / "stdout").read_bytes()[: 32 << 20],
            (folder / "stderr").read_bytes()[: 32 << 20],
            reply["seconds"],
            reply["excess"] - most + EXTRA_BYTES,
            reply["signal"],
            reply["stopped"],
            tuple(reply["notes"]),
            changed,
            tuple(_leaks(folder, changed)),
            tuple(
                name
                for name, entry in result.items()
                if entry[0] == "file" and not _as_made(name, entry, after.get(f"case/out/{name}"))
            ),
        )
        told = digest(before, *words)
        if self._keep is None:
            _remove(folder)
            return Outcome(case, done, told, None)
        return Outcome(case, done, told, folder)


def _filled(word: str, places: Mapping[str, Path]) -> str:
    """Not str.format: arguments may hold braces of their own."""
    for name, path in places.items():
        word = word.replace(f"{{{name}}}", str(path))
    return word


def _as_made(name: str, made: Entry, found: Entry | None) -> bool:
    """A card may be edited after it was made: uploads do it, and people."""
    if found is None or found[0] != "file":
        return False
    return name == "README.md" or made == found


def _leaks(folder: Path, changed: Sequence[str]) -> Iterator[str]:
    """Files that are new or changed and hold the secret."""
    for change in changed:
        path = folder / change[2:]
        if change[0] == "-" or path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as stream:
            if SECRET.encode() in stream.read(1 << 20):
                yield change[2:]


def _remove(folder: Path) -> None:
    """Bytes, for names that are no text."""
    shutil.rmtree(os.fsencode(folder))
