"""The table of one class of a runtime: what it builds for a config, and where it puts the tensors of a
checkpoint.

A table was made by the runtime itself (tests/loaders/record_classes.py): the class was built at
several sizes, and loaded tensors that told which and where they are. `*` stands for a number in a dotted
name, of a layer or an expert. Sizes are expressions over the config (expressions.py). A class that has
another's code, and makes the same of a checkpoint, has a table that names that one (`same_as`). The
table of an earlier release states what differs from that of a later one (`as_in`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from qconvert.checkpoint.quantization_config import Entries
from qconvert.core.dtypes import TensorType
from qconvert.core.names import KV_SCALES
from qconvert.core.patterns import compiled
from qconvert.core.shown import count
from qconvert.core.versions import RELEASES
from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.loading.config_groups import Group, block_of, is_group
from qconvert.runtimes.loading.load_weights import Tensors
from qconvert.runtimes.loading.parameters import Kind
from qconvert.runtimes.loading.setting import NotSimulated, Setting

_TABLES = Path(__file__).parent
Config = Mapping[str, Any]
# A size, or numbers known without a config.
Size = str | int
# What follows from flags of the config: always, never, or where each has a value.
Condition = bool | Mapping[str, Any]
ModuleKind = Literal[
    "replicated", "column", "merged", "merged_replicated", "qkv", "row", "experts", "embedding",
    "head", "attention", "latent_attention", "convolution", "parameter",
]  # fmt: skip
# Linears, as ranks divide them.
LINEARS: Mapping[str, Kind] = {
    "replicated": "replicated", "column": "column", "merged": "merged", "merged_replicated": "merged",
    "qkv": "qkv", "row": "row",
}  # fmt: skip
# Keys that classes ask for and take something else in place of, where a config does not state them.
_HEAD = re.compile(r"head_dim$|kv_channels$")
_BIAS = re.compile(r"(^|_)bias$")
# Blocks of a draft's config beside the keys of its layers.
DRAFT_BLOCKS = ("eagle_config", "dflash_config")
# Among the forms that agree: folders of pipeline stages.
STAGES = "stages"
UNQUANTIZED = "unquantized"
Place = Literal[
    "fused", "linear", "experts", "parameter", "draft", "next_layer", "behind", "module", "rotary",
    "head",
]  # fmt: skip
Outcome = Literal["error", "warn", "silent", "tied"]


@dataclass(frozen=True, slots=True)
class Module:
    """A module that has a method of quantization, or one plain parameter. `sizes` are those of its kind:
    inputs and outputs of a linear; inputs, heads, key-value heads and the sizes of a head of keys and of
    values of qkv; routed, hidden and inner of experts; rows and columns of an embedding; the shape of a
    parameter or of a convolution's weight. `asked`: the name for which the quantization config is asked,
    None where it is not; `unquantized`: methods of quantization under which it is not, either. `stage`:
    of the pipeline, "" where its layer decides; `variants`: kinds of layers that have it, if not all.
    `whole`: a linear that every rank has all of; `cut`: the dimension along which ranks share a
    parameter, in `parts`. `loads`: a checkpoint has it; `in_parts`: a tensor fills several parts of it,
    which the class takes apart itself; `undivided`: methods of quantization under which every rank has
    all of it; `reads`: the class reads its `weight` while it builds, or once all is loaded; `buffer`: it
    has a value without a checkpoint; `padded`: to a multiple of so many, which the class fills."""

    name: str
    kind: ModuleKind
    sizes: tuple[Size, ...]
    asked: str | None = None
    unquantized: tuple[str, ...] = ()
    bias: Condition = False
    when: Condition = True
    stage: str = ""
    variants: tuple[int, ...] = ()
    whole: bool = False
    gated: bool = True
    dtype: str = "model"
    cut: int | None = None
    parts: tuple[Size, ...] = ()
    loads: bool = True
    in_parts: bool = False
    undivided: tuple[str, ...] = ()
    reads: Literal["", "build", "load"] = ""
    buffer: bool = False
    padded: int = 1


@dataclass(frozen=True, slots=True)
class Name:
    """Destination of a checkpoint's module, whose parameters keep their names; or of one parameter,
    under another name if `leaf` says so. `shard`: the part of a fused module, or of experts ("w13": gate
    and up); `stack`: all experts in one tensor; `rows`: what becomes of their order and numbers;
    `other`: of a checkpoint in another form than transformers saves; `shared`: of a shared expert that
    is loaded as one more routed one."""

    source: str
    to: str
    shard: str | int | tuple[int, ...] | None = None
    leaf: str = ""
    parameter: bool = False
    stack: bool = False
    transposed: bool = False
    rows: str = ""
    variants: tuple[int, ...] = ()
    when: Condition = True
    other: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of layer: names that its checkpoint has and those of other kinds have not, the value that a
    list of the config has for it, and which layers were of it."""

    names: tuple[str, ...]
    key: str = ""
    value: Any = None
    recorded: tuple[int, ...] = ()


Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mapper:
    """Replacements in names: `patterns`, then `parts` anywhere, `starts` and `ends`."""

    starts: Pairs = ()
    parts: Pairs = ()
    ends: Pairs = ()
    patterns: Pairs = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A class. `layers`: containers of numbered layers and how many there are; `packed`: names that it
    fuses, as a quantization config is asked; `mappers`: what it replaces in the names that one lists,
    `renames_more`: by other rules, too; `unknown`: what a parameter that is not there does, by place and
    name ("": any other); `tied`: parameters that are one; `agrees`: forms of folders,
    each with the tensor-parallel sizes at which the loader itself did what the simulator says; `draft`:
    it is of the class that loads the draft of a folder; `otherwise`: what else holds under a setting of
    the config; `fuses_shared`: it may load shared experts as routed ones, which the table does not show.
    `keys`: of the configs that it was recorded with; `also`: other names of keys; `refused`: names of
    checkpoints in other forms that end the load; `first`: first numbers of layers, if not 0;
    `unwritten_stages`: under tied embeddings no tensor comes to the head of its last stage;
    `needs_experts`: it refuses a stage without experts, None where that was not tried;
    `asks`: keys that a config must state; `caches`: it takes scales of a cache that lie beside a
    projection of keys or values; `alone`: it is of a draft in a folder of its own; `instead`: sizes that
    it takes for those that a config leaves out (`Sizes`); `patterns`: what it replaces in names of
    tensors, where that tells which parameter of a module one is."""

    runtime: str
    version: str
    architecture: str
    model_type: str
    layers: Mapping[str, Size]
    modules: tuple[Module, ...]
    names: tuple[Name, ...]
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mappers: tuple[Mapper, ...] = ()
    renames_more: bool = False
    one_stage: bool = False
    unwritten_stages: bool = False
    variants: Mapping[str, tuple[Variant, ...]] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    passed: tuple[str, ...] = ()
    unknown: Mapping[str, Mapping[str, Outcome]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    agrees: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    draft: bool = False
    otherwise: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fuses_shared: bool = False
    also: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    first: Mapping[str, Size] = field(default_factory=dict)
    needs_experts: bool | None = None
    asks: tuple[str, ...] = ()
    caches: bool = True
    alone: bool = False
    instead: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    patterns: Pairs = ()

    def sizes(self, values: Mapping[str, Any]) -> Sizes:
        """Values of a config. Raises NotSimulated for one that states a size of heads, or biases, that
        the class was recorded without, and for any other word of a draft's: it may be built by that."""
        if self.renames_more:
            raise NotSimulated("its class renames names by patterns, which there are no rules for")
        for key, value in values.items():
            builds = (type(value) is int and _HEAD.search(key)) or (
                value is True and (self.alone or _BIAS.search(key))
            )
            block = self.alone and key in DRAFT_BLOCKS and isinstance(value, Mapping)
            inner = [f"{key}.{name}" for name in value] if block else []
            for one in (*([key] if builds else []), *inner):
                if self.keys and one not in self.keys:
                    raise NotSimulated(
                        f"config.json states {one}, and its class was recorded without it"
                    )
        return Sizes(values, self.defaults, self.also, self.instead)

    def under(self, sizes: Sizes) -> Record:
        """The table for the settings of a config."""
        changed: dict[str, Any] = {}
        for setting, other in self.otherwise.items():
            key, _, value = setting.partition("=")
            if sizes.has(key, json.loads(value)):
                changed |= other
        kept = tuple(name for name in self.names if holds(name.when, sizes))
        return replace(self, names=kept, **_facts(changed))

    def leaf(self, tensor: str) -> str:
        """The last part of a tensor's name, as the class's patterns rewrite it."""
        for pattern, new in self.patterns:
            tensor = compiled(pattern).sub(new, tensor)
        return tensor.rpartition(".")[2]

    def outcome(self, place: Place, leaf: str) -> Outcome | None:
        """Consequence of a parameter that is not there, None where the class was offered none."""
        said = self.unknown.get(place, {})
        return said.get(leaf, said.get(""))

    def agreed(self, form: str, setting: Setting) -> bool:
        """Tell whether the loader was asked about a form at this size; of more than one rank, at any
        size of that or of no form: how ranks divide a stored form is one rule for all classes, and what
        a class divides is seen without one."""
        at = self.agrees.get(form, ())
        if not at or (setting.pp > 1 and STAGES not in self.agrees):
            return False
        plain = [one for key, one in self.agrees.items() if key.startswith(UNQUANTIZED)]
        several = any(size > 1 for sizes in (at, *plain) for size in sizes)
        return setting.tp in at or (setting.tp > 1 and several)

    def agreed_in_parts(self, parts: Collection[tuple[str, ...]], setting: Setting) -> bool:
        """Tell whether the loader was asked about each part of a mixture, by any of its forms, and about
        some mixture: which group a module has follows from names alone, whatever the group says."""
        mixed = any(MIXED in form for form in self.agrees)
        each = (any(self.agreed(form, setting) for form in forms) for forms in parts)
        return mixed and bool(parts) and all(each)


def holds(condition: Condition, sizes: Sizes) -> bool:
    """Tell whether flags of the config have the values of a condition."""
    if isinstance(condition, bool):
        return condition
    return all(sizes.has(key, value) for key, value in condition.items())


def architecture_of(config: Config) -> str:
    """The class that a config names, "" where it names none."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def class_record(
    runtime: str, architecture: str, version: str | None = None, *, draft: bool = False
) -> Record:
    """The table of a class, or of that of its draft. Raises NotSimulated where there is none."""
    found = recorded(runtime, architecture, version, draft=draft)
    if found is None and draft:
        raise NotSimulated(f"a draft of {architecture}")
    if found is None:
        raise NotSimulated("not recorded: --loader PYTHON asks it")
    return found


def check_form(
    record: Record, config: Config, tensors: Mapping[str, TensorType], setting: Setting
) -> None:
    """Raise NotSimulated for a form in which the loader was not seen to do what the table says."""
    tensors = Tensors.of(tensors)
    form = tensors.once("form", config, form_of)
    parts = tensors.once("parts", config, parts_of)
    whole = form
    if setting.pp > 1 and not any(_EXPERTS in name for name in tensors):
        # The folder of a stage of dense layers: of a model whose experts have codes, too.
        whole = form.replace(" of linears", " of linears and experts")
    tried = record.agreed(form, setting) or record.agreed(whole, setting)
    if not tried and not record.agreed_in_parts(parts, setting):
        at = f"{form}, {count(setting.pp, 'stage')}" if setting.pp > 1 else form
        raise NotSimulated(f"not tried with {at}: --loader PYTHON asks it")


def recorded(
    runtime: str, architecture: str, version: str | None = None, *, draft: bool = False
) -> Record | None:
    """The table of a class, or of that of its draft, None where there is none. `version`: of the
    runtime, by default the one that
    everything here was checked with."""
    release = RELEASES.get(runtime)
    known = release and (release.version if version is None else release.known(version))
    if not known or not architecture.isidentifier():
        return None
    name = f"{architecture}.draft" if draft else architecture
    return _read(_TABLES / f"{runtime}-{known}" / f"{name}.json")


@lru_cache(maxsize=64)
def _read(path: Path) -> Record | None:
    table = whole(path)
    if "same_as" in table:
        same = _read(path.with_stem(table["same_as"]))
        return same and replace(same, architecture=table["architecture"])
    return record_of(table) if "modules" in table else None  # there is a list of what has no table


def whole(path: Path) -> dict[str, Any]:
    """The table in a file, with what one of an earlier release takes from that of a later one; {} where
    there is no file. Forms that agree are each release's own."""
    table: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    if "as_in" not in table:
        return table
    later = whole(path.parent.with_name(f"{table['runtime']}-{table['as_in']}") / path.name)
    lacks = {"agrees", *table.get("lacks", ())}
    taken = {key: value for key, value in later.items() if key not in lacks}
    return taken | {key: value for key, value in table.items() if key not in ("as_in", "lacks")}


def what_differs(
    table: Mapping[str, Any], later: Mapping[str, Any], release: str
) -> dict[str, Any]:
    """The table of an earlier release as `whole` reads it beside that of a later one, `release`."""
    kept = ("agrees", "architecture", "draft", "model_type", "runtime", "version")
    own = {key: value for key, value in table.items() if key in kept or later.get(key) != value}
    lacks = sorted(later.keys() - table.keys() - {"agrees"})
    return {**own, "as_in": release, **({"lacks": lacks} if lacks else {})}


def reread() -> None:
    """Forget tables that were read: one was written."""
    _read.cache_clear()


def record_of(table: Mapping[str, Any]) -> Record:
    """A record from its JSON. Raises KeyError and ValueError for a table that is none."""
    fused = {one["to"] for one in table["names"] if isinstance(one.get("shard"), list)}
    return Record(
        table["runtime"], table["version"], table["architecture"], table["model_type"],
        dict(table["layers"]),
        tuple(_module(one, fused) for one in table["modules"]),
        tuple(_name(one) for one in table["names"]),
        packed={key: tuple(parts) for key, parts in table.get("packed", {}).items()},
        **_renames(table.get("renames", ())), **_facts(table), defaults=table.get("defaults", {}),
        agrees={form: tuple(sizes) for form, sizes in table.get("agrees", {}).items()},
        draft=table.get("draft", False), otherwise=table.get("otherwise", {}),
        fuses_shared=table.get("fuses_shared", _has_shared(table)),
        also=table.get("attribute_map", {}), keys=frozenset(table.get("keys", ())),
        refused=frozenset(table.get("refused", ())), first=table.get("first", {}),
        needs_experts=table.get("needs_experts"), asks=tuple(table.get("asks", ())),
        caches=table.get("caches", True), alone=table.get("alone", False),
        instead={text: tuple(others) for text, others in table.get("instead", {}).items()},
    )  # fmt: skip


def _has_shared(table: Mapping[str, Any]) -> bool:
    """Tell whether a class may load shared experts as routed ones: one of sglang's that has any."""
    shared = any(".shared_expert" in module["name"] for module in table["modules"])
    return shared and table["runtime"] == "sglang"


def _facts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that settings of a config may change, as fields of a record."""
    found: dict[str, Any] = {}
    if "passed" in table:
        found["passed"] = tuple(table["passed"])
    if "unknown" in table:
        found["unknown"] = table["unknown"]
    if "stages" in table:
        found["one_stage"] = table["stages"] == "one"
        found["unwritten_stages"] = table["stages"] == "unwritten"
    if "patterns" in table:
        found["patterns"] = _pairs(table["patterns"])
    if "tied" in table:
        found["tied"] = tuple(map(tuple, table["tied"]))
    if "variants" in table:
        found["variants"] = {
            key: tuple(map(_variant, kinds)) for key, kinds in table["variants"].items()
        }
    return found


def _variant(table: Mapping[str, Any]) -> Variant:
    names, recorded = tuple(table["names"]), tuple(table.get("recorded", ()))
    return Variant(names, table.get("key", ""), table.get("value"), recorded)


_RENAMES = ("prefix", "substr", "suffix", "regex")


def _renames(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rules of a class's mappers, one after another, and whether they do more."""
    stated = [one for one in tables if one]
    made = [Mapper(*(_pairs(one.get(key, ())) for key in _RENAMES)) for one in stated]
    return {
        "mappers": tuple(made),
        "renames_more": any(not set(one) <= {*_RENAMES} for one in stated),
    }


def _pairs(pairs: Sequence[Sequence[str]]) -> Pairs:
    return tuple((old, new) for old, new in pairs)


# Keys of a module's sizes, by its kind.
_SIZES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("inputs", "heads", "kv_heads", "head_size", "v_head_size"),
    "experts": ("routed", "hidden", "inner"),
}  # fmt: skip


def _module(table: Mapping[str, Any], fused: Collection[str]) -> Module:
    kind = cast("ModuleKind", table["kind"])
    if kind in LINEARS and "shape" in table:
        kind, sizes = "convolution", table["shape"]
    elif kind in _SIZES:
        sizes = [table[key] for key in _SIZES[kind] if key != "v_head_size" or key in table]
    elif kind in LINEARS:
        sizes = [table["inputs"], *table["outputs"]]
    elif kind == "parameter":
        sizes = table["shape"]
    else:
        sizes = [table["rows"], table["inputs"]] if "rows" in table else []
    return Module(
        table["name"], kind, tuple(sizes), table.get("asked"), tuple(table.get("unquantized", ())),
        table.get("bias", False), table.get("when", True), table.get("stage", ""),
        tuple(table.get("variant", ())), table.get("whole", kind == "merged_replicated"),
        table.get("gated", True), table.get("dtype", "model"), table.get("cut"),
        tuple(table.get("parts", ())), table.get("loads", True), table["name"] in fused,
        tuple(table.get("undivided", ())), table.get("reads", ""),
        table.get("buffer", False), table.get("padded", 1),
    )  # fmt: skip


def _name(table: Mapping[str, Any]) -> Name:
    shard = table.get("shard")
    return Name(
        table["from"], table["to"], tuple(shard) if isinstance(shard, list) else shard,
        table.get("leaf", ""), table.get("parameter", False), table.get("stack", False),
        table.get("transposed", False), table.get("rows", ""), tuple(table.get("variant", ())),
        table.get("when", True), table.get("other", False),
    )  # fmt: skip


def form_of(config: Config, tensors: Mapping[str, TensorType]) -> str:
    """The form of a folder as tables list those that were tried: the quantization that its config
    states, which kinds of modules have codes, and whether experts are in stacks."""
    scaled = [name for name in tensors if _has_scale(name, tensors)]
    held = [
        *(["linears"] if any(_EXPERTS not in name for name in scaled) else []),
        *(["experts"] if any(_EXPERTS in name for name in scaled) else []),
    ]
    block = block_of(config) or {}
    text = _method(block or None)
    if block.get("quant_method") == "fp8" and config.get("model_type") == "deepseek_v4":
        text += f" beside {block.get('moe_quant_algo') or config.get('expert_dtype', 'fp4')}"
    return text + (f" of {' and '.join(held)}" if held else "") + _beside(tensors)


def _has_scale(name: str, tensors: Mapping[str, TensorType]) -> bool:
    """Tell whether a tensor has a matrix's scales; `scale` is the name of others, too."""
    module, _, parameter = name.rpartition(".")
    if parameter != "scale":
        return parameter in _SCALES
    weight = tensors.get(f"{module}.weight")
    return weight is not None and weight.dtype not in ("F16", "BF16", "F32")


def parts_of(config: Config, tensors: Mapping[str, TensorType]) -> tuple[tuple[str, ...], ...]:
    """The parts of a mixture in compressed-tensors' form: of each group, and each kind of modules that
    it covers, the forms of folders that are so throughout. () for all else."""
    block = block_of(config) or {}
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) < 2 or "linear_fp8_config" in block:
        return ()
    entries = Entries.of({target: key for key, one in groups.items() for target in one["targets"]})
    found = dict[tuple[str, str], None]()
    for name in tensors:
        module, _, parameter = name.rpartition(".")
        if parameter in _SCALES and (key := entries.find(module)) is not None:
            found[key, "experts" if _EXPERTS in name else "linears"] = None
    beside = _beside(tensors)
    parts = []
    for key, kind in found:
        whole = {**block, "config_groups": {key: groups[key]}}
        whole["format"] = groups[key].get("format") or block.get("format")
        text = _method(whole)
        parts.append(tuple(f"{text} of {held}{beside}" for held in (kind, "linears and experts")))
    return tuple(parts)


def _beside(tensors: Mapping[str, TensorType]) -> str:
    stacks = any(_EXPERTS in name and len(type.shape) > 2 for name, type in tensors.items())
    caches = any(name.endswith(KV_SCALES) for name in tensors)
    found = [*(["stacks"] if stacks else []), *(["scales of a cache"] if caches else [])]
    return f" with {' and '.join(found)}" if found else ""


MIXED = " + "  # between the groups of a mixture
_EXPERTS = ".experts."
# Parameters of which a quantized module has one.
_SCALES = ("weight_scale", "weight_scale_inv", "scales")


def _method(block: Config | None) -> str:
    if block is None:
        return UNQUANTIZED
    method = str(block.get("quant_method") or "modelopt")
    if method == "fp8":
        return "fp8 in blocks" if block.get("weight_block_size") else "fp8"
    if method == "modelopt":
        return f"modelopt {block.get('quant_algo')}"
    if method == "mxfp4":
        return method
    if method in ("gptq", "awq"):
        return f"{method} of {block.get('bits')} bits"
    groups = block.get("config_groups")
    found = dict.fromkeys(
        _group(Group(group["weights"], group.get("input_activations") or None, group.get("format")))
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and is_group(group)
    )
    beside = ["linear_fp8_config"] if "linear_fp8_config" in block else []
    return f"{method} {MIXED.join([*found, *beside])} in {block.get('format')}"


def _group(group: Group) -> str:
    kind = "int" if group.integers else "float"
    words = [f"{kind}{group.bits} by {group.strategy}"]
    words += [] if group.symmetric else ["asymmetric"]
    words += ["ordered"] if group.actorder else []
    words += [f"A{group.inputs.get('num_bits', 8)}"] if group.inputs else []
    return " ".join(words)
