"""Packing of integer codes: compressed-tensors' pack-quantized, and the own forms of GPTQ and AutoAWQ.

Sources: compressed-tensors, `compressors/pack_quantized/` (words and zero points), llm-compressor,
`modeling/moe/linear_experts.py` (`weight_g_idx`); AutoGPTQ 0.7 and GPTQModel, which write and
read the form that sglang and vLLM load as `gptq` (qweight, qzeros, scales, g_idx).

Codes of 2 to 8 bits, each plus half its range, lie side by side in 32-bit words, the first in the
lowest bits. compressed-tensors packs codes along K and zero points along N; GPTQ keeps both transposed:
codes [K, N] packed along K, zero points [groups, N] packed along N. GPTQ's first version
(`checkpoint_format: gptq`) stores each zero point less one, so it has no room for zero; the second
(`gptq_v2`) stores it as it is.

Integer codes from one form to another: compressed-tensors', GPTQ's two and AutoAWQ's. Nothing is
rounded: codes, zero points and scales are the same numbers in other places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, aligned
from qconvert.core.int_scheme import Codes, IntScheme, Packer, words
from qconvert.core.parameter_names import AWQ, INT8, PACKED
from qconvert.formats.int_packed.decode import IntDecoder
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import TILE_ELEMENTS, round_to_bf16
from qconvert.ops.compiled import done
from qconvert.ops.ints import bit_string

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, UInt32s

Packing = Literal["compressed-tensors", "gptq", "gptq-v2", "awq"]

# The nibble of a word, counted from the lowest, that AutoAWQ has each of eight rows in.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
INT8_ROWS = IntScheme(bits=8, group=None)  # what runtimes compute with INT8 activations
# Codes packed at a time: the least, and the most of a quarter of a matrix. Those of a calibration are
# packed whole, and where threads launch a GPU's kernels beside, each of numpy's calls waits for Python's
# lock: of 65,536 codes a matrix of 768 x 2048 took 6 ms, for 0.4 alone.
_TILE, _LARGEST_TILE = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True)
class PackQuantized:
    """compressed-tensors' form: weight_packed I32 [N, K * bits / 32], weight_scale [N, groups],
    asymmetric weight_zero_point I32 [ceil(N * bits / 32), groups], actorder group weight_g_idx I32 [K].

    `weight_shape` I64 [2], which it has too, holds no data of the weight: who plans makes it.
    """

    scheme: IntScheme

    def scheme_of(self, columns: int) -> IntScheme:
        return self.scheme

    @property
    def suffixes(self) -> tuple[str, ...]:
        codes, scale, zero, g_idx, _ = PACKED
        lacks = {zero: self.scheme.symmetric, g_idx: self.scheme.actorder != "group"}
        return tuple(name for name in (codes, scale, zero, g_idx) if not lacks.get(name))

    @property
    def row_step(self) -> int:
        if self.scheme.actorder == "group":
            return 0
        return 1 if self.scheme.symmetric else self.scheme.word

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        rows, columns, groups = _cut(self.scheme, weight)
        bits = self.scheme.bits
        found = [
            TensorType("I32", (rows, words(columns, bits))),
            TensorType(self.scheme.scale_dtype, (rows, groups)),
        ]
        if not self.scheme.symmetric:
            found.append(TensorType("I32", (words(rows, bits), groups)))
        if self.scheme.actorder == "group":
            found.append(TensorType("I32", (columns,)))
        return tuple(found)

    def loss(self, weight: TensorType) -> str:
        return _loss(self.scheme, weight)

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        packed, scale, *more = outs
        lines = array(packed.data, np.uint32, packed.type.shape)
        for start, stop in _tiles(codes.codes):
            lines[start:stop] = along_rows(codes.codes[start:stop], self.scheme.bits)
        _put(codes.scale, scale)
        if not self.scheme.symmetric:
            zeros = array(more[0].data, np.uint32, more[0].type.shape)
            zeros[...] = _zero_words(codes, self.scheme, 0).T
        if self.scheme.actorder == "group":
            _put_g_idx(codes, self.scheme, more[-1])


@dataclass(frozen=True, slots=True)
class KeepInt8:
    """compressed-tensors' int-quantized form (0.19, `compressors/naive_quantized/`): weight I8 [N, K],
    weight_scale BF16 [N, 1]."""

    suffixes: ClassVar[tuple[str, ...]] = INT8[:2]
    row_step: ClassVar[int] = 1

    def scheme_of(self, columns: int) -> IntScheme:
        return INT8_ROWS

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        if len(weight.shape) != 2 or not weight.shape[1]:
            raise PlanError(f"expected a matrix to quantize, found {weight}")
        return TensorType("I8", weight.shape), TensorType("BF16", (weight.shape[0], 1))

    def loss(self, weight: TensorType) -> str:
        return _loss(INT8_ROWS, weight)

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        kept, scale = outs
        np.copyto(array(kept.data, np.int8, kept.type.shape), codes.codes)
        _put(codes.scale, scale)


@dataclass(frozen=True, slots=True)
class PackGptq:
    """GPTQ's form: qweight I32 [K * bits / 32, N], qzeros I32 [groups, N * bits / 32], scales [groups,
    N] and g_idx I32 [K]; `version` 1 or 2 says how zero points are stored.

    `pack` raises RowError for a zero point of 0 in version 1: it cannot be stored, and readers differ on
    what is stored instead.
    """

    scheme: IntScheme
    version: Literal[1, 2] = 1
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    row_step: ClassVar[int] = 0  # rows of the matrix are columns here

    def scheme_of(self, columns: int) -> IntScheme:
        return self.scheme

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        rows, columns, groups = _cut(self.scheme, weight)
        word, bits = self.scheme.word, self.scheme.bits
        if rows % word:
            raise PlanError(
                f"GPTQ packs {word} zero points of neighbouring rows into a word: expected rows in "
                f"whole words, found {rows} in {weight}"
            )
        return (
            TensorType("I32", (words(columns, bits), rows)),
            TensorType("I32", (groups, words(rows, bits))),
            TensorType(self.scheme.scale_dtype, (groups, rows)),
            TensorType("I32", (columns,)),
        )

    def loss(self, weight: TensorType) -> str:
        return _loss(self.scheme, weight)

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        qweight, qzeros, scales, *g_idx = outs
        lines = array(qweight.data, np.uint32, qweight.type.shape)
        for start, stop in _tiles(codes.codes):
            lines[:, start:stop] = along_rows(codes.codes[start:stop], self.scheme.bits).T
        zeros = array(qzeros.data, np.uint32, qzeros.type.shape)
        zeros[...] = _zero_words(codes, self.scheme, 1 if self.version == 1 else 0)
        _put(codes.scale.T, scales)
        for index in g_idx:
            _put_g_idx(codes, self.scheme, index)


@dataclass(frozen=True, slots=True)
class PackGptqWithoutIndex(PackGptq):
    """GPTQ's form without g_idx, for draft layers: loaders read it only where the config says desc_act,
    and vLLM's draft classes (`models/deepseek_mtp.py`, `models/glm4_moe_mtp.py`) fail with an
    expert's."""

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        return PackGptq.infer(self, weight)[:3]


@dataclass(frozen=True, slots=True)
class PackAwq:
    """AutoAWQ's form, version `gemm` (0.2, `modules/linear/gemm.py` `WQLinear_GEMM.from_linear`):
    qweight I32 [K, N / 8], scales [groups, N], qzeros I32 [groups, N / 8]; in a word, from the lowest
    nibble on, rows 0, 2, 4, 6, 1, 3, 5 and 7 of eight. Symmetric codes get zero points of 8."""

    scheme: IntScheme
    suffixes: ClassVar[tuple[str, ...]] = AWQ
    row_step: ClassVar[int] = 0  # rows of the matrix are columns here

    def __post_init__(self) -> None:
        """Raises PlanError for what the form has no place for."""
        if self.scheme.bits != 4 or self.scheme.actorder == "group":
            raise PlanError(
                "AutoAWQ's form holds codes of 4 bits in groups of neighbouring columns: take bits 4, "
                "and no actorder group"
            )

    def scheme_of(self, columns: int) -> IntScheme:
        return self.scheme

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        rows, columns, groups = _cut(self.scheme, weight)
        word = self.scheme.word
        if rows % word:
            raise PlanError(
                f"AutoAWQ's form packs codes of {word} neighbouring rows into a word: expected rows in "
                f"whole words, found {rows} in {weight}"
            )
        return (
            TensorType("I32", (columns, rows // word)),
            TensorType(self.scheme.scale_dtype, (groups, rows)),
            TensorType("I32", (groups, rows // word)),
        )

    def loss(self, weight: TensorType) -> str:
        return _loss(self.scheme, weight)

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        qweight, scales, qzeros = outs
        word = self.scheme.word
        lines = array(qweight.data, np.uint32, qweight.type.shape)
        for start, stop in _tiles(codes.codes, word):
            lines[:, start // word : stop // word] = _across_rows(codes.codes[start:stop])
        _put(codes.scale.T, scales)
        zero = np.zeros(codes.scale.shape, np.int8) if codes.zero is None else codes.zero
        array(qzeros.data, np.uint32, qzeros.type.shape)[...] = _across_rows(zero)


def _across_rows(codes: Int8s) -> UInt32s:
    """Signed codes of 4 bits [n, K], n in eights -> AutoAWQ's words [K, n / 8]."""
    import numpy as np

    stored = (codes.view(np.uint8) ^ np.uint8(0x08)) & np.uint8(0x0F)
    found = np.zeros((codes.shape[0] // len(AWQ_PLACES), codes.shape[1]), np.uint32)
    for row, place in enumerate(AWQ_PLACES):
        found |= stored[row :: len(AWQ_PLACES)].astype(np.uint32) << np.uint32(4 * place)
    return found.T


def packer(packing: Packing, scheme: IntScheme, *, draft: bool = False) -> Packer:
    """The packer of a form by its name, for a draft layer or another. Raises PlanError where it cannot
    hold the scheme."""
    if packing == "compressed-tensors":
        return PackQuantized(scheme)
    if packing == "awq":
        return PackAwq(scheme)
    kind = PackGptqWithoutIndex if draft and scheme.actorder != "group" else PackGptq
    return kind(scheme, 1 if packing == "gptq" else 2)


def along_rows(codes: Int8s, bits: int) -> UInt32s:
    """Signed codes [n, K], K in whole words -> words [n, K * bits / 32]. Adding half the range to a
    two's complement changes its highest bit alone."""
    import numpy as np

    bytes_ = np.ascontiguousarray(codes).view(np.uint8)
    if bits == 8:
        return (bytes_ ^ np.uint8(0x80)).view("<u4")
    if bits != 4:
        stored = (bytes_ ^ np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
        return bit_string(stored, bits).view("<u4")
    packed = np.empty((*bytes_.shape[:-1], bytes_.shape[-1] // 2), np.uint8)
    if done("ints_pack", bytes_, packed):
        return packed.view("<u4")
    pairs = bytes_.view("<u2") & np.uint16(0x0F0F)  # what is outside would spill into its neighbour
    np.bitwise_or(pairs, pairs >> np.uint16(4), out=pairs)
    return (pairs.astype(np.uint8) ^ np.uint8(0x88)).view("<u4")


def _tiles(codes: Int8s, word: int = 1) -> list[tuple[int, int]]:
    """Ranges of rows, in multiples of `word`."""
    rows, columns = codes.shape
    tile = max(_TILE, min(_LARGEST_TILE, codes.size // 4))
    step = max(1, tile // max(1, columns * word)) * word
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _zero_words(codes: Codes, scheme: IntScheme, less: int) -> UInt32s:
    """Zero points packed along N: [groups, ceil(N * bits / 32)]; what is beyond N is 0."""
    import numpy as np

    rows, groups = codes.scale.shape
    zero = np.zeros((rows, groups), np.int8) if codes.zero is None else codes.zero
    width = -(-rows // scheme.word) * scheme.word
    lowest = -(1 << (scheme.bits - 1))
    fields = np.full((groups, width), lowest, np.int8)
    fields[:, :rows] = zero.T
    if less:
        if int(fields[:, :rows].min(initial=0)) == lowest:
            row, group = np.argwhere(zero == lowest)[0]
            raise RowError(
                int(row),
                f"has a zero point of 0 in group {int(group)}, and GPTQ's first version stores zero "
                "points less one: take gptq-v2",
            )
        fields[:, :rows] -= np.int8(less)
    return along_rows(fields, scheme.bits)[:, : words(rows, scheme.bits)]


def _put(scale: Float32s, out: Buffer) -> None:
    """Scales, numbers of their dtype already, into their tensor."""
    import numpy as np

    if out.type.dtype == "F16":
        array(out.data, np.float16, out.type.shape)[...] = scale
    elif out.type.dtype == "F32":
        array(out.data, np.float32, out.type.shape)[...] = scale
    else:
        bits = np.array(scale, np.float32).view(np.int32)
        round_to_bf16(bits, np.empty_like(bits))
        np.copyto(array(out.data, np.uint16, out.type.shape), bits, casting="unsafe")


def _put_g_idx(codes: Codes, scheme: IntScheme, out: Buffer) -> None:
    import numpy as np

    columns = codes.codes.shape[1]
    target = array(out.data, np.int32, out.type.shape)
    if codes.g_idx is None:
        np.floor_divide(np.arange(columns), scheme.width(columns), out=target, casting="unsafe")
    else:
        target[...] = codes.g_idx


def _cut(scheme: IntScheme, weight: TensorType) -> tuple[int, int, int]:
    """Rows, columns and groups of a matrix. Raises PlanError where it is none, or is not whole groups
    and words."""
    if len(weight.shape) != 2:
        raise PlanError(f"expected a matrix to quantize, found {weight}")
    rows, columns = weight.shape
    if columns < 1 or columns % scheme.word:
        raise PlanError(f"expected columns in whole words of {scheme.word}, found {weight}")
    return rows, columns, scheme.groups(columns)


def _loss(scheme: IntScheme, weight: TensorType) -> str:
    name = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(weight.dtype, weight.dtype)
    where = "with a scale a row" if scheme.group is None else f"in groups of {scheme.group}"
    kind = "" if scheme.symmetric else "asymmetric "
    return f"rounds {name} to {kind}int{scheme.bits} {where}"


@dataclass(frozen=True, slots=True)
class RepackInts(Uncut, Exact):
    """The arguments of a decoder -> the results of a packer, for the same codes. The packer's scheme has
    the dtype of the scales.

    Raises PlanError as both do, and where they differ in bits or groups; RowError for a zero point that
    is none of a symmetric matrix, or that the packer cannot hold, and for a g_idx where the packer has
    no place for one.
    """

    stored: IntDecoder
    packer: Packer

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = self.stored.infer(*args)
        scheme = self.packer.scheme_of(weight.shape[1])
        bits, group = self.stored.scheme
        if (bits, group) != (scheme.bits, scheme.group):
            raise PlanError(
                f"expected {scheme.bits} bits in groups of {scheme.group}, found {bits} in groups of "
                f"{group}"
            )
        scale = args[self.stored.scale_at]
        if scale.dtype != scheme.scale_dtype:
            raise PlanError(f"expected scales in {scheme.scale_dtype}, found {scale}")
        return self.packer.infer(weight)

    def scratch(self, *args: TensorType) -> int:
        """The codes, one a byte, and scales and zero points by row."""
        (weight,) = self.stored.infer(*args)
        groups = self.packer.scheme_of(weight.shape[1]).groups(weight.shape[1])
        return aligned(weight.numel) + aligned(weight.shape[0] * groups) + TILE_ELEMENTS

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        (weight,) = self.stored.infer(*(one.type for one in ins))
        rows, columns = weight.shape
        scheme = self.packer.scheme_of(columns)
        groups = scheme.groups(columns)
        codes = array(scratch[: weight.numel], np.int8, (rows, columns))
        at = aligned(weight.numel)
        zero = array(scratch[at : at + rows * groups], np.int8, (rows, groups))
        zero[:] = 0
        scale, order = self.stored.integers(ins, codes, zero)
        if scheme.symmetric and zero.any():
            row, group = np.argwhere(zero)[0]
            middle = int(zero[row, group]) + (1 << (scheme.bits - 1))
            raise RowError(
                int(row),
                f"has a zero point of {middle} in group {int(group)}, and the config says symmetric",
            )
        if order is not None and scheme.actorder != "group":
            if not np.array_equal(order, np.arange(columns) // scheme.width(columns)):
                raise RowError(
                    0, "has columns of other groups by its g_idx than the config says (no desc_act)"
                )
            order = None
        self.packer.pack(Codes(codes, scale, None if scheme.symmetric else zero, order), outs)
        return {}
