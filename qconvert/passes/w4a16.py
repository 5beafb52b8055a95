"""w4a16: weights in packed INT4 or INT8, rounded to nearest or calibrated; by default those of the
routed experts, with all other layers as they are.

The config follows what runtimes do with it (read in sglang 0.5.23). Where targets match experts alone,
every other linear that is not ignored is an error, so each unquantized one is named. Linears that stay
in block FP8 get a second group, with scales under compressed-tensors' name, which sglang and vLLM 0.33
load. Scales that are exponents have no such name: they keep theirs, with `linear_fp8_config`, which
sglang alone reads, for all linears at once and without looking at lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.int_scheme import Actorder, Bits, IntScheme, Packer, Signs
from qconvert.core.roles import SHARED
from qconvert.formats.base import Stored
from qconvert.formats.int_packed.config import (
    gptq_config,
    group_config,
    left_pattern,
)
from qconvert.formats.int_packed.encode import RoundToNearest, Scales, encoder
from qconvert.formats.int_packed.limits import TP_SIZES, fitting_groups, loads_at
from qconvert.formats.int_packed.packers import PackGptq, Packing, packer
from qconvert.models.experts import (
    Experts,
    Projection,
    calibrated,
    check_described,
    routed_experts,
)
from qconvert.models.linears import (
    calibrated_linear,
    check_sets,
    matches,
    runtime_linears,
    skip_reason,
)
from qconvert.models.skip_reasons import check_experts, check_runs
from qconvert.models.unquantized import (
    Named,
    all_experts,
    check_nothing_packed,
    fp8_block,
    has_exponents,
    ignored,
    no_experts,
    shared_paths,
    with_draft_names,
    with_weight_scales,
)
from qconvert.ops.constant import constant_i64
from qconvert.ops.rowwise import Recode, RowOp
from qconvert.passes.by_row import compressed_block
from qconvert.passes.ranks import listed, loads_note
from qconvert.passes.replace_weights import (
    Selection,
    replace_weights,
    select_linears,
    shared_experts,
)
from qconvert.passes.shared_experts import SharedExperts, check_any_shared, shared_notes
from qconvert.plan.pass_options import EXPERTS, options_with
from qconvert.plan.plan import Plan
from qconvert.runtimes.shared_experts import loses_shared, would_fuse
from qconvert.samples.request import Calibration, digest_of

GROUP = 128


@dataclass(frozen=True, slots=True)
class ExpertsToW4A16:
    """Weights of `bits`, in groups of `group_size` columns that share a scale (None: a whole row does),
    packed as `packing` says. `targets` and `ignore` are names, ends of names, `re:` patterns, or
    `Linear`, as in llm-compressor; EXPERTS means the routed experts of every family, whatever their
    names. Layers that no runtime is known to load quantized are never taken. With `leave_bf16` a linear
    whose columns are not whole groups stays as it is (an expert never does). `tp` is a tensor-parallel
    size that the result must load at. With `calibrate` GPTQ finds the codes of all that is targeted,
    but not of draft layers, for which transformers has no class. `shared_experts` says whether shared
    experts are quantized with the routed ones, or kept whatever targets name; None: as targets name
    them, and where none does, beside rounded ones, where sglang would otherwise fuse them and not read
    them; `named`: as targets name them alone, as llm-compressor has it. `scales`
    of rounding to nearest are each group's amax over half the range, or with `search` those whose codes
    have the least squared error; `signs` of symmetric INT4's says whether scales below 0 are tried, too.

    Raises PlanError for targets that match nothing, for part of a set that runtimes load as one, for
    groups that do not fit (naming groups that do), for a search beside a calibration, and as
    `routed_experts` does.
    """

    name: ClassVar[str] = "w4a16"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    group_size: int | None = GROUP
    bits: Bits = 4
    symmetric: bool = True
    actorder: Actorder | None = None
    packing: Packing = "compressed-tensors"
    targets: tuple[str, ...] = (EXPERTS,)
    ignore: tuple[str, ...] = ()
    leave_bf16: bool = False
    tp: int | None = None
    calibrate: Calibration | None = None
    shared_experts: SharedExperts | Literal["named"] | None = None
    scales: Scales = "amax"
    signs: Signs = "both"

    def __post_init__(self) -> None:
        if self.scales == "amax" and self.signs != "both":
            raise PlanError(
                f"signs {self.signs!r} are of scales 'search', and scales of amax are never below 0: "
                "leave it out; a calibration's stand in `calibrate`"
            )
        if self.scales != "amax" and self.calibrate is not None:
            raise PlanError(
                f"scales {self.scales!r} are for rounding to nearest, and a calibration's stand in "
                "`calibrate`: leave one of the two out"
            )
        asked = self.calibrate
        if asked is not None and asked.order == "stored" and self.actorder is not None:
            raise PlanError(
                f"order 'stored' solves columns as they are stored, and actorder {self.actorder!r} "
                "by importance: leave one of the two out"
            )
        if self.tp is not None and self.tp < 1:
            raise PlanError(f"expected a tensor parallel size of 1 or more, found {self.tp}")

    @property
    def scheme(self) -> IntScheme:
        """compressed-tensors keeps scales in the weights' dtype, GPTQ in fp16."""
        dtype: Any = "BF16" if self.packing == "compressed-tensors" else "F16"
        return IntScheme(self.bits, self.group_size, self.symmetric, self.actorder, dtype)

    def packer(self, *, draft: bool = False) -> Packer:
        """Return what packs a matrix's codes. Raises PlanError for asymmetric codes in GPTQ's first
        version: which zero points new codes need is not known before they are made."""
        if self.packing == "gptq" and not self.symmetric:
            raise PlanError(
                "GPTQ's first version stores zero points less one and has no room for 0, which "
                "asymmetric weights need: take gptq-v2, or symmetric weights"
            )
        return packer(self.packing, self.scheme, draft=draft)

    def encoder(self, *, draft: bool = False) -> RowOp:
        """The op that rounds a BF16 matrix and packs it. Columns of draft experts, which are rounded
        beside calibrated ones, are not reordered."""
        scheme = self.scheme
        if self.calibrate is not None and scheme.actorder is not None:
            return RoundToNearest(replace(scheme, actorder=None), self.packer(draft=draft))
        return encoder(scheme, self.packer(draft=draft), self.scales, self.signs)

    def __call__(self, plan: Plan) -> Plan:
        chosen = self.chosen(plan)
        digest = self.digest(plan, chosen)
        results: dict[str, Output] = {}
        for projection in chosen.experts.projections if chosen.experts else ():
            results.update(self.results(projection, digest))
        for module, linear in chosen.linears.items():
            draft = plan.family.is_mtp(f"{module}.weight", plan.role_index.dims)
            if digest is None or draft:
                results.update(self.rounded(module, linear.stored, draft=draft))
                continue
            packers = (self.packer(),)
            (made,) = calibrated_linear(plan, module, linear.stored, linear.names, packers, digest)
            results.update(self.named(module, linear.stored, made))
        return self.with_results(plan, chosen, results, digest)

    def digest(self, plan: Plan, chosen: Selection) -> str | None:
        """The digest of the calibration, None without one. Raises PlanError for a model that cannot be
        run a layer at a time, and for statistics of experts that it has not."""
        request = self.request(plan, chosen)
        if request is None:
            return None
        check_runs(plan)
        if request.save_stats is not None and not plan.role_index.dims.num_experts:
            raise PlanError(
                "save_stats: statistics are of routed experts, and this model has none: leave it out"
            )
        return digest_of(request, plan.checkpoint.root)

    def request(self, plan: Plan, chosen: Selection) -> Calibration | None:
        """The calibration that is run. What layers before lost is corrected in experts alone: where
        other linears are solved too, no part of a layer is the unquantized model's any more."""
        asked = self.calibrate
        if asked is None or asked.solver != "best" or not _solved_beside(plan, chosen):
            return asked
        return replace(asked, propagated_error="ignore")

    def results(self, projection: Projection, digest: str | None = None) -> dict[str, Output]:
        """An expert matrix's tensors by name; `digest` is of the calibration that finds its codes."""
        if digest is None or projection.draft:
            return self.rounded(projection.module, projection.weight, draft=projection.draft)
        (made,) = calibrated(projection, (self.packer(),), digest)
        return self.named(projection.module, projection.weight, made)

    def rounded(self, module: str, stored: Stored, *, draft: bool = False) -> dict[str, Output]:
        """A matrix's tensors by name, rounded to nearest; `draft`: it is a draft layer's."""
        try:
            made = apply(Recode(stored.decoder, (self.encoder(draft=draft),)), *stored.args)
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
        return self.named(module, stored, made, draft=draft)

    def named(
        self, module: str, stored: Stored, made: Sequence[Output], *, draft: bool = False
    ) -> dict[str, Output]:
        """The packer's results under their names, and what else the format has of a matrix."""
        names = [f"{module}.{suffix}" for suffix in self.packer(draft=draft).suffixes]
        found = dict(zip(names, made, strict=True))
        if self.packing == "compressed-tensors":
            shape = apply(constant_i64((stored.rows, stored.columns)))[0]
            found[f"{module}.weight_shape"] = shape
        return found

    def chosen(self, plan: Plan) -> Selection:
        """Return what the targets select of a plan, checked for groups, sets and tensor parallelism."""
        everyone = self._routed(plan)
        experts = everyone if everyone is not None and self._takes(everyone) else None
        linears, left, unwanted = select_linears(
            plan,
            everyone,
            self._wants,
            lambda one: not self.leave_bf16 or self._fits(one),
            keep=SHARED if self.shared_experts == "keep" else (),
        )
        self._check_targets(plan, [*linears, *left], experts)
        check_sets({module: one.kind for module, one in linears.items()}, {**unwanted, **left})
        found = self._with_shared(plan, Selection(experts, linears, tuple(left)))
        self._check_sizes(found)
        return found

    def _with_shared(self, plan: Plan, chosen: Selection) -> Selection:
        """The same with shared experts that no target names, where they are to be quantized."""
        asked = self.shared_experts
        if asked == "named":  # draft layers' have no other target than those of the model's own
            asked = None if chosen.names_shared else "keep"
        if chosen.experts is None or asked == "keep":
            return chosen
        drafts = any(projection.draft for projection in chosen.experts.projections)
        shared = shared_experts(plan, chosen.linears, drafts=drafts)
        if not shared:
            check_any_shared(chosen, asked)
            return chosen
        if asked is None and any(matches(module, self.ignore) for module in shared):
            return chosen
        if asked is None:
            block = self._block(plan, chosen, chosen.others(plan))
            # Targets that name shared experts never take those of draft layers.
            lost = chosen.names_shared and would_fuse(plan.config, block)
            kept = self.calibrate is not None and not chosen.names_shared
            if kept or not (lost or loses_shared(plan.config, block)):
                return chosen
        return replace(chosen, linears={**chosen.linears, **shared}, shared=frozenset(shared))

    def _routed(self, plan: Plan) -> Experts | None:
        """The model's routed experts, targets or not; None where it has none and needs none."""
        if self.targets == (EXPERTS,):
            check_experts(plan, "quantize its other layers: --targets Linear")
        else:
            check_described(plan)
            if not plan.role_index.dims.num_experts:
                return None
        return routed_experts(plan)

    def _check_targets(self, plan: Plan, modules: Sequence[str], experts: Experts | None) -> None:
        """Raises PlanError for a target that matches nothing that can be quantized, and why."""
        first = [p.module for p in experts.projections[:1]] if experts is not None else []
        for target in self.targets:
            named = any(matches(module, (target,)) for module in (*modules, *first))
            if not named and not (target == EXPERTS and experts is not None):
                kept = {*SHARED} if self.shared_experts == "keep" else set()
                why = skip_reason(plan, target, calibrated=self.calibrate is not None, kept=kept)
                raise PlanError(
                    f"target {target!r} matches no weight that can be quantized"
                    + (f"; {why}: leave this target out" if why else "")
                )

    def _wants(self, module: str, *, expert: bool = False) -> bool:
        def listed(patterns: tuple[str, ...]) -> bool:
            return (expert and EXPERTS in patterns) or matches(module, patterns) is not None

        return listed(self.targets) and not listed(self.ignore)

    def _takes(self, experts: Experts) -> bool:
        """Return whether the targets take the routed experts. Raises PlanError where they take a
        part."""
        wanted = [self._wants(p.module, expert=True) for p in experts.projections]
        if any(wanted) and not all(wanted):
            kept = experts.projections[wanted.index(False)].module
            raise PlanError(
                f"{kept!r} is no target or is ignored, and other routed experts are targets; runtimes "
                "take one scheme for all experts: target all or none of them"
            )
        return all(wanted)

    def _fits(self, stored: Stored) -> bool:
        word = self.scheme.word
        whole = stored.columns % self.scheme.width(stored.columns) == 0
        # GPTQ packs zero points along the rows.
        ragged = self.packing != "compressed-tensors" and stored.rows % word
        return whole and stored.columns % word == 0 and not ragged

    def _check_sizes(self, chosen: Selection) -> None:
        """Raises PlanError for a group that does not divide columns, or not what a rank has of them."""
        matrices, scheme = chosen.sizes, self.scheme
        words = isinstance(self.packer(), PackGptq)
        for matrix in matrices:
            width = scheme.width(matrix.columns)
            if matrix.columns % width:
                groups = fitting_groups(matrices, scheme, self.tp or 1, words)
                hint = (
                    f"group {groups[0]} is supported"
                    if groups
                    else "a scale a row (group null, channel) is supported"
                )
                if chosen.experts is None or matrix.module in chosen.linears:
                    hint += ", or leave_bf16 leaves such a matrix as it is"
                raise PlanError(
                    f"{matrix.module}: expected columns in whole groups of {width}, found "
                    f"{matrix.columns}; {hint}"
                )
        if self.tp is not None and not loads_at(matrices, scheme, self.tp, words):
            groups = fitting_groups(matrices, scheme, self.tp, words)
            sizes = listed(tp for tp in TP_SIZES if loads_at(matrices, scheme, tp, words))
            how = f"in groups of {scheme.group}" if scheme.group else "with a scale a row"
            hint = f"group {groups[0]} fits" if groups else "no group size fits"
            raise PlanError(
                f"at tensor parallel {self.tp} a rank would not get whole groups {how}: {hint} at "
                f"{self.tp}; ranks get whole ones of this at {sizes}"
            )

    def _loads_at(self, chosen: Selection) -> list[int]:
        """The usual tensor-parallel sizes at which each rank gets whole groups."""
        words, matrices = isinstance(self.packer(), PackGptq), chosen.sizes
        return [tp for tp in TP_SIZES if loads_at(matrices, self.scheme, tp, words)]

    def _notes(self, chosen: Selection) -> list[str]:
        """At which tensor-parallel sizes ranks get whole groups, and what else decides who takes it."""
        matrices, scheme = chosen.sizes, self.scheme
        words = isinstance(self.packer(), PackGptq)
        sizes = self._loads_at(chosen)
        notes = [loads_note(sizes, "groups")]
        groups = fitting_groups(matrices, scheme, 1, words) if scheme.group else []
        for group in groups[::-1][:1]:  # the smallest loads at the most sizes
            other = replace(scheme, group=group)
            at = [tp for tp in TP_SIZES if loads_at(matrices, other, tp, words)]
            if len(at) > len(sizes):
                notes.append(f"in groups of {group} at {listed(at)}")
        if chosen.left:
            notes.append(f"{len(chosen.left)} linears left as they are (leave_bf16)")
        if not scheme.symmetric:
            notes.append("asymmetric: no experts so in sglang 0.5.23 or transformers 5.17")
        return notes

    def with_results(
        self, plan: Plan, chosen: Selection, results: Named, digest: str | None = None
    ) -> Plan:
        """The plan with these tensors in place of what was chosen."""
        others = chosen.others(plan)
        check_nothing_packed(others)
        block = self._block(plan, chosen, others)
        beside = "linear_fp8_config" in block
        notes = [*(["linear_fp8_config"] if beside else []), *self._notes(chosen)]
        experts = chosen.experts.projections if chosen.experts is not None else ()
        if digest is not None and any(projection.draft for projection in experts):
            notes.append("MTP experts are not calibrated: rounded to nearest")
        notes += shared_notes(plan, chosen, block)
        renamed = not beside and any(runtime_linears(plan, others).values())
        return replace_weights(
            plan,
            chosen.entry(self.name, options_with(self, digest), notes),
            {**(with_weight_scales(others) if renamed else others), **results},
            dropped=chosen.dropped(plan),
            block=block,
            facts={"tp_sizes": self._loads_at(chosen)},
            calibrate=self.request(plan, chosen),
            digest=digest,
            linears=_solved_beside(plan, chosen),
        )

    def _block(self, plan: Plan, chosen: Selection, others: Named) -> dict[str, Any]:
        """The config's block for what is chosen. Raises PlanError for FP8 that cannot stay."""
        linears = runtime_linears(plan, others)
        fp8 = fp8_block(plan, linears)
        if fp8 is not None:
            self._check_fp8(plan, [module for module, is_fp8 in linears.items() if is_fp8])
        if isinstance(self.packer(), PackGptq):
            return self._gptq_quantization(plan, chosen, others)
        return self._quantization(plan, chosen, others, fp8)

    def _check_fp8(self, plan: Plan, modules: Sequence[str]) -> None:
        """Raises PlanError where these linears cannot stay FP8."""
        for module in modules:
            if plan.role_index.kind(f"{module}.weight").routed:
                raise PlanError(
                    f"{module!r} is FP8 and stays FP8 beside packed linears, which no known runtime "
                    "loads: target the experts too, or dequantize the checkpoint first (qconvert "
                    "dequant)"
                )
        if self.packing != "compressed-tensors":
            raise PlanError(
                f"{modules[0]!r} is FP8, and GPTQ's form has no place for it: dequantize the checkpoint "
                "first (qconvert dequant), or take packing compressed-tensors"
            )

    def _quantization(
        self,
        plan: Plan,
        chosen: Selection,
        others: Named,
        fp8: tuple[int, int] | None,
    ) -> dict[str, Any]:
        """compressed-tensors' block."""
        left = ignored(plan, others, experts=chosen.experts is not None, shared=bool(chosen.shared))
        exponents = has_exponents(others) and not chosen.linears
        beside = fp8 is not None and exponents and all(runtime_linears(plan, others).values())
        group = partial(group_config, self.scheme)
        config = compressed_block(plan, chosen, group, left, fp8=None if beside else fp8)
        config["format"] = "pack-quantized"
        if fp8 is not None and beside:
            config["linear_fp8_config"] = _linear_fp8_config(plan, fp8)
        return config

    def _gptq_quantization(self, plan: Plan, chosen: Selection, others: Named) -> dict[str, Any]:
        """GPTQ's block: every module is quantized except those that match a pattern."""
        if not chosen.plain:
            shared = shared_paths(plan) if chosen.shared else []
            left = [no_experts([*plan.family.expert_paths, *shared])]
        else:
            named = with_draft_names(plan, runtime_linears(plan, others))
            left = [left_pattern(name for name in named if name not in chosen.linears)]
            if not chosen.experts:
                left += [p.removeprefix("re:") for p in all_experts(plan.family.expert_paths)]
        return gptq_config(self.scheme, 1 if self.packing == "gptq" else 2, left)


def _linear_fp8_config(plan: Plan, fp8: tuple[int, int]) -> dict[str, Any]:
    """Return what says that every linear beside packed experts is block FP8, as the source stores it
    (sglang 0.5.23, `compressed_tensors.py`)."""
    formats = [config.block.get("scale_fmt") for config in plan.checkpoint.quantization_configs]
    stated = next(filter(None, formats), None)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fp8),
        **({"scale_fmt": stated} if stated else {}),
    }


def _solved_beside(plan: Plan, chosen: Selection) -> bool:
    """Return whether linears beside the routed experts are calibrated: those of draft layers never
    are."""
    dims, is_mtp = plan.role_index.dims, plan.family.is_mtp
    return not all(is_mtp(f"{module}.weight", dims) for module in chosen.linears)


PASSES = (ExpertsToW4A16,)
