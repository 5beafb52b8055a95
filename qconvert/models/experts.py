"""The routed experts of a plan, whichever way they are stored: one matrix each, or 3-D stacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.family import Place, expert_inputs
from qconvert.core.graph import Output, Source, Value, apply
from qconvert.core.int_scheme import CodePacker
from qconvert.core.names import ACTIVATIONS, NOTED, apart_experts, split_parameter
from qconvert.core.roles import Kind
from qconvert.formats.base import Stored
from qconvert.formats.registry import code_parameters, read_matrix, read_of_stack
from qconvert.models.calibrated import Calibrated
from qconvert.models.skip_reasons import DESCRIBE, check_experts
from qconvert.ops.rowwise import FloatDecoder
from qconvert.plan.plan import ELSEWHERE, Plan, check_names

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
KINDS = dict(zip(PROJECTIONS, (Kind.EXPERT_GATE, Kind.EXPERT_UP, Kind.EXPERT_DOWN), strict=True))
_PROJECTION = {kind: projection for projection, kind in KINDS.items()}
# Which projections a stack holds, the rows of the first before those of the second.
_STACKED: Mapping[Kind, tuple[str, ...]] = {
    Kind.STACKED_GATE_UP: ("gate_proj", "up_proj"), Kind.STACKED_GATE: ("gate_proj",),
    Kind.STACKED_UP: ("up_proj",), Kind.STACKED_DOWN: ("down_proj",),
}  # fmt: skip
_READ = frozenset((*_PROJECTION, *_STACKED))
# Of a matrix stored alone, the parameter that holds its numbers or codes.
# Ends of names beside a quantized weight that describe it alone: the shape of a packed one, scales of
# its activations.
STALE = (
    ".weight_shape",
    *(f".{end}" for end in NOTED),
    *(f"{mark}{end}" for mark in "._" for end in ACTIVATIONS),
)
STALE_RULE = f"{ELSEWHERE} what was noted beside expert weights, and is not of the new ones"


@dataclass(slots=True, unsafe_hash=True)
class Projection:
    """One matrix of one routed expert. `layer` counts the draft (MTP) layers on after the model's
    own, as DeepSeek numbers them. `kind` is one of PROJECTIONS, whatever the family calls it; `module`
    is the name its parameters would have apart."""

    layer: int
    expert: int
    kind: str
    draft: bool
    module: str
    weight: Stored


@dataclass(frozen=True)
class Experts:
    """All routed experts, in the order a model runs in; `taken`, every tensor that belongs to them;
    `stale`, those of them that describe the old weights alone; how many matrices the config's counts
    lead to, and modules beyond them."""

    projections: tuple[Projection, ...]
    taken: frozenset[str]
    stale: frozenset[str]
    expected: int
    extra: tuple[str, ...] = ()

    def without_drafts(self, plan: Plan) -> Experts:
        """Those of the model's own layers."""
        dims, family = plan.role_index.dims, plan.family

        def own(names: Iterable[str]) -> frozenset[str]:
            return frozenset(name for name in names if not family.is_mtp(name, dims))

        extra = set(self.extra)
        projections = tuple(p for p in self.projections if not p.draft)
        drafts = sum(p.draft and p.module not in extra for p in self.projections)
        beyond = tuple(p.module for p in projections if p.module in extra)
        return Experts(
            projections, own(self.taken), own(self.stale), self.expected - drafts, beyond
        )

    def of_layers(self, plan: Plan, layers: Set[int]) -> Experts:
        """Those of some layers, as `Projection.layer` numbers them; all of these are expected."""

        def own(names: Iterable[str]) -> frozenset[str]:
            return frozenset(name for name in names if expert_layer(plan, name) in layers)

        projections = tuple(p for p in self.projections if p.layer in layers)
        extra = set(self.extra)
        beyond = tuple(p.module for p in projections if p.module in extra)
        expected = len(projections) - len(beyond)
        return Experts(projections, own(self.taken), own(self.stale), expected, beyond)


def expert_layer(plan: Plan, name: str) -> int | None:
    """The number of the layer of a routed expert's tensor, as `Projection.layer` counts; None for
    another tensor."""
    place = plan.role_index.places.get(name)
    if place is None or place.layer is None or not place.role.kind.routed:
        return None
    dims = plan.role_index.dims
    later = place.layer < dims.num_layers and plan.family.is_mtp(name, dims)
    return place.layer + (dims.num_layers if later else 0)


def routed_experts(plan: Plan, settled: Set[str] = frozenset()) -> Experts:
    """Find every routed expert of a plan but those of `settled` modules, which an earlier step has
    quantized, whole layers of them. Raises PlanError for a family that layouts/ has not, a dense model,
    a matrix that is missing, of another shape than the config says, or in a form that is not read."""
    check_experts(plan, "use it as it is, or quantize other layers (w4a16 --targets Linear)")
    _check_dims(plan)
    names = [name for name in plan.tensors if plan.role_index.kind(name).routed]
    of_settled = {name for name in names if settled and split_parameter(name)[0] in settled}
    done = {layer for name in of_settled if (layer := expert_layer(plan, name)) is not None}
    found, read, used = _found(plan, of_settled)
    of_experts = [name for name in names if name not in of_settled]
    stale = frozenset(name for name in of_experts if name.endswith(STALE) and name not in used)
    taken = read | stale
    _check_all_read(plan, of_experts, taken)
    drafts = [layer for layer in _draft_layers(plan) if layer not in done]
    _check_complete(plan, found, drafts, done)
    projections = tuple(found[key] for key in sorted(found))
    return Experts(projections, taken, stale, *_expected(plan, projections, drafts, done))


def _check_dims(plan: Plan) -> None:
    dims = plan.role_index.dims
    if not dims.num_experts:
        raise PlanError("the config counts no experts, and there are tensors of experts")
    stated = {"hidden_size": dims.hidden_size, "moe_intermediate_size": dims.moe_intermediate_size}
    for setting, size in stated.items():
        if size < 1:
            raise PlanError(f"the config states no {setting}")


# A matrix by its layer, its expert, and which of PROJECTIONS it is.
_Found = dict[tuple[int, int, str], Projection]


def _found(plan: Plan, but: Set[str]) -> tuple[_Found, frozenset[str], set[str]]:
    """Every matrix of an expert, the tensors that belong to them, and those of which they are computed;
    `but` are tensors to leave out. Raises PlanError for one that is stored twice, that the config does
    not count, or of another shape than it says."""
    found: _Found = {}
    read: set[str] = set()
    used: set[str] = set()
    dims = plan.role_index.dims
    counted = dims.num_experts
    inputs = expert_inputs(plan.role_index, lambda name: plan.tensors[name].type)
    intermediate = dims.moe_intermediate_size
    for name, place in plan.role_index.places.items():
        if place.role.kind not in _READ or name in but:
            continue
        for projection, names in _read(plan, name, place):
            key = projection.layer, projection.expert, projection.kind
            if key in found:
                raise PlanError(f"{name!r}: {found[key].module!r} already exists in another form")
            if projection.expert >= counted:
                raise PlanError(f"{name!r}: the config counts {counted} experts")
            down = projection.kind == "down_proj"
            wanted = (inputs, intermediate) if down else (intermediate, inputs)
            if (projection.weight.rows, projection.weight.columns) != wanted:
                raise PlanError(_wrong_shape(plan, projection, name, wanted))
            found[key] = projection
            read.update(names)
            used.update(names[: len(projection.weight.args)])
    if not found:
        check_names(plan)
        raise PlanError("no routed expert found, although the config counts some")
    return found, frozenset(read), used


def _check_all_read(plan: Plan, of_experts: Iterable[str], known: Set[str]) -> None:
    """Raise PlanError for a tensor of an expert that would be lost: a bias, a second scale, an expert
    beyond the config's."""
    dims = plan.role_index.dims
    for name in of_experts:
        if name not in known:
            raise PlanError(
                f"{name!r}: belongs to an expert, and is none of the {dims.num_experts} experts' "
                f"weights in the config's {dims.num_layers} layers; biases are not computed by the "
                "kernels, and a weight has one scale"
            )


def _check_complete(plan: Plan, found: _Found, drafts: Iterable[int], done: Set[int]) -> None:
    """Raise PlanError for a layer that is not `done`, an expert or a matrix that is missing."""
    dims = plan.role_index.dims
    layers = dict.fromkeys((layer, p.draft) for (layer, _, _), p in found.items())
    for layer in dims.groups.get("moe", ()):
        if (layer, False) not in layers and layer not in done:
            raise PlanError(f"layer {layer}: its experts are missing")
    kinds = projections_of(plan)
    for layer, _ in layers:
        for expert in range(dims.num_experts):
            for kind in kinds:
                if (layer, expert, kind) not in found:
                    raise PlanError(f"layer {layer}: {kind} of expert {expert} is missing")
    for layer in drafts:
        if (layer, True) not in layers:
            raise PlanError(
                f"MTP layer {layer}: its experts are missing, and other MTP tensors are there"
            )


def _expected(
    plan: Plan,
    found: Sequence[Projection],
    drafts: Sequence[int] = (),
    done: Set[int] = frozenset(),
) -> tuple[int, tuple[str, ...]]:
    """Return how many matrices the experts of all the config's layers have that are not `done`, and of
    these draft layers, and the modules of those found that are in no such layer."""
    dims = plan.role_index.dims
    layers = {*dims.groups.get("moe", ()), *drafts} - done
    expected = len(layers) * dims.num_experts * len(projections_of(plan))
    return expected, tuple(p.module for p in found if p.layer not in layers)


def projections_of(plan: Plan) -> tuple[str, ...]:
    """Those of PROJECTIONS that an expert of the plan's model has."""
    return PROJECTIONS[1:] if plan.family.ungated else PROJECTIONS


def check_described(plan: Plan) -> None:
    """Raises PlanError for a model that no family describes. Nothing of it is quantized: what its
    tensors are cannot be told from their names."""
    if plan.family.name == "generic":
        raise PlanError(
            f"{plan.family.undescribed}: no file in layouts/ says which of its tensors are linear "
            "layers that runtimes load quantized, and qconvert quantizes no others (an embedding or a "
            "router in their place would load and generate garbage); copy, dequant, diff and validate "
            f"work; {DESCRIBE}"
        )


def calibrated(
    projection: Projection, packers: tuple[CodePacker, ...], digest: str
) -> tuple[tuple[Output, ...], ...]:
    """A matrix whose codes a calibration finds: the results of each packer. Raises PlanError where the
    matrix is of no size that one takes."""
    p = projection
    weight = of_checkpoint(p.module, p.weight)
    op = Calibrated(weight.decoder, packers, p.layer, p.expert, p.kind, digest)
    return solved_by(op, p.module, weight)


def of_checkpoint(module: str, weight: Stored) -> Stored:
    """A matrix as the checkpoint has it, from which a calibration reads: one that an earlier pass only
    decoded, as it was before. Raises PlanError for one that was computed otherwise."""
    found = _before_decoding(weight)
    if any(isinstance(piece.origin, Value) for arg in found.args for piece in arg.pieces):
        raise PlanError(
            f"{module} is computed by an earlier pass, and a calibration reads the checkpoint itself: "
            "make that pass a conversion of its own, or leave it out (FP8 and INT4 are decoded here too)"
        )
    return found


def _before_decoding(weight: Stored) -> Stored:
    """A matrix that is the whole result of a decoder, in BF16, of the tensors of one module."""
    (origin, start, stop), *more = weight.args[0].pieces
    if weight.decoder is not None or more or not isinstance(origin, Value):
        return weight
    op, args = origin.node.op, origin.node.args
    pieces = [piece.origin for arg in args for piece in arg.pieces]
    modules = {split_parameter(one.name)[0] for one in pieces if isinstance(one, Source)}
    whole = (start, stop) == (0, origin.type.nbytes) and origin.type.dtype == "BF16"
    if not (
        isinstance(op, FloatDecoder) and whole and origin.node.reads_sources and len(modules) == 1
    ):
        return weight
    return Stored(op, args, weight.rows, weight.columns)


def solved_by(op: Calibrated, module: str, weight: Stored) -> tuple[tuple[Output, ...], ...]:
    """Return what each packer of an op makes of a matrix. Raises PlanError where it is of no size that
    one takes."""
    try:
        results = iter(apply(op, *weight.args))
        kind = TensorType("BF16", (weight.rows, weight.columns))
        return tuple(tuple(next(results) for _ in packer.infer(kind)) for packer in op.packers)
    except PlanError as error:
        raise PlanError(f"{module}: {error}") from error


def _draft_layers(plan: Plan) -> list[int]:
    """Numbers of the draft layers that must have experts: all the config counts, where there is any
    draft tensor; none where they were left out as a whole."""
    dims = plan.role_index.dims
    if not plan.family.any_mtp(plan.tensors, dims):
        return []
    groups = dims.groups.get("mtp_moe", ())
    return [n if n >= dims.num_layers else n + dims.num_layers for n in groups]


def _read(plan: Plan, name: str, place: Place) -> Iterator[tuple[Projection, tuple[str, ...]]]:
    """The projections that a tensor of an expert's role begins: a weight its own, a stack those of all
    experts."""
    role = place.role.kind
    if place.layer is None:
        return
    if place.parameter not in (code_parameters() if role in _PROJECTION else ("", "weight")):
        return
    dims = plan.role_index.dims
    draft = plan.family.is_mtp(name, dims)
    layer = place.layer
    if draft and layer < dims.num_layers:
        layer += dims.num_layers
    if role in _PROJECTION:
        assert place.expert is not None
        module, _ = split_parameter(name)
        stored, names = read_matrix(plan, module)
        yield Projection(layer, place.expert, _PROJECTION[role], draft, module, stored), names
        return
    shape = plan.tensors[name].type.shape
    if len(shape) != 3 or shape[0] != dims.num_experts:
        raise PlanError(
            f"{name!r}: expected [{dims.num_experts} experts, rows, columns], found "
            f"{plan.tensors[name].type}"
        )
    transposed = is_transposed(plan)
    base, apart = apart_experts(name), plan.family.expert_names()
    for expert in range(dims.num_experts):
        stored, names = read_of_stack(plan, name, expert, transposed=transposed)
        height = stored.rows // len(_STACKED[role])
        for n, part in enumerate(_STACKED[role]):
            weight = stored.cut(n * height, (n + 1) * height)
            module = f"{base}.{expert}.{apart.get(KINDS[part], part)}"
            yield Projection(layer, expert, part, draft, module, weight), names


def is_transposed(plan: Plan) -> bool:
    """Return whether stacks hold columns before rows. transformers saves Qwen3-VL-MoE, which is
    published so, the other way round: gate_up [E, 2I, H], not [E, H, 2I]. Only shapes tell, and of a
    square matrix (H = I, or H = 2I) only those of the other stack."""
    if not plan.family.stacked_transposed:
        return False
    hidden = plan.role_index.dims.hidden_size
    for name, place in plan.role_index.places.items():
        shape = plan.tensors[name].type.shape if name in plan.tensors else ()
        if place.role.kind in _STACKED and len(shape) == 3 and shape[1] != shape[2]:
            return shape[1 if place.role.kind is Kind.STACKED_GATE_UP else 2] == hidden
    return True


def _wrong_shape(plan: Plan, projection: Projection, name: str, wanted: tuple[int, int]) -> str:
    found = projection.weight.rows, projection.weight.columns
    order = "[E, inputs, outputs]" if plan.family.stacked_transposed else "[E, outputs, inputs]"
    note = f" (stacks of {plan.family.name} are {order})"
    return (
        f"{projection.module}: expected [{wanted[0]}, {wanted[1]}] by the config's hidden_size "
        f"and moe_intermediate_size, found [{found[0]}, {found[1]}]"
        + (note if len(plan.tensors[name].type.shape) == 3 else "")
    )
