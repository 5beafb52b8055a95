"""nvfp4: weights in NVFP4; by default those of the routed experts, with all other layers as they are.

The config follows what runtimes do with it (read in sglang). It says that activations are
quantized only where their scales are stored: without them a runtime would use scales that it never
filled. Draft (MTP) layers stay as they are: sglang builds them without NVFP4, but for Qwen3-Next's,
which it builds as the model's first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.formats.base import Stored
from qconvert.formats.mx import format as mx
from qconvert.formats.nvfp4.encode import PackNvfp4, PackNvfp4Codes, Scales
from qconvert.formats.nvfp4.format import (
    constant_input,
    group_config,
    input_scale,
    mixed_config,
    modelopt_config,
)
from qconvert.formats.nvfp4.scales import OwnScale
from qconvert.models.linears import runtime_linears
from qconvert.models.unquantized import (
    OutputsByName,
    draft_as_first_layer,
    draft_patterns,
    fp8_block,
    fp8_own_block,
    ignored_globs,
    ignored_linears,
    ignored_names,
    with_draft_names,
)
from qconvert.ops.cast import ToBf16
from qconvert.ops.fp4 import BLOCK
from qconvert.ops.rowwise import RowOp
from qconvert.passes.input_scales import InputScales
from qconvert.passes.mxfp4_as_nvfp4 import WEIGHTS_ONLY, as_nvfp4, inputs_of
from qconvert.passes.quantize import Quantizing, compressed_block, left_note, rounded_drafts
from qconvert.passes.ranks import Grid, loads_at, loads_note
from qconvert.passes.selection import Selection, check_targets, shared_notes
from qconvert.passes.shared_scales import encoded_together
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import Plan
from qconvert.samples.request import Calibration


@dataclass(frozen=True, slots=True)
class ToNvfp4(Quantizing):
    """Quantize routed experts, or linear layers, to NVFP4.

    `targets: [Linear]` names every linear layer that runtimes load so; there are two dialects. Without
    `stats` or `input_scale` (as modelopt stores it: their largest size / 2688), which `weight_only`
    excludes, the config says that activations stay bf16. Block `scales` are each block's largest
    weight / 6, or with `search` those around it whose codes have the least error. With `calibrate`
    GPTQ finds codes and block scales of routed experts; gate and up still share a global scale, that
    of rounding.

    Raises PlanError where expert columns are not whole blocks of 16, where FP8 layers would stay and the
    dialect has no place for them, where statistics do not fit, where a search is asked for and MXFP4
    keeps its scales, where a calibration would have to solve other linears than routed experts, and as
    `Quantizing` does.
    """

    name: ClassVar[str] = "nvfp4"

    dialect: Dialect = "modelopt"
    weight_only: bool = False
    stats: str | None = None
    input_scale: float | None = None
    scales: Scales = "amax"
    calibrate: Calibration | None = None

    def __post_init__(self) -> None:
        check_targets(self.targets, self.dialect)
        if self.weight_only and self.input_scale is not None:
            raise PlanError("input_scale is a constant input scale, and weight_only says otherwise")
        if self.stats is not None and self.weight_only:
            raise PlanError(
                "weight_only stores no input scales, the only use of stats: leave one of them out"
            )
        self.check_options()
        if self.calibrate is not None:
            self._check_calibration(self.calibrate)

    def _check_calibration(self, asked: Calibration) -> None:
        """Raises PlanError for what cannot be calibrated, or not so."""
        if asked.solver == "llmcompressor":
            raise PlanError(
                "solver llmcompressor: only integers are solved so here, and NVFP4 is not: leave solver "
                "out, or choose best"
            )
        if self.beside_experts:
            raise PlanError(
                f"calibration solves routed experts alone, and {self.beside_experts} would be rounded "
                "to nearest: leave it out, target experts, or keep shared experts"
            )

    @property
    def grid(self) -> Grid:
        return 1, BLOCK

    def packer(self, *, draft: bool = False) -> PackNvfp4Codes:
        return PackNvfp4Codes(self.dialect)

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        return self.packer().suffixes

    def __call__(self, plan: Plan) -> Plan:
        modules = mx.mxfp4_modules(plan)
        return self._relabelled(plan, modules) if modules else self.planned(plan)

    def encoded(
        self, plan: Plan, chosen: Selection, inputs: InputScales, digest: str | None
    ) -> dict[str, Output]:
        """The new tensors by name; matrices that are computed as one share a global scale."""
        matrices = {module: stored for module, _, stored in chosen}
        solved, made = self.solved(plan, chosen, digest), {}
        for module, results in solved.items():
            made.update(self.named(module, matrices[module], results))
        encoder = partial(PackNvfp4, dialect=self.dialect, scales=self.scales)
        each = encoded_together(chosen, OwnScale(self.dialect), encoder, _decoder, but=solved)
        for module, results, scale in each:
            shaped = scale.reshape(NVFP4[self.dialect].scalar)
            made.update(self.named(module, matrices[module], [*results, shaped]))
        of, constant = (partial(one, dialect=self.dialect) for one in (input_scale, constant_input))
        given = inputs.scales(chosen, of, constant)
        return made | inputs_of(given, self.dialect)

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

    def own_experts(self, plan: Plan, chosen: Selection) -> Selection:
        """The same without experts of draft layers, where a config can tell them apart."""
        if chosen.experts is None or self._takes_drafts(plan):
            return chosen
        return replace(chosen, experts=chosen.experts.without_drafts(plan))

    def _takes_drafts(self, plan: Plan) -> bool:
        """Return whether experts of draft layers are quantized; no statistics are of theirs."""
        return self.stats is None and draft_as_first_layer(plan)

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        linears = runtime_linears(plan, others)
        fp8 = fp8_block(plan, linears)
        inputs = self.stores_inputs
        if self.dialect == "modelopt":
            return _modelopt_block(plan, chosen, others, linears, inputs)
        drafts = self._takes_drafts(plan)
        but = "" if drafts else "".join(f"(?!{pattern})" for pattern in draft_patterns(plan))
        left = ignored_names(plan, others, drafts=drafts)
        group = partial(group_config, inputs=inputs)
        return compressed_block(plan, chosen, group, left, fp8=fp8, but=but)

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        dims, family = plan.role_index.dims, plan.family
        drafts = any(family.is_mtp(name, dims) for name in plan.tensors)
        return [
            *(inputs.notes() or [WEIGHTS_ONLY]),
            *([self._of_drafts(plan)] if drafts else []),
            *left_note(chosen, f": no whole blocks of {BLOCK}"),
            *rounded_drafts(chosen, self.calibrate),
            *shared_notes(plan, chosen, block),
            loads_note(loads_at(chosen.sizes, self.grid)),
        ]

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


def _decoder(stored: Stored) -> RowOp | None:
    """Return how the matrix is read: F16 and F32 as they are, since bf16 would round them once more."""
    return None if isinstance(stored.decoder, ToBf16) else stored.decoder


def _modelopt_block(
    plan: Plan, chosen: Selection, others: OutputsByName, linears: Mapping[str, bool], inputs: bool
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
