"""Side files must be the source's.

QC085 a side file differs from the source's.

Compared byte by byte, and JSON by content, because tools rewrite it. A file that only the source has is
QC032: checked here for folders without a receipt, as a warning, because another tool may have left it
out on purpose. Files that conversions make themselves are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.core.json_text import parse_json
from qconvert.validation.findings import Finding, Severity
from qconvert.validation.runner import Folder, Need

_MADE = frozenset({"README.md", "hf_quant_config.json"})
_STARTS = (
    "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece",
    "tekken", "chat_template", "preprocessor_config", "processor_config", "video_preprocessor_config",
)  # fmt: skip
_ENDS = (".tiktoken", "tiktoken.model", ".jinja", ".py")
_OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_GENERATION = "generation_config.json"
_CHUNK = 1 << 20
_MOST_JSON = 128 << 20  # tokenizer.json has up to 33 MB
_A_FEW = 8


@dataclass(frozen=True)
class FilesKept:
    """Reads what both folders have, and names what only the source has."""

    name: str = "files_kept"
    proves: str = "side files in both folders are equal"
    needs: frozenset[Need] = frozenset({"files", "source"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        here, source = folder.checkpoint, folder.source
        assert source is not None
        ours = set(here.side_files)
        wanted = [file for file in source.side_files if file not in _MADE]
        for file in wanted:
            message = _difference(here, source, file) if file in ours else ""
            if message:
                severity: Severity = "error" if is_loaded(file) else "warning"
                yield Finding("QC085", severity, file, message)
        if folder.receipt is None:
            yield from _missing(here, source, [file for file in wanted if file not in ours])


def is_loaded(file: str) -> bool:
    """Tell whether runtimes read a file to make token ids, images or layers."""
    name = file.rpartition("/")[2]
    return name.startswith(_STARTS) or name.endswith(_ENDS)


def _missing(here: Checkpoint, source: Checkpoint, gone: list[str]) -> Iterator[Finding]:
    rules = (here.manifest or {}).get("dropped_files", {})
    no_tower = "vision_config" in source.config and "vision_config" not in here.config
    gone = [f for f in gone if f not in rules and not (no_tower and f in _OF_IMAGES)]
    loaded = [file for file in gone if is_loaded(file) or file == _GENERATION]
    for file in loaded:
        yield Finding("QC032", "warning", file, "a side file of the source is missing")
    others = [file for file in gone if file not in loaded]
    if others:
        more = f" and {len(others) - _A_FEW} more" if len(others) > _A_FEW else ""
        message = f"side files of the source are missing: {', '.join(others[:_A_FEW])}{more}"
        yield Finding("QC032", "warning", others[0], message)


def _difference(here: Checkpoint, source: Checkpoint, name: str) -> str:
    """Difference of two files, "" if they are equal."""
    try:
        same = _same_bytes(here, source, name) or (
            name.endswith(".json") and _same_json(here, source, name)
        )
    except CheckpointError as error:  # a dangling link, above all
        return f"cannot be compared with the source's: {error}"
    return "" if same else "differs from the source's file of this name"


def _same_bytes(here: Checkpoint, source: Checkpoint, name: str) -> bool:
    with here.open_file(name) as ours, source.open_file(name) as theirs:
        if os.fstat(ours.fileno()).st_size != os.fstat(theirs.fileno()).st_size:
            return False
        while chunk := ours.read(_CHUNK):
            if chunk != theirs.read(_CHUNK):
                return False
    return True


def _same_json(here: Checkpoint, source: Checkpoint, name: str) -> bool:
    """Tell whether both have the same content. Broken JSON is compared as bytes."""
    ours, theirs = (of.read(name, _MOST_JSON) or b"" for of in (here, source))
    try:
        return bool(parse_json(ours, name) == parse_json(theirs, name))
    except CheckpointError:
        return False


VALIDATOR = FilesKept()
