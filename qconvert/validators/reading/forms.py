"""The stored form of each matrix of a checkpoint, and what a stored format is: its `Spec`, one file of
validators/formats each, or a module of another package (entry point `qconvert.formats`).

Read from the config and from shapes, for any quantization config a runtime takes, without sharing code
with the passes' reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, Any, Protocol

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.discovery import FORMATS, discover, held
from qconvert.core.dtypes import DTYPE_BITS, ceil_div
from qconvert.core.graph import Source
from qconvert.validators.reading.decode import floats

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Bools
    from qconvert.validation.findings import Finding
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Bytes, Floats
    from qconvert.validators.reading.matrices import Matrix


def words_of(codes: int, bits: int) -> int:
    """32-bit words of codes side by side."""
    return ceil_div(codes * bits, 32)


RAW = "raw"  # not numbers, or in an unsupported form: bytes
PACKAGE = "qconvert.validators.formats"


@dataclass(slots=True, unsafe_hash=True)
class Grid:
    """Scales [rows, columns] of a matrix, from element `first` of a tensor on: that of weight [r, c]
    is [r // block[0], c // block[1]]. `transposed`: they are stored as [columns, rows]. `global_scale`
    multiplies or divides all of them. `kind`: of the numbers, where the tensor's dtype does not say."""

    scale: Source
    first: int
    rows: int
    columns: int
    block: tuple[int, int]
    transposed: bool = False
    global_scale: GlobalScale | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class GlobalScale:
    """A matrix's global scale, F32 with one element."""

    scale: Source
    divisor: bool

    def unit(self, reader: Reads) -> float:
        """The factor of the block scales."""
        import numpy as np

        with np.errstate(all="ignore"):
            value = self.value(reader)
            return float(np.float64(1) / value) if self.divisor else float(value)

    def value(self, reader: Reads) -> np.float32:
        import numpy as np

        data = np.empty(1, "<f4")
        reader.read(self.scale, 0, data.view(np.uint8).data)
        return np.float32(data[0])

    def applied(self, reader: Reads, blocks: Floats) -> Floats:
        """Block scales times the global one, as consumers compute it: once, in float32."""
        import numpy as np

        value = self.value(reader)
        with np.errstate(all="ignore"):
            found: Floats = blocks / value if self.divisor else blocks * value
        return found


@dataclass(slots=True, unsafe_hash=True)
class Codes:
    """The parts of packed integers other than words and scales.

    `zeros` I32: zero points packed along the rows, [ceil(rows * bits / 32), groups], transposed
    [groups, rows * bits / 32], each stored minus `less`; None: all are the middle of the range, as
    those of `symmetric` ones have to be that are stored. `order` I32 [columns]: the group of each
    column; None: groups lie side by side. `signed`: codes are I8, not packed, and so are zero points
    [rows, groups]. `row_order`: words [columns, rows / 8] of a transposed matrix, zeros [groups, rows /
    8], and which of a word's eight rows each nibble is of, from the lowest on; `complement`: those
    nibbles are in two's complement."""

    bits: int
    symmetric: bool = True
    zeros: Source | None = None
    less: int = 0
    order: Source | None = None
    signed: bool = False
    row_order: tuple[int, ...] = ()
    complement: bool = False

    @property
    def word(self) -> int:
        """Codes that fill whole words."""
        return 32 // gcd(32, self.bits)


@dataclass(slots=True, unsafe_hash=True)
class Form:
    """A stored matrix [rows, columns] that begins at byte `at` of a tensor. `transposed`: it is stored
    as [columns, rows], packed integers as words [columns / word, rows]. `codes` is of those. `offset`:
    numbers in blocks that are added to the products of codes and scales. `halves`: rows of a head, whose
    two halves lie interleaved (0: rows are in order). `beside`: a second tensor, of which every other
    `unit` bytes are, from the second on. `steps`: the dtype to which each product and sum is rounded
    ("": float32). `numbers` reads rows whose scales are no grid."""

    format: str
    weight: Source
    at: int
    rows: int
    columns: int
    grid: Grid | None = None
    transposed: bool = False
    codes: Codes | None = None
    offset: Grid | None = None
    halves: int = 0
    beside: Source | None = None
    unit: int = 0
    steps: str = ""
    numbers: Numbers | None = None

    @property
    def encoding(self) -> Encoding:
        return encodings()[self.format]

    @property
    def is_scaled(self) -> bool:
        """Tell whether its numbers are codes times scales."""
        return self.grid is not None or self.numbers is not None or self.encoding.scaled

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row as it is read, without scales."""
        return int(self.columns * self.encoding.bits // 8)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of a row as it is stored: of codes that are taken apart, whole words."""
        apart = self.encoding.apart
        return 4 * words_of(self.columns, apart) if apart else self.row_nbytes

    def tensors(self) -> Iterator[str]:
        """Names of the tensors that it is read from, beside the codes'."""
        for grid in (self.grid, self.offset):
            if grid is not None:
                yield grid.scale.name
                if grid.global_scale is not None:
                    yield grid.global_scale.scale.name
        if self.beside is not None:
            yield self.beside.name
        for part in () if self.codes is None else (self.codes.zeros, self.codes.order):
            if part is not None:
                yield part.name
        if self.numbers is not None:
            yield from (source.name for source in self.numbers.parts)


class Numbers(Protocol):
    """Reader of a stored matrix whose codes belong to no grid of scales."""

    @property
    def parts(self) -> tuple[Source, ...]:
        """Tensors that it reads beside the codes."""

    def rows(self, reader: Reads, first: int, last: int) -> Floats:
        """Stored rows [first, last), float32 [rows, columns]."""


class Unread(Exception):
    """Why a weight's numbers cannot be read."""


# --- Formats -------------------------------------------------------------------------------------

Weights = Mapping[str, Any]
Shape = tuple[int, ...]
# Which weights [n, K] of rows [start, stop) are as near to the expected ones as rounding to nearest
# allows (None: all), and what is wrong with their scales otherwise.
Nearest = Callable[["Reads", "Matrix", int, int, "Floats", "Floats"], "tuple[Bools | None, str]"]


def _by_rows(data: Bytes, dtype: str) -> Floats:
    raise Unread("its forms have `numbers`")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Numbers for a format's codes: `floats` of their bytes [n] and the tensor's dtype, float32, in
    the order of the columns, where its forms have no `numbers`; a compiled `loop` that does the same to
    rows, with their scales. `largest` of the codes; `passes` that round to them; `nearest`: bounds of
    that. `exact_zero`: a code of 0 is 0 whatever its scale. `scaled`: their bytes hold the scales too,
    and their numbers are products. `apart`: bits of codes that are stored in strings of words, and read
    as a byte each."""

    name: str
    bits: int | Fraction
    floats: Callable[[Bytes, str], Floats] = _by_rows
    loop: str = ""
    largest: float = 0.0
    passes: tuple[str, ...] = ()
    nearest: Nearest | None = None
    exact_zero: bool = False
    scaled: bool = False
    apart: int = 0


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A stored format, as validators judge it.

    `name`: as findings call it. `applies` tells whether a checkpoint can have it at all. `dtypes` of its
    codes. `stored(checkpoint, name)` tells whether a
    tensor of these holds its codes; `read` makes their form, or those of a `stack`'s experts, and
    raises Unread; `by_rows`: its stacks hold rows in order, in families of transposed stacks too;
    `faults` are findings about the parts beside them, by headers alone. `shape`: of its codes, for a
    weight of a shape (-1: any size), None if that is not judged. `parts`: ends of the names of such
    parts, none of which is a matrix.
    Statements: `states(weights)` in compressed-tensors' words; its `formats`; `algorithms` of
    modelopt and what each says in those words; `methods` that store nothing else."""

    name: str
    dtypes: tuple[str, ...]
    stored: Callable[[Checkpoint, str], bool]
    read: Callable[[Checkpoint, str], Form]
    encodings: tuple[Encoding, ...]
    applies: Callable[[Checkpoint], bool] = lambda checkpoint: True
    faults: Callable[[Checkpoint, str], Iterator[Finding]] = lambda checkpoint, name: iter(())
    stack: Callable[[Checkpoint, str], Iterator[Form]] | None = None
    by_rows: bool = False
    shape: Callable[[Checkpoint, str, Shape], Shape | None] = lambda checkpoint, name, shape: None
    parts: tuple[str, ...] = ()
    states: Callable[[Weights], bool] = lambda weights: False
    formats: tuple[str, ...] = ()
    algorithms: Mapping[str, Weights] = field(default_factory=dict)
    methods: tuple[str, ...] = ()


_FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


@lru_cache(maxsize=1)
def specs() -> tuple[Spec, ...]:
    """All formats, qconvert's and other packages', in the order of their files' names."""
    modules = discover(PACKAGE, group=FORMATS)
    return tuple(held(modules, "SPEC"))


@lru_cache(maxsize=1)
def encodings() -> Mapping[str, Encoding]:
    """By name, floats and bytes among them."""
    plain = [
        Encoding(name=name, bits=DTYPE_BITS[dtype], floats=floats)
        for dtype, name in _FLOATS.items()
    ]
    coded = [encoding for spec in specs() for encoding in spec.encodings]
    raw = Encoding(name=RAW, bits=8, floats=floats)
    return {encoding.name: encoding for encoding in (raw, *plain, *coded)}


@lru_cache(maxsize=4)  # every rule asks, of a folder and of its source
def coded_weights(checkpoint: Checkpoint) -> Mapping[str, Spec]:
    """Every tensor that holds codes of a format, and which."""
    return dict(each_coded(checkpoint))


def each_coded(checkpoint: Checkpoint) -> Iterator[tuple[str, Spec]]:
    """Yield tensors that hold codes, each with its format, in the checkpoint's order."""
    by_dtype: dict[str, list[Spec]] = {}
    for spec in specs():
        for dtype in spec.dtypes if spec.applies(checkpoint) else ():
            by_dtype.setdefault(dtype, []).append(spec)
    for name, source in () if checkpoint.dtypes.isdisjoint(by_dtype) else checkpoint.items():
        for spec in by_dtype.get(source.type.dtype, ()):
            if spec.stored(checkpoint, name):
                yield name, spec
                break


def form_of(checkpoint: Checkpoint, name: str) -> Form:
    """A tensor that is not a stack of matrices, seen as [rows, columns]; a vector as a column.
    Raises Unread where its numbers cannot be told."""
    spec = coded_weights(checkpoint).get(name)
    if spec is not None:
        return spec.read(checkpoint, name)
    weight = checkpoint.sources[name]
    if name.endswith((".weight_packed", ".qweight")):
        raise Unread(f"packed as {weight.type}")
    encoding, shape = _FLOATS.get(weight.type.dtype), weight.type.shape
    if encoding is None:
        return raw(checkpoint, name)
    rows, columns = (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)
    return Form(encoding, weight, 0, rows, columns)


def raw(checkpoint: Checkpoint, name: str) -> Form:
    """A tensor as a column of bytes."""
    weight = checkpoint[name]
    return Form(RAW, weight, 0, weight.type.nbytes, 1)


def forms_of_stack(checkpoint: Checkpoint, name: str, *, transposed: bool) -> Iterator[Form]:
    """The matrix of each expert in a stack [E, rows, columns]; [E, columns, rows] if `transposed`.
    Raises Unread."""
    weight, spec = checkpoint[name], coded_weights(checkpoint).get(name)
    if spec is not None and spec.stack is not None and (not transposed or spec.by_rows):
        yield from spec.stack(checkpoint, name)
        return
    encoding = _FLOATS.get(weight.type.dtype)
    if encoding is None:
        raise Unread(f"a stack of {weight.type.dtype}")
    experts, rows, columns = weight.type.shape
    if transposed:
        rows, columns = columns, rows
    size = weight.type.nbytes // max(1, experts)
    for expert in range(experts):
        yield Form(encoding, weight, expert * size, rows, columns, None, transposed)
