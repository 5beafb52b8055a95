"""Integer schemes: how a matrix is cut into groups, its codes, and the packers. NVFP4's
calibrated codes go the same way.

Codes are counted as compressed-tensors counts them
(`quantization/lifecycle/forward_helpers.py`): signed, value = (code - zero) * scale, asymmetric
ones too. Packers turn that into what a format stores: formats/int_packed/packers.py (GPTQ's two
versions of zero points among it); ops/ reads it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal, Protocol

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.core.parameter_names import Dialect

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, Int32s


DEFAULT_GROUP = 128  # columns that share a scale where nobody asks for another number


def groups_in_row(columns: int, width: int) -> int:
    """Groups of `width` columns in a row. Raises PlanError where some columns are left over."""
    if width < 1 or columns % width:
        raise PlanError(f"expected columns in whole groups of {width}, found {columns}")
    return columns // width


# --- NVFP4 scheme of a matrix ---------------------------------------------------------------------


NVFP4_BLOCK = 16  # columns that share an E4M3 scale


@dataclass(frozen=True, slots=True)
class Nvfp4Scheme:
    """Of one matrix [N, K]: E2M1 codes, an E4M3 scale for each block of 16 columns, a float32 scale for
    the matrix, or for several that are served as one. The `dialect` says how the last is rounded."""

    dialect: Dialect

    def groups(self, columns: int) -> int:
        """Scales in a row. Raises PlanError if the columns are not whole blocks."""
        return groups_in_row(columns, NVFP4_BLOCK)


Bits = Literal[4, 8]  # of codes that are made here
READ_BITS = range(2, 9)  # of codes that are read
Actorder = Literal["static", "group"]
ScaleDtype = Literal["BF16", "F16", "F32"]
Signs = Literal["both", "positive"]  # of scales

WORD_BITS = 32  # codes are packed into I32 words by all formats here


def words(codes: int, bits: int) -> int:
    """32-bit words that a string of codes takes: they lie side by side from the lowest bit of the first
    word on, those of 3, 5, 6 and 7 bits across the ends of words, too."""
    return ceil_div(codes * bits, WORD_BITS)


def whole_words(bits: int) -> int:
    """The least number of codes that fill words: 8 of 4 bits, 4 of 8, 32 of 3."""
    return WORD_BITS // gcd(WORD_BITS, bits)


@dataclass(frozen=True, slots=True)
class IntScheme:
    """Integer scheme of one matrix [N, K].

    `group` columns share a scale; None: a whole row does. Asymmetric groups also have a zero point.
    `actorder` says in which order columns were quantized: None: as stored; "static" (also called
    "weight"): by importance, with groups as stored; "group": with groups of columns of similar
    importance, which needs `g_idx`. `narrow` codes leave out the smallest (-7 to 7), for consumers
    whose codes are symmetric. Raises PlanError for fields that contradict one another.
    """

    bits: int = 4
    group: int | None = DEFAULT_GROUP
    symmetric: bool = True
    actorder: Actorder | None = None
    scale_dtype: ScaleDtype = "BF16"
    narrow: bool = False

    def __post_init__(self) -> None:
        if self.bits not in READ_BITS:
            raise PlanError(f"expected codes of 2 to 8 bits, found {self.bits}")
        if self.group is not None and self.group < 1:
            raise PlanError(f"expected groups of one or more columns, found {self.group}")
        if self.group is None and self.actorder == "group":
            raise PlanError(
                "actorder group needs groups, but one scale a row is stated; set a group size"
            )

    @property
    def low(self) -> int:
        """The smallest code."""
        return -self.high if self.narrow else -self.high - 1

    @property
    def high(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def word(self) -> int:
        """Codes that fill whole words: those of one word, but for 3, 5, 6 and 7 bits."""
        return whole_words(self.bits)

    @property
    def gains_by_signs(self) -> bool:
        """Return whether scales below 0 are of use: they turn the range of codes around, -8 to 7, so
        that the end with one code more is where a group's largest weights are. Narrow codes are the same
        turned around, zero points move the range anyway, and of 256 codes one more is nothing."""
        return self.symmetric and self.bits == 4 and not self.narrow

    def width(self, columns: int) -> int:
        """Columns that share a scale in a matrix of `columns`."""
        return columns if self.group is None else self.group

    def groups(self, columns: int) -> int:
        """Scales in a row. Raises PlanError if the columns are not whole groups."""
        return groups_in_row(columns, self.width(columns))


@dataclass(frozen=True, eq=False)
class Codes:
    """One quantized matrix [N, K]: value = (code - zero) * scale, computed in float32.

    codes int8 [N, K], -8 to 7 or -128 to 127, asymmetric ones too; scale float32 [N, groups], each
    exactly a value of the scheme's scale_dtype; zero int8 [N, groups], None if symmetric (all
    0); g_idx int32 [K], the group of each column, None if groups are adjacent columns. Of NVFP4 codes
    are twice E2M1 numbers (-12 to 12), scales E4M3 numbers above 0, `global_scale` the float32 scale of
    the matrix.
    """

    codes: Int8s
    scale: Float32s
    zero: Int8s | None = None
    g_idx: Int32s | None = None
    global_scale: float | None = None


Scheme = IntScheme | Nvfp4Scheme


class CodePacker(Protocol):
    """Codes -> the tensors a format stores for a matrix. A frozen dataclass: its repr is its identity.

    `row_step` rows of the matrix must be packed together (0: all of them); what is packed of rows
    [start, stop) is rows of each result then, except where row_step is 0.
    """

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the results after the module's, in the order of `infer`."""

    @property
    def row_step(self) -> int: ...

    def scheme_of(self, columns: int) -> Scheme:
        """Return how a matrix with that many columns is to be quantized for it."""

    def loss(self, weight: TensorType) -> str | None:
        """Return what is lost, as one phrase."""

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        """Types of the results for a matrix of that shape [N, K]. Raises PlanError if the format
        cannot hold it."""

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        """Fill the results. numpy alone; nothing larger than a few MiB is allocated."""


class Packer(CodePacker, Protocol):
    """One of integers."""

    def scheme_of(self, columns: int) -> IntScheme: ...
