"""amx: the routed experts as KTransformers' CPU kernels load them, and nothing else.

Read from BF16, FP16, FP32, FP8 with scales, packed INT4, apart or stacked, in one pass over the
source. The runtime reads all other layers from the folder on its GPU side, so they are dropped here,
by a named rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from qconvert.checkpoint import without_quantization
from qconvert.errors import PlanError
from qconvert.experts import Experts, Projection, routed_experts
from qconvert.family import text_config
from qconvert.formats.amx import RUNTIME_NAME, Amx, Method, Rounding, check_dims
from qconvert.graph import Output, Source, apply
from qconvert.ops.rowwise import Recode
from qconvert.plan import ELSEWHERE, LogEntry, Plan

FACT = "amx"
_OTHER_LAYERS = f"{ELSEWHERE} no routed expert; the runtime reads it from its GPU side"
_DRAFT = "amx: mtp=drop"
_SHAPES = f"{ELSEWHERE} the shapes noted beside packed weights"
_STALE = ("hf_quant_config.json",)
_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class ExpertsToAmx:
    """`method` int4 or int8, for `numa` NUMA nodes; `rounding` peer (kt-kernel's own bytes) or search
    (fewer weight errors); draft (MTP) layers' experts kept, numbered on after the model's, or not.

    Raises PlanError for sizes the kernels cannot hold, with NUMA counts that would do, for another
    activation than SiLU, and as `routed_experts` does.
    """

    name: ClassVar[str] = "amx"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    method: Method
    numa: int
    rounding: Rounding = "peer"
    mtp: Literal["keep", "drop"] = "keep"

    def __call__(self, plan: Plan) -> Plan:
        _check_activation(plan)
        dims = plan.census.dims
        if dims.num_experts:
            check_dims(self.method, dims.hidden_size, dims.moe_intermediate_size, self.numa)
        experts = routed_experts(plan)
        kept = [p for p in experts.projections if not (p.draft and self.mtp == "drop")]
        tensors: dict[str, Output] = {}
        for projection in kept:
            tensors.update(self._shards(projection))
        drafts = sorted({p.layer for p in experts.projections if p.draft})
        notes = [] if not drafts else [f"MTP layers {self._spell(drafts)} {self.mtp}"]
        fact = {
            "method": RUNTIME_NAME[self.method],
            "numa": self.numa,
            "rounding": self.rounding,
            "hidden_size": dims.hidden_size,
            "intermediate_size": dims.moe_intermediate_size,
            "experts": dims.num_experts,
            "layers": sorted({p.layer for p in kept}),
        }
        stale = [name for name in _STALE if name in plan.side_files]
        dropped_files = dict.fromkeys(stale, "amx: its quantization block no longer holds")
        return plan.logged(
            LogEntry(
                self.name, repr(self), len(experts.projections), experts.expected, tuple(notes),
                "expert matrices",
            ),
            tensors=tensors,
            config=without_quantization(plan.config),
            dropped={**plan.dropped, **self._dropped(plan, experts)},
            side_files=tuple(name for name in plan.side_files if name not in stale),
            dropped_files={**plan.dropped_files, **dropped_files},
            facts={**plan.facts, FACT: fact},
        )  # fmt: skip

    def _shards(self, projection: Projection) -> Iterator[tuple[str, Output]]:
        """Names and outputs of one matrix: gate and up cut by rows, down by columns."""
        base = f"blk.{projection.layer}.ffn_{_KINDS[projection.kind]}_exps.{projection.expert}"
        stored, numa = projection.weight, self.numa
        results: list[Output] = []
        try:
            if projection.kind == "down_proj":
                op = Recode(stored.decoder, (Amx(self.method, numa, self.rounding),))
                results += apply(op, *stored.args)
            else:
                height = stored.rows // numa
                for shard in range(numa):
                    part = stored.cut(shard * height, (shard + 1) * height)
                    op = Recode(part.decoder, (Amx(self.method, 1, self.rounding),))
                    results += apply(op, *part.args)
        except PlanError as error:
            raise PlanError(f"{projection.module}: {error}") from error
        for shard in range(numa):
            yield f"{base}.numa.{shard}.scale", results[2 * shard + 1]
            yield f"{base}.numa.{shard}.weight", results[2 * shard]

    def _dropped(self, plan: Plan, experts: Experts) -> dict[str, str]:
        """A rule for every source that leaves: other layers, draft experts, shapes of packed weights."""
        drafts = {p.module for p in experts.projections if p.draft and self.mtp == "drop"}
        found = {}
        for name, output in plan.tensors.items():
            if name not in experts.taken:
                rule = _OTHER_LAYERS
            elif name.endswith(".weight_shape"):
                rule = _SHAPES
            else:
                continue
            found.update(_sources(name, output, rule))
        if drafts:
            for projection in experts.projections:
                if projection.module in drafts:
                    for arg in projection.weight.args:
                        found.update(_sources(projection.module, arg, _DRAFT))
        return found

    def _spell(self, layers: list[int]) -> str:
        return ", ".join(map(str, layers))


def _sources(name: str, output: Output, rule: str) -> dict[str, str]:
    found = {}
    for piece in output.pieces:
        if not isinstance(piece.origin, Source):
            raise PlanError(f"{name!r} is computed by an earlier pass and dropped here")
        found[piece.origin.name] = rule
    return found


def _check_activation(plan: Plan) -> None:
    """kt-kernel's AMX kernels compute silu(gate) * up, without biases."""
    text = text_config(plan.config)
    kind = plan.config.get("model_type")
    if kind == "gpt_oss" or text.get("model_type") == "gpt_oss":
        raise PlanError(
            "gpt-oss experts have biases and a clamped activation; kt-kernel's AMX kernels compute "
            "SiLU without biases only, so the result would load and babble"
        )
    act = text.get("hidden_act", "silu")
    if act not in ("silu", "swish") or text.get("swiglu_limit"):
        what = f"hidden_act {act!r}" if act not in ("silu", "swish") else "a swiglu_limit"
        raise PlanError(
            f"the config states {what}; kt-kernel's AMX kernels compute plain SiLU only"
        )


PASSES = (ExpertsToAmx,)
