"""Candidates for calibration samples in the forms that data comes in, each found by its number. Which
reader a --data takes, and which candidates become samples, is decided in samples/data.py."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qconvert.checkpoint.safetensors import Entry, read_header
from qconvert.core.errors import CheckpointError, DataError
from qconvert.core.extras import require
from qconvert.core.json_text import parse_json
from qconvert.core.links import open_regular, reading
from qconvert.samples.request import DATASET
from qconvert.samples.tokenizer import MOST_LINE, ROW_COLUMNS, Tokenizer

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
        return self._tokenizer.row(row, self._column, where)

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
