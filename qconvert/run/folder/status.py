"""Status of a folder that is being filled, told from its journals without the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from qconvert.checkpoint.checkpoint import MANIFEST, WORK_DIR
from qconvert.core.errors import OutputError
from qconvert.core.json_text import parse_json
from qconvert.run.folder.journal import JournalContent, read_journal
from qconvert.run.folder.leases import SHARDS, ShardJournal, journals_in, state_of
from qconvert.run.folder.workspace import JOURNAL, check_own, is_there
from qconvert.run.work.division import Shard

State = Literal["not begun", "running", "unknown", "stopped", "done"]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard: its last start's host and process, and how that is: `unknown` on another machine,
    where only its `last_sign` of life tells, in the file server's time (UTC). Units and bytes that
    are its share, and those done by it. `starts` counts how often it was started."""

    shard: str
    state: State
    host: str | None
    pid: int | None
    starts: int
    units: int
    units_done: int
    bytes: int
    bytes_done: int
    last_sign: str | None


@dataclass(frozen=True, slots=True)
class FolderStatus:
    """A folder: `finished`, `unfinished` (a run without --shard, or one that is being finished) or
    `shared` by shards. Units and bytes of the whole run, None where only a plan would tell; `rest` is
    what is left to `qconvert finish`."""

    out: Path
    state: Literal["finished", "unfinished", "shared"]
    shards: tuple[ShardStatus, ...] = ()
    units: int | None = None
    units_done: int | None = None
    bytes: int | None = None
    bytes_done: int | None = None
    rest: tuple[int, int] = (0, 0)

    @property
    def complete(self) -> bool:
        """Return whether `qconvert finish` has no shard's work to wait for."""
        done = all(shard.units_done >= shard.units for shard in self.shards)
        return self.state == "shared" and done


def folders_of(out: Path) -> list[Path]:
    """OUT, or the folders of pipeline stages in it, that hold unfinished work."""
    return [folder for folder in _folders(out) if _holds_work(folder)]


def finished_in(out: Path) -> list[Path]:
    """OUT, or all stages in it, where they hold results and no work is left."""
    found = [folder for folder in _folders(out) if (folder / MANIFEST).is_file()]
    whole = found == [out] or found == _folders(out)[1:]
    return found if whole and not folders_of(out) else []


def _folders(out: Path) -> list[Path]:
    return [out, *(one for one in sorted(out.glob("stage-*-of-*")) if not one.is_symlink())]


def _holds_work(folder: Path) -> bool:
    """Beside a result, a work folder without a journal is what a process left that was killed while it
    removed it."""
    work = folder / WORK_DIR
    journals = [work / JOURNAL, *(work / SHARDS).glob("*")]
    return work.is_dir() and (any(map(is_there, journals)) or not (folder / MANIFEST).is_file())


def status_of(out: Path) -> tuple[FolderStatus, ...]:
    """The folder's status, or that of each stage of a split. Raises OutputError where qconvert has
    made nothing, and for journals that it did not write."""
    done = tuple(FolderStatus(folder, "finished") for folder in finished_in(out))
    found = done or tuple(map(_status, folders_of(out)))
    if not found:
        raise OutputError(f"{out}: no conversion of qconvert's is there, finished or not")
    return found


def _status(out: Path) -> FolderStatus:
    check_own(out)
    whole = read_journal(out / WORK_DIR / JOURNAL)
    if whole is not None:
        done = _bytes(whole.units.values())
        return FolderStatus(out, "unfinished", (), None, len(whole.units), None, done)
    journals = journals_in(out / WORK_DIR)
    if not journals:
        return FolderStatus(out, "unfinished")
    newest = max(journals, key=lambda journal: journal.path.stat().st_mtime_ns)
    *shares, rest = newest.shares
    count = newest.shard.count
    rows = [_row(Shard(n, count), shares[n], journals) for n in range(count)]
    for other in sorted({j.shard for j in journals if j.shard.count != count}):
        rows.append(_row(other, (0, 0), journals))  # of an earlier division
    done_units: dict[int, Sequence[str]] = {}
    for journal in journals:
        done_units |= journal.remembered.units
    return FolderStatus(
        out, "shared", tuple(rows), sum(s[0] for s in shares) + rest[0], len(done_units),
        sum(s[1] for s in shares) + rest[1], _bytes(done_units.values()), (rest[0], rest[1]),
    )  # fmt: skip


def _row(shard: Shard, share: Sequence[int], journals: Sequence[ShardJournal]) -> ShardStatus:
    own = [journal for journal in journals if journal.shard == shard]
    if not own:
        return ShardStatus(str(shard), "not begun", None, None, 0, share[0], 0, share[1], 0, None)
    found = JournalContent({})
    for journal in own:
        found.units |= journal.remembered.units
        for number in journal.remembered.forgotten - journal.remembered.units.keys():
            found.units.pop(number, None)
    last = own[-1]
    state = _state(last)
    sign = datetime.fromtimestamp(last.path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return ShardStatus(
        str(shard), state, last.by.host, last.by.pid, len(own), share[0], len(found.units),
        share[1], _bytes(found.units.values()), sign,
    )  # fmt: skip


def _state(journal: ShardJournal) -> State:
    state = state_of(journal)
    if state == "ended":
        return "done" if journal.remembered.ended == "done" else "stopped"
    return "running" if state == "running" else "stopped" if state == "stopped" else "unknown"


def _bytes(units: Iterable[Sequence[str]]) -> int:
    total = 0
    for records in units:
        for text in records:
            record = parse_json(text, "a record of a journal", error=OutputError)
            size = record.get("nbytes") if isinstance(record, Mapping) else None
            total += size if type(size) is int else 0
    return total


def recorded(out: Path) -> tuple[tuple[str, ...], str] | None:
    """The command that the last shard of a folder, or of the stages in it, was started by, and the
    folder it was started in; None where none is known."""
    for folder in folders_of(out):
        check_own(folder)
        whole = read_journal(folder / WORK_DIR / JOURNAL)
        if whole is not None:
            words, at = whole.header.get("command"), whole.header.get("folder")
            if isinstance(words, list) and all(isinstance(w, str) for w in words) and words:
                return tuple(words), at if isinstance(at, str) else ""
            continue
        journals = journals_in(folder / WORK_DIR)
        if journals:
            newest = max(journals, key=lambda journal: journal.path.stat().st_mtime_ns)
            if newest.command:
                return newest.command, newest.folder
    return None
