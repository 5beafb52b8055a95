"""The work folder of a calibration: hidden states between layers, and how far it has come.

Its state file is replaced only once everything that it speaks of is on disk, so an interrupted
calibration continues at a layer whose hidden states are whole. An accelerator takes two seconds for a
layer, and as long as that a disk for the 4 GB of its hidden states: those are then kept after some
seconds, and the layers since are run again.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from qconvert.calibrate.behind import Behind, Held
from qconvert.calibrate.page_locked import PAGE_LOCKED
from qconvert.calibrate.propagated import Kept, States
from qconvert.calibrate.rows import InFile
from qconvert.calibrate.team import ALONE, Team, decided
from qconvert.core.errors import RunError
from qconvert.core.json_text import parse_object
from qconvert.core.regular import read_regular
from qconvert.run.files import Files

_STATE = "state.json"
_ROWS = 1 << 14  # read from a file at a time
_EVERY = 20.0  # seconds after which hidden states are kept again that an accelerator holds


@dataclass
class CalibrationDir:
    """A folder for `count` tokens' hidden states BF16 [count, width]: `paired`, of the quantized model
    and of the plain one. `key` names the calibration. With `behind` they are held in the memory of
    `device`, be it the host's (`cpu`), and files are written behind the computation, not of every layer
    unless it is `shared`. The processes of a `team` have the tokens `own` each, and files together,
    which the first one makes."""

    path: Path
    key: str
    count: int
    width: int
    files: Files
    paired: bool = False
    device: str = "cpu"
    behind: Behind | None = None
    shared: bool = False
    team: Team = ALONE
    own: tuple[int, int] | None = None
    # The layer whose states are in files, and when that was asked for.
    _kept: int | None = None
    _since: float | None = None

    def due(self) -> bool:
        """Whether what goes into the next layer is to be kept in files."""
        if self.behind is None or self.shared or self._since is None:
            return True
        return decided(self.team, time.monotonic() - self._since >= _EVERY)

    def states(
        self, layer: int, *, new: bool, before: States | None = None, keeps: bool = True
    ) -> States:
        """What goes into a layer; `before` is what went into the one before, in whose memory this is
        held, and nowhere else unless it `keeps`. Raises RunError for a file that is damaged."""
        if not keeps:
            assert before is not None
            return States(*(self._held(None, old, new=True) for old in before.all))
        opened = self._opened(layer, new=new)
        if self.behind is None:
            return States(*opened)
        olds: list[Kept | None] = [None] * len(opened) if before is None else [*before.all]
        return States(*(self._held(*pair, new=new) for pair in zip(opened, olds, strict=True)))

    def _opened(self, layer: int, *, new: bool) -> list[InFile]:
        import torch

        if self.team.rank and new:
            self.team.meet()
        opened: list[InFile] = []
        try:
            for name in self._names(layer):
                path, kind = self.path / name, torch.bfloat16
                new_here = new and self.team.rank == 0
                opened.append(InFile(path, self.count, self.width, kind, self.files, new=new_here))
        except BaseException:
            for file in opened:
                file.close()
            raise
        if self.team.rank == 0 and new:
            self.team.meet()
        return opened

    def _held(self, file: InFile | None, old: Kept | None, *, new: bool) -> Kept:
        import torch

        assert self.behind is not None
        there = self.device != "cpu"
        if isinstance(old, Held):
            return Held(old.rows, file, self.behind, old, there=there)
        assert file is not None
        if there:
            rows = torch.empty(self.count, self.width, dtype=torch.bfloat16, device=self.device)
        else:
            rows = PAGE_LOCKED.take(self.count, self.width, torch.bfloat16)
        first, last = self._own
        for start in range(first, first if new else last, _ROWS):
            stop = min(start + _ROWS, last)
            rows[start:stop] = file.read(start, stop).to(self.device)
        return Held(rows, file, self.behind, None, there=there)

    def let_go(self, states: States) -> None:
        """Close states that are no longer read."""
        if self.behind is None:
            states.close()
        else:
            self.behind.later(states.close)

    def keep(self, layer: int, states: States) -> None:
        """Keep what goes into a layer where it was not: a run ends before it."""
        if self.behind is None or self._kept == layer:
            return
        for file, one in zip(self._opened(layer, new=True), states.all, strict=True):
            assert isinstance(one, Held)
            one.keep(file, *self._own)
        self.remember(layer, states)

    def settle(self) -> None:
        """Wait for what is written behind, and raise what went wrong there."""
        if self.behind is not None:
            self.behind.wait()

    @property
    def _own(self) -> tuple[int, int]:
        return (0, self.count) if self.own is None else self.own

    def _names(self, layer: int) -> tuple[str, ...]:
        name = f"hidden.{layer}.rows"
        return (name, f"hidden.{layer}.plain.rows") if self.paired else (name,)

    def layer(self) -> int | None:
        """The layer to continue with, None where nothing was begun; what else lies here is removed.
        Raises RunError for the folder of another calibration."""
        self._kept = decided(self.team, None if self.team.rank else self._begun())
        return self._kept

    def _begun(self) -> int | None:
        self.files.make_folder(self.path)
        file = self.path / _STATE
        layer: int | None = None
        if file.is_file():
            state = parse_object(
                read_regular(file, follow=False, error=RunError), file, error=RunError
            )
            if state.get("key") != self.key:
                raise RunError(
                    f"{self.path} holds another calibration (other data, settings, plan or kind of "
                    "device); give the options it was begun with, or drop it with qconvert clean"
                )
            layer = state.get("layer")
            if type(layer) is not int or layer < 0:
                raise RunError(f"{file}: expected the number of a layer, found {layer!r}")
        kept = set() if layer is None else {_STATE, *self._names(layer)}
        for left in self.path.iterdir():
            if left.name not in kept:
                self.files.remove(left)
        return layer

    def remember(self, layer: int, states: States) -> None:
        """The next layer to do is this one, and these are its states, which were kept. Those before are
        removed."""
        before, self._kept, self._since = self._kept, layer, time.monotonic()
        if self.behind is None:
            self._remember(layer, states, before)
        else:
            self.behind.later(lambda: self._remember(layer, states, before))

    def _remember(self, layer: int, states: States, last: int | None) -> None:
        states.sync()
        self.team.meet_behind()
        if self.team.rank:
            return
        new = self.path / f"{_STATE}.new"
        text = json.dumps({"key": self.key, "layer": layer}).encode()
        self.files.create(new, len(text))
        fd = self.files.open(new)
        try:
            self.files.write(fd, new, memoryview(text), 0)
            self.files.sync(fd, new)
        finally:
            self.files.close(fd)
        self.files.rename(new, self.path / _STATE)
        self.files.sync_folder(self.path)
        for name in () if last is None or last == layer else self._names(last):
            before = self.path / name
            if before.exists():
                self.files.remove(before)
