"""nvfp4: weights in NVFP4; by default those of the routed experts, with all other layers as they are.

What the config says follows what runtimes do with it (read in sglang 0.5.23). Activations are quantized
only where their scales are stored: a config that says so without them leaves a runtime with scales it
never filled. Draft (MTP) layers stay as they are: sglang builds them without NVFP4, whatever is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from re import escape
from struct import pack
from typing import Any, ClassVar, Literal

from qconvert.checkpoint.checkpoint import without_quantization
from qconvert.checkpoint.ignore import true_lists
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source, apply
from qconvert.core.roles import Kind
from qconvert.formats.int_packed.config import fp8_group_config
from qconvert.formats.nvfp4.config import (
    NAMES,
    group_config,
    hybrid_config,
    input_scale,
    modelopt_config,
)
from qconvert.formats.nvfp4.relabel import mxfp4_modules, relabelled, relabelled_block
from qconvert.matrices.experts import KINDS, SPENT_RULE, Experts, check_described, routed_experts
from qconvert.matrices.linears import check_sets, quantizable, runtime_linears
from qconvert.matrices.stored import Stored, read_matrix
from qconvert.matrices.unquantized import Named, as_weight_scale, check_plain_scales, fp8_block
from qconvert.matrices.unquantized_nvfp4 import (
    draft_patterns,
    fp8_own_block,
    ignored_globs,
    ignored_names,
    kept_expert_globs,
)
from qconvert.ops.constant import Constant
from qconvert.ops.fp4 import BLOCK, Dialect
from qconvert.passes.input_scales import InputMaxima, input_maxima
from qconvert.passes.nvfp4_groups import quantized, shared_groups
from qconvert.plan.plan import LogEntry, Plan

_STALE = ("hf_quant_config.json",)
_SPENT = (".weight_shape", ".input_scale")


@dataclass(frozen=True)
class Chosen:
    """What is quantized: matrices by module, in groups that share a scale; which expert each is of
    (layer, expert, kind) where it is one; the tensors they are read from, and those of them that say
    nothing of the new weights; linears that stay because their columns are no whole blocks."""

    groups: tuple[tuple[str, ...], ...]
    matrices: Mapping[str, Stored]
    places: Mapping[str, tuple[int, int, str]]
    taken: frozenset[str]
    spent: frozenset[str]
    left: tuple[str, ...]

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """Modules that are no experts."""
        return tuple(module for module in self.matrices if module not in self.places)


@dataclass(frozen=True, slots=True)
class ToNvfp4:
    """The routed experts, or with `targets: all` every linear layer that runtimes load so, in NVFP4 of
    either dialect. `stats` is a folder of a calibration's statistics, from which experts' input scales
    are taken; without one, or with `weight_only`, the config says that activations stay bf16.

    Raises PlanError where expert columns are not whole blocks of 16, where part of what shares a scale
    cannot be quantized, where FP8 layers would stay that the dialect has no place for, where statistics
    do not fit, and as `routed_experts` does.
    """

    name: ClassVar[str] = "nvfp4"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    dialect: Dialect = "modelopt"
    targets: Literal["experts", "all"] = "experts"
    weight_only: bool = False
    stats: str | None = None

    def __post_init__(self) -> None:
        if self.stats is not None and self.weight_only:
            raise PlanError(
                "weight_only stores no input scales, and stats are there for nothing else"
            )
        if self.stats is not None and self.targets == "all":
            raise PlanError(
                "statistics are of experts' inputs alone, and with targets all other layers would need "
                "input scales too: leave stats out for weights only, or target experts"
            )

    def __call__(self, plan: Plan) -> Plan:
        modules = mxfp4_modules(plan)
        if modules:
            return self._relabelled(plan, modules)
        chosen = self.chosen(plan)
        maxima = self._input_maxima(plan, chosen)
        made: dict[str, Output] = {}
        for group in chosen.groups:
            matrices = {module: chosen.matrices[module] for module in group}
            made.update(quantized(matrices, self.dialect))
        if maxima is not None:
            names = NAMES[self.dialect]
            for module, place in chosen.places.items():
                value = input_scale(maxima.of(*place), self.dialect)
                op = Constant("F32", names.scalar, pack("<f", value).hex())
                made[f"{module}.{names.input}"] = apply(op)[0]
        others = {name: o for name, o in plan.tensors.items() if name not in chosen.taken}
        return self._planned(plan, chosen, others, made, maxima)

    def _relabelled(self, plan: Plan, modules: Sequence[str]) -> Plan:
        """Every MXFP4 matrix under NVFP4's scales, whatever the targets."""
        if self.stats is not None:
            raise PlanError("input scales are not taken for MXFP4 sources: leave stats out")
        dims = plan.census.dims
        drafts = [module for module in modules if plan.family.is_mtp(module, dims)]
        if drafts and self.dialect == "modelopt":
            raise PlanError(
                f"{drafts[0]!r} is MXFP4 and of a draft layer, which sglang builds unquantized in "
                "modelopt's dialect: drop the MTP layers first (a recipe of `drop: {what: mtp}` and "
                "`nvfp4`), or take dialect compressed-tensors"
            )
        ends = (".weight_packed", ".weight_scale")
        taken = {f"{module}{end}" for module in modules for end in ends}
        others = {name: o for name, o in plan.tensors.items() if name not in taken}
        made: dict[str, Output] = {}
        check_described(plan)
        kinds = {module: plan.census.kind(f"{module}.weight_packed") for module in modules}
        for module, kind in kinds.items():
            if not kind.quantizable:
                raise PlanError(f"{module!r} is MXFP4, and no linear layer that runtimes load so")
        for group in shared_groups(kinds):
            made.update(relabelled(plan, group, self.dialect))
        config = without_quantization(plan.config)
        if self.dialect == "compressed-tensors":
            config["quantization_config"] = relabelled_block(plan)
        else:
            globs = ignored_globs(plan, others, modules)
            config["quantization_config"] = modelopt_config(globs, inputs=False)
        stale = dict.fromkeys(
            (name for name in _STALE if name in plan.side_files),
            "nvfp4: its quantization block no longer holds",
        )
        note = "MXFP4 codes as they are, under NVFP4's scales", "weights only: no input scales"
        return plan.logged(
            LogEntry(self.name, repr(self), len(modules), None, note, "matrices"),
            tensors={**others, **made},
            config=true_lists(config, ()),
            side_files=tuple(name for name in plan.side_files if name not in stale),
            dropped_files={**plan.dropped_files, **stale},
        )

    def chosen(self, plan: Plan) -> Chosen:
        """What the targets take of a plan."""
        if self.targets == "all":
            check_described(plan)
        experts = None
        if self.targets == "experts" or plan.census.dims.num_experts:
            experts = routed_experts(plan)
        matrices: dict[str, Stored] = {}
        places: dict[str, tuple[int, int, str]] = {}
        kinds: dict[str, Kind] = {}
        taken: set[str] = set()
        if experts is not None:
            for p in experts.projections:
                if not p.draft:
                    matrices[p.module] = p.weight
                    kinds[p.module] = KINDS[p.kind]
                    places[p.module] = p.layer, p.expert, p.kind
            taken |= _without_drafts(plan, experts.taken)
        spent = _without_drafts(plan, experts.spent) if experts is not None else frozenset()
        left: dict[str, Kind] = {}
        if self.targets == "all":
            left, read = _linears(plan, experts)
            for module, (kind, stored, names) in read.items():
                matrices[module], kinds[module] = stored, kind
                taken.update(names)
            spent |= {name for name in taken if name.endswith(_SPENT)}
        if not matrices:
            raise PlanError("no linear layer found that runtimes load in NVFP4")
        check_sets(kinds, left)
        groups = shared_groups(kinds)
        return Chosen(groups, matrices, places, frozenset(taken), frozenset(spent), tuple(left))

    def _input_maxima(self, plan: Plan, chosen: Chosen) -> InputMaxima | None:
        if self.stats is None:
            return None
        dims = plan.census.dims
        layers = tuple(dict.fromkeys(layer for layer, _, _ in chosen.places.values()))
        return input_maxima(
            Path(self.stats), layers, dims.num_experts, dims.hidden_size, dims.moe_intermediate_size
        )

    def _planned(
        self, plan: Plan, chosen: Chosen, others: Named, made: Named, maxima: InputMaxima | None
    ) -> Plan:
        linears = runtime_linears(plan, others)
        block = fp8_block(plan, linears)
        if block is not None and self.dialect == "compressed-tensors":
            check_plain_scales(others)
            others = {as_weight_scale(name, others): output for name, output in others.items()}
        dropped = {
            piece.origin.name: SPENT_RULE
            for name in chosen.spent
            for piece in plan.tensors[name].pieces
            if isinstance(piece.origin, Source)
        }
        stale = dict.fromkeys(
            (name for name in _STALE if name in plan.side_files),
            "nvfp4: its quantization block no longer holds",
        )
        inputs = maxima is not None
        config = without_quantization(plan.config)
        if self.dialect == "compressed-tensors":
            config["quantization_config"] = _packed_block(plan, chosen, others, block, inputs)
        else:
            config["quantization_config"] = _modelopt_block(plan, chosen, others, linears, inputs)
        return plan.logged(
            self._entry(plan, chosen, maxima, hybrid=block is not None),
            tensors={**others, **made},
            config=true_lists(config, ()),
            dropped={**plan.dropped, **dropped},
            side_files=tuple(name for name in plan.side_files if name not in stale),
            dropped_files={**plan.dropped_files, **stale},
        )

    def _entry(
        self, plan: Plan, chosen: Chosen, maxima: InputMaxima | None, *, hybrid: bool
    ) -> LogEntry:
        notes = []
        spec = repr(self)
        if maxima is not None:
            seen = sha256(repr(sorted(maxima.largest.items())).encode()).hexdigest()
            spec = repr(replace(self, stats=seen[:32]))  # what was read, not where
            notes.append("activations quantized with the statistics' input scales")
            if maxima.unseen:
                notes.append(f"{maxima.unseen} experts saw no token and take their layer's largest")
        else:
            notes.append("weights only: no input scales")
            if hybrid and self.dialect == "modelopt":
                notes.append("sglang 0.5.23 loads NVFP4 experts beside FP8 with input scales alone")
        dims = plan.census.dims
        if any(plan.family.is_mtp(n, dims) for n in plan.tensors):
            notes.append("MTP layers as they are")
        if chosen.left:
            notes.append(f"{len(chosen.left)} linears left as they are: no whole blocks of {BLOCK}")
        counted = 3 * dims.num_experts * len(dims.groups.get("moe", ()))
        alone = not chosen.linears
        return LogEntry(
            self.name, spec, len(chosen.matrices), counted if alone else None, tuple(notes),
            "expert matrices" if alone else "matrices",
        )  # fmt: skip


def _without_drafts(plan: Plan, names: Iterable[str]) -> frozenset[str]:
    dims = plan.census.dims
    return frozenset(name for name in names if not plan.family.is_mtp(name, dims))


def _linears(
    plan: Plan, experts: Experts | None
) -> tuple[dict[str, Kind], dict[str, tuple[Kind, Stored, tuple[str, ...]]]]:
    """Linears beside the experts: those whose columns are no whole blocks, and how the others are
    read."""
    left: dict[str, Kind] = {}
    found: dict[str, tuple[Kind, Stored, tuple[str, ...]]] = {}
    for module, kind in quantizable(plan, experts.taken if experts is not None else ()):
        stored, names = read_matrix(plan, module)
        if stored.columns % BLOCK:
            left[module] = kind
        else:
            found[module] = kind, stored, names
    return left, found


def _packed_block(
    plan: Plan, chosen: Chosen, others: Named, block: tuple[int, int] | None, inputs: bool
) -> dict[str, Any]:
    """compressed-tensors' block. Where `Linear` means the FP8 ones, packed ones go by name."""
    drafts = draft_patterns(plan)
    experts = "".join(f"(?!{pattern})" for pattern in drafts)
    paths = plan.family.expert_paths if chosen.places else ()
    targets = [rf"re:{experts}.*{escape(path)}\..*" for path in paths]
    if chosen.linears:
        targets = ["Linear"] if block is None else [*targets, *chosen.linears]
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized" if block is None else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_config(targets, inputs=inputs)},
        "ignore": ignored_names(plan, others),
    }
    if block is not None:
        config["config_groups"]["group_1"] = fp8_group_config(block)
    return config


def _modelopt_block(
    plan: Plan, chosen: Chosen, others: Named, linears: Mapping[str, bool], inputs: bool
) -> dict[str, Any]:
    """modelopt's block, or the source's own for FP8 layers with NVFP4 experts."""
    fp8 = [module for module, is_fp8 in linears.items() if is_fp8]
    if not fp8:
        return modelopt_config(ignored_globs(plan, others, chosen.matrices), inputs=inputs)
    if chosen.linears:
        raise PlanError(
            f"{fp8[0]!r} is FP8 and would stay so beside other layers in NVFP4, for which modelopt's "
            "dialect has no place: target experts, take dialect compressed-tensors, or dequantize "
            "first (a recipe of `dequant` and `nvfp4` is one read)"
        )
    return hybrid_config(fp8_own_block(plan), kept_expert_globs(plan, others), inputs=inputs)


PASSES = (ToNvfp4,)
