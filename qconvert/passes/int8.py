"""int8: weights and activations in INT8 (W8A8); by default all linear layers that runtimes load so.

Weights have a scale a row, activations one a token, which runtimes find for themselves. Read in sglang
0.5.23 and vLLM 0.33 (`schemes/compressed_tensors_w8a8_int8.py`): both load linears so. Routed experts
vLLM alone does on a GPU (`compressed_tensors_moe_w8a8_int8.py`): sglang has that class for NPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qconvert.formats.int_packed.config import int8_group_config
from qconvert.formats.int_packed.encode import RoundToNearest
from qconvert.formats.int_packed.packers import INT8_ROWS, KeepInt8
from qconvert.passes.by_row import ByRow
from qconvert.passes.ranks import check_size
from qconvert.passes.replace_weights import takes_linears
from qconvert.passes.shared_experts import SharedExperts
from qconvert.plan.pass_options import LINEAR, options_of
from qconvert.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class ToInt8:
    """All linear layers that runtimes load quantized, or with `targets: [experts]` the routed experts.
    `shared_experts` says whether shared experts beside routed ones are quantized too or kept; None:
    quantized only where sglang would otherwise fuse them and not read them. `tp` is a tensor-parallel
    size that the result must load at.

    Raises PlanError where layers in another quantized form would stay, where ranks cannot divide rows or
    columns, and as `routed_experts` does.
    """

    name: ClassVar[str] = "int8"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    targets: tuple[str, ...] = (LINEAR,)
    shared_experts: SharedExperts | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        takes_linears(self.targets)
        check_size(self.tp)

    def __call__(self, plan: Plan) -> Plan:
        notes = []
        if plan.role_index.dims.num_experts:
            notes.append(
                "experts are loaded by vLLM 0.33; sglang 0.5.23 has INT8 ones on NPUs alone"
            )
        return self.how.planned(plan, self.name, options_of(self), notes)

    @property
    def how(self) -> ByRow:
        return ByRow(
            "INT8",
            RoundToNearest(INT8_ROWS, KeepInt8()),
            KeepInt8().suffixes,
            int8_group_config,
            (1, 1),
            takes_linears(self.targets),
            self.shared_experts,
            self.tp,
        )


PASSES = (ToInt8,)
