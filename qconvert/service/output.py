"""Output of a conversion: a folder here, a folder in an object store, or a repo on the Hub.

A finished folder sent to a store, so that nothing there looks finished before all of it is.

Objects cannot be renamed, so their order takes that place: first a note of whose they are, then the
shards, then the rest in the order in which a folder is published, what makes it a checkpoint last; then
the note goes. Every object is compared with its file when it has arrived, by size and by MD5 where the
store's mark is one, else by its bytes. Interrupted, the same again sends what is not there yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import MANIFEST, WORK_DIR, Checkpoint
from qconvert.checkpoint.store import StoredObject, WritableStore, is_url, store_of, work_folder
from qconvert.core.errors import CheckpointError, OutputError, UsageError
from qconvert.core.json_text import parse_object
from qconvert.core.links import PER_TENSOR, SMALL, open_regular, reading
from qconvert.core.profiling import phase
from qconvert.core.shown import count
from qconvert.hub.destination import is_hub
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.staging import identity_of, publish_order
from qconvert.run.folder.workspace import check_apart, identity_in, lasting
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions
from qconvert.run.work.upload_target import Found

if TYPE_CHECKING:
    from qconvert.hub.upload_target import HubUploadTarget


# Says whose unfinished upload it is; no part of the checkpoint.
NOTE = f"{WORK_DIR}/upload.json"
PART_BYTES = 16 << 20
_MOST_PARTS = 10_000  # of an object, in S3
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Delivery:
    """Place in a store where the result of a plan goes."""

    store: WritableStore
    ready: Prepared

    @property
    def names(self) -> list[str]:
        return publish_order(self.ready)

    @property
    def identity(self) -> dict[str, Any]:
        return lasting(identity_of(self.ready))

    def look(self) -> Found:
        """Return what is there: nothing, a part of this result, or all of it. Raises OutputError for
        objects that are neither."""
        there = self._listed()
        if not there:
            return "new"
        foreign = sorted(there.keys() - {*self.names, NOTE})
        for name in (MANIFEST, NOTE):
            identity = self._identity_in(there[name]) if name in there else self.identity
            if identity is None:
                foreign = [name]
            elif identity != self.identity:
                raise OutputError(
                    f"{self.store.url}: {name} is of another conversion; remove what lies there, or "
                    "choose another folder"
                )
        if foreign or not {MANIFEST, NOTE} & there.keys():
            raise OutputError(
                f"{self.store.url}: holds {(foreign or sorted(there))[0]}, which is not of this "
                "conversion; choose an empty folder"
            )
        sizes = {file.name: file.size for file in self.ready.layout.files}
        whole = all(
            name in there and there[name].size == sizes.get(name, there[name].size)
            for name in self.names
        )
        return "finished" if whole and NOTE not in there else "begun"

    @phase("send")
    def send(self, folder: Path, events: Events) -> None:
        """Send a folder's files. Raises OutputError for one that cannot be read, or that did not arrive
        as it is here; and as the store does."""
        there = self._listed()
        self.store.abandon()
        self.store.put(NOTE, (json.dumps({"identity": self.identity}) + "\n").encode())
        names = self.names
        events.phase(f"sending {count(len(names), 'file')}")
        events.start(sum(_size(folder / name) for name in names), 0)

        # One after another: of each, several parts are on their way at a time.
        for name in names:
            file = folder / name
            part = part_size(_size(file))
            found = there.get(name)
            if found is None or not self._same(found, file, part):
                self.store.send(file, name, part)
                found = self.store.look(name)
                if found is None or not self._same(found, file, part):
                    raise OutputError(
                        f"{self.store.url}/{name}: is not what was sent, {file}; run the same command "
                        "again"
                    )
            events.wrote(_size(file))
        self.store.remove(NOTE)

    def clear(self, folder: Path, files: Files) -> None:
        """Remove the folder that was sent, if it is this result, and the empty folders around it."""
        if identity_in(folder / MANIFEST) != self.identity:
            return
        # What makes it a checkpoint goes first: half of it must not look finished.
        for name in reversed(self.names):
            if (folder / name).is_file():
                files.remove(folder / name)
        parents = {parent for name in self.names for parent in (folder / name).parents}
        for parent in sorted(parents, key=lambda path: -len(path.parts)):
            if parent == folder or folder in parent.parents:
                _remove_empty(parent, files)

    def _listed(self) -> dict[str, StoredObject]:
        return {each.name: each for each in self.store.listed()}

    def _identity_in(self, found: StoredObject) -> Any:
        limit = 4 * SMALL + PER_TENSOR * len(self.ready.plan.tensors)
        if found.size > limit:
            return None
        try:
            data = self.store.read(found, 0, found.size)
            return parse_object(data, f"{self.store.url}/{found.name}").get("identity")
        except CheckpointError:
            return None

    def _same(self, found: StoredObject, file: Path, part: int) -> bool:
        """Return whether an object holds a file's bytes."""
        if found.size != _size(file):
            return False
        if found.mark == md5_mark(file, part):
            return True
        with _opened(file) as stream:
            for start in range(0, found.size, _CHUNK):
                stop = min(found.size, start + _CHUNK)
                if stream.read(stop - start) != self.store.read(found, start, stop):
                    return False
        return True


def part_size(size: int) -> int:
    """Bytes of the parts in which a file is sent: whole MiB."""
    return max(PART_BYTES, -(-size // _MOST_PARTS >> 20) << 20)


def md5_mark(file: Path, part: int) -> str:
    """The ETag that S3 gives an object: its MD5, or for one sent in parts the MD5 of theirs and how many
    there are. (With keys of a key management service it is another; then bytes are compared.)"""
    whole, parts, count = md5(usedforsecurity=False), md5(usedforsecurity=False), 0
    many = _size(file) >= 2 * part
    with _opened(file) as stream:
        while chunk := stream.read(part):
            if many:
                parts.update(md5(chunk, usedforsecurity=False).digest())
                count += 1
            else:
                whole.update(chunk)
    return f"{parts.hexdigest()}-{count}" if many else whole.hexdigest()


def check_urls_apart(url: str, checkpoint: Checkpoint) -> None:
    """Raise OutputError where an output in a store would lie in, on or around its own source."""
    for shard in checkpoint.shards:
        if shard.remote is not None:
            source = shard.remote.store.url
            if f"{url}/".startswith(f"{source}/") or f"{source}/".startswith(f"{url}/"):
                raise OutputError(f"{url}: must lie apart from the source {source}")


def _size(file: Path) -> int:
    with reading(file, OutputError):
        return file.stat().st_size


def _opened(file: Path) -> Any:
    try:
        return os.fdopen(open_regular(file, follow=False, error=OutputError), "rb")
    except FileNotFoundError as error:
        raise OutputError(f"{file}: is gone; run the same command again") from error


def _remove_empty(folder: Path, files: Files) -> None:
    if folder.is_dir() and not folder.is_symlink() and not os.listdir(folder):
        files.remove(folder)


Where = str | Path


@dataclass(frozen=True)
class Output:
    """The folder that a result is made in, None if none was named; with a `url`, where it is sent: to a
    store when it is finished, to a repo on the Hub (`hf://`), which may be `private`, while it is
    made."""

    folder: Path | None
    url: str | None = None
    private: bool = False

    @property
    def name(self) -> str | None:
        return self.url or (None if self.folder is None else str(self.folder))

    @property
    def streamed(self) -> bool:
        return self.url is not None and is_hub(self.url)

    def outlet(self, ready: Prepared) -> HubUploadTarget | None:
        """The repo that a result goes to while it is made, None for any other place."""
        if self.url is None or not self.streamed:
            return None
        from qconvert.hub.destination import outlet_of

        return outlet_of(ready, self.url, private=self.private)

    def delivery(self, ready: Prepared) -> Delivery | None:
        """The folder in a store that a finished result is sent to, None for any other place."""
        if self.url is None or self.streamed:
            return None
        return Delivery(store_of(self.url), ready)


def output_at(out: Where | None, source: Checkpoint, options: RunOptions) -> Output:
    """Return where a result is made and sent. Raises OutputError for one on top of the source,
    UsageError for what cannot be done in a store."""
    stored = out is not None and is_url(out)
    found = _stored(str(out), source, options) if stored else folder_or_repo(out, options)
    if options.for_run and found.folder is not None:
        check_apart(found.folder, source)
    return found


def outputs_at(outs: Sequence[Where], source: Checkpoint, options: RunOptions) -> list[Output]:
    """The places of results of one run. Raises UsageError where some are repos and others are not, or
    two are one."""
    if any(map(is_hub, outs)) and not all(map(is_hub, outs)):
        raise UsageError(
            f"{outs[0]} and {outs[1]}: one is a folder and one a repo on the Hub; name two of a kind"
        )
    found = [folder_or_repo(out, options) for out in outs]
    urls = [one.url for one in found if one.url is not None]
    if len(set(urls)) < len(urls):
        raise UsageError(f"{urls[0]}: is named for both sides; name another repo for one of them")
    for one in found if options.for_run else ():
        assert one.folder is not None
        check_apart(one.folder, source)
    return found


def folder_or_repo(out: Where | None, options: RunOptions) -> Output:
    """A place that is none in a store. Raises UsageError for a URL, and for --work-dir and --private
    without a repo."""
    if out is not None and is_hub(out):
        from qconvert.hub.destination import check_streamed, hub_destination, hub_work_folder

        repo = hub_destination(str(out))
        check_streamed(repo, options.shard, options.engine)
        return Output(hub_work_folder(repo, options.work_dir), f"hf://{repo}", options.private)
    _check_folder(out, options)
    return Output(None if out is None else Path(out))


def _check_folder(out: Where | None, options: RunOptions) -> None:
    if out is not None and is_url(out):
        raise UsageError(f"{out}: several folders are made at once; name folders of this machine")
    if out is not None and options.work_dir is not None:
        raise UsageError(
            f"--work-dir is for an OUT in a store, and {out} is a folder of this machine"
        )
    _check_private(options)


def _check_private(options: RunOptions) -> None:
    if options.private:
        raise UsageError("--private is of a repo that is made on the Hub: name one, hf://ORG/NAME")


def _stored(out: str, source: Checkpoint, options: RunOptions) -> Output:
    url = store_of(out).url
    if options.shard is not None and options.work_dir is None:
        raise UsageError(
            f"--shard: name a folder that all machines share by --work-dir, to make {url}"
        )
    _check_private(options)
    check_urls_apart(url, source)
    return Output(work_folder(url, options.work_dir), url)
