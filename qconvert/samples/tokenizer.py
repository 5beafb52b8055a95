"""Text to token ids, by the tokenizer in the checkpoint's folder.

Only code of transformers is run: a tokenizer with code of its own (Kimi's) is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qconvert.core.errors import DataError
from qconvert.core.extras import require
from qconvert.core.links import open_regular

# Files that a tokenizer may consist of, in the root of a checkpoint.
_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
_FIX = "give tokenized safetensors (`input_ids` [samples, length])"
_MISSING = f"download its tokenizer.json and tokenizer_config.json, or {_FIX}"

# ShareGPT's names of who speaks, in the words that chat templates know.
_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "assistant": "assistant", "tool": "tool",
}  # fmt: skip

ROW_COLUMNS = ("text", "messages", "conversations", "input_ids")
MOST_LINE = 64 << 20  # bytes of JSONL or characters of text in a line
# The largest published, Gemma 3's tokenizer.json, has 33 MB. transformers reads them whole.
MOST_TOKENIZER = 256 << 20
_PIECE = 1 << 16  # characters; long enough that where pieces end makes no difference


def tokenizer_files(folder: Path) -> list[Path]:
    """Files of a checkpoint that decide what ids a text becomes, sorted by name."""
    found = {file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


class Tokenizer:
    """A checkpoint's tokenizer, loaded when first needed.

    Raises DataError where the folder has none, or has one that needs code of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: Any = None

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            if not any(True for pattern in _VOCABULARIES for _ in self._folder.glob(pattern)):
                wanted = ", ".join(_VOCABULARIES)
                raise DataError(
                    f"{self._folder}: expected a tokenizer (one of {wanted}), found none; {_MISSING}"
                )
            for file in self._folder.iterdir():
                _check_loadable(file)
            what = f"{self._folder}: transformers loads its tokenizer"
            require("calibrate", what, "transformers", error=DataError)
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(
                    self._folder, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # of many kinds, from several libraries
                raise DataError(
                    f"{self._folder}: transformers cannot load the tokenizer: {_line(error)}; {_FIX}"
                ) from error
        return self._loaded

    def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        found = self._tokenizer()(texts, add_special_tokens=special, verbose=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    def prefix(self) -> list[int]:
        """Return what the tokenizer puts before every text: DeepSeek's BOS, nothing for Qwen."""
        (plain,), (full,) = self._ids(["a"], special=False), self._ids(["a"], special=True)
        starts = range(len(full) - len(plain) + 1)
        return full[: next((at for at in starts if full[at : at + len(plain)] == plain), 0)]

    def text(self, text: str) -> list[int]:
        """A document, with the special tokens that belong to it."""
        return self._ids([text], special=True)[0] if text else []

    def pieces(self, texts: list[str]) -> list[list[int]]:
        """Parts of a text, without special tokens."""
        return self._ids(texts, special=False) if texts else []

    def chat(self, messages: list[dict[str, Any]], where: str) -> list[int]:
        """A conversation by the model's chat template, which writes special tokens itself."""
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise DataError(
                f"{self._folder}: expected a chat template for the conversation in {where}, found "
                "none; give documents (`text`), or tokenized safetensors"
            )
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # a template raises what it likes
            raise DataError(f"{where}: the chat template rejects it: {_line(error)}") from error
        return self._ids([text], special=False)[0]

    def pair(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """Ids of a context and of the text that follows it, as lm-evaluation-harness takes them apart
        (0.4.13, `TemplateLM._encode_pair`, `HFLM.tok_encode`): spaces at the end of the context belong
        to the text, and an empty context is the token that begins a text, or else ends one."""
        tokenizer = self._tokenizer()
        begin = tokenizer.bos_token_id
        begin = tokenizer.eos_token_id if begin is None else begin
        mark = "" if begin is None else tokenizer.decode(begin)
        if not context:
            (ids,) = self._ids([text], special=False)
            if begin is None:
                return ids[:1], ids[1:]
            return ([begin], ids) if ids[:1] != [begin] else (ids[:1], ids[1:])
        ends = len(context.rstrip())
        context, text = context[:ends], context[ends:] + text
        both = [context, context + text]
        # A context that begins with the mark itself gets no second one.
        marked = bool(mark) and context.startswith(mark)
        before, whole = self._ids(both, special=not marked)
        return before, whole[len(before) :]

    def row(self, row: Mapping[str, Any], column: str | None, where: str) -> list[int]:
        """A row of JSONL or of a dataset: `text`, `messages`, `conversations`, `input_ids`, or the
        column of that form that is named. Raises DataError, naming `where`."""
        present = [name for name in ROW_COLUMNS if name in row]
        if column is not None and column not in row:
            raise DataError(
                f"{where}: expected column {column!r}, found {', '.join(row) or 'none'}"
            )
        if column is None and len(present) != 1:
            known = ", ".join(ROW_COLUMNS)
            raise DataError(
                f"{where}: expected one of the columns {known}, found "
                f"{', '.join(present or row) or 'none'}; name the column with --column"
            )
        name = present[0] if column is None else column
        value = row[name]
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list) and all(type(item) is int for item in value):
            return value
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            return self.chat([_message(item, where) for item in value], where)
        raise DataError(
            f"{where}: expected {name!r} to be text, a list of messages or a list of token ids, found "
            f"{type(value).__name__}"
        )


def _check_loadable(file: Path) -> None:
    """Raise DataError for what transformers must not open: it would wait for the writer of a pipe."""
    if file.is_dir() or file.suffix == ".safetensors" or not file.exists():
        return
    fd = open_regular(file, error=DataError)
    size = os.fstat(fd).st_size
    os.close(fd)
    if size > MOST_TOKENIZER and any(file.match(pattern) for pattern in _FILES):
        raise DataError(f"{file}: expected at most {MOST_TOKENIZER} bytes, found {size}; {_FIX}")


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`{role, content}` as it is; ShareGPT's `{from, value}` in the same words."""
    if "role" in item and "content" in item:
        return dict(item)
    if "from" in item and "value" in item:
        role = _ROLES.get(str(item["from"]))
        if role is None:
            raise DataError(
                f"{where}: unknown speaker {item['from']!r}; supported values: "
                f"{', '.join(sorted(_ROLES))}"
            )
        return {"role": role, "content": item["value"]}
    raise DataError(
        f"{where}: expected a message with role and content, or from and value, found "
        f"{', '.join(item) or 'nothing'}"
    )


def text_pieces(file: Path) -> Iterator[str]:
    """A text in parts that, put together, are all of it: each ends with a line, and with a blank one
    unless the paragraph is very long. Raises DataError where it is not UTF-8."""
    lines: list[str] = []
    size = 0
    try:
        fd = open_regular(file, error=DataError)
        with os.fdopen(fd, encoding="utf-8", newline="") as stream:
            for line in iter(lambda: stream.readline(MOST_LINE + 1), ""):
                if len(line) > MOST_LINE:
                    raise DataError(f"{file}: expected lines of at most {MOST_LINE} characters")
                lines.append(line)
                size += len(line)
                if not line.strip() or size >= _PIECE:
                    yield "".join(lines)
                    lines, size = [], 0
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: is not UTF-8 text: {error.reason}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if lines:
        yield "".join(lines)


def text_windows(
    file: Path, tokenizer: Tokenizer, length: int, limit: int | None
) -> Iterator[Sequence[int]]:
    """A text as consecutive windows of `length` ids, the first `limit` of them. Each begins with the
    special tokens that the tokenizer puts before a text. The rest at the end, shorter than a window, is
    a sample only where it is the only one. Raises DataError where special tokens leave no space."""
    prefix = tokenizer.prefix()
    body = length - len(prefix)
    if body < 1:
        raise DataError(
            f"length {length} leaves no space for text after {len(prefix)} special tokens"
        )
    ids: list[int] = []
    made = 0
    for batch in _batches(text_pieces(file)):
        for piece in tokenizer.pieces(batch):
            ids += piece
        whole = len(ids) // body
        for number in range(whole):
            yield prefix + ids[number * body : (number + 1) * body]
            made += 1
            if made == limit:
                return
        ids = ids[whole * body :]
    if ids and not made:
        yield prefix + ids


def _batches(pieces: Iterator[str]) -> Iterator[list[str]]:
    """Pieces by about a million characters: what a tokenizer is given at a time."""
    batch: list[str] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= 16 * _PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
