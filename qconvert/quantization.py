"""What a config's quantization blocks say of FP8 weights: read from the config, never inferred from
shapes. Dividing rows by scale rows is silently wrong for hundreds of ragged row counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qconvert.checkpoint import Checkpoint, QuantConfig
from qconvert.errors import PlanError
from qconvert.spec import TensorType, ceil_div


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


def _one_scheme(config: QuantConfig) -> Fp8Scheme:
    block = config.block
    u8 = block.get("scale_fmt") == "ue8m0"
    if config.method == "compressed-tensors":
        sizes = {_compressed_tensors_block(config, group) for group in _groups(config)}
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


def int4_group(checkpoint: Checkpoint) -> int:
    """Group size of compressed-tensors' symmetric packed INT4, which all blocks and groups that state
    it must agree on. Raises PlanError where none does, or another form is stated."""
    sizes: set[int] = set()
    for config in checkpoint.quantization_configs:
        if config.method != "compressed-tensors":
            continue
        for key in ("transform_config", "sparsity_config"):
            if config.block.get(key):
                raise PlanError(f"{config.where}: INT4 weights with a {key} are not read here")
        if config.block.get("format", "pack-quantized") not in (
            "pack-quantized",
            "mixed-precision",
        ):
            raise PlanError(
                f"{config.where}: INT4 weights are read in format pack-quantized, found "
                f"{config.block['format']!r}"
            )
        for weights in _groups(config):
            if (weights.get("type"), weights.get("num_bits")) != ("int", 4):
                continue
            if weights.get("strategy") != "group" or weights.get("symmetric") is not True:
                raise PlanError(
                    f"{config.where}: INT4 weights are read in symmetric groups, found strategy "
                    f"{weights.get('strategy')!r}, symmetric {weights.get('symmetric')!r}"
                )
            if weights.get("actorder") not in (None, "static", "weight"):
                raise PlanError(
                    f"{config.where}: actorder {weights.get('actorder')!r} permutes columns, which "
                    "is not read here"
                )
            size = weights.get("group_size")
            if type(size) is not int or size < 1:
                raise PlanError(f"{config.where}: expected a group_size, found {size!r}")
            sizes.add(size)
    if len(sizes) != 1:
        raise PlanError(
            "there are packed INT4 weights, and the config states "
            + ("no group size for them" if not sizes else f"the group sizes {sorted(sizes)}")
        )
    return sizes.pop()


def _groups(config: QuantConfig) -> Iterator[Mapping[str, Any]]:
    groups = config.block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise PlanError(f"{config.where}: compressed-tensors without config_groups")
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise PlanError(f"{config.where}: {key} says nothing of weights")
        yield weights


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
