"""Data of a calibration: its tokens, and a hash of everything that decides it.

| data | a sample is |
|---|---|
| `x.txt` | a window of `length` ids of the text, read as one stream |
| `x.jsonl`, `x.ndjson` | a line: `text`, `messages`, `conversations` or `input_ids`, cut at `length` |
| `x.safetensors` | a row of `input_ids`, I64 or I32 [samples, ids], cut at `length` |
| `hf-dataset:NAME`, `:SPLIT`, `:CONFIG:SPLIT` | a row, read as a line of JSONL is |
| none, synthetic | ids drawn from the whole vocabulary, for trials |

Seed 0 takes samples in file order. Any other draws them: draw k is the sample whose number is
xxh3_64("SEED:k") modulo how many there are, and one drawn before is skipped. The rule is spelled out
here, not left to a library, so that it never changes. Nothing is padded or packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from qconvert.core.errors import DataError
from qconvert.core.family import text_config
from qconvert.core.json_text import parse_json
from qconvert.core.links import open_regular, read_regular, reading
from qconvert.core.say import say
from qconvert.core.shown import count
from qconvert.samples.readers import DatasetRows, JsonLines, Samples, TensorRows, Windows
from qconvert.samples.request import DATASET
from qconvert.samples.request import DataSpec as DataSpec
from qconvert.samples.tokenizer import Tokenizer, text_windows, tokenizer_files

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_RULES = "qconvert calibration data 1"  # goes up when the same files would give other samples


def digest(spec: DataSpec, folder: Path) -> str:
    """xxh3-128, hex, of what decides which tokens `load_tokens` gives: the data's bytes (a dataset's
    rows), the tokenizer's files in `folder`, and the settings; paths are not in it. Imports neither
    torch nor transformers. Raises DataError where something cannot be read."""
    hasher = xxhash.xxh3_128()

    def put(part: bytes) -> None:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)

    def put_file(file: Path) -> None:
        with (
            reading(file, DataError),
            os.fdopen(open_regular(file, error=DataError), "rb") as stream,
        ):
            hasher.update(stream.seek(0, 2).to_bytes(8, "little"))
            stream.seek(0)
            while chunk := stream.read(1 << 20):
                hasher.update(chunk)

    put(repr((_RULES, spec.kind, spec.samples, spec.length, spec.seed, spec.column)).encode())
    if spec.kind == "synthetic":
        put(str(_vocab_size(folder)).encode())
    elif spec.kind == "dataset":
        for row in _dataset(spec, Tokenizer(folder)).contents():
            put(row)
    else:
        put_file(_file(spec))
    if spec.kind in ("text", "jsonl", "dataset"):
        for file in tokenizer_files(folder):
            put(file.relative_to(folder).as_posix().encode())
            put_file(file)
    return hasher.hexdigest()


def _say(text: str) -> None:
    say(f"qconvert: {text}", err=True)


def load_tokens(spec: DataSpec, folder: Path, remark: Callable[[str], None] = _say) -> list[Ids]:
    """The samples, in order: int64 [ids], 1 <= ids <= length, each id below `vocab_size` of
    `folder`/config.json. `remark` is told what a user must know: fewer samples than requested, short
    or empty ones, random tokens. Raises DataError, with file and line, for data that cannot
    be used, and where there is no sample at all."""
    import numpy as np

    vocab = _vocab_size(folder)
    if spec.kind == "synthetic":
        remark(
            f"tokens are random: {spec.samples} x {spec.length}, uniform over {vocab} ids; routers and "
            "activations see no real text: use this for trials, not for a model to serve"
        )
        # Of numpy's generators the one whose numbers are promised never to change.
        drawn = np.random.RandomState(spec.seed)
        return list(drawn.randint(0, vocab, (spec.samples, spec.length), dtype=np.int64))
    samples = _samples(spec, Tokenizer(folder))
    found: list[Ids] = []
    empty = 0
    for number in _order(len(samples), spec.seed):
        taken = samples.ids(number)[: spec.length]
        if not len(taken):
            empty += 1
            continue
        # Before they become int64, which JSON's numbers need not fit.
        wrong = next((one for one in taken if not 0 <= one < vocab), None)
        if wrong is not None:
            raise DataError(
                f"{samples.where(number)}: token id {wrong} is outside the model's vocabulary of "
                f"{vocab}; use the model's own tokenizer"
            )
        found.append(np.array(taken, dtype=np.int64))
        if len(found) == spec.samples:
            break
    if not found:
        raise DataError(
            f"{spec.data}: expected {count(spec.samples, 'sample')}, found none; give data with "
            "text"
        )
    _remark(spec, found, empty, remark)
    return found


def _remark(
    spec: DataSpec, found: Sequence[Ids], empty: int, remark: Callable[[str], None]
) -> None:
    if empty:
        remark(f"{spec.data}: skipped {count(empty, 'sample')} without tokens")
    if len(found) < spec.samples:
        remark(
            f"{spec.data}: found {count(len(found), 'sample')}, fewer than the {spec.samples} requested"
        )
    short = sum(ids.size < spec.length for ids in found)
    if short:
        remark(
            f"{spec.data}: {short} of {count(len(found), 'sample')} shorter than {spec.length} tokens; "
            f"{count(sum(ids.size for ids in found), 'token')} in all"
        )


def _order(count: int, seed: int) -> Iterator[int]:
    """Every number below `count`, once: ascending for seed 0, else as drawn."""
    if not seed:
        yield from range(count)
        return
    drawn: set[int] = set()
    draw = 0
    while len(drawn) < count:
        number = xxhash.xxh3_64_intdigest(f"{seed}:{draw}".encode()) % count
        draw += 1
        if number not in drawn:
            drawn.add(number)
            yield number


def _samples(spec: DataSpec, tokenizer: Tokenizer) -> Samples:
    if spec.kind == "dataset":
        return _dataset(spec, tokenizer)
    file = _file(spec)
    if spec.kind == "tokens":
        return TensorRows(file, spec.column or "input_ids")
    if spec.kind == "jsonl":
        return JsonLines(file, spec.column, tokenizer)
    # In file order, what comes after the last sample need not be tokenized.
    limit = None if spec.seed else spec.samples
    return Windows(file, text_windows(file, tokenizer, spec.length, limit))


def _file(spec: DataSpec) -> Path:
    assert spec.data is not None
    return Path(spec.data)


def _dataset(spec: DataSpec, tokenizer: Tokenizer) -> DatasetRows:
    assert spec.data is not None
    return DatasetRows(spec.data.removeprefix(DATASET), spec.column, tokenizer)


def _vocab_size(folder: Path) -> int:
    file = folder / "config.json"
    with reading(file, DataError):
        config = parse_json(read_regular(file, error=DataError), file, error=DataError)
    size = text_config(config).get("vocab_size") if isinstance(config, dict) else None
    if type(size) is not int or size < 1:
        raise DataError(f"{file}: expected vocab_size, found {size!r}; ids cannot be checked")
    return size
