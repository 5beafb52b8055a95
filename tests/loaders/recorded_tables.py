"""Tables of a runtime's class made of what its loader's server recorded
(qconvert/runtimes/loader/server/record.py) at several sets of sizes, several ranks, and with single
settings of the config changed: names become patterns, sizes expressions over the config's keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations_with_replacement
from typing import Any

from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.record import holds

Facts = Mapping[str, Any]
Entry = dict[str, Any]
# Kinds whose weight a rank has a part of.
_CUT = ("qkv", "merged", "column", "row")
_SIZES = (
    "inputs",
    "heads",
    "kv_heads",
    "head_size",
    "v_head_size",
    "routed",
    "hidden",
    "inner",
    "rows",
)
# Kinds that have no weights, scales of a cache at most.
_ATTENTION = ("attention", "latent_attention")
# Parameters that a kind of layers has; what a class adds to one is a parameter by itself.
_LEAVES = ("weight", "bias", "w13_weight", "w2_weight", "w13_bias", "w2_bias")
# Keys that count what has nothing to do with a size, or that published configs do not have, because it
# follows from others; and those that come first where several fit.
_NO_SIZES = re.compile(
    r"(qk_head_dim|_token_id|_id|_ids|version|seed|max_position_embeddings|num_hidden_layers|max_window_layers"
    r"|_per_tok|topk|top_k|n_group|original_max|sliding_window|interval|window_size|period|offset)$"
)
# The largest size that a class may have whatever its config says: 1 row of a gate, taps, channels.
_CONSTANT = 16
_FIRST = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "moe_intermediate_size")  # fmt: skip


def keys_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Whole numbers of a config, those of its text model without a prefix."""
    found: dict[str, int] = {}

    def add(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and key.endswith("_config"):
                add(value, "" if key == "text_config" else f"{prefix}{key}.")
            elif type(value) is int and value > 0 and not _NO_SIZES.search(key):
                found[f"{prefix}{key}"] = value
            elif isinstance(value, list) and key.endswith("layer_ids"):
                found[f"len({prefix}{key})"] = len(value)

    add(config, "")
    return found


@dataclass
class Expressions:
    """Expressions over keys of configs, found by their values at each of several sets of sizes."""

    keys: Sequence[Mapping[str, int]]
    _known: dict[tuple[int, ...], str] = field(default_factory=dict)
    _products: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    # Of keys that differ by set: what sums of three are made of, and what products are divided by.
    _telling: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    _single: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    _found: dict[tuple[int, ...], str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shared = set(self.keys[0]).intersection(*self.keys)
        order = sorted(
            shared,
            key=lambda k: ("." in k, _FIRST.index(k) if k in _FIRST else len(_FIRST), k),
        )
        single = [(tuple(keys[name] for keys in self.keys), name) for name in order]
        pairs = []
        for (one, left), (two, right) in combinations_with_replacement(single, 2):
            values = tuple(a * b for a, b in zip(one, two, strict=True))
            pairs.append((values, f"{left}*{right}"))
            if len(set(one)) > 1 and len(set(two)) > 1:
                self._telling.append(pairs[-1])
        self._products = [*single, *pairs]
        self._single = [(values, text) for values, text in single if len(set(values)) > 1]
        self._telling[:0] = self._single
        several = [
            (tuple(times * v for v in values), f"{times}*{text}")
            for times in (2, 3, 4)
            for values, text in single
        ]
        parts = [
            (tuple(v // by for v in values), f"{text}//{by}")
            for by in (2, 4)
            for values, text in single
            if not any(v % by for v in values)
        ]
        quotients = [
            (tuple(a // b for a, b in zip(one, two, strict=True)), f"{left}//{right}")
            for one, left in single
            for two, right in single
            if not any(a % b for a, b in zip(one, two, strict=True))
        ]
        more = [
            (tuple(times * v for v in values), f"{times}*{text}")
            for values, text in pairs
            for times in (2, 3, 4)
        ]
        for values, text in (*single, *several, *pairs, *parts, *quotients, *more):
            self._known.setdefault(values, text)

    def find(self, values: Sequence[int]) -> str | int:
        """An expression, a constant number, or "" where none fits."""
        wanted = tuple(values)
        if wanted not in self._found:
            self._found[wanted] = self._searched(wanted)
        return self._found[wanted]

    def _searched(self, wanted: tuple[int, ...]) -> str | int:
        known = self._known.get(wanted)
        if known is not None and (len(set(wanted)) > 1 or len(wanted) == 1):
            return known
        if len(set(wanted)) == 1:
            if wanted[0] <= _CONSTANT:
                return wanted[0]
            return known if known is not None and "*" not in known else ""
        for one, text in self._products:
            rest = tuple(w - a for w, a in zip(wanted, one, strict=True))
            if rest in self._known:
                return f"{text}+{self._known[rest]}"
            if len(set(rest)) == 1 and 0 < rest[0] <= 4:
                return f"{text}+{rest[0]}"
        return self._sum_of_three(wanted) or self._part_of_two(wanted)

    def _sum_of_three(self, wanted: tuple[int, ...]) -> str:
        """A sum of two telling expressions and a known one: compared as single numbers, of which some
        come from other values, too."""
        known = {_number_of(values) for values in self._known}
        numbers = [_number_of(values) for values, _ in self._telling]
        for at, (one, left) in enumerate(self._telling):
            whole = _number_of(wanted) - numbers[at]
            for other, number in enumerate(numbers):
                if whole - number in known:
                    two, right = self._telling[other]
                    rest = tuple(w - a - b for w, a, b in zip(wanted, one, two, strict=True))
                    if rest in self._known:
                        return f"{left}+{right}+{self._known[rest]}"
        return ""

    def _part_of_two(self, wanted: tuple[int, ...]) -> str:
        """A product that a key divides."""
        products = {values: text for values, text in reversed(self._products) if "*" in text}
        for one, text in self._single:
            whole = tuple(w * a for w, a in zip(wanted, one, strict=True))
            if whole in products:
                return f"{products[whole]}//{text}"
        return ""

    def split(self, total: Sequence[int], first: Sequence[int]) -> list[str]:
        """Expressions that are `first` at set 0 and together `total` at each, none where none fit."""
        single = [(values, text) for values, text in self._products if "*" not in text]
        sums = [
            (tuple(a + b for a, b in zip(one, two, strict=True)), f"{left}+{right}")
            for (one, left), (two, right) in combinations_with_replacement(single, 2)
        ]
        known: dict[tuple[int, ...], str] = {}
        for values, text in (*self._products, *sums):
            known.setdefault(values, text)
        fitting = [{v: text for v, text in known.items() if v[0] == part} for part in first]
        return _chosen(fitting, tuple(total)) or []


def _has_more(piece: Facts) -> bool:
    """Tell whether a tensor has more dimensions than what holds it."""
    return len(piece["out"]) > len(piece["into"])


def _number_of(values: Sequence[int]) -> int:
    return sum(value << (21 * at) for at, value in enumerate(values))


def _chosen(
    fitting: Sequence[Mapping[tuple[int, ...], str]], total: tuple[int, ...]
) -> list[str] | None:
    """The first expressions, one of each, whose values add up."""

    @cache
    def of(at: int, left: tuple[int, ...]) -> tuple[str, ...] | None:
        if at == len(fitting) - 1:
            return (fitting[at][left],) if left in fitting[at] else None
        for values, text in fitting[at].items():
            rest = tuple(whole - value for whole, value in zip(left, values, strict=True))
            others = of(at + 1, rest) if min(rest) > 0 else None
            if others is not None:
                return (text, *others)
        return None

    found = of(0, total) if fitting else None
    return None if found is None else [*found]


@dataclass(frozen=True)
class Patterns:
    """Names with `*` for numbers of lists of modules. `lists`: their names and lengths; `firsts`: the
    first numbers of those that do not begin with 0."""

    lists: Mapping[str, int]
    firsts: Mapping[str, int] = field(default_factory=dict)

    def numbers(self, name: str) -> range:
        """The numbers in a list."""
        first = self.firsts.get(name, 0)
        return range(first, first + self.lists[name])

    def of(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The pattern of a module's or parameter's name, and the numbers in it."""
        parts, numbers = name.split("."), list[int]()
        for at, part in enumerate(parts):
            if part.isdigit() and ".".join(name.split(".")[:at]) in self.lists:
                numbers.append(int(part))
                parts[at] = "*"
        return ".".join(parts), tuple(numbers)


def starred(name: str, numbers: Iterable[int]) -> str:
    """A name with `*` for these numbers, in their order; others stay."""
    left, parts = list(numbers), name.split(".")
    for at, part in enumerate(parts):
        if left and part == str(left[0]):
            parts[at] = "*"
            left.pop(0)
    return ".".join(parts)


def patterns_of(facts: Facts) -> Patterns:
    """Lists of layers; those of linears of several kinds are one computation, step by step."""
    lists = {m["name"]: m for m in facts["modules"] if m["kind"] == "list" and m["length"]}
    steps: dict[str, set[str]] = {}
    for module in facts["modules"]:
        steps.setdefault(module["name"].rpartition(".")[0], set()).add(module["kind"])
    lists = {name: one for name, one in lists.items() if len(steps.get(name, ())) < 2}
    firsts = {name: one["first"] for name, one in lists.items() if one.get("first")}
    return Patterns({name: one["length"] for name, one in lists.items()}, firsts)


def _module_sizes(module: Facts) -> dict[str, Any]:
    found = {key: module[key] for key in _SIZES if key in module}
    if "outputs" in module:
        outputs = module["outputs"]
        found["outputs"] = outputs if isinstance(outputs, list) else [outputs]
    if found.get("v_head_size") == found.get("head_size"):
        found.pop("v_head_size", None)
    return found


def _things(facts: Facts) -> dict[str, Entry]:
    """Modules and plain parameters by name, in the order of the model, sizes as numbers."""
    found: dict[str, Entry] = {}
    shapes = facts["parameters"]
    for module in facts["modules"]:
        if module["kind"] in ("list", "absent"):
            continue
        entry: Entry = {"kind": module["kind"], "asked": module["asked"], "name": module["name"]}
        if module["kind"] not in _ATTENTION:
            entry |= {"sizes": _module_sizes(module), "bias": module["bias"]}
            if "gated" in module:
                entry["gated"] = module["gated"]
            weight = module["shapes"].get("weight", [])
            if len(weight) > 2:
                entry["sizes"]["shape"] = weight
            dtype = facts["dtypes"].get(f"{module['name']}.weight")
            if dtype is not None:
                entry["dtype"] = dtype
        found[module["name"]] = entry
    for name, held in shapes.items():
        module, _, leaf = name.rpartition(".")
        owner = found.get(module)
        if owner is not None and owner["kind"] not in _ATTENTION and leaf in _LEAVES:
            if leaf == "weight" and name in facts["dtypes"]:
                owner["dtype"] = facts["dtypes"][name]
            continue
        entry = {
            "kind": "parameter", "name": name, "sizes": {"shape": held["shape"]},
            "dtype": facts["dtypes"].get(name, "model"), "loads": bool(held["pieces"]),
            **({"buffer": True} if held.get("buffer") else {}),
        }  # fmt: skip
        whole = [one for one in held["pieces"] if one["tensor"] is not None]
        if (
            len(held["shape"]) == 1
            and len(whole) == 1
            and whole[0]["into"] != [[0, *held["shape"]]]
        ):
            entry["padded"] = held["shape"][0]
        found[name] = entry
    return found


@dataclass
class _Group:
    """Things of one pattern that are alike but for their number: `where` are the numbers."""

    pattern: str
    entry: Entry
    where: list[tuple[int, ...]]


def _groups(facts: Facts) -> list[_Group]:
    patterns = patterns_of(facts)
    found: dict[str, _Group] = {}
    for name, thing in _things(facts).items():
        pattern, numbers = patterns.of(name)
        entry = {**thing, "name": pattern}
        if entry.get("asked") is not None:
            entry["asked"] = starred(entry["asked"], numbers)
        key = pattern + json.dumps(entry, sort_keys=True)
        found.setdefault(key, _Group(pattern, entry, [])).where.append(numbers)
    return list(found.values())


def _containers(patterns: Patterns) -> list[str]:
    """Lists of modules that stand in no other list."""
    return [name for name in patterns.lists if "*" not in patterns.of(f"{name}.x")[0]]


def _kinds_of_layers(groups: Sequence[_Group], layers: range, base: str) -> list[list[int]]:
    """Layers of a list that are built alike, kind by kind."""
    signatures: dict[frozenset[int], list[int]] = {}
    for layer in layers:
        has = frozenset(
            at
            for at, group in enumerate(groups)
            if group.pattern.startswith(f"{base}.*.") and any(w[0] == layer for w in group.where)
        )
        signatures.setdefault(has, []).append(layer)
    return list(signatures.values())


# Names of a checkpoint.


def _shard(kind: str, module: Facts, name: str, piece: Facts, pieces: Sequence[Facts]) -> Any:
    """The part of a fused module that a tensor is: by the rows that it fills."""
    leaf = name.rpartition(".")[2]
    if kind == "experts":
        first, last = piece["into"][-2] if len(piece["into"]) > 1 else piece["into"][0]
        if leaf.startswith("w2"):
            return "w2"
        width = module["shapes"][leaf]
        rows = width[1]
        if leaf.endswith("bias"):
            first, last = piece["into"][-1]
        elif (
            piece["into"][-1][1] - piece["into"][-1][0] < width[2]
        ):  # rows and columns changed places
            first, last = piece["into"][-1]
            rows = width[2]
        if (first, last) == (0, rows):
            return "w13" if module["gated"] else "w1"
        return "w1" if first == 0 else "w3"
    rows = piece["into"][0]
    if kind == "qkv":
        heads, kv, size = module["heads"], module["kv_heads"], module["head_size"]
        ends = [heads * size, kv * size, kv * module.get("v_head_size", size)]
        names: Sequence[Any] = ("q", "k", "v")
    elif kind in ("merged", "merged_replicated"):
        ends = list(module["outputs"])
        names = range(len(ends))
    else:
        starts = sorted(other["into"][0][0] for other in pieces)
        return starts.index(rows[0]) if len(starts) > 1 else None
    total, parts = 0, []
    for part, size in zip(names, ends, strict=True):
        if rows[0] <= total and total + size <= rows[1]:
            parts.append(part)
        elif rows[0] < total + size and total < rows[1]:
            return "across"
        total += size
    if len(parts) == len(names):
        return "all"
    return parts[0] if len(parts) == 1 else parts


def _names(facts: Facts) -> dict[str, tuple[Entry, list[tuple[int, ...]]]]:
    """Destinations of the checkpoint's tensors by pattern, each with the numbers of its modules."""
    patterns = patterns_of(facts)
    modules = {
        m["name"]: m for m in facts["modules"] if m["kind"] not in ("list", "absent", *_ATTENTION)
    }
    found: dict[str, tuple[Entry, list[tuple[int, ...]]]] = {}
    for name, held in facts["parameters"].items():
        owner, _, leaf = name.rpartition(".")
        module = modules.get(owner) if leaf in _LEAVES else None
        for piece in held["pieces"]:
            if piece["tensor"] is None:
                continue
            entry, numbers = _name(name, leaf, owner, module, piece, held["pieces"], patterns)
            key = json.dumps(entry, sort_keys=True)
            found.setdefault(key, (entry, []))[1].append(numbers)
    return found


def _name(
    name: str,
    leaf: str,
    owner: str,
    module: Facts | None,
    piece: Facts,
    pieces: Sequence[Facts],
    patterns: Patterns,
) -> tuple[Entry, tuple[int, ...]]:
    tensor: str = piece["tensor"]
    entry: Entry = {}
    if module is None:
        to, numbers = patterns.of(name)
        source = starred(tensor, numbers)
        if (
            any(numbers) and starred_name(tensor) == tensor
        ):  # it says in words which of a list it is
            to, numbers = name, ()
        entry = {"from": source, "to": to, "parameter": True}
    else:
        to, numbers = patterns.of(owner)
        base, _, own = tensor.rpartition(".")
        kind = module["kind"]
        kept = own == leaf or (kind == "experts" and own == leaf.partition("_")[2])
        source = starred(base if kept else tensor, numbers)
        if kind == "experts":
            source = _without_expert(source, piece)
        entry = {"from": source, "to": to}
        if not kept:
            entry["leaf"] = leaf
        shard = _shard(kind, module, name, piece, pieces)
        one = kind in ("merged", "merged_replicated") and len(module["outputs"]) == 1
        if shard is not None and not one:
            entry["shard"] = shard
        if kind == "experts" and "*" not in source.partition(".experts.")[2]:
            into = piece["into"][0]
            if into[1] - into[0] > 1:
                entry |= {"stack": True, "transposed": piece["order"] == "transposed"}
    if piece["order"] == "transposed" and "stack" not in entry:
        entry["rows"] = "transposed"
    elif module is None and piece["order"] == "same" and _has_more(piece):
        entry["rows"] = "squeezed"
    elif piece["order"] == "twice":
        entry["rows"] = "twice"
    elif piece["order"] in ("moved", "scattered", "computed"):
        entry["rows"] = "moved" if piece["order"] != "computed" else "computed"
        in_heads = module is not None and piece.get("within") == module.get("head_size", 0)
        if in_heads and piece["within"]:
            entry["rows"] = "moved in heads"
    if "computed" in piece:
        entry["computed"] = piece["computed"]
    return entry, numbers


def _without_expert(source: str, piece: Facts) -> str:
    """The name of an expert's matrix with `*` for its number."""
    into = piece["into"][0]
    if into[1] - into[0] != 1:
        return source
    head, dot, rest = source.rpartition(".experts.")
    number, _, leaf = rest.partition(".")
    return f"{head}{dot}*.{leaf}" if number == str(into[0]) else source


# The whole table.


@dataclass(frozen=True)
class Recorded:
    """Records of a class. `sets`: config and facts at each set of sizes; `tp2`, `stages`:
    facts of set 0 as one of two ranks, and as each of two stages, or why there are none; `untied`:
    two stages are refused where the embeddings are the head, and these are without; `forms`: under
    other names; `methods`: as one of two ranks under methods of quantization; `reads`: when the class
    reads the weights of linears that it asks for by such names; `twice`: names of one packed weight;
    `draft`: of a draft that lies behind its model; `needs_experts`: it refuses a stage without."""

    sets: Sequence[tuple[Mapping[str, Any], Facts]]
    tp2: Facts | None
    stages: Sequence[Facts]
    untied: bool = False
    forms: Sequence[Facts] = ()
    methods: Mapping[str, Facts] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)
    twice: Sequence[Sequence[str]] = ()
    draft: bool = False
    needs_experts: bool | None = None

    @cached_property
    def whole(self) -> set[tuple[str, tuple[int, ...]]]:
        """Patterns and numbers of all things."""
        return _present(self.sets[0][1])

    @cached_property
    def present(self) -> list[set[tuple[str, tuple[int, ...]]]]:
        """The same of each stage."""
        return [_present(facts) for facts in self.stages]


class _Unknown:
    """No expressions: of a build at one set of sizes, whose things are those of others but for few."""

    def find(self, values: Sequence[int]) -> str | int:
        return ""


def table(recorded: Recorded) -> dict[str, Any]:
    """The record of a class, but for its name and version. Of one set of sizes no expression is known;
    what joins tables (`under_settings`) takes those of things that are alike."""
    config, facts = recorded.sets[0]
    keys = [keys_of(config) for config, _ in recorded.sets]
    expressions = Expressions(keys) if len(keys) > 1 else _Unknown()
    every = [_groups(facts) for _, facts in recorded.sets]
    groups = every[0]
    patterns = patterns_of(facts)
    variants: dict[str, Any] = {}
    kinds: dict[str, list[list[int]]] = {}
    names = _names(facts)
    for base in _containers(patterns):
        found = _kinds_of_layers(groups, patterns.numbers(base), base)
        kinds[base] = found
        if len(found) > 1:
            variants[base] = [*_variants(base, found, names, config)]
    modules = []
    for at, group in enumerate(groups):
        others = [_counterpart(group, at, some) for some in every]
        modules.append(_entry(group, others, expressions, kinds, recorded))
    found_names = []
    for entry, where in names.values():
        inside = next((b for b in kinds if entry["to"].startswith(f"{b}.*.")), None)
        found_names.append(entry | _variant_of(inside, kinds, [w[0] for w in where if w]))
    refused, left = set[str](), set[str]()
    for other in recorded.forms:
        more, ended, passed = _in_form(other, found_names, facts, modules)
        found_names += more
        refused |= ended
        left |= passed
    unread = facts["unread"]
    if recorded.draft:
        found_names = [*_of_draft(found_names, config)]
        refused = {name for name in refused if name.startswith("mtp.")} or refused
        own = ("mtp.", f"model.layers.{config.get('text_config', config)['num_hidden_layers']}.")
        unread = [name for name in unread if name.startswith(own)]
    layers = {base: count_key(base, patterns.lists[base], config) for base in kinds}
    return {
        **({"refused": sorted(refused)} if refused else {}),
        **({} if recorded.needs_experts is None else {"needs_experts": recorded.needs_experts}),
        **({} if facts.get("caches", True) else {"caches": False}),
        **({"patterns": facts["patterns"]} if facts.get("patterns") else {}),
        **({"first": {base: count_key(base, first, config) for base, first in patterns.firsts.items()}}
           if patterns.firsts else {}),
        "layers": layers, "packed": facts["packed"], "renames": facts["renames"],
        "fuses_shared": facts["fuses_shared"], "stages": _stages(recorded, patterns), "modules": modules,
        "variants": variants, "names": found_names,
        "passed": sorted({_passed(name, patterns) for name in unread}), _LEFT: sorted(left),
        "unknown": unknown_of(facts),
        "tied": [*_tied(facts, patterns), *_packed_twice(recorded.twice, patterns)],
    }  # fmt: skip


def unknown_of(facts: Facts) -> dict[str, dict[str, str]]:
    """Answers of a class to names that lead nowhere, by their places."""
    return {place: _condensed(said) for place, said in facts["probes"].items()}


def _in_form(
    other: Facts, known: Sequence[Entry], facts: Facts, modules: Sequence[Entry]
) -> tuple[list[Entry], set[str], set[str]]:
    """Names that a checkpoint in another form has beside those that are known, each marked; those that
    end the load, and those that are passed over."""
    here, there = ({*map(starred_name, one["stored"])} for one in (facts, other))
    own = there - here
    if other["error"]:
        return [], own if other["step"] == "load" else set(), set()
    sources = {entry["from"] for entry in known}
    experts = {one["name"]: one for one in modules if one["kind"] == "experts"}
    more = [
        entry | {key: value for key, value in experts.get(entry["to"], {}).items() if key == "variant"}
        for entry, _ in _names(other).values() if entry["from"] not in sources
    ]  # fmt: skip
    left = own & {starred_name(name) for name in other["unread"]}
    return [entry | {"other": True} for entry in more], set(), left


def _of_draft(names: Sequence[Entry], config: Mapping[str, Any]) -> Iterator[Entry]:
    """Names with `*` for the number of the layer behind the model's."""
    layers = config.get("text_config", config)["num_hidden_layers"]
    for entry in names:
        yield entry | {"from": entry["from"].replace(f"layers.{layers}.", "layers.*.")}


def _packed_twice(same: Sequence[Sequence[str]], patterns: Patterns) -> list[list[str]]:
    return [[*names] for names in {tuple(patterns.of(n)[0] for n in one): None for one in same}]


def starred_name(name: str) -> str:
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)


def _tied(facts: Facts, patterns: Patterns) -> list[list[str]]:
    """Names of parameters that are one parameter."""
    found = {tuple(patterns.of(name)[0] for name in same): None for same in facts["aliases"]}
    return [[*names] for names in found]


def _passed(name: str, patterns: Patterns) -> str:
    return re.sub(r"(layers|experts|blocks)\.[0-9]+\.", r"\1.*.", name)


def _counterpart(group: _Group, at: int, some: Sequence[_Group]) -> Entry | None:
    """The same thing at another set of sizes."""
    if at < len(some) and some[at].pattern == group.pattern:
        return some[at].entry
    same = [other for other in some if other.pattern == group.pattern]
    return same[0].entry if len(same) == 1 else None


def _entry(
    group: _Group,
    others: Sequence[Entry | None],
    expressions: Expressions | _Unknown,
    kinds: Mapping[str, list[list[int]]],
    recorded: Recorded,
) -> Entry:
    entry: Entry = {
        key: value for key, value in group.entry.items() if key not in ("sizes", "name")
    }
    made: Entry = {"name": group.pattern, **entry, _NUMBERS: group.entry.get("sizes", {})}
    for key, value in group.entry.get("sizes", {}).items():
        there = [other["sizes"][key] for other in others if other and key in other["sizes"]]
        if len(there) < len(others):
            made[key] = [""] * len(value) if isinstance(value, list) else ""
        elif isinstance(value, list):
            columns = zip(*there, strict=False)
            made[key] = [
                expressions.find(column) or _listed(column, group, recorded) for column in columns
            ]
        else:
            made[key] = expressions.find(there)
    if "padded" in made:
        made["shape"] = [expressions.find(_filled(group, recorded))]
    made |= _cut(group, recorded) | _under_methods(group, recorded)
    when = recorded.reads.get(starred_name(made.get("asked") or ""))
    made |= {"reads": when} if when else {}
    if isinstance(expressions, Expressions) and group.entry["kind"] in (
        "replicated",
        "column",
        "row",
    ):
        made |= _joined(group, recorded, others, expressions)
    shapes = [
        other.get("sizes", {}).get("shape") if other is not None else None for other in others
    ]
    if isinstance(expressions, Expressions) and all(shapes):
        made |= _parts(group, recorded, [shape[0] for shape in shapes if shape], expressions)
    base = next((b for b in kinds if group.pattern.startswith(f"{b}.*")), None)
    made |= _variant_of(base, kinds, [w[0] for w in group.where if w])
    stage = _stage(group, recorded)
    return made | ({"stage": stage} if stage else {})


def _filled(group: _Group, recorded: Recorded) -> list[int]:
    """Numbers of the tensor that fills part of a padded parameter, at each set of sizes."""
    facts = recorded.sets[0][1]
    patterns, at = patterns_of(facts), (group.pattern, group.where[0])
    held = next(held for name, held in facts["parameters"].items() if patterns.of(name) == at)
    tensor = held["pieces"][0]["tensor"]
    return [other["stored"][tensor][0] for _, other in recorded.sets]


def _listed(sizes: Sequence[int], group: _Group, recorded: Recorded) -> str:
    """A list of each config that has these sizes for all layers of a group, "" where none has."""
    layers = {where[0] for where in group.where if where}
    configs = [config.get("text_config", config) for config, _ in recorded.sets]
    if not layers or len(configs) < len(sizes) or len(sizes) < 2:
        return ""
    for key, value in configs[0].items():
        there = [config.get(key) for config in configs]
        if isinstance(value, list) and all(
            isinstance(values, list)
            and all(values[layer : layer + 1] == [size] for layer in layers)
            for values, size in zip(there, sizes, strict=True)
        ):
            return f"{key}[layer]"
    return ""


def _variant_of(
    base: str | None, kinds: Mapping[str, list[list[int]]], layers: Sequence[int]
) -> Entry:
    if base is None or len(kinds[base]) == 1:
        return {}
    has = [at for at, kind in enumerate(kinds[base]) if set(kind) & set(layers)]
    return {} if len(has) == len(kinds[base]) else {"variant": has}


def _variants(
    base: str,
    kinds: Sequence[Sequence[int]],
    names: Mapping[str, tuple[Entry, list[tuple[int, ...]]]],
    config: Mapping[str, Any],
) -> Iterator[Entry]:
    """Marks of each kind of layers: names that its checkpoint has, and a list of the config."""
    of: list[set[str]] = []
    for layers in kinds:
        has = set()
        for entry, where in names.values():
            if entry["to"].startswith(f"{base}.*.") and any(w[0] in layers for w in where if w):
                has.add(entry["from"].partition(".*.")[2])
        of.append(has)
    everywhere = set.intersection(*of)
    text = config.get("text_config", config)
    key = next((
        key for key, value in text.items()
        if isinstance(value, list) and len(value) == sum(map(len, kinds))
        and all(len({json.dumps(value[layer]) for layer in layers}) == 1 for layers in kinds)
        and len({json.dumps(value[layers[0]]) for layers in kinds}) == len(kinds)
    ), None)  # fmt: skip
    for layers, has in zip(kinds, of, strict=True):
        told: Entry = {"names": sorted(has - everywhere), "recorded": list(layers)}
        if key is not None:
            told |= {"key": key, "value": text[key][layers[0]]}
        yield told


def _cut(group: _Group, recorded: Recorded) -> Entry:
    """The dimension along which a rank's share is cut where it is not by the kind of layer."""
    whole, two = recorded.sets[0][1], recorded.tp2
    if two is None or two.get("error"):
        return {}
    patterns = patterns_of(whole)
    kind = group.entry["kind"]
    if kind == "parameter":
        name = next(
            n for n in whole["parameters"] if patterns.of(n) == (group.pattern, group.where[0])
        )
        if name not in two["parameters"]:
            return {"cut": None}
        if "padded" in group.entry:
            ends = (facts["parameters"][name]["pieces"][0]["out"] for facts in (whole, two))
            return {"cut": None if next(ends) == next(ends) else 0}
        pairs = zip(
            whole["parameters"][name]["shape"], two["parameters"][name]["shape"], strict=True
        )
        return {"cut": next((at for at, (one, other) in enumerate(pairs) if one != other), None)}
    if kind in _CUT or kind in ("head", "embedding", "experts"):
        modules = ({m["name"]: m for m in facts["modules"]} for facts in (whole, two))
        one, other = (
            next(
                (m for n, m in some.items() if patterns.of(n) == (group.pattern, group.where[0])),
                None,
            )
            for some in modules
        )
        if one is not None and other is not None and one["shapes"] == other["shapes"]:
            return {"whole": True}
    return {}


def _under_methods(group: _Group, recorded: Recorded) -> Entry:
    """Methods of quantization under which a module is not asked for, and under which ranks do not
    divide it."""
    found: dict[str, list[str]] = {}
    if recorded.tp2 is None or recorded.tp2.get("error") or group.entry["kind"] == "parameter":
        return {}
    one = _module_of(group, recorded.tp2)
    for method, facts in recorded.methods.items():
        if one is None or facts.get("error"):
            continue
        other = _module_of(group, facts)
        if one["asked"] is not None and (other is None or other["asked"] is None):
            found.setdefault("unquantized", []).append(method)  # attention is found by what it asks
        if other is not None and one.get("shapes") != other.get("shapes"):
            found.setdefault("undivided", []).append(method)
    return found


def _module_of(group: _Group, facts: Facts) -> Facts | None:
    """A group's first module in other facts."""
    patterns, at = patterns_of(facts), (group.pattern, group.where[0])
    return next((one for one in facts["modules"] if patterns.of(one["name"]) == at), None)


def _joined(
    group: _Group, recorded: Recorded, others: Sequence[Entry | None], expressions: Expressions
) -> Entry:
    """Rows of a linear that several tensors of the checkpoint fill, one after another."""
    facts = recorded.sets[0][1]
    patterns = patterns_of(facts)
    at = (f"{group.pattern}.weight", group.where[0])
    name = next((name for name in facts["parameters"] if patterns.of(name) == at), None)
    pieces = facts["parameters"][name]["pieces"] if name else []
    if len(pieces) < 2 or None in others:
        return {}
    firsts = [last - first for first, last in sorted(piece["into"][0] for piece in pieces)]
    total = [other["sizes"]["outputs"][0] for other in others if other is not None]
    return {"parts": expressions.split(total, firsts)}


def _parts(
    group: _Group, recorded: Recorded, total: Sequence[int], expressions: Expressions
) -> Entry:
    """Parts of a parameter's rows that are each cut by themselves: rank 0 of two holds a run of each."""
    two = recorded.tp2
    if two is None or two.get("error"):
        return {}
    patterns = patterns_of(two)
    for name, held in two["parameters"].items():
        at = patterns.of(name)
        if (
            at[0].removesuffix(".weight") == group.pattern.removesuffix(".weight")
            and at[1] == group.where[0]
        ):
            runs = held["pieces"][0].get("runs", []) if len(held["pieces"]) == 1 else []
            if len(runs) > 1:
                sizes = [2 * (last - first) for first, last in runs]
                return {"parts": expressions.split(total, sizes)}
    return {}


def _present(facts: Facts) -> set[tuple[str, tuple[int, ...]]]:
    patterns = patterns_of(facts)
    return {patterns.of(name) for name in _things(facts)}


def _stage(group: _Group, recorded: Recorded) -> str | None:
    """The stages that have a thing of no layer, or of a list that no stage divides."""
    if len(recorded.stages) != 2 or any(facts.get("error") for facts in recorded.stages):
        return None
    base = group.pattern.partition(".*")[0]
    if group.where[0]:
        layers = [
            {numbers[0] for pattern, numbers in present if pattern.startswith(f"{base}.*")}
            for present in (recorded.whole, *recorded.present)
        ]
        if layers[1] != layers[0] and layers[2] != layers[0]:
            return None  # goes with its layer
    at = (group.pattern, group.where[0])
    first, last = (at in present for present in recorded.present)
    return {(True, True): "all", (True, False): "first", (False, True): "last"}.get((first, last))


def _stages(recorded: Recorded, patterns: Patterns) -> str:
    """Tell whether the class runs in several stages: "many", "one" where it refuses, takes nothing from
    the one before, or has all layers in each, "unknown" where one of so few layers does not build."""
    if recorded.stages and not recorded.sets[0][1]["passes_on"]:
        return "one"
    failed = [bool(facts.get("error")) for facts in recorded.stages]
    if any(failed):
        return "one" if all(failed) else "unknown"
    whole = {at for at in recorded.whole if at[1]}
    all_in_one = any(whole <= present for present in recorded.present)
    return "one" if all_in_one and recorded.stages else "many"


def count_key(base: str, length: int, config: Mapping[str, Any]) -> str | int:
    """The key that counts the layers of a list."""
    names = (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers",
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_aux_hidden_states",
    )  # fmt: skip
    text = config.get("text_config", config)
    places: list[tuple[str, Mapping[str, Any]]] = [
        (f"{key}.", value) for key, value in config.items()
        if isinstance(value, dict) and key.endswith("_config") and key != "text_config"
    ]  # fmt: skip
    tower = re.search(r"vis|tower|image|audio", base) is not None
    used = config.get("vision_feature_layer") if tower else None
    for prefix, values in [*places, ("", text)] if tower else [("", text), *places]:
        for name in names:
            if values.get(name) == length:
                return f"{prefix}{name}"
            # Layers of a tower up to the one whose result is used, counted from its end.
            if type(used) is int and used < -1 and values.get(name) == length - 1 - used:
                return f"{prefix}{name}+1+vision_feature_layer"
        for name, value in values.items():
            if name.endswith("indexes") and isinstance(value, list) and len(value) == length:
                return f"len({prefix}{name})"
    return length


def _condensed(said: Mapping[str, str]) -> dict[str, str]:
    """Answers to names of a place: to most as "", and the others."""
    short = {leaf: what.partition(" ")[0] for leaf, what in said.items()}
    counts = {what: list(short.values()).count(what) for what in dict.fromkeys(short.values())}
    most = max(counts, key=lambda what: counts[what])
    return {"": most} | {leaf: what for leaf, what in short.items() if what != most}


# Sizes of an entry at set 0, while tables are joined.
# Names of checkpoints in other forms that a class passes over: under any setting.
_LEFT = "left"
_NUMBERS = "numbers"
# Settings of a config that change what is built.
_MERGED = ("modules", "names")
UNTIED: Mapping[str, Any] = {"tie_word_embeddings": False}


def under_settings(
    base: Mapping[str, Any],
    others: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    values: Mapping[str, Any],
    *,
    untied: bool = False,
) -> dict[str, Any]:
    """A table joined with those of other settings: what is not in both says when it is so. `values`:
    the settings of the base; `untied`: it runs in several stages where the head is not tied."""
    found = dict(base)
    for key in _MERGED:
        entries: dict[str, tuple[Entry, Entry]] = {
            json.dumps(entry, sort_keys=True): (entry, {}) for entry in base[key]
        }
        own = set(entries)
        for changed, other in others:
            ((name, value),) = changed.items()
            was = values.get(name)
            there = {}
            for entry in other[key]:
                filled = _like(entry, base[key])
                there[json.dumps(filled, sort_keys=True)] = filled
            for text, (entry, when) in entries.items():
                if text not in there and text in own and not entry.get("other"):
                    when[name] = was if isinstance(was, bool) else "set"
            for text, entry in there.items():
                if text not in entries:
                    entries[text] = (entry, {})
                    entries[text][1][name] = value
        found[key] = [
            {k: v for k, v in entry.items() if k != _NUMBERS} | ({"when": when} if when else {})
            for entry, when in entries.values()
        ]
    for changed, other in others:
        ((name, value),) = changed.items()
        for key in ("passed", "patterns", "tied", "variants"):
            if other.get(key) != base.get(key):
                found.setdefault("otherwise", {}).setdefault(f"{name}={json.dumps(value)}", {})[
                    key
                ] = other[key]
    if untied:
        tied = found.setdefault("otherwise", {}).setdefault("tie_word_embeddings=true", {})
        tied["stages"] = "one"
    found["flags"] = sorted({name for changed, _ in others for name in changed})
    left = found.pop(_LEFT)
    for each in (found, *found.get("otherwise", {}).values()):
        if "passed" in each:
            each["passed"] = sorted({*each["passed"], *left})
    return found


def _like(entry: Entry, base: Sequence[Entry]) -> Entry:
    """An entry of other settings with what was recorded of the base alone, where they are alike."""
    same = [
        other for other in base
        if (other.get("name"), other.get("kind")) == (entry.get("name"), entry.get("kind"))
    ]  # fmt: skip
    if "name" not in entry or not same:
        return entry
    numbers = entry[_NUMBERS]
    alike = next((other for other in same if other[_NUMBERS] == numbers), None)
    of_ranks = ("cut", "stage", "whole", "unquantized", "undivided", "reads", "parts")
    if alike is not None:
        return entry | {k: v for k, v in alike.items() if k in numbers or k in of_ranks}
    return entry | {k: v for k, v in same[0].items() if k in of_ranks[:-1]}


def has_gaps(found: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Tell whether a table of one set of sizes has sizes that no entry of the base has."""
    entries = (_like(entry, base["modules"]) for entry in found["modules"])
    sizes = (entry[key] for entry in entries for key in entry[_NUMBERS])
    return any(size == "" or (isinstance(size, list) and "" in size) for size in sizes)


def says(found: Mapping[str, Any], facts: Facts, sizes: Sizes, text: str) -> bool:
    """Tell whether a table has the sizes of a build wherever they follow from `text`, and some do."""
    built = {group.pattern: group.entry.get("sizes", {}) for group in _groups(facts)}
    pairs = list[tuple[Any, Any]]()
    for entry in found["modules"]:
        if not holds(entry.get("when", True), sizes):
            continue
        for key, made in built.get(entry["name"], {}).items():
            several = isinstance(made, list)
            pairs += zip(entry[key], made, strict=True) if several else [(entry[key], made)]
    told = [(one, made) for one, made in pairs if text in str(one)]
    return bool(told) and all(sizes.of(one) == made for one, made in told)


def written(record: Mapping[str, Any]) -> str:
    """A record as JSON, an entry a line."""
    lines = []
    for key in sorted(record):
        value = record[key]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row, sort_keys=True) for row in value)
            lines.append(f' "{key}": [\n  {rows}\n ]')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
