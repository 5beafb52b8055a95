"""relabel: quantized weights in another form, without rounding.

Codes stay the numbers that they are; where they lie, what tensors are called, how scales are spelled and
what the config says change. What cannot be said in the other form is refused, with the tensor's name.

    to                   from
    compressed-tensors   GPTQ's two forms, AutoAWQ's and AutoRound's, with block FP8 beside or without;
                         modelopt's NVFP4, block FP8 of DeepSeek and Qwen,
                         FP8 by tensor or row of modelopt and Quark, Quark's MXFP4
    gptq, gptq-v2        the other one, compressed-tensors' packed integers, AutoAWQ's and AutoRound's
    awq                  4 bits of compressed-tensors, of GPTQ's forms, and of AutoRound
    modelopt             compressed-tensors' NVFP4
    fp8                  compressed-tensors' block FP8; MXFP4 of compressed-tensors or DeepSeek-V4
    nvfp4                MXFP4 of compressed-tensors or DeepSeek-V4 (passes/mxfp4_as_nvfp4.py)
    quark                MXFP4 of compressed-tensors
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from re import escape
from typing import Any, ClassVar, Literal, TypeVar

from qconvert.checkpoint.integer_config import awq_form, gptq_form
from qconvert.checkpoint.quantization_config import fp8_scheme
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.int_scheme import IntScheme
from qconvert.core.names import activations_of, split_parameter, with_fused_names
from qconvert.core.parameter_names import MXFP4, MXFP4_BESIDE, MXFP4_PLAIN, NVFP4, Dialect
from qconvert.core.roles import SHARED, Kind
from qconvert.formats.base import Read, Stored
from qconvert.formats.fp8.decode import FNUZ, WEIGHT_DTYPES
from qconvert.formats.fp8.format import fp8_config, fp8_group_config, fp8_tensor_group_config
from qconvert.formats.fp8.from_mxfp4 import MxToBlockFp8
from qconvert.formats.int_packed.decode import IntDecoder
from qconvert.formats.int_packed.format import (
    awq_config,
    gptq_config,
    group_config,
    left_parts,
    left_pattern,
)
from qconvert.formats.int_packed.packers import Packing, RepackInts, packer
from qconvert.formats.mx import format as mx
from qconvert.formats.mx.decode import EXPONENTS
from qconvert.formats.nvfp4.format import group_config as nvfp4_group
from qconvert.formats.nvfp4.format import modelopt_config
from qconvert.formats.nvfp4.relabel import Reciprocal
from qconvert.formats.registry import check_from_source, encoded, read_matrix
from qconvert.models.experts import STALE_RULE
from qconvert.models.linears import linears_and_routers, runtime_linears
from qconvert.models.unquantized import (
    OutputsByName,
    all_experts,
    expert_targets,
    ignored,
    ignored_globs,
    ignored_linears,
    ignored_names,
    shared_paths,
    with_draft_names,
    with_weight_scales,
)
from qconvert.ops.constant import constant_i64
from qconvert.passes.kv_scale import with_source_cache
from qconvert.passes.mixture import compressed_config
from qconvert.passes.mxfp4_as_nvfp4 import as_nvfp4
from qconvert.passes.replace_weights import replace_weights, sources_of
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

T = TypeVar("T", bound=Hashable)
Fp8Block = tuple[int, int]
Form = Literal["compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt", "fp8", "nvfp4", "quark"]
_SHAPE = "weight_shape"
_SIDE = 128


@dataclass(frozen=True, slots=True)
class Relabel:
    """Write quantized weights in another form, with the same codes.

    `to` is the form. `nearest`: NVFP4's global scales without an exact reciprocal
    become the nearest float32. `dialect` is that of `to: nvfp4`, and `input_scale` then one constant for
    the inputs of all that is relabelled, as modelopt stores it.

    Raises PlanError where the folder has no form, or several, that become this one without rounding, and
    as the readers of the forms do.
    """

    name: ClassVar[str] = "relabel"

    to: Form
    nearest: bool = False
    dialect: Dialect | None = None
    input_scale: float | None = None

    def __post_init__(self) -> None:
        if (self.to == "nvfp4") != (self.dialect is not None):
            raise PlanError("to nvfp4 and a dialect go together: give both, or neither")
        if self.input_scale is not None and self.to != "nvfp4":
            raise PlanError("an input scale is written to nvfp4 only: leave it out")
        if self.input_scale is not None and not 0 < self.input_scale < inf:
            raise PlanError(f"expected an input scale above 0, found {self.input_scale}")
        if self.nearest and self.to not in NVFP4:
            raise PlanError("nearest is of scales between NVFP4's dialects: leave it out")

    def __call__(self, plan: Plan) -> Plan:
        check_from_source(plan)
        found = dict(encoded(plan))
        stacks = mx.stacks(plan)
        if stacks:
            raise PlanError(
                f"{next(iter(stacks))!r} is a stack of MXFP4 matrices of gpt-oss, whose experts have "
                "biases and interleave gate and up: no other form of them is loaded by a runtime"
            )
        fp8 = [name for name, o in plan.tensors.items() if o.type.dtype in WEIGHT_DTYPES]
        weights = [name for name in fp8 if split_parameter(name)[1] == "weight"]
        fnuz = next((name for name in weights if plan.tensors[name].type.dtype in FNUZ), None)
        if fnuz is not None:
            raise PlanError(
                f"{fnuz!r} is {plan.tensors[fnuz].type}, whose codes no other form has: dequantize and "
                "quantize anew (a recipe of `dequant` and `fp8`)"
            )
        kinds = {getattr(stored.decoder, "format", "") for stored, _ in found.values()}
        if not kinds and not weights:
            raise PlanError("no quantized weight found: there is nothing to relabel")
        if kinds == {"mxfp4"} and self.to == "fp8":
            return self._fp8_of_mxfp4(plan, found)
        if kinds == {"mxfp4"} and self.to in ("compressed-tensors", "quark") and not weights:
            return self._renamed_mxfp4(plan, found)
        if kinds == {"mxfp4"} and self.dialect is not None:
            return as_nvfp4(
                plan, (self.name, options_of(self)), found, self.dialect, self.input_scale
            )
        beside = self.to == "compressed-tensors" and len(kinds) == 1 and kinds <= set(_INTS)
        if len(kinds) + bool(weights) > 1 and not beside:
            raise PlanError(
                "its weights are in several quantized forms, and only folders of one are relabelled"
            )
        if not kinds and self.to == "compressed-tensors":
            whole = self._whole_fp8(plan, weights)
            return whole or self._packed_fp8(plan, weights)
        if not kinds and self.to == "fp8":
            return self._own_fp8(plan, weights)
        (kind,) = kinds or {"fp8"}
        if kind == "nvfp4" and self.to in NVFP4:
            return self._nvfp4(plan, found)
        if kind in _INTS and self.to in ("compressed-tensors", "gptq", "gptq-v2", "awq"):
            return self._ints(plan, found, weights)
        raise PlanError(
            f"{_NAMES.get(kind, 'its format')} does not become {self.to} without rounding"
            f"{_HINTS.get(kind, '')}"
        )

    def _planned(
        self,
        plan: Plan,
        tensors: OutputsByName,
        block: Mapping[str, Any],
        count: int,
        note: str,
        dropped: Iterable[str] = (),
    ) -> Plan:
        entry = LogEntry(self.name, options_of(self), count, None, (note,), "matrices")
        rules = sources_of(plan, dropped, STALE_RULE)
        kept = with_source_cache(plan, block)
        return replace_weights(plan, entry, tensors, dropped=rules, block=kept)

    # --- integers

    def _ints(self, plan: Plan, found: Mapping[str, Read], fp8: list[str]) -> Plan:
        """Integers, with block FP8 beside them that becomes a group of its own."""
        packing: Packing = "compressed-tensors"
        if self.to in ("gptq", "gptq-v2", "awq"):
            packing = self.to
        if all(_ints_of(stored).packing == packing for stored, _ in found.values()):
            raise PlanError(f"its weights are in form {self.to} already: use it as it is")
        schemes = {module: _scheme(plan, module, stored) for module, (stored, _) in found.items()}
        taken = {name for _, names in found.values() for name in names}
        shapes = [f"{m}.{_SHAPE}" for m in found if f"{m}.{_SHAPE}" in plan.tensors]
        others = {n: o for n, o in plan.tensors.items() if n not in taken and n not in shapes}
        made: dict[str, Output] = {}
        for module, (stored, _) in found.items():
            made |= _repacked(plan, module, stored, schemes[module], packing)
        block = self._ints_block(plan, others, schemes, _beside(plan, fp8))
        if fp8:
            others = with_weight_scales(others)
        return self._planned(
            plan, {**others, **made}, block, len(found), "codes as they are", shapes
        )

    def _ints_block(
        self,
        plan: Plan,
        others: OutputsByName,
        schemes: Mapping[str, IntScheme],
        fp8: Mapping[str, Fp8Block],
    ) -> dict[str, Any]:
        packed, members = _Packed.of(plan, [*schemes, *fp8]), _members(schemes)
        if self.to == "compressed-tensors":
            left = ignored(
                plan,
                others,
                experts=packed.experts,
                shared=packed.shared,
                drafts_too=packed.drafts,
            )
            every: dict[str, IntScheme | Fp8Block] = {**schemes, **fp8}
            groups = _members(every)
            targets = [packed.targets(plan)] if len(groups) == 1 else _targets(plan, groups)
            made = [
                group_config(one, names)
                if isinstance(one, IntScheme)
                else fp8_group_config(one, names)
                for one, names in zip(groups, targets, strict=True)
            ]
            return compressed_config(made, left)
        named = with_draft_names(plan, runtime_linears(plan, others))
        scheme, *more = members
        if self.to == "awq":
            if more:
                raise PlanError(
                    f"its matrices have {len(members)} schemes, and AutoAWQ's form has place for one"
                )
            kept = plan.role_index.dims.num_experts and not packed.experts
            experts = plan.family.expert_paths if kept else ()
            named = with_draft_names(plan, linears_and_routers(plan, others))
            return awq_config(scheme, left_parts(named, experts, schemes))
        left = [left_pattern(name for name in named if name not in schemes)]
        if not packed.experts and plan.role_index.dims.num_experts:
            left += [p.removeprefix("re:") for p in all_experts(plan.family.expert_paths)]
        block = gptq_config(scheme, 1 if self.to == "gptq" else 2, left)
        if more:
            block["dynamic"] |= _dynamic(plan, members)
        return block

    # --- NVFP4

    def _nvfp4(self, plan: Plan, found: Mapping[str, Read]) -> Plan:
        dialect: Dialect = "modelopt" if self.to == "modelopt" else "compressed-tensors"
        dialects = {_dialect(names) for _, names in found.values()}
        if dialects == {dialect}:
            raise PlanError(f"its weights are NVFP4 of {dialect} already: use it as it is")
        (source,) = dialects
        old, new = NVFP4[source], NVFP4[dialect]
        op = Reciprocal("multiplier" if dialect == "modelopt" else "divisor", self.nearest)
        made: dict[str, Output] = {}
        taken: set[str] = set()
        inputs = False
        for module, (_, names) in found.items():
            weight, scale, global_scale = names
            made[f"{module}.{new.weight}"] = plan.tensors[weight]
            made[f"{module}.{new.scale}"] = plan.tensors[scale]
            pairs = {new.global_scale: global_scale}
            if f"{module}.{old.input}" in plan.tensors:
                pairs[new.input] = f"{module}.{old.input}"
                inputs = True
            for parameter, name in pairs.items():
                (one,) = apply(op, plan.tensors[name])
                made[f"{module}.{parameter}"] = one.reshape(new.scalar)
            taken |= {*names, *pairs.values()}
        others = {name: o for name, o in plan.tensors.items() if name not in taken}
        packed = _Packed.of(plan, list(found))
        if dialect == "modelopt":
            block = modelopt_config(ignored_globs(plan, others, found), inputs=inputs)
        else:
            left = ignored_names(plan, others, drafts=packed.drafts)
            block = compressed_config([nvfp4_group(packed.targets(plan), inputs=inputs)], left)
        return self._planned(
            plan, {**others, **made}, block, len(found), "codes and block scales as they are"
        )

    # --- FP8

    def _packed_fp8(self, plan: Plan, weights: list[str]) -> Plan:
        """Block FP8 under compressed-tensors' names."""
        _check_unsplit(plan, weights)
        block = _block_of(plan, weights)
        if not any(f"{name}_scale_inv" in plan.tensors for name in weights):
            raise PlanError("its scales have compressed-tensors' names already: use it as it is")
        tensors = with_weight_scales(plan.tensors)
        others = {n: o for n, o in plan.tensors.items() if n not in weights}
        packed = _Packed.of(plan, [split_parameter(name)[0] for name in weights])
        left = ignored(
            plan, others, experts=packed.experts, shared=packed.shared, drafts_too=packed.drafts
        )
        config = compressed_config([fp8_group_config(block, packed.targets(plan))], left)
        return self._planned(plan, tensors, config, len(weights), "codes and scales as they are")

    def _whole_fp8(self, plan: Plan, weights: list[str]) -> Plan | None:
        """FP8 by tensor or by row of modelopt or Quark as compressed-tensors shapes its scales, with
        input scales where there are some; None for FP8 in blocks, and for other methods."""
        if any(c.method not in ("modelopt", "quark") for c in plan.checkpoint.quantization_configs):
            return None
        reshaped: dict[str, Output] = {}
        by_row = set[bool]()
        for name in weights:
            module = split_parameter(name)[0]
            stored, (_, scale) = read_matrix(plan, module)
            kind = stored.args[1].type
            if kind.shape not in ((1, 1), (stored.rows, 1)):
                return None
            by_row.add(kind.shape != (1, 1))
            row = kind.shape != (1, 1) or stored.rows == 1
            reshaped[scale] = plan.tensors[scale].reshape((stored.rows, 1) if row else (1,))
            if (given := plan.tensors.get(f"{module}.input_scale")) is not None:
                reshaped[f"{module}.input_scale"] = given.reshape((1,))
        inputs = [name for name in reshaped if name.endswith(".input_scale")]
        if len(by_row) > 1 or len(inputs) not in (0, len(weights)) or (inputs and True in by_row):
            raise PlanError(
                "its FP8 weights have scales of matrices and of rows, or input scales for some alone: "
                "one group of compressed-tensors has no place for both"
            )
        packed = _Packed.of(plan, [split_parameter(name)[0] for name in weights])
        others = {n: o for n, o in plan.tensors.items() if n not in weights}
        left = ignored(
            plan, others, experts=packed.experts, shared=packed.shared, drafts_too=packed.drafts
        )
        targets = packed.targets(plan)
        group = (
            fp8_group_config(None, targets)
            if True in by_row
            else fp8_tensor_group_config(targets, inputs=bool(inputs))
        )
        note = "codes and scales as they are"
        block = compressed_config([group], left)
        return self._planned(plan, {**plan.tensors, **reshaped}, block, len(weights), note)

    def _own_fp8(self, plan: Plan, weights: list[str]) -> Plan:
        """Block FP8 under the names of DeepSeek and Qwen."""
        block = _block_of(plan, weights)
        scales = {f"{name}_scale": f"{name}_scale_inv" for name in weights}
        missing = next((scale for scale in scales if scale not in plan.tensors), None)
        if missing is not None:
            raise PlanError(
                f"{missing!r} is missing: its scales have the names of DeepSeek and Qwen already, or "
                "others than compressed-tensors'"
            )
        exponents = next((s for s in scales if plan.tensors[s].type.dtype in EXPONENTS), None)
        if exponents is not None:
            raise PlanError(
                f"{exponents!r} is {plan.tensors[exponents].type}: scales are exponents, as of MXFP8, "
                "and runtimes read floats beside block FP8; dequantize and quantize anew (a recipe of "
                "`dequant` and `fp8`)"
            )
        activations = ((n, activations_of(n)) for n in plan.tensors)
        static = next((n for n, of in activations if of and f"{of[0]}.weight" in weights), None)
        if static is not None:
            raise PlanError(
                f"{static!r}: activations have static scales, which this relabel would lose; dequantize "
                "and quantize anew (a recipe of `dequant` and `fp8`)"
            )
        tensors = {scales.get(name, name): output for name, output in plan.tensors.items()}
        others = {n: o for n, o in plan.tensors.items() if n not in scales and n not in weights}
        left = with_fused_names(with_draft_names(plan, ignored_linears(plan, others)))
        config = fp8_config(block, left, exponents=False)
        return self._planned(plan, tensors, config, len(weights), "codes and scales as they are")

    def _renamed_mxfp4(self, plan: Plan, found: Mapping[str, Read]) -> Plan:
        """MXFP4 under the names of compressed-tensors or Quark."""
        quark = self.to == "quark"
        pairs = {
            old: f"{module}.{new}"
            for module, (_, names) in found.items()
            for old, new in zip(names, MXFP4_PLAIN if quark else MXFP4, strict=True)
        }
        if all(old == new for old, new in pairs.items()):
            raise PlanError(f"its weights are in form {self.to} already: use it as it is")
        if any(name.endswith(f".{MXFP4_BESIDE[1]}") for name in pairs):
            raise PlanError(
                "MXFP4 with scales as DeepSeek-V4 names them becomes fp8 or nvfp4 alone"
            )
        tensors = {pairs.get(name, name): output for name, output in plan.tensors.items()}
        others = {name: o for name, o in plan.tensors.items() if name not in pairs}
        packed = _Packed.of(plan, list(found))
        left = ignored(
            plan, others, experts=packed.experts, shared=packed.shared, drafts_too=packed.drafts
        )
        block = mx.quark_config(with_fused_names(left))
        if not quark:
            block = compressed_config([mx.mx_group_config("mxfp4", packed.targets(plan))], left)
        note = "codes and exponents as they are"
        return self._planned(plan, tensors, block, len(found), note)

    def _fp8_of_mxfp4(self, plan: Plan, found: Mapping[str, Read]) -> Plan:
        """MXFP4 codes as E4M3 codes: beside DeepSeek-V4's FP8 layers under the same names, or alone."""
        beside = all(names[1].endswith(f".{MXFP4_BESIDE[1]}") for _, names in found.values())
        op = MxToBlockFp8()
        made: dict[str, Output] = {}
        taken = {name for _, names in found.values() for name in names}
        for module, (stored, _) in found.items():
            try:
                codes, scale = apply(op, *stored.args)
            except PlanError as error:
                raise PlanError(f"{module}: {error}") from error
            made[f"{module}.weight"] = codes
            made[f"{module}.{'scale' if beside else 'weight_scale_inv'}"] = scale
        others = {name: o for name, o in plan.tensors.items() if name not in taken}
        if beside:
            own = next((c.block for c in plan.checkpoint.quantization_configs), None)
            if own is None or own.get("weight_block_size") != [_SIDE, _SIDE]:
                raise PlanError(f"its other layers are no FP8 in blocks of {_SIDE}x{_SIDE}")
            config = own
        else:
            left = with_fused_names(with_draft_names(plan, ignored_linears(plan, others)))
            config = fp8_config((_SIDE, _SIDE), left, exponents=False)
        note = "MXFP4 codes as the same numbers in E4M3"
        return self._planned(plan, {**others, **made}, config, len(found), note)


def _beside(plan: Plan, fp8: list[str]) -> dict[str, Fp8Block]:
    """The blocks of FP8 weights that stay as they are beside integers. Raises PlanError for those that
    compressed-tensors' runtimes do not take so."""
    _check_unsplit(plan, fp8)
    block = _block_of(plan, fp8) if fp8 else None
    return {split_parameter(name)[0]: block for name in fp8 if block is not None}


def _check_unsplit(plan: Plan, fp8: list[str]) -> None:
    split = next((name for name in fp8 if plan.role_index.kind(name) is Kind.KV_UP), None)
    if split is not None:
        raise PlanError(
            f"{split!r} is FP8, and sglang splits it after loading, which it does not do for "
            "compressed-tensors: use the folder as it is, or write it anew (a recipe of `dequant` and "
            "`fp8: {dialect: compressed-tensors}`)"
        )


def _members(schemes: Mapping[str, T]) -> dict[T, list[str]]:
    """Modules by scheme, that of the most first."""
    found: dict[T, list[str]] = {}
    for module, scheme in schemes.items():
        found.setdefault(scheme, []).append(module)
    return dict(sorted(found.items(), key=lambda one: -len(one[1])))


def _targets(plan: Plan, members: Mapping[T, list[str]]) -> list[list[str]]:
    """compressed-tensors' targets of several schemes, under the names that runtimes fuse modules to as
    well: a pattern for modules that differ in layer and expert alone, where all of them have one; else
    names, which are asked for before patterns. Routed experts that all have one scheme get the patterns
    that every runtime finds them by."""
    alike: dict[str, set[T]] = {}
    for scheme, modules in members.items():
        for module in with_fused_names(modules):
            alike.setdefault(_pattern(module), set()).add(scheme)
    routed = {
        module: scheme
        for scheme, modules in members.items()
        for module in modules
        if plan.role_index.kind(f"{module}.weight").routed
    }
    together = len(set(routed.values())) == 1
    found = []
    for scheme, modules in members.items():
        own: dict[str, None] = {}
        if together and scheme in routed.values():
            own |= dict.fromkeys(expert_targets(plan.family.expert_paths))
            modules = [module for module in modules if module not in routed]
        for module in with_fused_names(modules):
            pattern = _pattern(module)
            own[f"re:{pattern}" if alike[pattern] == {scheme} else module] = None
        found.append(list(own))
    return found


def _pattern(module: str) -> str:
    """A pattern of a module in any layer and of any expert, whatever comes before its layers."""
    _, layers, after = module.partition("layers.")
    parts = (layers + after if layers else module).split(".")
    return ".*" + r"\.".join(r"\d+" if part.isdigit() else escape(part) for part in parts) + "$"


def _dynamic(plan: Plan, members: Mapping[IntScheme, list[str]]) -> dict[str, Any]:
    """Rules of GPTQModel's `dynamic` for modules of other schemes than that of the most; names before
    patterns, since the first that matches applies."""
    single: dict[str, Any] = {}
    patterns: dict[str, Any] = {}
    for scheme, targets in zip(members, _targets(plan, members), strict=True):
        change = {
            "bits": scheme.bits,
            "group_size": -1 if scheme.group is None else scheme.group,
            "sym": scheme.symmetric,
            "desc_act": scheme.actorder == "group",
        }
        for target in targets:
            pattern = target.removeprefix("re:")
            if pattern == target:
                single[f"+:^{escape(target)}$"] = change
            elif scheme != next(iter(members)):
                # Runtimes ask for all experts of a layer at once.
                whole = pattern.removesuffix(r"\..*")
                patterns[f"+:{pattern}" if whole == pattern else f"+:{whole}(\\..*)?$"] = change
    return single | patterns


_INTS = ("int-packed", "gptq", "awq")
_NAMES: Mapping[str, str] = {
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "int-packed": "compressed-tensors' packed integers",
    "gptq": "GPTQ's form",
    "awq": "AutoAWQ's form",
    "int8": "INT8",
}
_HINTS: Mapping[str, str] = {
    "mxfp4": "; it becomes NVFP4 (--to nvfp4) or block FP8 (--to fp8)",
    "nvfp4": "; its dialects are modelopt and compressed-tensors",
}


@dataclass(frozen=True, slots=True)
class _Packed:
    """Kinds of modules that are quantized: routed experts, shared ones, linears of neither, draft
    layers."""

    experts: bool
    shared: bool
    linears: bool
    drafts: bool

    @classmethod
    def of(cls, plan: Plan, modules: list[str]) -> _Packed:
        dims = plan.role_index.dims
        kinds = [(module, plan.role_index.kind(f"{module}.weight")) for module in modules]
        return cls(
            any(kind.routed for _, kind in kinds),
            any(kind in SHARED for _, kind in kinds),
            any(not kind.routed and kind not in SHARED for _, kind in kinds),
            any(plan.family.is_mtp(f"{m}.weight", dims) and not kind.routed for m, kind in kinds),
        )

    def targets(self, plan: Plan) -> list[str]:
        """compressed-tensors' targets."""
        if self.linears or not self.experts:
            return ["Linear"]
        found = expert_targets(plan.family.expert_paths)
        return found + [rf"re:.*{escape(p)}.*" for p in (shared_paths(plan) if self.shared else ())]


def _dialect(names: Sequence[str]) -> Dialect:
    """The dialect of an NVFP4 matrix by the name of its global scale."""
    last = split_parameter(names[-1])[1]
    return next(dialect for dialect, own in NVFP4.items() if own.global_scale == last)


def _ints_of(stored: Stored) -> IntDecoder:
    decoder: Any = stored.decoder  # of one of _INTS
    found: IntDecoder = decoder
    return found


def _scheme(plan: Plan, module: str, stored: Stored) -> IntScheme:
    """Return how a matrix is quantized, but for the dtype of its scales: AutoAWQ's and GPTQ's form
    may store zero points of symmetric ones, too."""
    stated, awq = _ints_of(stored).stated, awq_form(plan.checkpoint, module)
    if awq is not None:
        return IntScheme(_ints_of(stored).scheme[0], awq.group, not awq.zero_point)
    if stated is not None:
        return stated
    return replace(gptq_form(plan.checkpoint, module).scheme, scale_dtype="BF16")


def _repacked(
    plan: Plan, module: str, stored: Stored, scheme: IntScheme, packing: Packing
) -> dict[str, Output]:
    """The tensors of a matrix in another form, by name."""
    decoder = _ints_of(stored)
    scale = stored.args[decoder.scale_at].type.dtype
    own = replace(scheme, scale_dtype=scale)  # type: ignore[arg-type]
    draft = plan.family.is_mtp(f"{module}.weight", plan.role_index.dims)
    try:
        kind = packer(packing, own, draft=draft)
        made = apply(RepackInts(decoder, kind), *stored.args)
    except PlanError as error:
        raise PlanError(f"{module}: {error}") from error
    found = dict(zip((f"{module}.{suffix}" for suffix in kind.suffixes), made, strict=True))
    if packing == "compressed-tensors":
        found[f"{module}.{_SHAPE}"] = apply(constant_i64((stored.rows, stored.columns)))[0]
    return found


def _block_of(plan: Plan, weights: list[str]) -> tuple[int, int]:
    """The one block of FP8 weights. Raises PlanError where scales are of rows, of matrices or differ."""
    blocks = {fp8_scheme(plan.checkpoint, split_parameter(name)[0]).block for name in weights}
    (block,) = blocks if len(blocks) == 1 else (None,)
    if block is None:
        raise PlanError(
            "its FP8 weights have no block scales, or several blocks: only block FP8 has both names"
        )
    return block


PASSES = (Relabel,)
