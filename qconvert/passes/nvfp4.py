"""nvfp4: weights in NVFP4; by default those of the routed experts, with all other layers as they are.

The config follows what runtimes do with it (read in sglang 0.5.23). It says that activations are
quantized only where their scales are stored: without them a runtime would use scales that it never
filled. Draft (MTP) layers stay as they are: sglang builds them without NVFP4, but for Qwen3-Next's,
which it builds as the model's first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, ClassVar

from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.formats.base import Stored
from qconvert.formats.int_packed.limits import TP_SIZES
from qconvert.formats.mx import format as mx
from qconvert.formats.mx.config import mxfp4_modules
from qconvert.formats.nvfp4.calibrated_codes import PackNvfp4Codes
from qconvert.formats.nvfp4.config import (
    NAMES,
    group_config,
    input_scale,
    mixed_config,
    modelopt_config,
)
from qconvert.formats.nvfp4.encode import Scales
from qconvert.models.experts import Projection, calibrated
from qconvert.models.linears import runtime_linears
from qconvert.models.skip_reasons import check_runs
from qconvert.models.unquantized import (
    Named,
    draft_as_first_layer,
    draft_patterns,
    fp8_block,
    fp8_own_block,
    ignored_globs,
    ignored_linears,
    ignored_names,
    with_draft_names,
    with_weight_scales,
)
from qconvert.ops.fp4 import BLOCK
from qconvert.passes.by_row import compressed_block
from qconvert.passes.input_scales import InputMaxima, maxima_of
from qconvert.passes.mxfp4_as_nvfp4 import (
    as_nvfp4,
    input_of,
    inputs_of,
    said_of_inputs,
    with_modelopt_file,
)
from qconvert.passes.nvfp4_groups import check_tp, cut_blocks, quantized, shared_groups
from qconvert.passes.ranks import loads_note
from qconvert.passes.replace_weights import Selection, replace_weights, select, takes_linears
from qconvert.passes.shared_experts import SharedExperts, shared_notes, with_shared
from qconvert.plan.pass_options import EXPERTS, options_of, options_with
from qconvert.plan.plan import LogEntry, Plan
from qconvert.samples.request import Calibration, digest_of


@dataclass(frozen=True, slots=True)
class ToNvfp4:
    """The routed experts, or with `targets: [Linear]` every linear layer that runtimes load in NVFP4, in
    either dialect. `stats` is a folder of a calibration's statistics, from which the input scales of
    experts are taken; without it, or with `weight_only`, the config says that activations stay bf16.
    `shared_experts` says whether shared experts beside routed ones are quantized too or kept; None:
    quantized only where sglang would otherwise fuse them and not read them, and kept with `stats`, which
    have no inputs of theirs. `input_scale` is one constant for the inputs of all that is quantized, as
    modelopt stores it (their largest size / 2688). `tp` is a tensor-parallel size that the result must
    load at. Block `scales` are each block's largest weight / 6, or with `search` those around it whose
    codes have the least squared error. With `calibrate` GPTQ finds codes and block scales of routed
    experts, but not of draft layers; gate and up still share a global scale, that of rounding.

    Raises PlanError where expert columns are not whole blocks of 16, where part of what shares a scale
    cannot be quantized, where FP8 layers would stay and the dialect has no place for them, where
    statistics do not fit, where a search is asked for and MXFP4 keeps its scales, where a calibration
    would have to solve other linears than routed experts, and as `routed_experts` does.
    """

    name: ClassVar[str] = "nvfp4"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    dialect: Dialect = "modelopt"
    targets: tuple[str, ...] = (EXPERTS,)
    weight_only: bool = False
    stats: str | None = None
    shared_experts: SharedExperts | None = None
    tp: int | None = None
    input_scale: float | None = None
    scales: Scales = "amax"
    calibrate: Calibration | None = None

    def __post_init__(self) -> None:
        takes_linears(self.targets)
        if self.input_scale is not None and not 0 < self.input_scale < inf:
            raise PlanError(f"expected an input scale above 0, found {self.input_scale}")
        if self.input_scale is not None and (self.weight_only or self.stats is not None):
            other = "weight_only" if self.weight_only else "stats"
            raise PlanError(f"input_scale is a constant input scale, and {other} says otherwise")
        if self.stats is not None and self.weight_only:
            raise PlanError(
                "weight_only stores no input scales, the only use of stats: leave one of them out"
            )
        if self.stats is not None and takes_linears(self.targets):
            raise PlanError(
                "statistics are of experts' inputs alone, and with targets all other layers would need "
                "input scales too: leave stats out for weights only, or target experts"
            )
        if self.stats is not None and self.shared_experts == "quantize":
            raise PlanError(
                "statistics are of routed experts' inputs alone, and quantized shared experts would "
                "need input scales too: leave stats out for weights only, or choose keep"
            )
        if self.tp is not None and self.tp < 1:
            raise PlanError(f"expected a tensor parallel size of 1 or more, found {self.tp}")
        if self.calibrate is not None:
            self._check_calibration(self.calibrate)

    def _check_calibration(self, asked: Calibration) -> None:
        """Raises PlanError for what cannot be calibrated, or not so."""
        if asked.solver == "llmcompressor":
            raise PlanError(
                "solver llmcompressor: only integers are solved so here, and NVFP4 is not: leave solver "
                "out, or choose best"
            )
        if self.scales != "amax":
            raise PlanError(
                f"scales {self.scales!r} are for rounding to nearest, and a calibration's stand in "
                "`calibrate`: leave one of the two out"
            )
        if takes_linears(self.targets) or self.shared_experts == "quantize":
            word = "targets Linear" if takes_linears(self.targets) else "shared_experts quantize"
            raise PlanError(
                f"{word}: calibration solves routed experts alone, and others would be rounded to "
                "nearest: leave it out"
            )

    def __call__(self, plan: Plan) -> Plan:
        modules = mxfp4_modules(plan)
        if modules:
            return self._relabelled(plan, modules)
        chosen = self.chosen(plan)
        maxima = self._input_maxima(plan, chosen)
        digest = self._digest(plan)
        matrices = {module: stored for module, _, stored in chosen}
        made = {} if digest is None else self._solved(chosen, digest)
        rounded = {m: k for m, k, _ in chosen if f"{m}.{NAMES[self.dialect].weight}" not in made}
        for group in shared_groups(rounded):
            members = {module: matrices[module] for module in group}
            made.update(quantized(members, self.dialect, self.scales))
        if maxima is not None:
            for p in _projections(chosen):
                value = input_scale(maxima.of(p.layer, p.expert, p.kind), self.dialect)
                made |= input_of(p.module, self.dialect, value)
        made |= inputs_of(matrices, self.dialect, self.input_scale)
        return self._planned(plan, chosen, made, maxima, digest)

    def _digest(self, plan: Plan) -> str | None:
        """The digest of the calibration, None without one. Raises PlanError for a model that cannot be
        run."""
        if self.calibrate is None:
            return None
        check_runs(plan)
        return digest_of(self.calibrate, plan.checkpoint.root)

    def _solved(self, chosen: Selection, digest: str) -> dict[str, Output]:
        """The tensors of calibrated matrices by name."""
        found: dict[str, Output] = {}
        packer = PackNvfp4Codes(self.dialect)
        for one in _projections(chosen):
            if not one.draft:
                (made,) = calibrated(one, (packer,), digest)
                names = (f"{one.module}.{suffix}" for suffix in packer.suffixes)
                found.update(zip(names, made, strict=True))
        return found

    def _relabelled(self, plan: Plan, modules: Sequence[str]) -> Plan:
        """Every MXFP4 matrix under NVFP4's scales, whatever the targets."""
        if self.stats is not None:
            raise PlanError("input scales are not taken for MXFP4 sources: leave stats out")
        if self.scales != "amax":
            raise PlanError(
                "MXFP4 sources are relabelled as they are, codes and scales: leave scales out"
            )
        if self.calibrate is not None:
            raise PlanError(
                "MXFP4 sources are relabelled as they are, without loss: there is nothing to calibrate"
            )
        found = {module: read for module in modules if (read := mx.read(plan, module))}
        step = self.name, options_of(self)
        return as_nvfp4(plan, step, found, self.dialect, self.input_scale)

    def _facts(self, maxima: InputMaxima | None) -> dict[str, Any]:
        """Return what input scales follow from."""
        if maxima is not None:
            return {"input_maxima": maxima.recorded}
        return {} if self.input_scale is None else {"input_scale": self.input_scale}

    def chosen(self, plan: Plan) -> Selection:
        """Return what the targets select of a plan."""
        keep = self.shared_experts == "keep"
        found, _ = select(plan, takes_linears(self.targets), _in_blocks, keep_shared=keep)
        experts = found.experts
        own = experts
        if experts is not None and not self._takes_drafts(plan):
            own = experts.without_drafts(plan)
        if not found.linears and not (own is not None and own.projections):
            raise PlanError("no linear layer found that runtimes load in NVFP4")
        found = self._with_shared(plan, replace(found, experts=own))
        check_tp(found.sizes, self.tp)
        return found

    def _takes_drafts(self, plan: Plan) -> bool:
        """Return whether experts of draft layers are quantized too: where a config cannot tell them from
        the model's own. There are no statistics of theirs."""
        return self.stats is None and draft_as_first_layer(plan)

    def _with_shared(self, plan: Plan, chosen: Selection) -> Selection:
        """The same with shared experts, where they are to be quantized with the routed ones."""
        if self.shared_experts is None and (self.stats is not None or self.calibrate is not None):
            return chosen
        drafts = self._takes_drafts(plan)

        def block_of(selection: Selection) -> dict[str, Any]:
            return self._block(plan, selection, inputs=False)[0]

        return with_shared(plan, chosen, self.shared_experts, block_of, drafts=drafts)

    def _input_maxima(self, plan: Plan, chosen: Selection) -> InputMaxima | None:
        return None if self.stats is None else maxima_of(plan, self.stats, _projections(chosen))

    def _planned(
        self,
        plan: Plan,
        chosen: Selection,
        made: Named,
        maxima: InputMaxima | None,
        digest: str | None,
    ) -> Plan:
        inputs = maxima is not None or self.input_scale is not None
        block, others = self._block(plan, chosen, inputs=inputs)
        made_plan = replace_weights(
            plan,
            self._entry(plan, chosen, maxima, block, digest),
            {**others, **made},
            dropped=chosen.dropped(plan),
            block=block,
            facts={"tp_sizes": _loads_at(chosen), **self._facts(maxima)},
            calibrate=self.calibrate,
            digest=digest,
        )
        return with_modelopt_file(made_plan)

    def _block(
        self, plan: Plan, chosen: Selection, *, inputs: bool
    ) -> tuple[dict[str, Any], Named]:
        """The config's block for what is chosen, and the tensors that stay, under their new names."""
        others: Named = chosen.others(plan)
        linears = runtime_linears(plan, others)
        fp8 = fp8_block(plan, linears)
        if self.dialect == "modelopt":
            return _modelopt_block(plan, chosen, others, linears, inputs), others
        if fp8 is not None:
            others = with_weight_scales(others)
        drafts = self._takes_drafts(plan)
        return _packed_block(plan, chosen, others, fp8, inputs, drafts=drafts), others

    def _entry(
        self,
        plan: Plan,
        chosen: Selection,
        maxima: InputMaxima | None,
        block: Mapping[str, Any],
        digest: str | None,
    ) -> LogEntry:
        notes = []
        step = self if maxima is None else replace(self, stats=maxima.digest)
        if maxima is not None:
            notes += maxima.notes()
        else:
            notes.append(said_of_inputs(self.input_scale))
        dims = plan.role_index.dims
        if any(plan.family.is_mtp(n, dims) for n in plan.tensors):
            notes.append(self._of_drafts(plan))
        if chosen.left:
            notes.append(f"{len(chosen.left)} linears left as they are: no whole blocks of {BLOCK}")
        if digest is not None and any(one.draft for one in _projections(chosen)):
            notes.append("MTP experts are not calibrated: rounded to nearest")
        notes += shared_notes(plan, chosen, block)
        notes.append(loads_note(_loads_at(chosen)))
        return chosen.entry(self.name, options_with(step, digest), notes)

    def _of_drafts(self, plan: Plan) -> str:
        if self._takes_drafts(plan):
            return (
                "experts of MTP layers quantized too: sglang's draft calls its layer model.layers.0"
            )
        if draft_as_first_layer(plan):
            return (
                "MTP layers as they are, which sglang's draft class does not load beside NVFP4: drop "
                "them (a recipe of `drop: {what: mtp}` and `nvfp4`) or serve without speculation"
            )
        return "MTP layers as they are"


def _loads_at(chosen: Selection) -> list[int]:
    """The usual tensor-parallel sizes at which each rank gets whole blocks."""
    matrices = chosen.sizes
    return [tp for tp in TP_SIZES if not cut_blocks(matrices, tp)]


def _projections(chosen: Selection) -> tuple[Projection, ...]:
    return chosen.experts.projections if chosen.experts is not None else ()


def _in_blocks(stored: Stored) -> bool:
    return stored.columns % BLOCK == 0


def _packed_block(
    plan: Plan,
    chosen: Selection,
    others: Named,
    fp8: tuple[int, int] | None,
    inputs: bool,
    *,
    drafts: bool,
) -> dict[str, Any]:
    """compressed-tensors' block. `drafts`: experts of draft layers are packed too."""
    kept = [] if drafts else draft_patterns(plan)
    own = "".join(f"(?!{pattern})" for pattern in kept)
    left = ignored_names(plan, others, drafts=drafts)
    group = partial(group_config, inputs=inputs)
    return compressed_block(plan, chosen, group, left, fp8=fp8, but=own)


def _modelopt_block(
    plan: Plan, chosen: Selection, others: Named, linears: Mapping[str, bool], inputs: bool
) -> dict[str, Any]:
    """modelopt's block; for experts beside FP8 layers one with an entry for each layer."""
    fp8 = [module for module, is_fp8 in linears.items() if is_fp8]
    modules = [module for module, _, _ in chosen]
    if not fp8:
        return modelopt_config(ignored_globs(plan, others, modules), inputs=inputs)
    if chosen.plain:
        raise PlanError(
            f"{fp8[0]!r} is FP8 and would stay so beside other layers in NVFP4, for which modelopt's "
            "dialect has no place: target experts, take dialect compressed-tensors, or dequantize "
            "first (a recipe of `dequant` and `nvfp4` is one read)"
        )
    own = fp8_own_block(plan)
    left = with_draft_names(plan, ignored_linears(plan, others))
    return mixed_config(own, left, modules, with_draft_names(plan, fp8), inputs=inputs)


PASSES = (ToNvfp4,)
