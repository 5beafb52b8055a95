"""Integer weights as a config's quantization blocks state them: read from the config, never inferred
from shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from qconvert.checkpoint.auto_round import AutoRound, auto_round
from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.checkpoint.layer_schemes import LayerSchemes
from qconvert.checkpoint.quantization_config import groups_of
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import READ_BITS, IntScheme
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
        integers = [w for w in groups.every if w.get("type") == "int"]
        if not integers or isinstance(groups, LayerSchemes):
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
    form, groups = config.block.get("format", wanted), config.block.get("config_groups")
    # Of a mixture each group states its own.
    each = groups.values() if isinstance(groups, Mapping) else ()
    own = [group.get("format") for group in each if isinstance(group, Mapping)]
    if form not in (wanted, _MIXED) and wanted not in own:
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
    if type(bits) is not int or bits not in READ_BITS:
        raise PlanError(f"{where}: expected integer weights of 2 to 8 bits, found {bits!r}")
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
    zero point where `zero_point`. AutoRound stores zero points of others too: `kept`."""

    group: int | None
    zero_point: bool
    kept: bool = False


def awq_form(checkpoint: Checkpoint, module: str) -> AwqForm | None:
    """Return what the config's `awq` block states (AutoAWQ 0.2, its `quantization_config`), or
    AutoRound's for a module; None without one. Raises PlanError for another version or number of bits
    than is read here."""
    found = next((c for c in checkpoint.quantization_configs if c.method == "awq"), None)
    block: Mapping[str, Any]
    if found is None:
        other = auto_round(checkpoint)
        if other is None or other.form != "awq":
            return None
        where, block = other.config.where, _of_auto_round(other, module)
        zero = not block["sym"]
    else:
        block, where = found.block, found.where
        zero = block.get("zero_point", True)
    bits = block.get("bits", block.get("w_bit"))
    version = str(block.get("version", "gemm")).lower()
    size = block.get("group_size", block.get("q_group_size"))
    if bits != 4:
        raise PlanError(f"{where}: expected AWQ weights of 4 bits, found {bits!r}")
    if version != "gemm":
        raise PlanError(f"{where}: expected AWQ version gemm, found {version!r}")
    group = _group(where, size)
    if type(zero) is not bool:
        raise PlanError(f"{where}: expected zero_point true or false, found {zero!r}")
    return AwqForm(group, zero, found is None)


def _of_auto_round(block: AutoRound, module: str) -> Mapping[str, Any]:
    """Return what AutoRound's block states for a module with integer codes. Raises PlanError where it
    leaves it out, or states floats."""
    stated = block.of(module)
    if stated is None or stated["data_type"] != "int":
        said = "leaves it out" if stated is None else f"states data_type {stated['data_type']}"
        raise PlanError(
            f"{block.config.where}: {module!r} has packed integers, and the block {said}: one of them "
            "is wrong"
        )
    return {**stated, "sym": stated["sym"] is not False}


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Rules of GPTQModel's `dynamic`, in order: the first whose pattern matches the beginning of a
    module's name applies (`quantization/config.py` `_resolve_dynamic_override`; sglang and vLLM,
    `get_dynamic_override`). `-:` leaves modules out (None), `+:` or nothing changes settings. Patterns
    that spell one name are looked up: there may be one for each expert."""

    literal: Mapping[str, int]
    patterns: tuple[tuple[int, re.Pattern[str]], ...]
    changes: tuple[Mapping[str, Any] | None, ...]

    @classmethod
    def of(cls, where: str, rules: Any) -> Dynamic:
        """Raises PlanError for a pattern that is not a valid regular expression, and for a rule that is
        no object."""
        literal: dict[str, int] = {}
        patterns, changes = [], list[Mapping[str, Any] | None]()
        for at, (key, change) in enumerate((rules or {}).items()):
            pattern = key.removeprefix("-:") if key.startswith("-:") else key.removeprefix("+:")
            if not isinstance(change, Mapping) and not key.startswith("-:"):
                raise PlanError(f"{where}: expected settings for dynamic {key!r}, found {change!r}")
            changes.append(None if key.startswith("-:") else change)
            spelled = _spelled_name(pattern)
            if spelled is not None:
                literal.setdefault(spelled, at)
                continue
            try:
                patterns.append((at, compiled(pattern)))
            except re.error as error:
                raise PlanError(
                    f"{where}: dynamic {key!r} is not a valid regular expression: {error}"
                ) from error
        return cls(literal, tuple(patterns), tuple(changes))

    def find(self, module: str) -> Mapping[str, Any] | None:
        """Settings that a rule changes, {} without one; None where it leaves the module out."""
        first = self.literal.get(module, len(self.changes))
        for at, pattern in self.patterns:
            if at > first:
                break
            if pattern.match(module):
                first = at
                break
        return self.changes[first] if first < len(self.changes) else {}


def _spelled_name(pattern: str) -> str | None:
    """The one name that a pattern matches, if it spells one."""
    name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
    plain = pattern.endswith("$") and re.escape(name) == pattern.removeprefix("^")[:-1]
    return name if plain else None


@lru_cache(maxsize=8)  # asked for each matrix
def _dynamic(checkpoint: Checkpoint) -> Dynamic:
    config = next(c for c in checkpoint.quantization_configs if c.method == "gptq")
    return Dynamic.of(config.where, config.block.get("dynamic"))


def gptq_form(checkpoint: Checkpoint, module: str) -> GptqForm:
    """Return how a matrix in GPTQ's own form is stored, by the config's `gptq` block and its rules for
    modules, or by AutoRound's. Raises PlanError if there is none, or one that qconvert does not read, or
    one that leaves the module out."""
    config = next((c for c in checkpoint.quantization_configs if c.method == "gptq"), None)
    block: Mapping[str, Any]
    if config is not None:
        change = _dynamic(checkpoint).find(module)
        if change is None:
            raise PlanError(
                f"{config.where}: a rule of dynamic (-:) leaves {module!r} out, which has a qweight: "
                "one of them is wrong"
            )
        where, block = config.where, {**config.block, **change}
        form = block.get("checkpoint_format", "gptq")
    else:
        other = auto_round(checkpoint)
        if other is None:
            raise PlanError(f"{module!r} has a qweight, but no quantization block states gptq")
        where, block, form = other.config.where, _of_auto_round(other, module), other.form
    bits, size = block.get("bits"), block.get("group_size")
    if type(bits) is not int or bits not in READ_BITS:
        raise PlanError(f"{where}: expected GPTQ weights of 2 to 8 bits, found {bits!r}")
    group = _group(where, size)
    if form not in ("gptq", "gptq_v2"):
        raise PlanError(f"{where}: expected checkpoint_format gptq or gptq_v2, found {form!r}")
    order: Literal["group"] | None = "group" if block.get("desc_act") and group else None
    scheme = IntScheme(bits, group, block.get("sym", True) is not False, order, "F16")
    return GptqForm(scheme, 2 if form == "gptq_v2" else 1)
