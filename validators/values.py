"""Numbers that no trained model holds, told from the bits of every tensor.

QC066 NaN or infinity in a tensor of floats, NaN among FP8 codes.
QC067 a whole matrix of weights is zero.
QC068 a scale is NaN, infinite, negative, zero beside codes that are not, or absurdly large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.findings import Finding, Rule
from qconvert.graph import Source
from qconvert.tasks import CHUNK, Room
from qconvert.validation import Folder, Need, Yield
from qconvert.validators._decode import FP8, scale_floats, warm
from qconvert.validators._forms import Grid
from qconvert.validators._matrices import Matrix, matrices
from qconvert.validators._rows import row_bytes

if TYPE_CHECKING:
    import numpy as np

    from qconvert.validators._decode import Bytes, Floats

RULES = (
    Rule(
        "QC066",
        "a tensor holds NaN or infinity",
        "A broken download, a tensor written while it was being computed, an overflow in fp16, or "
        "FP8 codes of another dialect (fnuz) read as E4M3.",
        "Check the source for the same tensor; if it is sound there, convert again.",
    ),
    Rule(
        "QC067",
        "a whole matrix of weights is zero",
        "A file that was reserved and never written, or a tensor that a tool could not find.",
        "Check the source for the same tensor. Some models do hold unused, zero experts.",
    ),
    Rule(
        "QC068",
        "a scale cannot be right",
        "Exponents (E8M0 in U8) stored or multiplied as numbers, a scale and its inverse mixed up, a "
        "broken file.",
        "Check the source's scale and its scale_fmt; convert again, or start from another release.",
    ),
)

# Per kind of float: numpy's integer, all bits but the sign, the smallest that is no finite number.
_BITS: Mapping[str, tuple[str, int, int]] = {
    "BF16": ("<i2", 0x7FFF, 0x7F80),
    "F16": ("<i2", 0x7FFF, 0x7C00),
    "F32": ("<i4", 0x7FFFFFFF, 0x7F800000),
    "F64": ("<i8", (1 << 63) - 1, 0x7FF << 52),
    "F8_E4M3": ("<i1", 0x7F, 0x7F),
    "F8_E5M2": ("<i1", 0x7F, 0x7C),
}
_A_FEW, _CHUNKS = 8, 4  # at level sample: tensors of each kind, stretches of each
# No weight of a trained model is as large, and these are the largest codes.
_ABSURD = 2.0**15
_LARGEST = {"fp8": 448.0, "w4a16": 8.0}
_EXPONENTS = (64, 190)  # numbers that scales are when they are exponents: 2^-63 to 2^63


@dataclass(frozen=True)
class Values:
    """A task a tensor, and one more for the scales of a quantized matrix."""

    name: str = "values"
    proves: str = "no tensor holds NaN, infinity or an impossible scale"
    needs: frozenset[Need] = frozenset({"model", "data"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        checkpoint = folder.checkpoint
        full = folder.request.level == "full"
        kinds: dict[tuple[str, str], list[Numbers | ScalesOf]] = {}
        stacks: dict[str, set[tuple[int, int]]] = {}
        graded: set[str] = set()
        for matrix in matrices(checkpoint).values():
            grid = matrix.form.grid
            # Rows of a matrix that is stored turned lie all over it: of those, experts are told apart.
            begin = 0 if matrix.form.turned else matrix.runs[0][0]
            stacks.setdefault(matrix.tensor, set()).add((matrix.form.at, begin))
            if grid is not None:
                graded.add(grid.scale.name)
                kinds.setdefault((matrix.key[0], "scale"), []).append(ScalesOf(matrix, grid))
        for name, source in checkpoint.items():
            place = checkpoint.census.places.get(name)
            kind = (place.role.name if place else "", source.type.dtype)
            packed = name.endswith(".weight_packed") and source.type.dtype == "I32"
            floats = source.type.dtype in _BITS and name not in graded
            if (floats or packed) and source.type.numel:
                parts = len(stacks[name]) if len(source.type.shape) == 3 and name in stacks else 1
                kinds.setdefault(kind, []).append(Numbers(source, parts, packed, full))
        for tasks in kinds.values():
            yield from folder.some(tasks, _A_FEW)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One tensor. `parts` matrices of equal size make it up; of each it is asked whether it is zero."""

    tensor: Source
    parts: int
    packed: bool
    whole: bool

    @property
    def where(self) -> str:
        return self.tensor.name

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self._stretches())

    @property
    def scratch(self) -> int:
        return 2 * CHUNK

    def run(self, room: Room) -> Iterator[Finding]:
        import numpy as np

        warm()
        kind = self.tensor.type
        part = kind.nbytes // self.parts
        # Of a tensor looked at in stretches it cannot be said that it is all zero.
        zero = np.ones(self.parts, bool) if self._may_be_zero() else None
        for first, last in self._stretches():
            for start, chunk in room.chunks(room.output, self.tensor, first, last):
                data = np.frombuffer(chunk, np.uint8)
                if self.packed:
                    largest = 0 if bool((data == _ZEROS).all()) else 1
                else:
                    integer, mask, bad = _BITS[kind.dtype]
                    sizes = data.view(integer) & np.array(mask, integer)
                    largest = int(sizes.max())
                    if largest >= bad:
                        at = start // sizes.itemsize + int(np.argmax(sizes >= bad))
                        yield self._broken(at, int(np.count_nonzero(sizes >= bad)))
                        return
                if zero is not None and largest:
                    self._note(zero, data, start, part)
        if zero is not None and zero.any():
            yield self._zero(int(np.argmax(zero)), int(zero.sum()))

    def _may_be_zero(self) -> bool:
        shape = self.tensor.type.shape
        return len(shape) > 1 and min(shape[-2:]) > 1 and len(self._stretches()) == 1

    def _note(
        self,
        zero: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
        data: Bytes,
        start: int,
        part: int,
    ) -> None:
        """Which matrices a chunk shows not to be zero."""
        blank = _ZEROS if self.packed else 0
        for number in range(start // part, min(self.parts, -(-(start + data.size) // part))):
            low, high = number * part - start, (number + 1) * part - start
            if zero[number]:
                zero[number] = not bool((data[max(0, low) : high] != blank).any())

    def _stretches(self) -> list[tuple[int, int]]:
        size = self.tensor.type.nbytes
        count = -(-size // CHUNK)
        if self.whole or count <= _CHUNKS:
            return [(0, size)]
        chosen = [i * (count - 1) // (_CHUNKS - 1) for i in range(_CHUNKS)]
        return [(number * CHUNK, min((number + 1) * CHUNK, size)) for number in chosen]

    def _broken(self, at: int, count: int) -> Finding:
        kind = self.tensor.type
        columns = kind.shape[-1] if kind.shape else 1
        place = f"row {at // columns}, column {at % columns}" if len(kind.shape) > 1 else f"{at}"
        what = "NaN among its FP8 codes" if kind.dtype in FP8 else "NaN or infinity"
        message = (
            f"{what}, first at {place} of {kind}; {count} of them in the chunk it was found in"
        )
        return Finding("QC066", "error", self.tensor.name, message)

    def _zero(self, first: int, count: int) -> Finding:
        which = (
            "it is zero" if self.parts == 1 else f"{count} of its {self.parts} matrices are zero"
        )
        more = "" if self.parts == 1 else f", number {first} first"
        message = f"{which} in every weight{more}"
        return Finding("QC067", "warning", self.tensor.name, message)


_ZEROS = 0x88  # two INT4 codes of zero


@dataclass(frozen=True, slots=True)
class ScalesOf:
    """The scales of one matrix."""

    matrix: Matrix
    grid: Grid

    @property
    def where(self) -> str:
        return self.grid.scale.name

    @property
    def nbytes(self) -> int:
        return self.grid.scale.type.nbytes * self._count // max(1, self.grid.scale.type.numel)

    @property
    def _count(self) -> int:
        return self.grid.rows * self.grid.columns

    @property
    def scratch(self) -> int:
        return CHUNK + self.matrix.form.row_nbytes * self.grid.block[0]

    def run(self, room: Room) -> Iterator[Finding]:
        import numpy as np

        warm()
        kind = self.grid.scale.type
        width = kind.nbytes // max(1, kind.numel)
        first, count = self.grid.first, self._count
        span = first * width, (first + count) * width
        zeros, large = 0, 0
        most = _ABSURD / _LARGEST[self.matrix.format]
        for start, chunk in room.chunks(room.output, self.grid.scale, *span):
            values = scale_floats(np.frombuffer(chunk, np.uint8), kind.dtype)
            at = start // width - first
            fault = _fault(values)
            if fault is not None:
                number, message = fault
                yield self._finding("error", at + number, message)
                return
            if not zeros and not values.all():
                for number in np.flatnonzero(values == 0)[:_LOOKED_AT]:
                    zeros += 1
                    if self._has_codes(room, at + int(number)):
                        message = "expected a scale above 0 beside codes that are not 0, found 0"
                        yield self._finding("error", at + int(number), message)
                        return
            if not large and float(values.max()) > most:
                large += 1
                number = int(np.argmax(values > most))
                yield self._finding("warning", at + number, _large(values, number, kind.dtype))

    def _finding(self, severity: str, at: int, message: str) -> Finding:
        row, column = divmod(at, self.grid.columns)
        which = "" if self.matrix.expert is None else f"expert {self.matrix.expert}, "
        text = f"{which}scale [{row}, {column}]: {message}"
        return Finding("QC068", "error" if severity == "error" else "warning", self.where, text)

    def _has_codes(self, room: Room, at: int) -> bool:
        """Whether a scale's block holds any code but zero."""
        import numpy as np

        form, (high, wide) = self.matrix.form, self.grid.block
        row, column = divmod(at, self.grid.columns)
        stored = Matrix(self.matrix.key, "", "", None, None, form, ((0, form.rows),))
        stop = min((row + 1) * high, form.rows)
        step = max(1, CHUNK // max(1, form.row_nbytes))
        for start in range(row * high, stop, step):
            end = min(start + step, stop)
            lines = row_bytes(room.output, stored, start, end).reshape(end - start, -1)
            if form.format == "w4a16":
                block = lines[:, column * wide // 2 : (column + 1) * wide // 2]
                if bool((block != _ZEROS).any()):
                    return True
            elif bool((lines[:, column * wide : (column + 1) * wide] & np.uint8(0x7F)).any()):
                return True
        return False


_LOOKED_AT = 64  # zero scales whose codes are read


def _fault(values: Floats) -> tuple[int, str] | None:
    """The first scale that is no number or below zero."""
    import numpy as np

    wrong = ~((values >= 0) & (values < np.inf))
    if not wrong.any():
        return None
    number = int(np.argmax(wrong))
    return number, f"expected a finite scale of 0 or more, found {values[number]:g}"


def _large(values: Floats, number: int, dtype: str) -> str:
    low, high = _EXPONENTS
    text = f"a scale of {values[number]:g} means weights far beyond any model's"
    whole = bool(((values == values.round()) & (values >= low) & (values <= high)).all())
    if whole and dtype not in ("U8", "F8_E8M0"):
        return f"{text}; all are whole numbers, as exponents are (E8M0) that were stored as numbers"
    return text


VALIDATOR = Values()
