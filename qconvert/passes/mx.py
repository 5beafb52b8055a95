"""mx: weights in MXFP4 or MXFP8; by default those of the routed experts, with all other layers as they
are.

vLLM 0.33 loads all of it (`schemes/compressed_tensors_w4a4_mxfp4.py`, `_w8a8_mxfp8.py`, and theirs in
`compressed_tensors_moe/`). sglang 0.5.23 has a class for MXFP4 experts (`mxfp4.py`), which in
compressed-tensors' form its models of Kimi-K3 and DeepSeek-V4 alone fill (`models/kimi_k3.py`,
`models/deepseek_v4.py`): others leave `weight_packed` unread without a word. It has none for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from qconvert.core.encodings import MX
from qconvert.core.errors import PlanError
from qconvert.formats.mx.config import FORMATS, MX_BLOCK, Format, mx_group_config, mxfp4_modules
from qconvert.formats.mx.encode import EncodeMx
from qconvert.passes.by_row import ByRow
from qconvert.passes.ranks import check_size
from qconvert.passes.replace_weights import takes_linears
from qconvert.passes.shared_experts import SharedExperts
from qconvert.plan.pass_options import EXPERTS, options_of
from qconvert.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class ToMx:
    """The routed experts, or with `targets: [Linear]` every linear layer that runtimes load quantized.
    `shared_experts` says whether shared experts beside routed ones are quantized too or kept; None:
    quantized only where sglang would otherwise fuse them and not read them. `tp` is a tensor-parallel
    size that the result must load at. Other linears whose columns are no whole groups of 32 are left.

    Raises PlanError where expert columns are not whole groups, where a rank would cut one, for a source
    in MXFP4, and as `routed_experts` does.
    """

    name: ClassVar[str] = "mx"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    format: Format = "mxfp4"
    targets: tuple[str, ...] = (EXPERTS,)
    shared_experts: SharedExperts | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        takes_linears(self.targets)
        if self.format not in FORMATS:
            raise PlanError(f"expected one of {', '.join(FORMATS)}, found {self.format!r}")
        check_size(self.tp)

    def __call__(self, plan: Plan) -> Plan:
        if mxfp4_modules(plan):
            raise PlanError("the source is MXFP4: rounding its codes again would only lose")
        return self.how.planned(plan, self.name, options_of(self), self._notes())

    @property
    def how(self) -> ByRow:
        return ByRow(
            self.format.upper(),
            EncodeMx(self.format),
            MX[self.format],
            partial(mx_group_config, self.format),
            (1, MX_BLOCK),
            takes_linears(self.targets),
            self.shared_experts,
            self.tp,
        )

    def _notes(self) -> list[str]:
        if self.format == "mxfp8":
            return ["loaded by vLLM 0.33; sglang 0.5.23 has no class for it"]
        return ["loaded by vLLM 0.33; sglang 0.5.23 reads it in Kimi-K3 and DeepSeek-V4 alone"]


PASSES = (ToMx,)
