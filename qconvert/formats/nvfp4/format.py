"""NVFP4 in either dialect.

Names and types say what is NVFP4: codes in U8, an E4M3 scale for each 16 columns, and a global scale in
F32 under its dialect's name. The config has nothing to add, since the format has one block size.
"""

from __future__ import annotations

from qconvert.core.encodings import NVFP4
from qconvert.core.errors import PlanError
from qconvert.formats.base import Format, Read, stored
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> Read | None:
    """A module with a global scale."""
    for dialect, own in NVFP4.items():
        last = f"{module}.{own.global_scale}"
        if last not in plan.tensors:
            continue
        from qconvert.ops.fp4 import DequantNvfp4

        names = [f"{module}.{own.weight}", f"{module}.{own.scale}", last]
        for name in names:
            if name not in plan.tensors:
                raise PlanError(f"{name!r} is missing, and {last!r} says that {module!r} is NVFP4")
        return stored(plan, names, DequantNvfp4(dialect)), tuple(names)
    return None


_EQUALS = {
    "compressed-tensors": (
        "compressed-tensors 0.19 NVFP4PackedCompressor, with llm-compressor 0.14's observer"
    ),
    "modelopt": "nvidia-modelopt 0.47",
}
FORMATS = tuple(
    Format(
        name="nvfp4" if dialect == "compressed-tensors" else f"nvfp4-{dialect}", title="NVFP4",
        parameters=(names.weight, names.scale, names.global_scale), mark=names.global_scale,
        cut=(1, 16), order=20, equals=_EQUALS[dialect], read=read,
    )
    for dialect, names in NVFP4.items()
)  # fmt: skip
