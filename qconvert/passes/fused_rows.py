"""Moving the rows of a linear layer together with everything that belongs to rows.

A module's `weight` has rows; so have its `bias`, its scales of rows and of groups of columns
(compressed-tensors' INT4 and INT8, NVFP4 and MXFP4 pack codes along columns), and, in units of a block,
its block scales; zero points are packed along rows, in words of 8 or 4. A scale of the whole tensor (a
global scale, one of activations) belongs to all rows, so modules with different ones cannot become one
without a choice, and GPTQ and AutoAWQ hold rows on another axis. What cannot follow is refused, with the
way out named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qconvert.core.dtypes import FP8_DTYPES
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Value
from qconvert.core.names import ACTIVATIONS, parameters
from qconvert.core.row_order import RowOrder

Params = Mapping[str, Output]

_ROWWISE = ("weight", "bias", "weight_packed")
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALARS = ("weight_scale_2", "weight_global_scale", *ACTIVATIONS)
_ZERO = "weight_zero_point"
# Repeats the size of a packed matrix, which no row has a part in: it is made anew for a module.
SHAPE = "weight_shape"
_OTHER_AXIS = ("qweight", "qzeros", "scales", "g_idx")

Block = tuple[int, int] | None


def params_of(tensors: Mapping[str, Output], module: str) -> dict[str, Output]:
    """A module's parameters by name, less SHAPE. Raises PlanError for GPTQ's and AutoAWQ's forms, whose
    rows lie on another axis, and for columns in an order of their own."""
    found = {p: tensors[f"{module}.{p}"] for p in parameters() if f"{module}.{p}" in tensors}
    for parameter in _OTHER_AXIS:
        if parameter in found:
            raise PlanError(
                f"{module}.{parameter}: a packed weight of GPTQ or AutoAWQ holds its rows on another "
                "axis and cannot be fused or split; `relabel --to compressed-tensors` first, or start "
                "from the bf16 or FP8 release"
            )
    if "weight_g_idx" in found:
        raise PlanError(
            f"{module}.weight_g_idx: the columns of each part are in an order of its own (actorder "
            "group), and a fused weight has but one; dequantize first, or quantize without it"
        )
    found.pop(SHAPE, None)
    return found


def split_module(
    module: str, params: Params, layout: RowOrder, block: Block
) -> list[dict[str, Output]]:
    """Take a module apart into one set of parameters a segment."""
    sets: list[dict[str, Output]] = [{} for _ in layout.segments]
    for parameter, output in params.items():
        rows = _layout_of(module, parameter, params, layout, block)
        pieces = [output] * len(sets) if rows is None else rows.split(output)
        for found, piece in zip(sets, pieces, strict=True):
            found[parameter] = piece
    return sets


def fuse_module(
    module: str,
    names: Sequence[str],
    sets: Sequence[Params],
    layout: RowOrder,
    block: Block,
    read_scalar: Callable[[Output], bytes],
) -> dict[str, Output]:
    """Put segments together as one module. `names` are the modules they come from, for messages.
    Per-tensor scales become one where their values, told by `read_scalar`, are equal. Raises
    PlanError where schemes differ or scales may not move."""
    first = {parameter: output.type.dtype for parameter, output in sets[0].items()}
    for name, params in zip(names[1:], sets[1:], strict=True):
        other = {parameter: output.type.dtype for parameter, output in params.items()}
        if other != first:
            raise PlanError(
                f"{names[0]} is {_spell(first)} and {name} is {_spell(other)}: they cannot become "
                f"one {module}; dequantize first (the recipe's `dequant` pass before `fuse`)"
            )
    fused: dict[str, Output] = {}
    for parameter in first:
        parts = [params[parameter] for params in sets]
        rows = _layout_of(module, parameter, sets[0], layout, block)
        if rows is not None:
            fused[parameter] = rows.fuse(parts)
        elif len({_known(part, read_scalar) for part in parts}) == 1:
            fused[parameter] = parts[0]
        else:
            raise PlanError(
                f"{module}.{parameter}: the parts have different per-tensor scales, and one tensor "
                "takes only one; dequantize first (the recipe's `dequant` pass before `fuse`)"
            )
    return fused


def _known(scalar: Output, read: Callable[[Output], bytes]) -> bytes | tuple[int, int]:
    """Return what tells equal scalars: their bytes, or of computed ones the result that they are."""
    origin = scalar.pieces[0].origin
    return (id(origin.node), origin.port) if isinstance(origin, Value) else read(scalar)


def is_per_tensor(parameter: str, output: Output, block: Block) -> bool:
    """Return whether a parameter is one scale for a whole tensor: by its name, or of one element, where
    the config states no block (a small tensor's only block has one element too)."""
    if parameter in _SCALARS:
        return True
    return parameter in _SCALES and block is None and output.type.numel == 1


def _layout_of(
    module: str, parameter: str, params: Params, layout: RowOrder, block: Block
) -> RowOrder | None:
    """The layout of a parameter's rows, None for a scale of the whole tensor, which has none. A `block`
    is of FP8 weights; scales of others have the rows of their weight."""
    output = params[parameter]
    if parameter in _ROWWISE:
        return layout
    is_fp8 = params["weight"].type.dtype in FP8_DTYPES if "weight" in params else False
    if is_per_tensor(parameter, output, block if is_fp8 else None):
        return None
    shape = output.type.shape
    weight = params.get("weight", params.get("weight_packed"))
    rows = weight.type.shape[:1] if weight is not None else ()
    try:
        if parameter == _ZERO and output.type.dtype == "I32" and shape and rows:
            return _of_words(layout, rows[0], shape[0])
        if parameter in _SCALES and is_fp8 and block is not None:
            return layout.of_blocks(block[0])
    except PlanError as error:
        raise PlanError(
            f"{module}.{parameter}: {error}; dequantize first (the recipe's `dequant` pass before "
            "this one)"
        ) from error
    if parameter not in (*_SCALES, _ZERO):
        raise PlanError(f"{module}.{parameter}: is not known to follow the rows of its weight")
    if len(shape) in (1, 2) and shape[:1] == rows:
        return layout
    raise PlanError(f"{module}.{parameter}: {output.type} is neither per tensor nor of rows")


def _of_words(layout: RowOrder, rows: int, words: int) -> RowOrder:
    """The layout of zero points packed along the `rows` of a matrix into so many words. Raises PlanError
    where a run would begin within one."""
    for word in (8, 4):
        if -(-rows // word) == words:
            return layout.of_blocks(word)
    raise PlanError(f"{words} words of zero points do not fit {rows} rows")


def _spell(dtypes: Mapping[str, str]) -> str:
    return ", ".join(f"{parameter} {dtype}" for parameter, dtype in sorted(dtypes.items()))
