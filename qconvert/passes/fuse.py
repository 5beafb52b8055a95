"""fuse and unfuse: the linear-attention projections in the order a consumer takes.

Qwen3.5 stores in_proj_qkv, in_proj_z, in_proj_b and in_proj_a; Qwen3-Next in_proj_qkvz and
in_proj_ba, interleaved by key head. Why fuse: sglang and vLLM fuse split projections at load
themselves; a fused repo saves that work at load, has one file range per projection, and is the
only form the Qwen3-Next class and per-rank exports take. It makes no model faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from qconvert.checkpoint.quantization_config import (
    complete_ignore_lists,
    fp8_scheme,
    renamed_modules,
)
from qconvert.core.dtypes import FP8_DTYPES
from qconvert.core.errors import PlanError
from qconvert.core.family import Dims
from qconvert.core.graph import Output, Source, Value, apply
from qconvert.core.names import parameters
from qconvert.core.row_order import RowOrder
from qconvert.formats.registry import read_matrix
from qconvert.models.skip_reasons import check_linear_attention
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.ops.constant import Constant, constant_i64
from qconvert.passes.fused_rows import (
    SHAPE,
    Block,
    fuse_module,
    is_per_tensor,
    params_of,
    split_module,
)
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan
from qconvert.runtimes.consumers import CLASSES, parse_consumer

_MODELOPT_FILE = "hf_quant_config.json"
_TEXT_ONLY = ("qwen3_5_text", "qwen3_5_moe_text")
_QKVZ, _BA = "in_proj_qkvz", "in_proj_ba"
_QKV, _Z, _B, _A = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
# Ends of names that only quantized weights have beside or in place of `weight`.
_CODED = (".weight_packed", ".weight_scale_2", ".weight_scale")
EQUAL_RULE = "fuse: equal to the per-tensor scale kept for all parts"
SHAPE_RULE = "fuse: the size of packed rows, which is another now"
_FUSED, _SPLIT = (_QKVZ, _BA), (_QKV, _Z, _B, _A)
FACT = "gdn_groups"  # 0 split, 1 contiguous, as many as key heads: interleaved


@dataclass(frozen=True, slots=True)
class Fuse:
    """Bring the linear-attention projections into the order `consumer` takes, or into `groups`.

    `what` may also name `gate_up` or `qkv`: no loader in the table takes those fused from a
    checkpoint, so they are refused by name. A fused source is split and
    fused again; its own order comes from its manifest, its family, or `source_groups`.
    """

    name: ClassVar[str] = "fuse"

    consumer: str | None = None
    groups: int | None = None
    source_groups: int | None = None
    what: Literal["gdn", "gate_up", "qkv"] = "gdn"

    def __post_init__(self) -> None:
        """Raises PlanError for an invalid consumer or version."""
        if self.consumer is not None:
            parse_consumer(self.consumer)

    def __call__(self, plan: Plan) -> Plan:
        family = plan.family.name
        dims = plan.role_index.dims
        if self.what != "gdn":
            who = parse_consumer(self.consumer).name if self.consumer else "any known loader"
            projection = {"gate_up": "gate_up_proj", "qkv": "qkv_proj"}[self.what]
            raise PlanError(
                f"{projection}: {who} is not known to take it fused from a {family} checkpoint "
                "(sglang's Qwen3.5 drops it with only a warning); leave it split, loaders fuse it "
                "themselves"
            )
        if self.consumer is None and self.groups is None:
            raise PlanError("no order is stated; give `consumer` or `groups`")
        check_linear_attention(plan, self.name)
        target = self.groups
        if self.consumer is not None:
            wanted = parse_consumer(self.consumer).gdn_groups(family, dims)
            if target is not None and target != wanted:
                raise PlanError(
                    f"{self.consumer} takes {_order(wanted, dims)} projections of {family}, not "
                    f"{target} groups: in that order it would load without error and generate garbage; "
                    "leave `groups` out"
                )
            target = wanted
        assert target is not None
        done = _reorder(plan, self, target, self.source_groups, _new_class(self.consumer, family))
        named = self.consumer is not None and parse_consumer(self.consumer).name == "sglang"
        return _plain_names(done) if named else done


@dataclass(frozen=True, slots=True)
class Unfuse:
    """Split fused linear-attention projections.

    They become in_proj_qkv, _z, _b, _a. The order of the rows
    comes from the manifest, the family, or `source_groups`. A `consumer` that takes only fused ones
    is refused; `qwen3.5`, the model class, needs `as_class` after it if the source is Qwen3-Next."""

    name: ClassVar[str] = "unfuse"

    source_groups: int | None = None
    consumer: str | None = None

    def __post_init__(self) -> None:
        """Raises PlanError for an invalid consumer or version."""
        if self.consumer is not None:
            parse_consumer(self.consumer)

    def __call__(self, plan: Plan) -> Plan:
        family, dims = plan.family.name, plan.role_index.dims
        if self.consumer is not None and dims.gdn is not None:
            consumer = parse_consumer(self.consumer)
            if not consumer.takes_gdn(0, family, dims):
                wanted = _order(consumer.gdn_groups(family, dims), dims)
                as_class = (
                    "; split ones are of the class Qwen3.5: give --for qwen3.5 (`consumer: qwen3.5` and "
                    "`as_class: {to: qwen3_5_text}` in a recipe)"
                )
                raise PlanError(
                    f"{consumer.name} takes {wanted} projections of {family}, not split ones"
                    f"{as_class if family == 'qwen3_next' else ''}"
                )
        return _reorder(plan, self, 0, self.source_groups, _new_class(self.consumer, family))


def _new_class(consumer: str | None, family: str) -> str | None:
    """The model class that a consumer stands for, if the plan is of another."""
    name = None if consumer is None else parse_consumer(consumer).name
    to = None if name is None else CLASSES.get(name)
    return None if to is None or to.startswith(family) else to


def _order(groups: int, dims: Dims) -> str:
    if groups == 0:
        return "split"
    nk = dims.gdn[0] if dims.gdn else 0
    return {1: "contiguous (1 group)", nk: f"interleaved ({nk} groups)"}.get(
        groups, f"{groups}-group"
    )


def _reorder(
    plan: Plan,
    step: Fuse | Unfuse,
    target: int,
    source_groups: int | None,
    needs_class: str | None = None,
) -> Plan:
    """From the plan's current order to `target` groups (0: split). `needs_class` names the model
    class that alone takes that order: the plan is not valid until `as_class` has run."""
    name = step.name
    dims = plan.role_index.dims
    check_linear_attention(plan, name)
    assert dims.gdn is not None
    modules = _modules(plan)
    fused = _is_fused(plan, modules)
    source = _source_groups(plan, dims, source_groups) if fused else 0
    if source == target and needs_class is None:
        raise PlanError(f"the projections are {_order(target, dims)} already; nothing to {name}")
    block = _block(plan, modules)
    moved: dict[str, dict[str, Output]] = {}
    for at in modules:
        moved.update(_moved(plan, at, dims, source, target, block))
    gone = {f"{at}.{part}" for at in modules for part in (_FUSED if source else _SPLIT)}
    tensors: dict[str, Output] = {}
    for tensor, output in plan.tensors.items():
        if tensor.rpartition(".")[0] not in gone:
            tensors[tensor] = output
    for module, params in moved.items():
        tensors.update({f"{module}.{parameter}": output for parameter, output in params.items()})
    layers = dims.groups.get("linear_attention", ())
    counted = [f"{modules[0].partition('.layers.')[0]}.layers.{n}.linear_attn" for n in layers]
    unchecked = None if step.consumer is None else parse_consumer(step.consumer).unchecked
    notes = (f"now {_order(target, dims)}", *([] if unchecked is None else [unchecked]))
    dropped, aliases = _scalars(plan, gone, moved, block)
    for module in gone:
        if (shape := plan.tensors.get(f"{module}.{SHAPE}")) is not None:
            dropped |= dict.fromkeys(_sources_of(shape), SHAPE_RULE)
    return plan.logged(
        LogEntry(name, options_of(step), len(modules), len(layers), notes, "layers").against(
            modules, counted
        ),
        tensors=tensors,
        config=complete_ignore_lists(plan.config, _unquantized(tensors, moved)),
        facts={**plan.facts, FACT: target},
        dropped={**plan.dropped, **dropped},
        aliases=plan.aliases | aliases,
        needs_class=needs_class,
        **_without_modelopt_file(plan),
    )


def _unquantized(
    tensors: Mapping[str, Output], moved: Mapping[str, Mapping[str, Output]]
) -> list[str]:
    """Of the modules just made, those left in bf16 in a checkpoint that has quantized ones."""
    if not any(
        name.endswith(_CODED) or output.type.dtype in FP8_DTYPES for name, output in tensors.items()
    ):
        return []
    return [
        module
        for module, params in moved.items()
        if "weight" in params and params["weight"].type.dtype in FLOAT_DTYPES
    ]


def _without_modelopt_file(plan: Plan) -> dict[str, Any]:
    """hf_quant_config.json names modules by their old names. Runtimes read it only if config.json
    has no quantization block: if it has one the file is dropped, otherwise the source is refused."""
    if _MODELOPT_FILE in plan.new_files:  # made by an earlier pass, beside config.json's block
        kept = {name: text for name, text in plan.new_files.items() if name != _MODELOPT_FILE}
        return {"new_files": kept}
    if _MODELOPT_FILE not in plan.side_files:
        return {}
    if "quantization_config" not in plan.config:
        raise PlanError(
            f"only {_MODELOPT_FILE} says how the source is quantized, by names that would become "
            "wrong; copy its block into config.json as quantization_config first"
        )
    rule = "fuse: config.json's quantization_config stands for it"
    return {
        "side_files": tuple(name for name in plan.side_files if name != _MODELOPT_FILE),
        "dropped_files": {**plan.dropped_files, _MODELOPT_FILE: rule},
    }


def _plain_names(plan: Plan) -> Plan:
    """sglang's text-only Qwen3.5 drops `model.language_model.*` with only a warning: its names are
    `model.*`. Multi-modal configs keep theirs."""
    if plan.config.get("model_type") not in _TEXT_ONLY:
        return plan
    old, new = "model.language_model.", "model."
    renamed = {
        new + name.removeprefix(old) if name.startswith(old) else name: output
        for name, output in plan.tensors.items()
    }
    if len(renamed) != len(plan.tensors):
        raise PlanError(f"found tensors under both {old} and {new}; sglang takes only one of them")
    aliases = frozenset(
        new + name.removeprefix(old) if name.startswith(old) else name for name in plan.aliases
    )
    config = renamed_modules(plan.config, old, new)
    return replace(plan, tensors=renamed, aliases=aliases, config=config)


def _scalars(
    plan: Plan, gone: set[str], moved: Mapping[str, Mapping[str, Output]], block: Block
) -> tuple[dict[str, str], set[str]]:
    """Per-tensor scales: sources that are dropped because an equal one stands for all parts, and
    outputs that repeat one because the parts share it."""
    kept: set[str] = set()
    aliases: set[str] = set()
    for module, params in moved.items():
        for parameter, output in params.items():
            if is_per_tensor(parameter, output, block):
                for source in _sources_of(output):
                    if source in kept:
                        aliases.add(f"{module}.{parameter}")
                    kept.add(source)
    dropped: dict[str, str] = {}
    for tensor, output in plan.tensors.items():
        module, _, parameter = tensor.rpartition(".")
        if module in gone and is_per_tensor(parameter, output, block):
            for source in _sources_of(output):
                if source not in kept:
                    dropped[source] = EQUAL_RULE
    return dropped, aliases


def _sources_of(output: Output) -> list[str]:
    """The source tensors whose bytes an output repeats; none for a computed one."""
    return [piece.origin.name for piece in output.pieces if isinstance(piece.origin, Source)]


def _modules(plan: Plan) -> list[str]:
    """The linear-attention module of every layer that has projections, in layer order."""
    found: dict[str, None] = {}
    for name in plan.tensors:
        at, _, rest = name.partition(".linear_attn.")
        if rest.partition(".")[0] in (*_FUSED, *_SPLIT):
            found[f"{at}.linear_attn"] = None
    if not found:
        raise PlanError("no linear-attention projection found")
    return list(found)


def _is_fused(plan: Plan, modules: list[str]) -> bool:
    """Return whether all layers are fused (or all split). A layer with half a set, or both, is
    refused."""
    states: dict[bool, str] = {}
    for at in modules:
        have = {
            part
            for part in (*_FUSED, *_SPLIT)
            if any(f"{at}.{part}.{parameter}" in plan.tensors for parameter in parameters())
        }
        if have == set(_FUSED):
            states[True] = at
        elif have == set(_SPLIT):
            states[False] = at
        else:
            raise PlanError(
                f"{at} has {', '.join(sorted(have))}: expected either {' and '.join(_FUSED)} or "
                f"{', '.join(_SPLIT)}, whole and alone"
            )
    if len(states) == 2:
        raise PlanError(
            f"{states[True]} is fused and {states[False]} is split: the layers disagree"
        )
    return True in states


def _source_groups(plan: Plan, dims: Dims, stated: int | None) -> int:
    """The order of a fused source; it cannot be told from shapes, which are all equal."""
    assert dims.gdn is not None
    known = plan.facts.get(FACT)
    if known is None and plan.family.name == "qwen3_next":
        known = dims.gdn[0]
    if known is not None and stated is not None and known != stated:
        raise PlanError(f"source_groups is {stated}, but the source is known to have {known}")
    groups = stated if known is None else known
    if groups is None:
        raise PlanError(
            "the source's projections are fused, and its order is unknown (no qconvert.json "
            "with it); state source_groups (1: contiguous, number of key heads: interleaved)"
        )
    return int(groups)


def _block(plan: Plan, modules: Iterable[str]) -> Block:
    """The block of FP8 projections; None where they are in another form, or under scales of rows."""
    if not plan.checkpoint.quantization_configs:
        return None
    for at in modules:
        for part in (*_FUSED, *_SPLIT):
            weight = plan.tensors.get(f"{at}.{part}.weight")
            if weight is not None and weight.type.dtype in FP8_DTYPES:
                return fp8_scheme(plan.checkpoint, f"{at}.{part}").block
    return None


def _moved(
    plan: Plan, at: str, dims: Dims, source: int, target: int, block: Block
) -> Iterator[tuple[str, dict[str, Output]]]:
    """The projections of one layer in the new order, module by module."""
    assert dims.gdn is not None
    nk, nv, dk, dv = dims.gdn
    keys, values = nk * dk, nv * dv
    qkvz, ba = (keys, keys, values, values), (nv, nv)
    if source:
        sets = [
            *_split(plan, f"{at}.{_QKVZ}", RowOrder(qkvz, source), block),
            *_split(plan, f"{at}.{_BA}", RowOrder(ba, source), block),
        ]
        origin = [f"{at}.{_QKVZ}"] * 4 + [f"{at}.{_BA}"] * 2
    else:
        sets = [
            *_split(plan, f"{at}.{_QKV}", RowOrder((keys, keys, values), 1), block),
            *(params_of(plan.tensors, f"{at}.{part}") for part in (_Z, _B, _A)),
        ]
        origin = [f"{at}.{part}" for part in (_QKV, _QKV, _QKV, _Z, _B, _A)]

    def read(scale: Output) -> bytes:
        (piece,) = scale.pieces
        assert isinstance(piece.origin, Source)
        return plan.checkpoint.read_scalar(piece.origin)

    def sized(origin: str, params: dict[str, Output]) -> dict[str, Output]:
        """With the size of packed rows, where the module that they come from states it."""
        stated = plan.tensors.get(f"{origin}.{SHAPE}")
        if stated is None:
            return params
        made = stated.pieces[0].origin
        if isinstance(made, Value) and isinstance(made.node.op, Constant):
            columns = made.node.op.numbers()[1]  # by an earlier pass
        else:
            columns = read_matrix(plan, origin)[0].columns
        rows = params["weight_packed"].type.shape[0]
        return {**params, SHAPE: apply(constant_i64((rows, columns)))[0]}

    if target:
        parts = [
            (_QKVZ, RowOrder(qkvz, target), range(4)),
            (_BA, RowOrder(ba, target), range(4, 6)),
        ]
        for part, layout, members in parts:
            module = f"{at}.{part}"
            names = [origin[i] for i in members]
            chosen = [sets[i] for i in members]
            fused = fuse_module(module, names, chosen, layout, block, read)
            yield module, sized(names[0], fused)
    else:
        module = f"{at}.{_QKV}"
        layout = RowOrder((keys, keys, values), 1)
        yield (
            module,
            sized(origin[0], fuse_module(module, origin[:3], sets[:3], layout, block, read)),
        )
        for part, name, params in zip((_Z, _B, _A), origin[3:], sets[3:], strict=True):
            yield f"{at}.{part}", sized(name, dict(params))


def _split(plan: Plan, module: str, layout: RowOrder, block: Block) -> list[dict[str, Output]]:
    try:
        return split_module(module, params_of(plan.tensors, module), layout, block)
    except PlanError as error:
        if module in str(error):
            raise
        raise PlanError(f"{module}: {error}") from error


PASSES = (Fuse, Unfuse)
