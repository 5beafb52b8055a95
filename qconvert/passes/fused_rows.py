"""Moving the rows of a linear layer together with everything that belongs to rows.

A module's `weight` has rows; so have its `bias`, its per-channel scale, and, in units of a block, its
block scales. A per-tensor scale belongs to all rows, so modules with different ones cannot become one
without a choice, and packed 4-bit formats hold rows on another axis. What cannot follow is refused,
with the way out named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import PARAMETERS
from qconvert.core.row_order import RowOrder

Params = Mapping[str, Output]

_ROWWISE = ("weight", "bias")
_SCALES = ("weight_scale_inv", "weight_scale")
_PACKED = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale_2",
    "weight_shape",
)

Block = tuple[int, int] | None


def params_of(tensors: Mapping[str, Output], module: str) -> dict[str, Output]:
    """A module's parameters by name. Raises PlanError for packed 4-bit formats (AWQ, GPTQ, NVFP4,
    compressed-tensors INT4): their rows lie on another axis."""
    found = {p: tensors[f"{module}.{p}"] for p in PARAMETERS if f"{module}.{p}" in tensors}
    for parameter in _PACKED:
        if parameter in found:
            raise PlanError(
                f"{module}.{parameter}: a packed 4-bit weight holds its rows on another axis and "
                "cannot be fused or split; start from the bf16 or FP8 release"
            )
    return found


def split_module(
    module: str, params: Params, layout: RowOrder, block: Block
) -> list[dict[str, Output]]:
    """Take a module apart into one set of parameters a segment."""
    sets: list[dict[str, Output]] = [{} for _ in layout.segments]
    for parameter, output in params.items():
        rows = _layout_of(module, parameter, output, layout, block)
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
        rows = _layout_of(module, parameter, parts[0], layout, block)
        if rows is not None:
            fused[parameter] = rows.fuse(parts)
        elif len({read_scalar(part) for part in parts}) == 1:
            fused[parameter] = parts[0]
        else:
            raise PlanError(
                f"{module}.{parameter}: the parts have different per-tensor scales, and one tensor "
                "takes only one; dequantize first (the recipe's `dequant` pass before `fuse`)"
            )
    return fused


def is_per_tensor(parameter: str, output: Output, block: Block) -> bool:
    """Whether a parameter is one scale for a whole tensor: of one element, where the config states
    no block (a small tensor's only block has one element too)."""
    return parameter in _SCALES and block is None and output.type.numel == 1


def _layout_of(
    module: str, parameter: str, output: Output, layout: RowOrder, block: Block
) -> RowOrder | None:
    """The layout of a parameter's rows, None for a per-tensor scale, which has none."""
    if parameter in _ROWWISE:
        return layout
    if parameter not in _SCALES:
        raise PlanError(f"{module}.{parameter}: is not known to follow the rows of its weight")
    shape = output.type.shape
    if is_per_tensor(parameter, output, block):
        return None
    if block is not None:
        try:
            return layout.of_blocks(block[0])
        except PlanError as error:
            raise PlanError(
                f"{module}.{parameter}: {error}; dequantize first (the recipe's `dequant` pass "
                "before this one)"
            ) from error
    if len(shape) in (1, 2) and (len(shape) == 1 or shape[1] == 1):
        return layout
    raise PlanError(f"{module}.{parameter}: {output.type} is neither per tensor nor per channel")


def _spell(dtypes: Mapping[str, str]) -> str:
    return ", ".join(f"{parameter} {dtype}" for parameter, dtype in sorted(dtypes.items()))
