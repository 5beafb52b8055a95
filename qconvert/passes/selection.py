"""The matrices that a pass quantizes: the routed experts, other linear layers that targets name, and
shared experts for the routed ones' sake; what the plan says of those."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import split_parameter
from qconvert.core.roles import SHARED, Kind
from qconvert.core.shown import count, format_size
from qconvert.core.versions import VLLM
from qconvert.formats.base import Stored
from qconvert.formats.registry import code_parameters, decoded_beside, read_matrix
from qconvert.models.experts import (
    KINDS,
    STALE,
    STALE_RULE,
    Experts,
    Projection,
    check_described,
    routed_experts,
)
from qconvert.models.linears import check_sets, matches, quantizable, skip_reason, unquantizable
from qconvert.models.skip_reasons import check_experts
from qconvert.passes.mixture import METHOD, Staying, quantized_before
from qconvert.passes.replace_weights import sources_of
from qconvert.plan.pass_options import EXPERTS, LINEAR
from qconvert.plan.plan import LogEntry, Plan
from qconvert.runtimes.classes.modules import NOT_KNOWN, taken_quantized
from qconvert.runtimes.classes.record import architecture_of
from qconvert.runtimes.shared_experts import (
    NO_FUSION,
    loses_shared,
    needs_plain_linears,
    would_fuse,
)

SharedExperts = Literal["quantize", "keep", "named"]
# Families whose draft classes in vLLM fuse projections without a packed_modules_mapping
# (`models/deepseek_mtp.py`, `models/glm4_moe_mtp.py`).
DRAFTS_WITHOUT_MAPPING = ("deepseek_v3", "glm4_moe", "kimi_k2")


class Sized(NamedTuple):
    """A matrix by its module, its kind, rows and columns."""

    module: str
    kind: Kind
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer that is no routed expert: its kind, how it is read, and the tensors that leave
    with its old weight."""

    kind: Kind
    stored: Stored
    names: tuple[str, ...]


@dataclass(frozen=True)
class Selection:
    """The matrices that a pass quantizes: the routed experts (None: they stay), and other linears by
    module. `left` are linears that a target names and that stay, since their columns do not fit;
    `shared` are those of shared experts that no target names, quantized with the routed ones; `unloaded`
    are notes on linears that LINEAR names, and that no runtime loads quantized; `before` is what is
    quantized already."""

    experts: Experts | None
    linears: Mapping[str, Linear]
    left: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()
    unloaded: tuple[str, ...] = ()
    before: Staying = field(default_factory=Staying)

    @property
    def staying(self) -> Staying:
        """Modules that stay quantized as they are."""
        return self.before.without({module for module, _, _ in self})

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.experts.projections if self.experts is not None else ()

    @property
    def plain(self) -> list[str]:
        """The linears that are not quantized for the routed experts' sake."""
        return [module for module in self.linears if module not in self.shared]

    @property
    def names_shared(self) -> bool:
        """Return whether targets name shared experts."""
        return any(one.kind in SHARED and m not in self.shared for m, one in self.linears.items())

    def takes_part(self, plan: Plan) -> bool:
        """Return whether routed experts of some of the model's own layers are chosen, and those of
        others are not."""
        if self.experts is None:
            return False
        dims, family, taken = plan.role_index.dims, plan.family, self.experts.taken
        return any(
            plan.role_index.kind(name).routed
            and name not in taken
            and not family.is_mtp(name, dims)
            for name in plan.tensors
        )

    def __iter__(self) -> Iterator[tuple[str, Kind, Stored]]:
        """Every matrix: its module, its kind, and how it is read."""
        for projection in self.projections:
            yield projection.module, KINDS[projection.kind], projection.weight
        for module, linear in self.linears.items():
            yield module, linear.kind, linear.stored

    @property
    def sizes(self) -> list[Sized]:
        """One matrix of each kind and size."""
        found: dict[tuple[Kind, int, int], Sized] = {}
        for module, kind, stored in self:
            size = kind, stored.rows, stored.columns
            found.setdefault(size, Sized(module, *size))
        return list(found.values())

    def drafts(self, plan: Plan) -> set[str]:
        """The modules of draft layers."""
        dims, family = plan.role_index.dims, plan.family
        linears = {module for module in self.linears if family.is_mtp(f"{module}.weight", dims)}
        return linears | {one.module for one in self.projections if one.draft}

    def others(self, plan: Plan) -> dict[str, Output]:
        """The plan's tensors that stay, weights that no other format stays beside in BF16."""
        return decoded_beside(plan, self._left(plan))[0]

    def _left(self, plan: Plan) -> dict[str, Output]:
        """The plan's tensors that are not chosen."""
        taken = {name for linear in self.linears.values() for name in linear.names}
        taken |= self.experts.taken if self.experts else set()
        return {name: output for name, output in plan.tensors.items() if name not in taken}

    def dropped(self, plan: Plan) -> dict[str, str]:
        """The rule for every source tensor that leaves unread."""
        names = {n for one in self.linears.values() for n in one.names[len(one.stored.args) :]}
        names |= self.experts.stale if self.experts else set()
        names.update(decoded_beside(plan, self._left(plan))[1])
        return sources_of(plan, sorted(names), STALE_RULE)

    def entry(self, name: str, options: Mapping[str, Any], notes: Iterable[str]) -> LogEntry:
        """Return what the pass did. Linears are chosen by targets, so that only experts are counted."""
        matrices = len(self.projections)
        what = "matrices" if self.plain else "expert matrices"
        counted = self.experts is not None and not self.plain
        expected = self.experts.expected + len(self.shared) if self.experts and counted else None
        extra = self.experts.extra if self.experts and counted else ()
        matched = matrices + len(self.linears)
        notes = (*notes, *self.unloaded)
        return LogEntry(name, options, matched, expected, notes, what, extra=extra)


@dataclass(frozen=True, slots=True)
class Targets:
    """Modules to quantize: names, ends of names, `re:` patterns, LINEAR, or EXPERTS, which means the
    routed experts of every family; less those that `ignore` names, and kinds to `keep`."""

    names: tuple[str, ...]
    ignore: tuple[str, ...] = ()
    keep: Collection[Kind] = ()

    def want(self, module: str, *, expert: bool = False) -> bool:
        def listed(patterns: tuple[str, ...]) -> bool:
            return (expert and EXPERTS in patterns) or matches(module, patterns) is not None

        return listed(self.names) and not listed(self.ignore)

    def take(self, plan: Plan, experts: Experts) -> Experts | None:
        """The routed experts of the layers in which these are targets. Raises PlanError where they are
        a part of a layer's."""
        layers: set[int] = set()
        kept: dict[int, str] = {}
        for one in experts.projections:
            if self.want(one.module, expert=True):
                layers.add(one.layer)
            else:
                kept.setdefault(one.layer, one.module)
        if (parted := next((layer for layer in sorted(layers) if layer in kept), None)) is not None:
            raise PlanError(
                f"{kept[parted]!r} is no target or is ignored, and other routed experts of its layer "
                "are targets; runtimes take one scheme for all experts of a layer: target all or none "
                "of them"
            )
        if not kept:
            return experts
        return experts.of_layers(plan, layers) if layers else None

    def check_found(
        self,
        plan: Plan,
        modules: Iterable[str],
        experts: Experts | None,
        settled: Collection[str],
        *,
        calibrated: bool,
    ) -> None:
        """Raises PlanError for a target that matches nothing that can be quantized, and why; `settled`
        are modules that earlier steps have quantized."""
        first = [one.module for one in experts.projections[:1]] if experts is not None else []
        known = (*modules, *first)
        for target in self.names:
            named = any(matches(module, (target,)) for module in known)
            if not named and not (target == EXPERTS and experts is not None):
                done = next(
                    (m for m in settled if target == EXPERTS or matches(m, (target,))), None
                )
                if done is not None:
                    raise PlanError(
                        f"target {target!r} matches no weight that is left to quantize: {done!r} is "
                        "the result of an earlier step"
                    )
                why = skip_reason(
                    plan, target, _why_other(plan), calibrated=calibrated, kept=self.keep
                )
                raise PlanError(
                    f"target {target!r} matches no weight that can be quantized"
                    + (f"; {why}: leave this target out" if why else "")
                )


def check_targets(targets: tuple[str, ...], dialect: str) -> None:
    """Raises PlanError for modules by name in a dialect whose config has no targets."""
    for target in targets:
        if target not in (EXPERTS, LINEAR) and dialect != METHOD:
            raise PlanError(
                f"targets: expected {EXPERTS!r} or {LINEAR!r}, found {target!r}; modules by name need "
                f"`dialect: {METHOD}` (--dialect {METHOD})"
            )
    if not targets:
        raise PlanError(f"targets: expected {EXPERTS!r}, {LINEAR!r} or modules, found none")


def select(
    plan: Plan,
    targets: Targets,
    fits: Callable[[Stored], bool],
    *,
    calibrated: bool = False,
    more: Callable[[Collection[str]], Mapping[str, Linear]] = lambda known: {},
) -> Selection:
    """The matrices that targets name, without linears that do not fit; `more` gives linears beside
    those that all formats take, but for the modules and tensors that it is told. Raises PlanError for
    targets that match nothing, and for part of what runtimes load as one."""
    before = quantized_before(plan)
    everyone = _routed(plan, targets.names, before.settled)
    experts = None if everyone is None else targets.take(plan, everyone)
    linears: dict[str, Linear] = {}
    left: dict[str, Kind] = {}
    unwanted: dict[str, Kind] = {}
    taken = everyone.taken if everyone is not None else ()
    others = chain(quantizable(plan, taken), by_tables(plan, taken))
    for module, kind in others if targets.names != (EXPERTS,) else ():
        if kind in targets.keep or module in before.settled or not targets.want(module):
            unwanted[module] = kind
            continue
        found = _linear(plan, module, kind)
        if fits(found.stored):
            linears[module] = found
        else:
            left[module] = kind
    beside = more({*linears, *unwanted, *(everyone.taken if everyone is not None else ())})
    known = [*linears, *left, *beside]
    targets.check_found(plan, known, experts, before.settled, calibrated=calibrated)
    check_sets({module: one.kind for module, one in linears.items()}, {**unwanted, **left})
    chosen = {**linears, **beside}
    every = {*chosen, *left, *unwanted, *(everyone.taken if everyone is not None else ())}
    unloaded: Sequence[str] = ()
    if LINEAR in targets.names:
        every |= before.settled
        unloaded = unquantizable(plan, every, targets.ignore, _why_other(plan))
    return Selection(experts, chosen, tuple(left), unloaded=tuple(unloaded), before=before)


def by_tables(plan: Plan, taken: Collection[str]) -> Iterator[tuple[str, Kind]]:
    """Linears of no purpose that is known here, which the runtimes' classes load quantized all the
    same: into and out of a convolution (LFM2), an attention's gate (Trinity)."""
    architecture = architecture_of(plan.config)
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if name in taken or parameter not in code_parameters() or len(output.type.shape) != 2:
            continue
        if plan.role_index.kind(name) is not Kind.LINEAR:
            continue
        kind = taken_quantized(architecture, module)
        if isinstance(kind, Kind) and not plan.family.is_mtp(name, plan.role_index.dims):
            yield module, kind


def _why_other(plan: Plan) -> Callable[[str], str]:
    """Return what says why a linear of no known purpose stays."""
    architecture = architecture_of(plan.config)

    def why(module: str) -> str:
        found = taken_quantized(architecture, module)
        return found if isinstance(found, str) else NOT_KNOWN

    return why


def _routed(plan: Plan, targets: Sequence[str], settled: Collection[str]) -> Experts | None:
    """The model's routed experts, targets or not, but for those that an earlier step has quantized
    (`settled`); None where it has none and needs none, or where none is left."""
    done = frozenset(m for m in settled if plan.role_index.kind(f"{m}.weight").routed)
    if done and all(
        split_parameter(name)[0] in done
        for name in plan.tensors
        if plan.role_index.kind(name).routed
    ):
        return None
    if tuple(targets) == (EXPERTS,):
        check_experts(plan, "quantize its other layers: --targets Linear")
    else:
        check_described(plan)
        if not plan.role_index.dims.num_experts:
            return None
    return routed_experts(plan, done)


def _linear(plan: Plan, module: str, kind: Kind) -> Linear:
    stored, read = read_matrix(plan, module)
    stale = [f"{module}{end}" for end in STALE if f"{module}{end}" in plan.tensors]
    return Linear(kind, stored, tuple(dict.fromkeys((*read, *stale))))


# --- Shared experts beside routed ones ------------------------------------------------------------


def with_shared(
    plan: Plan,
    chosen: Selection,
    asked: SharedExperts | None,
    block_of: Callable[[Selection], Mapping[str, Any]],
    ignore: tuple[str, ...] = (),
) -> Selection:
    """The same with shared experts, of draft layers too if their routed ones are chosen, where they are
    to be quantized with the routed ones: where that is `asked`, or (None) where sglang would otherwise
    fuse them and not read them, and `ignore` names none. `block_of` gives the config's block of a
    selection. Raises PlanError where they are asked for, and there are none."""
    if asked == "keep":
        return chosen
    drafts = any(one.draft for one in chosen.projections)
    known = {*chosen.linears, *chosen.before.settled}
    shared = _shared_experts(plan, known, drafts=drafts)
    if not shared and asked == "quantize" and not chosen.names_shared:
        raise PlanError("shared_experts is quantize, and the model has none: leave it out")
    if not shared or not chosen.projections:
        return chosen
    if asked is None:
        if any(matches(module, ignore) for module in shared):
            return chosen
        block = block_of(chosen)
        # Targets that name shared experts never take those of draft layers.
        named = chosen.names_shared and shared.keys().isdisjoint(chosen.left)
        if not (named and would_fuse(plan.config, block)) and not loses_shared(plan.config, block):
            return chosen
    return replace(chosen, linears={**chosen.linears, **shared}, shared=frozenset(shared))


def _shared_experts(plan: Plan, known: Collection[str], *, drafts: bool) -> dict[str, Linear]:
    """The linears of shared experts that are not `known` already, those of draft layers if `drafts`.
    Raises PlanError where one of a layer's is missing."""
    found: dict[str, Linear] = {}
    for name in plan.tensors:
        module, parameter = split_parameter(name)
        kind = plan.role_index.kind(name)
        if kind not in SHARED or parameter not in code_parameters():
            continue
        if module in known or (not drafts and plan.family.is_mtp(name, plan.role_index.dims)):
            continue
        found[module] = _linear(plan, module, kind)
    kinds = {(module.rpartition(".")[0], one.kind) for module, one in found.items()}
    whole = SHARED[1:] if plan.family.ungated else SHARED
    for parent in dict.fromkeys(parent for parent, _ in kinds):
        for kind in whole:
            if (parent, kind) not in kinds and not any(m.startswith(f"{parent}.") for m in known):
                raise PlanError(f"{parent}: a matrix of a shared expert is missing")
    return found


def shared_notes(plan: Plan, chosen: Selection, block: Mapping[str, Any]) -> list[str]:
    """Return what the plan says of shared experts: which were quantized for the routed ones' sake and
    what keeping them would take, or with which option sglang reads those that are kept."""
    if chosen.shared:
        names = [n for m, one in chosen.linears.items() if m in chosen.shared for n in one.names]
        held = format_size(sum(plan.tensors[name].type.nbytes for name in names))
        said = (
            f"{count(len(chosen.shared), 'matrix', 'matrices')} of shared experts quantized with the "
            f"routed ones (kept they would take {held}, and {NO_FUSION} in sglang)"
        )
        if needs_plain_linears(plan.config) and block.get("quant_method") != "modelopt":
            said += "; sglang with expert parallelism needs them kept"
        if _lost_by_vllms_draft(plan, chosen, block):
            said += f"; {VLLM}'s draft class does not load its own so, and needs them kept"
        return [said]
    if loses_shared(plan.config, block):
        said = "sglang would fuse the shared experts, which are in another form, and not read them"
        return [f"{said}: start it with {NO_FUSION}"]
    return []


def _lost_by_vllms_draft(plan: Plan, chosen: Selection, block: Mapping[str, Any]) -> bool:
    """vLLM (`gptq_utils.py`, `is_layer_gptq_quantized`) takes a fused layer for quantized by the
    names of its parts, and the draft classes of DeepSeek and GLM have no mapping to them."""
    dims, family = plan.role_index.dims, plan.family
    return (
        block.get("quant_method") == "gptq"
        and family.name in DRAFTS_WITHOUT_MAPPING
        and any(family.is_mtp(f"{module}.weight", dims) for module in chosen.shared)
    )
