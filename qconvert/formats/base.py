"""Format of stored weights: names of its tensors, how a matrix is read and written, how it is shown.

A package `qconvert/formats/<name>/` has its formats in `format.py`; other packages name a module with
`FORMAT`, or `FORMATS`, as an entry point of the group `qconvert.formats`. Who is asked for which module:
formats/registry.py. Validators decode with code of their own (validators/reading/).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import Shape, TensorType, TypesOf
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Value, inferred
from qconvert.core.names import split_parameter
from qconvert.ops.rowwise import Decoder, RowOp
from qconvert.plan.plan import Plan

T = TypeVar("T")


@dataclass(slots=True, unsafe_hash=True)
class Stored:
    """A matrix [rows, columns]: the op that reads it as BF16 (None: it is BF16), and its arguments,
    the first of which has its rows."""

    decoder: Decoder | None
    args: tuple[Output, ...]
    rows: int
    columns: int

    def cut(self, start: int, stop: int) -> Stored:
        """Rows [start, stop). Raises PlanError where the decoder cannot be cut there."""
        if (start, stop) == (0, self.rows):
            return self
        if self.decoder is None:
            return replace(self, args=(self.args[0].rows(start, stop),), rows=stop - start)
        decoder, args = self.decoder.cut(self.args, start, stop, self.rows)
        return Stored(decoder, args, stop - start, self.columns)

    def as_stored(self, made: Output, codes: Shape) -> Output:
        """The decoded output; a matrix in the shape of the stack whose codes have this one."""
        if len(codes) < 3 or len(made.type.shape) > 2:
            return made
        return made.reshape((*codes[:-1], self.columns))


Read = tuple[Stored, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """Tensors of a folder, stored or planned, as a format's `label` sees them: types by name, the
    checkpoint whose config describes them, and the facts of its manifest."""

    tensors: Mapping[str, TensorType]
    checkpoint: Checkpoint
    facts: Mapping[str, Any]
    _known: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> FolderTensors:
        """Raise CheckpointError for a broken manifest."""
        return cls(TypesOf(checkpoint.sources), checkpoint, checkpoint.manifest or {})

    def once(self, ask: Callable[[Checkpoint], T]) -> T:
        """An answer that the checkpoint's config gives, asked for once for all tensors."""
        return self.kept(ask, lambda: ask(self.checkpoint))

    def kept(self, key: Hashable, find: Callable[[], T]) -> T:
        """An answer for a key, found once for all tensors."""
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of a matrix's weight. All of it is known without numpy.

    name: in recipes and commands ("mxfp4").
    title: in messages, plans and cards ("MXFP4").
    parameters: suffixes of a module's name, that of the codes first; `_blocks` ends that of a stack.
    codes: dtypes of the codes.
    cut: rows and columns that belong together, as they are or (0) all of them.
    equals: whose bytes: project, version.
    read: a module's weight read as BF16, and the names of all tensors that it takes; None for a module
        that is not stored so. Raises PlanError where it is and a part is missing, does not fit or
        contradicts the config.
    order: forms with a lower one are asked first; those of other packages before all.
    mark: a parameter that says alone that a module is in this format, be its codes missing.
    encode: the op that makes it, BF16 [N, K] -> tensors in the order of `parameters`, row by row. None:
        it has a pass of its own, or is only read.
    config_group: compressed-tensors' group of the config for these targets.
    check: raises PlanError for a plan whose weights it should not be made of.
    notes, expert_notes: for plans: what loads it, and its routed experts.
    unmixed: all tensors of a plan in this format, weights or not, by name, where no config states it
        beside another one: what stays of them where others are encoded becomes BF16.
    label: how a tensor under one of `parameters` is shown, if its dtype is one of `codes` and does not
        say what is stored ("INT4 g128 (packed)"), from folder, module and parameter; None for another's.
        Without it codes are shown by `title`, where the second parameter is.
    """

    name: str
    title: str
    parameters: tuple[str, ...]
    codes: tuple[str, ...]
    cut: tuple[int | str, int | str]
    equals: str
    read: Callable[[Plan, str], Read | None] | None = None
    order: int = 50
    mark: str = ""
    encode: Callable[[], RowOp] | None = None
    config_group: Callable[[Iterable[str]], dict[str, Any]] | None = None
    check: Callable[[Plan], None] | None = None
    notes: tuple[str, ...] = ()
    expert_notes: tuple[str, ...] = ()
    unmixed: Callable[[Plan], Iterable[tuple[str, Read]]] | None = None
    label: Callable[[FolderTensors, str, str], str | None] | None = None

    def labelled(self, folder: FolderTensors, module: str, parameter: str) -> str | None:
        """The format of a tensor whose dtype does not say it, if it is in this one."""
        if self.label is not None:
            return self.label(folder, module, parameter)
        beside = all(f"{module}.{one}" in folder.tensors for one in self.parameters[1:2])
        return self.title if beside and parameter == self.parameters[0] else None


def activations_note(kind: str) -> str:
    """A note on activations that runtimes quantize beside the weights."""
    return f"runtimes quantize what goes into these too, to {kind}: eval --activations measures it"


def as_matrix(output: Output) -> Output:
    """A stack of matrices as one, their rows below one another."""
    shape = output.type.shape
    return output if len(shape) < 3 else output.reshape((prod(shape[:-1]), shape[-1]))


def weights_of_method(
    method: str, read: Callable[[Plan, str], Read | None]
) -> Callable[[Plan], Iterable[tuple[str, Read]]]:
    """`Format.unmixed` of a format whose codes are under the name of the weight, in folders whose config
    states this quant_method."""

    def unmixed(plan: Plan) -> Iterator[tuple[str, Read]]:
        if all(config.method != method for config in plan.checkpoint.quantization_configs):
            return
        for name in plan.tensors:
            module, parameter = split_parameter(name)
            if parameter == "weight" and (found := read(plan, module)) is not None:
                yield name, found

    return unmixed


def stored(
    plan: Plan,
    names: Sequence[str],
    decoder: Decoder,
    view: Callable[[Output], Output] = lambda output: output,
) -> Stored:
    """The matrix that these tensors of the plan are by this decoder, each in another shape by `view`.
    Raises PlanError where one is missing, was made by an earlier pass, or does not fit."""
    for name in names:
        if name not in plan.tensors:
            raise PlanError(f"{name!r} is missing")
    args = tuple(view(plan.tensors[name]) for name in names)
    if any(isinstance(piece.origin, Value) for piece in args[0].pieces):
        raise PlanError(f"{names[0]!r} was made by an earlier pass; weights are quantized once")
    try:
        _, (kind,) = inferred(decoder, tuple([arg.type for arg in args]))
    except PlanError as error:
        raise PlanError(f"weight {names[0]!r} with {names[1]!r}: {error}") from error
    return Stored(decoder, args, *kind.shape)
