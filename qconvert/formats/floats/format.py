"""Weights that are numbers: BF16, F16 and F32."""

from __future__ import annotations

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.formats.base import Format, Stored
from qconvert.ops.cast import ToBf16

DTYPES = ("BF16", "F16", "F32")


def plain(name: str, weight: Output) -> Stored:
    """A matrix of numbers. Raises PlanError for another dtype."""
    rows, columns = weight.type.shape
    if weight.type.dtype == "BF16":
        return Stored(None, (weight,), rows, columns)
    if weight.type.dtype in DTYPES:
        return Stored(ToBf16(), (weight,), rows, columns)
    raise PlanError(
        f"{name!r}: {weight.type.dtype} weights are not read here; BF16, F16, F32, FP8, INT8, NVFP4, "
        "MXFP4, and INT4 and INT8 of compressed-tensors, GPTQ or AutoAWQ are"
    )


FORMATS = (
    Format(
        name="bf16", title="BF16, F16, F32", parameters=("weight",), codes=DTYPES, cut=(1, 1), order=90,
        equals="torch",
    ),
)  # fmt: skip
