"""merge: adapters (LoRA, rsLoRA, DoRA, or deltas of weights) become a part of the model's weights.

A matrix is read by its format's decoder, adapters are added in float32 in the order in which they are
given, and the sum is rounded once to the dtype of the weight, or quantized anew in the scheme that it is
stored in. Tensors that no adapter names keep their bytes. peft adds in the dtype of the weight, so that
its BF16 results are rounded twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import ClassVar, Literal

from qconvert.checkpoint.adapter import Adapted, Adapter, adapted
from qconvert.core.dtypes import Shape
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply, concat, stack
from qconvert.core.manifest_keys import MERGED
from qconvert.core.shown import count
from qconvert.formats.base import Stored
from qconvert.formats.floats.format import plain
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.mx.decode import DequantMxfp4
from qconvert.formats.mx.format import stacks
from qconvert.formats.registry import encoded, read_matrix, read_of_stack
from qconvert.models.adapters import Change, Runs, Spot, Targets, changes
from qconvert.models.experts import STALE, is_transposed
from qconvert.ops.cast import FLOAT_DTYPES, DequantTo, ToBf16
from qconvert.ops.merge import Block, Factor
from qconvert.ops.merge import Merge as Merged
from qconvert.ops.rowwise import FloatDecoder, Recode
from qconvert.passes.dequant import Dequant
from qconvert.passes.replace_weights import replace_weights, sources_of
from qconvert.passes.requantize import encoded_anew, step_of
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

REPLACED_RULE = "merge: replaced by the adapter's own tensor"
STALE_RULE = "merge: shapes and activation scales beside weights that are numbers now"

# A matrix of the plan: a module, or a tensor that holds a stack and the number of an expert in it.
_Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Merge:
    """Add adapters (LoRA) to the weights.

    `adapters` are folders, added in this order, each times its `scale` (one for all, or one each).
    `requantize`: a quantized matrix that changes is quantized in its scheme again (`same`), or the whole
    model is written in BF16 (`bf16`).

    Raises PlanError for an adapter of a kind that is not merged here, for a target that the model has
    not, or in another shape, and for a scheme that is not written here.
    """

    name: ClassVar[str] = "merge"

    adapters: tuple[str, ...]
    scale: tuple[float, ...] = (1.0,)
    requantize: Literal["same", "bf16"] = "same"

    def __post_init__(self) -> None:
        if not self.adapters:
            raise PlanError("expected one adapter or more, found none")
        if not all(map(isfinite, self.scale)):
            raise PlanError(f"expected finite scales, found {list(self.scale)}")
        if len(self.scale) not in (1, len(self.adapters)):
            raise PlanError(
                f"expected one scale, or {len(self.adapters)}, one for each adapter; found "
                f"{len(self.scale)}"
            )

    def __call__(self, plan: Plan) -> Plan:
        if isinstance(plan.checkpoint, Adapted):
            raise PlanError("adapters are merged in one step: name all of them in it")
        both = adapted(plan.checkpoint, self.adapters)
        plan = replace(plan, checkpoint=both)
        scales = self.scale * (len(both.adapters) if len(self.scale) == 1 else 1)
        found = _Changes(plan, Targets(plan))
        for adapter, scale in zip(both.adapters, scales, strict=True):
            found.add(adapter, scale)
        tensors = found.tensors(whole=self.requantize == "bf16")
        records = [
            {"name": one.name, "digest": one.digest, "scale": scale}
            for one, scale in zip(both.adapters, scales, strict=True)
        ]
        options = options_of(self, adapters=records)
        entry = LogEntry(self.name, options, found.count, None, tuple(found.notes()), "parameters")
        dropped = {**plan.dropped, **found.dropped}
        made = plan.logged(
            entry, tensors=tensors, dropped=dropped, facts={**plan.facts, MERGED: records}
        )
        if self.requantize == "same" or not plan.checkpoint.quantization_configs:
            return made
        if _is_encoded(made):
            return Dequant()(made)
        return replace_weights(plan, entry, tensors, dropped=dropped, facts=made.facts)


def _is_encoded(plan: Plan) -> bool:
    """Return whether any weight is still quantized."""
    if any(output.type.dtype in WEIGHT_DTYPES for output in plan.tensors.values()) or stacks(plan):
        return True
    return any(stored.decoder is not None for _, (stored, _) in encoded(plan))


@dataclass
class _Changes:
    """Matrices and vectors that adapters change, as they are read with what is added."""

    plan: Plan
    targets: Targets
    matrices: dict[_Key, Stored] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    vectors: dict[str, Stored] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    count: int = 0
    shared: int = 0

    def notes(self) -> list[str]:
        if not self.shared:
            return []
        return [
            f"{count(self.shared, 'matrix', 'matrices')} quantized anew with those they share a scale"
        ]

    def add(self, adapter: Adapter, scale: float) -> None:
        low_rank: dict[_Key, list[tuple[Spot, Change]]] = defaultdict(list)
        for change in changes(adapter, scale, self.targets.pick):
            if change.how in ("lora", "dora"):
                for spot in self._spots(adapter, change):
                    low_rank[spot.name, spot.expert].append((spot, change))
            else:
                self._whole(adapter, change)
            self.count += 1
        for key, terms in low_rank.items():
            try:
                stored = self._matrix(key)
                square = key[1] is not None and stored.decoder is None and self.transposed
                self.matrices[key] = _with_factors(stored, terms, square=square)
            except PlanError as error:
                raise PlanError(f"{adapter.name}: {_called(key, terms)}: {error}") from error

    def _spots(self, adapter: Adapter, change: Change) -> list[Spot]:
        found = self.targets.spots(change.module)
        if not found:
            raise PlanError(_unmatched(self.plan, adapter, change))
        return found

    def _matrix(self, key: _Key) -> Stored:
        if key not in self.matrices:
            self.matrices[key] = _raw(_read(self.plan, *key))
        return self.matrices[key]

    def _whole(self, adapter: Adapter, change: Change) -> None:
        """A tensor that is added to one of the plan, or takes its place."""
        assert change.values is not None
        own = self.targets.named(change.module)
        name = f"{own or change.module}.{change.parameter}".rstrip(".")
        tensor, values = self.plan.tensors.get(name), change.values
        if tensor is None and own is None:
            raise PlanError(_unmatched(self.plan, adapter, change))
        if tensor is None and change.parameter not in ("", "weight"):
            raise PlanError(
                f"{adapter.name}: {change.names[0]!r} is for {name!r}, which "
                f"{self.plan.checkpoint.name} has not: serve the adapter beside the model, or train it "
                "without one (lora_bias)"
            )
        kind = values.type
        if tensor is None or len(tensor.type.shape) == 2:  # a matrix, in codes perhaps
            key: _Key = (own or change.module, None)
            stored = self._matrix(key)
            _check_shape(adapter, change, name, (stored.rows, stored.columns), kind.shape)
            if change.how == "delta":
                op = Merged(stored.decoder, "delta", change.scale)  # type: ignore[arg-type]
                self.matrices[key] = replace(stored, decoder=op, args=(*stored.args, values))
            else:
                self.matrices[key] = Stored(None, (values,), stored.rows, stored.columns)
                self.replaced.add(key[0])
            return
        _check_shape(adapter, change, name, tensor.type.shape, kind.shape)
        if tensor.type.dtype not in FLOAT_DTYPES:
            raise PlanError(f"{adapter.name}: {name!r} is {tensor.type}, and no numbers to add to")
        width = kind.shape[-1] if kind.shape else 1
        flat = (max(1, kind.numel // max(1, width)), width)
        added = values.reshape(flat)
        if change.how == "replace":
            self.dropped |= sources_of(self.plan, [name], REPLACED_RULE)
            self.vectors[name] = Stored(None, (added,), *flat)
            return
        stored = self.vectors.get(name) or Stored(None, (tensor.reshape(flat),), *flat)
        op = Merged(stored.decoder, "delta", change.scale)  # type: ignore[arg-type]
        self.vectors[name] = replace(stored, decoder=op, args=(*stored.args, added))

    @cached_property
    def transposed(self) -> bool:
        """Return whether stacks in numbers are [E, inputs, outputs]: of square ones no shape tells."""
        return is_transposed(self.plan)

    # --- results

    def tensors(self, *, whole: bool) -> dict[str, Output]:
        """The plan's tensors with the changed ones in their place, matrices in BF16 where `whole`."""
        made: dict[str, Output] = {}
        for name, stored in self.vectors.items():
            kind = self.plan.tensors[name].type
            made[name] = _written(stored, kind.dtype).reshape(kind.shape)
        away: set[str] = set()
        anew: dict[str, Stored] = {}
        experts: dict[str, dict[int, Stored]] = defaultdict(dict)
        for (name, expert), stored in self.matrices.items():
            if expert is not None:
                experts[name][expert] = stored
                continue
            before, names = read_matrix(self.plan, name)
            used = names[: len(before.args)]
            if name in self.replaced:
                self.dropped |= sources_of(self.plan, used, REPLACED_RULE)
            if before.decoder is None or isinstance(before.decoder, ToBf16):
                made[names[0]] = _written(stored, self.plan.tensors[names[0]].type.dtype)
            elif whole:
                ends = [f"{name}{end}" for end in STALE if f"{name}{end}" in self.plan.tensors]
                away.update((*names, *ends))
                beside = sorted({*names[len(used) :], *ends}.difference(used))
                self.dropped |= sources_of(self.plan, beside, STALE_RULE)
                made[f"{name}.weight"] = _written(stored, "BF16")
            else:
                anew[name] = stored if stored.decoder else plain(name, stored.args[0])
        for module, new in encoded_anew(self.plan, anew):
            made.update(new)
            self.shared += module not in anew
        for name, each in experts.items():
            new, names = _stack(self.plan, name, each, whole=whole)
            away.update(names)
            made.update(new)
        found = {}
        for name, output in self.plan.tensors.items():
            if name in made:
                found[name] = made.pop(name)
            elif name not in away:
                found[name] = output
        return {**found, **made}


def _read(plan: Plan, name: str, expert: int | None) -> Stored:
    """A matrix as it is stored: one of a stack in the stack's own orientation."""
    if expert is None:
        return read_matrix(plan, name)[0]
    if (packed := stacks(plan).get(name)) is not None:
        codes, scale = (plan.tensors[one].index(expert) for one in packed)
        rows, blocks, size = codes.type.shape
        args = codes.reshape((rows, blocks * size)), scale
        return Stored(DequantMxfp4(), args, rows, 2 * blocks * size)
    if plan.tensors[name].type.dtype in WEIGHT_DTYPES:
        return read_of_stack(plan, name, expert, transposed=False)[0]
    matrix = plan.tensors[name].index(expert)
    return Stored(None, (matrix,), *matrix.type.shape)


def _raw(stored: Stored) -> Stored:
    """The same without a rounding to BF16: F16 and F32 as they are, and what an earlier pass decodes by
    its decoder."""
    if isinstance(stored.decoder, ToBf16):
        return replace(stored, decoder=None)
    if stored.decoder is None:
        node = stored.args[0].node
        if node is not None and isinstance(node.op, FloatDecoder):
            return replace(stored, decoder=node.op, args=node.args)
        return stored
    if not isinstance(stored.decoder, FloatDecoder):
        raise PlanError("its format is decoded to bf16 only: dequantize first")
    return stored


def _written(stored: Stored, dtype: str) -> Output:
    """The matrix in numbers of this dtype."""
    decoder = stored.decoder
    if decoder is None:
        (values,) = stored.args
        if values.type.dtype == dtype:
            return values
        if dtype == "BF16":
            return apply(ToBf16(), values)[0]
        raise PlanError(
            f"expected {dtype} as the model has it, found {values.type}: convert it first"
        )
    if dtype == "BF16":
        return apply(decoder, *stored.args)[0]
    return apply(DequantTo(decoder, dtype), *stored.args)[0]  # type: ignore[arg-type]


def _stack(
    plan: Plan, name: str, each: Mapping[int, Stored], *, whole: bool
) -> tuple[dict[str, Output], tuple[str, ...]]:
    """A stack with changed experts, and the names of what it takes the place of. Experts that do not
    change keep their codes."""
    packed = stacks(plan).get(name)
    names: tuple[str, ...] = packed or (name,)
    if packed is None and plan.tensors[name].type.dtype in WEIGHT_DTYPES:
        names = read_of_stack(plan, name, 0, transposed=False)[1]
    experts = range(plan.tensors[names[0]].type.shape[0])
    if len(names) == 1:
        tensor = plan.tensors[name]
        kept = [
            _written(each[n], tensor.type.dtype) if n in each else tensor.index(n) for n in experts
        ]
        return {name: stack(kept)}, names
    stored = {n: each.get(n) or _read(plan, name, n) for n in experts}
    if whole and packed is None:
        return {name: stack([_written(stored[n], "BF16") for n in experts])}, names
    if whole:
        raise PlanError(
            f"{name!r}: gpt-oss's stacks are transposed in BF16: run `dequant` first, as a recipe of "
            "`dequant` and `merge` does in one read"
        )
    step = step_of(plan, name, _read(plan, name, 0), tuple(names))
    rows: list[tuple[Output, ...]] = []
    for n in experts:
        if n not in each:
            rows.append(tuple(plan.tensors[one].index(n) for one in names))
        else:
            made = apply(Recode(stored[n].decoder, (step.encoder(),)), *stored[n].args)
            wanted = [plan.tensors[one].type.shape[1:] for one in names]
            rows.append(tuple(o.reshape(s) for o, s in zip(made, wanted, strict=True)))
    return {one: stack([row[i] for row in rows]) for i, one in enumerate(names)}, names


# --- Factors -------------------------------------------------------------------------------------


def _with_factors(stored: Stored, terms: Sequence[tuple[Spot, Change]], *, square: bool) -> Stored:
    """The matrix with the low-rank changes of one adapter; `square`: one of as many rows as columns is
    [inputs, outputs]. Raises PlanError where they do not fit."""
    rows, columns = stored.rows, stored.columns
    lefts: list[tuple[Output, Block]] = []
    rights: list[tuple[Output, Block]] = []
    sizes: list[tuple[Output, Block]] = []
    at = 0
    for spot, change in terms:
        (left, block), right, other, rank = _term(spot, change, rows, columns, square)
        lefts.append((left, replace(block, at=at)))
        rights.append((right, replace(other, runs=((at, at + rank),))))
        if change.magnitude is not None:
            flat = change.magnitude.reshape((change.magnitude.type.numel, 1))
            sizes.append((_rows(flat, spot.of), Block(spot.at or ((0, rows),))))
        at += rank
    args = [
        apply(Factor(rows, at, tuple(b for _, b in lefts)), *(o for o, _ in lefts))[0],
        apply(Factor(at, columns, tuple(b for _, b in rights)), *(o for o, _ in rights))[0],
    ]
    if sizes:
        unset = Factor(rows, 1, tuple(b for _, b in sizes), unset=True)
        args += apply(unset, *(o for o, _ in sizes))
    op = Merged(stored.decoder, "dora" if sizes else "lora")  # type: ignore[arg-type]
    apply(op, *stored.args, *args)  # what does not fit is refused here
    return replace(stored, decoder=op, args=(*stored.args, *args))


def _term(
    spot: Spot, change: Change, rows: int, columns: int, square: bool
) -> tuple[tuple[Output, Block], Output, Block, int]:
    """B and its place in the left factor; A, its place in the right one, and the rank."""
    assert change.left is not None
    assert change.right is not None
    left, right, rank, expert = change.left, change.right, change.rank, spot.of_expert
    first, step = 0, 1
    if len(left.type.shape) == 3 or len(right.type.shape) == 3:  # of each expert, or shared by all
        expert = expert or 0
        left, right = (_of(one, expert) for one in (left, right))
    elif expert is not None and right.type.shape[0] != rank:
        right = right.rows(expert * rank, (expert + 1) * rank)
        first, step = expert, left.type.shape[1] // rank
    out, into = left.type.shape[0], right.type.shape[1]
    placed = spot.at or ((0, rows),)
    height = sum(stop - start for start, stop in placed)
    turned = change.transposed or (square if rows == columns else (out, into) == (columns, rows))
    if turned and (out, into) == (columns, rows) and spot.of is None and spot.at is None:
        return (
            (right, Block(placed, scale=change.scale, transposed=True)),
            left, Block((), first=first, step=step, transposed=True), rank,
        )  # fmt: skip
    ends = [stop for _, stop in spot.of or ()]
    source = left if not ends or max(ends) > out else _rows(left, spot.of)
    if source.type.shape[0] != height or into != columns:
        raise PlanError(
            f"expected A [{rank}, {columns}] and B [{height}, {rank}], found {change.right.type} and "
            f"{change.left.type}; the adapter is of another base, or of another class of it"
        )
    return (source, Block(placed, 0, change.scale, first, step)), right, Block(()), rank


def _of(one: Output, expert: int) -> Output:
    """The matrix of an expert in [E, n, m], or in [1, n, m] for all."""
    if len(one.type.shape) != 3:
        return one
    return one.index(min(expert, one.type.shape[0] - 1))


def _rows(matrix: Output, runs: Runs | None) -> Output:
    return matrix if runs is None else concat([matrix.rows(start, stop) for start, stop in runs])


# --- Messages ------------------------------------------------------------------------------------


def _called(key: _Key, terms: Iterable[tuple[Spot, Change]]) -> str:
    names = ", ".join(dict.fromkeys(name for _, change in terms for name in change.names))
    return f"{names} for {key[0]}{'' if key[1] is None else f', expert {key[1]}'}"


def _check_shape(adapter: Adapter, change: Change, name: str, wanted: Shape, found: Shape) -> None:
    if tuple(wanted) != tuple(found):
        raise PlanError(
            f"{adapter.name}: {change.names[0]!r}: expected {list(wanted)} as {name!r} of the model "
            f"has, found {list(found)}; the adapter is of another base"
        )


def _unmatched(plan: Plan, adapter: Adapter, change: Change) -> str:
    tied = plan.family.tied
    said = "the adapter is of another base, or of another class of it"
    if tied is not None and plan.role_index.dims.tied and change.module.endswith(tied[0]):
        said = (
            "the config ties it to the embeddings, which alone are stored: leave this tensor out of the "
            "adapter where both are one, else store the head apart first (a copy of the embeddings as "
            f"'{change.module}.weight', tie_word_embeddings false)"
        )
    return (
        f"{adapter.name}: {change.names[0]!r} is for {change.module!r}, which "
        f"{plan.checkpoint.name} has not; {said}"
    )


PASSES = (Merge,)
