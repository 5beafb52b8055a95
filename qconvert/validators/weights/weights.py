"""Every weight of the folder must be the source's, as exactly as its format can hold it.

QC060 a weight is further from the source's than its format's rounding allows.
QC061 the folder holds a tensor that the source does not have, or one of another shape.
QC062 a tensor of the source is not in the folder, and nothing accounts for it.

Each matrix is compared with the source's as its consumer computes with it, wherever the two are stored:
moved rows, stacked experts and merged scales make no difference. At level sample
a few matrices of each kind are checked, and a few ranges of the long ones.

Matrices with adapters merged into them: the source's numbers plus what adapters add, in float64,
rounded once, or the nearest codes of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.adapter import Adapted
from qconvert.checkpoint.ranks import parts_in, whole_name
from qconvert.core.family import text_model_type
from qconvert.core.names import parse, split_parameter
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Proved, Skipped
from qconvert.validation.runner import Folder, Yield, validator
from qconvert.validation.workers import Folders
from qconvert.validators.formats.nvfp4 import NVFP4
from qconvert.validators.headers.manifest_claims import CALIBRATION
from qconvert.validators.reading.adapters import Added, Additions, additions_to, nbytes
from qconvert.validators.reading.decode import FLOATS, as_bf16
from qconvert.validators.reading.forms import RAW, Encoding
from qconvert.validators.reading.matrices import Key, Matrix, matrices
from qconvert.validators.reading.prepared import bases, prepared_tensors
from qconvert.validators.reading.pruned import of_each, pruned
from qconvert.validators.reading.rows import rows
from qconvert.validators.weights.compare import CALIBRATED, Compare, How, described, wrong_weights
from qconvert.validators.weights.input_scales import is_such_a_scale, scale_key
from qconvert.validators.weights.int_bounds import Kept
from qconvert.validators.weights.searched import CompareSearched, CompareSolvedNvfp4, is_searched

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Floats

# Of the largest number of a row: sums of products in float32, in any order.
_SLACK = 2.0**-20
# Half a step of the mantissa, of the power of two below a number.
_ROUNDED = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


@dataclass(frozen=True, slots=True)
class CompareMerged(Compare):
    """One matrix against the source's with additions; codes are judged as `judge` does."""

    added: tuple[Added, ...]
    judge: type[Compare]

    @property
    def scratch(self) -> int:
        return Compare.scratch.fget(self) + sum(map(nbytes, self.added))  # type: ignore[attr-defined, no-any-return]

    @property
    def _is_exact(self) -> bool:
        return False

    def _expected(self, folders: Folders, start: int, stop: int) -> Floats:
        import numpy as np

        base = rows(
            folders.source, self.yours, start, stop, bf16=self._from_codes and not self.added
        )
        values = base.astype(np.float64)
        with np.errstate(all="ignore"):
            for one in self.added:
                one.apply(folders.source, values, start)
            found: Floats = values.astype(np.float32)
        return found

    def _misfit(
        self, folders: Folders, tile: tuple[int, int], expected: Floats, found: Floats, kept: Kept
    ) -> str:
        import numpy as np

        largest = np.abs(expected).max(axis=1, keepdims=True, initial=0)
        step = _ROUNDED.get(self.mine.format)
        if step is not None:
            with np.errstate(all="ignore"):
                size = np.exp2(np.floor(np.log2(np.maximum(np.abs(expected), 2.0**-126))))
                near = np.abs(found - expected) <= size * np.float32(step) + _SLACK * largest
            near |= np.isnan(expected) & np.isnan(found)
            return "" if near.all() else wrong_weights(near, tile[0], expected, found, _SUM)
        judge = self.judge(self.mine, self.yours, self.how, self.whole)
        # A sum that lies halfway between two bf16 numbers may have become either.
        low, high = (as_bf16(expected + off * largest) for off in (-_SLACK, _SLACK))
        nearer = np.where(np.abs(found - high) < np.abs(found - low), high, low)
        for numbers in (nearer, as_bf16(expected)):
            why = judge._misfit(folders, tile, numbers, found, kept)
            if not why:
                break
        return why

    def _kind(self) -> str:
        return f" ({self.yours.format} of the source with adapters, as {self.mine.format})"


_SUM = "{} as the source's with what adapters add"


_A_FEW = 8  # matrices of each kind
_MOST_MISSING = 20


@validator("every weight is the source's within its format's rounding", "data", "model", "source")
def weights(folder: Folder) -> Iterator[Yield]:
    """Cuts the comparison into one task per matrix."""
    assert folder.source is not None
    ours, theirs = matrices(folder.checkpoint), matrices(folder.source)
    if _is_text_alone(folder):
        ours, theirs = _by_place(ours), _by_place(theirs)
    if (less := pruned(folder.checkpoint, folder.source)) is not None:
        experts = folder.checkpoint.role_index.dims.num_experts
        ours = {key: of_each(matrix, experts) for key, matrix in ours.items()}
        theirs = less.matrices(theirs)
    yield from _missing(folder, ours, theirs)
    kinds: dict[tuple[object, ...], list[Compare]] = {}
    unread: list[tuple[Matrix, str]] = []
    holes = {_whole(m): m.note for m in theirs.values() if m.note}
    moved, of_ranks = prepared_tensors(folder.checkpoint), parts_in(folder.source.sources)
    additions, used = additions_to(folder), set[str]()
    for key, mine in ours.items():
        if mine.tensor in moved or is_such_a_scale(folder.checkpoint, mine.tensor):
            continue  # QC109, QC112
        if mine.tensor in of_ranks:
            continue  # joined_ranks
        yours = _counterpart(folder, key, theirs)
        hole = mine.note or holes.get(_whole(mine), "")
        if yours is None and hole:
            unread.append((mine, hole))
            continue
        if yours is None:
            message = "is not in the source, nor made from its tensors"
            yield Finding("QC061", "error", mine.tensor, described(mine, message))
            continue
        reason = _unlike(mine, yours)
        if reason:
            unread.append((mine, reason))
        elif mine.shape != yours.shape:
            message = (
                f"expected {list(yours.shape)} as {yours.tensor} of the source has, found "
                f"{list(mine.shape)}"
            )
            yield Finding("QC061", "error", mine.tensor, described(mine, message))
        else:
            how = _how(folder, mine, yours)
            task = _kind_of(folder, mine, how)(mine, yours, how, _is_full(folder))
            if additions is not None:
                task = _with_added(additions, task)
                if isinstance(task, CompareMerged):
                    used.update(part.name for one in task.added for _, part in one.parts)
            kind = mine.key[0], mine.format, yours.format, mine.key[3]
            kinds.setdefault(kind, []).append(task)
    if isinstance(folder.source, Adapted):
        yield from _unused(folder.source, used)
    if moved:
        yield Skipped(f"{count(len(moved), 'prepared tensor')} against weights (see `prepared`)")
    if unread:
        first, reason = unread[0]
        where = "" if reason.startswith(first.tensor) else f"{first.tensor}: "
        text = f"{count(len(unread), 'tensor')} not compared; {where}{reason}"
        yield Skipped(text)
    found = [task for tasks in kinds.values() for task in tasks]
    if any(task.how in CALIBRATED for task in found):
        yield from _calibrated(found)
    elif unread and kinds:
        yield Proved("every weight that was compared is the source's within its rounding")
    for tasks in kinds.values():
        yield from folder.some(tasks, _A_FEW)


def _calibrated(tasks: Sequence[Compare]) -> Iterator[Proved | Skipped]:
    """Codes that calibration chose need not be the nearest: what is compared, and what is not judged."""
    solved = sum(task.how in CALIBRATED for task in tasks)
    yield Proved(
        "calibrated weights have scales that fit the source's, and rows and groups of columns that "
        "follow the source's"
    )
    if solved < len(tasks):
        yield Proved(
            "every other weight that was compared is the source's within its format's rounding"
        )
    yield Skipped(
        f"how good the codes of {count(solved, 'calibrated matrix', 'calibrated matrices')} are, or "
        "whether they are better than rounding (`qconvert eval` measures what the model computes)"
    )


def _is_text_alone(folder: Folder) -> bool:
    """Tell whether the folder's class is that of the source's text model, whose roles may be called
    otherwise."""
    assert folder.source is not None
    kind, theirs = (c.config.get("model_type") for c in (folder.checkpoint, folder.source))
    return kind != theirs and kind == text_model_type(folder.source.config)


def _by_place(found: Mapping[Key, Matrix]) -> dict[Key, Matrix]:
    """Matrices of a text model by what they are called below their layer; those of experts, which one
    side may stack, by where experts are."""
    named: dict[Key, Matrix] = {}
    for key, matrix in found.items():
        role = key[0]
        if not role.startswith("vision."):
            _, layers, below = parse(matrix.tensor).template.partition(".layers.{L}.")
            last = role.rpartition(".")[2]
            if matrix.expert is not None:
                below = below.partition("experts.")[0] + "experts.weight"
            role = f"{split_parameter(below)[0]} {last}" if layers else last
        named[role, *key[1:]] = matrix
    return named


def _is_full(folder: Folder) -> bool:
    return folder.request.level == "full"


def _missing(
    folder: Folder, ours: Mapping[Key, Matrix], theirs: Mapping[Key, Matrix]
) -> Iterator[Finding]:
    """Tensors that only the source has. A receipt accounts for every byte (QC030), and a pipeline stage
    holds a part; otherwise each tensor is required."""
    manifest = folder.checkpoint.manifest or {}
    if folder.receipt is not None or "stage" in manifest:
        return
    dropped = {name for names in manifest.get("dropped", {}).values() for name in names}
    assert folder.source is not None
    # A head that differs from the embeddings cannot be left out, whatever the folder's config says.
    tied = folder.checkpoint.role_index.dims.tied and folder.source.role_index.dims.tied
    gone: dict[str, str] = {}
    here = folder.checkpoint
    scales = {scale_key(name) for name in here if is_such_a_scale(here, name)}
    moved = tuple(f"{base}." for base in bases(folder.checkpoint))  # QC109 checks all of theirs
    for key, matrix in theirs.items():
        if matrix.tensor.startswith(moved) or whole_name(matrix.tensor) is not None:
            continue
        spare = tied and key[0] == "lm_head"
        if scale_key(matrix.tensor) in scales and is_such_a_scale(folder.source, matrix.tensor):
            continue
        if key not in ours and matrix.tensor not in dropped and not spare:
            gone.setdefault(matrix.tensor, described(matrix, "is missing, and no rule drops it"))
    for name, message in list(gone.items())[:_MOST_MISSING]:
        yield Finding("QC062", "error", name, message)
    if len(gone) > _MOST_MISSING:
        message = f"{len(gone) - _MOST_MISSING} more tensors of the source are missing"
        yield Finding("QC062", "error", str(folder.checkpoint.root), message)


def _whole(matrix: Matrix) -> tuple[int | None, str]:
    """The tensor that a matrix is part of, if it may be one of several in a tensor that cannot be
    read."""
    name = matrix.tensor
    return matrix.layer, next((p for p in (".experts.", ".in_proj_") if p in name), name)


def _counterpart(folder: Folder, key: Key, theirs: Mapping[Key, Matrix]) -> Matrix | None:
    assert folder.source is not None
    if key not in theirs and key[0] == "lm_head" and folder.source.role_index.dims.tied:
        return theirs.get(("embed_tokens", *key[1:]))
    return theirs.get(key)


def _unlike(mine: Matrix, yours: Matrix) -> str:
    """Why two matrices cannot be compared, "" if they can be."""
    if (mine.format == RAW) != (yours.format == RAW):
        here, there = mine.form.weight.type, yours.form.weight.type
        return mine.note or yours.note or f"{here} against {there}"
    if mine.format == RAW and mine.form.weight.type.dtype != yours.form.weight.type.dtype:
        return f"{mine.form.weight.type} against {yours.form.weight.type}"
    return ""


def _kind_of(folder: Folder, mine: Matrix, how: How) -> type[Compare]:
    if how == "solved" and mine.format == NVFP4:
        return CompareSolvedNvfp4
    return CompareSearched if _is_searched(folder, mine, how) else Compare


def _is_searched(folder: Folder, mine: Matrix, how: How) -> bool:
    """Tell whether the scales of a matrix that was rounded were searched for. What is rounded beside
    calibrated matrices, draft layers, is not: the search that a pass states there is the solver's."""
    step = "nvfp4" if mine.format == NVFP4 else "w4a16" if mine.form.codes is not None else ""
    manifest = folder.checkpoint.manifest or {}
    return how == "nearest" and CALIBRATION not in manifest and is_searched(manifest, step)


def _how(folder: Folder, mine: Matrix, yours: Matrix) -> How:
    """A format that rounds to steps rounds again only if a pass says it did, or if it came from
    another format."""
    if mine.form.weight.type.dtype in FLOATS and mine.format != yours.format:
        return "rounded"
    codes, encoding = mine.form.codes, mine.form.encoding
    if not encoding.passes:
        return "equal"
    manifest = folder.checkpoint.manifest or {}
    if mine.format == NVFP4 and yours.format == "mxfp4":
        return "equal"  # the same codes, under other scales
    steps = [step for step in manifest.get("passes", []) if step.get("name") in encoding.passes]
    anew = bool(steps)
    calibrated = CALIBRATION in manifest and any(_calibrates(step, encoding) for step in steps)
    if anew and calibrated and mine.format == NVFP4 and mine.key[0].startswith("experts."):
        return "solved"
    if anew and calibrated and codes is not None and not _of_draft(folder, mine):
        own = _has_own_scales(manifest, symmetric=codes.symmetric)
        return "solved" if own else "calibrated"
    # A nibble is stored in one type or another.
    alike = encoding.bits == 4 or mine.form.weight.type.dtype == yours.form.weight.type.dtype
    if mine.format == yours.format and alike and not anew:
        return "equal"
    # Of what another tool made nobody knows whether its codes were calibrated.
    foreign = codes is not None and folder.checkpoint.manifest is None
    return "solved" if foreign else "nearest"


def _calibrates(step: Mapping[str, Any], encoding: Encoding) -> bool:
    """Tell whether a pass says that a calibration finds codes of this encoding. Of several that write
    one, in a mixture, some may round."""
    options = step.get("options", {})
    return bool(options.get("calibrate")) and options.get("bits", encoding.bits) == encoding.bits


def _with_added(additions: Additions, task: Compare) -> Compare:
    """The comparison with what adapters add, where they add anything, or may have changed a scale that
    the matrix shares."""
    mine, added = task.mine, additions.to(task.mine)
    plain = mine.form.weight.type.dtype in FLOATS
    grid = mine.form.grid
    shares = grid is not None and (grid.global_scale is not None or grid.rows * grid.columns == 1)
    if not added and (task.how != "equal" or plain or not shares):
        return task
    searched = mine.format == NVFP4 or (mine.form.codes is not None and mine.form.codes.bits == 4)
    judge = CompareSearched if searched else Compare
    how: How = "rounded" if plain else "nearest"
    return CompareMerged(mine, task.yours, how, task.whole, added, judge)


def _unused(source: Adapted, used: Set[str]) -> Iterator[Finding]:
    """Tensors of adapters that are for no matrix that was compared."""
    for name in sorted(source.adapter_sources - used)[:_MOST_MISSING]:
        yield Finding(
            "QC062", "error", name, "is a part of an adapter, and of no matrix that is compared"
        )


def _of_draft(folder: Folder, mine: Matrix) -> bool:
    """Tell whether a matrix is a draft layer's, which is rounded beside calibrated ones."""
    checkpoint = folder.checkpoint
    return checkpoint.family.is_mtp(mine.tensor, checkpoint.role_index.dims)


def _has_own_scales(manifest: Mapping[str, Any], *, symmetric: bool) -> bool:
    """Tell whether a calibration searched for scales, or fitted them to its codes, which asymmetric
    schemes leave as they are; or solved against other weights than the source's, whose scales these
    are."""
    said = manifest.get(CALIBRATION)
    if not isinstance(said, dict):
        return False
    fitted = said.get("scales") == "search" or bool(said.get("refit"))
    return said.get("propagated_error") == "correct" or (symmetric and fitted)
