"""A rank's parameters, built from the table of a class, a config and the names of a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.record import LINEARS, Condition, Module, Record
from qconvert.runtimes.loading.building import RankBuild, divided
from qconvert.runtimes.loading.parameters import Convolution, Parameter, Sharded, Whole
from qconvert.runtimes.loading.schemes import Scheme, Unquantized
from qconvert.runtimes.loading.setting import NotSimulated

_NUMBER = re.compile(r"(?<![^.])[0-9]{1,6}(?![^.])")
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


def holds(condition: Condition, sizes: Sizes) -> bool:
    """Tell whether flags of the config have the values of a condition."""
    if isinstance(condition, bool):
        return condition
    return all(sizes.flag(key) == value for key, value in condition.items())


@dataclass(frozen=True)
class Layers:
    """The numbered layers of a record's containers in one model: `counts` of each, the `kinds` of each
    one's layers, and the numbers of those that the rank's stage `owns`."""

    counts: Mapping[str, int]
    kinds: Mapping[str, Mapping[int, int]]
    owns: Mapping[str, range]

    def container(self, name: str) -> str:
        """The container that a module of a record lies in, "" for one outside."""
        return next((one for one in self.counts if name.startswith(f"{one}.*")), "")

    def elsewhere(self, module: Module, number: int | None) -> bool:
        """Tell whether another stage builds a module."""
        at = self.container(module.name)
        return bool(at) and not module.stage and number is not None and number not in self.owns[at]


def layers_of(record: Record, sizes: Sizes, names: Iterable[str], build: RankBuild) -> Layers:
    """The layers of a model, each of the kind whose names the folder has in it. Raises NotSimulated for
    one of a kind that was not recorded."""
    counts = {name: sizes.of(count) for name, count in record.layers.items()}
    kinds: dict[str, Mapping[int, int]] = {}
    staged = {
        name
        for name in counts
        if any(m.name.startswith(f"{name}.*") and not m.stage for m in record.modules)
    }
    owns = {
        name: build.setting.layers(count) if name in staged else range(count)
        for name, count in counts.items()
    }
    for name, variants in record.variants.items():
        kinds[name] = _kinds(record, name, variants, owns[name], names)
    return Layers(counts, kinds, owns)


def _kinds(
    record: Record,
    container: str,
    variants: tuple[tuple[str, ...], ...],
    layers: range,
    names: Iterable[str],
) -> dict[int, int]:
    if len(variants) == 1:
        return dict.fromkeys(layers, 0)
    places = _stored(record, container)
    met: dict[int, set[str]] = {layer: set() for layer in layers}
    for name in names:
        for place in places:
            if name.startswith(f"{place}."):
                number, _, rest = name[len(place) + 1 :].partition(".")
                if number.isdecimal() and int(number) in met:
                    inner = pattern_of(rest)
                    met[int(number)] |= {inner, inner.rpartition(".")[0]}
    return {layer: _kind(found, variants, f"{container}.{layer}") for layer, found in met.items()}


def _stored(record: Record, container: str) -> set[str]:
    """What a container is called in checkpoints."""
    inside = f"{container}.*"
    return {one.source.partition(".*")[0] for one in record.names if one.to.startswith(inside)}


def _kind(found: set[str], variants: tuple[tuple[str, ...], ...], where: str) -> int:
    """The kind of layer of which all names are there, of several the one with most."""
    fits = [number for number, names in enumerate(variants) if found.issuperset(names)]
    if not fits:
        raise NotSimulated(
            f"{where} has names of no kind of layer that this class was recorded with"
        )
    return max(fits, key=lambda number: len(variants[number]))


@dataclass(frozen=True)
class Built:
    """What a rank built: the modules of a record by the runtime's names, and the number of routed
    experts of a layer."""

    build: RankBuild
    modules: Mapping[str, Module]
    layers: Layers
    experts: int


def built(record: Record, build: RankBuild, sizes: Sizes, names: Iterable[str]) -> Built:
    """Fill a rank's build with what the class of a record builds. `names` are the folder's. Raises
    LoadRefused where the runtime would, and NotSimulated for what the table does not show."""
    layers = layers_of(record, sizes, names, build)
    made: dict[str, Module] = {}
    behind = False  # of the layers of the stages
    for group in _groups(record, layers):
        container = layers.container(group[0].name)
        behind = behind or (bool(container) and not group[0].stage)
        for number in layers.owns[container] if container else (None,):
            for module in group:
                kind = layers.kinds.get(container, {}).get(-1 if number is None else number)
                if module.variant is not None and kind is not None and module.variant != kind:
                    continue
                if number is None and not _in_stage(module, build):
                    continue
                if holds(module.when, sizes):
                    for name in _numbered(module, number, sizes):
                        _add(record, build, module, name, number, sizes)
                        made[name] = module
                        if number is None:
                            _spare(build, module, name, behind=behind, sizes=sizes)
    routed = [sizes.of(one.sizes[0]) for one in record.modules if one.kind == "experts"]
    return Built(build, made, layers, max(routed, default=0))


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


def _numbered(module: Module, number: int | None, sizes: Sizes) -> list[str]:
    """The names of a pattern in one layer."""
    stars = module.name.count("*")
    if stars == (number is not None):
        return [filled(module.name, [] if number is None else [number])]
    raise NotSimulated(f"{module.name}: its numbers beside the layer's were not recorded")


def _spare(build: RankBuild, module: Module, name: str, *, behind: bool, sizes: Sizes) -> None:
    """Mark as not needed what a class builds in every stage and computes with in one: what comes before
    the layers in the first, what comes behind them in the last."""
    setting = build.setting
    tied = module.kind == "embedding" and setting.last and bool(sizes.flag("tie_word_embeddings"))
    if not (setting.last if behind else setting.first or tied):
        for parameter in _of(build, module, name):
            build.parameters[parameter].needed = False


def _of(build: RankBuild, module: Module, name: str) -> list[str]:
    if module.kind == "parameter":
        return [name]
    return [one for one in build.parameters if one.startswith(f"{name}.")]


def _add(
    record: Record, build: RankBuild, module: Module, name: str, layer: int | None, sizes: Sizes
) -> None:
    numbers = [sizes.of(size, layer) for size in module.sizes]
    asked = None if module.asked is None else filled(module.asked, [] if layer is None else [layer])
    plain = Unquantized(build.dtype)
    alone = asked is None or build.quantization.name in module.unquantized
    if module.kind == "parameter":
        _add_parameter(build, module, name, numbers, layer, sizes)
    elif module.kind == "attention":
        if not alone:
            build.cache_scales(name)
    elif module.kind in ("embedding", "head"):
        if holds(module.shared, sizes) and build.setting.pp == 1:
            of = f"{filled(module.of, [] if layer is None else [layer])}.weight"
            build.aliases[f"{name}.weight"] = of
            return
        asks = module.kind == "head" and not alone and asked is not None
        rows, columns = numbers
        head = build.quantization.head(asked) if asks and asked else None
        build.vocabulary(name, rows, columns, head)
    elif module.kind == "experts":
        if not module.gated:
            raise NotSimulated("experts without a gate projection")
        routed, hidden, inner = numbers
        if holds(module.bias, sizes):
            raise NotSimulated("experts with a bias")
        build.experts(
            name, routed, 0, hidden, inner, asked=asked or "", scheme=plain if alone else None
        )
    else:
        _add_linear(build, module, name, numbers, asked, plain if alone else None, sizes)


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
    build.linear(
        name, LINEARS[module.kind], inputs, *outputs, asked=asked or "", scheme=scheme, bias=bias,
        whole=module.whole,
    )  # fmt: skip


def _add_parameter(
    build: RankBuild,
    module: Module,
    name: str,
    shape: list[int],
    layer: int | None,
    sizes: Sizes,
) -> None:
    """A parameter that every rank has all of, or that is divided along one dimension."""
    setting = build.setting
    dtype = build.dtype if module.dtype == "model" else _DTYPES.get(module.dtype, module.dtype)
    if module.cut is None:
        made = Parameter(dtype, tuple(shape), Whole())
    else:
        shape[module.cut] = divided(shape[module.cut], setting.tp, name)
        if module.parts:
            parts = tuple(sizes.of(part, layer) for part in module.parts)
            slot = Convolution(parts, setting.tp, setting.rank)
            made = Parameter(dtype, tuple(shape), slot)
        else:
            made = Parameter(dtype, tuple(shape), Sharded(setting.rank, setting.tp, module.cut))
    made.needed = module.loads
    build.parameters[name] = made
