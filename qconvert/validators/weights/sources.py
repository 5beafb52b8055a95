"""The source, read again, must equal what was read when the output was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.validation.runner import Folder, Need
from qconvert.validators.weights.hashes import HashTask


@dataclass(frozen=True)
class SourceHashes:
    """Reads every source range the receipt names, once, and compares xxh3-128."""

    name: str = "sources"
    proves: str = "the source's bytes are those the output was made from"
    needs: frozenset[Need] = frozenset({"source", "receipt", "data"})

    def __call__(self, folder: Folder) -> Iterator[HashTask]:
        source = folder.source
        assert source is not None
        ranges = {
            (part["name"], part["start"], part["stop"]): (part["xxh3"], line["name"])
            for line in folder.receipt or ()
            for part in line.get("sources", ())
        }
        for (name, start, stop), (expected, made) in folder.some(list(ranges.items())):
            # QC031 and QC030 report a tensor that is gone or smaller.
            if name in source and stop <= source[name].type.nbytes:
                yield HashTask(
                    tensor=source[name], side="source", spans=((start, stop),), grouped_with=made,
                    rule="QC033", expected=expected,
                )  # fmt: skip


VALIDATOR = SourceHashes()
