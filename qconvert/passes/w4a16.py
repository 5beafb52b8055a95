"""w4a16: weights in packed INT4 or INT8, rounded to nearest; by default those of the routed experts,
with all other layers as they are.

The config follows what runtimes do with it (read in sglang 0.5.23). Targets that match experts alone
make every other linear that is not ignored an error, so each unquantized one is named. Where a source
is block FP8 there are two forms: DeepSeek's, every linear of which is FP8, gets `linear_fp8_config`,
which runtimes apply to all linears without looking at lists; others get a second group for FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from qconvert.checkpoint.checkpoint import without_quantization
from qconvert.checkpoint.ignore import true_lists
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source, apply
from qconvert.core.int_scheme import Actorder, Bits, IntScheme, Packer
from qconvert.core.roles import Kind
from qconvert.formats.int_packed.config import (
    fp8_group_config,
    gptq_config,
    group_config,
    left_pattern,
)
from qconvert.formats.int_packed.packers import PackGptq, Packing, packer
from qconvert.formats.int_packed.rounding import RoundToNearest, encoder
from qconvert.matrices.causes import check_experts
from qconvert.matrices.experts import (
    KINDS,
    SPENT_RULE,
    Experts,
    Projection,
    calibrated,
    check_described,
    routed_experts,
)
from qconvert.matrices.linears import (
    TP_SIZES,
    Matrix,
    check_sets,
    fitting_groups,
    loads_at,
    matches,
    quantizable,
    runtime_linears,
)
from qconvert.matrices.stored import Stored, read_matrix
from qconvert.matrices.unquantized import (
    Named,
    all_experts,
    as_weight_scale,
    check_nothing_packed,
    check_plain_scales,
    expert_targets,
    fp8_block,
    ignored,
    no_experts,
)
from qconvert.ops.constant import constant_i64
from qconvert.ops.rowwise import Recode, RowOp
from qconvert.plan.plan import Calibrating, LogEntry, Plan
from qconvert.samples.request import FACT as CALIBRATION
from qconvert.samples.request import Calibration, digest_of, identity
from qconvert.samples.request import fact as calibration_fact

GROUP = 128
# How recipes spell the routed experts, whatever a family calls them.
EXPERTS = r"re:.*\.mlp\.experts\..*"
# What says nothing about the weights once experts are INT4.
_STALE = ("hf_quant_config.json", "quantize_config.json")


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is quantized: the routed experts, or None of them; other linears by module, and what they
    are; and linears that were wanted and stay, since their columns are no whole groups."""

    experts: Experts | None
    linears: Mapping[str, tuple[Stored, tuple[str, ...]]]
    kinds: Mapping[str, Kind]
    left: tuple[str, ...]

    @property
    def taken(self) -> frozenset[str]:
        """Tensors that are read, or said something of those that are."""
        found = {name for _, names in self.linears.values() for name in names}
        return frozenset(found | (self.experts.taken if self.experts else set()))

    @property
    def spent(self) -> frozenset[str]:
        """Those of `taken` that say nothing of the new weights."""
        ends = (".weight_shape", ".input_scale")
        found = {n for _, names in self.linears.values() for n in names if n.endswith(ends)}
        return frozenset(found | (self.experts.spent if self.experts else set()))

    @property
    def matrices(self) -> list[Matrix]:
        """One of each kind and size."""
        found: dict[tuple[Kind, int, int], Matrix] = {}
        every = [(p.module, KINDS[p.kind], p.weight) for p in self._projections]
        every += [(module, self.kinds[module], one) for module, (one, _) in self.linears.items()]
        for module, kind, stored in every:
            key = kind, stored.rows, stored.columns
            if key not in found:
                found[key] = Matrix(module, stored.rows, stored.columns, kind.cut)
        return list(found.values())

    @property
    def _projections(self) -> tuple[Projection, ...]:
        return self.experts.projections if self.experts is not None else ()


@dataclass(frozen=True, slots=True)
class ExpertsToW4A16:
    """Weights of `bits`, in groups of `group` columns that share a scale (None: a whole row does),
    packed as `packing` says. `targets` and `ignore` are names, ends of names, `re:` patterns, or
    `Linear`, as llm-compressor has them; EXPERTS means the routed experts of every family, whatever it
    calls them. What is not known to be loaded quantized is never taken. With
    `leave_bf16` a linear whose columns are no whole groups stays as it is (an expert never can).
    `tp` is a tensor-parallel size that the result must load at. With `calibrate` the codes of routed
    experts are found by GPTQ, but for those of draft layers, which transformers has no class for.

    Raises PlanError for targets that match nothing, for part of what must be quantized together, for
    groups that do not fit with those that would, and as `routed_experts` does.
    """

    name: ClassVar[str] = "w4a16"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    group: int | None = GROUP
    bits: Bits = 4
    symmetric: bool = True
    actorder: Actorder | None = None
    packing: Packing = "compressed-tensors"
    targets: tuple[str, ...] = (EXPERTS,)
    ignore: tuple[str, ...] = ()
    leave_bf16: bool = False
    tp: int | None = None
    calibrate: Calibration | None = None

    def __post_init__(self) -> None:
        if self.tp is not None and self.tp < 1:
            raise PlanError(f"tensor parallel sizes are 1 or more, found {self.tp}")

    @property
    def scheme(self) -> IntScheme:
        """compressed-tensors keeps scales in the weights' dtype, GPTQ in fp16."""
        dtype: Any = "BF16" if self.packing == "compressed-tensors" else "F16"
        return IntScheme(self.bits, self.group, self.symmetric, self.actorder, dtype)

    def packer(self) -> Packer:
        """What packs a matrix's codes."""
        return packer(self.packing, self.scheme)

    def encoder(self) -> RowOp:
        """The op that rounds a BF16 matrix and packs it. Draft experts beside calibrated ones have no
        order of columns."""
        scheme = self.scheme
        if self.calibrate is not None and scheme.actorder is not None:
            return RoundToNearest(replace(scheme, actorder=None), self.packer())
        return encoder(scheme, self.packer())

    def __call__(self, plan: Plan) -> Plan:
        chosen = self.chosen(plan)
        digest = self.digest(plan, chosen)
        results: dict[str, Output] = {}
        for projection in chosen.experts.projections if chosen.experts else ():
            results.update(self.results(projection, digest))
        for module, (stored, _) in chosen.linears.items():
            results.update(self.rounded(module, stored))
        return self.with_results(plan, chosen, results, digest)

    def digest(self, plan: Plan, chosen: Chosen) -> str | None:
        """Of the calibration that is asked for, None where none is. Raises PlanError where it would
        have to solve other linears than routed experts."""
        if self.calibrate is None:
            return None
        if chosen.experts is None or chosen.linears:
            other = next(iter(chosen.linears), "no routed expert")
            raise PlanError(
                f"{other!r} is a target, and calibration solves routed experts alone: target those "
                f"({EXPERTS}), or ignore all else"
            )
        return digest_of(self.calibrate, plan.checkpoint.root)

    def results(self, projection: Projection, digest: str | None = None) -> dict[str, Output]:
        """An expert matrix's tensors by name; `digest` is of the calibration that finds its codes."""
        if digest is None or projection.draft:
            return self.rounded(projection.module, projection.weight)
        (made,) = calibrated(projection, (self.packer(),), digest)
        return self.named(projection.module, projection.weight, made)

    def rounded(self, module: str, stored: Stored) -> dict[str, Output]:
        try:
            made = apply(Recode(stored.decoder, (self.encoder(),)), *stored.args)
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
        return self.named(module, stored, made)

    def named(self, module: str, stored: Stored, made: Sequence[Output]) -> dict[str, Output]:
        """The packer's results under their names, and what else the format has of a matrix."""
        names = [f"{module}.{suffix}" for suffix in self.packer().suffixes]
        found = dict(zip(names, made, strict=True))
        if self.packing == "compressed-tensors":
            shape = apply(constant_i64((stored.rows, stored.columns)))[0]
            found[f"{module}.weight_shape"] = shape
        return found

    def chosen(self, plan: Plan) -> Chosen:
        """What the targets take of a plan, checked for groups, sets and tensor parallelism."""
        if self.targets == (EXPERTS,):
            check_experts(plan, "quantize its other layers: --target Linear")
        everyone = None
        if self.targets != (EXPERTS,):
            check_described(plan)
        if self.targets == (EXPERTS,) or plan.census.dims.num_experts:
            everyone = routed_experts(plan)
        experts = everyone if everyone is not None and self._takes(everyone) else None
        found: dict[str, tuple[Stored, tuple[str, ...]]] = {}
        kinds: dict[str, Kind] = {}
        left, others = [], []
        for module, kind in quantizable(plan, everyone.taken if everyone else ()):
            kinds[module] = kind
            if not self._wants(module):
                others.append(module)
                continue
            stored, names = read_matrix(plan, module)
            if self.leave_bf16 and not self._fits(stored):
                left.append(module)
                continue
            found[module] = stored, names
        modules = [*found, *left]
        if experts is not None:
            modules += [p.module for p in experts.projections[:1]]
        for target in self.targets:
            named = any(matches(module, (target,)) for module in modules)
            if not named and not (target == EXPERTS and experts is not None):
                raise PlanError(f"target {target!r} matches no weight that can be quantized")
        check_sets(
            {module: kinds[module] for module in found},
            {module: kinds[module] for module in (*others, *left)},
        )
        result = Chosen(experts, found, kinds, tuple(left))
        self._check_sizes(result)
        return result

    def _wants(self, module: str, *, expert: bool = False) -> bool:
        def listed(patterns: tuple[str, ...]) -> bool:
            return (expert and EXPERTS in patterns) or matches(module, patterns) is not None

        return listed(self.targets) and not listed(self.ignore)

    def _takes(self, experts: Experts) -> bool:
        """Whether the targets take the routed experts. Raises PlanError where they take a part."""
        wanted = [self._wants(p.module, expert=True) for p in experts.projections]
        if any(wanted) and not all(wanted):
            kept = experts.projections[wanted.index(False)].module
            raise PlanError(
                f"{kept!r} is no target or ignored, and other routed experts are targets; runtimes "
                "take one scheme for all experts: target or ignore all"
            )
        return all(wanted)

    def _fits(self, stored: Stored) -> bool:
        word = self.scheme.word
        whole = stored.columns % self.scheme.width(stored.columns) == 0
        turned = self.packing != "compressed-tensors" and stored.rows % word
        return whole and stored.columns % word == 0 and not turned

    def _check_sizes(self, chosen: Chosen) -> None:
        """Raises PlanError for a group that does not divide columns, or not what a rank has of them."""
        matrices, scheme = chosen.matrices, self.scheme
        words = isinstance(self.packer(), PackGptq)
        for matrix in matrices:
            width = scheme.width(matrix.columns)
            if matrix.columns % width:
                groups = fitting_groups(matrices, scheme, self.tp or 1, words)
                hint = (
                    f"group {groups[0]} would do" if groups else "a scale a row (channel) would do"
                )
                if chosen.experts is None or matrix.module in chosen.linears:
                    hint += ", or leave_bf16 leaves such a matrix as it is"
                raise PlanError(
                    f"{matrix.module}: expected columns in whole groups of {width}, found "
                    f"{matrix.columns}; {hint}"
                )
        if self.tp is not None and not loads_at(matrices, scheme, self.tp, words):
            groups = fitting_groups(matrices, scheme, self.tp, words)
            sizes = _listed(tp for tp in TP_SIZES if loads_at(matrices, scheme, tp, words))
            how = f"in groups of {scheme.group}" if scheme.group else "with a scale a row"
            hint = f"group {groups[0]} would load" if groups else "no group size would"
            raise PlanError(
                f"at tensor parallel {self.tp} a rank would not get whole groups {how}: {hint} at "
                f"{self.tp}; this one loads at {sizes}"
            )

    def _notes(self, chosen: Chosen) -> list[str]:
        """At which tensor-parallel sizes the result loads, and what else decides who takes it."""
        matrices, scheme = chosen.matrices, self.scheme
        words = isinstance(self.packer(), PackGptq)
        sizes = [tp for tp in TP_SIZES if loads_at(matrices, scheme, tp, words)]
        notes = [f"loads at tensor parallel {_listed(sizes)}"]
        groups = fitting_groups(matrices, scheme, 1, words) if scheme.group else []
        for group in groups[::-1][:1]:  # the smallest loads at the most sizes
            other = replace(scheme, group=group)
            at = [tp for tp in TP_SIZES if loads_at(matrices, other, tp, words)]
            if len(at) > len(sizes):
                notes.append(f"in groups of {group} at {_listed(at)}")
        if chosen.left:
            notes.append(f"{len(chosen.left)} linears left as they are (leave_bf16)")
        if not scheme.symmetric:
            notes.append("asymmetric: no experts so in sglang 0.5.23 or transformers 5.17")
        return notes

    def with_results(
        self, plan: Plan, chosen: Chosen, results: Named, digest: str | None = None
    ) -> Plan:
        """The plan with what was chosen replaced by these tensors."""
        taken = chosen.taken
        others = {name: output for name, output in plan.tensors.items() if name not in taken}
        check_nothing_packed(others)
        linears = runtime_linears(plan, others)
        tensors = dict(others)
        block = fp8_block(plan, linears)
        every_linear = block is not None and all(linears.values()) and not chosen.linears
        if block is not None:
            for module, fp8 in linears.items():
                if fp8 and plan.census.kind(f"{module}.weight").routed:
                    raise PlanError(
                        f"{module!r} is FP8 and stays so beside packed linears, which no runtime here "
                        "loads: target the experts too, or dequantize the checkpoint first (qconvert "
                        "dequant)"
                    )
            if self.packing != "compressed-tensors":
                first = next(module for module, fp8 in linears.items() if fp8)
                raise PlanError(
                    f"{first!r} is FP8, and GPTQ's form has no place for it: dequantize the checkpoint "
                    "first (qconvert dequant), or take packing compressed-tensors"
                )
            if not every_linear:
                check_plain_scales(others)
                tensors = {as_weight_scale(name, others): o for name, o in others.items()}
        tensors.update(results)
        spent = {
            piece.origin.name: SPENT_RULE
            for name in chosen.spent
            for piece in plan.tensors[name].pieces
            if isinstance(piece.origin, Source)
        }
        stale = dict.fromkeys(
            (name for name in _STALE if name in plan.side_files),
            "w4a16: its quantization block no longer holds",
        )
        config = without_quantization(plan.config)
        if isinstance(self.packer(), PackGptq):
            quantization = self._gptq_quantization(plan, chosen, others)
        else:
            quantization = self._quantization(plan, chosen, others, block, every_linear)
        found = [c.block.get("scale_fmt") for c in plan.checkpoint.quantization_configs]
        if every_linear and any(found):
            quantization["linear_fp8_config"]["scale_fmt"] = next(filter(None, found))
        config["quantization_config"] = quantization
        notes = [*(["linear_fp8_config"] if every_linear else []), *self._notes(chosen)]
        calibration, facts = plan.calibration, dict(plan.facts)
        if digest is not None and self.calibrate is not None and chosen.experts is not None:
            calibration = Calibrating(plan, self.calibrate)
            facts[CALIBRATION] = calibration_fact(self.calibrate, digest)
            if any(projection.draft for projection in chosen.experts.projections):
                notes.append("MTP experts are not calibrated: rounded to nearest")
        matrices = len(chosen.experts.projections) if chosen.experts else 0
        expected = chosen.experts.expected if chosen.experts and not chosen.linears else None
        return plan.logged(
            LogEntry(
                self.name, identity(self, digest), matrices + len(chosen.linears), expected,
                tuple(notes), "matrices" if chosen.linears else "expert matrices",
            ),
            tensors=tensors,
            config=true_lists(config, ()),
            dropped={**plan.dropped, **spent},
            side_files=tuple(name for name in plan.side_files if name not in stale),
            dropped_files={**plan.dropped_files, **stale},
            facts=facts,
            calibration=calibration,
        )  # fmt: skip

    def _quantization(
        self,
        plan: Plan,
        chosen: Chosen,
        others: Named,
        block: tuple[int, int] | None,
        every_linear: bool,
    ) -> dict[str, Any]:
        """compressed-tensors' block. Where `Linear` means the FP8 ones, packed ones go by name."""
        experts = expert_targets(plan.family.expert_paths)
        if not chosen.linears:
            targets = experts
        elif block is None:
            targets = ["Linear"]
        else:
            targets = [*(experts if chosen.experts else []), *chosen.linears]
        config: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group_config(self.scheme, targets)},
            "ignore": ignored(plan, others, experts=chosen.experts is not None),
        }
        if block is not None and every_linear:
            config["linear_fp8_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(block),
            }
        elif block is not None:
            config["config_groups"]["group_1"] = fp8_group_config(block)
        return config

    def _gptq_quantization(self, plan: Plan, chosen: Chosen, others: Named) -> dict[str, Any]:
        """GPTQ's block: every module is quantized but those that a pattern leaves."""
        if not chosen.linears:
            left = [no_experts(plan.family.expert_paths)]
        else:
            left = [left_pattern(runtime_linears(plan, others))]
            if not chosen.experts:
                left += [p.removeprefix("re:") for p in all_experts(plan.family.expert_paths)]
        return gptq_config(self.scheme, 1 if self.packing == "gptq" else 2, left)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none of the usual sizes"


PASSES = (ExpertsToW4A16,)
