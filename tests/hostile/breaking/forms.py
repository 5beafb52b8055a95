"""What a name in a folder may lead to that is no regular file, or one that never ends."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hostile.breaking.headers import shard
from hostile.case import Break, Ground, Mutation, Verdict
from hostile.scenes import READERS

GROUP = "files"
_SPARSE = 3 << 30
# Of files that are copied, in streams: enough to see whether one is read whole.
_SPARSE_COPIED = 800 << 20
_SECRET = "../../secret.txt"


def _gone(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _fifo(path: Path) -> None:
    os.mkfifo(_gone(path))


def _zero(path: Path) -> None:
    """A link to /dev/zero: anyone may make one."""
    _gone(path).symlink_to("/dev/zero")


def _device(path: Path) -> None:
    """The device itself where we may make one."""
    _gone(path)
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def _random(path: Path) -> None:
    _gone(path).symlink_to("/dev/urandom")


def _terminal(path: Path) -> None:
    _gone(path).symlink_to("/dev/tty")


def _folder(path: Path) -> None:
    _gone(path).mkdir()
    (path / "inside.txt").write_text("x")


def _loop(path: Path) -> None:
    _gone(path).symlink_to(path.name)


def _dangling(path: Path) -> None:
    _gone(path).symlink_to("nothing")


def _sparse(path: Path) -> None:
    with _gone(path).open("wb") as stream:
        stream.truncate(_SPARSE)


def _sparse_copied(path: Path) -> None:
    with _gone(path).open("wb") as stream:
        stream.truncate(_SPARSE_COPIED)


def _sparse_tail(path: Path) -> None:
    """The right beginning, and 3 GiB of nothing behind it."""
    with path.open("r+b") as stream:
        stream.truncate(_SPARSE)


def _socket(path: Path) -> None:
    _gone(path)
    # The address of a socket is short: from within its folder.
    where = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(where)


def _proc(path: Path) -> None:
    _gone(path).symlink_to("/proc/self/mem")


def _secret(path: Path) -> None:
    _gone(path).symlink_to(path.parent / _SECRET)


def _empty(path: Path) -> None:
    _gone(path).write_bytes(b"")


FORMS: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo, "link to /dev/zero": _zero, "device": _device, "link to /dev/urandom": _random,
    "link to a terminal": _terminal, "folder": _folder, "loop": _loop, "dangling": _dangling,
    "sparse 3 GiB": _sparse, "socket": _socket, "link to /proc": _proc, "link out": _secret,
    "empty": _empty,
}  # fmt: skip


_LINKS = frozenset({"link to /dev/zero", "link to /dev/urandom", "link to a terminal", "loop",
                    "dangling", "link to /proc", "link out"})  # fmt: skip
# None of these copies or sends what it does not read itself.
_READING = frozenset(scene.command for scene in READERS) - {"upload", "upload dry"} | {
    "eval repo",
    "eval two",
}


def _at(name: str, make: Callable[[Path], None]) -> Break:
    return lambda ground: make(ground.at / name)


def _on_shard(make: Callable[[Path], None]) -> Break:
    return lambda ground: make(shard(ground))


def _on_out(make: Callable[[Path], None]) -> Break:
    return lambda ground: make(ground.out)


def _mutations() -> Iterator[Mutation]:
    for form, make in FORMS.items():
        for file in ("config.json", "model.safetensors.index.json"):
            # A folder where the index should be is passed over today by some readers.
            yield Mutation(f"{file} {form}", GROUP, _at(file, make),
                           (file.split(".")[0],), most=5)  # fmt: skip
        yield Mutation(f"shard {form}", GROUP, _on_shard(make), ("model",), most=6)
        for file in ("README.md", "tokenizer.json", "notes.txt", "hf_quant_config.json",
                     "generation_config.json"):  # fmt: skip
            copied = form == "sparse 3 GiB" and file not in ("README.md", "hf_quant_config.json")
            # Copying gigabytes is no fault: reading them whole is.
            only = _READING | {"dequant dry"} if copied else frozenset()
            # What is no link is left behind and named; a link that leads out is refused, at the latest
            # by whoever would copy or send it.
            verdict = Verdict.REFUSED if form in _LINKS else Verdict.EITHER
            # `join` copies files of the first stage; it is the second that is broken.
            yield Mutation(f"{file} {form}", GROUP, _at(file, _sparse_copied if copied else make),
                           (file,) if form in _LINKS else (), verdict, only=only,
                           passes=_READING | {"join"}, most=4)  # fmt: skip
        for file in ("qconvert.json", "qconvert.receipt.jsonl"):
            yield Mutation(f"{file} {form}", GROUP, _at(file, make), (),
                           Verdict.EITHER, needs=frozenset({"manifest"}), most=3)  # fmt: skip
    yield Mutation(
        "shard with 3 GiB behind it", GROUP, lambda g: _sparse_tail(shard(g)), ("model",)
    )
    yield Mutation("config.json with 3 GiB behind it", GROUP,
                   lambda g: _sparse_tail(g.at / "config.json"), ("config.json",))  # fmt: skip
    yield Mutation("folder link out", GROUP, _folder_out, (), Verdict.EITHER)
    yield Mutation(
        "folder loop", GROUP, lambda g: (g.at / "more").symlink_to(".."), (), Verdict.EITHER
    )
    yield Mutation("1,000 folders deep", GROUP, _deep_folders, (), Verdict.EITHER)
    yield Mutation("2,000 files", GROUP, _many_files, (), Verdict.EITHER, most=3)
    yield Mutation("source link to itself", GROUP, _source_loop, ())
    yield Mutation("source gone", GROUP, lambda g: shutil.rmtree(g.at), ())
    yield Mutation("source empty", GROUP, _emptied, ())
    yield Mutation("a file .qconvert", GROUP, lambda g: (g.at / ".qconvert").write_text("x"), (),
                   Verdict.EITHER)  # fmt: skip
    names = {
        "not UTF-8": b"note-\xff\xfe.txt", "newline": b"note\n::error::INJECTED.txt",
        "escape": b"note\x1b[2J.txt", "direction": "note\u202egnp.txt".encode(), "dash": b"--help",
        "spaces": b"   ", "longest": b"n" * 250 + b".txt", "backslash": b"..\\..\\x.txt",
        "quote": b'"; touch x; ".txt', "template": b"{{ 7 * 7 }}.txt",
        "shards": b"x-00001-of-00001.safetensors",
        "not UTF-8 shard": b"model-\xff.safetensors", "index": b"other.safetensors.index.json",
        "work": b".qconvert", "colon": b"C:note.txt", "surrogates": b"\xed\xa0\x80.txt",
    }  # fmt: skip
    for name, raw in names.items():
        yield Mutation(f"name {name}", GROUP, partial(_named, raw=raw), (), Verdict.EITHER, most=5)
    yield Mutation("folder name not UTF-8", GROUP, _folder_named, (), Verdict.EITHER)
    for form in ("fifo", "device", "loop", "folder", "socket"):
        for place in ("out",):
            yield Mutation(f"{place} {form}", GROUP, _on_out(FORMS[form]), ("out",),
                           needs=frozenset({"checkpoint"}), only=_WRITING, most=4)  # fmt: skip
    yield Mutation("out link to source", GROUP, lambda g: g.out.symlink_to("src"), ("out", "src"),
                   only=_WRITING)  # fmt: skip
    yield Mutation("out link to a file", GROUP, lambda g: g.out.symlink_to("victim.txt"),
        ("out", "victim"),
                   only=_WRITING)  # fmt: skip
    yield Mutation("out full of others' files", GROUP, _foreign_out, ("out",), only=_WRITING)


_WRITING = frozenset({
    "dequant", "run", "fuse", "unfuse", "experts stack", "experts unstack", "amx", "kt", "w4a16",
    "nvfp4", "split", "prepare", "unprepare", "join", "mtp drop", "mtp extract", "mtp graft", "text",
})  # fmt: skip


def _folder_out(ground: Ground) -> None:
    (ground.at / "more").symlink_to(ground.root / "beside")


def _deep_folders(ground: Ground) -> None:
    here = ground.at
    for _ in range(400):
        here = here / "d"
    os.makedirs(here)
    (here / "x.txt").write_text("x")


def _many_files(ground: Ground) -> None:
    for number in range(2_000):
        (ground.at / f"note-{number}.txt").touch()


def _source_loop(ground: Ground) -> None:
    shutil.rmtree(ground.at)
    ground.at.symlink_to(ground.at.name)


def _emptied(ground: Ground) -> None:
    shutil.rmtree(ground.at)
    ground.at.mkdir()


def _named(ground: Ground, raw: bytes) -> None:
    with open(os.fsencode(ground.at) + b"/" + raw, "wb") as stream:
        stream.write(b"x")


def _folder_named(ground: Ground) -> None:
    folder = os.fsencode(ground.at) + b"/more-\xff"
    os.makedirs(folder)
    with open(folder + b"/x.txt", "wb") as stream:
        stream.write(b"x")


def _foreign_out(ground: Ground) -> None:
    ground.out.mkdir(exist_ok=True)
    (ground.out / "holiday.jpg").write_bytes(b"mine")


MUTATIONS = tuple(_mutations())
