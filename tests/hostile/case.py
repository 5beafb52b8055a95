"""A hostile case, and the folder that it is played in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from random import Random

MIB = 1 << 20
# What conversions are given as --memory.
BUDGET = 256 * MIB
HEAVY_BUDGET = 1024 * MIB  # for those with torch in them
DEADLINE_SECONDS = 20.0
EXTRA_BYTES = 512 * MIB


class Verdict(Enum):
    """What a command must do with an input. Whatever it does, it must do it safely."""

    REFUSED = "refused"  # exit 1, 2 or 3
    EITHER = "either"  # acceptable to some readers: exit 0 is no fault
    ACCEPTED = "accepted"  # sound: what shows that a scene works at all


@dataclass(frozen=True)
class Ground:
    """The folder of one case. Mutations break `at`, the folder of the scene that is broken; OUT is
    `out`. Everything below `root` that the scene does not name as written must stay as it is."""

    root: Path
    at: Path
    random: Random

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"


Break = Callable[[Ground], object]


@dataclass(frozen=True)
class Mutation:
    """One way to break a folder (or, with `arguments`, a command line).

    `culprit`: texts one of which a refusal must hold. `needs`: what scenes it can be played in, by
    the words of `Scene.has`. `only`: commands it is played with, all that fit where empty. `passes`:
    commands that may accept it, though the others must not.
    """

    name: str
    group: str
    make: Break
    culprit: tuple[str, ...] = ()
    verdict: Verdict = Verdict.REFUSED
    needs: frozenset[str] = frozenset({"checkpoint"})
    only: frozenset[str] = frozenset()
    passes: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    most: int = 6  # scenes it is played in, at most
    silent: bool = False  # a change that nobody who does not hash everything can see


@dataclass(frozen=True)
class Scene:
    """A command on a base. `arguments` may hold {root}, {src}, {out}, {good}; `bases` are copied to
    folders of the case, {folder: base}; `broken` is the folder of it that mutations break. `has` says
    what there is to break. `writes` are the folders and files of the case that the command may write;
    a conversion's are empty or absent before, and must not be filled when it refuses. `result` is the
    base that OUT must equal where the command says that all is well, whatever lay there before."""

    command: str
    arguments: tuple[str, ...]
    bases: tuple[tuple[str, str], ...]
    broken: str
    has: frozenset[str]
    writes: tuple[str, ...] = ()
    heavy: bool = False
    budget: int = 0
    result: str = ""


@dataclass(frozen=True)
class Case:
    """A mutation in a scene. `name` is its address: group/mutation/command."""

    name: str
    mutation: Mutation
    scene: Scene
    seed: int

    @property
    def random(self) -> Random:
        return Random(f"{self.seed}/{self.name}")

    @property
    def verdict(self) -> Verdict:
        if self.scene.command in self.mutation.passes:
            return Verdict.EITHER
        return self.mutation.verdict


@dataclass(frozen=True)
class Played:
    """What a command did. `code` is None where it was stopped, or a signal ended it (`signal`).
    `excess` is how far the resident memory of its processes rose, in bytes. `leaks` are files that hold
    the secret that lies outside of all folders, `wrong` files of OUT that are not what they must be."""

    arguments: tuple[str, ...]
    code: int | None
    out: bytes
    err: bytes
    seconds: float
    excess: int
    signal: int | None = None
    stopped: str | None = None  # "deadline" or "memory"
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = field(default=())
    leaks: tuple[str, ...] = field(default=())
    wrong: tuple[str, ...] = field(default=())
