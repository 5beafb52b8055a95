"""NVFP4 in either dialect.

Names and types say what is NVFP4: codes in U8, an E4M3 scale for each 16 columns, and a global scale in
F32 under its dialect's name. The config has nothing to add, since the format has one block size.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.checkpoint.prepared import QUANT_METHOD
from qconvert.core.encodings import NVFP4
from qconvert.core.errors import PlanError
from qconvert.core.versions import COMPRESSED_TENSORS, LLM_COMPRESSOR, MODELOPT, SGLANG
from qconvert.formats.base import Folder, Format, Read, stored
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> Read | None:
    """A module with a global scale."""
    for dialect, own in NVFP4.items():
        last = f"{module}.{own.global_scale}"
        if last not in plan.tensors:
            continue
        from qconvert.formats.nvfp4.decode import DequantNvfp4

        names = [f"{module}.{own.weight}", f"{module}.{own.scale}", last]
        for name in names:
            if name not in plan.tensors:
                raise PlanError(f"{name!r} is missing, and {last!r} says that {module!r} is NVFP4")
        return stored(plan, names, DequantNvfp4(dialect)), tuple(names)
    return None


def _label(folder: Folder, module: str, parameter: str) -> str | None:
    """A matrix with a global scale of either dialect."""
    if parameter not in ("weight", "weight_packed"):
        return None
    scales = (f"{module}.{names.global_scale}" for names in NVFP4.values())
    return "NVFP4" if any(scale in folder.tensors for scale in scales) else None


def _prepared_label(folder: Folder, module: str, parameter: str) -> str | None:
    """Experts of a layer in the order of trtllm-gen's kernels (contrib/trtllm_gen)."""
    block = folder.checkpoint.config.get("quantization_config")
    prepared = isinstance(block, Mapping) and block.get("quant_method") == QUANT_METHOD
    return "NVFP4 (trtllm-gen)" if prepared and module.endswith(".experts") else None


_EQUALS = {
    "compressed-tensors": (
        f"{COMPRESSED_TENSORS} NVFP4PackedCompressor, with {LLM_COMPRESSOR}'s observer"
    ),
    "modelopt": f"nvidia-{MODELOPT}",
}
FORMATS = tuple(
    Format(
        name="nvfp4" if dialect == "compressed-tensors" else f"nvfp4-{dialect}", title="NVFP4",
        parameters=(names.weight, names.scale, names.global_scale), mark=names.global_scale,
        codes=("U8",), cut=(1, 16), order=20, equals=_EQUALS[dialect], read=read, label=_label,
    )
    for dialect, names in NVFP4.items()
) + (
    Format(
        name="nvfp4-trtllm-gen", title="NVFP4 (trtllm-gen)", codes=("U8",), cut=(0, 0), order=20,
        parameters=("w13_weight", "w2_weight", "w13_weight_packed", "w2_weight_packed"),
        equals=f"flashinfer, as {SGLANG} calls it", label=_prepared_label,
    ),
)  # fmt: skip
