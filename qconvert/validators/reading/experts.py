"""The routed experts of a checkpoint by layer, projection and number, however they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.roles import Kind as RoleKind
from qconvert.validators.reading.forms import RAW
from qconvert.validators.reading.matrices import Matrix, each_matrix, matrices
from qconvert.validators.reading.quantization_tensors import is_of_activations

Kind = Literal["gate", "up", "down"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ROLES: Mapping[str, Kind] = {f"experts.{kind}_proj": kind for kind in KINDS}


_At = tuple[int, Kind, int]  # layer, projection, expert


@dataclass(frozen=True)
class Routed:
    """`matrices` by layer, projection and expert, draft layers numbered after the model's own;
    which layers are the model's `own` and which `drafts`."""

    matrices: Mapping[_At, Matrix]
    own: frozenset[int]
    drafts: frozenset[int]


@dataclass(slots=True)
class _Found:
    """A routed expert's matrix, and where it belongs."""

    at: _At
    draft: bool
    matrix: Matrix


def routed_experts(checkpoint: Checkpoint) -> Routed:
    """Every routed expert. Raises PlanError for an undescribed family, a dense model, and a
    matrix that is missing, of another shape than the config says, or in an unsupported form."""
    layers = _Layers()
    found = {
        one.at: one.matrix for one in _noted(checkpoint, layers, matrices(checkpoint).values())
    }
    _check_whole(checkpoint, layers)
    return Routed(found, frozenset(layers.own), frozenset(layers.drafts))


def routed_layers(checkpoint: Checkpoint) -> tuple[frozenset[int], frozenset[int]]:
    """The layers of `routed_experts`, own and drafts, checked as there; no matrix is kept."""
    layers = _Layers()
    for _ in _noted(checkpoint, layers, each_matrix(checkpoint)):
        pass
    _check_whole(checkpoint, layers)
    return frozenset(layers.own), frozenset(layers.drafts)


@dataclass
class _Layers:
    """Layers of the model's own and of drafts, and which experts of a layer and projection there are: a
    byte for each."""

    own: set[int] = field(default_factory=set)
    drafts: set[int] = field(default_factory=set)
    seen: dict[tuple[int, Kind], bytearray] = field(default_factory=dict)


def _noted(
    checkpoint: Checkpoint, layers: _Layers, candidates: Iterable[Matrix]
) -> Iterator[_Found]:
    """Routed experts, noted in `layers`. Raises PlanError for one that comes twice, too."""
    experts = checkpoint.role_index.dims.num_experts
    for one in _routed(checkpoint, candidates):
        layer, kind, expert = one.at
        seen = layers.seen.get((layer, kind))
        if seen is None:
            seen = layers.seen[layer, kind] = bytearray(experts)
        if seen[expert]:
            raise PlanError(f"{one.matrix.tensor!r}: {_why_not(one.matrix)}")
        seen[expert] = 1
        (layers.drafts if one.draft else layers.own).add(layer)
        yield one


def _routed(checkpoint: Checkpoint, candidates: Iterable[Matrix]) -> Iterator[_Found]:
    if "amx" in (checkpoint.manifest or {}):
        raise PlanError("its experts are in a CPU kernel's format, but the source's are not")
    dims = checkpoint.role_index.dims
    if checkpoint.family.name == "generic":
        kind_of_model = checkpoint.config.get("model_type")
        raise PlanError(f"model_type {kind_of_model!r} is not known, so its experts are unknown")
    if not dims.num_experts:
        raise PlanError("the config counts no experts: it is a dense model")
    kind_of = checkpoint.role_index.kind
    for matrix in candidates:
        role, layer, expert, parameter = matrix.key
        stands = kind_of(matrix.tensor)
        named = stands.routed or ".experts." in matrix.tensor
        if not named or _is_beside(checkpoint, matrix.tensor):
            continue
        if stands is RoleKind.BUFFER or role.startswith("vision."):
            continue  # a router's bias that lies among them; experts of a tower
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
        yield _Found((number, kind, expert), draft, matrix)


def _is_beside(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a tensor is a scale of activations, or the shape of packed weights."""
    return name.endswith(".weight_shape") or is_of_activations(checkpoint, name)


def _why_not(matrix: Matrix) -> str:
    return matrix.note or "belongs to an expert, but is not a weight that the config counts"


def _check_form(matrix: Matrix) -> None:
    if matrix.note or matrix.format == RAW:
        why = matrix.note or f"{matrix.form.weight.type.dtype} weights are not supported"
        raise PlanError(f"{matrix.tensor!r}: {why}")


def _check_whole(checkpoint: Checkpoint, layers: _Layers) -> None:
    """Raises PlanError if an expert is missing in a layer that has some, or that must have them."""
    dims = checkpoint.role_index.dims
    wanted = layers.own | layers.drafts | set(dims.groups.get("moe", ()))
    if checkpoint.family.any_mtp(checkpoint, dims):
        drafts = dims.groups.get("mtp_moe", ())
        wanted |= {n if n >= dims.num_layers else n + dims.num_layers for n in drafts}
    for layer in sorted(wanted):
        for expert in range(dims.num_experts):
            for kind in KINDS:
                if not layers.seen.get((layer, kind), bytes(dims.num_experts))[expert]:
                    raise PlanError(f"layer {layer}: {kind}_proj of expert {expert} is missing")
