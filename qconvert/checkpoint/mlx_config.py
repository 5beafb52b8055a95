"""MLX's quantization as a config states it: `quantization`, and a copy as `quantization_config`, without
a quant_method; and its stacks of experts, taken apart.

Format source: mlx 0.32 (`nn/layers/quantized.py`: defaults by mode) and mlx-lm 0.32 (`utils.py`,
`load_model`: an entry under a module's path holds for that module, `false` leaves it in floats;
`sanitize` of its classes: `mlp.experts.{E}` become one `switch_mlp`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.family import QUANTIZATION_KEYS, is_mlx
from qconvert.core.graph import Source

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig

MLX = "mlx"  # a quant_method that MLX's blocks leave out
Mode = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
# Group size and bits of a mode; an affine scheme may state others.
_DEFAULTS: Mapping[str, tuple[int, int]] = {
    "affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8),
}  # fmt: skip
_AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
_PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # below block_sparse_moe
_STACK = re.compile(r"(.*\.(?:mlp|(block_sparse_moe)))\.switch_mlp\.((?:gate|up|down)_proj)\.(\w+)")
_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(\w+)")


def experts_apart(
    config: Mapping[str, Any], sources: Mapping[str, Source]
) -> dict[str, Source] | None:
    """Tensors of a folder in which each stack of experts of mlx-lm's is one tensor an expert, under the
    names that transformers' classes have; None where there is no such stack, or no block of MLX."""
    stated = any(
        isinstance(b := config.get(key), Mapping) and is_mlx(b) for key in QUANTIZATION_KEYS
    )
    if not stated or not any(".switch_mlp." in name for name in sources):
        return None
    found: dict[str, Source] = {}
    for name, source in sources.items():
        stack, kind = _STACK.fullmatch(name), source.type
        if stack is None or len(kind.shape) < 2:
            found[name] = source
            continue
        module, sparse, projection, last = stack.groups()
        projection = _PROJECTIONS[projection] if sparse else projection
        for expert in range(kind.shape[0]):
            own = f"{module}.experts.{expert}.{projection}.{last}"
            at = source.offset + expert * kind.row_nbytes
            found[own] = Source(own, TensorType(kind.dtype, kind.shape[1:]), source.shard, at)
    return found


def _stack_of(module: str) -> str:
    """The module of mlx-lm's in which an expert's is."""
    expert = _EXPERT.fullmatch(module)
    if expert is None:
        return module
    below, projection = expert.groups()
    named = {letter: name for name, letter in _PROJECTIONS.items()}
    return f"{below}.switch_mlp.{named.get(projection, projection)}"


@dataclass(frozen=True, slots=True)
class MlxScheme:
    """Codes of `bits` in U32 words and a scale for each `group` columns; affine ones have an offset for
    each too."""

    mode: Mode
    group: int
    bits: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.bits} bits in groups of {self.group}"


def states_mlx(checkpoint: Checkpoint) -> bool:
    """Return whether a block of the config is MLX's."""
    return any(config.method == MLX for config in checkpoint.quantization_configs)


def mlx_scheme(checkpoint: Checkpoint, module: str) -> MlxScheme | None:
    """The scheme of a module by MLX's blocks, None where they leave it in floats. Raises PlanError
    for one that mlx does not have, and for blocks that differ."""
    found = {
        config.where: _scheme(config, module)
        for config in checkpoint.quantization_configs
        if config.method == MLX
    }
    schemes = set(found.values())
    if len(schemes) != 1:
        said = "; ".join(f"{where}: {one or 'floats'}" for where, one in found.items())
        raise PlanError(f"{module!r}: expected one scheme of MLX, found {said or 'none'}")
    return schemes.pop()


def _scheme(config: QuantConfig, module: str) -> MlxScheme | None:
    own: Any = config.block.get(module, config.block.get(_stack_of(module), True))
    if own is False:
        return None
    stated = config.block if own is True else own
    where = config.where if own is True else f"{config.where}: {module}"
    if not isinstance(stated, Mapping):
        raise PlanError(f"{where}: expected group_size and bits, true or false, found {stated!r}")
    mode: Any = stated.get("mode") or "affine"
    if mode not in get_args(Mode):
        raise PlanError(
            f"{where}: expected mode {' or '.join(get_args(Mode))}, found {mode!r}; qconvert reads "
            "these of mlx 0.32"
        )
    group, bits = _DEFAULTS[mode]
    size, width = stated.get("group_size") or group, stated.get("bits") or bits
    if mode == "affine":
        fits = type(size) is int and size > 0 and size % 8 == 0 and width in _AFFINE_BITS
    else:
        fits = (size, width) == (group, bits)
    if not fits:
        usual = f"group_size {group} and bits {bits}"
        if mode == "affine":
            usual = "group_size 32, 64 or 128 and 1 to 6 or 8 bits"
        raise PlanError(
            f"{where}: expected {usual} for mode {mode}, found group_size {size!r} and bits {width!r}"
        )
    return MlxScheme(mode, size, width)
