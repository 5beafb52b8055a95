"""The work folder of a calibration: hidden states between layers, and how far it has come.

Its state file is replaced only once everything that it speaks of is on disk, so an interrupted
calibration continues at a layer whose hidden states are whole. An accelerator takes two seconds for a
layer, and as long as that a disk for the 4 GB of its hidden states: those are then kept after some
seconds, and the layers since are run again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.calibrate.activation_store import PAGE_LOCKED, InFiles
from qconvert.calibrate.background_writer import BackgroundWriter, WrittenBehind
from qconvert.calibrate.distributed import SINGLE_PROCESS, Communicator, broadcast_from_rank0
from qconvert.calibrate.propagated_error import HiddenStates, Kept
from qconvert.core.errors import RunError
from qconvert.core.json_text import parse_object
from qconvert.core.links import read_regular
from qconvert.run.work.files import Files

_STATE = "state.json"
_ROWS = 1 << 14  # read from a file at a time
_LISTED_AFTER = 90.0  # seconds in which every host sees a new file
_EVERY = 20.0  # seconds after which hidden states are kept again that an accelerator holds


@dataclass
class CalibrationDir:
    """A folder for `count` tokens' hidden states BF16 [count, width]: `paired`, of the quantized model
    and of the plain one. `key` names the calibration. With `behind` they are held in the memory of
    `device`, be it the host's (`cpu`), and files are written behind the computation, not of every
    layer. The processes of `comm` have the tokens `cuts` each, all of them where that is None, and a
    file each in this folder, which all must see."""

    path: Path
    key: str
    count: int
    width: int
    files: Files
    paired: bool = False
    device: str = "cpu"
    behind: BackgroundWriter | None = None
    comm: Communicator = SINGLE_PROCESS
    cuts: Sequence[tuple[int, int]] | None = None
    # The layer whose states are in files, when that was asked for, and which rows each of them has.
    _kept: int | None = None
    _since: float | None = None
    _found: Sequence[tuple[int, int]] = ()

    def due(self) -> bool:
        """Return whether what goes into the next layer is to be kept in files."""
        if self.behind is None or self._since is None:
            return True
        return broadcast_from_rank0(self.comm, time.monotonic() - self._since >= _EVERY)

    def states(
        self, layer: int, *, new: bool, before: HiddenStates | None = None, keeps: bool = True
    ) -> HiddenStates:
        """Return what goes into a layer; `before` is what went into the one before, in whose memory this
        is held, and nowhere else unless it `keeps`. Raises RunError for a file that is damaged."""
        if not keeps:
            assert before is not None
            return HiddenStates(*(self._held(None, old, new=True) for old in before.all))
        opened = self._opened(layer, new=new)
        if self.behind is None:
            return HiddenStates(*opened)
        olds: list[Kept | None] = [None] * len(opened) if before is None else [*before.all]
        return HiddenStates(
            *(self._held(*pair, new=new) for pair in zip(opened, olds, strict=True))
        )

    def _opened(self, layer: int, *, new: bool) -> list[InFiles]:
        import torch

        opened: list[InFiles] = []
        try:
            for name in self._names(layer):
                opened.append(
                    InFiles(
                        self.path / name, self._cuts if new else self._found,
                        self._own if new else None, self.width, torch.bfloat16, self.files,
                    )
                )  # fmt: skip
        except BaseException:
            for file in opened:
                file.close()
            raise
        return opened

    def _held(self, file: InFiles | None, old: Kept | None, *, new: bool) -> Kept:
        import torch

        assert self.behind is not None
        there = self.device != "cpu"
        if isinstance(old, WrittenBehind):
            return WrittenBehind(old.rows, file, self.behind, old, there=there)
        assert file is not None
        if there:
            rows = torch.empty(self.count, self.width, dtype=torch.bfloat16, device=self.device)
        else:
            rows = PAGE_LOCKED.take(self.count, self.width, torch.bfloat16)
        first, last = self._own
        for start in range(first, first if new else last, _ROWS):
            stop = min(start + _ROWS, last)
            rows[start:stop] = file.read(start, stop).to(self.device)
        return WrittenBehind(rows, file, self.behind, None, there=there)

    def let_go(self, states: HiddenStates) -> None:
        """Close states that are no longer read."""
        if self.behind is None:
            states.close()
        else:
            self.behind.later(states.close)

    def keep(self, layer: int, states: HiddenStates) -> None:
        """Keep what goes into a layer where it was not: a run ends before it."""
        if self.behind is None or self._kept == layer:
            return
        for file, one in zip(self._opened(layer, new=True), states.all, strict=True):
            assert isinstance(one, WrittenBehind)
            one.keep(file, *self._own)
        self.remember(layer, states)

    def flush(self) -> None:
        """Wait for what is written behind, and raise what went wrong there."""
        if self.behind is not None:
            self.behind.wait()

    @property
    def _cuts(self) -> Sequence[tuple[int, int]]:
        return [(0, self.count)] if self.cuts is None else self.cuts

    @property
    def _own(self) -> tuple[int, int]:
        return self._cuts[self.comm.rank]

    def _names(self, layer: int) -> tuple[str, ...]:
        """Beginnings of the names of files, one for each model."""
        name = f"hidden.{layer}"
        return (name, f"{name}.plain") if self.paired else (name,)

    def layer(self) -> int | None:
        """The layer to continue with, None where nothing was begun; what else lies here is removed.
        Raises RunError for the folder of another calibration, and where processes see other folders."""
        mark = broadcast_from_rank0(self.comm, f"seen-by-all-{secrets.token_hex(8)}")
        begun = self._begun(mark) if self.comm.rank == 0 else (None, ())
        self._kept, self._found = broadcast_from_rank0(self.comm, begun)
        if self.comm.count > 1:
            seen = self.comm.gathered(is_there_within(self.path / mark, _LISTED_AFTER))
            if self.comm.rank == 0:
                self.files.remove(self.path / mark)
            if not all(seen):
                raise RunError(
                    f"{self.path}: processes {[n for n, one in enumerate(seen) if not one]} of "
                    f"{self.comm.count} do not see what the first one made there; give all machines an "
                    "OUT of one path on a file system that they share"
                )
        return self._kept

    def _begun(self, mark: str) -> tuple[int | None, Sequence[tuple[int, int]]]:
        self.files.make_folder(self.path)
        file = self.path / _STATE
        layer: int | None = None
        cuts: Sequence[tuple[int, int]] = ()
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
            cuts = _cuts_in(state.get("cuts"), self.count, file)
        kept: set[str] = set()
        if layer is not None:
            kept = {f"{name}.{start}.rows" for name in self._names(layer) for start, _ in cuts}
            kept.add(_STATE)
        for left in self.path.iterdir():
            if left.name not in kept:
                self.files.remove(left)
        if self.comm.count > 1:
            self.files.create(self.path / mark, 0)
            self.files.sync_folder(self.path)
        return layer, cuts

    def remember(self, layer: int, states: HiddenStates) -> None:
        """The next layer to do is this one, and these are its states, which were kept. Those before are
        removed."""
        before, self._kept, self._since = self._kept, layer, time.monotonic()
        if self.behind is None:
            self._remember(layer, states, before)
        else:
            self.behind.later(lambda: self._remember(layer, states, before))

    def _remember(self, layer: int, states: HiddenStates, last: int | None) -> None:
        states.sync()
        self.comm.background_barrier()
        if self.comm.rank:
            return
        new = self.path / f"{_STATE}.new"
        state = {"key": self.key, "layer": layer, "cuts": [[*cut] for cut in self._cuts]}
        text = json.dumps(state).encode()
        self.files.create(new, len(text))
        fd = self.files.open(new)
        try:
            self.files.write(fd, new, memoryview(text), 0)
            self.files.sync(fd, new)
        finally:
            self.files.close(fd)
        self.files.rename(new, self.path / _STATE)
        self.files.sync_folder(self.path)
        if last is not None and last != layer:
            for before in sorted(self.path.glob(f"hidden.{last}.*")):
                self.files.remove(before)


def _cuts_in(found: Any, count: int, file: Path) -> list[tuple[int, int]]:
    """The rows of each file of hidden states, as a state file has them: all of `count`, in order."""
    pairs = found if isinstance(found, list) else []
    cuts = [(one[0], one[1]) for one in pairs if isinstance(one, list) and len(one) == 2]
    at = 0
    for start, stop in cuts:
        if type(start) is not int or type(stop) is not int or start != at or stop < start:
            break
        at = stop
    if at != count or len(cuts) != len(pairs):
        raise RunError(f"{file}: expected ranges of {count} tokens, found {found!r}")
    return [cut for cut in cuts if cut[0] < cut[1]]


def is_there_within(path: Path, seconds: float) -> bool:
    """Return whether a file is there, or comes: clients of NFS keep for some time that a name was
    missing."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.25)
    return True
