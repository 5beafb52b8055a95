"""Numbers that no trained model contains, found in the bits of every tensor.

QC066 NaN or infinity in a tensor of floats, NaN among FP8 codes.
QC067 a whole matrix of weights is zero.
QC068 a scale is NaN, infinite, negative (symmetric INT4 apart), zero for codes that are not, or absurdly
large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Yield, validator
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.formats.nvfp4 import is_part
from qconvert.validators.headers.manifest_claims import CALIBRATION
from qconvert.validators.reading.decode import FNUZ, FP8, scale_floats
from qconvert.validators.reading.forms import Form, Grid
from qconvert.validators.reading.matrices import Matrix, matrices
from qconvert.validators.reading.rows import group_of, row_bytes, zero_points

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Bytes, Floats


# --- Rule for matrices whose scales may be below 0 ------------------------------------------------


_ROUNDING = ("w4a16", "int8", "quantize")  # passes that make codes with scales


def may_be_negative(manifest: Mapping[str, Any] | None, form: Form) -> bool:
    """Of a matrix that is stored so, in a folder with this manifest, or none. With offsets a range may
    begin at its largest number (MLX)."""
    codes = form.codes
    if form.offset is not None:
        return True
    if codes is None:
        return False
    every = (manifest or {}).get("passes", ())
    if not codes.symmetric:  # symmetric codes of another form have AutoAWQ's zero points now
        relabelled = (one for one in every if one.get("name") == "relabel")
        return any(one["options"].get("to") == "awq" for one in relabelled)
    if not any(step.get("name") in _ROUNDING for step in every):
        return True  # AutoRound's may be, of any width
    made = [step for step in every if step.get("name") == "w4a16"]
    if codes.bits != 4 or codes.signed:
        return False
    said = (manifest or {}).get(CALIBRATION)
    if isinstance(said, dict) and said.get("signs") == "both" and said.get("scales") == "search":
        return True
    signed = {"scales": "search", "signs": "both", "symmetric": True, "bits": 4}
    return any(signed.items() <= step["options"].items() for step in made)


# Per kind: bytes, all bits but the sign, the smallest that is no finite number. Any I8 is one.
_BITS: Mapping[str, tuple[int, int, int]] = {
    "BF16": (2, 0x7FFF, 0x7F80),
    "F16": (2, 0x7FFF, 0x7C00),
    "F32": (4, 0x7FFFFFFF, 0x7F800000),
    "F64": (8, (1 << 63) - 1, 0x7FF << 52),
    "F8_E4M3": (1, 0x7F, 0x7F),
    "F8_E5M2": (1, 0x7F, 0x7C),
    **dict.fromkeys(FNUZ, (1, 0xFF, 0xFF)),  # NaN as 0xFF, others without their sign
    "I8": (1, 0xFF, 0x100),
}
_A_FEW = 8  # at level sample: tensors of each kind
_STRETCHES, _STRETCH = 4, 4 << 20  # and stretches of a long one
# No weight of a trained model is as large.
_ABSURD = 2.0**15
_EXPONENTS = (64, 190)  # the range of scales that are exponents: 2^-63 to 2^63


@validator("no tensor holds NaN, infinity or an impossible scale", "data", "model")
def values(folder: Folder) -> Iterator[Yield]:
    """One task per tensor, and one more for the scales of a quantized matrix."""
    checkpoint = folder.checkpoint
    full = folder.request.level == "full"
    kinds: dict[tuple[str, str], list[Numbers | ScalesOf]] = {}
    stacks: dict[str, set[tuple[int, int]]] = {}
    graded: set[str] = set()
    blanks: dict[str, int] = {}
    allowed = _allows_infinity(checkpoint)
    for matrix in matrices(checkpoint).values():
        grid = matrix.form.grid
        # Rows of a transposed matrix are spread over all of it: of those only experts are told
        # apart.
        begin = 0 if matrix.form.transposed else matrix.runs[0][0]
        stacks.setdefault(matrix.tensor, set()).add((matrix.form.at, begin))
        codes = matrix.form.codes
        if codes is not None and codes.symmetric and not codes.signed:
            blanks[matrix.tensor] = _BLANK.get(codes.bits, 0)
        if grid is not None:
            graded.add(grid.scale.name)
            graded |= (
                set() if grid.global_scale is None else {grid.global_scale.scale.name}
            )  # QC100
            signed = may_be_negative(checkpoint.manifest, matrix.form)
            kinds.setdefault((matrix.key[0], "scale"), []).append(
                _scales_of(matrix, grid, signed=signed)
            )
    for name, source in checkpoint.items():
        place = checkpoint.role_index.places.get(name)
        kind = (place.role.name if place else "", source.type.dtype)
        blank = blanks.get(name, 0)
        judged = name in graded or is_part(checkpoint, name)
        floats = source.type.dtype in _BITS and not judged
        if (floats or blank) and source.type.numel:
            parts = len(stacks[name]) if len(source.type.shape) == 3 and name in stacks else 1
            spans = None if full else _stretches(source.type.nbytes)
            task = Numbers(
                tensor=source, spans=spans, parts=parts, blank=blank,
                infinities=allowed and source.type.dtype == "BF16",
            )  # fmt: skip
            kinds.setdefault(kind, []).append(task)
    for tasks in kinds.values():
        yield from folder.some(tasks, _A_FEW)


@dataclass(frozen=True, kw_only=True)
class Numbers(Watch):
    """One tensor. `parts` matrices of equal size make it up; each is checked for being zero: for
    packed integers, whether each byte is `blank` (0: these are floats). `infinities` were written on
    purpose."""

    parts: int
    blank: int
    infinities: bool
    scratch: ClassVar[int] = 2 * CHUNK

    def look(self) -> _Numbers:
        return _Numbers(self)


class _Numbers:
    def __init__(self, task: Numbers) -> None:
        import numpy as np

        shape = task.tensor.type.shape
        self._task, self._fault = task, list[Finding]()
        self._meant: list[Finding] = []
        # A tensor read only in ranges cannot be shown to be all zero.
        whole = task.spans is None and len(shape) > 1 and min(shape[-2:]) > 1
        self._zero = np.ones(task.parts, bool) if whole else np.zeros(0, bool)

    def take(self, at: int, data: memoryview) -> None:
        import numpy as np

        if self._fault:
            return
        task, raw = self._task, np.frombuffer(data, np.uint8)
        if task.blank:
            some = self._zero.any() and _differs(raw, task.blank)
        else:
            width, mask, bad = _BITS[task.tensor.type.dtype]
            if task.tensor.type.dtype in FNUZ:
                raw = np.where(raw == 0x80, 0xFF, raw & 0x7F).astype(np.uint8)
            largest = _largest(raw, width, mask)
            if largest >= bad:
                sizes = raw.view(f"<u{width}") & np.array(mask, f"<u{width}")
                first = at // width + int(np.argmax(sizes >= bad))
                count = int(np.count_nonzero(sizes >= bad))
                meant = task.infinities and largest == bad  # and no NaN among them
                (self._meant if meant else self._fault).append(
                    self._broken(first, count, meant=meant)
                )
            some = largest > 0
        if some and self._zero.any():
            self._note(raw, at)

    def _note(self, data: Bytes, start: int) -> None:
        """Return which matrices are shown by some bytes not to be zero, if any."""
        if self._task.parts == 1:
            self._zero[0] = False
            return
        blank = self._task.blank
        part = self._task.tensor.type.nbytes // self._task.parts
        for number in range(start // part, min(self._task.parts, -(-(start + data.size) // part))):
            low, high = number * part - start, (number + 1) * part - start
            if self._zero[number]:
                self._zero[number] = not _differs(data[max(0, low) : high], blank)

    def end(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        yield from self._fault or self._meant[:1]
        if self._zero.any() and not self._fault:
            yield self._all_zero(int(np.argmax(self._zero)), int(self._zero.sum()))

    def _broken(self, at: int, count: int, *, meant: bool) -> Finding:
        kind = self._task.tensor.type
        columns = kind.shape[-1] if kind.shape else 1
        place = f"row {at // columns}, column {at % columns}" if len(kind.shape) > 1 else f"{at}"
        what = "NaN among its FP8 codes" if kind.dtype in FP8 else "NaN or infinity"
        why = "infinity, which dequant was allowed to write (allow_overflow)" if meant else what
        message = f"{why}, first at {place} of {kind}; {count} of them in the chunk it was found in"
        return Finding("QC066", "warning" if meant else "error", self._task.tensor.name, message)

    def _all_zero(self, first: int, count: int) -> Finding:
        parts = self._task.parts
        which = "it is zero" if parts == 1 else f"{count} of its {parts} matrices are zero"
        more = "" if parts == 1 else f", number {first} first"
        message = f"{which} in every weight{more}"
        return Finding("QC067", "warning", self._task.tensor.name, message)


def _allows_infinity(checkpoint: Checkpoint) -> bool:
    """Tell whether the folder was made by a dequant that writes what bf16 cannot hold as infinite."""
    steps = (checkpoint.manifest or {}).get("passes", ())
    return any(step["options"].get("allow_overflow") for step in steps)


def _largest(data: Bytes, width: int, mask: int) -> int:
    """The largest of some numbers' bits without signs: of positive ones, and of negative ones,
    which are the largest of all if there are any."""
    return max(int(data.view(f"<i{width}").max()), int(data.view(f"<u{width}").max()) & mask)


def _differs(data: Bytes, blank: int) -> bool:
    """Tell whether any byte differs."""
    return bool((data[:_GLANCE] != blank).any() or (data[_GLANCE:] != blank).any())


def _stretches(size: int) -> tuple[tuple[int, int], ...] | None:
    """Ranges to check of a tensor of that many bytes at level sample; None: all of it."""
    count = -(-size // _STRETCH)
    if count <= _STRETCHES:
        return None
    chosen = [i * (count - 1) // (_STRETCHES - 1) for i in range(_STRETCHES)]
    return tuple((n * _STRETCH, min((n + 1) * _STRETCH, size)) for n in chosen)


_GLANCE = 4096
_BLANK = {2: 0xAA, 4: 0x88, 8: 0x80}  # bytes of codes of zero; others lie across bytes


@dataclass(frozen=True, kw_only=True)
class ScalesOf(Watch):
    """The scales of one matrix; `signed`: they may be below 0."""

    matrix: Matrix
    grid: Grid
    signed: bool

    @property
    def scratch(self) -> int:
        return 4 * CHUNK + self.matrix.form.row_nbytes * self.grid.block[0]

    def look(self) -> _Scales:
        return _Scales(self)


def _scales_of(matrix: Matrix, grid: Grid, *, signed: bool) -> ScalesOf:
    kind = grid.scale.type
    width = kind.nbytes // max(1, kind.numel)
    span = grid.first * width, (grid.first + grid.rows * grid.columns) * width
    return ScalesOf(tensor=grid.scale, spans=(span,), matrix=matrix, grid=grid, signed=signed)


class _Scales:
    def __init__(self, task: ScalesOf) -> None:
        self._task = task
        self._fault, self._large = list[Finding](), list[Finding]()
        self._zeros: list[int] = []
        self._most = _ABSURD / task.matrix.form.encoding.largest

    def take(self, at: int, data: memoryview) -> None:
        import numpy as np

        if self._fault:
            return
        kind = self._task.grid.scale.type
        values = scale_floats(np.frombuffer(data, np.uint8), self._task.grid.kind or kind.dtype)
        if self._task.signed:
            values = np.abs(values)
        first = at * kind.numel // kind.nbytes - self._task.grid.first
        fault = _fault(values)
        if fault is not None:
            number, message = fault
            self._fault.append(self._finding("error", first + number, message))
            return
        if len(self._zeros) < _LOOKED_AT and not values.all():
            found = np.flatnonzero(values == 0)[: _LOOKED_AT - len(self._zeros)]
            self._zeros += (first + found).tolist()
        if not self._large and float(values.max()) > self._most:
            number = int(np.argmax(values > self._most))
            message = _large(values, number, kind.dtype)
            self._large.append(self._finding("warning", first + number, message))

    def end(self, folders: Folders) -> Iterator[Finding]:
        yield from self._large
        yield from self._fault
        for number in () if self._fault else self._zeros:
            if self._has_codes(folders, number):
                message = "expected a scale above 0 for codes that are not 0, found 0"
                yield self._finding("error", number, message)
                return

    def _finding(self, severity: str, at: int, message: str) -> Finding:
        row, column = self._place(at)
        which = "" if self._task.matrix.expert is None else f"expert {self._task.matrix.expert}, "
        text = f"{which}scale [{row}, {column}]: {message}"
        return Finding(
            "QC068", "error" if severity == "error" else "warning", self._task.where, text
        )

    def _place(self, at: int) -> tuple[int, int]:
        """Row and column of a scale by its number."""
        grid = self._task.grid
        if grid.transposed:
            column, row = divmod(at, grid.rows)
            return row, column
        return divmod(at, grid.columns)

    def _has_codes(self, folders: Folders, at: int) -> bool:
        """Tell whether a scale's block holds any code but zero."""

        matrix, (high, wide) = self._task.matrix, self._task.grid.block
        form = matrix.form
        row, column = self._place(at)
        stored = Matrix(matrix.key, "", "", None, None, form, ((0, form.rows),))
        stop = min((row + 1) * high, form.rows)
        step = max(1, CHUNK // max(1, form.row_nbytes))
        for start in range(row * high, stop, step):
            end = min(start + step, stop)
            lines = row_bytes(folders.output, stored, start, end).reshape(end - start, -1)
            values = form.encoding.floats(lines.reshape(-1), form.weight.type.dtype)
            values = values.reshape(end - start, -1)
            if form.codes is not None:
                values -= zero_points(folders.output, stored, start, end)[:, column : column + 1]
            groups = group_of(folders.output, form)
            here = slice(column * wide, (column + 1) * wide)
            if bool(values[:, here if groups is None else groups == column].any()):
                return True
        return False


_LOOKED_AT = 64  # zero scales whose codes are read


def _fault(values: Floats) -> tuple[int, str] | None:
    """The first scale that is not a number or below zero."""
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
        return f"{text}; all are integers, like exponents (E8M0) that were stored as numbers"
    return text
