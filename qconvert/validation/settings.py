"""Files beside the weights that decide what a runtime computes, of two checkpoints compared: config.json
and its like by key, what makes tokens of text, and the model's own code by their bytes.

What may differ between a folder and the one that a conversion and its reverse make of it is left out:
the README, the manifest and the receipt, who wrote the config last (`transformers_version`), and lists
of modules that are not quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG, Checkpoint
from qconvert.core.json_text import parse_object
from qconvert.core.shown import shortened

CONFIG = "config.json"
_BY_KEY = ("generation_config.json", HF_QUANT_CONFIG)
_WROTE = ("transformers_version", "_name_or_path")
# Lists of what is not quantized: of equal tensors they say the same, and a conversion completes them.
_UNQUANTIZED = (
    "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude",
)  # fmt: skip
# Tokenizers and processors of text, images and sound, as transformers and mistral-common name their
# files, and classes that a config's auto_map names.
_BY_BYTES = re.compile(
    r"(tokenizer|chat_template|vocab|merges|tekken|spiece|sentencepiece)[^/]*"
    r"|(special_tokens_map|added_tokens|([a-z]+_)?(pre)?processor_config)\.json"
    r"|[^/]+\.(tiktoken|model|jinja)|additional_chat_templates/[^/]+|(.*/)?[^/]+\.py"
)
_CHUNK = 1 << 20
_LONGEST = 100  # characters of a value
_ABSENT = "nothing"


def compared_files(a: Checkpoint, b: Checkpoint) -> list[str]:
    """The files that are compared, the config first."""
    there = {*a.side_files, *b.side_files}
    by_key = [name for name in _BY_KEY if name in there]
    return [CONFIG, *by_key, *sorted(name for name in there if _BY_BYTES.fullmatch(name))]


def uncompared_files(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Other files than those: which only one has, or whose bytes differ."""
    there = {*a.side_files, *b.side_files} - {*compared_files(a, b), "README.md"}
    both = {*a.side_files} & {*b.side_files}
    return sorted(n for n in there if n not in both or _first_difference(a, b, n) is not None)


def different_lists(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Lists of modules that are not quantized which differ, by their places in config.json; they are
    not compared."""
    found: list[str] = []
    blocks = [block for checkpoint in (a, b) for block in checkpoint.quantization_configs]
    for where in dict.fromkeys(block.where for block in blocks):
        of_both = [block.block for block in blocks if block.where == where]
        for key in _UNQUANTIZED:
            values = {tuple(sorted(map(str, block.get(key) or ()))) for block in of_both}
            if len(values) > 1:
                found.append(f"{where}.{key}")
    return found


def different_settings(a: Checkpoint, b: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """Everything that differs: the file, the kind (`config`: a key's value; `file`: the bytes; `file-a`,
    `file-b`: only one has it), and a detail. Raises CheckpointError for a file that cannot be read."""
    for name in compared_files(a, b):
        if name == CONFIG:
            yield from ((name, "config", text) for text in _keys(a.config, b.config))
            continue
        if name not in b.side_files or name not in a.side_files:
            yield name, "file-a" if name in a.side_files else "file-b", "the whole file"
        elif name in _BY_KEY:
            first, second = (parse_object(one.read(name) or b"{}", name) for one in (a, b))
            yield from ((name, "config", text) for text in _keys(first, second))
        else:
            at = _first_difference(a, b, name)
            if at is not None:
                yield name, "file", f"first differing byte {at}"


def _keys(a: Mapping[str, Any], b: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Keys with another value, those of nested objects with a dot between: `rope_scaling.factor`."""
    for key in dict.fromkeys((*a, *b)):
        if key in _WROTE or (above and key in _UNQUANTIZED):
            continue
        where = f"{above}{key}"
        first, second = a.get(key), b.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from _keys(first, second, f"{where}.")
        elif (key in a) != (key in b) or not _same(first, second):
            values = (_shown(one, key) for one in (a, b))
            yield f"{where}: {' and '.join(values)}"


def _same(first: Any, second: Any) -> bool:
    """Tell whether two values of JSON are equal, for which 1, 1.0 and true are three."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    return bool(type(first) is type(second) and first == second)


def _shown(config: Mapping[str, Any], key: str) -> str:
    return shortened(repr(config[key]), _LONGEST) if key in config else _ABSENT


def _first_difference(a: Checkpoint, b: Checkpoint, name: str) -> int | None:
    """Offset of the first differing byte, None for equal files."""
    at = 0
    with a.open_file(name) as one, b.open_file(name) as other:
        while True:
            first, second = one.read(_CHUNK), other.read(_CHUNK)
            if first != second:
                pairs = enumerate(zip(first, second, strict=False))
                shorter = min(len(first), len(second))
                return at + next((n for n, (x, y) in pairs if x != y), shorter)
            if not first:
                return None
            at += len(first)
