"""Names of the tensors that stored weights have in each format (qconvert/formats)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["compressed-tensors", "modelopt"]


@dataclass(frozen=True, slots=True)
class Nvfp4Names:
    """Names that a dialect of NVFP4 has for a matrix's tensors, and the shape of its scalars."""

    weight: str
    scale: str
    global_scale: str
    input: str
    scalar: tuple[int, ...]


NVFP4: Mapping[Dialect, Nvfp4Names] = {
    "compressed-tensors": Nvfp4Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", (1,)
    ),
    "modelopt": Nvfp4Names("weight", "weight_scale", "weight_scale_2", "input_scale", ()),
}

# Suffixes of a module's name. compressed-tensors' packed integers: the last three are of asymmetric
# ones, of actorder group, and a shape that repeats that of the codes.
PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
# compressed-tensors' int-quantized; the last is of asymmetric ones.
INT8 = ("weight", "weight_scale", "weight_zero_point")
# GPTQ's own form, and AutoAWQ's.
GPTQ = ("qweight", "qzeros", "scales", "g_idx")
AWQ = ("qweight", "scales", "qzeros")
# msmodelslim's: codes, scale and offset; of static W8A8 a scale that is of the inputs too; the rest
# follows from these, or is of the inputs.
ASCEND = (
    "weight", "weight_scale", "weight_offset", "deq_scale", "input_scale", "input_offset", "quant_bias",
    "scale_bias",
)  # fmt: skip
# bitsandbytes' of 4 bits: codes, largest numbers of blocks, tables, a JSON; and of 8.
BNB4 = (
    "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4",
)  # fmt: skip
BNB8 = ("weight", "SCB", "weight_format")
# MLX's; the last is of affine ones.
MLX = ("weight", "scales", "biases")
# MXFP4: compressed-tensors', Quark's and modelopt's, DeepSeek-V4's; gpt-oss's end the name of a stack.
MXFP4 = ("weight_packed", "weight_scale")
MXFP4_PLAIN = ("weight", "weight_scale")
MXFP4_BESIDE = ("weight", "scale")
MXFP4_STACKED = ("_blocks", "_scales")

# MXFP8 and MXFP4 as compressed-tensors writes them.
MX: Mapping[Literal["mxfp4", "mxfp8"], tuple[str, str]] = {
    "mxfp4": MXFP4, "mxfp8": ("weight", "weight_scale"),
}  # fmt: skip
# FP8 of DeepSeek and Qwen (a multiplier despite its name), and of compressed-tensors and modelopt.
FP8: Mapping[Literal["fp8", "compressed-tensors"], tuple[str, str]] = {
    "fp8": ("weight", "weight_scale_inv"), "compressed-tensors": ("weight", "weight_scale"),
}  # fmt: skip
