"""The parameters that each way of storing weights has, for a linear and for the experts of a layer, on
one rank: those that both runtimes create. What one of them creates otherwise is in a package of its own.

Read in `create_weights` of `layers/quantization/unquant.py`, `fp8.py`, `modelopt_quant.py` and, of
`compressed_tensors/schemes/`, `compressed_tensors_wNa16.py`, `_wNa16_moe.py`, `_w4a16_nvfp4.py`,
`_w4a16_nvfp4_moe.py`, `_w4a4_nvfp4.py`, `_w4a4_nvfp4_moe.py`, `_w8a8_fp8_moe.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from qconvert.core.dtypes import Shape, ceil_div
from qconvert.runtimes.loading.parameters import (
    ExpertRole,
    Experts,
    Layout,
    Linear,
    Parameter,
    Role,
    Wrapped,
)
from qconvert.runtimes.loading.setting import LoadRefused


@dataclass(frozen=True, slots=True)
class Moe:
    """The experts of a layer: `routed` of them and `fused` shared ones in slots behind, each of
    `inner` x `hidden`; `columns` of `inner` are one rank's, and `rows` those of its first matrix, of
    gate and up unless experts have no gate (`gated`)."""

    routed: int
    fused: int
    hidden: int
    inner: int
    ep: int
    ep_rank: int
    tp: int
    gated: bool = True
    rank: int = 0

    @property
    def slots(self) -> int:
        return self.routed // self.ep + self.fused

    @property
    def columns(self) -> int:
        return self.inner // self.tp

    @property
    def rows(self) -> int:
        return (1 + self.gated) * self.columns

    @property
    def matrices(self) -> tuple[tuple[str, int, int], ...]:
        """Beginnings of the names of each matrix, its rows and its columns on a rank."""
        return ("w13", self.rows, self.hidden), ("w2", self.hidden, self.columns)

    def parameter(
        self,
        dtype: str,
        shape: Shape,
        role: ExpertRole,
        *,
        transposed: bool = False,
        zeros: bool = False,
        modelopt: bool = False,
        everywhere: bool = False,
        needed: bool = True,
        default: bool = False,
    ) -> Parameter:
        slot = Experts(
            role, self.routed, self.fused, self.ep, self.ep_rank, self.tp, transposed, zeros, modelopt,
            everywhere, gated=self.gated,
        )  # fmt: skip
        return Parameter(dtype, shape, slot, needed, default)


Named = Iterator[tuple[str, Parameter]]


class Scheme(Protocol):
    """Stored form of a module's weights; `linear_name` and `experts_name` are the runtime's own
    names of what loads them."""

    @property
    def linear_name(self) -> str: ...
    @property
    def experts_name(self) -> str: ...
    def linear(self, layout: Layout, wrapped: Wrapped) -> Named: ...
    def experts(self, moe: Moe) -> Named: ...


def stacked(moe: Moe, *parts: tuple[str, str, int, ExpertRole]) -> Named:
    """Parts of both matrices of all experts, each by name, dtype, how many columns an element is of, and
    role."""
    for name, dtype, many, role in parts:
        for which, rows, columns in moe.matrices:
            yield f"{which}_{name}", moe.parameter(dtype, (moe.slots, rows, columns // many), role)


def linear_parameter(
    layout: Layout,
    role: Role,
    dtype: str,
    shape: Shape,
    *,
    block: int = 1,
    packed: int = 1,
    wrapped: Wrapped = "",
    needed: bool = True,
    transposed: bool = False,
) -> Parameter:
    slot = Linear(layout, role, block, packed, wrapped, transposed)
    return Parameter(dtype, shape, slot, needed)


@dataclass(frozen=True, slots=True)
class Unquantized:
    dtype: str = "BF16"
    linear_name: str = "UnquantizedLinearMethod"
    experts_name: str = "UnquantizedFusedMoEMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        shape = layout.rows, layout.columns
        yield "weight", linear_parameter(layout, "plain", self.dtype, shape, wrapped=wrapped)

    def experts(self, moe: Moe) -> Named:
        yield from stacked(moe, ("weight", self.dtype, 1, "weight"))


def check_columns(layout: Layout, block: int) -> None:
    """Raise LoadRefused where a rank's columns are not whole blocks."""
    if layout.kind == "row" and layout.tp > 1 and layout.columns % block:
        raise LoadRefused(
            "ValueError", f"Weight input_size_per_partition = {layout.columns} is not divisible "
            f"by weight quantization block_k = {block}", "",
            f"a rank's {layout.columns} columns cut blocks of {block}",
        )  # fmt: skip


def check_rows(parts: Iterable[int], block: int) -> None:
    """Raise LoadRefused where a rank's rows of a part are not whole blocks."""
    for part in parts:
        if part % block:
            raise LoadRefused(
                "ValueError", f"Weight output_partition_size = {part} is not divisible by "
                f"weight quantization block_n = {block}", "",
                f"a rank's {part} rows cut blocks of {block}",
            )  # fmt: skip


def _fp8_experts(moe: Moe, rows: int, columns: int, scale: str) -> Named:
    """FP8 in blocks of `rows` x `columns`; both loaders assert the same of a rank's share."""
    size = moe.columns
    for what, block, name in (
        ("output_size of gate's and up's weight", rows, "block_n"),
        ("input_size of down's weight", columns, "block_k"),
    ):
        if size % block and (name == "block_n" or moe.tp > 1):
            raise LoadRefused(
                "ValueError", f"The {what} = {size} is not divisible by weight quantization "
                f"{name} = {block}", "",
                f"a rank's {size} rows of an expert cut blocks of {block}",
            )  # fmt: skip
    slots, hidden = moe.slots, moe.hidden
    blocks = ceil_div(size, rows), ceil_div(hidden, columns)
    down = ceil_div(hidden, rows), ceil_div(size, columns)
    yield "w13_weight", moe.parameter("F8_E4M3", (slots, moe.rows, hidden), "weight")
    yield "w2_weight", moe.parameter("F8_E4M3", (slots, hidden, size), "weight")
    scales = slots, (1 + moe.gated) * blocks[0], blocks[1]
    yield f"w13_{scale}", moe.parameter("F32", scales, "group")
    yield f"w2_{scale}", moe.parameter("F32", (slots, *down), "group")


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """FP8 codes with a scale for each block. Blocks that a rank would cut are refused."""

    rows: int
    columns: int
    linear_name: str = "Fp8LinearMethod"
    experts_name: str = "Fp8MoEMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        check_columns(layout, self.columns)
        divided = layout.tp > 1 and layout.kind in ("column", "merged", "qkv")
        if divided or len(layout.outputs) > 1:
            check_rows(layout.parts, self.rows)
        shape = layout.rows, layout.columns
        scales = ceil_div(layout.rows, self.rows), ceil_div(layout.columns, self.columns)
        yield "weight", linear_parameter(layout, "matrix", "F8_E4M3", shape, wrapped=wrapped)
        scale = linear_parameter(layout, "block", "F32", scales, block=self.rows, wrapped=wrapped)
        yield "weight_scale_inv", scale

    def experts(self, moe: Moe) -> Named:
        yield from _fp8_experts(moe, self.rows, self.columns, "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class CompressedFp8:
    """compressed-tensors' FP8 in blocks. `known`: the config's target `Linear` states the
    block; parts of fused projections are placed by it."""

    rows: int
    columns: int
    known: bool
    linear_name: str = "CompressedTensorsLinearMethod[CompressedTensorsW8A8Fp8]"
    experts_name: str = "CompressedTensorsFusedMoEMethod[CompressedTensorsW8A8Fp8MoE]"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        check_columns(layout, self.columns)
        split = layout.tp > 1 and layout.kind in ("column", "merged", "qkv")
        check_rows(layout.parts if split else layout.parts[:-1], self.rows)
        shape = layout.rows, layout.columns
        scales = ceil_div(layout.rows, self.rows), ceil_div(layout.columns, self.columns)
        yield "weight", linear_parameter(layout, "matrix", "F8_E4M3", shape, wrapped=wrapped)
        block = self.rows if self.known else 0
        yield (
            "weight_scale",
            linear_parameter(layout, "block", "F32", scales, block=block, wrapped=wrapped),
        )

    def experts(self, moe: Moe) -> Named:
        yield from _fp8_experts(moe, self.rows, self.columns, "weight_scale")


@dataclass(frozen=True, slots=True)
class PerRow:
    """compressed-tensors' codes of 8 bits, FP8 or integers (`codes`), with a scale for each row."""

    codes: str
    linear_name: str
    experts_name: str

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        shape = layout.rows, layout.columns
        yield "weight", linear_parameter(layout, "matrix", self.codes, shape, wrapped=wrapped)
        yield (
            "weight_scale",
            linear_parameter(layout, "rows", "F32", (layout.rows, 1), wrapped=wrapped),
        )

    def experts(self, moe: Moe) -> Named:
        for which, rows, columns in moe.matrices:
            yield (
                f"{which}_weight",
                moe.parameter(self.codes, (moe.slots, rows, columns), "weight"),
            )
            yield f"{which}_weight_scale", moe.parameter("F32", (moe.slots, rows, 1), "channel")


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """compressed-tensors' W4A16 and W8A16: codes packed along rows, scales of groups (`group` columns)
    or of rows (-1)."""

    bits: int
    group: int
    symmetric: bool
    actorder: str | None
    triton: bool
    dtype: str = "BF16"
    linear_name: ClassVar[str] = "CompressedTensorsLinearMethod[CompressedTensorsWNA16]"

    @property
    def experts_name(self) -> str:
        own = "CompressedTensorsWNA16TritonMoE" if self.triton else "CompressedTensorsWNA16MoE"
        return f"CompressedTensorsFusedMoEMethod[{own}]"

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        grouped = self.group if self.group != -1 else layout.inputs
        row = layout.kind == "row" and layout.tp > 1
        # Scales that every rank repeats: of whole rows where ranks divide columns, and under actorder.
        repeated = (self.group == -1 and row) or self.actorder == "group"
        count = layout.inputs // grouped
        if not repeated:
            if layout.columns % grouped:
                raise LoadRefused(
                    "AssertionError", "", "",
                    f"a rank's {layout.columns} columns cut groups of {grouped}",
                )  # fmt: skip
            count = layout.columns // grouped
        codes = layout.rows, layout.columns // self.per_word
        role: Role = "rows" if repeated else "matrix"
        yield "weight_packed", linear_parameter(layout, "matrix", "I32", codes)
        scales = layout.rows, count
        yield "weight_scale", linear_parameter(layout, role, self.dtype, scales, wrapped=wrapped)
        yield "weight_shape", linear_parameter(layout, "base", "I64", (2,), needed=False)
        if not self.symmetric:
            zeros = layout.rows // self.per_word, count
            zero = linear_parameter(layout, role, "I32", zeros, packed=self.per_word)
            yield "weight_zero_point", zero

    def experts(self, moe: Moe) -> Named:
        slots, hidden, size, word = moe.slots, moe.hidden, moe.columns, self.per_word
        whole = self.actorder == "group" and self.group != -1
        columns = size * moe.tp if whole else size
        up, down = (1, 1) if self.group == -1 else (hidden // self.group, columns // self.group)
        kind: ExpertRole = "channel" if self.group == -1 else "group"
        # Room for gate and up, also where experts have no gate.
        shapes: dict[str, tuple[str, Shape, ExpertRole]] = {
            "w13_weight_packed": ("I32", (slots, hidden // word, 2 * size), "weight"),
            "w2_weight_packed": ("I32", (slots, size // word, hidden), "weight"),
            "w13_weight_scale": (self.dtype, (slots, up, 2 * size), kind),
            "w2_weight_scale": (self.dtype, (slots, down, hidden), kind),
        }
        for name, (dtype, shape, role) in shapes.items():
            yield name, moe.parameter(dtype, shape, role, transposed=True)
        for name in ("w2_weight_shape", "w13_weight_shape"):
            yield (
                name,
                moe.parameter(self.dtype, (slots, 2), "single", transposed=True, needed=False),
            )
        if not self.symmetric:
            for name, shape in {
                "w13_weight_zero_point": (slots, up, 2 * size // word),
                "w2_weight_zero_point": (slots, down, hidden // word),
            }.items():
                yield name, moe.parameter("I32", shape, kind, transposed=True, zeros=True)
        ordered = self.actorder == "group"
        for which, length in (("w13", hidden), ("w2", size)):
            for name, needed in (
                (f"{which}_weight_g_idx", ordered),
                (f"{which}_g_idx_sort_indices", False),
            ):
                # Gate's and up's are copied whole (FusedMoE._load_g_idx).
                index: ExpertRole = "single" if which == "w13" else "weight"
                shape = slots, length
                yield name, moe.parameter("I32", shape, index, transposed=True, needed=needed)


@dataclass(frozen=True, slots=True)
class PackedFp4:
    """compressed-tensors' NVFP4. With `inputs`, activations have scales too; without a GPU that computes
    in FP4 (`native`) they are read and not used."""

    inputs: bool
    native: bool
    dtype: str = "BF16"

    @property
    def linear_name(self) -> str:
        own = "CompressedTensorsW4A4Fp4" if self.native else "CompressedTensorsW4A16Fp4"
        return f"CompressedTensorsLinearMethod[{own}]"

    @property
    def experts_name(self) -> str:
        own = "CompressedTensorsW4A4Nvfp4MoE" if self.native else "CompressedTensorsW4A16Nvfp4MoE"
        return f"CompressedTensorsFusedMoEMethod[{own}]"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        parts = (len(layout.outputs),)
        codes, scales = layout.columns // 2, layout.columns // 16
        yield "weight_packed", linear_parameter(layout, "matrix", "U8", (layout.rows, codes))
        yield "weight_global_scale", linear_parameter(layout, "tensor", "F32", parts)
        scale = linear_parameter(
            layout, "matrix", "F8_E4M3", (layout.rows, scales), wrapped=wrapped
        )
        yield "weight_scale", scale
        if self.inputs:
            given = linear_parameter(layout, "tensor", "F32", parts, needed=self.native)
            yield "input_global_scale", given

    def experts(self, moe: Moe) -> Named:
        codes, scales = ("weight_packed", "U8", 2), ("weight_scale", "F8_E4M3", 16)
        yield from stacked(moe, (*codes, "weight"), (*scales, "group"))
        for what in ("weight", *(["input"] if self.inputs else [])):
            needed = what == "weight" or self.native
            for which, shape in (("w13", (moe.slots, 1 + moe.gated)), ("w2", (moe.slots,))):
                given = moe.parameter("F32", shape, "tensor", needed=needed)
                yield f"{which}_{what}_global_scale", given


@dataclass(frozen=True, slots=True)
class ModeloptFp4:
    """modelopt's NVFP4: two codes in a byte, scales of 16 columns, and one scale per matrix. `weights`:
    activations are not quantized. `swizzled`: a copy of the scales that the runtime makes itself."""

    weights: bool
    group: int
    swizzled: bool
    padded: int = 1
    experts_name: ClassVar[str] = "ModelOptNvFp4FusedMoEMethod"

    @property
    def linear_name(self) -> str:
        return "ModelOptNvFp4A16LinearMethod" if self.weights else "ModelOptFp4LinearMethod"

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        if layout.columns % 16:
            raise LoadRefused(
                "ValueError", "multiple of 16", "",
                f"a rank's {layout.columns} columns are no multiple of 16",
            )  # fmt: skip
        parts = (len(layout.outputs),)
        codes, scales = layout.columns // 2, layout.columns // self.group
        # The fused projections of linear attention are wrapped; this linear's NVFP4A16 form is not among
        # those that have the loader for parts, so it takes them as an unquantized one would.
        yield (
            "weight",
            linear_parameter(layout, "matrix", "U8", (layout.rows, codes), wrapped=wrapped),
        )
        yield (
            "input_scale",
            linear_parameter(
                layout, "tensor", "F32", parts, wrapped=wrapped, needed=not self.weights
            ),
        )
        yield "weight_scale_2", linear_parameter(layout, "tensor", "F32", parts)
        yield (
            "weight_scale",
            linear_parameter(layout, "matrix", "F8_E4M3", (layout.rows, scales), wrapped=wrapped),
        )

    def experts(self, moe: Moe) -> Named:
        slots, hidden = moe.slots, moe.hidden
        size = ceil_div(moe.columns, self.padded) * self.padded
        every = moe.routed + moe.fused
        shapes: dict[str, tuple[str, Shape]] = {
            "w13_weight": ("U8", (slots, moe.rows, hidden // 2)),
            "w2_weight": ("U8", (slots, hidden, size // 2)),
            "w13_weight_scale": ("F8_E4M3", (slots, moe.rows, hidden // self.group)),
            "w2_weight_scale": ("F8_E4M3", (slots, hidden, size // self.group)),
        }
        for name, (dtype, shape) in shapes.items():
            yield name, moe.parameter(dtype, shape, "weight", modelopt=True)
            if name.endswith("scale") and self.swizzled:
                which = name.partition("_")[0]
                whole = shape[0], -(-shape[1] // 128) * 128, -(-shape[2] // 4) * 4
                made = moe.parameter("F8_E4M3", whole, "weight", needed=False)
                yield f"{which}_blockscale_swizzled", made
        yield (
            "w13_weight_scale_2",
            moe.parameter("F32", (slots, 1 + moe.gated), "tensor", modelopt=True),
        )
        yield "w2_weight_scale_2", moe.parameter("F32", (slots,), "tensor", modelopt=True)
        for name, shape in (
            ("w13_input_scale", (every, 1 + moe.gated)),
            ("w2_input_scale", (every,)),
        ):
            # Numbers of 1 where the folder has none; a loaded one stands for gate and up.
            given = moe.parameter(
                "F32", shape, "single", modelopt=True, everywhere=True, needed=not self.weights
            )
            yield name, given


class Quantization(Protocol):
    """A quantized checkpoint's config. `name` is the runtime's name of the method, `cache`: attention
    has scales of its cache."""

    @property
    def name(self) -> str: ...
    @property
    def cache(self) -> bool: ...
    def linear(self, module: str, kind: str) -> Scheme: ...
    def experts(self, module: str) -> Scheme: ...
    def head(self, module: str) -> Scheme | None: ...


@dataclass(frozen=True)
class NoQuantization:
    """A config that states none. `routed`: the form of experts, if another."""

    plain: Unquantized
    name: str = ""
    cache: bool = False
    routed: Scheme | None = None

    def linear(self, module: str, kind: str) -> Scheme:
        return self.plain

    def experts(self, module: str) -> Scheme:
        return self.routed or self.plain

    def head(self, module: str) -> Scheme | None:
        return None
