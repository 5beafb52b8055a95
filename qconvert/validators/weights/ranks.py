"""Weights in parts for tensor-parallel ranks, as a runtime's ranks hold them: joined from such parts, or
cut into them. Each part must lie, byte for byte, where it is taken from.

sglang gives rank r rows [r*n, (r+1)*n) of w1 and w3 of an expert, and the same columns of w2
(`layers/moe/fused_moe_triton/layer.py`, _load_w13 and _load_w2, at `models/grok.py`'s names). vLLM fuses
parts of a projection row by row, each cut among ranks (`model_executor/layers/linear.py`), and stacks
experts (`layers/fused_moe/routed_experts.py`). Names and cuts stand here again: the tables that plan
such folders are not asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.ranks import parts_in
from qconvert.core.family import text_config
from qconvert.core.graph import Source
from qconvert.core.manifest_keys import RANK
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Skipped
from qconvert.validation.runner import Folder, validator
from qconvert.validation.workers import CHUNK, Folders

if TYPE_CHECKING:
    from qconvert.validation.runner import Yield

_BY_COLUMNS = ".w2."
_A_FEW = 8


class Piece(NamedTuple):
    """Rows of a tensor of the source, from `first` on, and bytes of each from `left` on; and where they
    lie: from row `row` on, from byte `at` of each on, `width` bytes."""

    source: Source
    first: int
    rows: int
    left: int
    row: int
    at: int
    width: int


@validator("joined experts hold the parts of all ranks", "data", "ranks", "source")
def joined_ranks(folder: Folder) -> Iterator[Yield]:
    """One task for each tensor that ranks have parts of."""
    assert folder.source is not None
    tasks = []
    for name, of_ranks in parts_in(folder.source.sources).items():
        made = folder.checkpoint.get(name)
        if made is None:
            yield Finding("QC062", "error", name, "is missing, and no rule drops it")
            continue
        fault = _fault(name, made, of_ranks)
        if fault:
            yield Finding("QC061", "error", name, fault)
            continue
        pieces = []
        for rank in sorted(of_ranks):
            part = of_ranks[rank]
            (rows, _), width = part.type.shape, part.type.row_nbytes
            row, at = (0, rank * width) if _BY_COLUMNS in name else (rank * rows, 0)
            pieces.append(Piece(part, 0, rows, 0, row, at, width))
        tasks.append(PiecesTask(made, tuple(pieces)))
    yield from folder.some(tasks, _A_FEW)


def _fault(name: str, made: Source, parts: Mapping[int, Source]) -> str:
    """Difference between the shape of a tensor and that of its parts together."""
    whole = list(parts[min(parts)].type.shape)
    if len(whole) != 2 or any(list(part.type.shape) != whole for part in parts.values()):
        return "expected parts alike of a matrix in the source"
    whole[1 if _BY_COLUMNS in name else 0] *= len(parts)
    if list(made.type.shape) != whole or made.type.dtype != parts[min(parts)].type.dtype:
        return f"expected {whole} of {count(len(parts), 'part')} in the source, found {made.type}"
    return ""


# Parts of fused projections, in order.
_FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
_EXPERTS = re.compile(r"(.*\.experts)\.(?:routed_experts\.)?(w13|w2)_(.+)")
_OF_ATTENTION = re.compile(r".*\.(_?[qkv]_scale|_?prob_scale)")
# Modules under which vLLM's classes hold some others, in names on either side.
_PLAIN = (
    (re.compile(r"^((language_model|model)\.)+"), ""), (re.compile(r"\.mla_attn\."), "."),
    (re.compile(r"\.experts\._shared_experts\._layer\."), ".shared_expert."),
    (re.compile(r"\.shared_experts\."), ".shared_expert."),
    (re.compile(r"\.shared_expert\.expert_gate\."), ".shared_expert_gate."),
    (re.compile(r"\.experts\.(routed_experts\.)?(?=gate\.)"), "."),
    (re.compile(r"\.experts\.routed_experts\.(?=e_score_correction_bias)"), ".gate."),
)  # fmt: skip


def _plain(name: str) -> str:
    for pattern, instead in _PLAIN:
        name = pattern.sub(instead, name)
    return name


@validator(
    "parameters of the rank hold its rows and columns of the source", "data", "source", "rank"
)
def of_rank(folder: Folder) -> Iterator[Yield]:
    """One task for each parameter whose parts are known by its name."""
    source = folder.source
    assert source is not None
    fact = (folder.checkpoint.manifest or {})[RANK]
    cuts = _Cuts(source, fact["number"], fact["of"], fact["ep"])
    tasks, unknown = [], []
    for name, made in folder.checkpoint.items():
        if _OF_ATTENTION.fullmatch(name):
            continue
        pieces = cuts.pieces(name, made)
        if pieces is None:
            unknown.append(name)
        elif isinstance(pieces, str):
            yield Finding("QC061", "error", name, pieces)
        else:
            tasks.append(PiecesTask(made, tuple(pieces)))
    if unknown:
        what = f"{count(len(unknown), 'parameter')} whose parts are not known here ({unknown[0]})"
        yield Skipped(f"{what}: `make loaders` compares them in vLLM's own loader")
    yield from folder.some(tasks, _A_FEW)


class _Cuts:
    """Parts of a source that one of `of` ranks holds."""

    def __init__(self, source: Checkpoint, rank: int, of: int, ep: int) -> None:
        self._named = {_plain(name): one for name, one in source.items()}
        self._rank, self._of, self._ep = rank, of, ep
        text = text_config(source.config)
        keys = [text.get(f"linear_{key}") for key in ("num_key_heads", "key_head_dim")]
        values = [text.get(f"linear_{key}") for key in ("num_value_heads", "value_head_dim")]
        sizes = [a * b for a, b in (keys, values) if isinstance(a, int) and isinstance(b, int)]
        self._segments = [sizes[0], sizes[0], sizes[1]] if len(sizes) == 2 else []

    def pieces(self, name: str, made: Source) -> list[Piece] | str | None:
        """Parts of a parameter; the difference where they do not fit, None where they are not known."""
        plain = _plain(name)
        experts = _EXPERTS.fullmatch(plain)
        if experts is not None:
            return self._stacked(experts[1], experts[2], experts[3], made)
        module, _, leaf = plain.rpartition(".")
        block, _, last = module.rpartition(".")
        inside = f"{block}." if block else ""
        own = self._named.get(plain)
        if own is not None:
            parts = [own]
        else:
            names = [f"{inside}{part}.{leaf}" for part in _FUSED.get(last, ())]
            if not names or any(one not in self._named for one in names):
                return None
            parts = [self._named[one] for one in names]
        return self._laid(made, parts, 0, _rows(made), last)

    def _stacked(self, base: str, which: str, leaf: str, made: Source) -> list[Piece] | str | None:
        ends = ("gate_proj", "up_proj") if which == "w13" else ("down_proj",)
        slots, tall = made.type.shape[:2]
        first, of = (self._rank * slots, 1) if self._ep > 1 else (0, self._of)
        found: list[Piece] = []
        for slot in range(slots):
            names = [f"{base}.{first + slot}.{end}.{leaf}" for end in ends]
            if any(one not in self._named for one in names):
                return None
            parts = [self._named[one] for one in names]
            laid = self._laid(made, parts, slot * tall, tall, "", of)
            if isinstance(laid, str):
                return laid
            found += laid
        return found

    def _laid(
        self, made: Source, parts: Sequence[Source], top: int, tall: int, last: str, of: int = 0
    ) -> list[Piece] | str:
        """Parts below one another from row `top` of a parameter on, in `tall` rows."""
        of = of or self._of
        rank = self._rank if of > 1 else 0
        width, before = _width(made), _width(parts[0])
        if width * of == before and width != before:
            return [Piece(parts[0], 0, tall, rank * width, top, 0, width)]
        segments = [(part, 0, _rows(part)) for part in parts]
        height, inner = segments[0][2], self._segments
        if last == "qkv":
            inner = [height // 3] * 3
        if inner and last in ("in_proj_qkvz", "conv1d", "qkv") and sum(inner) % height == 0:
            unit = sum(inner) // height  # rows, or blocks of them
            sizes = [one // unit for one in inner]
            cut = [(parts[0], sum(sizes[:n]), sizes[n]) for n in range(3)]
            segments = [*cut, *segments[1:]]
        total, found, at = sum(rows for _, _, rows in segments), [], top
        for number, (part, first, rows) in enumerate(segments):
            if _width(part) != width or part.type.dtype != made.type.dtype:
                return f"expected rows as those of {part.name} ({part.type}), found {made.type}"
            if total == tall:
                size, share = rows, 0
            elif total == tall * of or last in ("embed_tokens", "lm_head"):
                size = rows // of if total == tall * of else max(0, min(tall, rows - rank * tall))
                share = rank * (size if total == tall * of else tall)
            elif (
                last == "qkv_proj" and len(segments) == 3
            ):  # ranks that share heads of keys, values
                query = segments[0][2] // of
                size = query if number == 0 else (tall - query) // 2
                share = rank * size if number == 0 else rank * rows // of // size * size
            else:
                return f"expected {tall * of} or {tall} rows in the source, found {total}"
            found.append(Piece(part, first + share, size, 0, at, 0, width))
            at += size
        return found


def _rows(tensor: Source) -> int:
    shape = tensor.type.shape
    return (shape[0] if shape else 1) if len(shape) != 3 or shape[1] == 1 else shape[0] * shape[1]


def _width(tensor: Source) -> int:
    return tensor.type.nbytes // max(1, _rows(tensor))


@dataclass(frozen=True)
class PiecesTask:
    """A tensor and the pieces of the source that it consists of."""

    made: Source
    pieces: tuple[Piece, ...]

    @property
    def where(self) -> str:
        return self.made.name

    @property
    def nbytes(self) -> int:
        return self.made.type.nbytes + sum(piece.rows * piece.width for piece in self.pieces)

    @property
    def scratch(self) -> int:
        """Some rows of both sides."""
        return 2 * CHUNK + sum(max(_width(piece.source) for piece in self.pieces[:1]) for _ in "ab")

    @property
    def computes(self) -> bool:
        return False

    def run(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        line = _width(self.made)
        for piece in self.pieces:
            wide = _width(piece.source)
            height = max(1, CHUNK // max(line, wide))
            for top in range(0, piece.rows, height):
                tall = min(height, piece.rows - top)
                here = np.empty((tall, line), np.uint8)
                folders.output.read(self.made, (piece.row + top) * line, here.reshape(-1).data)
                there = np.empty((tall, wide), np.uint8)
                folders.source.read(
                    piece.source, (piece.first + top) * wide, there.reshape(-1).data
                )
                ours = here[:, piece.at : piece.at + piece.width]
                wrong = (ours != there[:, piece.left : piece.left + piece.width]).any(axis=1)
                if wrong.any():
                    row = top + int(np.argmax(wrong))
                    expected = f"the bytes of row {piece.first + row} of {piece.source.name}"
                    message = f"row {piece.row + row}: expected {expected}, found others"
                    yield Finding("QC060", "error", self.made.name, message)
                    return
