"""What each encoding of a stored weight calls its tensors: data that readers, passes and rules share.

How one is decoded: matrices/encodings/ and ops/. How one is made, with its config block and limits:
formats/. Validators decode with code of their own (validators/reading/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["compressed-tensors", "modelopt"]


@dataclass(frozen=True, slots=True)
class Nvfp4Names:
    """What a dialect of NVFP4 calls a matrix's tensors, and the shape of its scalars."""

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
# MXFP4: compressed-tensors', DeepSeek-V4's; gpt-oss's end the name of a stack.
MXFP4 = ("weight_packed", "weight_scale")
MXFP4_BESIDE = ("weight", "scale")
MXFP4_STACKED = ("_blocks", "_scales")

# Parameters that hold the codes of a module's weight, or the weight itself.
CODES = ("weight", "weight_packed", "qweight")
