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

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from qconvert.checkpoint.safetensors import Entry, read_header
from qconvert.core.errors import CheckpointError, DataError
from qconvert.core.extras import require
from qconvert.core.family import text_config
from qconvert.core.json_text import parse_json
from qconvert.core.links import open_regular, read_regular, reading
from qconvert.core.say import say
from qconvert.core.shown import count
from qconvert.samples.request import DATASET
from qconvert.samples.request import DataSpec as DataSpec
from qconvert.samples.tokenizer import (
    MOST_LINE,
    ROW_COLUMNS,
    Tokenizer,
    text_windows,
    tokenizer_files,
)

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


_NUMPY = {"I64": "<i8", "I32": "<i4"}


class Samples(Protocol):
    """Candidates, numbered from 0; `where` names one in messages. One may have no ids."""

    def __len__(self) -> int: ...

    def ids(self, number: int) -> Sequence[int] | Ids: ...

    def where(self, number: int) -> str: ...


class Windows:
    """Windows of a text, made in order."""

    def __init__(self, file: Path, windows: Iterable[Sequence[int]]) -> None:
        self._file = file
        self._windows = [array("i", window) for window in windows]

    def __len__(self) -> int:
        return len(self._windows)

    def ids(self, number: int) -> Sequence[int]:
        return self._windows[number]

    def where(self, number: int) -> str:
        return f"{self._file}: window {number}"


class JsonLines:
    """Lines that are not blank, found by their offsets: only those that are taken are parsed.

    Raises DataError, with file and line, for a line that is not a JSON object, and as Tokenizer.row
    does.
    """

    def __init__(self, file: Path, column: str | None, tokenizer: Tokenizer) -> None:
        self._file, self._column, self._tokenizer = file, column, tokenizer
        self._offsets, self._lines = array("Q"), array("Q")
        at = 0
        with (
            reading(file, DataError),
            os.fdopen(open_regular(file, error=DataError), "rb") as stream,
        ):
            for number, line in enumerate(iter(lambda: stream.readline(MOST_LINE + 1), b""), 1):
                if len(line) > MOST_LINE:
                    raise DataError(
                        f"{file}:{number}: expected a line of at most {MOST_LINE} bytes, found more"
                    )
                if line.strip():
                    self._offsets.append(at)
                    self._lines.append(number)
                at += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def ids(self, number: int) -> Sequence[int]:
        return self._tokenizer.row(self.row(number), self._column, self.where(number))

    def row(self, number: int) -> dict[str, Any]:
        where = self.where(number)
        try:
            with os.fdopen(open_regular(self._file, error=DataError), "rb") as stream:
                stream.seek(self._offsets[number])
                row = parse_json(stream.readline(MOST_LINE), where, error=DataError)
        except DataError as error:
            raise DataError(f"{error}; write one object per line") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where}: expected an object, found {type(row).__name__}; write one object per line"
            )
        return row

    def where(self, number: int) -> str:
        return f"{self._file}:{self._lines[number]}"


class TensorRows:
    """Rows of a matrix of ids, I64 or I32 [samples, ids], in a safetensors file.

    Raises DataError where it has no such tensor, or where `attention_mask` says that rows are padded.
    """

    def __init__(self, file: Path, name: str) -> None:
        try:
            entries = {entry.name: entry for entry in read_header(file).entries}
        except CheckpointError as error:
            raise DataError(str(error)) from error
        if name not in entries:
            raise DataError(
                f"{file}: expected tensor {name!r}, found {', '.join(entries) or 'none'}; name the "
                "tensor with --column"
            )
        self._file, self._name = file, name
        self._rows = self._matrix(entries[name])
        mask = entries.get("attention_mask")
        if mask is not None and not bool(self._matrix(mask).all()):
            raise DataError(
                f"{file}: 'attention_mask' has zeros, so rows are padded; give rows of real tokens, "
                "or JSONL with input_ids, whose lines may differ in length"
            )

    def _matrix(self, entry: Entry) -> np.ndarray[Any, Any]:
        import numpy as np

        kind = entry.type
        if kind.dtype not in _NUMPY or len(kind.shape) != 2 or not kind.numel:
            raise DataError(
                f"{self._file}: {entry.name!r}: expected I64 or I32 [samples, ids], found {kind}"
            )
        return np.memmap(self._file, _NUMPY[kind.dtype], "r", entry.offset, kind.shape)

    def __len__(self) -> int:
        return int(self._rows.shape[0])

    def ids(self, number: int) -> Ids:
        row: Ids = self._rows[number]
        return row

    def where(self, number: int) -> str:
        return f"{self._file}: {self._name!r} row {number}"


class DatasetRows:
    """Rows of a dataset that `datasets` loads: by id, by folder, from its cache where it is offline.

    `name` is NAME, NAME:SPLIT or NAME:CONFIG:SPLIT; the split is `train` where none is named. Raises
    DataError where it cannot be loaded.
    """

    def __init__(self, name: str, column: str | None, tokenizer: Tokenizer) -> None:
        self._name, self._column, self._tokenizer = f"{DATASET}{name}", column, tokenizer
        repo, *rest = name.split(":")
        if not repo or len(rest) > 2 or not all(rest):
            raise DataError(
                f"{self._name!r}: expected {DATASET}NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"
            )
        what = f"{self._name} is read through datasets"
        require("calibrate", what, "datasets", error=DataError)
        from datasets import load_dataset

        config = rest[0] if len(rest) == 2 else None
        try:
            self._rows = load_dataset(repo, config, split=rest[-1] if rest else "train")
        except Exception as error:  # of many kinds, from several libraries
            said = str(error).partition("\n")[0] or type(error).__name__
            raise DataError(f"{self._name}: the dataset cannot be loaded: {said}") from error
        names = self._rows.column_names
        self._columns = [column] if column else [name for name in ROW_COLUMNS if name in names]
        if not self._columns or self._columns[0] not in names:
            known = repr(column) if column else " or ".join(ROW_COLUMNS)
            raise DataError(f"{self._name}: expected column {known}, found {', '.join(names)}")

    def contents(self) -> Iterable[bytes]:
        """Every row's columns that count, in order."""
        for row in self._rows.select_columns(self._columns):
            yield json.dumps(row, sort_keys=True).encode()

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, number: int) -> Sequence[int]:
        return self._tokenizer.row(self._rows[number], self._column, self.where(number))

    def where(self, number: int) -> str:
        return f"{self._name}: row {number}"


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
        put(str(vocab_size(folder)).encode())
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


def amount(spec: DataSpec) -> tuple[int, int] | None:
    """Samples that a file of text has for a calibration, at most as many as it takes, and about their
    tokens, at 4 bytes each; nothing is tokenized. None for other data. Raises DataError for a file that
    cannot be read."""
    if spec.kind not in ("text", "jsonl"):
        return None
    file = _file(spec)
    with (
        reading(file, DataError),
        os.fdopen(open_regular(file, error=DataError), "rb") as stream,
    ):
        lines = iter(
            lambda: stream.readline(MOST_LINE + 1), b""
        )  # one that is longer is refused later
        sizes = [len(line) // 4 for line in lines if line.strip()]
    if spec.kind == "text":  # windows over all of it
        whole, rest = divmod(sum(sizes), spec.length)
        sizes = [spec.length] * whole + [rest]
    taken = sizes[: spec.samples]
    return len(taken), sum(min(size, spec.length) for size in taken)


def most_tokens(spec: DataSpec) -> int:
    """Tokens that a calibration can have at the most: as many as are asked for, and of a file of text no
    more than its bytes, and one to begin each sample. Raises DataError for a file that cannot be
    read."""
    asked = spec.samples * spec.length
    if spec.kind != "text":
        return asked
    file = _file(spec)
    with reading(file, DataError):
        return min(asked, file.stat().st_size + spec.samples)


def load_tokens(spec: DataSpec, folder: Path, remark: Callable[[str], None] = _say) -> list[Ids]:
    """The samples, in order: int64 [ids], 1 <= ids <= length, each id below `vocab_size` of
    `folder`/config.json. `remark` is told what a user must know: fewer samples than requested, short
    or empty ones, random tokens. Raises DataError, with file and line, for data that cannot
    be used, and where there is no sample at all."""
    import numpy as np

    vocab = vocab_size(folder)
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
    for number in sample_order(len(samples), spec.seed):
        taken = samples.ids(number)[: spec.length]
        if not len(taken):
            empty += 1
            continue
        # Before they become int64, which JSON's numbers need not fit.
        check_ids(taken, vocab, samples.where(number))
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


def check_ids(ids: Sequence[int] | Ids, vocab: int, where: str) -> None:
    """Raise DataError for an id that is not below `vocab`."""
    wrong = next((one for one in ids if not 0 <= one < vocab), None)
    if wrong is not None:
        raise DataError(
            f"{where}: token id {wrong} is outside the model's vocabulary of {vocab}; use the model's "
            "own tokenizer"
        )


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


def sample_order(count: int, seed: int) -> Iterator[int]:
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


def vocab_size(folder: Path) -> int:
    file = folder / "config.json"
    with reading(file, DataError):
        config = parse_json(read_regular(file, error=DataError), file, error=DataError)
    size = text_config(config).get("vocab_size") if isinstance(config, dict) else None
    if type(size) is not int or size < 1:
        raise DataError(f"{file}: expected vocab_size, found {size!r}; ids cannot be checked")
    return size
