"""The order of linear attention's fused rows, found from the source's rows: every order has the same
shape and loads silently.

QC063 the rows are in another order than the folder states.
QC064 the rows are in no known order.
QC065 block scales are in another order than the rows they belong to.

Each row is identified by a hash. Orders that are tried: every number of groups that divides the key
heads (1: contiguous, number of key heads: interleaved, others: rank-major), segments swapped, and rows
of a fused source that were cut as if they had been contiguous. Split projections are checked in the
same way, as if they were one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Skipped
from qconvert.validation.runner import Folder, Need, NotChecked, Yield
from qconvert.validators.reading.forms import Unread
from qconvert.validators.reading.matrices import (
    BA,
    FUSED,
    GROUPS_FACT,
    QKVZ,
    Key,
    Matrix,
    gdn_groups,
    matrices,
    segment_rows,
    whole,
)
from qconvert.validators.weights.gdn_rows import Order

_LAYERS = 4  # at level sample
# For segments: the module that holds all of them, and those that hold some.
_MODULES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    QKVZ: (FUSED[0], "in_proj_qkv", "in_proj_z"),
    BA: (FUSED[1], "in_proj_b", "in_proj_a"),
}


@dataclass(frozen=True)
class GdnOrder:
    """Two tasks a layer: q, k, v, z and b, a."""

    name: str = "gdn_order"
    proves: str = "linear-attention rows are in the order that the folder states"
    needs: frozenset[Need] = frozenset({"gdn", "source", "data"})

    def __call__(self, folder: Folder) -> Iterator[Yield]:
        checkpoint, source = folder.checkpoint, folder.source
        assert source is not None
        if source.role_index.dims.gdn != checkpoint.role_index.dims.gdn:
            raise NotChecked("the source has linear attention of other sizes, or none")
        theirs = matrices(source)
        layers = []
        unread: list[str] = []
        for layer, modules in sorted(_modules(checkpoint).items()):
            tasks = []
            for segments in (QKVZ, BA):
                try:
                    task = _task(checkpoint, modules, segments)
                    parts = _parts(theirs, layer, segments)
                except Unread as why:
                    unread.append(str(why))
                    continue
                if task is not None and _rounded_anew(checkpoint, task[1], parts):
                    unread.append(f"{task[1][0].tensor}: its rows are rounded anew, see `weights`")
                elif task is not None and parts:
                    tasks.append(Order(*task, parts, _cuts(source)))
            if tasks:
                layers.append(tasks)
        if not layers:
            raise NotChecked(
                unread[0]
                if unread
                else "no layer has projections in both the folder and its source"
            )
        if unread:
            more = f", and {len(unread) - 1} more" if len(unread) > 1 else ""
            yield Skipped(f"the order of linear attention's rows: {unread[0]}{more}")
        for tasks in folder.some(layers, _LAYERS):
            yield from tasks


def said(checkpoint: Checkpoint, *, fused: bool) -> tuple[int | None, str]:
    """In how many groups (1 for split ones: segment by segment) rows should be, and who states it."""
    if not fused:
        return 1, "split projections are"
    manifest = checkpoint.manifest or {}
    if manifest.get(GROUPS_FACT):
        return gdn_groups(checkpoint), "qconvert.json says"
    if checkpoint.family.name == "qwen3_next":
        return gdn_groups(checkpoint), "Qwen3-Next is"
    return 1, "sglang, which alone takes them fused from a Qwen3.5 repo, takes"


def _rounded_anew(
    checkpoint: Checkpoint, stored: tuple[Matrix, ...], parts: tuple[Matrix, ...]
) -> bool:
    """Tell whether no row can be found again: these were rounded to codes from the source's numbers."""
    steps = {step.get("name") for step in (checkpoint.manifest or {}).get("passes", [])}
    coded = {m.format for m in stored if m.format == "fp8" or m.form.codes is not None}
    others = {matrix.format for matrix in parts}
    return bool(coded) and (others != coded or not steps.isdisjoint(("fp8", "int8", "mx")))


def _modules(checkpoint: Checkpoint) -> dict[int, dict[str, str]]:
    """For each layer, its projections' weights by their last name."""
    found: dict[int, dict[str, str]] = {}
    for name, place in checkpoint.role_index.places.items():
        role = place.role.name
        if role.startswith("gdn.in_proj_") and place.parameter == "weight":
            assert place.layer is not None
            found.setdefault(place.layer, {})[role.removeprefix("gdn.")] = name
    return found


def _parts(
    theirs: Mapping[Key, Matrix], layer: int, segments: tuple[str, ...]
) -> tuple[Matrix, ...]:
    """The source's segments, () if it has none. Raises Unread if they cannot be read as rows."""
    found = [theirs.get((f"gdn.{s}", layer, None, "weight")) for s in segments]
    parts = tuple(part for part in found if part is not None)
    if len(parts) == len(segments):
        return parts
    for module in _MODULES[segments]:
        bare = theirs.get((f"gdn.{module}", layer, None, "weight"))
        if bare is not None and bare.note:
            raise Unread(f"{bare.tensor} of the source: {bare.note}")
    return ()


def _task(
    checkpoint: Checkpoint, modules: dict[str, str], segments: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[Matrix, ...], tuple[int, ...], int, int, str] | None:
    """Facts that `Order` needs of the folder, None if the layer is in another stage, or incomplete.
    Raises Unread, naming the tensor, if its rows cannot be read."""
    fused, *split = _MODULES[segments]
    if fused in modules:
        names, (groups, who) = [modules[fused]], said(checkpoint, fused=True)
    elif all(part in modules for part in split):
        names, (groups, who) = [modules[part] for part in split], said(checkpoint, fused=False)
    else:
        return None  # missing tensors and incomplete sets are found in the headers
    dims = checkpoint.role_index.dims
    assert dims.gdn is not None
    sizes = segment_rows(dims)
    stored = tuple(_whole(checkpoint, name) for name in names)
    if groups is None:
        raise Unread(f"{names[0]}: the number of groups that its rows are fused in is unknown")
    if sum(m.rows for m in stored) != sum(sizes[s] for s in segments):
        return None  # QC014
    return segments, stored, tuple(sizes[s] for s in segments), dims.gdn[0], groups, who


def _whole(checkpoint: Checkpoint, name: str) -> Matrix:
    try:
        return whole(checkpoint, name)
    except Unread as why:
        raise Unread(f"{name}: {why}") from why


def _cuts(source: Checkpoint) -> int:
    """Groups of the source's fused rows, 0 if they are split."""
    fused = any(f".{name}." in tensor for tensor in source for name in FUSED)
    return (gdn_groups(source) or 0) if fused else 0


VALIDATOR = GdnOrder()
