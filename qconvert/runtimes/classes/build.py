"""A rank's parameters, built from the table of a class, a config and the names of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.roles import EXPERT_COUNTS
from qconvert.core.shown import several
from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.record import LINEARS, Module, Record, Variant, holds
from qconvert.runtimes.loading.building import RankBuild, divided
from qconvert.runtimes.loading.load_weights import SimulatedLoad
from qconvert.runtimes.loading.parameters import (
    Convolution,
    Padded,
    Parameter,
    Sharded,
    Whole,
)
from qconvert.runtimes.loading.schemes import Scheme, Unquantized
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,6}(?![^.])")
_EXPERTS = re.compile(r"(?:^|\.)experts(?=\.)")
_MOST_LAYERS = 4096
# Types as torch calls them.
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}


def pattern_of(name: str) -> str:
    """A dotted name with `*` for each of its numbers."""
    return _NUMBER.sub("*", name)


def numbers_of(name: str) -> list[int]:
    """The numbers of a dotted name."""
    return [int(number) for number in _NUMBER.findall(name)]


def filled(pattern: str, numbers: Iterable[int]) -> str:
    """A pattern with numbers for its `*`, as many as it has."""
    left = iter(numbers)
    return re.sub(r"\*", lambda _: str(next(left)), pattern)


def captured(pattern: str, parts: Sequence[str]) -> list[int] | None:
    """The numbers that stand for the `*` of a pattern in a name, given in parts; None where they do not
    fit: a number that is no layer's stands in the pattern itself."""
    found = []
    for one, part in zip(pattern.split("."), parts, strict=True):
        if one == "*":
            found.append(int(part))
        elif one != part:
            return None
    return found


@dataclass(frozen=True)
class Layers:
    """The numbered layers of a record's containers in one model: the numbers of all, the `kinds` of each
    one's layers, the numbers of those that the rank's stage `owns`, and how many layers of a draft
    the config counts."""

    numbers: Mapping[str, range]
    kinds: Mapping[str, Mapping[int, int]]
    owns: Mapping[str, range]
    drafts: int = 0

    def container(self, name: str) -> str:
        """The container that a module of a record lies in, "" for one outside."""
        return next((one for one in self.numbers if name.startswith(f"{one}.*")), "")

    def has(self, container: str, layer: int | None, variants: tuple[int, ...]) -> bool:
        """Tell whether a layer is of one of some kinds, if any are named."""
        kinds = self.kinds.get(container)
        return not variants or kinds is None or layer is None or kinds[layer] in variants


def layers_of(
    record: Record, sizes: Sizes, tensors: Mapping[str, TensorType], build: RankBuild
) -> Layers:
    """The layers of a model, each of the kind whose names the folder has in it. Raises NotSimulated for
    one of a kind that was not recorded."""
    counts = {name: sizes.of(count) for name, count in record.layers.items()}
    if max(counts.values(), default=0) > _MOST_LAYERS:
        raise NotSimulated(f"config.json states {max(counts.values())} layers, which no model has")
    staged = {
        name
        for name in counts
        if any(m.name.startswith(f"{name}.*") and not m.stage for m in record.modules)
    }
    first = {name: sizes.of(number) for name, number in record.first.items()}
    numbers = {
        name: range(first.get(name, 0), first.get(name, 0) + count)
        for name, count in counts.items()
    }
    owns = {
        name: build.setting.layers(count) if name in staged and name not in first else numbers[name]
        for name, count in counts.items()
    }
    kinds = {
        name: _kinds(record, name, variants, owns[name], tensors, sizes)
        for name, variants in record.variants.items()
    }
    drafts = sizes.flag("num_nextn_predict_layers")
    return Layers(numbers, kinds, owns, drafts if type(drafts) is int else 0)


def _kinds(
    record: Record,
    container: str,
    variants: Sequence[Variant],
    layers: range,
    tensors: Mapping[str, TensorType],
    sizes: Sizes,
) -> dict[int, int]:
    """The kind of each layer."""
    inside = f"{container}.*"
    places = {one.source.partition(".*")[0] for one in record.names if one.to.startswith(inside)}
    met = _in_layers(_Names(tensors), tuple(f"{place}." for place in sorted(places)))
    return {
        layer: _kind(met.get(layer, set()), variants, layer, f"{container}.{layer}", sizes)
        for layer in layers
    }


class _Names:
    """The tensors of a folder, as an argument that is remembered: by what object they are."""

    def __init__(self, tensors: Mapping[str, TensorType]) -> None:
        self.tensors = tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Names) and self.tensors is other.tensors

    def __hash__(self) -> int:
        return id(self.tensors)


# Each size that is simulated asks for the same: of 91,991 names it took 1.1 of 7.3 CPU s.
@lru_cache(maxsize=2)
def _in_layers(names: _Names, places: tuple[str, ...]) -> Mapping[int, set[str]]:
    """The names in each layer below some places, with those of their modules."""
    met: dict[int, set[str]] = {}
    for name in names.tensors:
        if not name.startswith(places):
            continue
        for place in places:
            if name.startswith(place):
                number, _, rest = name[len(place) :].partition(".")
                if number.isdecimal() and len(number) < 7:
                    met.setdefault(int(number), set()).add(_of_kind(rest))
    for found in met.values():
        found.update([inner.rpartition(".")[0] for inner in found])
    return met


def _of_any_form(inner: str) -> str:
    """A name in a layer; of experts without what tells stacks from matrices."""
    found = _EXPERTS.search(inner)
    return inner if found is None else inner[: found.end()]


@lru_cache(maxsize=1 << 16)
def _of_kind(name: str) -> str:
    return _of_any_form(pattern_of(name))


def _kind(
    found: set[str], variants: Sequence[Variant], layer: int, where: str, sizes: Sizes
) -> int:
    """The kind of layer of which all names are there, or most; of several the one with most, or the
    config's. Where nothing tells them and the first layer alone is of another, its number does."""
    alike = not any(one.names or one.key for one in variants)
    if alike and len(variants) == 2 and variants[0].recorded == (0,):
        return min(layer, 1)
    fits = [at for at, one in enumerate(variants) if found.issuperset(map(_of_kind, one.names))]
    most = max((len(variants[at].names) for at in fits), default=0)
    fits = [at for at in fits if len(variants[at].names) == most]
    if not fits:  # a layer that lacks a tensor, or has one under another name
        there = [len(found.intersection(map(_of_kind, one.names))) for one in variants]
        fits = [at for at, number in enumerate(there) if number and number == max(there)]
    if len(fits) > 1:
        fits = [at for at in fits if variants[at].key and _stated(variants[at], layer, sizes)]
    if len(fits) != 1:
        raise NotSimulated(f"{where} is of no kind of layer that its class was recorded with")
    return fits[0]


def _stated(variant: Variant, layer: int, sizes: Sizes) -> bool:
    values = sizes.flag(variant.key)
    return isinstance(values, list) and layer < len(values) and values[layer] == variant.value


@dataclass(frozen=True)
class Built:
    """Product of a table on a rank: the modules of a record by the runtime's names, the record for the
    settings of the config, the number of routed experts of a layer, and the config's sizes."""

    build: RankBuild
    modules: Mapping[str, Module]
    layers: Layers
    record: Record
    experts: int
    sizes: Sizes


def built(
    table: Record,
    build: RankBuild,
    sizes: Sizes,
    tensors: Mapping[str, TensorType],
    shared: int = 0,
) -> Built:
    """Fill a rank's build with what the class of a table builds. `tensors` are the folder's, `shared`
    counts shared experts that are loaded as routed ones. Raises LoadRefused where the runtime would, and
    NotSimulated for what the table does not show."""
    if missing := [key for key in table.asks if not sizes.states(key)]:
        raise LoadRefused(
            "AttributeError", f"has no attribute '{missing[0]}'", "config.json",
            f"states no {several(missing)}, which the class asks for and transformers 5 does not save: "
            "add it as the published config has it",
        )  # fmt: skip
    record = table.under(sizes)
    if record.unwritten_stages and build.setting.pp > 1:
        raise NotSimulated(
            "tied embeddings in pipeline stages: no tensor comes to the last one's head"
        )
    record = with_shared_routed(record) if shared else record
    layers = layers_of(record, sizes, tensors, build)
    made: dict[str, Module] = {}
    stored = _stored_shapes(record, tensors)
    for group in _groups(record, layers):
        container = layers.container(group[0].name)
        for number in layers.owns[container] if container else (None,):
            for module in group:
                here = _in_stage(module, build) and layers.has(container, number, module.variants)
                if not here or not holds(module.when, sizes):
                    continue
                for inner in _inside(module, container, sizes):
                    numbers = [*([] if number is None else [number]), *inner]
                    name = filled(module.name, numbers)
                    _add(build, module, name, numbers, sizes, stored, shared)
                    if module.reads == "build":
                        check_weight(build, name)
                    made[name] = module
                    if number is None and not _is_used(module, layers, build, sizes):
                        for parameter in _of(build, module, name):
                            build.parameters[parameter].needed = False
    _tie(record, build)
    routed = [sizes.of(one.sizes[0]) for one in made.values() if one.kind == "experts"]
    if record.draft:
        ends = {name for name, one in made.items() if _is_of_model(one, sizes)}
        build.borrowed = frozenset(n for n in build.parameters if n.rpartition(".")[0] in ends)
    return Built(build, made, layers, record, max(routed, default=0), sizes)


def _is_of_model(module: Module, sizes: Sizes) -> bool:
    """Tell whether a draft may have a module of its own from its model: embeddings or a head of as many
    tokens."""
    if module.kind not in ("embedding", "head"):
        return False
    return sizes.of(module.sizes[0]) == sizes.of("vocab_size")


def _inside(module: Module, container: str, sizes: Sizes) -> Sequence[tuple[int, ...]]:
    """The numbers of a module within its layer: of its expert, where each is a module of its own. Raises
    NotSimulated for other lists in layers."""
    inner = module.name.count("*") - bool(container)
    if not inner:
        return ((),)
    if inner != 1 or not _EXPERTS.search(module.name):
        raise NotSimulated(f"{module.name}: layers in layers have no rule")
    keys = (key for key in EXPERT_COUNTS if sizes.flag(key) is not None)
    return [(number,) for number in range(sizes.of(next(keys, "")))]


def check_weight(build: RankBuild, module: str) -> None:
    """Raise LoadRefused for a linear whose `weight` its class reads itself, and which has none."""
    name = f"{module}.weight"
    if module in build.schemes and name not in build.parameters and name not in build.aliases:
        raise LoadRefused(
            "AttributeError", "has no attribute 'weight'", module,
            "the class reads its `weight`, and a packed projection has none: leave "
            f"{module.rpartition('.')[2]} unquantized",
        )  # fmt: skip


def after_load(made: Built) -> None:
    """Raise LoadRefused where a class fails once all is read, with a `weight` that is not there."""
    for name, module in made.modules.items():
        if module.reads == "load":
            check_weight(made.build, name)


def in_right_groups(
    record: Record,
    sizes: Sizes,
    done: SimulatedLoad,
    groups: int | None,
    tensors: Iterable[str],
) -> SimulatedLoad:
    """Answer for a folder whose fused rows of linear attention are in `groups` groups: a class takes
    them as transformers saves them, in one for each key head, or as others fuse them, in one."""
    fused = [one for one in record.names if one.source.endswith(".in_proj_qkvz")]
    if not groups or not fused:
        return done
    wanted = 1 if fused[0].other else sizes.of("linear_num_key_heads")
    return done if groups == wanted else done.in_groups(groups, wanted, tensors)


# Parts of a shared expert, as those of a routed one are held.
_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def with_shared_routed(record: Record) -> Record:
    """The table of a class that loads shared experts behind the routed ones, as more of them."""
    experts = [one.name for one in record.modules if one.kind == "experts"]
    gone = {one.name for one in record.modules if _is_shared(one)}
    names = [one for one in record.names if one.to not in gone]
    for one in record.names:
        part = one.source.rpartition(".")[2]
        if one.to in gone and part in _MATRICES:
            block = one.to.partition(".shared_expert")[0]
            to = next(name for name in experts if name.startswith(f"{block}."))
            names.append(replace(one, to=to, shard=_MATRICES[part], shared=True))
    kept = tuple(one for one in record.modules if one.name not in gone)
    return replace(record, modules=kept, names=tuple(names))


def _is_shared(module: Module) -> bool:
    return module.kind in LINEARS and (
        ".shared_expert." in module.name or ".shared_experts." in module.name
    )


def _tie(record: Record, build: RankBuild) -> None:
    """Give parameters that are one their other names."""
    for first, *others in record.tied:
        if "*" in first or first.endswith(".weight_packed"):  # which other forms do not have
            for name in [one for one in build.parameters if pattern_of(one) == first]:
                for other in others:
                    build.aliases[filled(other, numbers_of(name))] = name
            continue
        held = next((name for name in (first, *others) if name in build.parameters), None)
        if held is None and build.setting.pp > 1:
            continue  # of another stage
        if held is None:
            raise NotSimulated(f"{first} under two names, of which none is a module's")
        for name in {first, *others} - {held}:
            build.parameters.pop(name, None)
            build.aliases[name] = held


def _stored_shapes(
    record: Record, tensors: Mapping[str, TensorType]
) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the folder's tensors that are plain parameters, embeddings, or weights of linears of one
    part, whose sizes follow from no key, by the runtime's patterns."""
    unknown = {
        one.name
        for one in record.modules
        if "" in one.sizes
        and (
            one.kind in ("parameter", "embedding") or (one.kind in LINEARS and len(one.sizes) == 2)
        )
    }
    if not unknown:
        return {}
    sources = {one.source: one.to for one in record.names if one.to in unknown}
    return {
        sources[pattern]: tensors[name].shape
        for name in tensors
        if (pattern := pattern_of(name).removesuffix(".weight")) in sources
        or (pattern := pattern_of(name)) in sources
    }


def _groups(record: Record, layers: Layers) -> Iterator[list[Module]]:
    """Modules in the order of building: those of a container together, layer for layer."""
    group: list[Module] = []
    for module in record.modules:
        at = layers.container(module.name)
        if group and (not at or at != layers.container(group[0].name)):
            yield group
            group = []
        group.append(module)
    if group:
        yield group


def _in_stage(module: Module, build: RankBuild) -> bool:
    setting = build.setting
    at = {
        "first": setting.first,
        "last": setting.last,
        "first and last": setting.first or setting.last,
    }
    return at.get(module.stage, True)


def _is_used(module: Module, layers: Layers, build: RankBuild, sizes: Sizes) -> bool:
    """Tell whether a stage computes with a module of no layer: what stands before the layers in the
    first, what stands behind them, the head and what lies beside them, in the last."""
    setting = build.setting
    beside = tuple(f"{name.rpartition('.')[0]}." for name in layers.numbers)[:1]
    plain = module.kind not in ("embedding", "head")
    if module.kind == "head" or (plain and module.name.startswith(beside)):
        return setting.last
    tied = module.kind == "embedding" and setting.last and bool(sizes.flag("tie_word_embeddings"))
    return setting.first or tied


def _of(build: RankBuild, module: Module, name: str) -> list[str]:
    if module.kind == "parameter":
        return [name]
    return [one for one in build.parameters if one.startswith(f"{name}.")]


def _add(
    build: RankBuild,
    module: Module,
    name: str,
    at: Sequence[int],
    sizes: Sizes,
    stored: Mapping[str, tuple[int, ...]],
    shared: int,
) -> None:
    """Add a module; `at` are the numbers in its name."""
    layer = at[0] if at else None
    shape = stored.get(module.name)
    if shape is not None and module.kind in ("parameter", "embedding"):
        numbers = list(shape)
    elif shape is not None and len(shape) == 2:
        numbers = [
            sizes.of(size, layer) if size else held
            for size, held in zip(module.sizes, reversed(shape), strict=True)
        ]
    else:
        numbers = [sizes.of(size, layer) for size in module.sizes]
    asked = None if module.asked is None else filled(module.asked, at)
    if build.quantization.name in module.unquantized:
        asked = None
    plain = Unquantized(_dtype(build, module)) if asked is None else None
    if module.kind == "parameter":
        _add_parameter(build, module, name, numbers, layer, sizes)
    elif module.kind == "convolution":
        cut = replace(module, cut=0)
        _add_parameter(build, cut, f"{name}.weight", numbers, layer, sizes)
        if holds(module.bias, sizes):
            _add_parameter(build, cut, f"{name}.bias", numbers[:1], layer, sizes)
        build.schemes[name] = Unquantized().linear_name
    elif module.kind in ("attention", "latent_attention"):
        if asked is not None:
            build.cache_scales(name, latent=module.kind == "latent_attention")
    elif module.kind in ("embedding", "head"):
        rows, columns = numbers
        quantized = module.kind == "head" and asked is not None
        build.vocabulary(
            name, rows, columns, build.quantization.head(str(asked)) if quantized else None,
            dtype=_dtype(build, module), bias=holds(module.bias, sizes),
        )  # fmt: skip
    elif module.kind == "experts":
        if holds(module.bias, sizes) and build.quantization.name != "mxfp4":
            raise NotSimulated("experts with a bias")
        routed, hidden, inner = numbers
        build.experts(
            name, routed, shared, hidden, inner, asked=asked or "", scheme=plain, gated=module.gated
        )
    else:
        _add_linear(build, module, name, numbers, asked, plain, sizes)


def _dtype(build: RankBuild, module: Module) -> str:
    return build.dtype if module.dtype == "model" else _DTYPES.get(module.dtype, module.dtype)


def _add_linear(
    build: RankBuild,
    module: Module,
    name: str,
    numbers: list[int],
    asked: str | None,
    scheme: Scheme | None,
    sizes: Sizes,
) -> None:
    bias = holds(module.bias, sizes)
    if module.kind == "qkv":
        if module.whole:
            raise NotSimulated(f"{name}: a projection of queries, keys and values on every rank")
        hidden, heads, kv_heads, size, *value = numbers
        build.qkv(
            name, hidden, heads, kv_heads, size, asked=asked or "", scheme=scheme, bias=bias,
            value=value[0] if value else size,
        )  # fmt: skip
        return
    inputs, *outputs = numbers
    whole = module.whole or build.quantization.name in module.undivided
    build.linear(
        name, LINEARS[module.kind], inputs, *outputs, asked=asked or "", scheme=scheme, bias=bias,
        whole=whole, wrapped="qwen3_5" if module.in_parts else "",
    )  # fmt: skip


def _add_parameter(
    build: RankBuild,
    module: Module,
    name: str,
    shape: list[int],
    layer: int | None,
    sizes: Sizes,
) -> None:
    """A parameter that every rank has all of, or that is divided along one dimension; none that a
    scheme of quantization made."""
    if name in build.parameters:
        return
    setting = build.setting
    dtype = _dtype(build, module)
    if module.padded > 1:
        share = divided(shape[0], setting.tp, name)
        held = ceil_div(share, module.padded) * module.padded
        if held > 2 * module.padded:
            raise NotSimulated(f"{name}: {share} heads of a rank, for which no kernel is known")
        made = Parameter(dtype, (held,), Padded(share, setting.tp))
    elif module.cut is None:
        made = Parameter(dtype, tuple(shape), Whole())
    else:
        shape = [*shape]
        shape[module.cut] = divided(shape[module.cut], setting.tp, name)
        if module.kind == "convolution" or module.parts:
            parts = tuple(sizes.of(part, layer) for part in module.parts or module.sizes[:1])
            slot = Convolution(parts, setting.tp, setting.rank)
            made = Parameter(dtype, tuple(shape), slot)
        else:
            made = Parameter(dtype, tuple(shape), Sharded(setting.rank, setting.tp, module.cut))
    made.needed, made.default = module.loads, module.buffer
    build.parameters[name] = made
