"""FP8 under scales of blocks, rows or the whole matrix: how it is read, with blocks as the config states
them, and its config blocks as runtimes parse them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from math import prod
from typing import Any

from qconvert.checkpoint.quantization_config import Fp8Scheme, fp8_scheme, has_groups
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, inferred
from qconvert.core.names import is_ambiguous, scale_candidates, split_parameter, weight_candidates
from qconvert.core.parameter_names import FP8
from qconvert.core.versions import LLM_COMPRESSOR
from qconvert.formats.base import Format, Read, Stored
from qconvert.formats.fp8.decode import FNUZ, WEIGHT_DTYPES, DequantFp8
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> Read | None:
    """A module with an FP8 `weight`."""
    name = f"{module}.weight"
    weight = plan.tensors.get(name)
    if weight is None or weight.type.dtype not in WEIGHT_DTYPES or len(weight.type.shape) != 2:
        return None
    scale = fp8_scale_name(plan, name)
    stored = fp8_matrix(name, weight, plan.tensors[scale], fp8_scheme_of(plan, scale))
    return stored, (name, scale)


def fp8_scheme_of(plan: Plan, scale: str) -> Fp8Scheme:
    """Return how the config says the weight of this scale is scaled. Raises PlanError for U8 scales it
    does not call exponents."""
    module = None
    if has_groups(plan.checkpoint):  # which alone tell modules apart
        weight = next(iter(weight_candidates(scale)), scale)
        module = split_parameter(weight)[0]
    scheme = fp8_scheme(plan.checkpoint, module)
    if plan.tensors[scale].type.dtype == "U8" and not scheme.u8_exponents:
        raise PlanError(
            f"scale {scale!r} is U8, which is an exponent only where {scheme.where} says "
            "scale_fmt: ue8m0; qconvert does not guess"
        )
    return scheme


def fp8_scale_name(plan: Plan, weight: str) -> str:
    """The scale beside an FP8 weight. Raises PlanError for none or several; beside one that only weights
    have, a `scale` is the model's own."""
    tried = scale_candidates(weight)
    found = [name for name in tried if name in plan.tensors]
    found = [name for name in found if not is_ambiguous(name)] or found
    if len(found) != 1:
        what = "has no scale" if not found else f"has {len(found)} scales"
        raise PlanError(f"FP8 weight {weight!r} {what} ({' or '.join(tried)})")
    return found[0]


def fp8_reading(
    weight: Output, scale: Output, scheme: Fp8Scheme
) -> tuple[DequantFp8, Output, Output]:
    """The op that reads an FP8 matrix or stack of them, and its arguments.

    Without a block size the scale is [] or [1] for the whole tensor; [..., N] or [..., N, 1] a row;
    [E] or [E, 1, 1] for each expert of a stack. Raises PlanError for anything else.
    """
    *lead, rows, columns = weight.type.shape
    shape = scale.type.shape
    if scheme.fnuz and weight.type.dtype not in FNUZ:
        raise PlanError(
            f"{scheme.where} states fmt fnuz, whose codes are {' or '.join(FNUZ)}, found {weight.type}: "
            "their numbers differ by a factor of two; mend the dtype in the header, or fmt"
        )
    if scheme.block is not None:
        if len(shape) == len(lead) + 4 and shape[-1] == shape[-3] == 1:  # modelopt's FP8_PB_WO
            scale = scale.reshape((*lead, shape[-4], shape[-2]))
        return _in_blocks(scheme.block), weight, scale
    if scale.type.numel == 1:
        flat = weight.reshape((prod(lead) * rows, columns))
        return DequantFp8((prod(lead) * rows, columns)), flat, scale.reshape((1, 1))
    if shape in ((*lead, rows), (*lead, rows, 1)):
        return DequantFp8((1, columns)), weight, scale.reshape((*lead, rows, 1))
    if lead and shape in (tuple(lead), (*lead, 1, 1)):
        return DequantFp8((rows, columns)), weight, scale.reshape((*lead, 1, 1))
    raise PlanError(
        f"the config states no block size, so the scale must be per tensor ([] or [1]) or per "
        f"channel ({[*lead, rows]} or {[*lead, rows, 1]}), found {list(shape)}"
    )


@lru_cache(maxsize=64)
def _in_blocks(block: tuple[int, int]) -> DequantFp8:
    """One op for all matrices of a block size."""
    return DequantFp8(block)


def fp8_matrix(name: str, weight: Output, scale: Output, scheme: Fp8Scheme) -> Stored:
    """A matrix with this scale. Raises PlanError where they do not fit."""
    try:
        decoder, matrix, grid = fp8_reading(weight, scale, scheme)
        inferred(decoder, (matrix.type, grid.type))
    except PlanError as error:
        raise PlanError(f"weight {name!r}: {error}") from error
    rows, columns = matrix.type.shape
    return Stored(decoder, (matrix, grid), rows, columns)


def fp8_config(
    block: tuple[int, int] | None, left: Iterable[str], *, exponents: bool, inputs: bool = False
) -> dict[str, Any]:
    """The block that DeepSeek and Qwen publish (sglang, vLLM: `layers/quantization/fp8.py`),
    or (None) that of one scale a tensor. `left` are the modules that stay unquantized; `exponents`:
    scales are powers of two; `inputs`: activations have stored scales."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if inputs else "dynamic",
        **({} if block is None else {"weight_block_size": list(block)}),
        **({"scale_fmt": "ue8m0"} if exponents else {}),
        "modules_to_not_convert": list(left),
    }


def fp8_group_config(
    block: tuple[int, int] | None, targets: Iterable[str] = ("Linear",)
) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`: FP8_BLOCK,
    FP8_DYNAMIC); by default for all linears, `Linear` being their class."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    if block is None:
        weights: dict[str, Any] = {**number, "strategy": "channel", "dynamic": False}
        inputs: dict[str, Any] = {**number, "strategy": "token", "dynamic": True}
    else:
        weights = {
            **number, "strategy": "block", "block_structure": list(block), "dynamic": False,
        }  # fmt: skip
        inputs = {**number, "strategy": "group", "group_size": block[1], "dynamic": True}
    return {
        "targets": list(targets),
        "format": "float-quantized",
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def fp8_tensor_group_config(targets: Iterable[str], *, inputs: bool) -> dict[str, Any]:
    """The same of one scale a tensor (FP8), for activations too: stored ones, or (not `inputs`) found by
    the runtime."""
    number = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    return {
        "targets": list(targets),
        "format": "float-quantized",
        "weights": {**number, "dynamic": False},
        "input_activations": {**number, "dynamic": not inputs},
        "output_activations": None,
    }


_PTQ = f"{LLM_COMPRESSOR} model_free_ptq"
_OWN, _CT = FP8["fp8"], FP8["compressed-tensors"]
FORMATS = (
    Format(
        name="fp8-block", title="FP8", parameters=_OWN, codes=WEIGHT_DTYPES, cut=("block", "block"),
        order=10,
        equals="DeepSeek-V3 inference/kernel.py", read=read,
    ),
    Format(
        name="fp8-block-ct", title="FP8", parameters=_CT, codes=WEIGHT_DTYPES, cut=("block",
        "block"), order=10,
        equals=f"{_PTQ} FP8_BLOCK", read=read, config_group=partial(fp8_group_config, (128, 128)),
    ),
    Format(
        name="fp8-rows", title="FP8", parameters=_CT, codes=WEIGHT_DTYPES, cut=(1, 0), order=10,
        equals=f"{_PTQ} FP8_DYNAMIC", read=read, config_group=partial(fp8_group_config, None),
    ),
    Format(
        name="fp8-tensor", title="FP8", parameters=_CT, codes=WEIGHT_DTYPES, cut=(0, 0), order=10,
        equals=f"{_PTQ} FP8", read=read,
    ),
)  # fmt: skip
