"""What a config's quantization blocks say of FP8 weights: read from the config, never inferred from
shapes. Dividing rows by scale rows is silently wrong for hundreds of ragged row counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """How the config says weights are scaled: in blocks, or (block None) per channel or tensor.
    `u8_exponents` says whether U8 scales are E8M0."""

    block: tuple[int, int] | None
    where: str
    u8_exponents: bool


def stated_block(configs: Sequence[QuantConfig]) -> tuple[int, int] | None:
    """The `weight_block_size` that the configs state, None where none is stated in a sound form."""
    for config in configs:
        size = config.block.get("weight_block_size")
        if (
            isinstance(size, list)
            and len(size) == 2
            and all(type(n) is int and n > 0 for n in size)
        ):
            return size[0], size[1]
    return None


def grid_fault(weight: TensorType, scale: TensorType, block: tuple[int, int]) -> str | None:
    """What is wrong with a block-scale grid, None where it is ceil(shape / block). Per-tensor and
    per-channel scales, which have another form, are not judged."""
    *lead, rows, columns = weight.shape
    grid = (*lead, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    if scale.shape == grid or len(scale.shape) != len(grid) or scale.numel == 1:
        return None
    if scale.shape in ((*lead, rows, 1), (*lead, 1, 1)):
        return None
    return (
        f"expected a scale grid {list(grid)} for {weight} in blocks of {block[0]}x{block[1]}, found "
        f"{list(scale.shape)}"
    )


def fp8_scheme(checkpoint: Checkpoint) -> Fp8Scheme:
    """The one scheme all quantization blocks agree on. Raises PlanError for none or several."""
    found = [(_one_scheme(config), config) for config in checkpoint.quantization_configs]
    if not found:
        raise PlanError(
            "there are FP8 weights but config.json has no quantization_config; qconvert does not "
            "guess block sizes: add the block the model was quantized with"
        )
    first, first_config = found[0]
    for scheme, config in found[1:]:
        if scheme.block != first.block:
            raise PlanError(
                f"{first_config.where} and {config.where} disagree on the weight block "
                f"({first.block} and {scheme.block}); remove the stale one"
            )
    return first


def _is_ue8m0(block: Mapping[str, Any]) -> bool:
    return block.get("scale_fmt") == "ue8m0"


def _one_scheme(config: QuantConfig) -> Fp8Scheme:
    block = config.block
    u8 = _is_ue8m0(block)
    beside = block.get("linear_fp8_config")
    if isinstance(beside, Mapping):  # of linears beside packed experts; see passes/w4a16.py
        size = beside.get("weight_block_size")
        found = None if size is None else _block_size(config, size)
        return Fp8Scheme(found, f"{config.where}.linear_fp8_config", _is_ue8m0(beside))
    if config.method == "compressed-tensors":
        sizes = {
            _compressed_tensors_block(config, weights)
            for _, weights in config_groups(config)
            if weights.get("type") != "int"  # of other weights: see integers.py
        }
        if not sizes:
            kinds = {f"{w.get('num_bits')}-bit {w.get('type')}" for _, w in config_groups(config)}
            said = ", ".join(sorted(kinds)) or "none"
            raise PlanError(
                f"{config.where}: expected FP8 weights in its config_groups, found {said}"
            )
        if len(sizes) != 1:
            raise PlanError(f"{config.where}: its config_groups use different FP8 schemes")
        return Fp8Scheme(sizes.pop(), config.where, u8)
    if config.method in ("fp8", "fbgemm_fp8", "modelopt"):
        algorithm = str(block.get("quant_algo", "FP8"))
        if not algorithm.startswith("FP8"):
            raise PlanError(f"{config.where}: quant_algo {algorithm!r} is not FP8")
        size = block.get("weight_block_size")
        return Fp8Scheme(None if size is None else _block_size(config, size), config.where, u8)
    raise PlanError(
        f"{config.where}: quant_method {config.method!r} is not an FP8 format qconvert reads "
        "(fp8, fbgemm_fp8, modelopt FP8, compressed-tensors float-quantized)"
    )


def config_groups(config: QuantConfig) -> Iterator[tuple[list[Any], Mapping[str, Any]]]:
    """Targets and weights of each of compressed-tensors' groups. Raises PlanError for none."""
    groups = config.block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise PlanError(f"{config.where}: compressed-tensors without config_groups")
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise PlanError(f"{config.where}: {key} says nothing of weights")
        targets = group.get("targets")
        yield targets if isinstance(targets, list) else [], weights


def _compressed_tensors_block(
    config: QuantConfig, weights: Mapping[str, Any]
) -> tuple[int, int] | None:
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        raise PlanError(
            f"{config.where}: weights are {weights.get('num_bits')}-bit {weights.get('type')}, "
            "expected 8-bit float"
        )
    strategy = weights.get("strategy")
    if strategy == "block":
        return _block_size(config, weights.get("block_structure"))
    if strategy in ("tensor", "channel"):
        return None
    raise PlanError(f"{config.where}: FP8 weight strategy {strategy!r} is not known")


def _block_size(config: QuantConfig, size: Any) -> tuple[int, int]:
    sides = list(size) if isinstance(size, list | tuple) else []
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise PlanError(f"{config.where}: expected a weight block of two sizes, found {size!r}")
    return sides[0], sides[1]
