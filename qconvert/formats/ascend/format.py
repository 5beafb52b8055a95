"""msmodelslim's checkpoints for Ascend NPUs: `quant_model_description.json` names the type of each
tensor, and config.json says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import ASCEND, Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.parameter_names import ASCEND as PARTS
from qconvert.formats.base import FolderTensors, Format, Read, stored, weights_of_method
from qconvert.plan.plan import Plan

if TYPE_CHECKING:
    from qconvert.formats.ascend.decode import Kind

# Types whose weights are (code - offset) * scale, one code a byte.
_OFFSET = ("W8A8_DYNAMIC", "W8A8_MIX", "W8A16", "W4A4_DYNAMIC")
_STATIC, _PACKED, _PLAIN = "W8A8", "W4A8_DYNAMIC", "FLOAT"
# The first version whose W4A8 has two rows in one and no second scales.
_VERSION = "1.0.0"


def description(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The type of each tensor by name, and a few settings; None in a folder without one."""
    found = (one.block for one in checkpoint.quantization_configs if one.method == ASCEND)
    return next(found, None)


def read(plan: Plan, module: str) -> Read | None:
    """A module whose weight the description gives a type of integers."""
    stated, codes = description(plan.checkpoint), f"{module}.{PARTS[0]}"
    weight = plan.tensors.get(codes)
    if stated is None or (weight is None and f"{module}.{PARTS[2]}" not in plan.tensors):
        return None
    kind = stated.get(codes)
    if weight is not None and weight.type.dtype != "I8" and kind in (None, _PLAIN):
        return None
    if kind not in (*_OFFSET, _STATIC, _PACKED):
        raise PlanError(
            f"{codes!r}: expected a type of integers in the description ({', '.join(_OFFSET)}, "
            f"{_STATIC}, {_PACKED}) for {weight and weight.type}, found {kind!r}"
        )
    if weight is None or weight.type.dtype != "I8":
        found = "none" if weight is None else weight.type
        raise PlanError(
            f"{codes!r}: expected codes in I8, as the description says {kind}, found {found}"
        )
    if kind == _PACKED and stated.get("version") != _VERSION:
        raise PlanError(
            f"{codes!r}: expected version {_VERSION} of the description for {kind}, found "
            f"{stated.get('version')!r}: before it codes had two scales; quantize anew with msmodelslim"
        )
    from qconvert.formats.ascend.decode import DequantAscend

    parts = (PARTS[0], "deq_scale", "input_scale") if kind == _STATIC else PARTS[:3]
    names = [f"{module}.{part}" for part in parts]
    form: Kind = "static" if kind == _STATIC else "packed" if kind == _PACKED else "offset"
    others = [f"{module}.{part}" for part in PARTS[1:4] if part not in parts]
    beside = [name for name in others if name in plan.tensors]
    return stored(plan, names, DequantAscend(form), _as_rows), (*names, *beside)


def _as_rows(output: Output) -> Output:
    """A scale a row as a column."""
    shape = output.type.shape
    return output.reshape((*shape, 1)) if len(shape) == 1 and shape[0] > 1 else output


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    stated = folder.once(description)
    kind = None if stated is None else stated.get(f"{module}.{parameter}")
    return f"msmodelslim {kind}" if parameter == PARTS[0] and kind not in (None, _PLAIN) else None


FORMAT = Format(
    name="msmodelslim", title="msmodelslim", parameters=PARTS, mark=PARTS[2],
    unmixed=weights_of_method(ASCEND, read),
    codes=("I8",), cut=(1, "group"), order=18,
    equals="msmodelslim 26.1 (q - offset) * scale", read=read, label=_label,
)  # fmt: skip
