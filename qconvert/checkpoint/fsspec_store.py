"""Object stores through fsspec: s3://, gs:// and what else it knows. Credentials, endpoint and region
are the library's own (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws, ...).

A request that fails is repeated: a connection that was cut, an answer that is too short, 5xx. What is
not there or not allowed is not.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from qconvert.checkpoint.store import StoredObject, has_changed
from qconvert.core.errors import CheckpointError, QConvertError, RunError, UsageError
from qconvert.core.extras import pip_line
from qconvert.core.shown import shortened

T = TypeVar("T")

TRIES = 6
_PARTS_AT_ONCE = 8
FIRST_WAIT = 0.5  # seconds; each further one is twice as long
_LATER = "run the same command again later: finished work is kept"
# Repeating these finds the same.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_NO_ACCESS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound",
    "DefaultCredentialsError", "NoRegionError", "InvalidConfigError", "ParamValidationError",
}  # fmt: skip
# What stores call the thing that changes with an object's bytes, the surest first.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "content_md5")
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")
# Of a file here, `created` is its ctime, which nobody can set back.
_WRITTEN = ("LastModified", "last_modified", "updated", "created", "mtime")
_SECRET = re.compile(r"(?<=://)[^/\s@]*@|\?\S*")


class _Short(Exception):
    """An answer held fewer bytes than were asked for."""


@dataclass(frozen=True, slots=True)
class FsspecStore:
    """A folder by its URL, without a slash at its end."""

    imports: ClassVar[tuple[str, ...]] = ("fsspec.core",)

    url: str

    def listed(self) -> Sequence[StoredObject]:
        def once() -> dict[str, dict[str, Any]]:
            fs, root = _file_system(self.url)
            fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
            return found

        _, root = _file_system(self.url)
        prefix = f"{root.rstrip('/')}/"
        files = [
            (path[len(prefix) :], info)
            for path, info in patiently(once, f"listing {self.url}").items()
            if info["type"] == "file" and path.startswith(prefix) and not path.endswith("/")
        ]
        return [stored(name, info) for name, info in sorted(files)]

    def read(self, found: StoredObject, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        name = found.name

        def once() -> bytes:
            fs, path = self._path(name)
            data: bytes
            if hasattr(fs, "call_s3"):
                mark, data = _s3_range(fs, path, found.mark, start, stop)
                same = mark == found.mark
            else:
                # No condition can be asked for: if it is the same afterwards, it was meanwhile.
                data = fs.cat_file(path, start=start, end=stop)
                fs.invalidate_cache()
                same = _is_same(found, fs.info(path))
            if not same:
                raise has_changed(self.url, name)
            if len(data) < stop - start:
                raise _Short(f"bytes {start} to {stop} were asked for, {len(data)} came")
            return data[: stop - start]

        return patiently(once, f"reading {self.url}/{name}")

    def look(self, name: str) -> StoredObject | None:
        def once() -> StoredObject | None:
            fs, path = self._path(name)
            fs.invalidate_cache()
            try:
                return stored(name, fs.info(path))
            except FileNotFoundError:
                return None

        return patiently(once, f"looking at {self.url}/{name}")

    def put(self, name: str, data: bytes) -> None:
        def once() -> None:
            fs, path = self._path(name)
            fs.pipe_file(path, data)

        patiently(once, f"writing {self.url}/{name}")

    def send(self, file: Path, name: str, part: int) -> None:
        def once() -> None:
            fs, path = self._path(name)
            # s3fs's own words; it takes parts from 5 MiB on.
            in_parts = {"chunksize": part, "max_concurrency": _PARTS_AT_ONCE}
            fs.put_file(str(file), path, **(in_parts if hasattr(fs, "call_s3") else {}))

        patiently(once, f"sending {self.url}/{name}")

    def remove(self, name: str) -> None:
        def once() -> None:
            fs, path = self._path(name)
            with suppress(FileNotFoundError):
                fs.rm_file(path)

        patiently(once, f"removing {self.url}/{name}")

    def abandon(self) -> None:
        fs, root = _file_system(self.url)
        if not hasattr(fs, "list_multipart_uploads"):
            return
        bucket, slash, folder = root.partition("/")

        def once() -> None:
            # Who may not look for them may still write: then a rule of the bucket has to remove them.
            with suppress(PermissionError):
                for upload in fs.list_multipart_uploads(bucket):
                    if upload["Key"].startswith(f"{folder}{slash}"):
                        fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])

        patiently(once, f"listing unfinished uploads of {self.url}")

    def _path(self, name: str) -> tuple[Any, str]:
        fs, root = _file_system(self.url)
        return fs, f"{root.rstrip('/')}/{name}"


def _s3_range(fs: Any, path: str, mark: str, start: int, stop: int) -> tuple[str, bytes]:
    """A range of an object of S3, which is asked for under its mark (s3fs has no words for that), and
    the mark that came with it: not every store that speaks like S3 heeds the condition. Another one,
    and no bytes, where it was refused."""
    from fsspec.asyn import sync

    bucket, key, _ = fs.split_path(path)

    async def asked() -> tuple[str, bytes]:
        answer = await fs._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}",
            IfMatch=f'"{mark}"',
        )  # fmt: skip
        try:
            return str(answer.get("ETag", "")).strip('"'), await answer["Body"].read()
        finally:
            answer["Body"].close()

    try:
        found: tuple[str, bytes] = sync(fs.loop, asked)
    except OSError as error:
        about = getattr(error.__cause__, "response", {}).get("ResponseMetadata", {})
        if about.get("HTTPStatusCode") != 412:
            raise
        return "", b""
    return found


def _is_same(found: StoredObject, info: Mapping[str, Any]) -> bool:
    """Return whether an object is the one that was found: by its mark, or where times stand for one by
    all of them."""
    now = stored(found.name, info)
    return now == found if not _first(info, _MARKS) else replace(now, time=found.time) == found


def stored(name: str, info: Mapping[str, Any]) -> StoredObject:
    """An object by what a store says of it. Where it has no mark, a time stands for one."""
    mark = _first(info, _MARKS) or _first(info, _MODIFIED)
    return StoredObject(name, int(info["size"]), mark, _first(info, _WRITTEN))


def _first(info: Mapping[str, Any], keys: Sequence[str]) -> str:
    found = next((info[key] for key in keys if info.get(key)), "")
    # Of the same object memory:// gives a number where it lists it, and a date where it is asked for it.
    return str(found.timestamp() if isinstance(found, datetime) else found).strip('"')


# By process: a client does not survive a fork.
_OPENED: dict[tuple[int, str], tuple[Any, str]] = {}
_OPENING = threading.Lock()


def _file_system(url: str) -> tuple[Any, str]:
    """The client, one for a process and not, as fsspec would have it, one for each thread; and the
    folder's name in its words. Raises UsageError where a package is missing."""
    with _OPENING:
        key = (os.getpid(), url)
        if key not in _OPENED:
            _OPENED[key] = _opened(url)
        return _OPENED[key]


def _opened(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(f"{url}: fsspec is missing: {pip_line('s3')}") from error
    try:
        own = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **own)
    except ImportError as error:
        how = pip_line("s3") if scheme in ("s3", "s3a") else _said(error)
        raise UsageError(f"{url}: a package for {scheme}:// is missing: {how}") from error
    except ValueError as error:
        raise UsageError(f"{url}: fsspec knows no {scheme}://; write s3://BUCKET/FOLDER") from error
    return fs, root


def patiently(call: Callable[[], T], what: str) -> T:
    """Call until it succeeds, TRIES times, with longer and longer waits. Raises CheckpointError where
    a repetition would not help, RunError after the last try."""
    for number in range(TRIES):
        try:
            return call()
        except QConvertError:
            raise
        except Exception as error:
            said = _said(error)
            if isinstance(error, _FINAL) or type(error).__name__ in _NO_ACCESS:
                raise CheckpointError(f"{what}: {said}{_why(error)}") from error
            if not _is_transient(error):
                raise
            if number == TRIES - 1:
                raise RunError(f"{what}: {said}, {TRIES} times; {_LATER}") from error
        time.sleep(FIRST_WAIT * 2**number)
    raise AssertionError("the last try returns or raises")


def _is_transient(error: Exception) -> bool:
    """Errors of the system, of the client's libraries, and short answers. Any other is a defect."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | EOFError | TimeoutError | _Short) or library in (
        "fsspec", "botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google", "azure", "adlfs",
    )  # fmt: skip


def _said(error: Exception) -> str:
    """An error in one line, without what may hold a password or a signature."""
    text = " ".join(str(error).split()) or type(error).__name__
    return shortened(_SECRET.sub("", text), 300)


def _why(error: Exception) -> str:
    if isinstance(error, PermissionError):
        return (
            "; the credentials do not allow it: check AWS_PROFILE, AWS_ACCESS_KEY_ID or their like"
        )
    if type(error).__name__ in _NO_ACCESS:
        return "; set AWS_PROFILE, AWS_ACCESS_KEY_ID or their like"
    return "; check its name, and AWS_ENDPOINT_URL for a store that is not Amazon's"
