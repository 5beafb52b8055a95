"""A GGUF file, or all parts of one, opened as a checkpoint.

A folder in the user's cache stands for what a folder of transformers has beside its weights:
config.json, and the tokenizer, which transformers makes in a process of its own when it is first asked
for. Weights are read where they lie.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO

from qconvert.checkpoint.checkpoint import Checkpoint, Shard, shard_of
from qconvert.checkpoint.gguf.header import SUFFIX, GgufHeader, read_gguf
from qconvert.checkpoint.gguf.models import ARCHITECTURES, model_of
from qconvert.checkpoint.reading import stated
from qconvert.core import own_process
from qconvert.core.errors import CheckpointError, OutputError
from qconvert.core.extras import lacking
from qconvert.core.json_text import parse_object
from qconvert.core.links import SMALL, read_regular, resolved
from qconvert.core.shown import count, shortened

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_TEMPLATE = "chat_template.jinja"
_MOST_WAIT = 1800
# Of the user's cache.
_FOLDER = "gguf"


@dataclass(frozen=True, eq=False)
class GgufCheckpoint(Checkpoint):
    """A checkpoint whose weights are in GGUF files; `file` is the one that was named."""

    file: Path = Path()

    @property
    def name(self) -> str:
        return str(self.file)

    def real(self, name: str) -> Path:
        self._make(name)
        return super().real(name)

    def open_file(self, name: str) -> BinaryIO:
        self._make(name)
        return super().open_file(name)

    def read(self, name: str, limit: int = SMALL) -> bytes | None:
        self._make(name)
        return super().read(name, limit)

    def _make(self, name: str) -> None:
        """Make the tokenizer's files if one is asked for and they are not there yet."""
        if name in self.side_files and not (self.root / name).exists():
            _make_tokenizer(self.shards[0].path, self.root, self.side_files)


def open_gguf(file: Path, *, follow_links: bool = False) -> GgufCheckpoint:
    """Open a GGUF file, with all other parts where its name says that it is one of several. Raises
    CheckpointError for a part that is missing, or a link out of the folder without `follow_links`, for
    what is no GGUF file, and for an architecture, a type
    or a tensor that is not read here; OutputError where the user's cache cannot be written."""
    files = _parts(file)
    for one in files:
        if one != file:  # who names a file may name a link
            resolved(file.parent, one.name, follow_links=follow_links)
    headers = [read_gguf(one) for one in files]
    _check_parts(files, headers)
    model = model_of(files, headers)
    config = (json.dumps(model.config, indent=2, ensure_ascii=False) + "\n").encode()
    digest = sha256("".join(header.digest for header in headers).encode()).hexdigest()
    missing = lacking("gguf")
    facts = headers[0].facts
    side: tuple[str, ...] = ()
    warnings = []
    if "tokenizer.ggml.model" not in facts:
        warnings.append(f"{file.name} holds no tokenizer: copy the model's own into the result")
    elif not ARCHITECTURES[facts["general.architecture"]].tokenizer:
        warnings.append(
            "transformers makes no tokenizer of it: copy the model's own into the result"
        )
    elif missing:
        warnings.append(f"its tokenizer is left out, since {missing}")
    else:
        template = (_TEMPLATE,) if "tokenizer.chat_template" in facts else ()
        side = tuple(sorted((*_TOKENIZER, *template)))
    shards = [_shard(one, header) for one, header in zip(files, headers, strict=True)]
    return GgufCheckpoint(
        _stand_in(digest, config), tuple(shards), model.sources, model.config, config, side, (), digest,
        False, {}, tuple(warnings), False, stated(), file=file,
    )  # fmt: skip


def _shard(file: Path, header: GgufHeader) -> Shard:
    found = shard_of(file)
    if found.size != header.file_size:
        raise CheckpointError(f"{file}: changed while its header was read; start again")
    return found


def _parts(file: Path) -> list[Path]:
    """The file, or the parts of the model that it is one of, in their order."""
    found = _PART.fullmatch(file.name)
    if found is None:
        return [file]
    stem, _, parts = found.groups()
    return [file.with_name(f"{stem}-{n:05}-of-{parts}{SUFFIX}") for n in range(1, int(parts) + 1)]


def _check_parts(files: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
    """Raise CheckpointError where parts are not those of one model."""
    facts = headers[0].facts
    parts, total = facts.get("split.count", 1), facts.get("split.tensors.count")
    if type(parts) is int and 1 < parts != len(files):
        raise CheckpointError(
            f"{files[0]}: is one of {parts} parts; expected a name that ends in "
            f"-00001-of-{parts:05}{SUFFIX}"
        )
    found = sum(len(header.tensors) for header in headers)
    if total is not None and total != found:
        raise CheckpointError(
            f"{files[0]}: expected {total!r} by split.tensors.count, found {count(found, 'tensor')} in "
            "all parts; download them again"
        )


def _stand_in(digest: str, config: bytes) -> Path:
    """The folder that stands for the file, with its config."""
    state = sha256(digest.encode() + config).hexdigest()[:32]
    folder = own_process.cache_root() / _FOLDER / state
    try:
        own_process.make_folder(folder)
        if not (folder / "config.json").exists():
            scratch = folder / f".config-{os.getpid()}"
            scratch.write_bytes(config)
            scratch.rename(folder / "config.json")
    except OSError as error:
        raise OutputError(
            f"{folder}: cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to a folder "
            "that can be"
        ) from error
    return folder


def _make_tokenizer(file: Path, folder: Path, names: Sequence[str]) -> None:
    """Write the tokenizer's files into the folder that stands for a GGUF file. Raises CheckpointError
    where transformers makes none of it."""
    scratch = Path(mkdtemp(prefix=".tokenizer-", dir=folder))
    try:
        # Alone in a folder: transformers would read a config.json beside it.
        (scratch / f"model{SUFFIX}").symlink_to(file.resolve())
        start = own_process.python(
            "-m", __name__, str(scratch), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""
        )
        done = subprocess.run(
            **start,
            capture_output=True,
            text=True,
            timeout=_MOST_WAIT,
            check=False,
            errors="replace",
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckpointError(
                f"{file}: transformers makes no tokenizer of it: {shortened(last, 200)}"
            )
        for name in names:
            if not (scratch / name).exists():
                raise CheckpointError(f"{file}: transformers made no {name} of it")
            with suppress(FileExistsError):
                (scratch / name).replace(folder / name)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"{file}: transformers made no tokenizer of it within {_MOST_WAIT} s"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# Words, numbers and spaces: what tokenizers cut in different places.
_PROBE = "The 3 quick  foxes,\n  don't jump: 12345.678 \u00e9\u4e2d"


def write_tokenizer(folder: str) -> None:
    """Write the tokenizer of `model.gguf` into its folder, where it reads texts as transformers reads
    them with the file. Raises what transformers does."""
    from transformers import AutoTokenizer

    made: Any = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    made.save_pretrained(folder)
    file = Path(folder, "tokenizer_config.json")
    config = parse_object(read_regular(file), file)
    config.pop("local_files_only", None)  # of this process, which asks no hub
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    texts = [_PROBE, made.decode(list(range(0, len(made), 1 + len(made) // 1000)))]
    if not _is_same(folder, made, texts):
        # Some classes build their own model of the vocabulary and leave that of tokenizer.json.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        if not _is_same(folder, made, texts):
            raise ValueError("what it saves reads texts otherwise")


def _is_same(folder: str, made: Any, texts: Iterable[str]) -> bool:
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(folder)
    return all(saved.encode(text) == made.encode(text) for text in texts)


if __name__ == "__main__":
    write_tokenizer(sys.argv[1])
