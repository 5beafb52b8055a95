"""Encodings of stored weights: the names of its tensors, where it is decoded, made and
stated in a config, in what units its rows and columns may be cut, and whose bytes it equals.

Names are data that readers, passes and rules share. Decoders and encoders are named, not imported: they
stand on this. Validators decode with code of their own (validators/reading/).
"""

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
# MXFP4: compressed-tensors', DeepSeek-V4's; gpt-oss's end the name of a stack.
MXFP4 = ("weight_packed", "weight_scale")
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

# Parameters that hold the codes of a module's weight, or the weight itself.
CODES = ("weight", "weight_packed", "qweight")


@dataclass(frozen=True, slots=True)
class Encoding:
    """One encoding. `decoder` (matrices/), `encoder` and `config` (formats/) are modules below qconvert,
    `config` with its function; "" where it is only read, or only written. `cut`: rows and columns that
    belong together, as they are or (0) all of them. `equals`: whose bytes, project and version."""

    name: str
    parameters: tuple[str, ...]
    decoder: str
    encoder: str
    config: str
    cut: tuple[int | str, int | str]
    equals: str


_CT, _PTQ = "compressed-tensors 0.19", "llm-compressor 0.14 model_free_ptq"
_NVFP4_CT, _NVFP4_MODELOPT = (
    (names.weight, names.scale, names.global_scale) for names in NVFP4.values()
)
ENCODINGS: tuple[Encoding, ...] = (
    Encoding("fp8 block", FP8["fp8"], "matrices.encodings.fp8", "formats.fp8.encode",
             "formats.fp8.config.fp8_config", ("block", "block"), "DeepSeek-V3 inference/kernel.py"),
    Encoding("fp8 block, compressed-tensors", FP8["compressed-tensors"], "matrices.encodings.fp8",
             "formats.fp8.encode", "formats.fp8.config.fp8_group_config", ("block", "block"),
             f"{_PTQ} FP8_BLOCK"),
    Encoding("fp8 rows", FP8["compressed-tensors"], "matrices.encodings.fp8", "formats.fp8.encode",
             "formats.fp8.config.fp8_group_config", (1, 0), f"{_PTQ} FP8_DYNAMIC"),
    Encoding("fp8 tensor", FP8["compressed-tensors"], "matrices.encodings.fp8", "formats.fp8.tensor",
             "formats.fp8.config.fp8_tensor_group_config", (0, 0), f"{_PTQ} FP8"),
    Encoding("int8", INT8[:2], "matrices.encodings.int8", "formats.int_packed.packers",
             "formats.int_packed.config.int8_group_config", (1, 0), f"{_PTQ} INT8"),
    Encoding("packed int4 and int8", PACKED, "matrices.encodings.packed", "formats.int_packed.packers",
             "formats.int_packed.config.group_config", (1, "group"), f"{_PTQ} W4A16, W8A16"),
    Encoding("gptq", GPTQ, "matrices.encodings.gptq", "formats.int_packed.packers",
             "formats.int_packed.config.gptq_config", ("word", "group"), "AutoGPTQ 0.7, GPTQModel"),
    Encoding("awq", AWQ, "matrices.encodings.awq", "", "", ("word", "group"),
             f"{_CT} AutoAWQConverter"),
    Encoding("nvfp4, compressed-tensors", _NVFP4_CT, "matrices.encodings.nvfp4", "formats.nvfp4.encode",
             "formats.nvfp4.config.group_config", (1, 16),
             f"{_CT} NVFP4PackedCompressor, with llm-compressor 0.14's observer"),
    Encoding("nvfp4, modelopt", _NVFP4_MODELOPT, "matrices.encodings.nvfp4", "formats.nvfp4.encode",
             "formats.nvfp4.config.modelopt_config", (1, 16), "nvidia-modelopt 0.47"),
    Encoding("mxfp4", MX["mxfp4"], "matrices.encodings.mxfp4", "formats.mx.encode",
             "formats.mx.config.mx_group_config", (1, 32), f"{_PTQ} MXFP4A16"),
    Encoding("mxfp4 of DeepSeek-V4", MXFP4_BESIDE, "matrices.encodings.mxfp4", "", "", (1, 32),
             "DeepSeek-V4 inference/convert.py"),
    Encoding("mxfp4 of gpt-oss", MXFP4_STACKED, "matrices.encodings.mxfp4", "", "", (1, 32),
             "transformers 5.17 integrations/mxfp4.py"),
    Encoding("mxfp8", MX["mxfp8"], "matrices.encodings.fp8", "formats.mx.encode",
             "formats.mx.config.mx_group_config", (1, 32), f"{_PTQ} MXFP8"),
    Encoding("bf16, f16, f32", ("weight",), "matrices.encodings.plain", "formats.floats.decode", "",
             (1, 1), "torch"),
)  # fmt: skip
