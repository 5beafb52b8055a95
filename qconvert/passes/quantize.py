"""Skeleton of every pass that quantizes for GPUs, and the passes that need no more: `quantize`, which
writes any registered format that is encoded row by row, and `mx` and `int8`, its other names.

The skeleton selects matrices, checks the sizes of ranks, calibrates, encodes, states it in the config
and puts new tensors in place of the old. A pass is a dataclass below it, whose fields are its options,
and gives what its format has of its own. Linears in block FP8 that are no target stay so where a config
has place for them, as a second group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from re import escape
from typing import Any, ClassVar, Literal

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.int_scheme import CodePacker
from qconvert.core.names import KV_SCALES, with_fused_names
from qconvert.core.parameter_names import MXFP4_PLAIN
from qconvert.core.roles import SHARED
from qconvert.core.shown import count
from qconvert.formats.base import Format, Stored
from qconvert.formats.fp8.format import fp8_group_config
from qconvert.formats.mx.format import quark_config
from qconvert.formats.registry import formats
from qconvert.models.experts import calibrated
from qconvert.models.linears import calibrated_linear, runtime_linears
from qconvert.models.skip_reasons import check_runs
from qconvert.models.unquantized import (
    OutputsByName,
    check_nothing_packed,
    expert_beginnings,
    experts_of_class,
    fp8_block,
    ignored,
    shared_paths,
    with_weight_scales,
)
from qconvert.ops.rowwise import Recode, RowOp
from qconvert.passes.input_scales import NO_INPUTS, InputScales, maxima_of
from qconvert.passes.kv_scale import with_source_cache
from qconvert.passes.mixture import METHOD, compressed_config
from qconvert.passes.ranks import Grid, check_size, check_tp, loads_at, loads_note
from qconvert.passes.replace_weights import replace_weights
from qconvert.passes.selection import (
    Linear,
    Selection,
    SharedExperts,
    Targets,
    select,
    shared_notes,
    with_shared,
)
from qconvert.plan.pass_options import EXPERTS, LINEAR, options_with
from qconvert.plan.plan import Plan
from qconvert.samples.request import Calibration, digest_of

Group = Callable[[Iterable[str]], dict[str, Any]]
# Formats that need more than a row: how their names begin, and their commands.
_COMMANDS = (
    ("fp8", "fp8"),
    ("nvfp4", "nvfp4"),
    ("amx", "amx"),
    ("int", "w4a16"),
    ("gptq", "w4a16"),
)


class _WithoutData:
    """Fields of some passes alone, as all others have them. `stats` is a folder of a calibration's
    statistics, `input_scale` one constant: from one of them input scales follow. `calibrate`: GPTQ finds
    the codes, but not of draft layers, for which transformers has no class."""

    __slots__ = ()

    stats: str | None = None
    input_scale: float | None = None
    scales: str = "amax"
    calibrate: Calibration | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizing(_WithoutData):
    """Base of the passes that quantize, with the options of all of them.

    `targets` and `ignore` are names of modules, ends of names, or `re:` patterns; `experts` are the
    routed experts of every family, `Linear` all linear layers that runtimes load quantized.
    `shared_experts`: whether shared experts beside routed ones are quantized, too, or kept; null:
    quantized only where sglang would otherwise fuse them and not read them, and kept where data decides,
    of which there is none of theirs; `named`: as targets name them alone. `tp`: the number of
    tensor-parallel ranks that the result must load on.

    Raises PlanError for targets that match nothing, for part of what runtimes load as one, where a rank
    would cut a block, where layers in another quantized form would stay, and as `routed_experts` does.
    """

    name: ClassVar[str]

    targets: tuple[str, ...] = (EXPERTS,)
    ignore: tuple[str, ...] = ()
    shared_experts: SharedExperts | None = None
    tp: int | None = None

    # --- what a format has of its own

    @property
    def grid(self) -> Grid:
        """Rows and columns of which each rank gets whole ones."""
        raise NotImplementedError

    def encoder(self, *, draft: bool = False) -> RowOp:
        """The op that rounds a BF16 matrix to nearest; `draft`: one of a draft layer."""
        raise NotImplementedError

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        """The names of what it makes, below the module's."""
        raise NotImplementedError

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        """The config's block for what is chosen, where `others` stay."""
        raise NotImplementedError

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        raise NotImplementedError

    def fits(self, stored: Stored) -> bool:
        """Return whether a linear has whole blocks; one that has not is left as it is."""
        return stored.columns % self.grid[1] == 0

    def packer(self, *, draft: bool = False) -> CodePacker:
        """Return what packs a matrix's calibrated codes."""
        raise NotImplementedError

    def more(self, plan: Plan, known: Collection[str]) -> Mapping[str, Linear]:
        """Linears to take beside those that all formats take, but for these modules and tensors."""
        return {}

    def own_experts(self, plan: Plan, chosen: Selection) -> Selection:
        """The same with the routed experts that runtimes load so: those of draft layers too."""
        return chosen

    def check_chosen(self, plan: Plan, chosen: Selection) -> None:
        """Raises PlanError where a rank would not get whole ones."""
        check_tp(chosen.sizes, self.grid, self.tp)

    def others(self, plan: Plan, chosen: Selection) -> dict[str, Output]:
        """The tensors that stay."""
        return chosen.others(plan)

    def check_left(self, plan: Plan, others: OutputsByName) -> None:
        """Raises PlanError for tensors that cannot stay."""
        check_nothing_packed(others)

    # --- the steps

    @property
    def stores_inputs(self) -> bool:
        """Return whether scales of activations are stored."""
        return self.input_scale is not None or self.stats is not None

    def check_options(self) -> None:
        """Raises PlanError for options that contradict one another, whatever the format."""
        check_size(self.tp)
        if self.input_scale is not None and not 0 < self.input_scale < inf:
            raise PlanError(f"expected an input scale above 0, found {self.input_scale}")
        if self.input_scale is not None and self.stats is not None:
            raise PlanError("input_scale is a constant input scale, and stats says otherwise")
        if self.stats is not None and (others := self.beside_experts):
            raise PlanError(
                f"statistics are of routed experts' inputs alone, and {others} would need input scales "
                "too: target experts, keep shared experts, or leave stats out"
            )
        if self.scales != "amax" and self.calibrate is not None:
            raise PlanError(
                f"scales {self.scales!r} are for rounding to nearest, and a calibration's stand in "
                "`calibrate`: leave one of the two out"
            )

    @property
    def beside_experts(self) -> str:
        """Layers that options take beside the routed experts, for messages."""
        shared = "quantized shared experts" if self.shared_experts == "quantize" else ""
        return "all other layers" if LINEAR in self.targets else shared

    def __call__(self, plan: Plan) -> Plan:
        return self.planned(plan)

    def planned(self, plan: Plan) -> Plan:
        """The plan with what the targets select quantized."""
        chosen = self.chosen(plan)
        inputs = self.inputs(plan, chosen)
        digest = self.digest(plan, chosen)
        made = self.encoded(plan, chosen, inputs, digest)
        return self.with_results(plan, chosen, made, digest, inputs)

    def chosen(self, plan: Plan) -> Selection:
        """Return what the targets select of a plan, checked for sets and tensor parallelism."""
        keep = SHARED if self.shared_experts == "keep" else ()
        found = select(
            plan,
            Targets(self.targets, self.ignore, keep),
            self.fits,
            calibrated=self.calibrate is not None,
            more=lambda known: self.more(plan, known),
        )
        found = self.own_experts(plan, found)
        asked = self.shared_experts
        if asked == "named":  # draft layers' have no other target than those of the model's own
            drafts = any(one.draft for one in found.projections)
            asked = None if found.names_shared and drafts else "keep"
        by_data = self.stats is not None or self.calibrate is not None
        if asked is None and (by_data or found.takes_part(plan)) and not found.names_shared:
            asked = "keep"

        found = with_shared(
            plan, found, asked, lambda selection: self.stated(plan, selection), self.ignore
        )
        self.check_chosen(plan, found)
        return found

    def stated(self, plan: Plan, chosen: Selection) -> dict[str, Any]:
        """The config's block for what is chosen and what stays quantized beside it. Raises PlanError
        for what cannot stay."""
        staying = chosen.staying
        others = staying.others(self.others(plan, chosen))
        if staying.groups:
            self.check_left(plan, others)
        block = self.config(plan, chosen, others)
        if chosen.takes_part(plan) and block["quant_method"] != METHOD:
            raise PlanError(
                f"{chosen.projections[0].module!r} is to be quantized, and experts of other layers "
                f"are not: the config of {self.name} as it is asked for has no place for that; target "
                f"all or none of them, or take the dialect (or packing) {METHOD}"
            )
        if staying.groups and block["quant_method"] != METHOD:
            raise PlanError(
                f"{min(staying.modules)!r} stays quantized in {METHOD}' form, for which the config of "
                f"{self.name} as it is asked for has no place: take the dialect (or packing) {METHOD}"
            )
        placed = block["quant_method"] in (METHOD, "modelopt") and "kv_cache_scheme" not in block
        if placed and any(name.endswith(KV_SCALES) for name in plan.tensors):
            return dict(with_source_cache(plan, block))
        return block

    def inputs(self, plan: Plan, chosen: Selection) -> InputScales:
        """Return what input scales follow from."""
        if self.stats is not None:
            return maxima_of(plan, self.stats, chosen.projections)
        return InputScales(self.input_scale)

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
        other linears are solved too, here or by an earlier step, no part of a layer is the unquantized
        model's any more."""
        asked, before = self.calibrate, plan.calibration
        if asked is None or asked.solver != "best":
            return asked
        beside = _solved_beside(plan, chosen) or (before is not None and before.linears)
        return replace(asked, propagated_error="ignore") if beside else asked

    def encoded(
        self, plan: Plan, chosen: Selection, inputs: InputScales, digest: str | None
    ) -> dict[str, Output]:
        """The new tensors by name, each matrix for itself."""
        made = self.solved(plan, chosen, digest)
        drafts = chosen.drafts(plan)
        encoder = cache(lambda draft: self.encoder(draft=draft))
        found: dict[str, Output] = {}
        for module, _, stored in chosen:
            draft = module in drafts
            results = made.get(module) or rounded(module, stored, encoder(draft))
            found.update(self.named(module, stored, results, draft=draft))
        return found

    def solved(
        self, plan: Plan, chosen: Selection, digest: str | None
    ) -> dict[str, tuple[Output, ...]]:
        """The results of a calibration by module: draft layers have none."""
        if digest is None:
            return {}
        packers, drafts = (self.packer(),), chosen.drafts(plan)
        found = {
            one.module: calibrated(one, packers, digest)[0]
            for one in chosen.projections
            if not one.draft
        }
        for module, linear in chosen.linears.items():
            if module not in drafts:
                made = calibrated_linear(plan, module, linear.stored, linear.names, packers, digest)
                found[module] = made[0]
        return found

    def named(
        self, module: str, stored: Stored, results: Sequence[Output], *, draft: bool = False
    ) -> dict[str, Output]:
        """A matrix's results under their names."""
        names = [f"{module}.{suffix}" for suffix in self.suffixes(draft=draft)]
        return dict(zip(names, results, strict=True))

    def with_results(
        self,
        plan: Plan,
        chosen: Selection,
        results: OutputsByName,
        digest: str | None = None,
        inputs: InputScales = NO_INPUTS,
    ) -> Plan:
        """The plan with these tensors in place of what was chosen."""
        others, staying = self.others(plan, chosen), chosen.staying
        self.check_left(plan, staying.others(others))
        block = self.stated(plan, chosen)
        if len(block.get("config_groups", ())) > 1:  # one is that of FP8 layers
            others = with_weight_scales(others)
        return replace_weights(
            plan,
            chosen.entry(
                self.name,
                options_with(self, digest, inputs.digest),
                self.notes(plan, chosen, block, inputs),
            ),
            {**others, **results},
            dropped=chosen.dropped(plan),
            block=block,
            facts={"tp_sizes": self._tp_sizes(plan, chosen), **inputs.facts},
            calibrate=self.request(plan, chosen),
            digest=digest,
            linears=_solved_beside(plan, chosen),
        )

    def _tp_sizes(self, plan: Plan, chosen: Selection) -> list[int]:
        """Sizes at which each rank gets whole blocks, of what stays too."""
        found, before = loads_at(chosen.sizes, self.grid), plan.facts.get("tp_sizes")
        if before is None or not chosen.staying.groups:
            return found
        return [size for size in found if size in before]


def rounded_drafts(chosen: Selection, calibrate: Calibration | None) -> list[str]:
    """A note on draft layers beside calibrated ones."""
    drafts = calibrate is not None and any(one.draft for one in chosen.projections)
    return ["MTP experts are not calibrated: rounded to nearest"] if drafts else []


def left_note(chosen: Selection, why: str) -> list[str]:
    """A note on linears that do not fit."""
    return [f"{count(len(chosen.left), 'linear')} left as stored{why}"] if chosen.left else []


def _solved_beside(plan: Plan, chosen: Selection) -> bool:
    """Return whether linears beside the routed experts are calibrated: those of draft layers never
    are."""
    return not chosen.drafts(plan).issuperset(chosen.linears)


def rounded(module: str, stored: Stored, encoder: RowOp) -> tuple[Output, ...]:
    """A matrix decoded and encoded again, rows at a time. Raises PlanError naming it."""
    try:
        return apply(Recode(stored.decoder, (encoder,)), *stored.args)
    except PlanError as error:
        raise PlanError(f"{module}: {error}") from error


def compressed_block(
    plan: Plan,
    chosen: Selection,
    group: Group,
    left: Sequence[str],
    *,
    fp8: tuple[int, int] | None = None,
    but: str = "",
) -> dict[str, Any]:
    """compressed-tensors' block for what is chosen, in the group's own format; `left` are the modules
    that stay unquantized. Where `Linear` means those that stay in FP8, in blocks `fp8`, others go by
    name, also by that of what they are fused to: runtimes find a class before the parts. `but`: how
    patterns of experts begin, to except some."""
    targets, staying = ["Linear"], chosen.staying
    if not chosen.plain or fp8 is not None or staying.groups:
        routed = [one.module for one in chosen.projections]
        paths = plan.family.expert_paths if routed else ()
        begins = expert_beginnings(plan, routed) if routed else ()
        targets = [rf"re:{but}{begin}{escape(path)}\..*" for begin in begins for path in paths]
        if chosen.shared:
            targets += [rf"re:{but}.*{escape(path)}.*" for path in shared_paths(plan)]
        targets += experts_of_class(plan) if paths else []
        targets += with_fused_names(chosen.plain)
    groups = [group(targets), *staying.stated(plan, [module for module, _, _ in chosen])]
    if fp8 is not None:
        groups.append(fp8_group_config(fp8))
    kv_cache = staying.block.get("kv_cache_scheme") if staying.groups else None
    block = compressed_config(groups, left, staying.form(plan))
    return block if kv_cache is None else {**block, "kv_cache_scheme": kv_cache}


class ByFormat(Quantizing):
    """Base of passes whose format says it all: an op that encodes a matrix row by row, the names of its
    results and a group of compressed-tensors' config.

    Linears of draft (MTP) layers stay as they are; their experts are encoded with the others.
    """

    __slots__ = ()
    format: str

    def __post_init__(self) -> None:
        written(self.format)
        self.check_options()

    @property
    def form(self) -> Format:
        return formats()[self.format]

    @property
    def grid(self) -> Grid:
        """A scale of a whole row has no blocks."""
        rows, columns = (one if isinstance(one, int) and one else 1 for one in self.form.cut)
        return rows, columns

    def encoder(self, *, draft: bool = False) -> RowOp:
        assert self.form.encode is not None
        return self.form.encode()

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        return self.form.parameters

    def __call__(self, plan: Plan) -> Plan:
        if self.form.check is not None:
            self.form.check(plan)
        return self.planned(plan)

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        assert self.form.config_group is not None
        fp8 = fp8_block(plan, runtime_linears(plan, others))
        experts = chosen.experts is not None
        left = ignored(plan, others, experts=experts, shared=bool(chosen.shared))
        return compressed_block(plan, chosen, self.form.config_group, left, fp8=fp8)

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        experts = self.form.expert_notes if chosen.projections else ()
        return [
            *self.form.notes,
            *experts,
            *shared_notes(plan, chosen, block),
            loads_note(loads_at(chosen.sizes, self.grid), grid=self.grid),
            *left_note(chosen, f": no whole groups of {self.grid[1]}"),
        ]


def written(name: str) -> Format:
    """The format of this name, if a row is enough to write it. Raises PlanError for another, with the
    command that writes it or those that there are."""
    known = {n: one for n, one in formats().items() if one.encode and one.config_group}
    if name in known:
        return known[name]
    for start, command in _COMMANDS:
        if name.startswith(start):
            raise PlanError(f"{name} has a command of its own: qconvert {command}")
    found = f"{name!r}, which is only read" if name in formats() else repr(name)
    raise PlanError(f"expected a format, one of {', '.join(sorted(known))}; found {found}")


@dataclass(frozen=True, slots=True)
class Quantize(ByFormat):
    """Quantize to any registered format, by its name.

    `format` may be another package's. Linears whose columns are no whole groups are left.

    Raises PlanError for an unknown format, where expert columns are not whole groups, and as
    `Quantizing` does.
    """

    name: ClassVar[str] = "quantize"

    format: str


@dataclass(frozen=True, slots=True)
class ToMx(ByFormat):
    """Quantize routed experts, or linear layers, to MXFP4 or MXFP8.

    vLLM loads all of it (`schemes/compressed_tensors_w4a4_mxfp4.py`, `_w8a8_mxfp8.py`, and theirs
    in `compressed_tensors_moe/`). sglang has a class for MXFP4 experts (`mxfp4.py`), which in
    compressed-tensors' form its models of Kimi-K3 and DeepSeek-V4 alone fill (`models/kimi_k3.py`,
    `models/deepseek_v4.py`): others leave `weight_packed` unread without a word. It has none for the
    rest. `dialect: quark` writes MXFP4 under AMD Quark's names, which both load on an MI355 (their
    `quark/`). Raises PlanError for a source in MXFP4, and as `Quantize` does.
    """

    name: ClassVar[str] = "mx"

    format: Literal["mxfp4", "mxfp8"] = "mxfp4"
    dialect: Literal["compressed-tensors", "quark"] = "compressed-tensors"

    def __post_init__(self) -> None:
        if self.dialect == "quark" and self.format != "mxfp4":
            raise PlanError("dialect quark is written for mxfp4 alone")
        ByFormat.__post_init__(self)

    def encoder(self, *, draft: bool = False) -> RowOp:
        if self.dialect != "quark":
            return ByFormat.encoder(self, draft=draft)
        from qconvert.formats.mx.encode import EncodeQuarkMxfp4

        return EncodeQuarkMxfp4("mxfp4")

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        return MXFP4_PLAIN if self.dialect == "quark" else self.form.parameters

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        if self.dialect != "quark":
            return ByFormat.config(self, plan, chosen, others)
        fp8 = next((n for n, linear in runtime_linears(plan, others).items() if linear), None)
        if fp8 is not None:
            raise PlanError(
                f"{fp8!r} is FP8 and stays so, for which Quark's config as it is written here has no "
                "place: dequantize the checkpoint first (a recipe of `dequant` and this step is one "
                "read)"
            )
        experts = chosen.experts is not None
        left = ignored(plan, others, experts=experts, shared=bool(chosen.shared))
        return quark_config(with_fused_names(left))

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        found = ByFormat.notes(self, plan, chosen, block, inputs)
        own = "names and config of AMD Quark, with inputs in MXFP4 too, as MI355 computes with them"
        quark = self.dialect == "quark"
        return [own if quark and one in self.form.notes else one for one in found]


@dataclass(frozen=True, slots=True)
class ToInt8(ByFormat):
    """Quantize linear layers to INT8 for INT8 activations (W8A8).

    Weights have a scale a row, activations one a token, which runtimes find for themselves. Read in
    sglang and vLLM (`schemes/compressed_tensors_w8a8_int8.py`): both load linears so. Routed
    experts vLLM alone does on a GPU (`compressed_tensors_moe_w8a8_int8.py`): sglang has that class for
    NPUs. In the `dialect` of msmodelslim (W8A8_DYNAMIC), which vllm-ascend reads, codes and scales are
    the same, and `quant_model_description.json` states them. Raises PlanError as `Quantize` does, and
    in that dialect for FP8 layers that would stay.
    """

    name: ClassVar[str] = "int8"
    format = "int8"

    targets: tuple[str, ...] = field(default=(LINEAR,), kw_only=True)
    dialect: Literal["compressed-tensors", "msmodelslim"] = "compressed-tensors"

    def encoder(self, *, draft: bool = False) -> RowOp:
        if self.dialect != "msmodelslim":
            return ByFormat.encoder(self, draft=draft)
        from qconvert.formats.ascend.format import KeepAscend
        from qconvert.formats.int_packed.encode import RoundToNearest
        from qconvert.formats.int_packed.packers import INT8_ROWS

        return RoundToNearest(INT8_ROWS, KeepAscend())

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        if self.dialect != "msmodelslim":
            return ByFormat.suffixes(self, draft=draft)
        from qconvert.formats.ascend.format import WRITTEN

        return WRITTEN

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        if self.dialect != "msmodelslim":
            return ByFormat.config(self, plan, chosen, others)
        from qconvert.formats.ascend.format import BLOCK

        fp8 = [module for module, coded in runtime_linears(plan, others).items() if coded]
        if fp8:
            raise PlanError(
                f"{fp8[0]!r} is FP8 and no target, and msmodelslim's description has no place for it: "
                "dequantize the checkpoint first (a recipe of `dequant` and this step is one read)"
            )
        return dict(BLOCK)

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        found = ByFormat.notes(self, plan, chosen, block, inputs)
        if self.dialect != "msmodelslim":
            return found
        read = "read by vllm-ascend (its quantization `ascend`), whose loader is not simulated"
        return [read, *(note for note in found if note not in self.form.expert_notes)]


PASSES = (Quantize, ToMx, ToInt8)
