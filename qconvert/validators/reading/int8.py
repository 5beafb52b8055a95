"""INT8 as compressed-tensors 0.19 stores it (`int-quantized`, `compressors/naive_quantized/`): codes I8
[N, K] as `weight`, a scale a row. Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.graph import Source


def int8_scale(tensors: Mapping[str, Source], name: str) -> Source | None:
    """The scale of an INT8 weight; None for any other tensor."""
    if not name.endswith(".weight") or tensors[name].type.dtype != "I8":
        return None
    return tensors.get(f"{name}_scale")
