"""Changes that an adapter makes to a model's parameters, as peft computes them.

Read in peft 0.21 (`tuners/lora/layer.py`, `tuners/lora/dora.py`, `utils/save_and_load.py`): a module's
weight [out, in] becomes W + scale * B A, transposed where the weight is [in, out] (fan_in_fan_out,
embeddings); scale = alpha / r, or alpha / sqrt(r) with use_rslora. A parameter of all experts
(target_parameters) has A [E r, in], expert by expert, and B [out, r E], in which each expert has every
E-th column.

Matrices of a plan that a parameter of the class stands for: under another prefix, fused or split,
one matrix an expert or stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import sqrt
from typing import Any, Literal

from qconvert.checkpoint.adapter import Adapter
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.family import text_config
from qconvert.core.graph import Output
from qconvert.core.names import parse, split_parameter
from qconvert.core.row_order import RowOrder
from qconvert.formats.mx.format import stacks
from qconvert.formats.registry import code_parameters, read_matrix
from qconvert.models.experts import PROJECTIONS, routed_experts
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.plan.plan import Plan

Runs = tuple[tuple[int, int], ...]
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
# Projections by the segments of rows that they hold; those of a group are the parts of one another.
_FUSED: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"qkv_proj": ("q", "k", "v"), "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",)},
    {"gate_up_proj": ("gate", "up"), "gate_proj": ("gate",), "up_proj": ("up",)},
    {"in_proj_qkvz": ("q", "k", "v", "z"), "in_proj_qkv": ("q", "k", "v"), "in_proj_z": ("z",)},
    {"in_proj_ba": ("b", "a"), "in_proj_b": ("b",), "in_proj_a": ("a",)},
)
_EXPERT = re.compile(r"(.*\bexperts)(?:\.(\d+))?\.(\w+)")
_OF_EXPERTS = {
    "gate_up_proj": ("gate_proj", "up_proj"), **{one: (one,) for one in PROJECTIONS},
    "w1": ("gate_proj",), "w3": ("up_proj",), "w2": ("down_proj",),
}  # fmt: skip
_GDN_GROUPS = "gdn_groups"


@dataclass(frozen=True)
class Spot:
    """Rows `at` of a stored matrix, which are rows `of` of the target's (None: all of them). `name` is a
    module, or a tensor that holds a stack, of which it is this `expert`; `of_expert` is the one of the
    target that it belongs to."""

    name: str
    expert: int | None = None
    at: Runs | None = None
    of: Runs | None = None
    of_expert: int | None = None


@dataclass(frozen=True)
class Targets:
    """Look-up in one plan."""

    plan: Plan
    _known: dict[str, str | None] = field(default_factory=dict)

    def spots(self, target: str) -> list[Spot]:
        """Places of a module's weight, or of a parameter of all experts; [] where the plan has none."""
        if (own := self.named(target)) is not None:
            if own in self._stacked:
                return [Spot(own, n, of_expert=n) for n in range(self._stacked[own])]
            return [Spot(own)]
        return self._of_expert(target) or self._of_parts(target)

    def named(self, target: str) -> str | None:
        """The module, or the tensor of a stack, that is called so, or so under another prefix, or as the
        family calls what the class calls so."""
        if target not in self._known:
            published = {own: name for name, own in self.plan.family.class_names.items()}
            names = [target]
            found = parse(target)
            if (other := published.get(found.template)) is not None:
                numbers = other.replace("{L}", str(found.layer)).replace("{E}", str(found.expert))
                names.append(numbers)
            names += [new + one.removeprefix(old) for one in names for old in _PREFIXES
                      if one.startswith(old) for new in _PREFIXES]  # fmt: skip
            have = (one for one in names if one in self._modules or one in self._stacked)
            self._known[target] = next(have, None)
        return self._known[target]

    def pick(self, module: str, names: Sequence[str], left: TensorType, right: TensorType) -> str:
        """The parameter of a module, of those named, whose outputs and inputs these B and A have."""
        sizes = {left.shape[-2], right.shape[-1]}
        for name in names:
            at = self.spots(f"{module}.{name}")
            of = [one for one in at if one.of_expert in (None, at[0].of_expert)]
            kinds = [self.shape(one) for one in of]
            rows = sum(rows for rows, _ in kinds)
            if kinds and {rows, kinds[0][1]} == sizes:
                return name
        return names[0]

    def shape(self, spot: Spot) -> tuple[int, int]:
        """Rows and columns of the stored matrix as a spot sees it."""
        if spot.name in self._stacked:
            tensor = self.plan.tensors.get(spot.name)
            if tensor is None:
                blocks = self.plan.tensors[self._packed[spot.name][0]].type.shape
                rows, columns = blocks[1], 32 * blocks[2]
            else:
                rows, columns = tensor.type.shape[-2:]
        else:
            stored, _ = read_matrix(self.plan, spot.name)
            rows, columns = stored.rows, stored.columns
        if spot.at is not None:
            rows = sum(stop - start for start, stop in spot.at)
        return rows, columns

    @cached_property
    def _modules(self) -> frozenset[str]:
        pairs = map(split_parameter, self.plan.tensors)
        return frozenset(module for module, last in pairs if last in code_parameters())

    @cached_property
    def _packed(self) -> Mapping[str, tuple[str, str]]:
        """gpt-oss's stacks of MXFP4."""
        return stacks(self.plan)

    @cached_property
    def _stacked(self) -> Mapping[str, int]:
        """Experts of each stack, by the name of its tensor in numbers."""
        found = {
            name: output.type.shape[0]
            for name, output in self.plan.tensors.items()
            if len(output.type.shape) == 3 and not split_parameter(name)[1]
        }
        of = {stem: self.plan.tensors[one].type.shape[0] for stem, (one, _) in self._packed.items()}
        return {**found, **of}

    # --- experts

    @cached_property
    def _experts(self) -> Mapping[tuple[int, str, int], str]:
        """The module of each projection by layer, kind and expert."""
        if not self.plan.role_index.dims.num_experts:
            return {}
        found = routed_experts(self.plan).projections
        return {(one.layer, one.kind, one.expert): one.module for one in found}

    def _of_expert(self, target: str) -> list[Spot]:
        """Projections of one expert in a stack, or those of all experts in a matrix each."""
        match, layer = _EXPERT.fullmatch(target), self._layer(target)
        if match is None or layer is None or (kinds := _OF_EXPERTS.get(match[3])) is None:
            return []
        if match[2] is not None:
            return self._in_stack(match[1], int(match[2]), kinds[0]) or self._by_role(
                layer, int(match[2]), kinds
            )
        found = []
        for expert in range(self.plan.role_index.dims.num_experts):
            found += self._by_role(layer, expert, kinds)
        return found

    def _layer(self, target: str) -> int | None:
        """The layer of a target, those of drafts behind the model's own."""
        layer, dims = parse(target).layer, self.plan.role_index.dims
        draft = layer is not None and self.plan.family.is_mtp(f"{target}.weight", dims)
        return (
            layer + dims.num_layers
            if layer is not None and draft and layer < dims.num_layers
            else layer
        )

    def _in_stack(self, module: str, expert: int, kind: str) -> list[Spot]:
        for name, parts in (("gate_up_proj", PROJECTIONS[:2]), (kind, (kind,))):
            own = self.named(f"{module}.{name}") if kind in parts else None
            if own is not None:
                whole = Spot(own, expert)
                if len(parts) == 1:
                    return [whole]
                half, n = self.shape(whole)[0] // 2, parts.index(kind)
                return [Spot(own, expert, at=((n * half, (n + 1) * half),))]
        return []

    def _by_role(self, layer: int, expert: int, kinds: Sequence[str]) -> list[Spot]:
        found, start = [], 0
        for kind in kinds:
            module = self._experts.get((layer, kind, expert))
            if module is None or module not in self._modules:
                return []
            rows = self.shape(Spot(module))[0]
            of = ((start, start + rows),) if len(kinds) > 1 else None
            found.append(Spot(module, of=of, of_expert=expert))
            start += rows
        return found

    # --- fused and split projections

    def _of_parts(self, target: str) -> list[Spot]:
        """Projections that share rows with the target, which the plan has fused or split."""
        at, _, last = target.rpartition(".")
        for group in _FUSED:
            if last not in group:
                continue
            have = {one: self.named(f"{at}.{one}") for one in group}
            stored = {one: module for one, module in have.items() if module is not None}
            if not {part for one in stored for part in group[one]}.issuperset(group[last]):
                return []
            sizes = self._sizes(group, stored)
            ours = _runs(group[last], sizes, self._groups(last, of_class=True))
            found = []
            for one, module in stored.items():
                theirs = _runs(group[one], sizes, self._groups(one))
                both = [part for part in group[last] if part in theirs]
                if both:
                    rows = tuple(run for part in both for run in theirs[part])
                    of = tuple(run for part in both for run in ours[part])
                    found.append(Spot(module, at=rows, of=of))
            return found
        return []

    def _sizes(
        self, group: Mapping[str, Sequence[str]], stored: Mapping[str, str]
    ) -> dict[str, int]:
        """Rows of each segment: by the config, or by the matrices that hold one alone."""
        dims, config = self.plan.role_index.dims, text_config(self.plan.config)
        if dims.gdn is not None and "in_proj_z" in group:
            nk, nv, dk, dv = dims.gdn
            return {"q": nk * dk, "k": nk * dk, "v": nv * dv, "z": nv * dv}
        sizes = {}
        for one, module in stored.items():
            rows, width = self.shape(Spot(module))[0], len(group[one])
            sizes.update(dict.fromkeys(group[one], rows // width))
            if "q" in group[one] and width == 3:
                heads = int(config.get("num_attention_heads", 1))
                keys = int(config.get("num_key_value_heads", heads))
                unit = rows // (heads + 2 * keys)
                sizes.update({"q": heads * unit, "k": keys * unit, "v": keys * unit})
        return sizes

    def _groups(self, last: str, *, of_class: bool = False) -> int:
        """In how many groups the rows of a projection are fused."""
        dims, own = self.plan.role_index.dims, self.plan.family.name == "qwen3_next"
        if last not in ("in_proj_qkvz", "in_proj_ba") or dims.gdn is None:
            return 1
        stated = self.plan.facts.get(_GDN_GROUPS)
        if of_class or not stated:
            if not own:
                raise PlanError(f"{last}: the order in which its rows are fused is not stated")
            return dims.gdn[0]
        return int(stated)


def _runs(segments: Sequence[str], sizes: Mapping[str, int], groups: int) -> dict[str, Runs]:
    """Rows of each segment in a matrix of them all."""
    if any(one not in sizes for one in segments):
        return {}
    order = list(RowOrder(tuple(sizes[one] for one in segments), groups).runs())
    ends = list(accumulate(stop - start for _, start, stop in order))
    found: dict[str, list[tuple[int, int]]] = {one: [] for one in segments}
    for (segment, start, stop), end in zip(order, ends, strict=True):
        found[segments[segment]].append((end - stop + start, end))
    return {one: tuple(runs) for one, runs in found.items()}


How = Literal["lora", "dora", "delta", "replace"]
_PREFIX = "base_model.model."
_PART = re.compile(
    r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.(weight|bias))?$"
)
_BESIDE = re.compile(r"\.modules_to_save(?:\.default)?")
_WRAPPED = re.compile(r"\.base_layer(?=\.(?:weight|bias)$)")
# Options by which peft computes something else, or changes the base's own weights.
_OTHER = (
    "use_qalora", "arrow_config", "kasa_config", "velora_config", "layer_replication", "use_bdlora",
    "trainable_token_indices", "monteclora_config", "megatron_config",
)  # fmt: skip
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, eq=False)
class Change:
    """A change of one parameter of a `module` of the class ("" of a module's parameter: `module` is the
    parameter itself). `values` are what is added times `scale`, or put in its place; of LoRA B is `left`
    and A `right`, of `rank` for each expert. `transposed`: the parameter is [in, out]."""

    module: str
    parameter: str
    how: How
    names: tuple[str, ...]
    scale: float = 1.0
    values: Output | None = None
    left: Output | None = None
    right: Output | None = None
    magnitude: Output | None = None
    rank: int = 0
    transposed: bool = False


# Which of a module's parameters, by name, takes these B and A; "" for none.
Pick = Callable[[str, Sequence[str], TensorType, TensorType], str]


def changes(adapter: Adapter, scale: float, pick: Pick) -> list[Change]:
    """Every change of an adapter, multiplied by `scale`. Which of target_parameters B and A belong to
    their shapes say: `pick`. Raises PlanError for a kind of adapter that is not merged here, and for a
    tensor that is a part of none."""
    found: dict[str, dict[str, str]] = {}
    made: list[Change] = []
    _check(adapter)
    plain = "peft_type" not in adapter.config
    for name, source in adapter.tensors.items():
        if source.type.dtype not in FLOAT_DTYPES:
            raise PlanError(f"{adapter.name}: {name!r}: expected numbers, found {source.type}")
        own = _BESIDE.sub("", _WRAPPED.sub("", name.removeprefix(_PREFIX)))
        part = _PART.search(own)
        if part is not None:
            key = part[1] + (".bias" if part[2] == "bias" else "")
            found.setdefault(own[: part.start()], {})[key] = name
            continue
        module, _, last = own.rpartition(".")
        if last not in ("weight", "bias"):
            module, last = own, ""
        if not plain and not last:
            raise PlanError(
                f"{adapter.name}: {name!r} is no part of a LoRA adapter that is read here"
            )
        if not plain and scale != 1:
            raise PlanError(
                f"{adapter.name}: {name!r} replaces the model's, and a scale of {scale:g} is of what is "
                "added: leave --scale out"
            )
        how: How = "delta" if plain else "replace"
        made.append(Change(module, last, how, (name,), scale if plain else 1.0, source.output))
    for module, parts in found.items():
        made += _low_rank(adapter, module, parts, scale, pick)
    return made


def _check(adapter: Adapter) -> None:
    config, where = adapter.config, f"{adapter.name}: adapter_config.json"
    kind = config.get("peft_type")
    if config and kind != "LORA":
        raise PlanError(
            f"{where}: expected peft_type LORA, found {kind!r}, which is not merged here"
        )
    for key in _OTHER:
        if config.get(key):
            raise PlanError(f"{where}: {key} is set, and is not merged here; merge it with peft")
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.startswith(_CHANGES_BASE):
        raise PlanError(
            f"{where}: init_lora_weights {how!r} changed the base's own weights, so that this adapter "
            "does not fit the base: save it with peft's path_initial_model_for_weight_conversion"
        )


def _low_rank(
    adapter: Adapter, module: str, parts: Mapping[str, str], scale: float, pick: Pick
) -> Iterator[Change]:
    embedding = "lora_embedding_A" in parts
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    for key in (a, b):
        if key not in parts:
            raise PlanError(f"{adapter.name}: {module}.{key} is missing")
    right, left = (adapter.tensors[parts[key]].output for key in (a, b))
    dimensions = len(right.type.shape), len(left.type.shape)
    if dimensions not in ((2, 2), (3, 3)) or 0 in (*right.type.shape, *left.type.shape):
        raise PlanError(
            f"{adapter.name}: {module}: expected A and B to be matrices, or a stack of them each, found "
            f"{right.type} and {left.type}"
        )
    magnitude = parts.get("lora_magnitude_vector")
    own = module.replace(".base_layer", "")
    targets = [one.rpartition(".") for one in adapter.config.get("target_parameters") or ()]
    named = [last for at, _, last in targets if f".{own}".endswith(f".{at}")]
    parameter = pick(own, named, left.type, right.type) if named else "weight"
    rank, factor = _scaling(adapter.config, f"{own}.{parameter}".removesuffix(".weight"), right)
    fan = bool(adapter.config.get("fan_in_fan_out")) or embedding
    if magnitude is not None and fan:
        raise PlanError(
            f"{adapter.name}: {module}: DoRA of an embedding or of a weight [in, out] has norms of "
            "columns, which are not merged here; merge it with peft"
        )
    names = tuple(parts[key] for key in parts if key != "lora_B.bias")
    if parameter != "weight":
        own, parameter = f"{own}.{parameter}", ""
    yield Change(
        own, parameter, "lora" if magnitude is None else "dora", names, factor * scale, None, left,
        right, None if magnitude is None else adapter.tensors[magnitude].output, rank, fan,
    )  # fmt: skip
    if (bias := parts.get("lora_B.bias")) is not None:
        values = adapter.tensors[bias].output
        yield Change(own, "bias", "delta", (bias,), factor * scale, values)


def _scaling(config: Mapping[str, Any], module: str, right: Output) -> tuple[int, float]:
    """The rank that the config states for a module, and by what B A is multiplied."""
    rank = _pattern(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    held = right.type.shape[-2]
    if not isinstance(rank, int) or rank < 1 or held % rank:
        raise PlanError(
            f"{module}.lora_A: expected rank {rank} of adapter_config.json (r, rank_pattern), found "
            f"{right.type}"
        )
    return rank, alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pattern(patterns: Any, module: str, default: Any) -> Any:
    """peft's `get_pattern_key`: the first pattern that is the module's name or the end of it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
            return value
    return default
