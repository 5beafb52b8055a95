"""prepare, unprepare (experimental): NVFP4 experts in the layout that TensorRT-LLM's MoE kernels read,
and back.

A runtime makes this layout at every load, on the GPU. Its output cannot be told from its input,
so a prepared folder carries a `quant_method` that no runtime knows, and a marker in its files' metadata.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from qconvert.checkpoint.prepared import DERIVED, FACT, LAYOUT, layout_of, marked
from qconvert.contrib.trtllm_gen.layout import (
    DIALECTS,
    GUIDE,
    DerivedScalars,
    Dialect,
    Form,
    Layer,
    Rows,
    Scales,
    check_sizes,
    dialect_of,
    form_of,
    guide,
    layers_of,
    named,
    tp_sizes,
)
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.family import text_config, without_quantization
from qconvert.core.graph import Output, Source, apply, concat, stack
from qconvert.models.skip_reasons import check_experts
from qconvert.ops.gather import Gather, Order, Scatter
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

_HF_QUANT = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Prepare:
    """Fuse NVFP4 experts as the kernels of TensorRT-LLM take them (experimental).

    Every layer becomes four tensors, each expert one node; per-tensor scales are fused, and the scalars
    derived from them. Raises PlanError if there is no such layer, if an
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


_RULE = "derived: it follows from the scales that stay"


@dataclass(frozen=True, slots=True)
class Unprepare:
    """Undo `prepare` (experimental).

    Its source's tensors come back, byte for byte, and its quantization blocks. Raises PlanError if the
    source is not prepared, or a part of it is missing."""

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


PASSES = (Prepare, Unprepare)
