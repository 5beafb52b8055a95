"""The source, read again, must be what was read when the output was made.

QC033 a source tensor's bytes have another hash than the receipt's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from qconvert.run.reader import Reader
from qconvert.validation import Finding, Folder, Need

_CHUNK = 4 << 20


@dataclass(frozen=True)
class SourceHashes:
    """Reads every source range the receipt names, once, and compares xxh3-128."""

    name: str = "sources"
    proves: str = "the source's bytes are those the output was made from"
    needs: frozenset[Need] = frozenset({"source", "receipt", "data"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        source = folder.source
        assert source is not None
        reader = Reader(source.shards)
        buffer = memoryview(bytearray(_CHUNK))
        ranges = {
            (part["name"], part["start"], part["stop"]): part["xxh3"]
            for line in folder.receipt or ()
            for part in line.get("sources", ())
        }
        try:
            for (name, start, stop), expected in ranges.items():
                if name not in source or stop > source[name].type.nbytes:
                    continue  # QC031 and QC030 speak of it
                digest = xxhash.xxh3_128()
                for at in range(start, stop, _CHUNK):
                    chunk = buffer[: min(_CHUNK, stop - at)]
                    reader.read(source[name], at, chunk)
                    digest.update(chunk)
                if digest.hexdigest() != expected:
                    yield Finding("QC033", "error", name, "its bytes are not those read")
        finally:
            reader.close()


VALIDATOR = SourceHashes()
