"""A plan carried out on tensors in memory, one result after another, without a folder.

For weights that change as a program goes on: a trainer hands its BF16 weights to the runtime that
samples with them in FP8, after each step (weight sync of reinforcement learning).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.reading import stated
from qconvert.core.dtypes import FP8_DTYPES, TensorType
from qconvert.core.errors import (
    CheckpointError,
    DataError,
    PlanError,
    RowError,
    RunError,
    ScaleError,
)
from qconvert.core.graph import Apply, Buffer, Output, Source
from qconvert.core.json_text import parse_object
from qconvert.core.names import natural_key
from qconvert.plan.plan import Plan
from qconvert.plan.units import PART_BYTES

# A checkpoint of tensors that a program holds: their types and a config, no file.

_NOWHERE = Path("(tensors in memory)")


@dataclass(frozen=True)
class InMemory(Checkpoint):
    """Its tensors have types; their bytes come later, as often as they change."""

    __hash__ = Checkpoint.__hash__

    def read(self, name: str, limit: int = 0) -> bytes | None:
        """There is no file beside the tensors."""
        return None

    def read_small(self, source: Source) -> bytes:
        """Raises CheckpointError: a plan that depends on a value would not hold for the next tensors."""
        raise CheckpointError(
            f"{source.name}: the plan depends on the value of this tensor, and is made before there are "
            "values; convert the checkpoint as a folder"
        )


def checkpoint_of(types: Mapping[str, TensorType], config: Mapping[str, Any]) -> InMemory:
    """A checkpoint of tensors by name, with the model's config (that of config.json). Raises
    CheckpointError where there are none, and for a config that JSON cannot hold."""
    if not types:
        raise CheckpointError("no tensors are given; give the model's, by their names")
    names = sorted(types, key=natural_key)
    try:
        text = json.dumps(config, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the config is not what config.json could hold: {error}; give the config's to_dict()"
        ) from error
    digest = sha256(text)
    for name in names:
        digest.update(f"{name} {types[name]}\n".encode())
    sources = {name: Source(name, types[name], 0, 0) for name in names}
    parsed = parse_object(text, _NOWHERE)
    return InMemory(
        _NOWHERE, (), sources, parsed, text, (), (), digest.hexdigest(), indexed=False, metadata={},
        asked=stated(),
    )  # fmt: skip


# Names of dtypes in torch and numpy.
_DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_NAMES: Mapping[str, str] = {ours: theirs for theirs, ours in _DTYPES.items()}
_ONLY_TORCH = frozenset({"BF16", *FP8_DTYPES, "F8_E8M0"})


def type_of(name: str, tensor: Any) -> TensorType:
    """The type of a tensor of torch or an array of numpy. Raises DataError for anything else."""
    kind = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if kind not in _DTYPES:
        raise DataError(
            f"{name}: expected a tensor of torch or an array of numpy, found {type(tensor).__name__}"
            + (f" of dtype {kind}" if kind else "")
        )
    return TensorType(_DTYPES[kind], tuple(int(size) for size in tensor.shape))


def is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


@dataclass(frozen=True)
class Converter:
    """A plan that converts a model's tensors whenever they have changed. `config` is that of the result,
    for the runtime; `types` are its tensors. `torch`: results are torch's, on the CPU, else numpy's."""

    plan: Plan
    torch: bool

    def __post_init__(self) -> None:
        for name, kind in () if self.torch else self.types.items():
            if kind.dtype in _ONLY_TORCH:
                raise PlanError(
                    f"{name}: numpy has no {kind.dtype}; give tensors of torch, or another recipe"
                )

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plan.config

    @property
    def types(self) -> Mapping[str, TensorType]:
        return {name: output.type for name, output in self.plan.tensors.items()}

    def stream(self, tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Names and tensors of the result, one at a time in the order of the layers; of the source only
        what a result is made of is asked for, by name, and nothing is kept that no later result needs.
        Raises DataError for a tensor that is missing or of another type than planned, RunError, naming
        it, for data that cannot be right."""
        job = _Job(self.plan, tensors)
        for name, output in self.plan.tensors.items():
            yield name, tensor_of(job.bytes_of(output), output.type, torch=self.torch)


class _Job:
    """Results of nodes that are still to be read."""

    def __init__(self, plan: Plan, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._results: dict[int, list[Buffer]] = {}
        read = [*plan.tensors.values(), *(arg for node in plan.nodes for arg in node.args)]
        self._left = Counter(
            id(piece.origin.node)
            for output in read
            for piece in output.pieces
            if not isinstance(piece.origin, Source)
        )

    def bytes_of(self, output: Output) -> bytearray:
        data = bytearray(output.type.nbytes)
        at = 0
        for origin, start, stop in output.pieces:
            if isinstance(origin, Source):
                data[at : at + stop - start] = _bytes(origin, self._tensors)[start:stop]
            else:
                data[at : at + stop - start] = self._of(origin.node)[origin.port].data[start:stop]
                self._left[id(origin.node)] -= 1
                if not self._left[id(origin.node)]:
                    del self._results[id(origin.node)]
            at += stop - start
        return data

    def _of(self, node: Apply) -> list[Buffer]:
        if id(node) not in self._results:
            self._results[id(node)] = self._computed(node)
        return self._results[id(node)]

    def _computed(self, node: Apply) -> list[Buffer]:
        ins = [memoryview(self.bytes_of(arg)) for arg in node.args]
        made = [Buffer(kind, memoryview(bytearray(kind.nbytes))) for kind in node.types]
        for part in node.op.parts(PART_BYTES, *(arg.type for arg in node.args)):
            args = [
                Buffer(kind, data[at : at + kind.nbytes])
                for data, (at, kind) in zip(ins, part.args, strict=True)
            ]
            outs = [
                Buffer(kind, whole.data[at : at + kind.nbytes])
                for whole, (at, kind) in zip(made, part.outs, strict=True)
            ]
            scratch = bytearray(node.op.scratch(*(one.type for one in args)))
            try:
                node.op.run(args, outs, memoryview(scratch))
            except (RowError, ScaleError, RunError) as error:
                raise RunError(f"{', '.join(_read(node))}: {error}") from error
        return made


def _read(node: Apply) -> list[str]:
    """The source tensors that a node reads."""
    origins = (piece.origin for arg in node.args for piece in arg.pieces)
    return list(dict.fromkeys(one.name for one in origins if isinstance(one, Source)))


def _bytes(source: Source, tensors: Mapping[str, Any]) -> memoryview:
    """A tensor's bytes, without a copy where it is contiguous on the CPU."""
    try:
        tensor = tensors[source.name]
    except KeyError:
        raise DataError(
            f"{source.name}: expected {source.type} as planned, found no such tensor"
        ) from None
    kind = type_of(source.name, tensor)
    if kind != source.type:
        raise DataError(
            f"{source.name}: expected {source.type} as planned, found {kind}; plan again"
        )
    if is_torch(tensor):
        torch = sys.modules["torch"]
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return memoryview(flat.numpy()).cast("B")
    import numpy as np

    flat_array: Any = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return memoryview(flat_array).cast("B")


def tensor_of(data: bytearray, kind: TensorType, *, torch: bool) -> Any:
    """Bytes as a tensor of torch or an array of numpy. Raises RunError for a dtype that both lack."""
    name = _NAMES.get(kind.dtype)
    if name is None:
        raise RunError(f"torch and numpy have no dtype {kind.dtype}")
    if torch:
        library: Any = sys.modules["torch"]
        if not data:
            return library.empty(kind.shape, dtype=getattr(library, name))
        flat = library.frombuffer(data, dtype=library.uint8)
        return flat.view(getattr(library, name)).reshape(kind.shape)
    if kind.dtype in _ONLY_TORCH:
        raise RunError(f"numpy has no dtype {name}; take tensors of torch")
    import numpy as np

    return np.frombuffer(data, np.dtype(name)).reshape(kind.shape)
