"""Integer weights as a config's quantization blocks state them: read from the config, never inferred
from shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.checkpoint.quantization_config import config_groups, groups_of
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import IntScheme
from qconvert.core.patterns import compiled

_NOT_READ = ("transform_config", "sparsity_config")
_MIXED = "mixed-precision"
# How compressed-tensors stores integers: some in a word, or one a byte.
IntFormat = Literal["pack-quantized", "int-quantized"]


@dataclass(frozen=True, slots=True)
class GptqForm:
    """GPTQ's own form of matrices: `version` 1 stores zero points minus one, 2 stores
    them unchanged."""

    scheme: IntScheme
    version: Literal[1, 2]


def packed_scheme(
    checkpoint: Checkpoint, module: str, form: IntFormat = "pack-quantized"
) -> IntScheme:
    """The scheme of a matrix in compressed-tensors' integers: that of the group that covers the
    module, else the one that all integer groups of all blocks agree on. Raises PlanError if there are
    none or several, or if the block states another format than `form` and mixed ones."""
    every: set[IntScheme] = set()
    own: set[IntScheme] = set()
    for groups in groups_of(checkpoint):
        integers = [w for _, w in config_groups(groups.config) if w.get("type") == "int"]
        if not integers:
            continue
        _check_read(groups.config, form)
        weights = groups.weights(module)
        if weights is not None and weights.get("type") == "int":
            own.add(_scheme(groups.config, weights))
        else:
            every |= {_scheme(groups.config, one) for one in integers}
    schemes = own or every
    if len(schemes) != 1:
        listed = ", ".join(sorted(map(str, schemes)))
        said = f"several schemes for it: {listed}" if own else f"several, none for it: {listed}"
        raise PlanError(
            f"{module!r} is packed integers, and the config states "
            + (said if schemes else "no group size for it")
        )
    return schemes.pop()


def _check_read(config: QuantConfig, wanted: IntFormat) -> None:
    for key in _NOT_READ:
        if config.block.get(key):
            raise PlanError(f"{config.where}: integer weights with a {key} are not supported")
    form = config.block.get("format", wanted)
    if form not in (wanted, _MIXED):
        raise PlanError(
            f"{config.where}: expected integer weights in format {wanted}, found {form!r}"
        )


def _group(where: str, size: Any, least: int = -1) -> int | None:
    """Columns that share a scale, None where all do (-1)."""
    if type(size) is not int or size < least or not size:
        raise PlanError(f"{where}: expected a group_size, found {size!r}")
    return None if size == -1 else size


def _scheme(config: QuantConfig, weights: Mapping[str, Any]) -> IntScheme:
    where, bits = config.where, weights.get("num_bits")
    if bits not in (4, 8):
        raise PlanError(f"{where}: expected integer weights of 4 or 8 bits, found {bits!r}")
    symmetric = weights.get("symmetric", True)
    if type(symmetric) is not bool:
        raise PlanError(f"{where}: expected symmetric true or false, found {symmetric!r}")
    order = weights.get("actorder")
    if order not in (None, "static", "weight", "group"):
        raise PlanError(f"{where}: expected actorder static, weight or group, found {order!r}")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        size = None
    elif strategy != "group":
        raise PlanError(
            f"{where}: expected integer weights with strategy group or channel, found strategy "
            f"{strategy!r}"
        )
    else:
        size = _group(where, size, least=1)
    return IntScheme(
        bits, size, symmetric, None if order is None else "group" if order == "group" else "static"
    )


@dataclass(frozen=True, slots=True)
class AwqForm:
    """AutoAWQ's own form of matrices: `group` columns share a scale (None: all), and a
    zero point where `zero_point`."""

    group: int | None
    zero_point: bool


def awq_form(checkpoint: Checkpoint) -> AwqForm | None:
    """Return what the config's `awq` block states (AutoAWQ 0.2, its `quantization_config`), None without
    one. Raises PlanError for another version or number of bits than is read here."""
    found = next((c for c in checkpoint.quantization_configs if c.method == "awq"), None)
    if found is None:
        return None
    block, where = found.block, found.where
    bits = block.get("bits", block.get("w_bit"))
    version = str(block.get("version", "gemm")).lower()
    size = block.get("group_size", block.get("q_group_size"))
    zero = block.get("zero_point", True)
    if bits != 4:
        raise PlanError(f"{where}: expected AWQ weights of 4 bits, found {bits!r}")
    if version != "gemm":
        raise PlanError(f"{where}: expected AWQ version gemm, found {version!r}")
    group = _group(where, size)
    if type(zero) is not bool:
        raise PlanError(f"{where}: expected zero_point true or false, found {zero!r}")
    return AwqForm(group, zero)


def _fits(pattern: str, module: str) -> bool:
    try:
        return compiled(pattern).match(module) is not None
    except re.error as error:
        raise PlanError(f"target {pattern!r} is not a valid regular expression: {error}") from error


def gptq_form(checkpoint: Checkpoint, module: str) -> GptqForm:
    """Return how a matrix in GPTQ's own form is stored, by the config's `gptq` block. Raises PlanError
    if there is none, or one that qconvert does not read."""
    blocks = [c for c in checkpoint.quantization_configs if c.method == "gptq"]
    if not blocks:
        raise PlanError(f"{module!r} has a qweight, but no quantization block states gptq")
    config, block = blocks[0], blocks[0].block
    bits, size = block.get("bits"), block.get("group_size")
    if bits not in (4, 8):
        raise PlanError(f"{config.where}: expected GPTQ weights of 4 or 8 bits, found {bits!r}")
    group = _group(config.where, size)
    form = block.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise PlanError(
            f"{config.where}: expected checkpoint_format gptq or gptq_v2, found {form!r}"
        )
    for pattern, override in (block.get("dynamic") or {}).items():
        if override and _fits(str(pattern).removeprefix("+:"), module):
            raise PlanError(
                f"{config.where}: dynamic {pattern!r} has its own settings for {module!r}, which is "
                "not supported"
            )
    order: Literal["group"] | None = "group" if block.get("desc_act") and group else None
    scheme = IntScheme(bits, group, bool(block.get("sym", True)), order, "F16")
    return GptqForm(scheme, 2 if form == "gptq_v2" else 1)
