"""A draft with a vocabulary of its own (EAGLE3, in sglang's and vLLM's form or that of speculators): its
tokens must be the target's.

`d2t` [draft tokens] is what is added to a draft token's number to have the target's; `t2d` [target
tokens] says which of those the draft has. Runtimes read `d2t` alone (sglang `models/llama_eagle3.py`,
load_weights; vLLM `model_executor/models/llama_eagle3.py`, compute_logits): what it says wrong is
drafted, and rejected by the target, without an error.

QC138 a draft's tables of tokens contradict its head, its config, or each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, validator
from qconvert.validation.workers import Folders

_TO_TARGET, _IN_DRAFT, _HEAD = "d2t", "t2d", "lm_head.weight"
_INTEGERS: Mapping[str, str] = {"I64": "<i8", "I32": "<i4"}
_FLAGS = ("BOOL", "U8", "I8")
_OF_LAYER = "transformer_layer_config"  # of speculators: the config of the draft's own layers


@validator("the draft's tables of tokens fit its head and config", "draft-vocabulary")
def draft_tables(folder: Folder) -> Iterator[Finding]:
    """Shapes and types, by the headers."""
    found = folder.checkpoint
    stated, tokens = _number(found.config, "draft_vocab_size"), _vocabulary(found)
    table, flags, head = (found.get(name) for name in (_TO_TARGET, _IN_DRAFT, _HEAD))
    rows = None if head is None else head.type.shape[0]
    if table is None:
        if rows is not None and tokens is not None and rows < tokens:
            why = (
                f"and there is no {_TO_TARGET}: runtimes take the draft's numbers for the target's"
            )
            yield _finding(_HEAD, f"has {rows} rows for {tokens} tokens, {why}")
        return
    if table.type.dtype not in _INTEGERS or len(table.type.shape) != 1:
        yield _finding(_TO_TARGET, f"expected a list of integers, found {table.type}")
        return
    count = table.type.shape[0]
    for what, here in (("rows of the head", rows), ("config.json's draft_vocab_size", stated)):
        if here is not None and here != count:
            yield _finding(_TO_TARGET, f"has {count} numbers, expected {here}, the {what}")
    if stated is None:
        yield _finding(
            "config.json",
            f"states no draft_vocab_size: expected {count}, the length of {_TO_TARGET}",
        )
    if flags is not None and (flags.type.dtype not in _FLAGS or flags.type.shape != (tokens,)):
        yield _finding(
            _IN_DRAFT, f"expected a flag for each of {tokens} tokens, found {flags.type}"
        )


@validator("the draft's tokens are the target's, each once", "draft-vocabulary", "data")
def draft_token_numbers(folder: Folder) -> Iterator[TablesTask]:
    """The numbers themselves, where the headers are right."""
    found, tokens = folder.checkpoint, _vocabulary(folder.checkpoint)
    table, flags = found.get(_TO_TARGET), found.get(_IN_DRAFT)
    sound = table is not None and table.type.dtype in _INTEGERS and len(table.type.shape) == 1
    if table is None or not sound or tokens is None:
        return
    if flags is not None and (flags.type.dtype not in _FLAGS or flags.type.shape != (tokens,)):
        flags = None  # which the headers' rule tells
    yield TablesTask(table, flags, tokens)


@dataclass(frozen=True)
class TablesTask:
    """A draft's tables, for a target of so many tokens."""

    table: Source
    flags: Source | None
    tokens: int

    @property
    def where(self) -> str:
        return self.table.name

    @property
    def nbytes(self) -> int:
        return self.table.type.nbytes + (0 if self.flags is None else self.flags.type.nbytes)

    @property
    def scratch(self) -> int:
        """Numbers of tokens as 64-bit integers, and flags of both sides."""
        return 8 * (self.nbytes + self.tokens)

    @property
    def computes(self) -> bool:
        return False

    def run(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        data = np.empty(self.table.type.nbytes, np.uint8)
        folders.output.read(self.table, 0, data.data)
        added = data.view(_INTEGERS[self.table.type.dtype]).astype(np.int64)
        numbers = added + np.arange(added.size)
        beyond = (numbers < 0) | (numbers >= self.tokens)
        if beyond.any():
            at = int(np.argmax(beyond))
            yield _finding(
                self.where, f"token {at} of the draft is {numbers[at]} of the target, which has "
                f"{self.tokens}"
            )  # fmt: skip
            return
        order = np.argsort(numbers, kind="stable")
        twice = np.flatnonzero(np.diff(numbers[order]) == 0)
        if twice.size:
            first, second = order[twice[0]], order[twice[0] + 1]
            yield _finding(
                self.where, f"tokens {first} and {second} of the draft are both {numbers[first]} of the "
                "target"
            )  # fmt: skip
            return
        if self.flags is None:
            return
        said = np.empty(self.flags.type.nbytes, np.uint8)
        folders.output.read(self.flags, 0, said.data)
        held = np.zeros(self.tokens, bool)
        held[numbers] = True
        wrong = held != (said != 0)
        if wrong.any():
            token = int(np.argmax(wrong))
            word = "is" if held[token] else "is not"
            yield _finding(
                _IN_DRAFT, f"token {token} {word} in {_TO_TARGET}, and the flag says otherwise"
            )


def _number(config: Mapping[str, Any], key: str) -> int | None:
    found = config.get(key)
    return found if type(found) is int and found > 0 else None


def _vocabulary(checkpoint: Checkpoint) -> int | None:
    """The tokens of the target, as the draft's config states them."""
    inner = checkpoint.config.get(_OF_LAYER)
    return _number(inner if isinstance(inner, Mapping) else checkpoint.config, "vocab_size")


def _finding(where: str, message: str) -> Finding:
    return Finding("QC138", "error", where, message)
