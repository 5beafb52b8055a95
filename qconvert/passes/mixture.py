"""Modules that stay quantized beside what a step quantizes: an earlier step's results, or weights of the
source, in compressed-tensors' form. The config of the whole has a group for each form, with targets by
name (compressed-tensors, `quantization/quant_config.py`; its compressor calls that format
mixed-precision, and each group states its own).

Steps after one another so make a mixture: attention in FP8, and experts in INT4. A later step takes
what its targets name of the modules that no earlier step has quantized.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from re import escape
from typing import Any, ClassVar

from qconvert.checkpoint.checkpoint import QuantConfig
from qconvert.checkpoint.quantization_config import Entries, config_groups, texts
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import split_parameter, with_fused_names
from qconvert.core.shown import count
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.registry import code_parameters
from qconvert.models.unquantized import expert_beginnings, experts_of_class
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
_CODES = (*WEIGHT_DTYPES, "I8")  # of a quantized module's `weight`


@dataclass(frozen=True, slots=True)
class Fitted:
    """State that `qconvert fit` chose the formats of the steps behind.

    `budget` is what it was given, `bits` what a weight has, `kl` that of the mixture in nats a token
    over so many `tokens` of `data`; it chose for so many `groups` of modules. `source` is the
    checkpoint, by the hash of its headers. It changes nothing: manifest and model
    card say so from then on.

    Raises PlanError for another checkpoint, of which none of this is known.
    """

    name: ClassVar[str] = "fitted"

    budget: str
    bits: float
    kl: float
    tokens: int
    data: str
    groups: int
    source: str

    def __call__(self, plan: Plan) -> Plan:
        here = plan.checkpoint.header_digest
        if here != self.source:
            raise PlanError(
                f"fit chose these formats for another checkpoint, with headers {self.source[:12]}, and "
                f"this one's are {here[:12]}: run qconvert fit on it, or leave the step `fitted` out to "
                "have the same formats"
            )
        note = (
            f"formats chosen by fit for {self.budget}: {self.bits:g} bits a weight, KL {self.kl:g} nats "
            f"a token over {count(self.tokens, 'token')} of {self.data}"
        )
        entry = LogEntry(self.name, options_of(self), self.groups, None, (note,), "groups")
        return plan.logged(entry)


@dataclass(frozen=True)
class Staying:
    """Modules by the group of a compressed-tensors block that covers them."""

    block: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    earlier: bool = False  # a step before this one wrote the block

    @cached_property  # a step asks it of each layer
    def modules(self) -> frozenset[str]:
        return frozenset(module for modules in self.groups.values() for module in modules)

    @property
    def settled(self) -> frozenset[str]:
        """Modules that a later step does not quantize again."""
        return self.modules if self.earlier else frozenset()

    def without(self, chosen: Collection[str]) -> Staying:
        """Those that are not chosen, and groups that still cover some."""
        left = {
            key: tuple(one for one in modules if one not in chosen)
            for key, modules in self.groups.items()
        }
        return Staying(self.block, {key: some for key, some in left.items() if some}, self.earlier)

    def others(self, tensors: Mapping[str, Output]) -> dict[str, Output]:
        """The tensors that are of none of these modules."""
        known = self.modules
        return {n: one for n, one in tensors.items() if split_parameter(n)[0] not in known}

    def form(self, plan: Plan) -> str:
        """The format of a config with these groups and another. sglang takes packed integers of experts
        where the whole config is of them (`compressed_tensors.py`), whatever their own group states."""
        packed = any(
            self.block["config_groups"][key].get("format", self.block.get("format")) == PACKED
            and any(plan.role_index.kind(f"{module}.weight").routed for module in modules)
            for key, modules in self.groups.items()
        )
        return PACKED if packed else "mixed-precision"

    def stated(self, plan: Plan, chosen: Collection[str]) -> list[dict[str, Any]]:
        """The groups as the config of the mixture has them: targets stay as they are where they are
        none of a class and find nothing that is chosen."""
        found = []
        for key, modules in self.groups.items():
            group = self.block["config_groups"][key]
            targets = texts(group.get("targets"))
            entries = Entries.of(dict.fromkeys(targets, True))
            if entries.of_class is not None or any(entries.find(module) for module in chosen):
                targets = targets_of(plan, modules)
            stated = {"format": self.block.get("format"), **group, "targets": list(targets)}
            found.append(stated)
        return found


def quantized_before(plan: Plan) -> Staying:
    """Modules that the config's compressed-tensors block covers, and that hold codes. Raises PlanError
    for a block of such without groups, or with an invalid pattern."""
    block = plan.config.get("quantization_config")
    coded = list(_coded(plan))
    if not coded or not isinstance(block, Mapping) or block.get("quant_method") != METHOD:
        return Staying()
    config = QuantConfig("config.json: quantization_config", block)
    groups = zip(block.get("config_groups") or (), config_groups(config), strict=False)
    try:
        targets = Entries.of({one: key for key, (named, _) in groups for one in texts(named)})
        ignore = Entries.of(dict.fromkeys(texts(block.get("ignore")), True))
    except PlanError as error:
        raise PlanError(f"{config.where}: {error}") from error
    found = defaultdict[str, list[str]](list)
    for module in coded:
        key = None if ignore.find(module) else targets.find(module)
        if key is not None:
            found[key].append(module)
    earlier = block != plan.checkpoint.config.get("quantization_config")
    return Staying(block, {key: tuple(modules) for key, modules in found.items()}, earlier)


def _coded(plan: Plan) -> Iterator[str]:
    """Modules whose weights are matrices of codes."""
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if parameter not in code_parameters() or len(output.type.shape) != 2:
            continue
        if parameter != "weight" or output.type.dtype in _CODES:
            yield module


def compressed_config(
    groups: Sequence[Mapping[str, Any]], ignore: Sequence[str], form: str = "mixed-precision"
) -> dict[str, Any]:
    """compressed-tensors' block of these groups; `form` is the format of several."""
    formats = {group["format"] for group in groups}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignore),
    }


def targets_of(plan: Plan, modules: Iterable[str]) -> list[str]:
    """Targets for these modules alone: routed experts, which are quantized by whole layers, by patterns,
    others by name, and by that of what they are fused to."""
    plain, routed = list[str](), list[str]()
    for module in modules:
        kind = plan.role_index.kind(f"{module}.weight")
        (routed if kind.routed else plain).append(module)
    below = [
        rf"re:{begin}{escape(path)}\..*"
        for begin in (expert_beginnings(plan, routed) if routed else ())
        for path in plan.family.expert_paths
    ]
    return [*below, *(experts_of_class(plan) if routed else []), *with_fused_names(plain)]


PASSES = (Fitted,)
