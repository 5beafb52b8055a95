"""Replacing of weights, as every quantizing pass does it: choose matrices, put new tensors in place of
the old ones, and drop what is stale.

Stale is what describes the old weights alone: scales of their activations, shapes of packed weights, and
the config blocks and side files of an earlier quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.ignore import complete_ignore_lists
from qconvert.core.errors import PlanError
from qconvert.core.family import without_quantization
from qconvert.core.graph import Output, Source
from qconvert.core.names import split_parameter
from qconvert.core.roles import SHARED, Kind
from qconvert.formats.base import Stored
from qconvert.formats.int_packed.limits import Matrix
from qconvert.formats.registry import code_parameters, read_matrix
from qconvert.models.experts import (
    KINDS,
    STALE,
    STALE_RULE,
    Experts,
    check_described,
    routed_experts,
)
from qconvert.models.linears import check_sets, quantizable
from qconvert.plan.pass_options import EXPERTS, LINEAR
from qconvert.plan.plan import Calibrating, LogEntry, Plan

if TYPE_CHECKING:
    from qconvert.samples.request import Calibration

# What modelopt and GPTQ write beside config.json about the weights of a folder.
_STALE_FILES = ("hf_quant_config.json", "quantize_config.json")


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
    `shared` are those of shared experts that no target names, quantized with the routed ones."""

    experts: Experts | None
    linears: Mapping[str, Linear]
    left: tuple[str, ...]
    shared: frozenset[str] = frozenset()

    @property
    def plain(self) -> list[str]:
        """The linears that are not quantized for the routed experts' sake."""
        return [module for module in self.linears if module not in self.shared]

    @property
    def names_shared(self) -> bool:
        """Return whether targets name shared experts."""
        return any(one.kind in SHARED and m not in self.shared for m, one in self.linears.items())

    def __iter__(self) -> Iterator[tuple[str, Kind, Stored]]:
        """Every matrix: its module, its kind, and how it is read."""
        for projection in self.experts.projections if self.experts else ():
            yield projection.module, KINDS[projection.kind], projection.weight
        for module, linear in self.linears.items():
            yield module, linear.kind, linear.stored

    @property
    def sizes(self) -> list[Matrix]:
        """One matrix of each kind and size."""
        found: dict[tuple[Kind, int, int], Matrix] = {}
        for module, kind, stored in self:
            matrix = Matrix(module, stored.rows, stored.columns, kind.cut)
            found.setdefault((kind, stored.rows, stored.columns), matrix)
        return list(found.values())

    def others(self, plan: Plan) -> dict[str, Output]:
        """The plan's tensors that stay."""
        taken = {name for linear in self.linears.values() for name in linear.names}
        taken |= self.experts.taken if self.experts else set()
        return {name: output for name, output in plan.tensors.items() if name not in taken}

    def dropped(self, plan: Plan) -> dict[str, str]:
        """The rule for every source tensor that leaves unread."""
        names = {n for one in self.linears.values() for n in one.names if n.endswith(STALE)}
        names |= self.experts.stale if self.experts else set()
        return sources_of(plan, names, STALE_RULE)

    def entry(self, name: str, options: Mapping[str, Any], notes: Iterable[str]) -> LogEntry:
        """Return what the pass did. Linears are chosen by targets, so that only experts are counted."""
        matrices = len(self.experts.projections) if self.experts else 0
        what = "matrices" if self.plain else "expert matrices"
        counted = self.experts is not None and not self.plain
        expected = self.experts.expected + len(self.shared) if self.experts and counted else None
        extra = self.experts.extra if self.experts and counted else ()
        matched = matrices + len(self.linears)
        return LogEntry(name, options, matched, expected, tuple(notes), what, extra=extra)


def select_linears(
    plan: Plan,
    experts: Experts | None,
    wanted: Callable[[str], bool] = lambda module: True,
    fits: Callable[[Stored], bool] = lambda stored: True,
    keep: Collection[Kind] = (),
) -> tuple[dict[str, Linear], dict[str, Kind], dict[str, Kind]]:
    """The linears beside the routed experts: those to quantize, those that are `wanted` and do not fit,
    and those that are not wanted, or of kinds to `keep`."""
    found: dict[str, Linear] = {}
    left: dict[str, Kind] = {}
    unwanted: dict[str, Kind] = {}
    for module, kind in quantizable(plan, experts.taken if experts is not None else ()):
        if kind in keep or not wanted(module):
            unwanted[module] = kind
            continue
        stored, read = read_matrix(plan, module)
        if not fits(stored):
            left[module] = kind
            continue
        stale = [f"{module}{suffix}" for suffix in STALE]
        names = dict.fromkeys((*read, *(name for name in stale if name in plan.tensors)))
        found[module] = Linear(kind, stored, tuple(names))
    return found, left, unwanted


def takes_linears(targets: tuple[str, ...]) -> bool:
    """False for the routed experts alone. Raises PlanError for modules by name."""
    for target in targets:
        if target not in (EXPERTS, LINEAR):
            raise PlanError(
                f"targets: expected {EXPERTS!r} or {LINEAR!r}, found {target!r}; modules by name are "
                "supported by w4a16"
            )
    if not targets:
        raise PlanError(f"targets: expected {EXPERTS!r} or {LINEAR!r}, found none")
    return LINEAR in targets


def select(
    plan: Plan,
    linears: bool,
    fits: Callable[[Stored], bool] = lambda stored: True,
    *,
    keep_shared: bool,
) -> tuple[Selection, dict[str, Kind]]:
    """The routed experts, or with `linears` those there are and every linear that runtimes load
    quantized and that `fits`; and the linears that are kept as they are. Raises PlanError for part of
    what runtimes load as one."""
    if linears:
        check_described(plan)
    experts = None
    if not linears or plan.role_index.dims.num_experts:
        experts = routed_experts(plan)
    if not linears:
        return Selection(experts, {}, ()), {}
    keep = SHARED if keep_shared else ()
    found, left, unwanted = select_linears(plan, experts, fits=fits, keep=keep)
    check_sets({module: one.kind for module, one in found.items()}, {**unwanted, **left})
    return Selection(experts, found, tuple(left)), unwanted


def shared_experts(plan: Plan, known: Collection[str], *, drafts: bool) -> dict[str, Linear]:
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
        stored, read = read_matrix(plan, module)
        stale = [f"{module}{end}" for end in STALE if f"{module}{end}" in plan.tensors]
        found[module] = Linear(kind, stored, tuple(dict.fromkeys((*read, *stale))))
    kinds = {(module.rpartition(".")[0], one.kind) for module, one in found.items()}
    whole = SHARED[1:] if plan.family.ungated else SHARED
    for parent in dict.fromkeys(parent for parent, _ in kinds):
        for kind in whole:
            if (parent, kind) not in kinds and not any(m.startswith(f"{parent}.") for m in known):
                raise PlanError(f"{parent}: a matrix of a shared expert is missing")
    return found


def replace_weights(
    plan: Plan,
    entry: LogEntry,
    tensors: Mapping[str, Output],
    *,
    dropped: Mapping[str, str],
    block: Mapping[str, Any] | None = None,
    dropped_files: Mapping[str, str] | None = None,
    new_files: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    calibrate: Calibration | None = None,
    digest: str | None = None,
    linears: bool = False,
) -> Plan:
    """The plan with these `tensors` and the quantization `block` that describes them (None: none), less
    every block and side file that described the old weights. `dropped` are rules by source tensor,
    `dropped_files` rules by side file, of which only those count that exist. `digest` is that of the
    calibration `calibrate`, which runs the model of `plan`, and solves `linears` beside the routed
    experts."""
    from qconvert.samples.request import FACT as CALIBRATION
    from qconvert.samples.request import fact as calibration_fact

    stale = f"{entry.name}: its quantization block no longer holds"
    rules = {**dict.fromkeys(_STALE_FILES, stale), **(dropped_files or {})}
    rules = {name: rule for name, rule in rules.items() if name in plan.side_files}
    config = without_quantization(plan.config)
    if block is not None:
        config = complete_ignore_lists({**config, "quantization_config": block}, ())
    facts = {**plan.facts, **(facts or {})}
    calibration = plan.calibration
    if calibrate is not None and digest is not None:
        calibration = Calibrating(plan, calibrate, linears)
        facts[CALIBRATION] = calibration_fact(calibrate, digest)
    return plan.logged(
        entry,
        tensors=tensors,
        config=config,
        dropped={**plan.dropped, **dropped},
        side_files=tuple(name for name in plan.side_files if name not in rules),
        dropped_files={**plan.dropped_files, **rules},
        new_files={**plan.new_files, **(new_files or {})},
        facts=facts,
        calibration=calibration,
    )


def sources_of(plan: Plan, names: Iterable[str], rule: str) -> dict[str, str]:
    """`rule` for every source tensor behind these tensors of a plan. Raises PlanError for one that an
    earlier pass computes."""
    return {source: rule for name in names for source in source_names(name, plan.tensors[name])}


def source_names(name: str, output: Output) -> list[str]:
    """The source tensors that an output consists of. Raises PlanError where it is computed."""
    found = []
    for piece in output.pieces:
        if not isinstance(piece.origin, Source):
            raise PlanError(f"{name!r} is computed by an earlier pass and dropped here")
        found.append(piece.origin.name)
    return found
