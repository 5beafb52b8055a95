"""A finished shard read once more before it is sent: its sha256, and whether it is what was computed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO

import xxhash

from qconvert.core.errors import OutputError
from qconvert.core.regular import open_regular
from qconvert.run.outlet import Sent
from qconvert.run.shards import OutFile

_CHUNK = 4 << 20


def hashes_in(records: Iterable[str]) -> dict[str, str]:
    """xxh3-128 of tensors by name, from receipt lines."""
    lines = map(json.loads, records)
    return {line["name"]: line["xxh3"] for line in lines}


def seen_whole(path: Path, file: OutFile, hashes: Mapping[str, str]) -> Sent:
    """A shard's size and sha256. Raises OutputError where its header is not the planned one, or a
    tensor's bytes have another hash than when they were computed: what goes elsewhere is not looked at
    again."""
    whole = sha256()
    try:
        fd = open_regular(path, follow=False, error=OutputError)
    except FileNotFoundError as error:
        raise OutputError(f"{path}: is gone; run the same command again") from error
    with os.fdopen(fd, "rb", buffering=_CHUNK) as stream:
        header = _read(stream, path, len(file.header))
        whole.update(header)
        if header != file.header:
            raise _changed(path, "its header differs from the plan's")
        for tensor in file.tensors:
            digest, left = xxhash.xxh3_128(), tensor.type.nbytes
            while left:
                chunk = _read(stream, path, min(left, _CHUNK))
                whole.update(chunk)
                digest.update(chunk)
                left -= len(chunk)
            if digest.hexdigest() != hashes[tensor.name]:
                raise _changed(path, f"tensor {tensor.name!r} has other bytes than were computed")
        if stream.read(1):
            raise _changed(path, f"expected {file.size} bytes, found more")
    return Sent(file.name, file.size, whole.hexdigest())


def _read(stream: IO[bytes], path: Path, size: int) -> bytes:
    try:
        data = stream.read(size)
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) < size:
        raise _changed(path, "ends early")
    return data


def _changed(path: Path, what: str) -> OutputError:
    return OutputError(f"{path}: {what}; it was not sent. Run the same command again with --verify")
