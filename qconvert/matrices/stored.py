"""Stored matrix, read as BF16: the op that decodes it and its arguments; rows of it without
reading the others. Which encodings there are: matrices/encodings/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Protocol

from qconvert.core.discovery import FORMATS, discover
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Value, concat, inferred
from qconvert.ops.fp8 import DequantFp8
from qconvert.ops.rowwise import RowOp
from qconvert.ops.transpose import Columns
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    from qconvert.ops.ints import DequantInts


@dataclass(slots=True, unsafe_hash=True)
class Stored:
    """A matrix [rows, columns]: the op that reads it as BF16 (None: it is BF16), and its arguments,
    the first of which has its rows."""

    decoder: RowOp | None
    args: tuple[Output, ...]
    rows: int
    columns: int

    def cut(self, start: int, stop: int) -> Stored:
        """Rows [start, stop)."""
        if (start, stop) == (0, self.rows):
            return self
        height, decoder = stop - start, self.decoder
        if isinstance(decoder, DequantFp8):  # before others: most are
            first = self.args[0].rows(start, stop)
            block, scale = _regrid(decoder.block, self.args[1], start, stop, self.rows)
            if block != decoder.block:
                decoder = replace(decoder, block=block)
            return Stored(decoder, (first, scale), height, self.columns)
        from qconvert.ops.awq import DequantAwq
        from qconvert.ops.gptq_packed import DequantGptq

        if isinstance(decoder, Columns | DequantGptq | DequantAwq):
            part = replace(decoder, first=decoder.first + start, count=height)
            return replace(self, decoder=part, rows=height)
        from qconvert.ops.fp4 import DequantNvfp4
        from qconvert.ops.ints import DequantInts

        first = self.args[0].rows(start, stop)
        if isinstance(self.decoder, DequantInts):
            return self._cut_ints(self.decoder, start, stop)
        if isinstance(self.decoder, DequantNvfp4):
            scale, global_scale = self.args[1:]
            return replace(self, args=(first, scale.rows(start, stop), global_scale), rows=height)
        rest = [arg.rows(start, stop) for arg in self.args[1:]]
        return Stored(self.decoder, (first, *rest), height, self.columns)

    def _cut_ints(self, decoder: DequantInts, start: int, stop: int) -> Stored:
        """Zero points are packed along the rows; which group a column is of, all rows share."""
        args = [arg.rows(start, stop) for arg in self.args[:2]]
        if not decoder.symmetric:
            if start % decoder.word:
                raise PlanError(
                    f"rows from {start} on are wanted, and zero points are packed in words of "
                    f"{decoder.word} rows"
                )
            args.append(self.args[2].rows(start // decoder.word, -(-stop // decoder.word)))
        if decoder.g_idx:
            args.append(self.args[-1])
        return replace(self, args=tuple(args), rows=stop - start)


class Format(Protocol):
    """A format of stored weights that another package adds: the `FORMAT` of a module that an entry
    point of the group `qconvert.formats` names.

    `read` is how a module's weight is read as BF16, and the names of all tensors that it takes; None for
    a module that is not stored so. Its op is an op as those of `qconvert.ops`.
    """

    def read(self, plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None: ...


def added_formats() -> list[Format]:
    """The formats of other packages. An import error is fatal and names the package."""
    return [module.FORMAT for module in discover(group=FORMATS)]


def _regrid(
    block: tuple[int, int], scale: Output, start: int, stop: int, rows: int
) -> tuple[tuple[int, int], Output]:
    """Block and scales of rows [start, stop). A cut inside a block makes blocks of fewer rows, whose
    scales stand there as often as needed."""
    if block[0] >= rows:
        return block, scale
    height = gcd(block[0], start)
    if height == block[0]:
        return block, scale.rows(start // height, -(-stop // height))
    lines = [scale.rows(row // block[0], row // block[0] + 1) for row in range(start, stop, height)]
    return (height, block[1]), concat(lines)


def stored(plan: Plan, names: Sequence[str], decoder: RowOp) -> Stored:
    """The matrix that these tensors of the plan are by this decoder. Raises PlanError where one is
    missing, was made by an earlier pass, or does not fit."""
    for name in names:
        if name not in plan.tensors:
            raise PlanError(f"{name!r} is missing")
    args = tuple(plan.tensors[name] for name in names)
    if any(isinstance(piece.origin, Value) for piece in args[0].pieces):
        raise PlanError(f"{names[0]!r} was made by an earlier pass; weights are quantized once")
    try:
        _, (kind,) = inferred(decoder, tuple([arg.type for arg in args]))
    except PlanError as error:
        raise PlanError(f"weight {names[0]!r} with {names[1]!r}: {error}") from error
    return Stored(decoder, args, *kind.shape)
