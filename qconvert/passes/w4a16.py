"""w4a16: routed experts in compressed-tensors' packed INT4, groups of one scale, round to nearest; all
other layers as they are.

The config follows what runtimes do with it (read in sglang 0.5.23). Targets that match experts alone
make every other linear that is not ignored an error, so each unquantized one is named. Where a source
is block FP8 there are two forms: DeepSeek's, every linear of which is FP8, gets `linear_fp8_config`,
which runtimes apply to all linears without looking at lists; others get a second group for FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qconvert.checkpoint import without_quantization
from qconvert.errors import PlanError
from qconvert.experts import SPENT_RULE, Experts, routed_experts
from qconvert.formats.w4a16 import PackInt4, group_config
from qconvert.graph import Output, Source, apply
from qconvert.ignore import true_lists
from qconvert.names import split_parameter
from qconvert.ops.constant import constant_i64
from qconvert.ops.fp8 import WEIGHT_DTYPES
from qconvert.ops.rowwise import Recode
from qconvert.plan import LogEntry, Plan
from qconvert.quantization import fp8_scheme

GROUP = 128
_EXPERTS = r"re:.*\.mlp\.experts\..*"
# Roles whose matrices runtimes do not build as linear layers, so no quantization config is asked of
# them: embeddings and heads, the router, the draft layers' projection of two hidden states.
_NO_LINEARS = ("embed_tokens", "lm_head", "router", "eh_proj", "fc", "shared_head.head")
_DRAFT_LINEARS = r"re:model\.decoder\.(?!mlp\.experts\.).*"
# What says nothing about the weights once experts are INT4.
_STALE = ("hf_quant_config.json",)


@dataclass(frozen=True, slots=True)
class ExpertsToW4A16:
    """Every routed expert in symmetric groups of `group` columns. Raises PlanError where columns are
    not whole groups, and as `routed_experts` does."""

    name: ClassVar[str] = "w4a16"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    group: int = GROUP

    def __call__(self, plan: Plan) -> Plan:
        experts = routed_experts(plan)
        packed: dict[str, tuple[Output, Output]] = {}
        for projection in experts.projections:
            stored = projection.weight
            try:
                op = Recode(stored.decoder, (PackInt4(self.group),))
                weight, scale = apply(op, *stored.args)
            except PlanError as error:
                raise PlanError(f"{projection.module}: {error}") from error
            packed[projection.module] = weight, scale
        return self.with_packed(plan, experts, packed)

    def with_packed(
        self, plan: Plan, experts: Experts, packed: Mapping[str, tuple[Output, Output]]
    ) -> Plan:
        """The plan with its experts replaced by these packed weights and scales, by module."""
        others = {name: o for name, o in plan.tensors.items() if name not in experts.taken}
        linears = _linears(plan, others)
        tensors = dict(others)
        block = _fp8_block(plan, linears)
        every_linear = block is not None and all(linears.values())
        if block is not None and not every_linear:
            _check_plain_scales(others)
            tensors = {_as_weight_scale(name, others): output for name, output in others.items()}
        for projection in experts.projections:
            stored = projection.weight
            weight, scale = packed[projection.module]
            shape = apply(constant_i64((stored.rows, stored.columns)))[0]
            tensors[f"{projection.module}.weight_packed"] = weight
            tensors[f"{projection.module}.weight_scale"] = scale
            tensors[f"{projection.module}.weight_shape"] = shape
        spent = {
            piece.origin.name: SPENT_RULE
            for name in experts.spent
            for piece in plan.tensors[name].pieces
            if isinstance(piece.origin, Source)
        }
        stale = dict.fromkeys(
            (name for name in _STALE if name in plan.side_files),
            "w4a16: its quantization block no longer holds",
        )
        config = without_quantization(plan.config)
        quantization = _quantization(
            self.group, block, _ignored(plan, others), every_linear=every_linear
        )
        found = [c.block.get("scale_fmt") for c in plan.checkpoint.quantization_configs]
        if every_linear and any(found):
            quantization["linear_fp8_config"]["scale_fmt"] = next(filter(None, found))
        config["quantization_config"] = quantization
        note = ("linear_fp8_config",) if every_linear else ()
        return plan.logged(
            LogEntry(
                self.name, repr(self), len(experts.projections), experts.expected, note,
                "expert matrices",
            ),
            tensors=tensors,
            config=true_lists(config, ()),
            dropped={**plan.dropped, **spent},
            side_files=tuple(name for name in plan.side_files if name not in stale),
            dropped_files={**plan.dropped_files, **stale},
        )  # fmt: skip


def _linears(plan: Plan, others: Mapping[str, Output]) -> dict[str, bool]:
    """Modules that runtimes build as linear layers beside the experts, and whether they are FP8."""
    found = {}
    for name, output in others.items():
        module, parameter = split_parameter(name)
        place = plan.census.places.get(name)
        if parameter != "weight" or len(output.type.shape) != 2:
            continue
        if place is not None and place.role.name.removeprefix("mtp.") in _NO_LINEARS:
            continue
        found[module] = output.type.dtype in WEIGHT_DTYPES
    return found


def _ignored(plan: Plan, others: Mapping[str, Output]) -> list[str]:
    """Every unquantized matrix beside the experts, by the module's name, linear or not: a name too
    many does no harm. Draft layers that are numbered on go by another name in sglang's draft model."""
    found = [
        split_parameter(name)[0]
        for name, output in others.items()
        if name.endswith(".weight")
        and len(output.type.shape) == 2
        and output.type.dtype not in WEIGHT_DTYPES
    ]
    dims = plan.census.dims
    if any(".layers." in m and plan.family.is_mtp(m, dims) for m in found):
        found.append(_DRAFT_LINEARS)
    return found


def _fp8_block(plan: Plan, linears: Mapping[str, bool]) -> tuple[int, int] | None:
    """The block size of the linears that are FP8, None where none is."""
    if not any(linears.values()):
        return None
    for config in plan.checkpoint.quantization_configs:
        if config.block.get("activation_scheme") == "static":
            raise PlanError(
                f"{config.where}: activation_scheme static; beside INT4 experts runtimes scale "
                "activations dynamically: dequantize the checkpoint first (qconvert dequant)"
            )
    for module, fp8 in linears.items():
        kind = plan.tensors[f"{module}.weight"].type
        if fp8 and kind.dtype != "F8_E4M3":
            raise PlanError(
                f"{module!r} is {kind}; beside INT4 experts runtimes take E4M3: dequantize the "
                "checkpoint first (qconvert dequant)"
            )
    block = fp8_scheme(plan.checkpoint).block
    if block is None:
        first = next(module for module, fp8 in linears.items() if fp8)
        raise PlanError(
            f"{first!r} is FP8 without blocks; beside INT4 experts runtimes take block FP8 or bf16 "
            "linears: dequantize the checkpoint first (qconvert dequant)"
        )
    return block


def _check_plain_scales(others: Mapping[str, Output]) -> None:
    """compressed-tensors' float-quantized scales are numbers."""
    for name, output in others.items():
        if name.endswith(".weight_scale_inv") and output.type.dtype in ("U8", "F8_E8M0"):
            raise PlanError(
                f"{name!r}: {output.type.dtype} exponents are no compressed-tensors scales: "
                "dequantize the checkpoint first (qconvert dequant)"
            )


def _as_weight_scale(name: str, others: Mapping[str, Output]) -> str:
    """compressed-tensors' name of a block scale."""
    if not name.endswith(".weight_scale_inv"):
        return name
    renamed = name.removesuffix("_inv")
    if renamed in others:
        raise PlanError(f"{name!r} would become {renamed!r}, which is there already")
    return renamed


def _quantization(
    group: int, block: tuple[int, int] | None, ignored: list[str], *, every_linear: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_config(group, [_EXPERTS])},
        "ignore": ignored,
    }
    if block is None:
        return config
    if every_linear:
        config["linear_fp8_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        }
        return config
    config["config_groups"]["group_1"] = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "weights": {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block",
            "block_structure": list(block), "dynamic": False,
        },
        "input_activations": {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group",
            "group_size": block[1], "dynamic": True,
        },
        "output_activations": None,
    }  # fmt: skip
    return config


PASSES = (ExpertsToW4A16,)
