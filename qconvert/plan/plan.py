"""The plan: the tensors of the output, checked to account for every source byte before any is read."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from qconvert.checkpoint.checkpoint import Checkpoint, quantization_in
from qconvert.checkpoint.gguf.stated import NOTHING, stored_as
from qconvert.checkpoint.mlx_config import MLX
from qconvert.checkpoint.prepared import own_role
from qconvert.checkpoint.quantization_config import grid_fault, stated_block
from qconvert.checkpoint.ranks import parts_in
from qconvert.checkpoint.reading import FACT as READING
from qconvert.checkpoint.reading import read_family
from qconvert.checkpoint.stated_as import FACT as STATED_AS
from qconvert.core.dtypes import FP8_DTYPES
from qconvert.core.errors import PlanError
from qconvert.core.family import Family, RoleIndex, role_index
from qconvert.core.graph import Apply, Output, Several, Source, nodes, ports
from qconvert.core.manifest_keys import LASTING_FACTS, RANK
from qconvert.core.names import (
    apart_experts,
    experts_module,
    in_model_order,
    is_ambiguous,
    is_number,
    is_scale,
    parse,
    scale_candidates,
    scale_end,
    scales_alone,
    weight_candidates,
)
from qconvert.core.profiling import phase
from qconvert.core.roles import Kind
from qconvert.core.shown import one_of, several
from qconvert.layouts.derived.find import family_for

if TYPE_CHECKING:
    from qconvert.samples.request import Calibration


# How rules begin that leave a tensor out because another folder holds it.
ELSEWHERE = "elsewhere:"
# Rules that leave experts out: what one of them has alone, and their rows of what all of them share.
EXPERTS_OUT = "prune: of experts that are left out"
ROWS_OUT = "prune: rows of experts that are left out"
_FLOATS = ("BF16", "F16", "F32", "F64")  # any other dtype is one of codes


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A pass as it ran: its options, how many tensors (or other `what`) it matched, and how many it
    expected from the config (None where the config does not tell). Where the two differ, `missing` and
    `extra` name modules or tensors. `loss`: what each match loses that no node tells."""

    name: str
    options: Mapping[str, Any]  # as JSON
    matched: int
    expected: int | None
    notes: tuple[str, ...] = ()
    what: str = "tensors"
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    loss: str = ""

    def against(self, matched: Collection[str], names: Collection[str]) -> LogEntry:
        """The entry with what differs between the matched names and those that the config counts."""
        if self.matched == self.expected:
            return self
        have, counted_names = dict.fromkeys(matched), dict.fromkeys(names)
        missing = tuple(name for name in counted_names if name not in have)
        return replace(
            self, missing=missing, extra=tuple(n for n in have if n not in counted_names)
        )


@dataclass(frozen=True)
class Calibrating:
    """The calibration that a plan's codes come from: the model it runs, which is the plan before its
    weights were replaced, and what was asked for. Its digest is in every op that depends on it.
    `linears`: linear layers beside the routed experts are solved too."""

    model: Plan
    request: Calibration
    linears: bool = False


@dataclass(frozen=True)
class Plan:
    """Named outputs over a checkpoint's sources.

    `dropped` maps source names to the rule that drops them, `dropped_files` likewise for side
    files. `facts` is what a pass wants recorded in the manifest (layout, method, ...). `aliases` are
    outputs that repeat another's bytes on purpose; `linkable` are source shards that an output
    folder could hold as they are. `needs_class` is a model class that alone takes what a pass made.
    `new_files` are texts a pass writes beside the weights, by name; `metadata` is what it adds to that
    of the safetensors files. `calibration` is how weights with a `Calibrated` node are to be computed.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Output]
    config: Mapping[str, Any]
    side_files: tuple[str, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    dropped_files: Mapping[str, str] = field(default_factory=dict)
    log: tuple[LogEntry, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    aliases: frozenset[str] = frozenset()
    linkable: tuple[int, ...] = ()
    needs_class: str | None = None
    new_files: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibrating | None = None

    @classmethod
    def identity(cls, checkpoint: Checkpoint) -> Plan:
        """Every tensor as it is, in the order a model runs in."""
        names = in_model_order(checkpoint)
        found = map(checkpoint.sources.__getitem__, names)
        manifest = checkpoint.manifest or {}
        facts = {key: manifest[key] for key in LASTING_FACTS if key in manifest}
        if checkpoint.reading is not None:
            facts[READING] = checkpoint.reading.fact
        if checkpoint.stated_as:
            facts[STATED_AS] = checkpoint.stated_as
        return cls(
            checkpoint,
            {name: source.output for name, source in zip(names, found, strict=True)},
            checkpoint.config,
            checkpoint.side_files,
            facts=facts,
        )

    @cached_property
    def family(self) -> Family:
        """The family of what is planned: the source's, unless a pass changed the model's class, or the
        form of experts of a class that names them otherwise as stacks."""
        own = self.checkpoint
        if self.config.get("model_type") != own.config.get("model_type"):
            return family_for(self.config, self.tensors)
        layers = range(own.role_index.dims.num_layers)
        stacks = [
            template.replace("{L}", str(layer))
            for kind, template in own.family.expert_templates.items()
            if kind.stacked
            for layer in layers
        ]
        if any(name in self.tensors for name in stacks) == any(n in own.sources for n in stacks):
            return own.family
        return read_family(own.reading, self.config, self.tensors, made=True)

    @cached_property
    def role_index(self) -> RoleIndex:
        """The planned tensors sorted by role."""
        own = self.checkpoint
        if not self.log and self.config is own.config and self.tensors.keys() == own.sources.keys():
            return own.role_index.ordered(self.tensors)
        return role_index(self.family, self.config, self.tensors)

    def logged(self, entry: LogEntry, **changes: Any) -> Plan:
        """This plan with some fields replaced and a pass added to the log."""
        return replace(self, log=(*self.log, entry), **changes)

    def beside(self, **changes: Any) -> Plan:
        """This plan with other files beside its weights. What is known of its tensors is kept."""
        made = replace(self, **changes)
        for known in ("nodes", "_losses", "role_index", "bytes_out"):
            if known in self.__dict__:
                made.__dict__[known] = self.__dict__[known]
        return made

    def sorted_as(self, other: Plan) -> Plan:
        """This plan, which takes the roles of its tensors from another that has sorted the same names,
        all of them the source's, of a model of the same sizes."""
        known = other.__dict__.get("role_index")
        if (
            known is not None
            and self.family is other.family
            and self.family.dims(self.config) == known.dims
            and list(self.tensors) == list(other.tensors)
            and self.tensors.keys() <= self.checkpoint.sources.keys()
        ):
            self.__dict__["role_index"] = known
        return self

    def check(self) -> Plan:
        """Prove the plan sound; returns it. Raises PlanError naming the first tensor at fault.

        Every source byte reaches an output or a named drop rule, no byte is copied twice, every
        output is filled exactly, no scale or quantized weight stands alone, no matrix has a name that no
        loader reads in place of one that is read, tied embeddings stay alike, and routed experts and MTP
        layers are kept or dropped whole.
        """
        if not self.tensors:
            raise PlanError("nothing is left to write: the passes drop every tensor")
        if self.needs_class is not None and self.config.get("model_type") != self.needs_class:
            raise PlanError(
                f"the projections are in an order only {self.needs_class} takes, and the model_type "
                f"is {self.config.get('model_type')}: it would load without error and generate garbage; "
                f"the recipe lacks `as_class: {{to: {self.needs_class}}}`"
            )
        _check_storable(self)
        _check_filled(self)
        _check_conservation(self)
        _check_scales(self)
        check_names(self)
        _check_ties(self)
        _check_whole_groups(self)
        return self

    @property
    def bytes_in(self) -> int:
        return self.checkpoint.nbytes

    @cached_property
    def bytes_out(self) -> int:
        return sum([output.type.nbytes for output in self.tensors.values()])

    @property
    def bytes_dropped(self) -> int:
        whole = sum(self.checkpoint[name].type.nbytes for name in self.dropped)
        partly = {name for name, rule in self.dropped.items() if rule == ROWS_OUT}
        if not partly:
            return whole
        args = [arg for node in self.nodes for arg in node.args]
        return whole - sum(
            stop - start
            for output in (*self.tensors.values(), *args)
            for source, start, stop in output.sources
            if source.name in partly
        )

    @cached_property
    def nodes(self) -> tuple[Apply, ...]:
        """Every node of the plan, arguments before users."""
        return tuple(nodes(self.tensors.values()))

    def losses(self) -> dict[str, int]:
        """Return what the plan's steps lose, each with the number of nodes that do, or of the matches of
        a pass that leaves out what the model computes with. Of a node whose
        results go to several folders only what becomes of those that this plan wants."""
        return {**{e.loss: e.matched for e in self.log if e.loss}, **self._losses}

    @cached_property
    def _losses(self) -> dict[str, int]:
        order = self.nodes
        # Nodes of one `types` have one op (core/graph.py, Apply).
        ops = {id(node.types): node.op for node in order}
        if not any(getattr(op, "several", False) for op in ops.values()):
            return self._losses_by_kind(order)
        wanted = ports(self.tensors.values(), order)
        known: dict[tuple[int, frozenset[int] | None], str | None] = {}
        found: dict[str, int] = {}
        for node in order:
            key = id(node.types), wanted.get(id(node))
            if key not in known:
                known[key] = _loss(node, key[1])
            loss = known[key]
            if loss is not None:
                found[loss] = found.get(loss, 0) + 1
        return found

    def _losses_by_kind(self, order: Sequence[Apply]) -> dict[str, int]:
        """As `_losses`, where every node's results all go to one folder."""
        counts = Counter([id(node.types) for node in order])
        # Not by their index in a list: each calibrated node is a kind of its own, 18,432 in Qwen3-30B.
        one = {id(node.types): node for node in order}
        found: dict[str, int] = {}
        for kind, count in counts.items():
            loss = _loss(one[kind], None)
            if loss is not None:
                found[loss] = found.get(loss, 0) + count
        return found

    def fingerprint(self) -> str:
        """A hash of the sources' headers, every op with its arguments, config and side files.

        Paths and times do not enter it: the same plan on another machine has the same one.
        """
        digest = sha256(self.checkpoint.header_digest.encode())
        numbers: dict[int, int] = {}
        # By identity: what is spelled lives as long as the plan.
        spelled_types: dict[int, str] = {}
        spelled_ops: dict[int, str] = {}
        lines: list[str] = []

        def spell(output: Output) -> str:
            spelled = spelled_types.get(id(output.type))
            if spelled is None:
                spelled = spelled_types[id(output.type)] = str(output.type)
            if (only := output.source) is not None:
                return f"{spelled};{only[0].name}[{only[1]}:{only[2]}]"
            if (result := output.result) is not None:
                number = numbers.get(id(result[0]))
                if number is None:
                    number = visit(result[0])
                return f"{spelled};%{number}.{result[1]}[0:{output.type.nbytes}]"
            for origin, start, stop in output.pieces:
                if isinstance(origin, Source):
                    spelled += f";{origin.name}[{start}:{stop}]"
                else:
                    number = numbers.get(id(origin.node))
                    if number is None:
                        number = visit(origin.node)
                    spelled += f";%{number}.{origin.port}[{start}:{stop}]"
            return spelled

        def visit(node: Apply) -> int:
            args = ",".join([spell(arg) for arg in node.args])
            number = numbers[id(node)] = len(numbers)
            op = spelled_ops.get(id(node.op))
            if op is None:
                op = spelled_ops[id(node.op)] = repr(node.op)
            lines.append(f"%{number}={op}({args})\n")
            return number

        # Of a whole result, as most outputs are, what stands before and behind its node's number.
        around: dict[tuple[int, int], tuple[str, str]] = {}
        for name in sorted(self.tensors):
            output = self.tensors[name]
            if (result := output.result) is None:
                lines.append(f"{name}={spell(output)}\n")
            else:
                node, port = result
                if (number := numbers.get(id(node))) is None:
                    number = visit(node)
                kind = output.type
                known = around.get((id(kind), port))
                if known is None:
                    known = f"={kind};%", f".{port}[0:{kind.nbytes}]\n"
                    around[id(kind), port] = known
                lines.append(f"{name}{known[0]}{number}{known[1]}")
            if len(lines) > 1000:
                digest.update("".join(lines).encode())
                lines.clear()
        digest.update("".join(lines).encode())
        rest = [self.config, self.side_files, dict(self.dropped), dict(self.facts)]
        if self.new_files:
            rest.append(dict(self.new_files))
        if self.metadata:
            rest.append({"metadata": dict(self.metadata)})
        digest.update(json.dumps(rest, sort_keys=True).encode())
        numbers.clear()  # the functions hold each other, and this, until a collection: 17 MB of Kimi-K2
        return digest.hexdigest()


def _loss(node: Apply, ports: frozenset[int] | None) -> str | None:
    """Return what a node loses; of one whose results go to several folders, with those of these
    `ports`."""
    types = [arg.type for arg in node.args]
    if ports is not None and isinstance(node.op, Several):
        return node.op.loss_of(ports, *types)
    return node.op.loss(*types)


class Pass(Protocol):
    """A pure function from plan to plan. Its fields are its options in recipes and manifests; it
    logs how many tensors it matched, and matching nothing is an error."""

    name: ClassVar[str]

    def __call__(self, plan: Plan) -> Plan: ...


def run_passes(plan: Plan, passes: Iterable[Pass]) -> Plan:
    """Apply passes in order, hold each to the count it logged, and check the end result.

    Raises PlanError, prefixed with the name of the pass it came from.
    """
    for step in passes:
        try:
            with phase(f"pass {step.name}"):
                plan = counted(step(plan))
        except PlanError as error:
            raise PlanError(f"{step.name}: {error}") from error
    with phase("check"):
        return plan.check()


def counted(plan: Plan) -> Plan:
    """The plan, if its last pass matched as many as expected: one that matches 35 of 36 layers has
    failed. Raises PlanError."""
    entry = plan.log[-1]
    if entry.expected is not None and entry.matched != entry.expected:
        sides = (("missing", entry.missing), ("not counted by the config", entry.extra))
        named = [f"; {what}: {several(names)}" for what, names in sides if names]
        raise PlanError(
            f"matched {entry.matched} of {entry.expected} {one_of(entry.expected, entry.what)} expected "
            "from the config" + "".join(named)
        )
    return plan


def _check_filled(plan: Plan) -> None:
    for name, output in plan.tensors.items():
        if output.filled != output.type.nbytes:
            raise PlanError(
                f"tensor {name!r}: expected {output.type.nbytes} bytes for {output.type}, found pieces "
                f"of {output.filled} bytes"
            )


Intervals = dict[str, list[tuple[int, int]]]


def _check_conservation(plan: Plan) -> None:
    copied: Intervals = {}
    # Most sources are used from their first byte on: up to where, and what is used behind a hole.
    reached: dict[str, int] = {}
    behind: Intervals = {}
    writer: dict[tuple[str, int], str] = {}
    for name, output in plan.tensors.items():
        if name in plan.aliases:
            continue
        for source, start, stop in output.sources:
            copied.setdefault(source.name, []).append((start, stop))
            writer[source.name, start] = name
    for node in plan.nodes:
        for arg in node.args:
            for source, start, stop in arg.sources:
                name = source.name
                at = reached.get(name, 0)
                if start > at:
                    behind.setdefault(name, []).append((start, stop))
                elif stop > at or not at:
                    reached[name] = stop
    for source_name, spans in copied.items():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start < end:
                raise PlanError(
                    f"bytes of tensor {source_name!r} would be written twice, once into "
                    f"{writer[source_name, start]!r}"
                )
    for source_name, source in plan.checkpoint.items():
        rule = plan.dropped.get(source_name)
        size = source.type.nbytes
        if rule is None and reached.get(source_name) == size:
            continue
        spans = copied.get(source_name, []) + behind.get(source_name, [])
        if source_name in reached:
            spans.append((0, reached[source_name]))
        if rule is not None and rule != ROWS_OUT:
            if spans:
                raise PlanError(f"tensor {source_name!r} is dropped by {rule!r} and used as well")
            continue
        if rule is not None:
            if not spans or _first_hole(sorted(spans), size) is None:
                how = "as a whole" if spans else "nowhere"
                raise PlanError(f"{rule!r} drops a part of {source_name!r}, which is used {how}")
            continue
        hole = _first_hole(sorted(spans), size)
        if hole is not None and not (spans and RANK in plan.facts):  # other ranks hold the rest
            part = "" if not spans else f", bytes from {hole} on,"
            raise PlanError(
                f"tensor {source_name!r}{part} reaches no output and no rule drops it; "
                "keep it, or name a drop rule in the recipe"
            )
    for source_name in plan.dropped:
        if source_name not in plan.checkpoint:
            raise PlanError(f"the rule {plan.dropped[source_name]!r} drops unknown {source_name!r}")


def _first_hole(spans: list[tuple[int, int]], size: int) -> int | None:
    at = 0
    for start, stop in spans:
        if start > at:
            return at
        at = max(at, stop)
    return at if at < size else None


def _check_scales(plan: Plan) -> None:
    own = plan.checkpoint.quantization_configs
    if plan.config != plan.checkpoint.config:
        own = quantization_in(plan.config, None, plan.checkpoint.root)
    block = stated_block(own)
    alone = _scales_lost(plan, quantized=bool(own))
    for name, output in plan.tensors.items():
        if name in alone:
            weights = " or ".join(weight_candidates(name))
            raise PlanError(f"scale {name!r} has no weight (expected {weights})")
        if output.type.dtype in FP8_DTYPES and not is_scale(name):
            scales = [scale for scale in scale_candidates(name) if scale in plan.tensors]
            if not scales:
                tried = " or ".join(scale_candidates(name))
                raise PlanError(f"FP8 weight {name!r} has no scale (expected {tried})")
            if block is not None and len(output.type.shape) >= 2:
                fault = grid_fault(output.type, plan.tensors[scales[0]].type, block)
                if fault is not None:
                    raise PlanError(f"scale {scales[0]!r}: {fault}")


def _scales_lost(plan: Plan, *, quantized: bool) -> frozenset[str]:
    """Scales whose weight is not there. Models have parameters of such names too (Gemma 4's
    `router.scale`), so that a name alone makes none: it is a scale where modules alike (of other layers
    or experts) have it beside codes; or where the family has a linear in a folder that is `quantized` or
    holds codes with scales; there, too, under a name that no model uses and those scales have, unless
    the family says that nothing is quantized in its place."""
    alone = scales_alone(plan.tensors)
    if not alone:
        return frozenset()
    beside: set[str] = set()
    held: tuple[Mapping[str, Source | Output], ...] = plan.checkpoint.sources, plan.tensors
    for tensors in held:
        for name in tensors:
            weights = (tensors.get(weight) for weight in weight_candidates(name))
            if any(one is not None and one.type.dtype not in _FLOATS for one in weights):
                beside.add(parse(name).template)
    ends = {scale_end(template) for template in beside}
    found = set()
    for name in alone:
        kind, end = plan.role_index.kind(name), scale_end(name)
        likely = kind.linear or not (
            is_ambiguous(name) or kind.never_quantized or (ends and end not in ends)
        )
        if parse(name).template in beside or ((quantized or beside) and likely):
            found.add(name)
    return frozenset(found)


def _check_storable(plan: Plan) -> None:
    """No folder holds tensors as a GGUF file does, nor parts of several ranks; mlx-lm's stacks of
    experts were taken apart, which not all of its classes read."""
    if parts := parts_in(plan.tensors):
        name, of_ranks = next(iter(parts.items()))
        raise PlanError(
            f"{plan.checkpoint.name}: {name!r} is in {len(of_ranks)} parts of tensor-parallel ranks; "
            "run `qconvert join` on it, and this on the result"
        )
    stated = quantization_in(plan.config, None, plan.checkpoint.root)
    if stored_as(stated) is not NOTHING:
        raise PlanError(
            f"{plan.checkpoint.name}: tensors of a GGUF file are read in no folder as they are; run "
            "`qconvert dequant` on it, or a command that quantizes, and this on the result"
        )
    if plan.checkpoint.apart and any(config.method == MLX for config in stated):
        raise PlanError(
            "experts of MLX's checkpoints are read one by one, and mlx-lm reads their codes in stacks "
            "(`switch_mlp`): dequantize or quantize the model instead"
        )


def check_names(plan: Plan) -> None:
    """Matrices that the family knows under other names: its loaders would skip them, most without an
    error. Some exporters count experts behind the projection (`experts.gate_proj.0.weight`)."""
    found, family = plan.role_index, plan.family
    unknown = [
        name for name in found.unknown
        if len(plan.tensors[name].type.shape) > 1 and _block(name) and own_role(name) is None
    ]  # fmt: skip
    if not unknown or family.name == "generic":
        return
    # A pass that takes experts apart writes names that runtimes read and a class may not save.
    strange = set(plan.checkpoint.role_index.unknown)
    unknown = [name for name in unknown if not strange.isdisjoint(_read_by(plan.tensors[name]))]
    absent: dict[str, list[str]] = {}
    for name in found.absent():
        absent.setdefault(_block(name), []).append(name)
    with_experts = {_block(name) for name, place in found.places.items() if place.role.kind.routed}
    wrong: dict[str, str] = {}
    for name in unknown:
        block, parts = _block(name), sorted(name.split("."))
        read = absent.get(block, [])
        if not read and block not in with_experts and experts_module(name) is not None:
            read = _expert_names(plan, name)
        if read and name not in read:  # stacks as transformers names them are in no role
            wrong[name] = next((one for one in read if sorted(one.split(".")) == parts), read[0])
    if wrong:
        name, wanted = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise PlanError(
            f"{name!r}{more}: {family.name} has no tensor of this name, so loaders skip it, and lacks "
            f"{wanted!r}, which they read; rename the tensors of the source (headers and index) to the "
            "names that the model was published with, and convert that"
        )


def _read_by(output: Output) -> Iterator[str]:
    """The stored tensors that an output is made of."""
    for one in (output, *(arg for node in nodes([output]) for arg in node.args)):
        yield from (piece.origin.name for piece in one.pieces if isinstance(piece.origin, Source))


def _expert_names(plan: Plan, name: str) -> list[str]:
    """The weights that the family has in place of one of an expert, in the layer and of the expert that
    its last two numbers say; those of the same projection first."""
    found, parts = plan.role_index, name.split(".")
    roles = {
        r.kind: r for r in plan.family.roles if r.kind.routed and not r.name.startswith("mtp.")
    }
    modules = dict(plan.family.expert_templates) or {
        kind: found.module_of(role) for kind, role in roles.items()
    }
    modules.pop(Kind.EXPERT_UNKNOWN, None)
    layer, expert, *_ = [*(part for part in parts if is_number(part)), "0", "0"]
    written = [
        module.replace("{L}", layer).replace("{E}", expert) + (".weight" if "{E}" in module else "")
        for module in modules.values()
    ]
    return sorted(
        written, key=lambda one: one.removesuffix(".weight").rpartition(".")[2] not in parts
    )


def _block(name: str) -> str:
    """The part of a layer that a tensor is in, `model.layers.3.mlp`; "" for one in no layer."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if is_number(part)), 0)
    return ".".join(parts[: at + 2]) if 0 < at < len(parts) - 2 else ""


def _check_ties(plan: Plan) -> None:
    tied = plan.family.tied
    found = plan.role_index
    if not found.dims.tied or tied is None:
        return
    names = [name for role in tied if (name := found.named(role)) is not None]
    types = {plan.tensors[name].type for name in names}
    if len(types) > 1:
        first, second = names
        raise PlanError(
            f"config ties {first!r} and {second!r}, but they would become "
            f"{plan.tensors[first].type} and {plan.tensors[second].type}"
        )


def _check_whole_groups(plan: Plan) -> None:
    """Routed experts of a layer, and MTP layers, are dropped as a whole or not at all: half of either
    would load without error and generate garbage. A rule about single experts takes all that an expert
    has, and as many in each layer."""
    if all(map(_is_stale, set(plan.dropped.values()))):
        return
    role_index = plan.checkpoint.role_index
    dims, family = role_index.dims, plan.checkpoint.family
    kept: dict[str, str] = {}
    gone: dict[str, str] = {}
    some = EXPERTS_OUT in plan.dropped.values()
    left_out: dict[str, set[int]] = {}
    for name in plan.checkpoint:
        rule = plan.dropped.get(name)
        if rule is not None and _is_stale(rule):
            continue
        if rule == ROWS_OUT:
            rule = None
        groups = []
        if some and (expert := parse(name).expert) is not None and role_index.kind(name).routed:
            base = apart_experts(name)
            group = f"the parts of expert {expert} of {base.rpartition('.')[0]}"
            (gone if rule is not None else kept).setdefault(group, name)
            if rule is None:
                left_out.setdefault(base, set())
            elif rule == EXPERTS_OUT:
                left_out.setdefault(base, set()).add(expert)
                continue
        if role_index.kind(name).routed:
            groups.append(f"the experts of {apart_experts(name).rpartition('.')[0]}")
        if family.is_mtp(name, dims):
            groups.append("the MTP layers")
        for group in groups:
            (gone if rule is not None else kept).setdefault(group, name)
    if len({len(experts) for experts in left_out.values()}) > 1:
        raise PlanError(f"the rule {EXPERTS_OUT!r} drops another number of experts in some layers")
    for group, name in gone.items():
        if group in kept:
            raise PlanError(
                f"the rule {plan.dropped[name]!r} drops {name!r} but keeps {kept[group]!r}: "
                f"{group} are kept or dropped whole; drop or keep all of them"
            )


def _is_stale(rule: str) -> bool:
    """Return whether a rule drops what a conversion makes stale (activation scales of weights that are
    no longer quantized), what is derived from other parameters, or what another folder holds: the module
    stays whole."""
    return rule.startswith(("dequant:", "derived:", ELSEWHERE))


def described(plan: Plan) -> dict[str, Any]:
    """Return what is made, by which passes, what is lost and left out. It holds no time and no path, so
    the same plan is described by the same bytes anywhere."""
    dims = plan.checkpoint.role_index.dims
    rules: dict[str, list[str]] = {}
    for name, rule in sorted(plan.dropped.items()):
        rules.setdefault(rule, []).append(name)
    return {
        "family": plan.family.name,
        "layers": dims.num_layers,
        "experts": dims.num_experts,
        "passes": [
            {"name": e.name, "options": e.options, "matched": e.matched, "expected": e.expected}
            for e in plan.log
        ],
        "lossy_steps": plan.losses(),
        "dropped": rules,
        "dropped_files": dict(sorted(plan.dropped_files.items())),
        "bytes": {"in": plan.bytes_in, "out": plan.bytes_out, "dropped": plan.bytes_dropped},
        **plan.facts,
    }
