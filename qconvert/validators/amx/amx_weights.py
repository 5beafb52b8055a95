"""Experts for KTransformers' CPU kernels: their weights must be the source's, rounded.

At level sample up to four experts of each layer are checked, evenly spaced, all their matrices and
NUMA shards completely. Only rounding is judged, so every element has to fit; whether the codes are the
best ones is not checked.

Codes and scales must be valid for the format, and the tensors those that the manifest implies, which it
must be possible to have made from the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.checkpoint.checkpoint import MANIFEST
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.core.names import natural_key
from qconvert.validation.compiled import LOOPS, done
from qconvert.validation.findings import Finding, Measure, Proved, Skipped
from qconvert.validation.runner import Folder, NotChecked, Yield, validator
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.amx.reading import (
    Block,
    faults,
    matching_source,
    mismatches,
    read_block,
    shard_name,
    shard_weights,
    sound_block,
)
from qconvert.validators.amx.recut import RecutTask, shard_tensors, tile_mismatches, tiles_in
from qconvert.validators.reading.amx import LARGEST, STEP, Method
from qconvert.validators.reading.experts import KINDS, Kind, routed_layers
from qconvert.validators.reading.matrices import Matrix
from qconvert.validators.reading.rows import bf16_rows
from qconvert.validators.weights.int_bounds import LENGTHS, lengths_off, lost_row
from qconvert.validators.weights.sums import Sums

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Bools
    from qconvert.validators.reading.decode import Floats

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@validator("the experts' tensors are those that method, NUMA count and sizes imply", "amx")
def amx_headers(folder: Folder) -> Iterator[Finding]:
    try:
        block = read_block(folder.checkpoint)
    except PlanError as error:
        yield Finding("QC040", "error", MANIFEST, str(error))
        return
    found = dict(faults(block, folder.checkpoint))
    for name in sorted(found, key=natural_key):
        yield Finding("QC040", "error", name, found[name])


@validator("experts, sizes and layers are the source's", "amx", "source")
def amx_source(folder: Folder) -> Iterator[Finding]:
    """The manifest against the source's config and headers."""
    assert folder.source is not None
    try:
        block = read_block(folder.checkpoint)
    except PlanError as error:
        raise NotChecked(f"QC040: {MANIFEST}: {error}") from error
    try:
        before = tiles_in(folder.source)
        if before is not None:
            for text in tile_mismatches(block, before):
                yield Finding("QC043", "error", MANIFEST, text)
            return
        own, drafts = routed_layers(folder.source)
    except PlanError as error:
        yield Finding("QC043", "error", str(folder.source.root), str(error))
        return
    for text in mismatches(block, folder, own, drafts):
        yield Finding("QC043", "error", MANIFEST, text)


_OUT_OF_RANGE = {"int4": -8, "int8": -128}


@validator(
    "every code is in the format's range, every scale is finite and 0 or more", "amx", "data"
)
def amx_codes(folder: Folder) -> Iterator[CodesTask]:
    """Reads every tensor once, a chunk at a time."""
    block = sound_block(folder.checkpoint)
    for name, kind in folder.some(list(block.tensors())):
        method = None if kind.dtype == "F32" else block.method
        yield CodesTask(tensor=folder.checkpoint[name], method=method)


@dataclass(frozen=True, kw_only=True)
class CodesTask(Watch):
    """One tensor: codes of `method`, or (None) scales."""

    method: Method | None
    scratch: ClassVar[int] = 4 * CHUNK

    def look(self) -> _Looking:
        return _Looking(self)


class _Looking:
    def __init__(self, task: CodesTask) -> None:
        self._task, self._fault = task, ""

    def take(self, at: int, data: memoryview) -> None:
        if not self._fault:
            method = self._task.method
            found = _scale_fault(at, data) if method is None else _code_fault(at, data, method)
            self._fault = found or ""

    def end(self, folders: Folders) -> Iterator[Finding]:
        if self._fault:
            yield Finding("QC041", "error", self._task.where, self._fault)


def _scale_fault(start: int, data: memoryview) -> str | None:
    import numpy as np

    scales = np.frombuffer(data, np.float32)
    wrong = ~((scales >= 0) & (scales < np.inf))
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return f"row {start // 4 + row}: expected a finite scale >= 0, found {scales[row]:g}"


def _code_fault(start: int, data: memoryview, method: Method) -> str | None:
    import numpy as np

    wrong = _out_of_range(np.frombuffer(data, np.uint8), method)
    if not wrong.any():
        return None
    code = _OUT_OF_RANGE[method]
    return (
        f"byte {start + int(np.argmax(wrong))}: expected codes from {code + 1} to {-code - 1}, "
        f"found {code}"
    )


def _out_of_range(data: Bytes, method: Method) -> Bools:
    """Return which bytes hold the code that two's complement has but the format does not."""
    int4 = method == "int4"
    wrong: Bools = ((data & 0x0F == 0x08) | (data & 0xF0 == 0x80)) if int4 else data == 0x80
    return wrong


_SAMPLE = 4
# Parts of the step from a row's largest weight that calibration takes: it searches from 0.1 to 1.05 of
# it, and fits what it found to the codes.
_LEAST_CLIP, _MOST_CLIP = 0.05, 2.0
# Half a step if codes are rounded once. kt-kernel's int4 rounds to sixteenths of a step first, and
# a half that this produced is rounded up.
_BOUND = {("int4", "reference"): 8.5 / 16}
# In steps: multiplying by the inverse of a step and back is exact to about 2^-22 of the largest code.
_SLACK = 2.0**-12
# float32 roundings of the largest weight times the inverse of the largest code.
_STEP_SLACK = 2.0**-20
# Rows so small that their step would be denormal become zeros: they are at most 127 * 2^-126.
_FLUSHED = 2.0**-119


@validator(
    "the experts' weights are the source's within the format's rounding", "amx", "data", "source"
)
def amx_weights(folder: Folder) -> Iterator[Yield]:
    """A sample of matrices, as the consumer computes them, against the source decoded to BF16."""
    assert folder.source is not None
    block = sound_block(folder.checkpoint)
    before = tiles_before(block, folder)
    if block.rounding == "gptq" and before is None:  # no rounding is asked of calibrated codes
        yield Proved("calibrated experts have rows that follow the source's")
        yield Skipped(
            "how good the codes of calibrated experts are, or whether they are better than rounding "
            "(`qconvert eval` measures what the model computes)"
        )
    sources = {} if before is not None else matching_source(block, folder)
    everything = folder.request.level == "full"
    for layer in block.layers:
        for expert in range(block.experts) if everything else sampled(block.experts):
            for kind in KINDS:
                which = layer, kind, expert
                tensors = shard_tensors(block, folder.checkpoint, *which)
                if before is None:
                    yield MatrixTask(block, *which, tensors, sources[which])
                else:
                    theirs = shard_tensors(before, folder.source, *which)
                    yield RecutTask(block, before, *which, tensors, theirs)


def tiles_before(block: Block, folder: Folder) -> Block | None:
    """The source's tiles, None where it is a model. Raises NotChecked where the folder was not made from
    the source it is compared with."""
    assert folder.source is not None
    try:
        before = tiles_in(folder.source)
        if before is None and block.cut_from:
            raise NotChecked("its tiles were cut from others: give --against the folder of those")
        if before is not None and any(True for _ in faults(before, folder.source)):
            raise NotChecked("QC040: the source's tensors are not those of whole tiles")
    except PlanError as error:
        raise NotChecked(f"QC043: {error}") from error
    if before is not None and (wrong := tile_mismatches(block, before)):
        raise NotChecked(f"QC043: {wrong[0]}")
    return before


def sampled(experts: int) -> list[int]:
    """Up to four experts, evenly spaced, including the first and the last."""
    count = min(_SAMPLE, experts)
    return sorted({i * (experts - 1) // max(1, count - 1) for i in range(count)})


@dataclass(frozen=True)
class MatrixTask:
    """One matrix: its tensors here, one weight and scale for each NUMA shard, and in the source."""

    block: Block
    layer: int
    kind: Kind
    expert: int
    tensors: Mapping[str, Source]
    source: Matrix

    @property
    def where(self) -> str:
        return next(iter(self.tensors))

    @property
    def nbytes(self) -> int:
        ours = sum(tensor.type.nbytes for tensor in self.tensors.values())
        return ours + self.source.nbytes

    @property
    def scratch(self) -> int:
        """A range of rows in float32 from both sides, its difference, and the memory for judging
        it, in addition to what was read: about twelve times float32."""
        return 48 * self._height * self.source.form.columns

    @property
    def _height(self) -> int:
        """Rows checked at a time: those that are adjacent here. In a stack [E, inputs, outputs] rows
        are scattered in the source, and all are read for any."""
        form = self.source.form
        whole = form.transposed and form.codes is None
        return self.source.rows if whole else STEP[self.block.method]

    @property
    def computes(self) -> bool:
        """It computes in loops where there are some."""
        return True

    def run(self, folders: Folders) -> Iterator[Finding | Measure]:
        import numpy as np

        sums = Sums()
        for top in range(0, self.source.rows, self._height):
            expected = bf16_rows(folders.source, self.source, top, top + self._height)
            for base, rows, columns, start in self._shards(top):
                found, step = shard_weights(
                    self.block, self.tensors, folders.output, base, self.kind, start,
                    start + rows.stop - rows.start,
                )  # fmt: skip
                wanted = np.ascontiguousarray(expected[rows, columns])
                sums.add(wanted, found)
                largest = _if_near(self.block, wanted, found, step)
                at = None if largest is not None else _misfit(self.block, wanted, found, step)
                if at is not None:
                    row, column = top + rows.start + at[0], columns.start + at[1]
                    yield self._finding(
                        base,
                        f"row {row}, column {column}: expected {wanted[at]:g}, as in the source, "
                        f"within the rounding of a step of {step[at[0]]:g}; found {found[at]:g}",
                    )
                    return
                lost = _lost_row(self.block, wanted, found, step)
                if lost is not None:
                    yield self._finding(base, f"row {top + rows.start + lost[0]}: {lost[1]}")
                    return
                odd = _odd_step(self.block, wanted, found, step, largest)
                if odd is not None:
                    most = float(abs(wanted[odd]).max())
                    yield self._finding(
                        base,
                        f"row {top + rows.start + odd}: a step of {step[odd]:g} does not match its "
                        f"largest weight, {most:g}: expected about "
                        f"{most / LARGEST[self.block.method]:g}",
                    )
                    return
        yield sums.measure(
            self.where, f"{self.kind}_proj", self.layer, self.expert, f"amx{self.block.method}",
            calibrated=self.block.rounding == "gptq",
        )  # fmt: skip

    def _finding(self, base: str, text: str) -> Finding:
        return Finding("QC042", "error", f"{base}.weight", f"expert {self.expert}, {text}")

    def _shards(self, top: int) -> Iterator[tuple[str, slice, slice, int]]:
        """Shards that hold a part of the range from row `top` on: name, which rows and columns of
        the range, and the row of the shard these begin at."""
        rows, columns = self.block.shard_shape(self.kind)
        for shard in range(self.block.numa):
            base = shard_name(self.layer, self.kind, self.expert, shard)
            if self.kind == "down":
                across = slice(shard * columns, (shard + 1) * columns)
                yield base, slice(0, self._height), across, top
                continue
            first, last = max(top, shard * rows), min(top + self._height, (shard + 1) * rows)
            if first < last:
                yield base, slice(first - top, last - top), slice(0, columns), first - shard * rows


def _if_near(block: Block, expected: Floats, found: Floats, step: Floats) -> Floats | None:
    """If a compiled loop found that no weight is too far off: the largest of each row; else None."""
    import numpy as np

    if LOOPS.in_use() is None or block.rounding in ("gptq", "search"):
        return None
    largest = np.empty(step.size, np.float32)
    with np.errstate(all="ignore"):
        allowed = _allowed(block, step)
    return largest if done("row_fits", expected, found, allowed, largest) else None


def _allowed(block: Block, step: Floats) -> Floats:
    """Bound of a weight's error under each step."""
    bound = _BOUND.get((block.method, block.rounding), 0.5)
    allowed: Floats = (bound + _SLACK) * step + _FLUSHED
    return allowed


def _misfit(block: Block, expected: Floats, found: Floats, step: Floats) -> tuple[int, int] | None:
    """Row and column of the first weight that is too far off. If steps were searched for, the
    largest code stands for everything beyond it too."""
    import numpy as np

    if block.rounding == "gptq":  # one weight's error is compensated by others: see _lost_row
        return None
    with np.errstate(all="ignore"):
        size = step[:, None]
        fits = np.abs(expected - found) <= _allowed(block, step)[:, None]
        if block.rounding == "search":
            beyond = (LARGEST[block.method] - 0.5) * size
            outward = expected * np.sign(found) >= beyond - _SLACK * size
            fits |= (np.abs(found) > beyond) & outward
    if fits.all():
        return None
    row, column = divmod(int(np.argmin(fits)), expected.shape[1])
    return row, column


def _lost_row(
    block: Block, expected: Floats, found: Floats, step: Floats
) -> tuple[int, str] | None:
    """For codes that calibration found: the first row that is hardly correlated with the source's
    weights, and its correlation; or that rows are much larger or smaller than the source's."""
    import numpy as np

    if block.rounding != "gptq":
        return None
    with np.errstate(all="ignore"):
        size, top = step[:, None], LARGEST[block.method]
        best = np.clip(np.rint(expected / size), -top, top) * size
        # Together: of single rows of few tokens 0.3 to 2.2 was seen.
        along = (expected * found).sum(dtype=np.float64, keepdims=True)[0]
        far = lengths_off(along, np.square(found).sum(dtype=np.float64, keepdims=True)[0])
    if far is not None:
        return 0, LENGTHS
    return lost_row(expected, found, np.where(np.isfinite(best), best, np.float32(0)))


def _odd_step(
    block: Block, expected: Floats, found: Floats, step: Floats, largest: Floats | None
) -> int | None:
    """The first row whose step is not the one of its largest weight; or, if steps were searched
    for, is so large that the largest code is unused, or leaves a larger error than that one could;
    or, if calibration chose it, is far from that one. `largest` are the
    rows' largest weights, where they are known."""
    import numpy as np

    top = LARGEST[block.method]
    with np.errstate(all="ignore"):
        if largest is None:
            largest = np.abs(expected).max(axis=1)
        plain = largest / np.float32(top)
        if block.rounding == "search":
            # A search minimizes a row's error, so it is below that of the plain step: half
            # of it for each weight, or 8.5 / 16 if kt-kernel rounds twice.
            half = np.float32(_BOUND.get((block.method, "reference"), 0.5) + _SLACK)
            off = (expected - found) / plain[:, None]
            wrong = (step > plain * (top / (top - 0.5) + _SLACK)) | (
                (off**2).mean(axis=1) > half**2
            )
        elif block.rounding == "gptq":
            wrong = (step > plain * _MOST_CLIP) | (step < plain * _LEAST_CLIP)
        else:
            wrong = np.abs(step - plain) > plain * _STEP_SLACK
        wrong &= largest > _FLUSHED
    return int(np.argmax(wrong)) if wrong.any() else None
