"""prepare (experimental): NVFP4 experts in the layout that TensorRT-LLM's MoE kernels read.

A runtime makes this layout at every load, on the GPU. Its output cannot be told from its input,
so a prepared folder carries a `quant_method` that no runtime knows, and a marker in its files' metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from qconvert.checkpoint.prepared import DERIVED, FACT, LAYOUT, layout_of, marked
from qconvert.contrib.trtllm_gen.layout import (
    GUIDE,
    DerivedScalars,
    Rows,
    Scales,
    check_sizes,
    guide,
    tp_sizes,
)
from qconvert.contrib.trtllm_gen.stacks import Form, Layer, dialect_of, form_of, layers_of, named
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.family import text_config, without_quantization
from qconvert.core.graph import Output, Source, apply, concat, stack
from qconvert.models.skip_reasons import check_experts
from qconvert.ops.gather import Gather, Order
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

_HF_QUANT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Experimental. Every layer of NVFP4 experts as four fused tensors, each expert one node; per-tensor
    scales fused, and the scalars derived from them. Raises PlanError if there is no such layer, if an
    expert, a scale or a layer is missing, and for sizes that the runtime would pad. Layers in other
    formats stay unchanged."""

    name: ClassVar[str] = "prepare"

    def __call__(self, plan: Plan) -> Plan:
        if layout_of(plan.config) is not None or FACT in plan.checkpoint.metadata:
            raise PlanError(
                "the source is already prepared, and a second shuffle would destroy it; to change "
                "it, restore the experts first: qconvert unprepare"
            )
        if not plan.role_index.dims.num_experts:
            check_experts(plan, "there is nothing to prepare")
        layers, tensors = layers_of(plan.tensors)
        left = [base for base, layer in layers.items() if dialect_of(layer) is None]
        for base in left:
            tensors.update(named(base, layers[base]))
        ready = {base: layer for base, layer in layers.items() if base not in left}
        if not ready:
            raise PlanError(
                "no expert has its own matrix in NVFP4 (weight_scale_2 or weight_global_scale); "
                "quantize the experts first: qconvert nvfp4"
            )
        form = _one_form(plan, ready)
        _check_limit(plan, form, ready)
        for base, layer in ready.items():
            tensors.update(_prepared(base, layer, form))
        stale = dict.fromkeys(
            (name for name in (_HF_QUANT, GUIDE) if name in plan.side_files),
            "prepare: config.json says what holds now",
        )
        without = {name: text for name, text in plan.new_files.items() if name != _HF_QUANT}
        notes = [f"{base} is not NVFP4 and stays" for base in left]
        if not form.activations:
            notes.append(f"the source has no input scales, so {', '.join(DERIVED)} are not written")
        kinds = form.experts * len(form.projections)
        expected = _expected_layers(plan, layers)
        counted = None if expected is None else (len(expected) - len(left)) * kinds
        return plan.logged(
            LogEntry(
                self.name,
                options_of(self),
                kinds * len(ready),
                counted,
                tuple(notes),
                "expert matrices",
            ).against(layers, expected or ()),
            tensors=tensors,
            config=_marked_config(plan, form),
            side_files=tuple(name for name in plan.side_files if name not in stale),
            dropped_files={**plan.dropped_files, **stale},
            new_files={**without, GUIDE: guide(form)},
            metadata={
                **plan.metadata,
                FACT: json.dumps({"name": LAYOUT, **_layout(form)}, sort_keys=True),
            },
            facts={**plan.facts, FACT: _layout(form)},
        )


def _layout(form: Form) -> dict[str, Any]:
    """The marker: the facts that a loader needs."""
    return {
        "dialect": form.dialect.name,
        "gated": form.gated,
        "projections": list(form.projections),
        "num_experts": form.experts,
        "hidden_size": form.hidden,
        "intermediate_size": form.intermediate,
        "scalar_shape": list(form.scalar),
        "derived_scalars": form.activations,
        "tp_sizes": tp_sizes(form.intermediate, form.gated),
    }


def _one_form(plan: Plan, layers: Mapping[str, Layer]) -> Form:
    """The form that all layers share."""
    first: Form | None = None
    for base, layer in layers.items():
        form = form_of(base, layer, plan.role_index.dims.num_experts)
        try:
            check_sizes(form.hidden, form.intermediate, form.gated)
        except PlanError as error:
            raise PlanError(f"{base}: {error}") from error
        if first is not None and form != first:
            raise PlanError(
                f"{base}: expected experts in the form of the other layers, {first}, found {form}"
            )
        first = form
    assert first is not None
    return first


def _expected_layers(plan: Plan, layers: Mapping[str, Layer]) -> list[str] | None:
    """The experts' module in each layer that has experts, if the family says so; draft layers count if
    they are present."""
    if plan.family.name == "generic":
        return None
    dims = plan.role_index.dims
    drafts = [base for base in layers if plan.family.is_mtp(f"{base}.", dims)]
    before, _, rest = next(base for base in layers).partition(".layers.")
    inside = rest.partition(".")[2]
    return [*(f"{before}.layers.{n}.{inside}" for n in dims.groups.get("moe", ())), *drafts]


def _check_limit(plan: Plan, form: Form, layers: Mapping[str, Layer]) -> None:
    """For a clamped activation the runtime brings gate and up to one scale after loading, by halves of
    the block scales, which are mixed once prepared. Raises PlanError if they differ."""
    text = text_config(plan.config)
    if not form.gated or not text.get("swiglu_limit"):
        return
    for base, layer in layers.items():
        for expert in range(form.experts):
            gate, up = (
                _number(plan, f"{base}.{expert}.{p}", layer[expert, p][form.dialect.tensor])
                for p in form.projections[:2]
            )
            if gate != up:
                raise PlanError(
                    f"'{base}.{expert}': expected one {form.dialect.tensor} of gate and up, found two; "
                    "the config states a swiglu_limit, for which the runtime rescales block scales "
                    "after loading: serve the source unprepared"
                )


def _number(plan: Plan, module: str, output: Output) -> bytes:
    origin = output.pieces[0].origin
    if not isinstance(origin, Source) or origin.type.numel != 1:
        raise PlanError(f"{module}: its scale is computed in this run; prepare in a separate run")
    try:
        return plan.checkpoint.read_scalar(origin)
    except CheckpointError as error:
        raise PlanError(f"{module}: {error}") from error


def _prepared(base: str, layer: Layer, form: Form) -> Iterator[tuple[str, Output]]:
    """The tensors of a layer: weights, block scales, per-tensor scales, and those derived from them."""
    dialect, experts = form.dialect, range(form.experts)
    *first, down = form.projections
    orders: dict[str, Callable[[bool], Order]] = {dialect.weight: Rows, dialect.block: Scales}
    for parameter, order in orders.items():
        both, one = Gather(order(form.gated)), Gather(order(False))
        w13 = [apply(both, *(layer[e, p][parameter] for p in first))[0] for e in experts]
        yield f"{base}.w13_{parameter}", stack(w13)
        w2 = [apply(one, layer[e, down][parameter])[0] for e in experts]
        yield f"{base}.w2_{parameter}", stack(w2)
    scales: list[Output] = []
    for parameter in dialect.parameters[2:] if form.activations else dialect.parameters[2:3]:
        rows = [concat([layer[e, p][parameter].reshape((1,)) for p in first]) for e in experts]
        wide = stack(rows) if form.gated else concat(rows)
        narrow = concat([layer[e, down][parameter].reshape((1,)) for e in experts])
        yield f"{base}.w13_{parameter}", wide
        yield f"{base}.w2_{parameter}", narrow
        scales += [wide, narrow]
    if form.activations:
        op = DerivedScalars(dialect.inverted, form.gated)
        for name, output in zip(DERIVED, apply(op, *scales), strict=True):
            yield f"{base}.{name}", output


def _marked_config(plan: Plan, form: Form) -> dict[str, Any]:
    """config.json with the marker in place of every quantization block; the marker keeps those, and the
    text of the file that may replace them."""
    files = {}
    if _HF_QUANT in plan.side_files:
        files[_HF_QUANT] = (plan.checkpoint.read(_HF_QUANT) or b"").decode("utf-8")
    replaced = [{"at": at, "block": block} for at, block in _blocks(plan.config, [])]
    config = without_quantization(plan.config)
    config["quantization_config"] = marked(_layout(form), replaced, files)
    return config


def _blocks(config: Mapping[str, Any], at: list[str]) -> Iterator[tuple[list[str], Any]]:
    """Quantization blocks and the keys that lead to them, as `without_quantization` takes them out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if key in ("quantization_config", "compression_config"):
                yield [*at, key], value
            elif key.endswith("_config"):
                yield from _blocks(value, [*at, key])


PASSES = (Prepare,)
