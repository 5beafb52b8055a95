"""The state of one rank as vLLM's loader of sharded states reads it: which rows and columns of which
tensor each parameter holds.

vLLM (`model_executor/model_loader/sharded_state_loader.py`, 0.33) copies the tensors of a rank's files
into the parameters of the model that it has built, under their own names, before anything is processed
for a kernel: so this is what a load of the checkpoint leaves, cut and fused, and nothing more. A name
that the model has not, and a parameter without one, end the load. Of two names of one parameter it takes
the one that sorts first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from qconvert.core.dtypes import Shape, TensorType
from qconvert.core.errors import PlanError
from qconvert.runtimes.classes.build import Built
from qconvert.runtimes.classes.record import architecture_of, class_record
from qconvert.runtimes.loading.parameters import (
    Convolution,
    Layout,
    Linear,
    Parameter,
    Shard,
    Sharded,
    Vocabulary,
    Whole,
)
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated, Setting
from qconvert.runtimes.vllm.quantization import refuse_forms
from qconvert.runtimes.vllm.schemes import ExpertPart
from qconvert.runtimes.vllm.simulator import built_rank

# Scales that each attention layer has as buffers, 1 unless it is told others
# (`layers/attention/attention.py`, set_default_quant_scales).
_OF_ATTENTION = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
# Scales of a cache that no tensor has are left at this (`layers/quantization/kv_cache.py`).
_UNSET = -1.0


class Taken(NamedTuple):
    """Rows [start, stop) of a tensor, seen as a matrix, which fill the parameter from row `at` on, with
    share `share` of the `of` equal shares of their columns."""

    tensor: str
    at: int
    start: int
    stop: int
    share: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter: its type, and what fills it, in order; rows that nothing fills are zeros. `number`:
    of one that no tensor fills."""

    type: TensorType
    taken: tuple[Taken, ...] = ()
    number: float | None = None


def rank_state(
    config: Mapping[str, Any], tensors: Mapping[str, TensorType], setting: Setting
) -> dict[str, Held]:
    """Every parameter of a rank by its name. Raises PlanError where vLLM refuses the folder, where its
    class or scheme is not known, and for a parameter that is filled in a way that is not."""
    try:
        refuse_forms(config, tensors)
        record = class_record("vllm", architecture_of(config))
        made, finder = built_rank(record, config, tensors, setting)
        found: dict[str, list[Taken]] = {}
        build = made.build
        if build.quantization.name not in ("", "fp8"):
            raise NotSimulated(f"{build.quantization.name}: which was not compared with its loader")
        for name, stored in sorted(tensors.items()):
            for target in finder.find(name, stored):
                held = build.aliases.get(target.name, target.name)
                if target.part is not None or target.beside:
                    raise NotSimulated(f"{name} fills a part of {held} that its class makes itself")
                parameter = build.parameters[held]
                found.setdefault(held, []).extend(
                    _taken(parameter, name, stored, target.shard, setting)
                )
    except (LoadRefused, NotSimulated) as error:
        raise PlanError(f"vLLM's sharded state is not known for this folder: {error}") from error
    state = {
        name: _held(name, parameter, found.get(name, []), tensors)
        for name, parameter in build.parameters.items()
    }
    return _named_once(made, state)


def _held(
    name: str, parameter: Parameter, taken: list[Taken], tensors: Mapping[str, TensorType]
) -> Held:
    """A parameter, if every row of it is filled once. Raises PlanError."""
    kind, at = TensorType(parameter.dtype, parameter.shape), 0
    if parameter.default and not taken:
        return Held(kind, number=_UNSET)
    rows, _ = _matrix(parameter.shape)
    ordered = sorted(taken, key=lambda one: one.at)
    dtypes = {tensors[one.tensor].dtype for one in ordered}
    for one in ordered:
        if one.at != at:
            raise PlanError(
                f"{name!r}: expected rows from {at} on, found {one.tensor!r} at {one.at}"
            )
        at += one.stop - one.start
    padded = isinstance(parameter.slot, Vocabulary)
    if at != rows and not padded:
        raise PlanError(f"{name!r}: {rows - at} of its {rows} rows have no tensor in the folder")
    if len(dtypes) > 1:
        raise PlanError(
            f"{name!r}: expected tensors of one type, found {', '.join(sorted(dtypes))}"
        )
    # The loader casts what is stored in another type, as a load of the checkpoint would.
    return Held(TensorType(dtypes.pop() if dtypes else kind.dtype, kind.shape), tuple(ordered))


def _named_once(made: Built, state: Mapping[str, Held]) -> dict[str, Held]:
    """The state with the first of each parameter's names, and the scales of attention."""
    modules: dict[str, str] = {}  # of linears that a class holds twice, with their scales
    single: dict[str, str] = {}
    for alias, name in made.build.aliases.items():
        one, other = alias.removesuffix(".weight"), name.removesuffix(".weight")
        renamed = single if one == alias else modules
        renamed[other] = min(renamed.get(other, other), one)
    found = {}
    for name, held in state.items():
        module, _, leaf = name.rpartition(".")
        found[single.get(name) or f"{modules.get(module, module)}.{leaf}"] = held
    number = Held(TensorType("F32", ()), number=1.0)
    for name, module_of in made.modules.items():
        if module_of.kind in ("attention", "latent_attention"):
            found |= {f"{name}.{leaf}": number for leaf in _OF_ATTENTION}
    return found


def _matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a shape: of experts [E, N, K] the rows of all."""
    if len(shape) == 3 and shape[1] != 1:
        return shape[0] * shape[1], shape[2]
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def _taken(
    parameter: Parameter, name: str, stored: TensorType, shard: Shard, setting: Setting
) -> Iterator[Taken]:
    """Rows of a tensor that go to a parameter, in vLLM's own ways: `model_executor/parameter.py`,
    `layers/linear.py`, `layers/fused_moe/routed_experts.py`, `layers/vocab_parallel_embedding.py`."""
    into, slot = parameter.shape, parameter.slot
    rows = stored.shape[0] if stored.shape else 1
    if (
        isinstance(slot, ExpertPart)
        and isinstance(shard, tuple)
        and slot.local(int(shard[0])) is None
    ):
        return  # another rank's
    if (silent := parameter.write(stored, shard)) is not None:  # its own check of shapes
        raise NotSimulated(f"{name}: {silent}")
    if isinstance(slot, Whole):
        yield Taken(name, 0, 0, rows)
    elif isinstance(slot, Sharded) and slot.dim == 0:
        yield Taken(name, 0, slot.rank * into[0], (slot.rank + 1) * into[0])
    elif isinstance(slot, Convolution):
        at = start = 0
        for size in slot.sizes:
            part = size // slot.tp
            first = start + slot.rank * part
            yield Taken(name, at, first, first + part)
            at, start = at + part, start + size
    elif isinstance(slot, Vocabulary):
        first = min(slot.rank * into[0], rows)
        yield Taken(name, 0, first, min(first + into[0], rows))
    elif isinstance(slot, ExpertPart):
        yield from _of_expert(slot, into, name, stored, shard, setting)
    elif isinstance(slot, Linear) and not slot.transposed and slot.packed == 1:
        yield from _of_linear(slot, into, name, rows, shard)
    else:
        raise NotSimulated(f"{name}: how ranks share {type(slot).__name__} parameters")


def _of_expert(
    slot: ExpertPart, into: Shape, name: str, stored: TensorType, shard: Shard, setting: Setting
) -> Iterator[Taken]:
    if slot.transposed or slot.finer != (1, 1) or slot.role not in ("weight", "group"):
        raise NotSimulated(f"{name}: experts of this scheme, which ranks hold otherwise")
    assert isinstance(shard, tuple)
    expert, which = shard
    assert isinstance(expert, int)
    here = slot.local(expert)
    assert here is not None
    tall, rank = into[1], setting.rank % setting.moe_tp
    if which == "w2":
        yield Taken(name, here * tall, 0, tall, rank, setting.moe_tp)
        return
    size = tall // (1 + slot.gated)
    at = here * tall + (size if which == "w3" else 0)
    yield Taken(name, at, rank * size, (rank + 1) * size)


def _of_linear(slot: Linear, into: Shape, name: str, rows: int, shard: Shard) -> Iterator[Taken]:
    layout, role = slot.layout, slot.role
    if role in ("tensor", "base"):
        raise NotSimulated(f"{name}: one number for a whole matrix, which ranks fuse otherwise")
    if layout.kind == "replicated" or (layout.kind == "row" and role in ("bias", "rows")):
        yield Taken(name, 0, 0, rows)
    elif layout.kind == "row":
        yield Taken(name, 0, 0, rows, layout.rank, layout.tp)
    elif layout.kind == "column":
        yield Taken(name, 0, layout.rank * into[0], (layout.rank + 1) * into[0])
    else:
        start = 0
        for number in _numbers(layout, name, shard):
            offset, size = slot.place(number)
            shared = layout.kind == "qkv" and number > 0
            rank = layout.rank // layout.replicas if shared else layout.rank
            ranks = layout.tp // layout.replicas if shared else layout.tp
            yield Taken(name, offset, start + rank * size, start + (rank + 1) * size)
            start += size * ranks


def _numbers(layout: Layout, name: str, shard: Shard) -> Sequence[int]:
    """Parts of a fused projection that a tensor is for. vLLM numbers those of a list from 0 again."""
    if isinstance(shard, str):
        return ["qkv".index(shard)]
    if isinstance(shard, int):
        return [shard]
    chosen = [n for n in shard if isinstance(n, int)] if shard else [*range(len(layout.outputs))]
    if chosen != [*range(len(chosen))]:
        raise NotSimulated(f"{name}: is for parts {chosen} of a projection, which fill others")
    return chosen
