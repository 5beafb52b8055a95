"""w4a16: weights in packed INT4 or INT8, rounded to nearest or calibrated; by default those of the
routed experts, with all other layers as they are.

The config follows what runtimes do with it (read in sglang). Where targets match experts alone,
every other linear that is not ignored is an error, so each unquantized one is named. Linears that stay
in block FP8 get a second group, with scales under compressed-tensors' name, which sglang and vLLM
load. Scales that are exponents have no such name: they keep theirs, with `linear_fp8_config`, which
sglang alone reads, for all linears at once and without looking at lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.int_scheme import DEFAULT_GROUP, Actorder, Bits, IntScheme, Packer, Signs
from qconvert.core.versions import SGLANG, TRANSFORMERS
from qconvert.formats.base import Stored
from qconvert.formats.int_packed.encode import RoundToNearest, Scales, encoder
from qconvert.formats.int_packed.format import (
    awq_config,
    gptq_config,
    group_config,
    left_parts,
    left_pattern,
)
from qconvert.formats.int_packed.packers import Packing, packer
from qconvert.models.linears import linears_and_routers, runtime_linears
from qconvert.models.unquantized import (
    OutputsByName,
    all_experts,
    fp8_block,
    has_exponents,
    ignored,
    no_experts,
    shared_paths,
    with_draft_names,
)
from qconvert.ops.constant import constant_i64
from qconvert.ops.rowwise import RowOp
from qconvert.passes.input_scales import InputScales
from qconvert.passes.mixture import PACKED
from qconvert.passes.quantize import Quantizing, compressed_block, left_note, rounded_drafts
from qconvert.passes.ranks import Grid, listed, loads_at, loads_note
from qconvert.passes.selection import Selection, shared_notes
from qconvert.plan.plan import Plan
from qconvert.samples.request import Calibration

_GROUPS = (128, 32)  # what all kernels take (sglang's Triton WNA16 no other)
# A scale a row is on every rank; what a rank has of a row fits kernels in multiples of this.
_CHANNEL_STEP = 64


@dataclass(frozen=True, slots=True)
class ExpertsToW4A16(Quantizing):
    """Quantize routed experts, or linear layers, to packed INT4 or INT8.

    Weights have `bits`, in groups of `group_size` columns that share a scale (null: a whole row does),
    packed as `packing` says. Layers that no runtime is known to load quantized are never taken. With
    `leave_bf16` a linear whose columns are not whole groups stays as it is (an expert never does). With
    `calibrate` GPTQ finds the codes of all that is targeted. `scales` of rounding to nearest are each
    group's amax over half the range, or with `search` those whose codes lose least
    (formats/int_packed/search.py); `signs` of symmetric INT4's says whether scales below 0 are tried,
    too.

    Raises PlanError for groups that do not fit (naming groups that do), for a search beside a
    calibration, and as `Quantizing` does.
    """

    name: ClassVar[str] = "w4a16"

    group_size: int | None = DEFAULT_GROUP
    bits: Bits = 4
    symmetric: bool = True
    actorder: Actorder | None = None
    packing: Packing = "compressed-tensors"
    leave_bf16: bool = False
    calibrate: Calibration | None = None
    scales: Scales = "amax"
    signs: Signs = "both"

    def __post_init__(self) -> None:
        if self.scales == "amax" and self.signs != "both":
            raise PlanError(
                f"signs {self.signs!r} are of scales 'search', and scales of amax are never below 0: "
                "leave it out; a calibration's stand in `calibrate`"
            )
        if self.bits not in (4, 8):  # others are read
            raise PlanError(f"expected codes of 4 or 8 bits, found {self.bits}")
        asked = self.calibrate
        if asked is not None and asked.order == "stored" and self.actorder is not None:
            raise PlanError(
                f"order 'stored' solves columns as they are stored, and actorder {self.actorder!r} "
                "by importance: leave one of the two out"
            )
        self.check_options()

    @property
    def scheme(self) -> IntScheme:
        """compressed-tensors keeps scales in the weights' dtype, GPTQ in fp16."""
        dtype: Any = "BF16" if self.packing == "compressed-tensors" else "F16"
        return IntScheme(self.bits, self.group_size, self.symmetric, self.actorder, dtype)

    def packer(self, *, draft: bool = False) -> Packer:
        """Return what packs a matrix's codes. Raises PlanError for asymmetric codes in GPTQ's first
        version: which zero points new codes need is not known before they are made; for symmetric ones
        in AutoAWQ's form, and for others than 4 bits."""
        if self.packing == "awq" and self.symmetric:
            raise PlanError(
                "AutoAWQ's form is of weights with zero points: take asymmetric weights, or packing "
                "compressed-tensors or gptq"
            )
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

    def suffixes(self, *, draft: bool = False) -> tuple[str, ...]:
        return self.packer(draft=draft).suffixes

    def named(
        self, module: str, stored: Stored, results: Sequence[Output], *, draft: bool = False
    ) -> dict[str, Output]:
        """The packer's results under their names, and what else the format has of a matrix."""
        found = Quantizing.named(self, module, stored, results, draft=draft)
        if self.packing == "compressed-tensors":
            shape = apply(constant_i64((stored.rows, stored.columns)))[0]
            found[f"{module}.weight_shape"] = shape
        return found

    # --- sizes

    @property
    def grid(self) -> Grid:
        """Zero points are packed in words along the rows, and all that GPTQ's form has."""
        scheme = self.scheme
        words = self.packing != "compressed-tensors" or not scheme.symmetric
        return scheme.word if words else 1, scheme.group or _CHANNEL_STEP

    def fits(self, stored: Stored) -> bool:
        word = self.scheme.word
        whole = stored.columns % self.scheme.width(stored.columns) == 0
        # GPTQ packs zero points along the rows.
        ragged = self.packing != "compressed-tensors" and stored.rows % word
        return not self.leave_bf16 or (whole and stored.columns % word == 0 and not ragged)

    def check_chosen(self, plan: Plan, chosen: Selection) -> None:
        """Raises PlanError for a group that does not divide columns, or not what a rank has of them."""
        scheme = self.scheme
        for module, _, _, columns in chosen.sizes:
            try:
                scheme.groups(columns)
            except PlanError as error:
                groups = self._fitting_groups(chosen, self.tp or 1)
                hint = (
                    f"group {groups[0]} is supported"
                    if groups
                    else "a scale a row (group null, channel) is supported"
                )
                if chosen.experts is None or module in chosen.linears:
                    hint += ", or --leave-bf16 leaves such a matrix as it is"
                raise PlanError(f"{module}: {error}; {hint}") from None
        if self.tp is not None and not loads_at(chosen.sizes, self.grid, (self.tp,)):
            groups = self._fitting_groups(chosen, self.tp)
            how = f"in groups of {scheme.group}" if scheme.group else "with a scale a row"
            hint = f"group {groups[0]} fits" if groups else "no group size fits"
            raise PlanError(
                f"at tensor parallel {self.tp} a rank would not get whole groups {how}: {hint} at "
                f"{self.tp}; ranks get whole ones of this at {listed(loads_at(chosen.sizes, self.grid))}"
            )

    def _fitting_groups(self, chosen: Selection, tp: int) -> list[int]:
        """Group sizes that hold every matrix whole and load at `tp`, largest first."""
        return [
            group
            for group in _GROUPS
            if all(one.columns % group == 0 for one in chosen.sizes)
            and loads_at(chosen.sizes, (self.grid[0], group), (tp,))
        ]

    # --- what the plan and the config say

    def notes(
        self, plan: Plan, chosen: Selection, block: Mapping[str, Any], inputs: InputScales
    ) -> list[str]:
        sizes = loads_at(chosen.sizes, self.grid)
        notes = ["linear_fp8_config"] if "linear_fp8_config" in block else []
        notes.append(loads_note(sizes, "groups"))
        groups = self._fitting_groups(chosen, 1) if self.scheme.group else []
        for group in groups[::-1][:1]:  # the smallest loads at the most sizes
            at = loads_at(chosen.sizes, (self.grid[0], group))
            if len(at) > len(sizes):
                notes.append(f"groups of {group} would be whole at {listed(at)}")
        notes += left_note(chosen, " (leave_bf16)")
        if not self.symmetric and self.packing != "awq":
            notes.append(f"asymmetric: no experts so in {SGLANG} or {TRANSFORMERS}")
        notes += rounded_drafts(chosen, self.calibrate)
        return [*notes, *shared_notes(plan, chosen, block)]

    def config(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        """Raises PlanError for FP8 that cannot stay."""
        linears = runtime_linears(plan, others)
        fp8 = fp8_block(plan, linears)
        if fp8 is not None:
            self._check_fp8(plan, [module for module, is_fp8 in linears.items() if is_fp8])
        if self.packing == "awq":
            return self._awq_block(plan, chosen, others)
        if self.packing != "compressed-tensors":
            return self._gptq_block(plan, chosen, others)
        left = ignored(plan, others, experts=chosen.experts is not None, shared=bool(chosen.shared))
        exponents = has_exponents(others) and not chosen.linears
        beside = fp8 is not None and exponents and all(linears.values())
        group = partial(group_config, self.scheme)
        block = compressed_block(plan, chosen, group, left, fp8=None if beside else fp8)
        if chosen.experts is not None or not chosen.staying.groups:
            block["format"] = PACKED
        if fp8 is not None and beside:
            block["linear_fp8_config"] = _linear_fp8_config(plan, fp8)
        return block

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
            form = "AutoAWQ's" if self.packing == "awq" else "GPTQ's"
            raise PlanError(
                f"{modules[0]!r} is FP8, and {form} form has no place for it: dequantize the checkpoint "
                "first (qconvert dequant), or take packing compressed-tensors"
            )

    def _awq_block(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
        """AutoAWQ's block: every module is quantized except those with a name of the list in theirs."""
        named = with_draft_names(plan, linears_and_routers(plan, others))
        quantized = [module for module, _, _ in chosen]
        kept = plan.role_index.dims.num_experts and not chosen.experts
        experts = plan.family.expert_paths if kept else ()
        return awq_config(self.scheme, left_parts(named, experts, quantized))

    def _gptq_block(self, plan: Plan, chosen: Selection, others: OutputsByName) -> dict[str, Any]:
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
    (sglang, `compressed_tensors.py`)."""
    formats = [config.block.get("scale_fmt") for config in plan.checkpoint.quantization_configs]
    stated = next(filter(None, formats), None)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(fp8),
        **({"scale_fmt": stated} if stated else {}),
    }


PASSES = (ExpertsToW4A16,)
