"""The parameters that each way of storing weights has in vLLM, on one rank; what it shares with sglang
is in `loading.schemes`.

Read in vLLM, `create_weights` of `layers/quantization/`: `fp8.py`, `auto_gptq.py`, `modelopt.py`,
`compressed_tensors/schemes/` and `compressed_tensors/compressed_tensors_moe/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import gcd, prod
from typing import ClassVar

from qconvert.core.dtypes import Shape, TensorType, ceil_div
from qconvert.runtimes.loading.parameters import (
    ExpertRole,
    Experts,
    Filled,
    Layout,
    Linear,
    Parameter,
    Role,
    Shard,
    Wrapped,
    asserted,
    broadcast,
    joined,
    narrowed,
    not_as_long,
    refused,
)
from qconvert.runtimes.loading.schemes import (
    BlockFp8,
    ModeloptFp4,
    Moe,
    Named,
    PackedFp4,
    PackedIntegers,
    Scheme,
    check_columns,
    check_rows,
    stacked,
)
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated

# Ways in which vLLM puts a tensor into a parameter, where it differs from what simulators share: a
# rank's part is never filled up with zeros, and scales of blocks that a rank cuts are cut in silence.
# Read in vLLM: `model_executor/parameter.py`, `layers/linear.py` (weight_loader_v2, which all linears
# use), `layers/fused_moe/routed_experts.py`.


@dataclass(frozen=True, slots=True)
class LinearPart(Linear):
    """A parameter of a linear. `across`: the dimension of columns."""

    across: int = 1

    def _row(self, into: Shape, tensor: TensorType) -> Filled:
        shape = tensor.shape or (1,)
        silent = None
        if self.role in ("plain", "matrix", "block"):
            size = into[self.across]
            silent = not_as_long(shape, self.across, size, self.layout)
            shape = narrowed(tensor, shape, self.across, self.layout.rank * size, size)
        asserted(into, tensor, shape)
        return Filled({None: prod(into)}, silent)

    def _column(self, into: Shape, dtype: str, tensor: TensorType) -> Filled:
        shape = tensor.shape
        if self.role in ("tensor", "base"):
            asserted(into, tensor, shape or (1,))
            return Filled({None: prod(into)})
        silent = not_as_long(shape, 0, into[0], self.layout)
        shape = narrowed(tensor, shape, 0, self.layout.rank * into[0], into[0])
        asserted(into, tensor, shape)
        return Filled({None: prod(into)}, silent)

    def _fused(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        """A tensor of several parts, or of all."""
        layout, every = self.layout, range(len(self.layout.outputs))
        chosen = [n for n in shard if isinstance(n, int)] if isinstance(shard, tuple) else [*every]
        if self.role == "tensor":
            return joined([self._part(into, tensor, tensor.shape, number) for number in chosen])
        if self.role == "base":
            asserted(into, tensor, tensor.shape)
            return Filled({None: prod(into)})
        # Shards of a tuple are numbered from 0 again, and fill the first parts.
        numbers: Sequence[int] = range(len(chosen))
        start, parts = 0, []
        for number, source in zip(numbers, chosen, strict=True):
            rows = layout.outputs[source]
            if layout.kind == "qkv" and number:
                rows //= layout.replicas
            size = -(-rows // self.block) if self.role == "block" else rows // self.packed
            shape = narrowed(tensor, tensor.shape, 0, start, size)
            parts.append(self._part(into, tensor, shape, number))
            start += size
        silent = next((part.silent for part in parts if part.silent), None)
        if tensor.shape[0] != start:
            silent = silent or f"expected {start} rows, found {tensor.shape[0]}"
        return Filled(joined(parts).parts, silent)

    def _part(self, into: Shape, tensor: TensorType, shape: Shape, shard: Shard) -> Filled:
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
        place = narrowed(tensor, into, 0, offset, size)
        shared = layout.kind == "qkv" and number > 0
        rank = layout.rank // layout.replicas if shared else layout.rank
        part = narrowed(tensor, shape, 0, rank * size, size)
        asserted(place, tensor, part)
        ranks = layout.tp // layout.replicas if shared else layout.tp
        return Filled({number: prod(place)}, self._silent(number, shape, size, ranks))

    def _silent(self, number: int, shape: Shape, size: int, ranks: int) -> str | None:
        parts = self.layout.parts
        if self.role == "block":
            start, rows = sum(parts[:number]), parts[number]
            if start % self.block or (ranks > 1 and rows % self.block):
                return f"a rank's {rows} rows cut blocks of {self.block}"
        if shape[0] != size * ranks:
            return f"expected {size * ranks} rows, found {shape[0]}"
        return None

    def place(self, number: int) -> tuple[int, int]:
        parts = self.layout.parts
        offset, size = sum(parts[:number]), parts[number]
        if self.role == "block":
            return -(-offset // self.block), -(-size // self.block)
        return offset // self.packed, size // self.packed


@dataclass(frozen=True, slots=True)
class ExpertPart(Experts):
    """A parameter of all experts of a rank. `finer`: how often a scale of a block is repeated along rows
    and columns, where ranks would cut the block; `exponents`: bytes of F8_E8M0 are taken as numbers."""

    finer: tuple[int, int] = (1, 1)
    exponents: bool = False

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        assert isinstance(shard, tuple)
        if len(tensor.shape) == 2 and self.finer != (1, 1):
            rows, columns = tensor.shape
            tensor = replace(tensor, shape=(rows * self.finer[0], columns * self.finer[1]))
        if self.role == "tensor":
            slot = self.local(int(shard[0]))
            assert slot is not None
            if tensor.numel != 1:
                raise refused(
                    "RuntimeError", "is invalid for input of size", tensor, into, "no number"
                )
            key, size = self.part(into, slot, str(shard[1]))
            return Filled({key: size})
        if self.role == "single":
            slot = self.local(int(shard[0]))
            assert slot is not None
            broadcast(into[1:], tensor, tensor.shape)
            key, size = self.part(into, slot, str(shard[1]))
            return Filled({key: size})
        return Experts.fill(self, into, dtype, tensor, shard)


_SMALLEST_BLOCK = 32
# Columns of a group of packed integers: humming-kernels 0.1.19 (schema/humming.py), the last kernel that
# vLLM asks for a linear, and that which takes the most sizes, refuses fewer.
_SMALLEST_GROUP = 16


@dataclass(frozen=True, slots=True)
class Fp8(BlockFp8):
    """FP8 in blocks. Parts of a fused projection may cut blocks, others may not; blocks of experts that
    ranks cut are taken for smaller ones. `scale`: the type of a linear's scales."""

    scale: str = "F32"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        check_columns(layout, self.columns)
        alone = len(layout.outputs) == 1 and layout.kind in ("column", "merged")
        if alone and layout.tp > 1:
            check_rows((layout.rows,), self.rows)
        shape = layout.rows, layout.columns
        scales = ceil_div(layout.rows, self.rows), ceil_div(layout.columns, self.columns)
        yield "weight", Parameter("F8_E4M3", shape, LinearPart(layout, "matrix"))
        slot = LinearPart(layout, "block", self.rows)
        yield "weight_scale_inv", Parameter(self.scale, scales, slot)

    def experts(self, moe: Moe) -> Named:
        size, rows, columns = moe.columns, self.rows, self.columns
        if size % rows or (moe.tp > 1 and size % columns):
            rows = columns = gcd(rows, columns, size, moe.hidden)
            if rows < _SMALLEST_BLOCK:
                raise NotSimulated(f"FP8 blocks of experts that a rank's {size} rows cut")
        finer = self.rows // rows, self.columns // columns
        for name, parameter in BlockFp8.experts(BlockFp8(rows, columns), moe):
            if name.endswith("_inv"):
                parameter.slot = expert_part(parameter, finer)
            yield name, parameter


@dataclass(frozen=True, slots=True)
class SharedFp8(Fp8):
    """FP8 in blocks of DeepSeek-V4's shared experts, which its class makes larger where ranks would not
    have as many blocks each (models/deepseek_v4/nvidia/model.py, DeepseekV4MLP)."""

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        for size in (layout.inputs,) if layout.kind == "row" else layout.outputs:
            if size % (self.rows * layout.tp):
                raise NotSimulated(f"shared experts of {size} rows, which its class pads")
        yield from Fp8.linear(self, layout, wrapped)


@dataclass(frozen=True, slots=True)
class WithExponents:
    """Experts of DeepSeek-V4's class, which hands their scales over as bytes where those are F8_E8M0
    (models/deepseek_v4/nvidia/model.py, load_weights)."""

    scheme: Scheme
    linear_name: str = ""

    @property
    def experts_name(self) -> str:
        return self.scheme.experts_name

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        return self.scheme.linear(layout, wrapped)

    def experts(self, moe: Moe) -> Named:
        for name, parameter in self.scheme.experts(moe):
            if "weight_scale" in name:
                parameter.slot = replace(expert_part(parameter), exponents=True)
            yield name, parameter


def expert_part(parameter: Parameter, finer: tuple[int, int] = (1, 1)) -> ExpertPart:
    """vLLM's way to put a tensor into a parameter of experts."""
    slot = parameter.slot
    if isinstance(slot, ExpertPart):
        return slot
    own = {one.name: getattr(slot, one.name) for one in fields(Experts)}
    return ExpertPart(**own, finer=finer)


@dataclass(frozen=True, slots=True)
class Integers(PackedIntegers):
    """compressed-tensors' W4A16 and W8A16; experts are laid out as in the folder."""

    experts_name: ClassVar[str] = "CompressedTensorsWNA16MoEMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        if 0 < self.group < _SMALLEST_GROUP and not (self.symmetric and self.dtype == "F16"):
            raise LoadRefused(
                "ValueError", "", "",
                f"no kernel takes groups of {self.group} columns, on any GPU: {_SMALLEST_GROUP} is the "
                "fewest, but for symmetric codes in a model of float16",
            )  # fmt: skip
        grouped = self.group if self.group != -1 else layout.inputs
        repeated = self.group == -1 and layout.kind == "row" and layout.tp > 1
        columns = layout.inputs if repeated else layout.columns
        if columns % grouped:
            raise LoadRefused(
                "ValueError", "group_size", "",
                f"a rank's {layout.columns} columns cut groups of {grouped}",
            )  # fmt: skip
        role: Role = "rows" if repeated else "matrix"
        word = self.per_word
        codes, scales = (
            (layout.rows, ceil_div(layout.columns, word)),
            (layout.rows, columns // grouped),
        )
        yield "weight_packed", Parameter("I32", codes, LinearPart(layout, "matrix"))
        yield "weight_scale", Parameter(self.dtype, scales, LinearPart(layout, role))
        yield "weight_shape", Parameter("I64", (2,), LinearPart(layout, "base"), needed=False)
        if not self.symmetric:
            zeros = ceil_div(layout.rows, word), columns // grouped
            slot = LinearPart(layout, role, packed=word)
            yield "weight_zero_point", Parameter("I32", zeros, slot)

    def experts(self, moe: Moe) -> Named:
        slots, hidden, size, word = moe.slots, moe.hidden, moe.columns, self.per_word
        if self.bits == 8 and not self.symmetric:
            raise LoadRefused(
                "NotImplementedError", "No WNA16 MoE backend supports", "",
                "no kernel takes experts of 8 bits with zero points, on any GPU",
            )  # fmt: skip
        if self.group == -1 and hidden % 128:
            raise LoadRefused(
                "AssertionError", "", "",
                "experts with a scale for each row have kernels for a hidden size that 128 divides, "
                f"not {hidden}, on any GPU",
            )  # fmt: skip
        if self.group != -1 and (hidden % self.group or size % self.group):
            raise LoadRefused(
                "ValueError", "CompressedTensors WNA16 MoE", "",
                f"a rank's {size} columns of an expert's down projection cut groups of {self.group}",
            )  # fmt: skip
        up, down = (1, 1) if self.group == -1 else (hidden // self.group, size // self.group)
        kind = "channel" if self.group == -1 else "group"
        shapes: dict[str, tuple[str, Shape]] = {
            "w13_weight_packed": ("I32", (slots, moe.rows, hidden // word)),
            "w2_weight_packed": ("I32", (slots, hidden, size // word)),
            "w13_weight_scale": (self.dtype, (slots, moe.rows, up)),
            "w2_weight_scale": (self.dtype, (slots, hidden, down)),
        }
        if not self.symmetric:
            shapes |= {
                "w13_weight_zero_point": ("I32", (slots, moe.rows // word, up)),
                "w2_weight_zero_point": ("I32", (slots, hidden // word, down)),
            }
        for name, (dtype, shape) in shapes.items():
            role = "weight" if name.endswith("packed") else kind
            yield name, moe.parameter(dtype, shape, role)  # type: ignore[arg-type]
        for name in ("w2_weight_shape", "w13_weight_shape"):
            yield name, moe.parameter(self.dtype, (slots, 2), "single", needed=False)


@dataclass(frozen=True, slots=True)
class Fp4(PackedFp4):
    """compressed-tensors' NVFP4; experts have scales of activations even where nobody reads them."""

    linear_name: ClassVar[str] = "CompressedTensorsLinearMethod[CompressedTensorsW4A4Fp4]"
    experts_name: ClassVar[str] = "CompressedTensorsW4A4Nvfp4MoEMethod"

    def experts(self, moe: Moe) -> Named:
        yield from PackedFp4.experts(PackedFp4(True, self.inputs), moe)


@dataclass(frozen=True, slots=True)
class Mx:
    """compressed-tensors' MXFP4, two codes in a byte, and MXFP8: exponents of 32 columns."""

    bits: int

    @property
    def linear_name(self) -> str:
        kind = "W4A4Mxfp4" if self.bits == 4 else "W8A8Mxfp8"
        return f"CompressedTensorsLinearMethod[CompressedTensors{kind}]"

    @property
    def experts_name(self) -> str:
        return f"CompressedTensors{'W4A4Mxfp4' if self.bits == 4 else 'W8A8Mxfp8'}MoEMethod"

    @property
    def _parts(self) -> tuple[tuple[str, str, int, ExpertRole], ...]:
        """Names, types, and how many columns an element stands for."""
        four = "weight_packed", "U8", 2
        codes = four if self.bits == 4 else ("weight", "F8_E4M3", 1)
        return (*codes, "weight"), ("weight_scale", "U8", 32, "group")

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        for name, dtype, many, _ in self._parts:
            shape = layout.rows, layout.columns // many
            yield name, Parameter(dtype, shape, LinearPart(layout, "matrix"))

    def experts(self, moe: Moe) -> Named:
        yield from stacked(moe, *self._parts)


@dataclass(frozen=True, slots=True)
class ModelFp4(ModeloptFp4):
    dtype: str = "BF16"
    linear_name: ClassVar[str] = "ModelOptLinearMethod"
    experts_name: ClassVar[str] = "ModelOptNvFp4FusedMoE"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        for name, parameter in ModeloptFp4.linear(self, layout, wrapped):
            if name == "input_scale" and self.weights:
                parameter.dtype = self.dtype  # made to be dropped, in the model's type
            yield name, parameter

    def experts(self, moe: Moe) -> Named:
        for name, parameter in ModeloptFp4.experts(self, moe):
            if name.endswith("input_scale"):
                shape: Shape = (
                    (moe.slots, 1 + moe.gated) if name.startswith("w13") else (moe.slots,)
                )
                role = "tensor"
                made = moe.parameter("F32", shape, role, needed=not self.weights)  # type: ignore[arg-type]
                yield name, made
            else:
                yield name, parameter


@dataclass(frozen=True, slots=True)
class ModelFp8:
    """modelopt's FP8 in blocks of 128 x 128 (FP8_PB_WO): scales in four dimensions."""

    linear_name: str = "ModelOptLinearMethod"
    experts_name: str = "Fp8MoEMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        if layout.columns % 128:
            raise LoadRefused(
                "ValueError", "FP8_PB_WO requires in divisible by 128", "",
                f"a rank's {layout.columns} columns cut blocks of 128",
            )  # fmt: skip
        shape = layout.rows, layout.columns
        yield "weight", Parameter("F8_E4M3", shape, LinearPart(layout, "matrix"))
        scales = ceil_div(layout.rows, 128), 1, layout.columns // 128, 1
        yield "weight_scale", Parameter("F32", scales, LinearPart(layout, "block", 128, across=2))

    def experts(self, moe: Moe) -> Named:
        return Fp8(128, 128).experts(moe)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ's packing: codes [K / 8, N], scales [groups, N], zero points of symmetric codes, too."""

    bits: int
    group: int
    dtype: str = "BF16"
    linear_name: str = "AutoGPTQLinearMethod"
    experts_name: str = "AutoGPTQMoEMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        word = 32 // self.bits
        grouped = self.group if self.group != -1 else layout.inputs
        repeated = self.group == -1 and layout.kind == "row" and layout.tp > 1
        groups = (layout.inputs if repeated else layout.columns) // grouped
        if not repeated and layout.columns % grouped:
            raise NotSimulated(f"groups of {grouped} that a rank's {layout.columns} columns cut")
        role: Role = "rows" if repeated else "matrix"

        def part(role: Role, packed: int = 1) -> LinearPart:
            return LinearPart(layout, role, packed=packed, transposed=True)

        yield "qweight", Parameter("I32", (layout.columns // word, layout.rows), part("matrix"))
        yield "scales", Parameter(self.dtype, (groups, layout.rows), part(role))
        yield "qzeros", Parameter("I32", (groups, layout.rows // word), part(role, word))

    def experts(self, moe: Moe) -> Named:
        slots, hidden, size, word = moe.slots, moe.hidden, moe.columns, 32 // self.bits
        fits = self.group in (-1, 32, 64, 128) and hidden % 128 == 0
        if not fits or (self.group != -1 and size % self.group):
            raise NotSimulated(f"GPTQ experts of {hidden} x {size} in groups of {self.group}")
        up, down = (1, 1) if self.group == -1 else (hidden // self.group, size // self.group)
        kind = "channel" if self.group == -1 else "group"
        for name, dtype, shape, role in (
            ("w13_qweight", "I32", (slots, hidden // word, moe.rows), "weight"),
            ("w2_qweight", "I32", (slots, size // word, hidden), "weight"),
            ("w13_scales", self.dtype, (slots, up, moe.rows), kind),
            ("w2_scales", self.dtype, (slots, down, hidden), kind),
            ("w13_qzeros", "I32", (slots, up, moe.rows // word), kind),
            ("w2_qzeros", "I32", (slots, down, hidden // word), kind),
        ):
            yield name, moe.parameter(dtype, shape, role, transposed=True, zeros=True)  # type: ignore[arg-type]
        # Dropped after the load where the folder has none.
        yield "w13_bias", moe.parameter(self.dtype, (slots, moe.rows), "weight", needed=False)
        yield "w2_bias", moe.parameter(self.dtype, (slots, hidden), "channel", needed=False)
