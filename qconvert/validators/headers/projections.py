"""Matrices that have two forms, fused and split: one of them, complete, and the same in every layer.

QC016 both forms of one layer's matrices are present.
QC017 one layer has them fused and another split.
QC018 a layer has an incomplete set: a gate without an up, experts in no form at all.
QC052 linear attention is in a form or order that the model's class does not take.

All orders have the same shape, so headers only show what qconvert.json states: a wrong order
loads silently. The actual order of the rows is found from the source, by content.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.family import Role
from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, OnlyRead
from qconvert.validation.runner import Folder, NotChecked, Yield, validator
from qconvert.validators.reading.matrices import FUSED, GROUPS_FACT, gdn_groups
from qconvert.validators.reading.model import (
    EXPERTS,
    LINEAR_ATTENTION,
    Present,
    Side,
    TwoForms,
    Where,
    draft_alone,
    forms_in,
    holds,
    known_family,
    member_of,
    stage_of,
)
from qconvert.validators.reading.prepared import prepared_tensors


@validator("the order of fused linear-attention rows is stated, or they are split", "gdn")
def gdn_stated(folder: Folder) -> Iterator[Yield]:
    checkpoint = folder.checkpoint
    if not any(f".{name}." in tensor for tensor in checkpoint for name in FUSED):
        return
    groups = gdn_groups(checkpoint)
    if groups is None:
        raise NotChecked(f"no valid {GROUPS_FACT} in {MANIFEST}, and the family has no convention")
    if folder.source is not None and folder.request.level != "headers":
        return
    said = (checkpoint.manifest or {}).get(GROUPS_FACT)
    who = f"says {MANIFEST}" if said else f"by the convention of {checkpoint.family.name}"
    count = f"{groups} group" + ("s" if groups > 1 else "")
    yield OnlyRead(
        f"linear attention is fused in {count}, {who} (--against SRC --level sample proves it)"
    )


@validator(
    "projections are fused or split, not mixed, complete, and in the form that the class takes",
    "model",
)
def projections(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    found = forms_in(checkpoint)
    yield from _side_by_side(found)
    yield from _layers_disagree(checkpoint, found)
    yield from _half_sets(checkpoint)
    yield from _form_of_class(folder, found)
    known_family(checkpoint)


def _own(forms: TwoForms, side: Side) -> frozenset[str]:
    """Members that only this form has: `down_proj` alone does not identify the form of experts, whose
    names differ only in their number."""
    return forms.members(side) if forms is not EXPERTS else forms.members(side) - {"down_proj"}


def _has(present: Present, forms: TwoForms, side: Side) -> bool:
    return bool(present.side(side).keys() & _own(forms, side))


def _side_by_side(found: dict[Where, Present]) -> Iterator[Finding]:
    for where, present in found.items():
        if present.fused and present.split:
            fused, split = (next(iter(side.values())) for side in (present.fused, present.split))
            message = f"exists together with {split!r}: {where.forms.what} both fused and split"
            yield Finding("QC016", "error", fused, message)


def _layers_disagree(checkpoint: Checkpoint, found: dict[Where, Present]) -> Iterator[Finding]:
    """For one projection in all layers; a layer with both forms is QC016's. If no family says which
    layers are alike (models with two kinds of attention have two forms by design), layers with
    the same modules next to the projection are compared."""
    forms: dict[tuple[TwoForms, str, str], dict[Side, list[str]]] = {}
    for where, present in found.items():
        if present.fused and present.split:
            continue
        side: Side = "fused" if present.fused else "split"
        if not _has(present, where.forms, side):
            continue
        layers = forms.setdefault((where.forms, where.stack, where.parent), {})
        layers.setdefault(side, []).append(next(iter(present.side(side).values())))
    for (form, _, _), sides in forms.items():
        if len(sides) == 2:
            rarer, usual = sorted(sides, key=lambda side: len(sides[side]))
            stated = checkpoint.family.name != "generic" and not checkpoint.family.class_name
            alike = stated or (
                _beside(checkpoint, form, sides[rarer][0])
                == _beside(checkpoint, form, sides[usual][0])
            )
            for name in sides[rarer] if alike else ():
                message = f"{form.what}: {rarer} here, {usual} in {len(sides[usual])} other layers"
                yield Finding("QC017", "error", name, message)


def _beside(checkpoint: Checkpoint, form: TwoForms, name: str) -> set[str]:
    """The other members of the module that has the projection."""
    parent = split_parameter(name)[0].rpartition(".")[0] + "."
    below = {split_parameter(n.removeprefix(parent))[0] for n in checkpoint if n.startswith(parent)}
    return below - form.fused - form.split


def _half_sets(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Roles of one form that no layer has, although layers must have it and have not the other form. A
    role that some layers have is QC013's."""
    role_index = checkpoint.role_index
    try:
        stage = stage_of(checkpoint)
    except PlanError:
        return  # QC054: the layers of this stage are unknown
    sets: dict[tuple[TwoForms, str], dict[Side, dict[str, Role]]] = {}
    for role in role_index.family.roles:
        member = member_of(role.module)
        if member is None or member.forms not in (EXPERTS, LINEAR_ATTENTION):
            continue
        if role.kind is Kind.EXPERT_UNKNOWN:  # of another form than these two
            continue
        layers = sets.setdefault((member.forms, role.layers), {})
        layers.setdefault(member.side, {})[member.name] = role
    for (forms, group), sides in sets.items():
        draft = group.startswith("mtp")
        if draft and not any(
            r.name in role_index.present for s in sides.values() for r in s.values()
        ):
            continue  # QC023: draft layers may be left out, as a whole
        layers_of = [
            n for n in role_index.dims.groups.get(group, ()) if holds(stage, n, draft=draft)
        ]
        there = {
            side: {n for n, role in roles.items() if role.name in role_index.present}
            for side, roles in sides.items()
        }
        if draft_alone(checkpoint) and not draft and not any(there.values()):
            continue  # of the model that it drafts for
        if forms is EXPERTS and prepared_tensors(checkpoint):
            continue  # QC106: their layers are counted there
        if not layers_of or any(there[side] == forms.members(side) for side in sides):
            continue
        side = max(sides, key=lambda side: len(there[side]))
        lacking = sorted((forms.members(side) - there[side]) & sides[side].keys())
        if not lacking:  # a derived family has no roles for what is not there
            continue
        where = sides[side][lacking[0]].module.removeprefix("@").replace("{L}", str(layers_of[0]))
        message = f"{forms.what}: {', '.join(lacking)} in none of {count(len(layers_of), 'layer')}"
        have = ", ".join(sorted(there[side]))
        yield Finding("QC018", "error", where, f"{message}, but {have}" if have else message)


def _form_of_class(folder: Folder, found: dict[Where, Present]) -> Iterator[Finding]:
    """Loaders of sglang, vLLM, transformers: Qwen3-Next's take tensors fused and
    interleaved by key head, Qwen3.5's split ones, and sglang's also those that are fused in one group.
    A layer with both forms is QC016's."""
    checkpoint = folder.checkpoint
    family, gdn = checkpoint.family.name, checkpoint.role_index.dims.gdn
    here = [present for where, present in found.items() if where.forms is LINEAR_ATTENTION]
    fused = [next(iter(one.fused.values())) for one in here if one.fused and not one.split]
    split = [next(iter(one.split.values())) for one in here if one.split and not one.fused]
    if family == "qwen3_next" and split and not fused:
        message = (
            f"is split, as in {count(len(split), 'layer')}, but no loader of qwen3_next takes it: the "
            "projections must be in_proj_qkvz and in_proj_ba, interleaved by key head"
        )
        yield Finding("QC052", "error", split[0], message)
    if family not in ("qwen3_5", "qwen3_next") or not fused:
        return
    groups = gdn_groups(checkpoint)
    if family == "qwen3_5" and (checkpoint.manifest or {}).get(GROUPS_FACT) is None:
        # With tensor data of the source, rows are compared. A mixture of forms is QC017's.
        if not split and (folder.source is None or folder.request.level == "headers"):
            message = (
                f"is fused, but no {MANIFEST} states the order: only sglang's qwen3_5 takes it, "
                "and only if contiguous; vLLM and transformers take split ones"
            )
            yield Finding("QC052", "warning", fused[0], message)
    elif groups is not None and gdn is not None:
        yield from _order_of_class(fused[0], groups, gdn[0], family)


def _order_of_class(fused: str, groups: int, heads: int, family: str) -> Iterator[Finding]:
    wanted = 1 if family == "qwen3_5" else heads
    if groups == wanted:
        return
    names = {1: "contiguous", heads: f"interleaved by {heads} key heads"}
    message = (
        f"is fused in {groups} groups ({names.get(groups, 'an order of one rank size only')}), but "
        f"the {family} class takes {wanted} ({names[wanted]})"
    )
    # Other orders are for files of single ranks, which are made on purpose.
    yield Finding("QC052", "error" if groups in names else "warning", fused, message)
