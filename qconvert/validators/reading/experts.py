"""The routed experts of a checkpoint by layer, projection and number, however they are stored.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.roles import Kind as RoleKind
from qconvert.validators.reading.forms import RAW
from qconvert.validators.reading.matrices import Matrix, matrices
from qconvert.validators.reading.nvfp4 import is_part

Kind = Literal["gate", "up", "down"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ROLES: Mapping[str, Kind] = {f"experts.{kind}_proj": kind for kind in KINDS}


@dataclass(frozen=True)
class Routed:
    """`matrices` by layer, projection and expert, draft layers numbered after the model's own;
    which layers are the model's `own` and which `drafts`."""

    matrices: Mapping[tuple[int, Kind, int], Matrix]
    own: frozenset[int]
    drafts: frozenset[int]


def routed_experts(checkpoint: Checkpoint) -> Routed:
    """Every routed expert. Raises PlanError for an undescribed family, a dense model, and a
    matrix that is missing, of another shape than the config says, or in an unsupported form."""
    if "amx" in (checkpoint.manifest or {}):
        raise PlanError("its experts are in a CPU kernel's format, but the source's are not")
    dims = checkpoint.role_index.dims
    if checkpoint.family.name == "generic":
        kind_of_model = checkpoint.config.get("model_type")
        raise PlanError(f"model_type {kind_of_model!r} is not known, so its experts are unknown")
    if not dims.num_experts:
        raise PlanError("the config counts no experts: it is a dense model")
    found: dict[tuple[int, Kind, int], Matrix] = {}
    own: set[int] = set()
    drafts: set[int] = set()
    for (role, layer, expert, parameter), matrix in matrices(checkpoint).items():
        stands = checkpoint.role_index.kind(matrix.tensor)
        named = ".experts." in matrix.tensor or stands.routed
        if not named or _is_beside(checkpoint, matrix.tensor):
            continue
        if stands is RoleKind.BUFFER:
            continue  # a router's bias that lies among them
        kind = _ROLES.get(role.removeprefix("mtp."))
        if kind is None or layer is None or expert is None or parameter != "weight":
            raise PlanError(f"{matrix.tensor!r}: {_why_not(matrix)}")
        if expert >= dims.num_experts:
            raise PlanError(f"{matrix.tensor!r}: the config counts {dims.num_experts} experts")
        _check_form(matrix)
        sizes = (dims.moe_intermediate_size, dims.hidden_size)
        wanted = sizes[::-1] if kind == "down" else sizes
        if matrix.shape != wanted:
            raise PlanError(
                f"{matrix.tensor!r}: expected {list(wanted)} for {kind}_proj by the config's sizes, "
                f"found {list(matrix.shape)}"
            )
        draft = checkpoint.family.is_mtp(matrix.tensor, dims)
        number = layer + dims.num_layers if draft and layer < dims.num_layers else layer
        (drafts if draft else own).add(number)
        found[number, kind, expert] = matrix
    _check_whole(checkpoint, found, own | drafts)
    return Routed(found, frozenset(own), frozenset(drafts))


def _is_beside(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a scale of activations, or the shape of packed weights."""
    return name.endswith((".input_scale", ".weight_shape")) or is_part(checkpoint, name)


def _why_not(matrix: Matrix) -> str:
    return matrix.note or "belongs to an expert, but is not a weight that the config counts"


def _check_form(matrix: Matrix) -> None:
    if matrix.note or matrix.format == RAW:
        why = matrix.note or f"{matrix.form.weight.type.dtype} weights are not supported"
        raise PlanError(f"{matrix.tensor!r}: {why}")


def _check_whole(
    checkpoint: Checkpoint, found: Mapping[tuple[int, Kind, int], Matrix], layers: set[int]
) -> None:
    """Raises PlanError if an expert is missing in a layer that has some, or that must have them."""
    dims = checkpoint.role_index.dims
    wanted = layers | set(dims.groups.get("moe", ()))
    if checkpoint.family.any_mtp(checkpoint, dims):
        drafts = dims.groups.get("mtp_moe", ())
        wanted |= {n if n >= dims.num_layers else n + dims.num_layers for n in drafts}
    for layer in sorted(wanted):
        for expert in range(dims.num_experts):
            for kind in KINDS:
                if (layer, kind, expert) not in found:
                    raise PlanError(f"layer {layer}: {kind}_proj of expert {expert} is missing")
