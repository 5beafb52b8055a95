"""Groups of modules that runtimes load as one, the formats that each may have, and what a choice of them
is as steps of a conversion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from re import escape

from qconvert.advise.options import (
    Candidate,
    Choice,
    Machine,
    considered,
    considered_plan,
    few_experts,
)
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source
from qconvert.core.names import layer_in, split_parameter
from qconvert.core.roles import SHARED, Kind, joined_with
from qconvert.evaluate.activations import Inputs
from qconvert.fit import ACTIVATIONS
from qconvert.fit.solve import Option
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.registry import encoded, read_matrix
from qconvert.models.experts import (
    Experts,
    Projection,
    check_described,
    of_checkpoint,
    routed_experts,
)
from qconvert.models.linears import quantizable
from qconvert.passes.dequant import Dequant
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import ToInt8, ToMx
from qconvert.passes.selection import SharedExperts, by_tables
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loader.ask import RuntimeLoader
from qconvert.runtimes.shared_experts import would_fuse
from qconvert.samples.request import Calibration
from qconvert.validation.judgement import planned_checkpoint

STAY = "bf16"
Targets = tuple[str, ...]
Make = Callable[[Targets], Pass]
Solve = Callable[[Targets, Calibration], Pass]


@dataclass(frozen=True)
class Form:
    """A format that a group may have: its name in options and reports, the step that writes it for some
    targets, and the one whose codes a calibration finds (None: none does, or it changes next to
    nothing); `solves_linears`: those of linears beside the routed experts, too."""

    name: str
    make: Make
    solve: Solve | None = None
    solves_linears: bool = True

    def solves(self, group: Group) -> bool:
        """Return whether a calibration finds the codes of all of a group's matrices."""
        return self.solve is not None and (self.solves_linears or not group.modules)


def _w8a16(targets: Targets) -> Pass:
    return ExpertsToW4A16(group_size=128, bits=8, targets=targets, shared_experts="named")


def _w4a16(name: str, group: int) -> Form:
    def step(targets: Targets, calibrate: Calibration | None = None) -> Pass:
        named: SharedExperts = "named"
        return ExpertsToW4A16(
            group_size=group, targets=targets, shared_experts=named, calibrate=calibrate
        )

    return Form(name, step, step)


def _nvfp4(targets: Targets, calibrate: Calibration | None = None) -> Pass:
    return ToNvfp4(
        "compressed-tensors", targets=targets, shared_experts="named", calibrate=calibrate
    )


def _fp8(block: int | None) -> Make:
    return lambda targets: ToFp8(
        "compressed-tensors", block, targets=targets, shared_experts="named"
    )


FORMS = (
    Form("fp8", _fp8(128)),
    Form("fp8-channel", _fp8(None)),
    Form("int8", lambda t: ToInt8(targets=t, shared_experts="named")),
    Form("w8a16", _w8a16),
    Form("nvfp4", _nvfp4, _nvfp4, solves_linears=False),
    Form("mxfp4", lambda t: ToMx("mxfp4", targets=t, shared_experts="named")),
    _w4a16("w4a16-g32", 32),
    _w4a16("w4a16-g64", 64),
    _w4a16("w4a16-g128", 128),
)


@dataclass(frozen=True)
class Group:
    """Matrices of a layer that runtimes load as one module, in one format. `part` says which they are,
    in every layer alike; `modules` are linears by name, `experts` whether the layer's routed experts
    belong to it. `weights` are their numbers, `nbytes` what they take as they are."""

    layer: int
    part: str
    modules: tuple[str, ...]
    experts: bool
    weights: int
    nbytes: int

    @property
    def name(self) -> str:
        return f"layer {self.layer} {self.part}"


@dataclass(frozen=True)
class Model:
    """A model whose matrices are grouped: `plan` has its weights as numbers, after the steps `before`;
    `rest` are the bytes of all that is in no group."""

    plan: Plan
    before: tuple[Pass, ...]
    groups: tuple[Group, ...]
    rest: int

    @property
    def weights(self) -> int:
        """Weights of all matrices that can be quantized."""
        return sum(group.weights for group in self.groups)

    @property
    def parts(self) -> dict[str, list[Group]]:
        """Groups by their part, in the order of the first."""
        found = defaultdict[str, list[Group]](list)
        for group in self.groups:
            found[group.part].append(group)
        return dict(found)

    @cached_property
    def experts(self) -> Mapping[int, Sequence[Projection]]:
        """Each layer's routed experts, but those of draft layers."""
        found = defaultdict[int, list[Projection]](list)
        if self.plan.role_index.dims.num_experts:
            for one in routed_experts(self.plan).projections:
                if not one.draft:
                    found[one.layer].append(one)
        return found

    @cached_property
    def expert_paths(self) -> Mapping[int, Collection[tuple[str, str]]]:
        """Names of each layer's routed experts: what is before the layer's number, and behind it."""
        plan, found = self.plan, defaultdict[int, dict[tuple[str, str], None]](dict)
        for name, place in plan.role_index.places.items():
            if place.layer is None or not place.role.kind.routed:
                continue
            if plan.family.is_mtp(name, plan.role_index.dims):
                continue
            before, _, after = name.partition(f".{place.layer}.")
            for path in plan.family.expert_paths:
                inside, here, _ = f".{after}".partition(path)
                if here:
                    found[place.layer][before, f"{inside}{path}".removeprefix(".")] = None
        return found


def model_of(checkpoint: Checkpoint, consumer: Consumer) -> Model:
    """The groups of a checkpoint for a runtime, decoded to BF16 first where it is quantized. Raises
    PlanError for a model that no family describes, and where nothing can be quantized."""
    stored = Plan.identity(checkpoint)
    check_described(stored)
    coded = any(one.decoder is not None for _, (one, _) in encoded(stored))
    coded |= any(output.type.dtype in WEIGHT_DTYPES for output in stored.tensors.values())
    before: tuple[Pass, ...] = (Dequant(),) if coded else ()
    plan = run_passes(stored, before) if before else stored
    fused = consumer.name == "sglang" and would_fuse(plan.config, None)
    groups = _groups(plan, fused=fused)
    if not groups:
        raise PlanError(
            f"{checkpoint.name}: no matrix that a runtime loads quantized: use it as it is"
        )
    return Model(plan, before, groups, plan.bytes_out - sum(group.nbytes for group in groups))


def _groups(plan: Plan, *, fused: bool) -> tuple[Group, ...]:
    """`fused`: shared experts become one more routed expert."""
    sparse = bool(plan.role_index.dims.num_experts)
    experts = routed_experts(plan) if sparse else None
    taken = experts.taken if experts is not None else frozenset()
    linears = dict([*quantizable(plan, taken), *by_tables(plan, taken)])
    members = defaultdict[tuple[int, str, Kind], list[str]](list)
    of_shared = defaultdict[int, list[str]](list)
    for module, kind in linears.items():
        layer = layer_in(module)
        if layer is None:
            continue
        if fused and kind in SHARED:
            of_shared[layer].append(module)
        else:
            members[layer, module.rpartition(".")[0], joined_with(kind)[0]].append(module)
    found = [
        _group(plan, layer, _part(parent, layer, modules), modules)
        for (layer, parent, _), modules in members.items()
    ]
    if experts is not None:
        found += _of_experts(plan, experts, of_shared)
    return tuple(sorted(found, key=lambda group: group.layer))


def _part(parent: str, layer: int, modules: Sequence[str]) -> str:
    inside = parent.partition(f".{layer}.")[2]
    last = "+".join(module.rpartition(".")[2] for module in modules)
    return f"{inside}.{last}" if inside else last


def _group(plan: Plan, layer: int, part: str, modules: Sequence[str]) -> Group:
    names = [f"{module}.weight" for module in modules]
    types = [plan.tensors[name].type for name in names]
    weights, nbytes = sum(one.numel for one in types), sum(one.nbytes for one in types)
    return Group(layer, part, tuple(modules), experts=False, weights=weights, nbytes=nbytes)


def _of_experts(plan: Plan, experts: Experts, shared: Mapping[int, list[str]]) -> list[Group]:
    path = "+".join(one.removeprefix(".") for one in plan.family.expert_paths)
    found = []
    for layer in dict.fromkeys(one.layer for one in experts.projections if not one.draft):
        own = experts.of_layers(plan, {layer})
        beside = _group(plan, layer, "", shared.get(layer, ()))
        weights = sum(one.weight.rows * one.weight.columns for one in own.projections)
        nbytes = sum(plan.tensors[name].type.nbytes for name in own.taken)
        part = f"{path}+shared experts" if beside.modules else path
        found.append(
            Group(
                layer, part, beside.modules, experts=True, weights=weights + beside.weights,
                nbytes=nbytes + beside.nbytes,
            )
        )  # fmt: skip
    return found


# --- Targets and steps ----------------------------------------------------------------------------


def targets_of(model: Model, groups: Iterable[Group]) -> tuple[str, ...]:
    """Patterns of the modules of these groups alone, one for what is alike in several layers."""
    layers = defaultdict[tuple[str, str], list[int]](list)
    for group in groups:
        for module in group.modules:
            before, _, after = module.partition(f".{group.layer}.")
            layers[before, after].append(group.layer)
        if group.experts:
            for start, path in model.expert_paths[group.layer]:
                layers[start, f"{path}."].append(group.layer)
    found = []
    for (before, after), numbers in layers.items():
        some = "|".join(map(str, sorted(set(numbers))))
        end = ".*" if after.endswith(".") else "$"
        found.append(rf"re:{escape(before)}\.(?:{some})\.{escape(after)}{end}")
    return tuple(found)


def steps_of(model: Model, chosen: Mapping[str, Sequence[Group]]) -> tuple[Pass, ...]:
    """The steps that write groups in formats, by the format's name, rounded to nearest."""
    steps = [
        form.make(targets_of(model, chosen[form.name])) for form in FORMS if chosen.get(form.name)
    ]
    return (*model.before, *steps)


@dataclass(frozen=True)
class Solved:
    """The steps that write a choice where a calibration finds codes, and the groups whose codes it
    finds, by format."""

    steps: tuple[Pass, ...]
    groups: Mapping[str, Sequence[Group]]


def solved_steps(
    model: Model, chosen: Mapping[str, Sequence[Group]], calibration: Calibration
) -> Solved:
    """The same groups in the same formats; codes that a calibration of the samples finds wherever it
    can, and rounded ones elsewhere. What layers before lost is corrected where it solves experts
    alone."""
    solved: dict[str, list[Group]] = {}
    for form in FORMS:
        own = [
            one for one in chosen.get(form.name, ()) if form.solves(one) and _as_stored(model, one)
        ]
        if own:
            solved[form.name] = own
    if any(group.modules for groups in solved.values() for group in groups):
        calibration = replace(calibration, propagated_error="ignore")
    steps = list(model.before)
    for form in FORMS:
        own = solved.get(form.name, [])
        if own and form.solve is not None:
            steps.append(form.solve(targets_of(model, own), calibration))
        if rest := [one for one in chosen.get(form.name, ()) if one not in own]:
            steps.append(form.make(targets_of(model, rest)))
    return Solved(tuple(steps), solved)


def _as_stored(model: Model, group: Group) -> bool:
    """Return whether a calibration reads all of a group's matrices of the checkpoint: stacks that were
    decoded first it does not."""
    matrices = [(module, read_matrix(model.plan, module)[0]) for module in group.modules]
    if group.experts:
        matrices += [(one.module, one.weight) for one in model.experts[group.layer]]
    try:
        for module, weight in matrices:
            of_checkpoint(module, weight)
    except PlanError:
        return False
    return True


# --- What may be chosen ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowed:
    """Formats that may be chosen for each part; why others may not, by format and part; what is not
    known of the runtime's loader."""

    forms: Mapping[str, tuple[str, ...]]
    refused: Mapping[tuple[str, str], str]
    unknown: str = ""


def allowed_forms(
    checkpoint: Checkpoint,
    model: Model,
    names: Collection[str],
    consumer: Consumer,
    machine: Machine,
    tp: int,
    loader: RuntimeLoader | None = None,
) -> Allowed:
    """Of the formats `names` those that fit a part's matrices and that the runtime loads whole, on `tp`
    ranks, in all of its layers, by its simulator or its own `loader`. Where that is not known of any,
    all that fit."""
    few = few_experts(checkpoint) if loader is None else None
    refused: dict[tuple[str, str], str] = {}
    not_known: dict[tuple[str, str], str] = {}

    def asked(form: Form, groups: Sequence[Group]) -> Choice:
        one = Candidate(form.name, (*model.before, form.make(targets_of(model, groups))))
        more = (tp,), machine, consumer, loader
        # Whether it loads a model with few of the experts says; what is refused may count tensors.
        choice = None if few is None else considered(few.more, one, *more)
        return considered(checkpoint, one, *more) if choice is None or choice.refused else choice

    forms = [form for form in FORMS if form.name in names]
    for form in forms:
        for part, groups in model.parts.items():
            choice = asked(form, groups)
            if why := _refusal(choice, tp):
                refused[form.name, part] = why
            elif choice.unknown:
                not_known[form.name, part] = choice.unknown
        fitting = [part for part in model.parts if (form.name, part) not in refused]
        if any((form.name, part) in not_known for part in fitting):
            # Of several parts together it may be known: which of them has a scheme, names alone decide.
            every = [group for group in model.groups if group.part in fitting]
            if tp in asked(form, every).loads_at:
                for part in fitting:
                    not_known.pop((form.name, part), None)
    allowed, unknown = dict[str, tuple[str, ...]](), ""
    for part in model.parts:
        open_to = [form.name for form in forms if (form.name, part) not in refused]
        known = [name for name in open_to if (name, part) not in not_known]
        # Of a class that is known what is not known of it is left out.
        refused |= {(n, part): not_known[n, part] for n in open_to if known and n not in known}
        unknown = unknown if known or not open_to else not_known[open_to[0], part]
        allowed[part] = tuple(known or open_to)
    return Allowed(allowed, refused, unknown)


def _refusal(choice: Choice, tp: int) -> str:
    """Why a format is out for a part, "" where it is not, or where that is not known."""
    if choice.refused or choice.unknown:
        return choice.refused
    if tp in choice.loads_at:
        return ""
    from qconvert.advise.advice import why_not

    return why_not(choice).get(tp, "it does not load")


@dataclass(frozen=True)
class Encoded:
    """The model with every group that allows it in one format: the plan, the bytes of each such group by
    its number, the folder that the plan would make, as its headers will describe it, and activations
    that a runtime quantizes. `codes` is a folder that has been made of it, with codes that a calibration
    has found."""

    plan: Plan
    nbytes: Mapping[int, int]
    folder: Plan | None = None
    inputs: Inputs | None = None
    codes: Plan | None = None

    def stored(self, module: str) -> Stored:
        """Return how a module's weight is read of that folder, out of what the plan makes of it: weights
        so go through the encoder and the decoder of their format, and no file; or of what was made."""
        if self.codes is not None:
            return read_matrix(self.codes, module)[0]
        assert self.folder is not None
        found, _ = read_matrix(self.folder, module)
        return replace(found, args=tuple(self._made(arg) for arg in found.args))

    def _made(self, arg: Output) -> Output:
        (origin, start, stop), *more = arg.pieces
        assert isinstance(origin, Source)
        made = self.plan.tensors[origin.name]
        if more or (start, stop) != (0, made.type.nbytes):
            raise PlanError(f"{origin.name}: a part of it is read alone, which is not measured")
        return made.reshape(arg.type.shape)


def encoded_in(model: Model, form: Form, allowed: Allowed) -> Encoded:
    """Raises PlanError as the format's step does."""
    chosen = {
        number: group
        for number, group in enumerate(model.groups)
        if form.name in allowed.forms[group.part]
    }
    if not chosen:
        return Encoded(model.plan, {})
    made = run_passes(model.plan, (form.make(targets_of(model, chosen.values())),))
    owners: dict[str, int] = {}
    layers: dict[int, int] = {}
    for number, group in chosen.items():
        owners.update(dict.fromkeys(group.modules, number))
        if group.experts:
            layers[group.layer] = number
    sizes = dict.fromkeys(chosen, 0)
    places, dims, family = made.role_index.places, made.role_index.dims, made.family
    for name, output in made.tensors.items():
        owner = owners.get(split_parameter(name)[0])
        place = places.get(name)
        routed = place is not None and place.role.kind.routed and not family.is_mtp(name, dims)
        if owner is None and routed and place is not None and place.layer is not None:
            owner = layers.get(place.layer)
        if owner is not None:
            sizes[owner] += output.type.nbytes
    folder = planned_checkpoint(considered_plan(made))
    return Encoded(made, sizes, Plan.identity(folder), ACTIVATIONS.get(form.name))


@dataclass(frozen=True)
class Choices:
    """Formats of every group in which it may be, BF16 first, and the bytes that it takes in each."""

    forms: tuple[tuple[str, ...], ...]
    nbytes: tuple[tuple[int, ...], ...]

    def options(self, costs: Sequence[Mapping[str, float]]) -> list[list[Option]]:
        """For the solver, with the cost of each group in each format."""
        return [
            [Option(size, cost[form]) for form, size in zip(forms, sizes, strict=True)]
            for forms, sizes, cost in zip(self.forms, self.nbytes, costs, strict=True)
        ]


def choices_of(model: Model, made: Mapping[str, Encoded]) -> Choices:
    forms, sizes = [], []
    for number, group in enumerate(model.groups):
        own = {STAY: group.nbytes}
        own |= {name: one.nbytes[number] for name, one in made.items() if number in one.nbytes}
        forms.append(tuple(own))
        sizes.append(tuple(own.values()))
    return Choices(tuple(forms), tuple(sizes))


def by_form(model: Model, choices: Choices, chosen: Sequence[int]) -> dict[str, tuple[Group, ...]]:
    """Groups by the format that was chosen for each."""
    found = defaultdict[str, list[Group]](list)
    for group, forms, number in zip(model.groups, choices.forms, chosen, strict=True):
        found[forms[number]].append(group)
    return {name: tuple(groups) for name, groups in found.items()}


def said(model: Model, groups: Sequence[Group]) -> list[str]:
    """Groups in a line for each part: of which layers."""
    lines = []
    for part, every in model.parts.items():
        mine = sorted(group.layer for group in groups if group.part == part)
        if not mine:
            continue
        which = "all layers" if len(mine) == len(every) else f"layers {_ranges(mine)}"
        lines.append(f"{part}: {f'layer {mine[0]}' if len(mine) == 1 else which}")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
