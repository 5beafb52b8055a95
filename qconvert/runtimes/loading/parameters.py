"""The parameters of a rank and how a tensor of the folder gets into each: the shapes that are asserted,
those that are cut or filled up in silence, and what a rank takes of a tensor.

Read in `layers/parameter.py` (what quantized linears use), `layers/linear.py`
(weight_loader and weight_loader_v2), `layers/vocab_parallel_embedding.py`,
`layers/moe/fused_moe_triton/layer.py` (_weight_loader_impl), `model_loader/weight_utils.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, Protocol

from qconvert.core.dtypes import Shape, TensorType
from qconvert.runtimes.loading.setting import LoadRefused

# Which part of a parameter a tensor is for: None, all of it; a number, q, k or v, a part of a fused
# projection; several numbers, parts in a row; an expert and one of its three matrices.
Expert = tuple[int, Literal["w1", "w2", "w3"]]
Shard = None | int | str | tuple[int, ...] | Expert

_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_RANKS = {**dict.fromkeys(_FLOAT8, 0), "F16": 1, "BF16": 1, "F32": 2, "F64": 3}


# What a share of a parameter may be off by.
_ROUNDED = 1e-6


class WeightLoader(Protocol):
    """Way of a tensor into a parameter. Returns the part that it fills and the number of its
    elements; raises LoadRefused."""

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled: ...


@dataclass(frozen=True, slots=True)
class Filled:
    """Elements of a parameter that one tensor fills, by part, and what the runtime does not say."""

    parts: dict[object, int]
    silent: str | None = None


@dataclass(slots=True)
class Parameter:
    """A parameter as the runtime builds it. `needed`: the runtime computes with it. `default`: it starts
    with a value that is right where the folder has none. `padded`: the share of it that a tensor fills,
    of one that is larger than that."""

    dtype: str
    shape: Shape
    slot: WeightLoader
    needed: bool = True
    default: bool = False
    padded: float = 1.0
    parts: dict[object, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return TensorType(self.dtype, self.shape).nbytes

    @property
    def unwritten(self) -> float:
        """The share of its elements to which no tensor came."""
        size = prod(self.shape)
        return max(0.0, 1 - sum(self.parts.values()) / size) if size else 0.0

    @property
    def lacks(self) -> bool:
        """Tell whether the runtime computes with elements to which a tensor should have come."""
        return self.needed and self.unwritten > 1 - self.padded + _ROUNDED

    def write(self, tensor: TensorType, shard: Shard) -> str | None:
        """Take a tensor. Returns what goes wrong in silence, if anything does."""
        if tensor.dtype == "F8_E8M0" and getattr(self.slot, "exponents", False):
            tensor = replace(tensor, dtype="U8")
        filled = self.slot.fill(self.shape, self.dtype, tensor, shard)
        self.parts.update(filled.parts)
        role = getattr(self.slot, "role", "")
        # Sizes and scales: any type of number says the same. Of what is not used none matters.
        if role in ("single", "base") or not self.needed:
            return filled.silent
        return filled.silent or _other_kind(tensor.dtype, self.dtype)


def _other_kind(stored: str, held: str) -> str | None:
    """Tell whether a copy turns codes into numbers or numbers into codes, which torch does without a
    word."""
    if _kind(stored) == _kind(held):
        return None
    return f"{stored} is copied into a parameter of {held}, as numbers"


def _kind(dtype: str) -> str:
    if dtype == "F8_E8M0":  # powers of two, of which every copy is right
        return "float"
    if dtype in _FLOAT8:
        return "float8"
    return "float" if dtype in ("F16", "BF16", "F32", "F64") else "integer"


def refused(kind: str, says: str, tensor: TensorType, into: Sequence[int], why: str) -> LoadRefused:
    """`where` is filled in by who knows the names."""
    return LoadRefused(kind, says, "", f"{why}: {tensor} for a parameter {list(into)}")


def asserted(into: Shape, tensor: TensorType, shape: Shape, says: str = "") -> None:
    """An `assert` of the runtime that two shapes are equal."""
    if shape != into:
        raise refused("AssertionError", says, tensor, into, "the shapes differ")


def narrowed(tensor: TensorType, shape: Shape, dim: int, start: int, length: int) -> Shape:
    """torch's narrow, which refuses what goes beyond the end."""
    if dim >= len(shape):
        raise refused("IndexError", "Dimension out of range", tensor, shape, "too few dimensions")
    if start + length > shape[dim] or length < 0:
        raise refused(
            "RuntimeError", f"start ({start}) + length ({length}) exceeds dimension size", tensor,
            shape, f"a rank's share is {start} to {start + length} of dimension {dim}, beyond its end",
        )  # fmt: skip
    return (*shape[:dim], length, *shape[dim + 1 :])


def broadcast(into: Shape, tensor: TensorType, shape: Shape) -> None:
    """torch's copy_, which repeats dimensions of 1."""
    if len(shape) > len(into) or any(
        have not in (1, want) for have, want in zip(reversed(shape), reversed(into), strict=False)
    ):
        raise refused(
            "RuntimeError", "must match", tensor, into, "the rank's part has another shape"
        )


@dataclass(frozen=True, slots=True)
class Whole:
    """A copy on every rank (default_weight_loader); with `scalar`, a number may lack its dimension."""

    scalar: bool = False

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        if not (prod(into) == 1 and tensor.numel == 1 and not self.scalar):
            asserted(into, tensor, tensor.shape or ((1,) if self.scalar else ()))
        return Filled({None: prod(into)})


@dataclass(frozen=True, slots=True)
class Sharded:
    """A rank's part along one dimension (sharded_weight_loader)."""

    rank: int
    tp: int
    dim: int = 0

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        size = into[self.dim]
        part = narrowed(tensor, tensor.shape, self.dim, self.rank * size, size)
        if not (prod(into) == 1 and prod(part) == 1):
            asserted(into, tensor, part, "Attempted to load weight")
        stored, whole = tensor.shape[self.dim], size * self.tp
        silent = None if stored == whole else f"expected {whole} numbers, found {stored}"
        return Filled({None: prod(into)}, silent)


@dataclass(frozen=True, slots=True)
class Padded:
    """A rank's `share` of the numbers of all heads, in a parameter of more whose rest the loader fills
    (vLLM's load_attention_sink); it takes its part of however many there are."""

    share: int
    tp: int

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        stored, whole = tensor.numel, self.share * self.tp
        if stored % self.tp or stored // self.tp > into[0]:
            raise refused("ValueError", "", tensor, into, f"expected {whole} numbers")
        silent = None if stored == whole else f"expected {whole} numbers, found {stored}"
        return Filled({None: prod(into)}, silent)


@dataclass(frozen=True, slots=True)
class Convolution:
    """Rows of q, k and v, each divided among ranks (mamba_v2_sharded_weight_loader)."""

    sizes: tuple[int, ...]
    tp: int
    rank: int

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        if len(tensor.shape) != len(into):
            raise refused("RuntimeError", "", tensor, into, f"expected {len(into)} dimensions")
        start = 0
        for size in self.sizes:
            part = size // self.tp
            begin = min(start + self.rank * part, tensor.shape[0])
            rows = min(begin + part, tensor.shape[0]) - begin
            broadcast((part, *into[1:]), tensor, (rows, *tensor.shape[1:]))
            start += size
        silent = None
        if tensor.shape[0] != sum(self.sizes):
            silent = f"expected {sum(self.sizes)} rows, found {tensor.shape[0]}"
        return Filled({None: prod(into)}, silent)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of an embedding or a head, padded to a multiple of 64 and divided among ranks."""

    rows: int
    tp: int
    rank: int

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        if tensor.shape[:1] != (self.rows,):
            raise refused(
                "AssertionError", "self.org_vocab_size=", tensor, into,
                f"expected the config's vocab_size {self.rows} rows",
            )  # fmt: skip
        broadcast(into[1:], tensor, tensor.shape[1:])
        return Filled({None: prod(into)})


Kind = Literal["replicated", "column", "merged", "qkv", "row"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A linear and how ranks divide it. `outputs` are the rows of its parts, one part for what is not
    fused; `replicas`: ranks that share a key-value head."""

    kind: Kind
    inputs: int
    outputs: tuple[int, ...]
    tp: int = 1
    rank: int = 0
    replicas: int = 1

    @property
    def columns(self) -> int:
        """Columns of one rank."""
        return self.inputs // self.tp if self.kind == "row" else self.inputs

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each part on one rank."""
        divided = self.kind in ("column", "merged", "qkv")
        return tuple(size // self.tp for size in self.outputs) if divided else self.outputs

    @property
    def rows(self) -> int:
        return sum(self.parts)


# What a parameter of a linear is: the weight itself or scales laid out as it (`matrix`), scales of rows
# (`rows`), of blocks, one per part (`tensor`), or the same on every rank (`base`); `plain` is the weight
# of an unquantized linear, which has another loader.
Role = Literal["plain", "matrix", "rows", "block", "tensor", "base", "bias"]
Wrapped = Literal["", "qwen3_5"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A parameter of a linear. `block`: rows of a block, 0 if the runtime does not know. `packed`: rows
    in one element. `wrapped`: the class puts a loader of its own before, for the fused projections of
    linear attention. `transposed`: columns come first (GPTQ)."""

    layout: Layout
    role: Role
    block: int = 1
    packed: int = 1
    wrapped: Wrapped = ""
    transposed: bool = False

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        if self.transposed:
            into, tensor = into[::-1], TensorType(tensor.dtype, tensor.shape[::-1])
        if not self.block and self.layout.kind in ("merged", "qkv"):
            raise refused(
                "TypeError", "not subscriptable", tensor, into,
                "the block of a fused projection is looked for in the target `Linear`, which states "
                "none",
            )  # fmt: skip
        if self.wrapped == "qwen3_5" and isinstance(shard, tuple):
            return self._apart(into, dtype, tensor, shard)
        return self._fill(into, dtype, tensor, shard)

    def _fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        kind = self.layout.kind
        if kind == "replicated":
            asserted(into, tensor, tensor.shape or (1,))
            return Filled({None: prod(into)})
        if kind == "row":
            return self._row(into, tensor)
        if kind == "column":
            return self._column(into, dtype, tensor)
        if shard is None or isinstance(shard, tuple):
            return self._fused(into, dtype, tensor, shard)
        return self._part(into, tensor, tensor.shape, shard)

    def _row(self, into: Shape, tensor: TensorType) -> Filled:
        shape = tensor.shape or (1,)
        silent = None
        if self.role in ("plain", "matrix", "block"):
            silent = not_as_long(shape, 1, into[1], self.layout)
            shape = _padded(tensor, shape, 1, into[1])
        asserted(into, tensor, shape)
        return Filled({None: prod(into)}, silent)

    def _column(self, into: Shape, dtype: str, tensor: TensorType) -> Filled:
        shape = tensor.shape or (1,)
        silent = None
        if self.role not in ("tensor", "base"):
            silent = not_as_long(shape, 0, into[0], self.layout)
            shape = narrowed(tensor, shape, 0, self.layout.rank * into[0], into[0])
        asserted(into, tensor, shape)
        if self.role in ("matrix", "rows", "block") and tensor.dtype != dtype:
            have, want = _RANKS.get(tensor.dtype), _RANKS.get(dtype)
            if have is None or want is None:
                says = "Unsupported copy between dtypes"
                raise refused("ValueError", says, tensor, into, f"expected {dtype}")
            if want < have:
                says = "Downcasting not allowed"
                raise refused("ValueError", says, tensor, into, f"expected {dtype}")
        return Filled({None: prod(into)}, silent)

    def _apart(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        """Qwen3.5's own: a tensor of several parts is split, then each is loaded as if alone."""
        assert isinstance(shard, tuple)
        numbers = [number for number in shard if isinstance(number, int)]
        if tensor.numel == 1:
            parts = [self._part(into, tensor, (1,), number) for number in numbers]
        else:
            sizes = [1 if self.role == "tensor" else self._rows(number) for number in numbers]
            if not tensor.shape or sum(sizes) != tensor.shape[0]:
                raise refused(
                    "RuntimeError", "split_with_sizes", tensor, into,
                    f"expected {sum(sizes)} rows, the parts {sizes}",
                )  # fmt: skip
            parts = [
                self._part(into, tensor, (size, *tensor.shape[1:]), number)
                for number, size in zip(numbers, sizes, strict=True)
            ]
        return joined(parts)

    def _rows(self, number: int) -> int:
        """Rows of a part in the folder, in units of the parameter's."""
        return -(-self.layout.outputs[number] // self.block)

    def _fused(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        """A tensor of several parts, or of all, offered to the linear's own loader."""
        count = len(self.layout.outputs)
        if self.role == "plain" and isinstance(shard, tuple):
            raise refused(
                "NotImplementedError", "Shard id with multiple indices is not supported", tensor,
                into, "the class takes these parts only in one tensor",
            )  # fmt: skip
        if self.role == "tensor":
            if tensor.numel != 1:
                raise refused("ValueError", "Expected scalar scale", tensor, into, "expected one")
            return Filled(dict.fromkeys(range(count), 1))
        if self.role == "base":
            asserted(into, tensor, tensor.shape)
            return Filled({None: prod(into)})
        numbers = range(count)
        sizes = [self._rows(number) for number in numbers]
        if isinstance(shard, tuple) and self.role != "block":
            chosen = [number for number in shard if isinstance(number, int)]
            numbers, sizes = range(len(chosen)), [self._rows(number) for number in chosen]
        names: Sequence[int | str] = ("q", "k", "v") if self.layout.kind == "qkv" else numbers
        if self.layout.kind == "qkv":
            sizes = [size // self.layout.replicas if i else size for i, size in enumerate(sizes)]
        start, parts = 0, []
        for name, whole in zip(names, sizes, strict=True):
            size = whole // self.packed
            shape = narrowed(tensor, tensor.shape, 0, start, size)
            parts.append(self._part(into, tensor, shape, name))
            start += size
        found = joined(parts)
        if found.silent is None and start < tensor.shape[0]:
            return Filled(found.parts, f"expected {start} rows, found {tensor.shape[0]}")
        return found

    def _part(self, into: Shape, tensor: TensorType, shape: Shape, shard: Shard) -> Filled:
        """One part of a fused projection."""
        number = "qkv".index(shard) if isinstance(shard, str) else shard
        assert isinstance(number, int)
        layout = self.layout
        if self.role == "tensor":
            if shape and shape[0] != 1:
                raise refused("AssertionError", "", tensor, into, "expected one scale")
            asserted((), tensor, shape[1:])
            return Filled({number: 1})
        if self.role == "base":
            asserted(into, tensor, shape)
            return Filled({None: prod(into)})
        offset, size = self.place(number)
        place = (*narrowed(tensor, into, 0, offset, size),)
        rank, silent = layout.rank, None
        if layout.kind == "qkv":
            rank = rank if number == 0 else rank // layout.replicas
            part = narrowed(tensor, shape, 0, rank * size, size)
        else:
            part = _padded(tensor, shape, 0, size)
        ranks = layout.tp if number == 0 or layout.kind != "qkv" else layout.tp // layout.replicas
        if shape[0] != size * ranks:
            silent = f"expected {size * ranks} rows, found {shape[0]}"
        asserted(place, tensor, part)
        return Filled({number: prod(place)}, silent)

    def place(self, number: int) -> tuple[int, int]:
        """Place of a part in the rank's parameter: first row and rows."""
        parts, outputs, tp = self.layout.parts, self.layout.outputs, self.layout.tp
        if self.role == "block" and self.layout.kind == "merged":
            offset = -(-sum(outputs[:number]) // self.block) // tp
            return offset, -(-outputs[number] // self.block) // tp
        offset, size = sum(parts[:number]), parts[number]
        if self.role == "block":
            return -(-offset // self.block), -(-size // self.block)
        return offset // self.packed, size // self.packed


def joined(parts: Sequence[Filled]) -> Filled:
    silent = next((part.silent for part in parts if part.silent), None)
    return Filled({key: size for part in parts for key, size in part.parts.items()}, silent)


def _padded(tensor: TensorType, shape: Shape, dim: int, size: int) -> Shape:
    """A rank's part; what lies beyond the tensor's end is filled with zeros."""
    if dim >= len(shape):
        raise refused("IndexError", "", tensor, shape, "too few dimensions")
    return (*shape[:dim], size, *shape[dim + 1 :])


def not_as_long(shape: Shape, dim: int, size: int, layout: Layout) -> str | None:
    """A tensor that is not as long as the parts of all ranks: cut or filled up with zeros."""
    if dim < len(shape) and shape[dim] != size * layout.tp:
        what = ("rows", "columns")[dim]
        return f"expected {size * layout.tp} {what}, found {shape[dim]}"
    return None


# What a parameter of the experts is: the weights, scales of groups or blocks, of rows, one per matrix,
# or a number of the whole expert.
ExpertRole = Literal["weight", "group", "channel", "tensor", "single"]


@dataclass(frozen=True, slots=True)
class Experts:
    """A parameter of all experts of a rank: [experts, ...]. `transposed`: the folder's matrices are
    transposed on loading (compressed-tensors' integers), `zeros` are not though their parameter is.
    `gated`: the first matrix is gate and up."""

    role: ExpertRole
    routed: int  # of all ranks
    fused: int  # shared experts in the last slots
    ep: int
    ep_rank: int
    tp: int
    transposed: bool = False
    zeros: bool = False
    modelopt: bool = False
    everywhere: bool = False
    gated: bool = True

    def local(self, expert: int) -> int | None:
        """The slot of an expert on this rank."""
        here = self.routed // self.ep
        start = self.ep_rank * here
        if self.everywhere:
            return expert
        if start <= expert < start + here:
            return expert - start
        if self.fused and expert >= self.routed:
            return expert - self.routed + here
        return None

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        assert isinstance(shard, tuple)
        expert, which = shard
        assert isinstance(expert, int)
        assert isinstance(which, str)
        slot = self.local(expert)
        assert slot is not None, "asked only for the rank's experts"
        if slot >= into[0]:
            raise refused("IndexError", "out of bounds", tensor, into, f"there is no expert {slot}")
        data = into[1:]
        shape = tensor.shape
        key, size = self.part(into, slot, which)
        if self.transposed and not self.zeros:
            if len(shape) > 2:
                raise refused("RuntimeError", "expects a tensor with", tensor, into, "not a matrix")
            shape = shape[::-1]
        if self.role == "single":
            broadcast(data, tensor, _assigned(shape))
            return Filled({key: size})
        if self.role == "tensor":
            broadcast(data[1:] if which != "w2" else data, tensor, _assigned(shape))
            return Filled({key: size})
        dim = int(which == "w2") ^ int(self.transposed)
        down = which == "w2"
        silent = (self._down if down else self._gate_or_up)(data, tensor, shape, dim)
        return Filled({key: size}, silent)

    def part(self, into: Shape, slot: int, which: str) -> tuple[object, int]:
        """Part that a matrix of an expert fills, and its elements: gate and up a half each."""
        whole = prod(into[1:])
        if self.role == "single" or which == "w2":
            return slot, whole
        return (slot, which), whole // (1 + self.gated)

    def _down(self, data: Shape, tensor: TensorType, shape: Shape, dim: int) -> str | None:
        if self.role == "channel":
            broadcast(data, tensor, shape)
            return None
        if self.modelopt and (len(data) != 2 or len(shape) != 2):
            raise refused("ValueError", "Expected 2D tensors", tensor, data, "not a matrix")
        part = self._share(tensor, shape, dim)
        silent = self._silent(shape, dim, data[dim])
        _copied(data, tensor, part, dim)
        return silent

    def _gate_or_up(self, data: Shape, tensor: TensorType, shape: Shape, dim: int) -> str | None:
        size = data[dim] // (1 + self.gated)
        part = self._share(tensor, shape, dim)
        place = (*data[:dim], size, *data[dim + 1 :])
        silent = self._silent(shape, dim, size)
        _copied(place, tensor, part, dim)
        return silent

    def _share(self, tensor: TensorType, shape: Shape, dim: int) -> Shape:
        if dim >= len(shape):
            raise refused("IndexError", "", tensor, shape, "too few dimensions")
        return (*shape[:dim], shape[dim] // self.tp, *shape[dim + 1 :])

    def _silent(self, shape: Shape, dim: int, size: int) -> str | None:
        if shape[dim] != size * self.tp:
            return f"expected {size * self.tp} along dimension {dim}, found {shape[dim]}"
        return None


def _assigned(shape: Shape) -> Shape:
    """A shape as an assignment to an index takes it: without the 1s before it."""
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _copied(place: Shape, tensor: TensorType, part: Shape, dim: int) -> None:
    """A copy into an expert's place, whose tail is zeroed where the part is shorter."""
    if len(part) == len(place) and part[dim] < place[dim]:
        place = (*place[:dim], part[dim], *place[dim + 1 :])
    broadcast(place, tensor, part)
