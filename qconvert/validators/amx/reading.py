"""A folder of experts for KTransformers' CPU kernels, as its validators see it: what its manifest
implies, its weights as the consumer computes them, and those of its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.validation.runner import Folder, NotChecked
from qconvert.validation.workers import Reads
from qconvert.validators.reading.amx import (
    BITS,
    RUNTIME_NAME,
    Method,
    size_fault,
    steps,
    tile_floats,
)
from qconvert.validators.reading.experts import KINDS, Kind, routed_experts
from qconvert.validators.reading.matrices import Matrix

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Bytes, Floats

_METHODS: Mapping[Any, Method] = {name: method for method, name in RUNTIME_NAME.items()}
# How a folder's codes were found: rounded as kt-kernel's converter does, with steps searched for, or by
# calibration.
FoundBy = Literal["reference", "search", "gptq"]
_ROUNDINGS: tuple[FoundBy, ...] = get_args(FoundBy)
_COUNTS = ("numa", "hidden_size", "intermediate_size", "experts")


@dataclass(frozen=True, slots=True)
class Block:
    """The manifest's `amx` block."""

    method: Method
    rounding: FoundBy
    numa: int
    hidden: int
    intermediate: int
    experts: int
    layers: tuple[int, ...]
    cut_from: tuple[
        int, ...
    ] = ()  # for how many nodes its tiles were cut before, the last one last

    @property
    def runtime_name(self) -> str:
        return RUNTIME_NAME[self.method]

    def shard_shape(self, kind: Kind) -> tuple[int, int]:
        """Rows and columns of one NUMA shard: gate and up are cut by rows, down by columns."""
        part = self.intermediate // self.numa
        return (self.hidden, part) if kind == "down" else (part, self.hidden)

    def tensors(self) -> Iterator[tuple[str, TensorType]]:
        """Every expected tensor."""
        for weight, scale, bases in self.projections():
            for base in bases:
                yield f"{base}.weight", weight
                yield f"{base}.scale", scale

    def projections(self) -> Iterator[tuple[TensorType, TensorType, list[str]]]:
        """The types of weights and of scales that each projection of each layer has, and their names
        without the last component."""
        for layer in self.layers:
            for kind in KINDS:
                rows, columns = self.shard_shape(kind)
                weight = TensorType("I8", (rows * columns * BITS[self.method] // 8,))
                scale = TensorType("F32", (rows,))
                yield (
                    weight,
                    scale,
                    [
                        shard_name(layer, kind, expert, shard)
                        for expert in range(self.experts)
                        for shard in range(self.numa)
                    ],
                )


def shard_name(layer: int, kind: Kind, expert: int, shard: int) -> str:
    """The name of a matrix's weight and scale, without their last component."""
    return f"blk.{layer}.ffn_{kind}_exps.{expert}.numa.{shard}"


def read_block(checkpoint: Checkpoint) -> Block:
    """The manifest's block. Raises PlanError if it is invalid: a key missing or of another
    type, sizes that the kernels cannot hold."""
    found = (checkpoint.manifest or {}).get("amx")
    if not isinstance(found, dict):
        raise PlanError(f"expected `amx` to be an object, found {found!r}")
    method, rounding, layers = (found.get(key) for key in ("method", "rounding", "layers"))
    if method not in list(_METHODS):
        raise PlanError(f"expected a method {' or '.join(_METHODS)}, found {method!r}")
    if rounding not in _ROUNDINGS:
        known = ", ".join(_ROUNDINGS)
        raise PlanError(f"expected a rounding of {known}, found {rounding!r}")
    for key in _COUNTS:
        if type(found.get(key)) is not int or found[key] < 1:
            raise PlanError(f"expected {key} to be 1 or more, found {found.get(key)!r}")
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise PlanError(f"expected layers to be a list of numbers, found {layers!r}")
    if not layers or layers != sorted(set(layers)) or layers[0] < 0:
        raise PlanError(f"expected layers to be ascending numbers, found {layers}")
    numa, hidden, intermediate, experts = (found[key] for key in _COUNTS)
    fault = size_fault(_METHODS[method], hidden, intermediate, numa)
    if fault is not None:
        raise PlanError(fault)
    how = _METHODS[method], _ROUNDINGS[_ROUNDINGS.index(rounding)]
    before = found.get("cut_from", {"numa": []})
    counts = before.get("numa") if isinstance(before, dict) else None
    if not isinstance(counts, list) or any(type(one) is not int or one < 1 for one in counts):
        raise PlanError(f"expected cut_from to have a list of NUMA counts, found {before!r}")
    return Block(*how, numa, hidden, intermediate, experts, tuple(layers), tuple(counts))


def faults(block: Block, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Tensors that do not match the manifest, and what is wrong with each."""
    there = 0
    for weight, scale, bases in block.projections():
        for kind, end in ((weight, "weight"), (scale, "scale")):
            names = [f"{base}.{end}" for base in bases]
            if _all_of_type(checkpoint, names, kind):
                there += len(names)
                continue
            for name in names:
                source = checkpoint.sources.get(name)
                if source is None:
                    yield name, f"missing: expected {kind} by the manifest"
                    continue
                there += 1
                if source.type != kind:
                    yield name, f"expected {kind}, found {source.type}"
    if there == len(checkpoint):
        return
    wanted = {name for name, _ in block.tensors()}
    for name, source in checkpoint.items():
        if name not in wanted:
            yield name, f"unexpected tensor: not in the manifest; found {source.type}"


def _all_of_type(checkpoint: Checkpoint, names: Sequence[str], kind: TensorType) -> bool:
    """Tell whether all of these tensors are there, and of this type. Their types are one object or few,
    so that few are compared: 0.16 s instead of 0.26 for Kimi-K2's 276,480 tiles."""
    found = list(map(checkpoint.sources.get, names))
    types = {id(one.type): one.type for one in found if one is not None}
    return all(found) and all(one == kind for one in types.values())


def sound_block(checkpoint: Checkpoint) -> Block:
    """The block of a folder whose tensors match it. Raises NotChecked for others."""
    try:
        block = read_block(checkpoint)
    except PlanError as error:
        raise NotChecked(f"QC040: {MANIFEST}: {error}") from error
    if any(True for _ in faults(block, checkpoint)):
        raise NotChecked("QC040: its tensors do not match the manifest")
    return block


def mismatches(
    block: Block, folder: Folder, own: frozenset[int], drafts: frozenset[int]
) -> list[str]:
    """Differences of manifest and source. Draft layers are either all present or all
    absent."""
    assert folder.source is not None
    dims = folder.source.role_index.dims
    found = [
        f"{what} is {here} here and {there} in the source"
        for what, here, there in (
            ("the number of experts", block.experts, dims.num_experts),
            ("the hidden size", block.hidden, dims.hidden_size),
            ("the experts' intermediate size", block.intermediate, dims.moe_intermediate_size),
        )
        if here != there
    ]
    if set(block.layers) not in (own, own | drafts):
        there = _spell(own) + (f", draft layers {_spell(drafts)}" if drafts else "")
        found.append(f"the layers with experts are {_spell(block.layers)} here; source: {there}")
    return found


def _spell(layers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(layers)))


Sources = Mapping[tuple[int, Kind, int], Matrix]


def matching_source(block: Block, folder: Folder) -> Sources:
    """The source's matrix of each layer, kind and expert. Raises NotChecked if the folder cannot
    have been made from it."""
    assert folder.source is not None
    try:
        experts = routed_experts(folder.source)
    except PlanError as error:
        raise NotChecked(f"QC043: {error}") from error
    wrong = mismatches(block, folder, experts.own, experts.drafts)
    if wrong:
        raise NotChecked(f"QC043: {wrong[0]}")
    return experts.matrices


def shard_weights(
    block: Block, tensors: Mapping[str, Source], reader: Reads, base: str, kind: Kind,
    start: int = 0, stop: int | None = None,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Rows [start, stop) of one NUMA shard (all): the weights [rows, columns] that the consumer
    computes with, and the step [rows] between two codes. `start` and `stop` are multiples of
    STEP[method], rows that are stored together. Raises PlanError if its tensors do not match the
    manifest."""
    import numpy as np

    rows, columns = block.shard_shape(kind)
    stop = rows if stop is None else stop
    weight, scale = (_tensor(tensors, f"{base}.{part}") for part in ("weight", "scale"))
    if scale.type != TensorType("F32", (rows,)):
        raise PlanError(f"{base}.scale: expected F32 [{rows}], found {scale.type}")
    line = weight.type.nbytes // rows
    codes = read_bytes(reader, weight, start * line, stop * line)
    scales = read_bytes(reader, scale, 4 * start, 4 * stop).view(np.float32)
    with np.errstate(all="ignore"):
        step = steps(block.method, scales)
    return tile_floats(block.method, codes, scales, columns), step


def weights(
    block: Block, tensors: Mapping[str, Source], reader: Reads, layer: int, kind: Kind, expert: int
) -> tuple[Floats, float]:
    """A matrix assembled from its NUMA shards, and the error of even rounding to its steps:
    the expected sum of squared errors, a twelfth of a squared step for each weight."""
    import numpy as np

    names = [shard_name(layer, kind, expert, shard) for shard in range(block.numa)]
    shards = [shard_weights(block, tensors, reader, name, kind) for name in names]
    columns = block.shard_shape(kind)[1]
    noise = sum(float(np.sum(step.astype(np.float64) ** 2)) for _, step in shards) * columns / 12
    return np.concatenate([s[0] for s in shards], axis=1 if kind == "down" else 0), noise


def _tensor(tensors: Mapping[str, Source], name: str) -> Source:
    if name not in tensors:
        raise PlanError(f"{name!r} is missing")
    return tensors[name]


def read_bytes(reader: Reads, tensor: Source, start: int, stop: int) -> Bytes:
    """Bytes [start, stop) of a tensor."""
    import numpy as np

    data = np.empty(stop - start, np.uint8)
    reader.read(tensor, start, data.data)
    return data
