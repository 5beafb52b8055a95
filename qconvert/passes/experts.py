"""unstack and stack: routed experts as 3-D stacks, or one matrix each. Row ranges only, so a stack is
never read at once.

Stacked (Qwen3.5 bf16 releases, transformers 5): `experts.gate_up_proj` [E, 2I, H], gate rows first,
and `experts.down_proj` [E, H, I], without `.weight`; scales of FP8 stacks end in `_scale_inv`. Apart
(DeepSeek, Qwen3-Next, Qwen FP8 releases): `experts.N.{gate,up,down}_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from qconvert.checkpoint.quantization_config import fp8_scheme
from qconvert.core.errors import PlanError
from qconvert.core.family import RoleIndex, expert_inputs
from qconvert.core.graph import Output, concat, stack
from qconvert.core.names import experts_module
from qconvert.core.roles import Kind
from qconvert.models.skip_reasons import check_experts
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

_STACKED = (Kind.STACKED_GATE_UP, Kind.STACKED_DOWN)
_APART = (Kind.EXPERT_GATE, Kind.EXPERT_UP, Kind.EXPERT_DOWN)
# Names of the other form, where a family describes one alone.
_NAMES = {
    Kind.EXPERT_GATE: "gate_proj", Kind.EXPERT_UP: "up_proj", Kind.EXPERT_DOWN: "down_proj",
    Kind.STACKED_GATE_UP: "gate_up_proj", Kind.STACKED_DOWN: "down_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unstack:
    """Split stacks of experts to one matrix per expert.

    Raises PlanError if nothing is stacked (unless
    `optional`), if the expert count is not the config's, if the family's orientation
    [E, 2I, H] does not hold, and if a block of scales spans gate and up."""

    name: ClassVar[str] = "unstack"

    optional: bool = False

    def __call__(self, plan: Plan) -> Plan:
        if self.optional and not plan.role_index.dims.num_experts:
            return plan.logged(LogEntry(self.name, options_of(self), 0, 0, ("a dense model",)))
        role_index = _role_index(plan)
        hidden = expert_inputs(role_index, lambda name: plan.tensors[name].type)
        tensors: dict[str, Output] = {}
        matched: list[str] = []
        for name, output in plan.tensors.items():
            place = role_index.places.get(name)
            if place is None or place.role.kind not in _STACKED:
                tensors[name] = output
                continue
            _refuse_packed(name, place.parameter)
            matched.append(name)
            both = place.role.kind is Kind.STACKED_GATE_UP
            if (
                output.type.shape[:1] != (role_index.dims.num_experts,)
                or len(output.type.shape) != 3
            ):
                raise PlanError(
                    f"{name!r}: expected [{role_index.dims.num_experts} experts, rows, columns], "
                    f"found {output.type}"
                )
            if not place.parameter:
                _check_orientation(name, output, role_index, hidden, both=both)
            base, names = experts_module(name), _names(role_index)
            suffix = place.parameter or "weight"
            templates = _templates(role_index, Kind.EXPERT_GATE, "a matrix an expert")
            for expert in range(role_index.dims.num_experts):
                matrix = output.index(expert)
                for projection, rows in _halves(plan, name, matrix, suffix, both=both):
                    module = f"{base}.{expert}.{names[projection]}"
                    if templates:
                        module = _module(templates[projection], place.layer, expert)
                    tensors[f"{module}.{suffix}"] = rows
        if not matched and not self.optional:
            raise PlanError(
                "expected a 3-D expert stack, found none; the experts are already matrices"
            )
        expected = _expected(role_index, _STACKED)
        entry = LogEntry(self.name, options_of(self), len(matched), len(expected))
        return plan.logged(entry.against(matched, expected), tensors=tensors)


@dataclass(frozen=True, slots=True)
class Stack:
    """Stack matrices of experts to 3-D tensors: the inverse of `unstack`."""

    name: ClassVar[str] = "stack"

    def __call__(self, plan: Plan) -> Plan:
        role_index = _role_index(plan)
        tensors: dict[str, Output] = {}
        groups: dict[tuple[str, str, int | None], dict[tuple[Kind, int], Output]] = {}
        matched: list[str] = []
        for name, output in plan.tensors.items():
            place = role_index.places.get(name)
            if place is None or place.expert is None or place.role.kind not in _APART:
                tensors[name] = output
                continue
            _refuse_packed(name, place.parameter)
            matched.append(name)
            at = experts_module(name) or "", place.parameter, place.layer
            groups.setdefault(at, {})[place.role.kind, place.expert] = output
        if not matched:
            raise PlanError("expected expert matrices, found none; the experts are already stacked")
        names = _names(role_index)
        gate, up, down = _APART
        templates = _templates(role_index, Kind.STACKED_DOWN, "stacks")
        for (base, parameter, layer), found in groups.items():
            if parameter != "weight":
                _check_scale_join(plan, base, groups.get((base, "weight", layer), {}))
            suffix = "" if parameter == "weight" else parameter.removeprefix("weight")
            for kind, parts in ((_STACKED[0], (gate, up)), (_STACKED[1], (down,))):
                made = _stacked(base, parameter, found, role_index, parts)
                module = _module(templates[kind], layer) if templates else f"{base}.{names[kind]}"
                tensors[f"{module}{suffix}"] = made
        expected = _expected(role_index, _APART)
        entry = LogEntry(self.name, options_of(self), len(matched), len(expected))
        return plan.logged(entry.against(matched, expected), tensors=tensors)


def _role_index(plan: Plan) -> RoleIndex:
    found = plan.role_index
    check_experts(plan, "there is nothing to stack or unstack")
    if found.family.ungated:
        raise PlanError(
            "its experts have no gate projection, so there is no stack of gate and up to make or cut; "
            "keep them as they are"
        )
    if found.family.stacked_transposed:
        raise PlanError(
            f"published {found.family.name} checkpoints stack experts as [E, H, 2I] and [E, I, H]: "
            "rows of a matrix are columns of the stack, which are not byte ranges, so they cannot be "
            "stacked or unstacked; keep the experts as they are"
        )
    return found


def _templates(role_index: RoleIndex, kind: Kind, form: str) -> Mapping[Kind, str]:
    """The class's names of experts; nothing where they are not known. Raises PlanError if the class does
    not read them so."""
    family = role_index.family
    if family.expert_templates and kind not in family.expert_templates:
        raise PlanError(
            f"{family.class_name} of transformers does not read its experts as {form}; keep them as "
            "they are"
        )
    return family.expert_templates


def _module(template: str, layer: int | None, expert: int | None = None) -> str:
    return template.replace("{L}", str(layer)).replace("{E}", str(expert))


def _refuse_packed(name: str, parameter: str) -> None:
    """Only plain weights and block scales have their rows where a stack puts them."""
    if parameter not in ("", "weight", "weight_scale_inv", "weight_scale"):
        raise PlanError(
            f"{name!r}: a packed 4-bit weight holds its rows on another axis and cannot be stacked "
            "or unstacked; start from the bf16 or FP8 release"
        )


def _check_orientation(
    name: str, output: Output, role_index: RoleIndex, hidden: int, *, both: bool
) -> None:
    """gate_up [E, 2I, H] and down [E, H, I]: the family's order, checked against what experts take."""
    found = output.type.shape[2 if both else 1]
    if found != hidden:
        order = "[E, 2I, H]" if both else "[E, H, I]"
        raise PlanError(
            f"{name!r}: {role_index.family.name} stacks are {order} with H = {hidden}, "
            f"found {output.type}"
        )


def _halves(
    plan: Plan, name: str, matrix: Output, suffix: str, *, both: bool
) -> Iterator[tuple[Kind, Output]]:
    """gate and up of one expert, or down alone."""
    if not both:
        yield Kind.EXPERT_DOWN, matrix
        return
    rows = matrix.type.shape[0]
    if suffix != "weight":
        _check_scale_cut(plan, name, rows)
    if rows % 2:
        raise PlanError(f"{name!r}: expected an even number of rows (gate and up), found {rows}")
    yield Kind.EXPERT_GATE, matrix.rows(0, rows // 2)
    yield Kind.EXPERT_UP, matrix.rows(rows // 2, rows)


def _check_scale_cut(plan: Plan, name: str, grid_rows: int) -> None:
    """Block scales can be cut between gate and up only if a block ends there."""
    stack = name.removesuffix("_scale_inv").removesuffix("_scale")
    weight, block = plan.tensors[stack], fp8_scheme(plan.checkpoint, stack).block
    half = weight.type.shape[1] // 2
    if (block is not None and half % block[0]) or grid_rows % 2:
        raise PlanError(
            f"{name!r}: gate ends at row {half}, inside a scale block; dequantize first (the "
            "recipe's `dequant` pass before this one)"
        )


def _check_scale_join(plan: Plan, base: str, weights: Mapping[tuple[Kind, int], Output]) -> None:
    """gate's scales can be followed by up's only if gate's rows end with a block."""
    gate = weights.get((Kind.EXPERT_GATE, 0))
    first = f"{base}.0.{_names(plan.role_index)[Kind.EXPERT_GATE]}"
    block = fp8_scheme(plan.checkpoint, first).block
    if gate is None or block is None:
        raise PlanError(
            f"{base}: only block scales of expert weights can be stacked; dequantize first (the "
            "recipe's `dequant` pass before this one)"
        )
    if gate.type.shape[0] % block[0]:
        raise PlanError(
            f"{base}: gate_proj has {gate.type.shape[0]} rows, which are not whole blocks of "
            f"{block[0]}: in one tensor a block would span gate and up; dequantize first (the "
            "recipe's `dequant` pass before this one)"
        )


def _stacked(
    base: str,
    parameter: str,
    found: Mapping[tuple[Kind, int], Output],
    role_index: RoleIndex,
    projections: tuple[Kind, ...],
) -> Output:
    experts = []
    for expert in range(role_index.dims.num_experts):
        parts = []
        for projection in projections:
            part = found.get((projection, expert))
            if part is None:
                name = f"{base}.{expert}.{_names(role_index)[projection]}.{parameter}"
                raise PlanError(f"{name!r} is missing")
            parts.append(part)
        experts.append(concat(parts))
    try:
        return stack(experts)
    except PlanError as error:
        raise PlanError(f"{base}: its experts differ in type or shape: {error}") from error


def _expected(role_index: RoleIndex, kinds: tuple[Kind, ...]) -> list[str]:
    """The tensors that the config implies: all layers (and experts) of the roles that are present."""
    return [
        name
        for role in role_index.family.roles
        if role.name in role_index.present and role.kind in kinds
        for parameter in role_index.present[role.name]
        for name in role_index.names(role, parameter, role_index.expected(role, parameter))
    ]


def _names(role_index: RoleIndex) -> dict[Kind, str]:
    """The family's names for gate, up and down of a routed expert, and for the stacks of all."""
    return _NAMES | role_index.family.expert_names()


PASSES = (Unstack, Stack)
