"""The matrices of a checkpoint as the model means them, whatever their layout: experts unstacked or in
stacks, linear attention split or fused in any order, weights plain, FP8 or INT4, under any prefix. Two
checkpoints of one model have the same keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.family import Dims, Place
from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind
from qconvert.validators.reading.forms import (
    Form,
    Unread,
    coded_weights,
    form_of,
    forms_of_stack,
    raw,
    specs,
)

Key = tuple[str, int | None, int | None, str]  # role (or module), layer, expert, parameter
Runs = tuple[tuple[int, int], ...]

QKVZ, BA = ("q", "k", "v", "z"), ("b", "a")
# Linear attention's projections, and the segments of rows each holds.
SEGMENTS: Mapping[str, tuple[str, ...]] = {
    "in_proj_qkvz": QKVZ, "in_proj_ba": BA,
    "in_proj_qkv": QKVZ[:3], "in_proj_z": QKVZ[3:], "in_proj_b": BA[:1], "in_proj_a": BA[1:],
}  # fmt: skip
FUSED = ("in_proj_qkvz", "in_proj_ba")
GROUPS_FACT = "gdn_groups"  # of the manifest: 0 split, 1 contiguous, as key heads: interleaved

_GDN, _STACKED, _EXPERTS = "gdn.", "stacked_experts.", "experts."
# Prefixes of one and the same module in a multi-modal and a text-only checkpoint.
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
# The part of a name that only repeats layer and expert.
_PLAIN_ROLES = ("attn.", "mlp.", "gdn.", "experts.")


@dataclass(slots=True, unsafe_hash=True)
class Matrix:
    """Rows `runs` of a stored matrix, in this order. `tensor` is its name, `role` what it is in the
    model. If only its bytes can be read, `note` says why."""

    key: Key
    tensor: str
    role: str
    layer: int | None
    expert: int | None
    form: Form
    runs: Runs
    note: str = ""

    @property
    def format(self) -> str:
        return self.form.format

    @property
    def rows(self) -> int:
        if len(self.runs) == 1:
            start, stop = self.runs[0]
            return stop - start
        return sum(stop - start for start, stop in self.runs)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.form.columns

    @property
    def nbytes(self) -> int:
        """Of weights, without scales."""
        return self.rows * self.form.row_nbytes

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Stored rows of rows [start, stop), in order."""
        at = 0
        for first, last in self.runs:
            low, high = max(start, at), min(stop, at + last - first)
            if low < high:
                yield first + low - at, first + high - at
            at += last - first


@lru_cache(maxsize=2)  # several validators need those of a folder and of its source
def matrices(checkpoint: Checkpoint) -> Mapping[Key, Matrix]:
    """All of them by key, as `each_matrix` finds them; the same matrix under a second name by that."""
    by_key: dict[Key, Matrix] = {}
    for matrix in each_matrix(checkpoint):
        key = matrix.key
        if key in by_key:
            key = (matrix.tensor, None, None, key[3])
            matrix = replace(matrix, key=key)
        by_key[key] = matrix
    return MappingProxyType(by_key)


def each_matrix(checkpoint: Checkpoint) -> Iterator[Matrix]:
    """All of them, in the order of the shards, one at a time: those of Kimi-K2 take 26 MB. Scales belong
    to their matrices; tensors of unknown matrices are listed by name, as numbers or bytes, and last
    those that could be a matrix's scales, and are not."""
    groups = gdn_groups(checkpoint)
    ends = tuple({end for spec in specs() for end in spec.parts})
    used: set[str] = set()
    later: list[str] = []

    sources = checkpoint.sources

    def read(name: str) -> Sequence[Matrix]:
        if sources[name].type.nbytes == 0:
            return ()
        try:
            found = tuple(_of_tensor(checkpoint, name, groups))
            used.update(_parts(name, found[0].form))
        except Unread as why:
            place = checkpoint.role_index.places.get(name)
            made = _made(_key_of(checkpoint, name, place), name, place, raw(checkpoint, name), ())
            return [replace(made, note=str(why))]
        return found

    for name in checkpoint:
        if name in used:
            used.remove(name)
        elif name.endswith(ends):
            later.append(name)
        else:
            yield from read(name)
    for name in later:
        if name not in used:
            yield from read(name)


def gdn_groups(checkpoint: Checkpoint) -> int | None:
    """In how many groups fused linear attention is, by the manifest or else the family's convention;
    None if neither states it or the number is invalid."""
    dims = checkpoint.role_index.dims
    if dims.gdn is None or dims.gdn[0] < 1:
        return None
    stated = (checkpoint.manifest or {}).get(GROUPS_FACT)
    if not stated:  # 0: split, so nothing is fused
        return dims.gdn[0] if checkpoint.family.name == "qwen3_next" else None
    fits = type(stated) is int and stated > 0 and dims.gdn[0] % stated == 0
    return stated if fits else None


def gdn_groups_here(checkpoint: Checkpoint) -> int | None:
    """As `gdn_groups`, 0 where none is fused."""
    if checkpoint.role_index.dims.gdn is None:
        return None
    fused = any(f".{name}." in tensor for tensor in checkpoint for name in FUSED)
    return gdn_groups(checkpoint) if fused else 0


def segment_rows(dims: Dims) -> dict[str, int]:
    """Rows of each segment of linear attention's projections. Raises Unread if the config does not
    state how many heads there are, or how wide."""
    if dims.gdn is None:
        raise Unread("the config does not state how many heads linear attention has, or how wide")
    nk, nv, dk, dv = dims.gdn
    return {"q": nk * dk, "k": nk * dk, "v": nv * dv, "z": nv * dv, "b": nv, "a": nv}


def segment_runs(sizes: Sequence[int], groups: int) -> list[Runs]:
    """Rows of each segment in a tensor that holds, group by group, every segment's share."""
    share = sum(sizes) // groups
    begins = [sum(sizes[:i]) // groups for i in range(len(sizes))]
    if groups == 1:
        return [((begin, begin + size),) for begin, size in zip(begins, sizes, strict=True)]
    return [
        tuple(
            (group * share + begin, group * share + begin + size // groups)
            for group in range(groups)
        )
        for begin, size in zip(begins, sizes, strict=True)
    ]


def whole(checkpoint: Checkpoint, name: str) -> Matrix:
    """A tensor's rows as stored. Raises Unread if its numbers cannot be read."""
    place = checkpoint.role_index.places.get(name)
    return _made((name, None, None, ""), name, place, form_of(checkpoint, name), ())


def _of_tensor(checkpoint: Checkpoint, name: str, groups: int | None) -> Iterable[Matrix]:
    """The matrices of one tensor: one, or those of all experts, or segments."""
    place = checkpoint.role_index.places.get(name)
    if place is None or checkpoint.family.name == "generic":
        return (
            _made(_key_of(checkpoint, name, place), name, place, form_of(checkpoint, name), ()),
        )
    role, parameter = place.role.name, _as_weight(checkpoint, name, place.parameter)
    if place.role.kind is Kind.EXPERT_UNKNOWN and _is_stack(checkpoint, name, place.parameter):
        return _of_unread_stack(checkpoint, name, place)
    if _STACKED in role and parameter in ("", "weight"):
        return _of_stack(checkpoint, name, place)
    segments = SEGMENTS.get(role.removeprefix(_GDN), ()) if role.startswith(_GDN) else ()
    if segments and parameter == "weight":
        return _of_gdn(checkpoint, form_of(checkpoint, name), name, place, segments, groups)
    key = role, place.layer, place.expert, parameter
    return (_made(key, name, place, form_of(checkpoint, name), ()),)


def _key_of(checkpoint: Checkpoint, name: str, place: Place | None) -> Key:
    """The key of a tensor that is one matrix."""
    if place is None or checkpoint.family.name == "generic":
        module, parameter = split_parameter(name)
        return plain_name(module), None, None, _as_weight(checkpoint, name, parameter)
    parameter = _as_weight(checkpoint, name, place.parameter)
    return place.role.name, place.layer, place.expert, parameter


def _of_stack(checkpoint: Checkpoint, name: str, place: Place) -> Iterator[Matrix]:
    dims, kind = checkpoint.role_index.dims, checkpoint[name].type
    if len(kind.shape) != 3 or kind.shape[0] != dims.num_experts:
        raise Unread(f"expected a stack of {dims.num_experts} experts, found {kind}")
    base, _, projection = place.role.name.replace(_STACKED, _EXPERTS).rpartition(".")
    transposed = _is_turned(checkpoint)
    for expert, form in enumerate(forms_of_stack(checkpoint, name, transposed=transposed)):
        half = form.rows // 2
        parts: dict[str, Runs] = {projection: ()}
        if projection == "gate_up_proj":
            parts = {"gate_proj": ((0, half),), "up_proj": ((half, form.rows),)}
        for part, runs in parts.items():
            role = f"{base}.{part}"
            made = _made((role, place.layer, expert, "weight"), name, place, form, runs)
            yield replace(made, role=_label(role), expert=expert)


def _is_stack(checkpoint: Checkpoint, name: str, parameter: str) -> bool:
    """Tell whether a tensor holds the matrices of all experts, in numbers or in gpt-oss's MXFP4."""
    shape, experts = checkpoint[name].type.shape, checkpoint.role_index.dims.num_experts
    dimensions = {"": 3, "weight": 3, "weight_blocks": 4}.get(parameter)
    return len(shape) == dimensions and shape[0] == experts


def _of_unread_stack(checkpoint: Checkpoint, name: str, place: Place) -> Iterator[Matrix]:
    """Matrices of experts whose gate and up are not told apart: one for each expert."""
    transposed = checkpoint.family.stacked_transposed and place.parameter != "weight_blocks"
    for expert, form in enumerate(forms_of_stack(checkpoint, name, transposed=transposed)):
        made = _made((place.role.name, place.layer, expert, "weight"), name, place, form, ())
        yield replace(made, expert=expert)


def _is_turned(checkpoint: Checkpoint) -> bool:
    """Tell whether stacks hold columns before rows. Families that publish it so are also saved the other
    way round, and only shapes tell, of a square matrix only those of the other stack."""
    if not checkpoint.family.stacked_transposed:
        return False
    hidden = checkpoint.role_index.dims.hidden_size
    # gate_up is [E, H, 2I] if transposed and else [E, 2I, H]; down is [E, I, H] and [E, H, I].
    axes = {f"{_STACKED}gate_up_proj": 1, f"{_STACKED}down_proj": 2}
    for name, place in checkpoint.role_index.places.items():
        axis, shape = axes.get(place.role.name.removeprefix("mtp.")), checkpoint[name].type.shape
        if axis is not None and len(shape) == 3 and shape[1] != shape[2]:
            return shape[axis] == hidden
    return True


def _of_gdn(
    checkpoint: Checkpoint,
    form: Form,
    name: str,
    place: Place,
    segments: tuple[str, ...],
    groups: int | None,
) -> Iterator[Matrix]:
    rows = segment_rows(checkpoint.role_index.dims)
    sizes = [rows[segment] for segment in segments]
    if place.role.name.removeprefix(_GDN) not in FUSED:
        groups = 1
    if groups is None:
        raise Unread("the order in which its rows are fused is not stated")
    if sum(sizes) != form.rows:
        raise Unread(f"it has {form.rows} rows, expected {sum(sizes)} by the config")
    for segment, runs in zip(segments, segment_runs(sizes, groups), strict=True):
        made = _made((f"gdn.{segment}", place.layer, None, "weight"), name, place, form, runs)
        yield replace(made, role=f"in_proj_{segment}")


def _made(key: Key, name: str, place: Place | None, form: Form, runs: Runs) -> Matrix:
    runs = runs or (_half_by_half(form.rows, form.halves) if form.halves else _all_rows(form.rows))
    if place is None:
        return Matrix(
            key, name, split_parameter(name)[0].rpartition(".")[2], None, None, form, runs
        )
    return Matrix(key, name, _label(place.role.name), place.layer, place.expert, form, runs)


@lru_cache(maxsize=1024)  # one object for each size: a model has few
def _all_rows(rows: int) -> Runs:
    return ((0, rows),)


@lru_cache(maxsize=16)
def _half_by_half(rows: int, head: int) -> Runs:
    """Rows of heads whose halves are stored row by row in turn, the first half of a head first."""
    starts = [at + half for at in range(0, rows, head) for half in (0, 1)]
    return tuple((row, row + 1) for first in starts for row in range(first, first + head - 1, 2))


@lru_cache(maxsize=1024)
def _label(role: str) -> str:
    for plain in _PLAIN_ROLES:
        if role.startswith(plain):
            return role.removeprefix(plain)
    return role


def _as_weight(checkpoint: Checkpoint, name: str, parameter: str) -> str:
    """A weight is the same parameter however it is stored. A stack of experts has none."""
    if not parameter or parameter.endswith("_blocks"):
        return parameter
    coded = parameter in ("weight_packed", "qweight") or (
        parameter != "bias" and name in coded_weights(checkpoint)
    )
    return "weight" if coded else parameter


def plain_name(name: str) -> str:
    """The same in a multi-modal and in a text-only checkpoint."""
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _parts(name: str, form: Form) -> Iterator[str]:
    """Tensors that are part of how a weight is stored, which was read in this form. Of an FP8 weight
    with several scales none is read."""
    yield from form.tensors()
    if form.codes is not None:
        module = name.rpartition(".")[0]
        yield from (f"{module}.weight_shape", f"{module}.g_idx")
