"""Layers, experts, draft layers and the vision tower must match the config's counts.

QC019 a tensor is in a layer, or belongs to an expert, that the config does not count.
QC023 draft (MTP) layers that the config counts are missing, as a whole or in part.
QC024 a vision tower without its config, or the other way round.

Missing tensors of the model itself are QC013's.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.family import Config, Role, RoleIndex, first_int, text_config, vision_config
from qconvert.core.names import KV_SCALES
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, validator
from qconvert.validators.reading.model import (
    EXPERTS,
    draft_alone,
    is_of_draft,
    known_family,
    member_of,
    stage_of,
)

# Draft layers that may take these from the model itself.
_SHARED = ("mtp.embed_tokens", "mtp.shared_head.head")
_K, _V = (f".{part}_proj{end}" for part, end in zip("kv", KV_SCALES, strict=True))
_VISION = ("visual.", "vision_tower.", "mm_projector.", "vision_model.")


@validator("layers, their parts, draft layers and vision tower match the config's counts", "model")
def counts(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    vision = vision_config(checkpoint.config)
    yield from _uncounted(checkpoint)
    yield from _vision(checkpoint, vision)
    try:
        stage = stage_of(checkpoint)
    except PlanError:
        return  # QC054: the layers of this stage are unknown
    if stage is None or stage.last:
        yield from _drafts(checkpoint)
    known_family(checkpoint)


def _uncounted(checkpoint: Checkpoint) -> Iterator[Finding]:
    role_index = checkpoint.role_index
    experts = role_index.dims.num_experts
    if role_index.family.name == "generic":
        return  # configs count experts by many keys, some without those that have no weights
    for name, place in role_index.places.items():
        if place.role.vision:
            continue  # a tower counts its experts itself (Dots 3)
        if place.expert is not None and place.expert >= experts:
            message = f"belongs to expert {place.expert}, but the config counts {experts}"
            yield Finding("QC019", "error", name, message)
    alone = draft_alone(checkpoint)  # whose layers may be numbered as the model's own
    for name in role_index.unknown:
        if alone and is_of_draft(checkpoint, name):
            continue
        if name.endswith(_V) and name.removesuffix(_V) + _K in role_index.places:
            continue  # Gemma 4's values are its keys in some layers, which runtimes scale apart
        roles, layer, _, _ = role_index.family.candidates(name)
        groups = sorted({role.layers for role in roles if role.layers not in ("", "*")})
        if groups and not _is_vision(name):
            message = f"is in layer {layer} of {'/'.join(groups)} layers, but the config has none"
            yield Finding("QC019", "error", name, message)


def _is_vision(name: str) -> bool:
    return name.startswith(_VISION) or any(f".{part}" in name for part in _VISION)


def _vision(checkpoint: Checkpoint, config: Config) -> Iterator[Finding]:
    role_index = checkpoint.role_index
    if not any(role.vision for role in role_index.family.roles):
        return  # a family without a tower, or an undescribed one
    tower = next((n for n, p in role_index.places.items() if p.role.vision), None)
    tower = tower or next((name for name in role_index.unknown if _is_vision(name)), None)
    if tower is not None and not config:
        message = "belongs to a vision tower, but config.json has no vision_config"
        yield Finding("QC024", "warning", tower, message)
    if (
        tower is None
        and config
        and not draft_alone(checkpoint)
        and not any(map(_is_vision, _dropped(checkpoint)))
    ):
        message = "has a vision_config, but the folder has no tensor of a vision tower"
        yield Finding("QC024", "error", "config.json", message)


def _dropped(checkpoint: Checkpoint) -> set[str]:
    rules = (checkpoint.manifest or {}).get("dropped", {})
    return {name for names in rules.values() for name in names if isinstance(name, str)}


def _drafts(checkpoint: Checkpoint) -> Iterator[Finding]:
    role_index = checkpoint.role_index
    family, dims = role_index.family, role_index.dims
    roles = [role for role in family.roles if role.name.startswith("mtp.")]
    if not roles or any(family.is_mtp(name, dims) for name in _dropped(checkpoint)):
        return
    present = set(role_index.present)
    if draft_alone(checkpoint):
        present |= {r.name for n in checkpoint for r in family.candidates(n)[0]}
    if not any(role.name in present for role in roles):
        text = text_config(checkpoint.config)
        stated = first_int(text, "num_nextn_predict_layers", "mtp_num_hidden_layers")
        if stated:
            message = (
                f"counts {stated} draft (MTP) layers, but none is present and no rule dropped them; "
                "`qconvert mtp graft` puts back those of the original model"
            )
            yield Finding("QC023", "warning", "config.json", message)
        return
    for role in roles:
        layers = dims.groups.get(role.layers, ()) if role.layers else (0,)
        if layers and role.name not in present and _needed(role, role_index):
            name = role.module.replace("{L}", str(layers[0]))
            message = "is missing, but other tensors of the draft (MTP) layers are present"
            yield Finding("QC023", "error", f"{name}.weight", message)


def _needed(role: Role, role_index: RoleIndex) -> bool:
    """Tell whether draft layers without this role are incomplete. Parts they share with the model's own
    layers must be the same in both; QC018 checks the form of experts."""
    member = member_of(role.module)
    if role.name in _SHARED or (member is not None and member.forms is EXPERTS):
        return False
    own = role.name.removeprefix("mtp.")
    return own in role_index.present or not any(
        body.name == own for body in role_index.family.roles
    )
