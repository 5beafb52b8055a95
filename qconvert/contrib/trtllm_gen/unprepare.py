"""unprepare (experimental): experts prepared for TensorRT-LLM's MoE kernels, restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qconvert.checkpoint.prepared import DERIVED, layout_of
from qconvert.contrib.trtllm_gen.layout import GUIDE, Rows, Scales
from qconvert.contrib.trtllm_gen.stacks import DIALECTS, Dialect
from qconvert.core.errors import PlanError
from qconvert.core.family import without_quantization
from qconvert.core.graph import Output, apply
from qconvert.ops.gather import Order, Scatter
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

_RULE = "derived: it follows from the scales that stay"


@dataclass(frozen=True, slots=True)
class Unprepare:
    """Experimental. The inverse of `prepare`: its source's tensors, byte for byte, and quantization
    blocks. Raises PlanError if the source is not prepared, or a part of it is missing."""

    name: ClassVar[str] = "unprepare"

    def __call__(self, plan: Plan) -> Plan:
        layout = layout_of(plan.config)
        if layout is None:
            raise PlanError(_why_not(plan))
        dialect = DIALECTS[layout["dialect"]]
        first = f".w13_{dialect.weight}"
        bases = [name.removesuffix(first) for name in plan.tensors if name.endswith(first)]
        if not bases:
            raise PlanError(
                f"no '*{first}' found, although config.json says the source is prepared"
            )
        derived = {f"{base}.{name}" for base in bases for name in DERIVED}
        tensors: dict[str, Output] = {}
        taken = set(derived)
        for base in bases:
            found, names = _unprepared(plan, base, layout, dialect)
            tensors.update(found)
            taken.update(names)
        others = {name: output for name, output in plan.tensors.items() if name not in taken}
        block = plan.config["quantization_config"]
        gone = dict.fromkeys((name for name in plan.tensors if name in derived), _RULE)
        kept = tuple(name for name in plan.side_files if name != GUIDE)
        said = {GUIDE: "unprepare: no longer so"} if GUIDE in plan.side_files else {}
        return plan.logged(
            LogEntry(self.name, options_of(self), len(bases), None, (), "layers of experts"),
            tensors={**others, **tensors},
            config=_restored(without_quantization(plan.config), block["replaced"]),
            dropped={**plan.dropped, **gone},
            side_files=kept,
            dropped_files={**plan.dropped_files, **said},
            new_files={**plan.new_files, **block.get("files", {})},
        )


def _why_not(plan: Plan) -> str:
    """Why there is no marker: what made the source instead."""
    steps = [step.get("name") for step in (plan.checkpoint.manifest or {}).get("passes", ())]
    last = steps[-1] if steps else None
    wanted = "expected a source that `qconvert prepare` made, whose config.json says so"
    if any(name.endswith((".w13_weight", ".w13_weight_packed")) for name in plan.tensors):
        return (
            f"{wanted}: its tensors are prepared, but config.json is another one; restore the config of "
            "the prepared folder"
        )
    if last == "unprepare":
        return f"{wanted}; this one was already restored by unprepare, nothing to do"
    return f"{wanted}; found {'one that ' + str(last) + ' made' if last else 'a plain checkpoint'}"


def _unprepared(
    plan: Plan, base: str, layout: Mapping[str, Any], dialect: Dialect
) -> tuple[dict[str, Output], list[str]]:
    """A layer's tensors as they were, and the names of those they are made from."""
    gated, scalar = bool(layout["gated"]), tuple(layout["scalar_shape"])
    projections, experts = layout["projections"], layout["num_experts"]
    orders: dict[str, Callable[[bool], Order]] = {dialect.weight: Rows, dialect.block: Scales}
    tensors: dict[str, Output] = {}
    taken = []
    for parameter in dialect.parameters:
        if parameter == dialect.activation and not layout["derived_scalars"]:
            continue
        w13, w2 = (_fused(plan, f"{base}.{w}_{parameter}", experts) for w in ("w13", "w2"))
        taken += [f"{base}.w13_{parameter}", f"{base}.w2_{parameter}"]
        for expert in range(experts):
            if parameter in orders:
                order = orders[parameter]
                parts = apply(Scatter(order(gated)), w13.index(expert))
                parts += apply(Scatter(order(False)), w2.index(expert))
            else:
                pair = w13.index(expert) if gated else w13.rows(expert, expert + 1)
                rows = [pair.rows(n, n + 1) for n in range(pair.type.shape[0])]
                rows.append(w2.rows(expert, expert + 1))
                parts = tuple(row.reshape(scalar) for row in rows)
            for projection, output in zip(projections, parts, strict=True):
                tensors[f"{base}.{expert}.{projection}.{parameter}"] = output
    return tensors, taken


def _fused(plan: Plan, name: str, experts: int) -> Output:
    output = plan.tensors.get(name)
    if output is None:
        raise PlanError(f"{name!r} is missing; prepare again from the source")
    if output.type.shape[:1] != (experts,):
        raise PlanError(f"{name!r}: expected {experts} experts, found {output.type}")
    return output


def _restored(config: dict[str, Any], replaced: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The config with the source's quantization blocks in their places."""
    for entry in replaced:
        inner = config
        for key in entry["at"][:-1]:
            inner[key] = dict(inner.get(key, {}))
            inner = inner[key]
        inner[entry["at"][-1]] = entry["block"]
    return config


PASSES = (Unprepare,)
