"""Ways to disturb a conversion: kill the process, or cut the power, at any file operation.

Also small checkpoints to convert, and the questions every such test asks of a folder.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import traceback
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import INDEX, SINGLE, WORK_DIR, Checkpoint
from qconvert.checkpoint.safetensors import build_header
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import OutputError
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.executor import execute
from qconvert.run.work.events import NoEvents
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions

BLOCK = 128
BLOCK_BYTES = 4096  # what direct writes are cut in
Tensors = Mapping[str, tuple[TensorType, bytes]]
Tree = dict[str, bytes]

# --- checkpoints ------------------------------------------------------------------------------


def moments(count: int, every: int = 2) -> range:
    """Numbers of the operations at which a run of so many is killed: each `every`th and the last, with
    QCONVERT_ALL=1 all."""
    every = 1 if os.environ.get("QCONVERT_ALL") == "1" else every
    return range((count - 1) % every, count, every)


def fp8(shape: tuple[int, ...], seed: int) -> bytes:
    """Random FP8 codes, none of them NaN."""
    size = TensorType("F8_E4M3", shape).nbytes
    return random.Random(seed).randbytes(size).translate(_WITHOUT_NAN)


_WITHOUT_NAN = bytes(code & 0xFE if code & 0x7F == 0x7F else code for code in range(256))


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight in blocks of BLOCK x BLOCK."""
    *lead, rows, columns = shape
    return (*lead, ceil_div(rows, BLOCK), ceil_div(columns, BLOCK))


def scales(shape: tuple[int, ...], seed: int) -> bytes:
    """Random float32 scales for a weight of that shape."""
    chooser = random.Random(seed)
    count = TensorType("F32", grid(shape)).numel
    return array("f", (chooser.uniform(1e-3, 1.0) for _ in range(count))).tobytes()


def weight(name: str, shape: tuple[int, ...], seed: int = 0) -> dict[str, tuple[TensorType, bytes]]:
    """An FP8 weight and its scales."""
    return {
        name: (TensorType("F8_E4M3", shape), fp8(shape, seed)),
        f"{name}_scale_inv": (TensorType("F32", grid(shape)), scales(shape, seed + 1)),
    }


def plain(shape: tuple[int, ...], seed: int = 0, dtype: str = "BF16") -> tuple[TensorType, bytes]:
    """A tensor that is copied."""
    kind = TensorType(dtype, shape)
    return kind, random.Random(seed).randbytes(kind.nbytes)


def config(quantized: bool = True) -> dict[str, object]:
    """config.json of a model nobody knows, quantized in blocks."""
    block = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    found: dict[str, object] = {"model_type": "toy", "num_hidden_layers": 2}
    return {**found, "quantization_config": block} if quantized else found


def write_checkpoint(
    folder: Path, tensors: Tensors, *, shards: int = 1, quantized: bool = True
) -> Path:
    """Write tensors, cut into files by count, with config and index. Returns the folder."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = SINGLE if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, _ = build_header([(name, tensors[name][0]) for name in part], {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            for name in part:
                stream.write(tensors[name][1])
        weight_map.update(dict.fromkeys(part, file))
    total = sum(kind.nbytes for kind, _ in tensors.values())
    if shards > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", config(quantized))
    return folder


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def small_tensors() -> dict[str, tuple[TensorType, bytes]]:
    """A few hundred kilobytes: copies and FP8 weights, ragged ones too."""
    tensors = {"model.embed_tokens.weight": plain((40, 256), 1)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        tensors |= weight(f"{at}.mlp.up_proj.weight", (200, 256), 10 * layer + 2)
        tensors |= weight(f"{at}.mlp.down_proj.weight", (256, 200), 10 * layer + 4)
        tensors[f"{at}.norm.weight"] = plain((256,), 10 * layer + 6)
    tensors["lm_head.weight"] = plain((40, 256), 30)
    return tensors


def write_small(folder: Path) -> Path:
    """The small tensors in two files, with side files, one of them two folders down."""
    write_checkpoint(folder, small_tensors(), shards=2)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n', encoding="utf-8")
    nested = folder / "extra" / "words"
    nested.mkdir(parents=True)
    (nested / "list.txt").write_text("one\ntwo\n", encoding="utf-8")
    return folder


# Cuts the small checkpoint's output into four files; the default leaves it in one.
SHARD_BYTES = 150_000
SHARD_SIZES = {"sharded": SHARD_BYTES, "single": 5_000_000_000, "linked": 5_000_000_000}


def options(kind: str) -> RunOptions:
    """Every unit committed by itself, into several files, or into one, or into one beside a hard
    link to one of the source's."""
    near = Path() if kind == "linked" else None
    return RunOptions(jobs=1, commit_bytes=1, max_shard_size=SHARD_SIZES[kind], link_near=near)


def plan_of(source: Path) -> Plan:
    """The FP8 weights of a checkpoint to BF16."""
    return run_passes(Plan.identity(Checkpoint.open(source)), (Dequant(),))


def copy_of(source: Path) -> Plan:
    """Everything as it is; the first file may be linked."""
    return replace(Plan.identity(Checkpoint.open(source)), linkable=(0,)).check()


def convert(source: Path, out: Path, how: RunOptions, files: Files | None = None) -> None:
    """Plan and run. RunOptions that ask for links get a plan that has some."""
    if how.link_near is None:
        execute(plan_of(source), out, how, files=files)
    else:
        execute(copy_of(source), out, replace(how, link_near=out), files=files)


# --- questions --------------------------------------------------------------------------------


def tree(folder: Path) -> Tree:
    """Every file below a folder with its bytes; folders end in a slash."""
    found: Tree = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found[f"{name}/"] = b""
        else:
            found[name] = path.read_bytes()
    return found


def differing(a: Tree, b: Tree) -> list[str]:
    """Names whose bytes differ or that one lacks: what an assertion should print."""
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def check_visible(out: Path, wanted: Tree) -> bool:
    """Whatever can be seen in OUT has its final bytes, and with the file that makes a folder a
    checkpoint everything is there. Returns whether it is."""
    seen = {name: data for name, data in tree(out).items() if name.partition("/")[0] != WORK_DIR}
    wrong = [name for name, data in seen.items() if wanted.get(name) != data]
    assert not wrong, f"half-made files are in sight: {wrong}"
    commit = INDEX if INDEX in wanted else SINGLE
    if commit in seen:
        assert differing(seen, wanted) == []
    return commit in seen


class InTurn(Files):
    """Each unit is written before the next begins."""

    beside = False


class At(NoEvents):
    """Does something at the first bytes written."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act: Callable[[], object] | None = act

    def wrote(self, nbytes: int) -> None:
        if self._act is not None and nbytes:
            act, self._act = self._act, None
            act()


# --- death ------------------------------------------------------------------------------------


class Stepping(Files, ABC):
    """Calls `step` before and after every operation that changes the disk, and within those that a
    death can leave half done."""

    beside = False

    def __init__(self, *, backwards: bool = False) -> None:
        # In which order a folder's entries are removed is the file system's choice.
        self._backwards = backwards

    @abstractmethod
    def step(self, what: str) -> None:
        """Called at each moment a process could die at; `what` names it."""

    @contextmanager
    def _around(self, what: str) -> Iterator[None]:
        self.step(what)
        yield
        self.step(what)

    def create(self, path: Path, size: int) -> None:
        with self._around("create"):
            super().create(path, 0)
            self.step("create")
            super().create(path, size)

    def write(self, fd: int, path: Path, data: memoryview, offset: int) -> None:
        half = data.nbytes // 2
        with self._around("write"):
            super().write(fd, path, data[:half], offset)
            self.step("write")
            super().write(fd, path, data[half:], offset + half)

    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        # A disk writes blocks in any order: the later ones may be there, and the first not yet.
        first = data[:BLOCK_BYTES]
        with self._around("write_direct"):
            if data.nbytes > BLOCK_BYTES:
                rest, at = data[BLOCK_BYTES:], offset + BLOCK_BYTES
                if super().write_direct(fd, path, rest, at) != rest.nbytes:
                    return 0
                self.step("write_direct")
            if super().write_direct(fd, path, first, offset) != first.nbytes:
                return 0
        return data.nbytes

    def append(self, fd: int, path: Path, data: bytes) -> None:
        half = len(data) // 2
        with self._around("append"):
            super().append(fd, path, data[:half])
            self.step("append")
            super().append(fd, path, data[half:])

    def sync(self, fd: int, path: Path) -> None:
        # What a process has written outlives it, synced or not; really waiting would only be slow.
        self.step("sync")

    def sync_folder(self, path: Path) -> None:
        self.step("sync_folder")

    def remove_tree(self, path: Path) -> None:
        for entry in sorted(path.iterdir(), reverse=self._backwards):
            if entry.is_dir():
                self.remove_tree(entry)
            else:
                self.step("remove_tree")
                entry.unlink()
        self.step("remove_tree")
        path.rmdir()
        self.step("remove_tree")


def _stepping(name: str) -> Callable[..., Any]:
    """A file operation with a step before and after it."""
    real, what = getattr(Files, name), name.removesuffix("_once")

    def call(self: Stepping, *given: Any) -> Any:
        with self._around(what):
            return real(self, *given)

    return call


for _name in ("make_folder", "truncate", "rename", "link", "link_once", "remove"):
    setattr(Stepping, _name, _stepping(_name))


class Counting(Stepping):
    """Notes every step there is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def step(self, what: str) -> None:
        self.steps.append(what)


class Killing(Stepping):
    """Kills its own process at a step, as a crash or the out-of-memory killer would."""

    def __init__(self, at: int) -> None:
        super().__init__(backwards=at % 2 == 1)
        self._left = at

    def step(self, what: str) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


deaths: list[int] = []  # children that were killed in this test: conftest.py counts them


def started(work: Callable[[], object]) -> int:
    """Begin `work` in a forked process. Returns its number at once."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except OutputError:
            traceback.print_exc()
            os._exit(3)  # refused
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    """Wait for such a process. Returns 0, 3 where it was refused, 1 where it raised another error, or -9
    where it was killed."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGKILL:
        deaths.append(child)
    return code


def in_child(work: Callable[[], object]) -> int:
    return ended(started(work))


def children(parent: int) -> list[int]:
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(pid) for pid in found.split()]


def workers_of(command: int) -> list[int]:
    """Its child is the server that forks them."""
    return [worker for server in children(command) for worker in children(server)]


def state_of(pid: int) -> str:
    """The kernel's letter for a process: T stopped, Z dead and not waited for; "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_gone(pids: list[int]) -> None:
    """Wait until processes have ended. One that stays hangs the test, which is its failure. One that
    was stopped with its family before it could ask to die with its parent is let go on: it finds the
    parent gone."""
    while any(state_of(pid) not in ("Z", "") for pid in pids):
        for pid in pids:
            if state_of(pid) == "T":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)


# --- power ------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """The power is gone. Not an Exception: nothing may handle it."""


@dataclass
class _Inode:
    """A file: its bytes at the last sync, and what was done to them since: (offset, data), or
    (size, None) for a change of size."""

    synced: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)


@dataclass
class _NameChange:
    """An entry made in a folder (from another name, if it was a rename) or, with `gone`, removed
    from it. `inode` None is a folder."""

    path: Path
    inode: _Inode | None
    before: Path | None = None
    gone: bool = False
    synced: bool = False


class PowerFiles(Files):
    """Real file operations, and a model of what of them a power cut would leave.

    At operation number `at` the power goes: PowerCut is raised, then and ever after. `settle` then
    makes the disk what it would be: file data is safe after `sync` of the file, a name after
    `sync_folder` of the folder it stands in (for a rename: the folder it went to).
    """

    beside = False

    def __init__(self, root: Path, at: int) -> None:
        self._root = root
        self._at = at
        self.count = 0
        self._first: dict[Path, _Inode | None] = {root: None}
        for path in sorted(root.rglob("*")):
            self._first[path] = None if path.is_dir() else _Inode(path.read_bytes())
        self._now = dict(self._first)
        self._names: list[_NameChange] = []

    def _step(self) -> None:
        if self.count >= self._at:
            raise PowerCut
        self.count += 1

    def _inode(self, path: Path) -> _Inode:
        inode = self._now[path]
        assert inode is not None
        return inode

    def _name(self, change: _NameChange) -> None:
        _apply(change, self._now)
        self._names.append(change)

    def make_folder(self, path: Path) -> None:
        self._step()
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        super().make_folder(path)
        for folder in reversed(missing):
            self._name(_NameChange(folder, None))

    def create(self, path: Path, size: int) -> None:
        self._step()
        if not path.exists():
            self._name(_NameChange(path, _Inode()))
        super().create(path, size)
        self._inode(path).since += [(0, None), (size, None)]

    def write(self, fd: int, path: Path, data: memoryview, offset: int) -> None:
        self._step()
        super().write(fd, path, data, offset)
        self._inode(path).since.append((offset, bytes(data)))

    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        self._step()
        count = super().write_direct(fd, path, data, offset)
        self._inode(path).since.append((offset, bytes(data[:count])))
        return count

    def append(self, fd: int, path: Path, data: bytes) -> None:
        self._step()
        offset = os.fstat(fd).st_size
        super().append(fd, path, data)
        self._inode(path).since.append((offset, data))

    def truncate(self, fd: int, path: Path, size: int) -> None:
        self._step()
        super().truncate(fd, path, size)
        self._inode(path).since.append((size, None))

    def sync(self, fd: int, path: Path) -> None:
        self._step()
        inode = self._inode(path)
        inode.synced = _changed(inode.synced, inode.since)
        inode.since = []

    def sync_folder(self, path: Path) -> None:
        self._step()
        for change in self._names:
            if change.path.parent == path:
                change.synced = True

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)
        self._name(_NameChange(new, self._inode(old), old))

    def link(self, old: Path, new: Path) -> None:
        self._step()
        super().link(old, new)
        # The file itself has long been on the disk. What came after would be a change of it.
        self._name(_NameChange(new, _Inode(old.read_bytes())))

    def link_once(self, old: Path, new: Path) -> bool:
        self._step()
        made = super().link_once(old, new)
        if made:
            self._name(_NameChange(new, self._now[old]))
        return made

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)
        self._name(_NameChange(path, self._now[path], gone=True))

    def remove_tree(self, path: Path) -> None:
        self._step()
        # The lock is not made through Files: it is on disk, and not in the model.
        inside = [entry for entry in sorted(path.rglob("*"), reverse=True) if entry in self._now]
        super().remove_tree(path)
        for entry in [*inside, path]:
            self._name(_NameChange(entry, self._now[entry], gone=True))

    def settle(self, chance: random.Random | None) -> None:
        """Make the disk what the cut leaves of it.

        None: whatever was not synced is lost. Else, as on a journaling file system: names are lost
        from some moment on, later than the last synced one, and each write is lost, kept or torn.
        """
        last = max((i + 1 for i, change in enumerate(self._names) if change.synced), default=0)
        if chance is None:
            kept = [change for change in self._names if change.synced]
        else:
            kept = self._names[: chance.randint(last, len(self._names))]
        left = dict(self._first)
        for change in kept:
            _apply(change, left)
        for entry in self._root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for path, inode in sorted(left.items()):
            if inode is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(_changed(inode.synced, _survivors(inode.since, chance)))


def _apply(change: _NameChange, names: dict[Path, _Inode | None]) -> None:
    if change.gone:
        for path in [path for path in names if change.path in (path, *path.parents)]:
            del names[path]
    elif change.path.parent in names:  # else the folder it was made in is lost, and it with it
        if change.before is not None:
            names.pop(change.before, None)
        names[change.path] = change.inode


def _changed(data: bytes, changes: Sequence[tuple[int, bytes | None]]) -> bytes:
    content = bytearray(data)
    for at, new in changes:
        size = at if new is None else max(len(content), at + len(new))
        content.extend(bytes(max(0, size - len(content))))
        del content[size:]
        if new is not None:
            content[at : at + len(new)] = new
    return bytes(content)


def _survivors(
    changes: Sequence[tuple[int, bytes | None]], chance: random.Random | None
) -> list[tuple[int, bytes | None]]:
    kept: list[tuple[int, bytes | None]] = []
    for at, new in changes if chance is not None else ():
        assert chance is not None
        fate = chance.choice(["lost", "kept", "torn"])
        if fate == "kept":
            kept.append((at, new))
        elif fate == "torn" and new:
            kept.append((at, new[: chance.randrange(len(new))]))
    return kept
