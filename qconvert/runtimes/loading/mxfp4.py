"""Experts of quant_method mxfp4, as gpt-oss publishes them: all of a layer in one tensor, blocks of 32
codes and a scale for each, which both runtimes cut by blocks and pad for their kernels; or in BF16.

Read in sglang: `layers/quantization/mxfp4.py`, `models/gpt_oss.py` (_load_mxfp4_experts_weights); in
vLLM: `layers/quantization/mxfp4.py`, `layers/fused_moe/oracle/mxfp4.py`, `models/gpt_oss.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qconvert.core.dtypes import Shape, TensorType, ceil_div
from qconvert.runtimes.loading.parameters import Filled, Layout, Parameter, Shard, Wrapped, refused
from qconvert.runtimes.loading.schemes import Moe, Named, Scheme, Unquantized
from qconvert.runtimes.loading.setting import NotSimulated

# Codes of a block that share a scale, and rows to which the kernels of capability 9.0 pad.
_BLOCK, _TILE = 32, 64
# What a published tensor's name adds to that of a stack, and the parameter that it is for.
PARAMETERS = {"_blocks": "weight", "_scales": "weight_scale", "_bias": "bias"}


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter of all experts of a layer: `stored` is the tensor's shape, of which a rank has a
    `share`; what its padding holds is right as it was made."""

    stored: Shape
    share: float

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        if tensor.shape != self.stored:
            raise refused(
                "RuntimeError", "", tensor, into,
                f"expected {list(self.stored)}, of which a rank takes its share",
            )  # fmt: skip
        return Filled({None: round(self.share * prod(into))})


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 codes with a bias; `bias`: what the runtime calls it; `once`: that of the second matrix is
    the first rank's alone, and 0 in others."""

    experts_name: str
    bias: str
    once: bool = False
    linear_name: str = ""

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        raise NotSimulated("a linear in MXFP4 under quant_method mxfp4")

    def experts(self, moe: Moe) -> Named:
        if moe.ep > 1 or not moe.gated or moe.inner % _BLOCK or moe.hidden % _TILE:
            raise NotSimulated("experts of quant_method mxfp4 of other sizes than gpt-oss has")
        blocks = moe.inner // _BLOCK
        each = ceil_div(blocks, moe.tp) * _BLOCK
        here = max(0, min(each, moe.inner - moe.rank * each))
        held = ceil_div(moe.columns, _TILE) * _TILE
        share = here / held
        slots, hidden = moe.slots, moe.hidden
        for which, rows, stored, columns, whole in (
            ("w13", 2 * held, 2 * moe.inner, hidden, hidden),
            ("w2", hidden, hidden, held, moe.inner),
        ):
            for name, dtype, last, of in (
                ("weight", "U8", columns // 2, (whole // _BLOCK, _BLOCK // 2)),
                ("weight_scale", "U8", columns // _BLOCK, (whole // _BLOCK,)),
            ):
                slot = Stack((slots, stored, *of), share)
                yield f"{which}_{name}", Parameter(dtype, (slots, rows, last), slot, padded=share)
            part = share if which == "w13" else 1.0
            slot = Stack((slots, stored), part)
            zeros = self.once and which == "w2" and moe.rank > 0
            made = Parameter("BF16", (slots, rows), slot, default=zeros, padded=part)
            yield f"{which}_{self.bias}", made


@dataclass(frozen=True, slots=True)
class Unquantized16:
    """gpt-oss's experts in BF16, for sglang's kernels of Triton (`layers/quantization/unquant.py`,
    use_triton_kernels): stacks as they are published, each matrix transposed."""

    plain: Unquantized
    linear_name: str = ""

    @property
    def experts_name(self) -> str:
        return self.plain.experts_name

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        return self.plain.linear(layout, wrapped)

    def experts(self, moe: Moe) -> Named:
        slots, hidden = moe.slots, moe.hidden
        up, down = (slots, hidden, 2 * moe.inner), (slots, moe.inner, hidden)
        here = (slots, hidden, moe.rows), (slots, moe.columns, hidden)
        dtype = self.plain.dtype
        yield "w13_weight", Parameter(dtype, here[0], Stack(up, 1.0))
        yield "w2_weight", Parameter(dtype, here[1], Stack(down, 1.0))


@dataclass(frozen=True, slots=True)
class Matrices:
    """MXFP4 experts whose matrices are stored apart, in sglang's method or in vLLM's: `bias` is what it
    calls one that no checkpoint has, "" where it makes none; `tiles`: numbers of columns of a rank, and
    of the model, whose multiples its kernel takes as they are."""

    bias: str = ""
    tiles: tuple[int, int] = (_TILE, _TILE)
    experts_name: str = "Mxfp4MoEMethod"
    linear_name: str = ""

    def linear(self, layout: Layout, wrapped: Wrapped) -> Named:
        raise NotSimulated("a linear in MXFP4 under quant_method mxfp4")

    def experts(self, moe: Moe) -> Named:
        if not moe.gated or moe.columns % self.tiles[0] or moe.hidden % self.tiles[1]:
            raise NotSimulated("experts in MXFP4 of sizes that are padded")
        slots = moe.slots
        for which, rows, columns in moe.matrices:
            yield f"{which}_weight", moe.parameter("U8", (slots, rows, columns // 2), "weight")
            scales = slots, rows, columns // _BLOCK
            yield f"{which}_weight_scale", moe.parameter("U8", scales, "group")
            if self.bias:
                bias = moe.parameter("BF16", (slots, rows), "channel")
                yield f"{which}_{self.bias}", bias


@dataclass(frozen=True)
class Mxfp4Experts:
    """quant_method mxfp4: experts alone."""

    scheme: Mxfp4
    plain: Unquantized
    name: str = "mxfp4"
    cache: bool = False

    def linear(self, module: str, kind: str) -> Scheme:
        return self.plain

    def experts(self, module: str) -> Scheme:
        return self.scheme

    def head(self, module: str) -> Scheme | None:
        return None
