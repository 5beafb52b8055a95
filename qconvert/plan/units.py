"""Units: the plan cut into the smallest pieces of work that can be done, and journalled, alone.

A unit is a connected component: outputs that share a computed value belong together, so that each
value is computed once. Within a unit, steps run one after another; a step is either a copy of
source bytes or a group of connected nodes. Only one step's buffers live at a time, and the work of
each node is further cut by its op, so the memory a unit needs is far below its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import (
    Apply,
    Op,
    Output,
    Part,
    Piece,
    Source,
    Value,
    aligned,
    nodes,
    only_node,
)

# Copies go in pieces of this size at most; one of a file that is linked, which is read to be hashed,
# through a buffer no smaller than the second figure.
COPY_BYTES = 4 << 20
MIN_COPY_BYTES = 64 << 10
# How much an op is asked to work on at once: a part stays in the cache that cores share, and its
# result fits the sink's window.
PART_BYTES = 3 << 20
# Several results of one node are kept until they are whole, if they are no larger than this: parts of
# them, written in turn, would be many small writes.
GATHER_BYTES = 32 << 20
# What nodes of a step read one after another, as a weight's largest entry and then its codes, is kept
# between them, if it is no more than this: gate and up of DeepSeek-V3 in BF16 are 59 MB.
REREAD_BYTES = 64 << 20
# As many parts of a node's work are remembered for others like it.
_FEW_PARTS = 64
# The same of what comes from a store or the Hub, where reading again is fetching again: a dense model's
# largest matrix, 8192 x 28672 in BF16, is 470 MB.
FAR_REREAD_BYTES = 4 << 30


@dataclass(slots=True, unsafe_hash=True)
class Copy:
    """Source bytes [start, stop) go to byte `at` of output `output` (an index into the unit's)."""

    source: Source
    start: int
    stop: int
    output: int
    at: int


@dataclass(slots=True, unsafe_hash=True)
class Write:
    """Bytes [start, stop) of port `port` of node `node` go to byte `at` of output `output`."""

    node: int
    port: int
    start: int
    stop: int
    output: int
    at: int


@dataclass(slots=True, unsafe_hash=True)
class Compute:
    """Connected nodes, arguments before users, and where their results go."""

    nodes: tuple[Apply, ...]
    writes: tuple[Write, ...]


Step = Copy | Compute


@dataclass(slots=True, unsafe_hash=True)
class Unit:
    """Outputs that must be made together (`names`, and what is `made` for each), and their bytes. `peak`
    is the least memory that the step with the largest buffers can run in. Where all are results of one
    `node` that reads sources, as most are (a matrix in its new encoding), that is the one step, made
    when it is asked for: Kimi-K2 to AMX has 115,200, of 400 bytes each. `cut`: the steps of others."""

    names: tuple[str, ...]
    made: tuple[Output, ...]
    cut: tuple[Step, ...]
    read: int
    write: int
    peak: int
    node: Apply | None = None

    @property
    def outputs(self) -> tuple[tuple[str, Output], ...]:
        """Names with what they stand for."""
        return tuple(zip(self.names, self.made, strict=True))

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return what makes the outputs, in order."""
        return self.cut if self.node is None else (_of_results(self.node, self.made),)


def part_bytes(op: Op, part: Part) -> int:
    """Memory one part of an op's work takes: arguments, results and scratch."""
    types = [t for _, t in part.args]
    buffers = [t.nbytes for t in types] + [t.nbytes for _, t in part.outs]
    return sum(map(aligned, buffers)) + aligned(op.scratch(*types))


def compute_bytes(step: Compute, limit: int = 1) -> int:
    """Memory a step takes when its ops are asked for parts of `limit` bytes. Ops put their largest
    part first. Nodes run one after another, part by part; what others take of one lives whole."""
    kept = taken_by_others(step)
    whole_results = sum(
        aligned(kind.nbytes) for node in step.nodes if id(node) in kept for kind in node.types
    )
    return whole_results + max(node_bytes(node, limit) for node in step.nodes)


def node_bytes(node: Apply, limit: int = 1) -> int:
    """Memory of a node's first part, its largest, when asked for parts of `limit` bytes."""
    return _first_part_bytes(node.op, limit, tuple(arg.type for arg in node.args))


def taken_by_others(step: Compute) -> frozenset[int]:
    """Ids of nodes whose results other nodes of the step take."""
    return frozenset(id(before) for node in step.nodes for before in _arguments(node))


def gathered_bytes(step: Compute) -> int:
    """The most memory for results of a node that are better written whole, 0 where none are."""
    kept = taken_by_others(step)
    return max((gathered_of(node) for node in step.nodes if id(node) not in kept), default=0)


def gathered_of(node: Apply) -> int:
    """Memory for a node's results where they are better written whole, else 0."""
    if len(node.types) < 2:
        return 0
    size = sum(aligned(kind.nbytes) for kind in node.types)
    return size if size <= GATHER_BYTES else 0


def reread(step: Compute, most: int = REREAD_BYTES) -> dict[Piece, int]:
    """Ranges of a source that are a whole argument of several of a step's nodes, and their bytes: none
    where they are more than `most` together."""
    if len(step.nodes) == 1:
        return {}
    times = Counter(arg.pieces[0] for node in step.nodes for arg in node.args if read_whole(arg))
    found = {piece: piece.nbytes for piece, count in times.items() if count > 1}
    return found if sum(map(aligned, found.values())) <= most else {}


def kept_in(step: Compute, room: int, most: int = REREAD_BYTES) -> dict[Piece, int]:
    """Return what of `reread` is kept where a step has so much room: all of it, or nothing."""
    wanted = reread(step, most)
    beside = compute_bytes(step) + gathered_bytes(step) if wanted else 0
    return wanted if sum(map(aligned, wanted.values())) + beside <= room else {}


def read_whole(arg: Output) -> bool:
    """Return whether an argument is one range of a source."""
    return len(arg.pieces) == 1 and isinstance(arg.pieces[0].origin, Source)


def parts_of(node: Apply, limit: int) -> Iterable[Part]:
    """The parts of a node's work when asked for parts of `limit` bytes."""
    types = tuple([arg.type for arg in node.args])
    size = sum([kind.nbytes for kind in types])
    if size > _FEW_PARTS * limit:
        return node.op.parts(limit, *types)
    return _few_parts(node.op, limit, types)


@lru_cache(maxsize=64)
def _few_parts(op: Op, limit: int, types: tuple[TensorType, ...]) -> tuple[Part, ...]:
    """Remembered, because a model has few shapes and many tensors."""
    return (*op.parts(limit, *types),)


@lru_cache(maxsize=256)
def scratch_of(op: Op, types: tuple[TensorType, ...]) -> int:
    """Working memory of an op for arguments of these types, in bytes."""
    return op.scratch(*types)


@lru_cache(maxsize=4096)
def _first_part_bytes(op: Op, limit: int, types: tuple[TensorType, ...]) -> int:
    """Remembered, because a model has few shapes and many tensors."""
    first = next(op.parts(limit, *types), None)
    return part_bytes(op, first) if first is not None else 0


class _Groups:
    """Union-find over numbers; a group goes by its smallest."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, key: int) -> int:
        """Numbers that were never joined are not kept."""
        parent = self._parent
        while (above := parent.get(key, key)) != key:
            parent[key] = parent.get(above, above)
            key = above
        return key

    def join(self, a: int, b: int) -> None:
        first, second = self.find(a), self.find(b)
        if first != second:
            self._parent[max(first, second)] = min(first, second)


def units(tensors: Mapping[str, Output]) -> list[Unit]:
    """The units that make these outputs, in the order of their first. Linear in outputs and nodes."""
    names, made = tuple(tensors), tuple(tensors.values())
    alone = [only_node(output) for output in made]
    kinds: dict[int, tuple[int, int]] = {}
    found = []
    for numbers in _groups(made, alone):
        first, last = numbers[0], numbers[-1]
        if last - first + 1 == len(numbers):  # side by side, as nearly all are
            own = names[first : last + 1], made[first : last + 1]
        else:
            own = tuple([names[i] for i in numbers]), tuple([made[i] for i in numbers])
        only = alone[first]
        if only is not None and all(alone[i] is only for i in numbers[1:]):
            found.append(_of_one_node(only, *own, kinds))
        else:
            found.append(_unit(*own))
    return found


def _groups(made: Sequence[Output], alone: Sequence[Apply | None]) -> Iterable[list[int]]:
    """The numbers of each unit's outputs; `alone` are the nodes of those that need one only."""
    pairs = zip(made, alone, strict=True)
    if any(only is None and output.source is None for output, only in pairs):
        return _joined(made, alone)
    groups: dict[int, list[int]] = {}
    for i, only in enumerate(alone):
        key = -1 - i if only is None else id(only)
        group = groups.get(key)
        if group is None:
            groups[key] = [i]
        else:
            group.append(i)
    return groups.values()


def _joined(made: Sequence[Output], alone: Sequence[Apply | None]) -> Iterable[list[int]]:
    """As `_groups`, where an output may be made of several nodes."""
    joined = _Groups()
    owner: dict[int, int] = {}
    for i, only in enumerate(alone):
        for node in (only,) if only is not None else nodes([made[i]]):
            first = owner.setdefault(id(node), i)
            if first != i:
                joined.join(first, i)
    groups: dict[int, list[int]] = {}
    for i in range(len(made)):
        first = joined.find(i)
        if first == i:
            groups[i] = [i]
        else:
            groups[first].append(i)
    return groups.values()


def _of_one_node(
    node: Apply,
    names: tuple[str, ...],
    outputs: tuple[Output, ...],
    kinds: dict[int, tuple[int, int]],
) -> Unit:
    """As `_unit`, for pieces of results of one node that reads sources. `kinds` remembers what a kind of
    node reads, and its memory."""
    known = kinds.get(id(node.types))
    if known is None:
        read = sum(arg.type.nbytes for arg in node.args)
        known = kinds[id(node.types)] = read, compute_bytes(_of_results(node, outputs))
    written = sum([output.type.nbytes for output in outputs])
    return Unit(names, outputs, (), known[0], written, known[1], node)


def _of_results(node: Apply, outputs: Sequence[Output]) -> Compute:
    """The step that makes outputs of one piece each, of this node's results."""
    writes = []
    for index, output in enumerate(outputs):
        origin, start, stop = output.pieces[0]
        assert isinstance(origin, Value)
        writes.append(Write(0, origin.port, start, stop, index, 0))
    return Compute((node,), tuple(writes))


def _unit(names: tuple[str, ...], outputs: tuple[Output, ...]) -> Unit:
    component = _components(outputs)
    steps: list[Copy | int] = []
    writes: dict[int, list[tuple[Value, Write]]] = {}
    for index, output in enumerate(outputs):
        at = 0
        for origin, start, stop in output.pieces:
            if isinstance(origin, Source):
                steps.append(Copy(origin, start, stop, index, at))
            else:
                group = component[id(origin.node)]
                if group not in writes:
                    writes[group] = []
                    steps.append(group)
                # The node's index is known only once the group is ordered: 0 for now.
                write = Write(0, origin.port, start, stop, index, at)
                writes[group].append((origin, write))
            at += stop - start
    built = tuple(step if isinstance(step, Copy) else _compute(writes[step]) for step in steps)
    peak = 0
    read = 0
    for step in built:
        if isinstance(step, Copy):
            read += step.stop - step.start
            peak = max(peak, min(step.stop - step.start, MIN_COPY_BYTES))
        else:
            read += sum(_source_bytes(arg) for node in step.nodes for arg in node.args)
            peak = max(peak, compute_bytes(step))
    write_bytes = sum(output.type.nbytes for output in outputs)
    return Unit(names, outputs, built, read, write_bytes, peak)


def _source_bytes(output: Output) -> int:
    return sum(stop - start for _, start, stop in output.sources)


def _components(outputs: Sequence[Output]) -> Mapping[int, int]:
    """Group of every node: nodes joined through arguments share one."""
    joined = _Groups()
    found = list(nodes(outputs))
    for node in found:
        for before in _arguments(node):
            joined.join(id(before), id(node))
    return {id(node): joined.find(id(node)) for node in found}


def _arguments(node: Apply) -> Iterator[Apply]:
    for arg in node.args:
        for piece in arg.pieces:
            if isinstance(piece.origin, Value):
                yield piece.origin.node


def _compute(writes: Sequence[tuple[Value, Write]]) -> Compute:
    ordered = tuple(nodes([value.output for value, _ in writes]))
    position = {id(node): i for i, node in enumerate(ordered)}
    return Compute(
        ordered,
        tuple(
            Write(position[id(value.node)], w.port, w.start, w.stop, w.output, w.at)
            for value, w in writes
        ),
    )
