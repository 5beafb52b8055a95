"""Every byte as it was written.

QC022 a tensor's or file's bytes have another hash than the receipt's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from qconvert.run.reader import Reader
from qconvert.validation import Finding, Folder, Need

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Hashes:
    """Reads everything once and compares xxh3-128."""

    name: str = "hashes"
    proves: str = "every byte has the hash it was written with"
    needs: frozenset[Need] = frozenset({"receipt", "data"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        checkpoint = folder.checkpoint
        reader = Reader(checkpoint.shards)
        buffer = memoryview(bytearray(_CHUNK))
        try:
            for line in folder.receipt or ():
                name = line.get("name")
                digest = xxhash.xxh3_128()
                if name is not None and name in checkpoint:
                    source = checkpoint[name]
                    for start in range(0, source.type.nbytes, _CHUNK):
                        chunk = buffer[: min(_CHUNK, source.type.nbytes - start)]
                        reader.read(source, start, chunk)
                        digest.update(chunk)
                elif name is None and "xxh3" in line and (checkpoint.root / line["file"]).is_file():
                    digest.update((checkpoint.root / line["file"]).read_bytes())
                else:
                    continue  # a shard (its tensors are hashed), or missing: QC020
                if digest.hexdigest() != line["xxh3"]:
                    where = name if name is not None else line["file"]
                    yield Finding("QC022", "error", where, "its bytes are not those written")
        finally:
            reader.close()


VALIDATOR = Hashes()
