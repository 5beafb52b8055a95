"""A family from the description of a class: its roles, and which layers must have them.

A description is what `transformers_class.py` answers, as JSON. That of a class with its default sizes
says what a module is, but not which layers of another config have it, so layers are counted in the
checkpoint: modules of one block (`self_attn`, the experts and their router) must be in the same layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from qconvert.core.family import Config, Dims, Family, Role, first_int, generic_dims, text_config
from qconvert.core.names import apart_experts, layer_template, parse, split_parameter
from qconvert.core.roles import SHARED, Kind

# --- Draft layers (multi-token prediction), which no class of transformers builds -----------------


# How names of a block of its own begin.
PREFIXES = ("mtp.", "model.mtp.", "model.mtp_", "language_model.mtp.")
_BLOCK = re.compile(r"(?:model\.|language_model\.)?mtp(?:_block)?(?:\.layers)?\.\{L\}\.(.+)")
_JOINS = {
    "eh_proj": Kind.DRAFT_JOIN, "e_proj": Kind.DRAFT_JOIN, "h_proj": Kind.DRAFT_JOIN,
    "fc": Kind.DRAFT_JOIN, "mtp_linear_proj": Kind.DRAFT_JOIN, "enorm": Kind.NORM,
    "hnorm": Kind.NORM, "norm": Kind.NORM, "final_layernorm": Kind.NORM,
    "shared_head.norm": Kind.NORM, "shared_head.head": Kind.HEAD, "embed_tokens": Kind.EMBEDDING,
    "pre_fc_norm_embedding": Kind.NORM, "pre_fc_norm_hidden": Kind.NORM,
    "mtp_emb_norm": Kind.NORM, "mtp_hidden_norm": Kind.NORM,
}  # fmt: skip


def is_draft(template: str) -> bool:
    """Return whether a name template is of a block of its own."""
    return template.startswith(PREFIXES)


def blocks(kinds: Mapping[str, Kind], names: Iterable[str]) -> dict[str, Kind]:
    """The modules of drafts in a block of their own, by name template; `kinds` are those of the class's
    modules, by theirs."""
    of_layer = {name.partition(".{L}.")[2]: kind for name, kind in kinds.items() if "{L}" in name}
    found: dict[str, Kind] = {}
    for template in {parse(name).template for name in names}:
        if not is_draft(template):
            continue
        for module in (split_parameter(template)[0], template):
            block = _BLOCK.fullmatch(module)
            own = block[1] if block else module.removesuffix(".{L}").rpartition(".")[2]
            kind = of_layer.get(own, _JOINS.get(own)) if block else _JOINS.get(own)
            if kind is not None:
                found[module] = kind
                break
    return found


def numbered_on(kinds: Mapping[str, Kind], names: Iterable[str]) -> dict[str, Kind]:
    """The modules that drafts have beside those of the model's layers, where they are numbered on from
    these: `model.layers.{L}.eh_proj`. Nothing for a checkpoint without such drafts."""
    before = {name.partition("{L}.")[0] for name in kinds if ".layers.{L}." in f".{name}"}
    found: dict[str, Kind] = {}
    for template in {parse(name).template for name in names}:
        module, _ = split_parameter(template)
        start, _, own = module.partition("{L}.")
        if start in before and own in _JOINS and module not in kinds:
            found[module] = _JOINS[own]
    return found if any(kind is Kind.DRAFT_JOIN for kind in found.values()) else {}


_OF_EXPERTS = (*SHARED, Kind.ROUTER, Kind.SHARED_WEIGHT)


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a class: its kind; a number that it shares with modules in the same layers; whether it
    belongs to a vision or audio tower, or to what joins one to the language model."""

    kind: Kind
    layers: int
    tower: bool

    @classmethod
    def read(cls, text: str) -> Module:
        """From `QUERY 0` or `tower NORM 2`, as descriptions spell it."""
        *tower, kind, layers = text.split()
        return cls(Kind[kind], int(layers), bool(tower))


_BUFFER = Module(Kind.BUFFER, 0, tower=False)


@dataclass(frozen=True)
class Description:
    """A class of transformers. `modules` are its modules by name template; `keys` are the config's keys
    of num_experts and moe_intermediate_size; `experts_unread` and `not_on_cpus` say why routed
    experts are not told apart, or not computed by kt-kernel's CPU kernels ("": they are), `not_run` why
    a calibration cannot run the class a layer at a time. `layers` of each module and `sizes`, where the
    class was built for the very config, else empty. `stacks_alone`: it reads no matrices of
    experts; those of `modules` are what a packed checkpoint has in their place. `ungated`: experts are
    two matrices, down(act(up))."""

    name: str
    class_name: str
    modules: Mapping[str, Module]
    keys: Mapping[str, str]
    stacked_transposed: bool
    experts_unread: str
    not_on_cpus: str
    layers: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    not_run: str = ""
    stacks_alone: bool = False
    ungated: bool = False


def parsed(answer: Mapping[str, Any]) -> Description:
    """The description that the process of `transformers_class` or a file of `classes/` holds."""
    modules = {name: Module.read(text) for name, text in answer["modules"].items()}
    packed = {} if answer["experts_unread"] else _packed(modules)
    return Description(
        str(answer["model_type"]),
        str(answer["class"]),
        {**modules, **packed},
        dict(answer["keys"]),
        bool(answer["stacked_transposed"]),
        str(answer["experts_unread"]),
        str(answer["not_on_cpus"]),
        {module: tuple(layers) for module, layers in answer.get("layers", {}).items()},
        dict(answer.get("sizes", {})),
        str(answer.get("not_run", "")),
        bool(packed),
        bool(answer.get("ungated", False)),
    )


def _packed(modules: Mapping[str, Module]) -> Mapping[str, Module]:
    """Names of packed experts whose class reads them in stacks alone: a matrix each, below the stacks'
    module, as llm-compressor stores Llama 4's."""
    kinds = {module.kind: name for name, module in modules.items()}
    if Kind.EXPERT_GATE in kinds or not kinds.keys() >= {Kind.STACKED_GATE_UP, Kind.STACKED_DOWN}:
        return {}
    return {
        f"{apart_experts(name)}.{{E}}.{projection}_proj": replace(stack, kind=kind)
        for name, stack in modules.items()
        if stack.kind is Kind.STACKED_DOWN
        for projection, kind in (
            ("gate", Kind.EXPERT_GATE), ("up", Kind.EXPERT_UP), ("down", Kind.EXPERT_DOWN),
        )
    }  # fmt: skip


def family_of(description: Description, names: Iterable[str]) -> Family:
    """The family of a checkpoint with these names: its roles are those of the modules that it has, and
    of drafts, which no class builds. A class is saved under other names than it has itself, and a
    checkpoint holds one form."""
    names = list(names)
    description = _numbered_apart(description, names)
    modules = description.modules
    own = tuple(
        Role(_role(name, module), name, module.kind, _group(name, module), optional=True)
        for name, module in modules.items()
    )
    kinds = {name: module.kind for name, module in modules.items() if not module.tower}
    buffers = {parse(name).template for name in names if is_computed(name)} - modules.keys()
    own += tuple(Role(name, name, Kind.BUFFER, _group(name, _BUFFER), True) for name in buffers)
    joins = numbered_on(kinds, names)
    on = tuple(
        replace(r, name=f"mtp.{r.name}", layers=_of_draft(r.layers)) for r in own if r.layers
    )
    separate = tuple(
        Role(f"mtp.{_role(name, module)}", name, kind, _of_draft(_group(name, module), name), True)
        for name, kind in {**joins, **blocks(kinds, names)}.items()
        for module in [Module(kind, 0, tower=False)]
    )
    family = Family(
        description.name, (), generic_dims, (*own, *(on if joins else ()), *separate),
        mtp=PREFIXES,
    )  # fmt: skip
    every = set(description.modules)
    there = {role.module for name in names for role in family.candidates(name)[0]}
    family = replace(
        family,
        roles=tuple(role for role in family.roles if role.module in there),
        tied=("lm_head", "embed_tokens"),
        stacked_transposed=description.stacked_transposed,
        experts_unread=description.experts_unread,
        not_on_cpus=description.not_on_cpus,
        not_run=description.not_run,
        ungated=description.ungated,
        class_name=description.class_name,
        layers_counted=not description.layers,
        expert_templates={
            module.kind: name
            for known in (every, there)  # the names that it has are the last
            for name, module in description.modules.items()
            if name in known
            and module.kind.routed
            and module.kind is not Kind.EXPERT_UNKNOWN
            and not (description.stacks_alone and "{E}" in name)
        },
    )
    family = replace(family, class_names=_class_names(description, there))
    stated = _stated(family, description) if description.layers else {}
    groups = {**_found(family, names), **stated}
    counted = {r.layers for r in family.roles if not r.name.startswith(("mtp.", "vision."))}
    return replace(family, dims=_dims(description, groups, counted, numbered_on=bool(joins)))


def _class_names(description: Description, there: Collection[str]) -> Mapping[str, str]:
    """The class's own names of modules that a checkpoint has under others: of a kind of which each has
    one; of routed experts the first that the class has of any kind."""
    by_kind: dict[Kind, tuple[list[str], list[str]]] = {}
    for name, module in description.modules.items():
        if module.tower or "{L}" not in name or module.kind is Kind.EXPERT_UNKNOWN:
            continue
        shared = Kind.EXPERT_DOWN if module.kind.routed else module.kind
        by_kind.setdefault(shared, ([], []))[name not in there].append(name)
    found: dict[str, str] = {}
    for kind, (published, own) in by_kind.items():
        if published and (len(published) == len(own) == 1 or (kind.routed and own)):
            where = apart_experts if kind.routed else str
            found |= {old: own[0] for old in published if where(old) != where(own[0])}
    return found


def _numbered_apart(description: Description, names: Iterable[str]) -> Description:
    """Modules that a layer has several of, as LongCat's two attentions, are a role each: as one, all but
    one would be lost. What a kind says of a layer (which matrices are fused, which are one projection)
    does not hold of several, so that their matrices are just linears."""
    apart: dict[str, str] = {}
    for name in names:
        template, _, _ = parse(name)
        module, _ = split_parameter(template)
        if "{I}" in module and module in description.modules:
            apart[split_parameter(layer_template(name))[0]] = module
    modules = {name: one for name, one in description.modules.items() if "{I}" not in name}
    layers = dict(description.layers)
    for name, template in apart.items():
        one = description.modules[template]
        plain = one.kind.linear and one.kind is not Kind.VISION
        modules[name] = replace(one, kind=Kind.LINEAR) if plain else one
        if template in description.layers:
            layers[name] = description.layers[template]
    return replace(description, modules=modules, layers=layers)


def _of_draft(group: str, name: str = "") -> str:
    """The layers of a group's modules that are drafts: of one module, if its name is given, because
    drafts in a block of their own may differ from one another."""
    return "mtp_moe" if group == "moe" else f"mtp {name or group}" if group else ""


# Names of roles that stand for themselves wherever a family is asked: of stages, ties, experts.
_NAMED = {
    Kind.HEAD: "lm_head", Kind.EMBEDDING: "embed_tokens",
    Kind.EXPERT_GATE: "experts.gate_proj", Kind.EXPERT_UP: "experts.up_proj",
    Kind.EXPERT_DOWN: "experts.down_proj", Kind.STACKED_DOWN: "stacked_experts.down_proj",
    Kind.STACKED_GATE_UP: "stacked_experts.gate_up_proj",
    Kind.STACKED_GATE: "stacked_experts.gate_proj", Kind.STACKED_UP: "stacked_experts.up_proj",
}  # fmt: skip


def _role(name: str, module: Module) -> str:
    if module.tower:
        return f"vision.{name}"
    if module.kind is Kind.NORM and "{L}" not in name and name.endswith(("norm", "norm_f", "ln_f")):
        return "norm"
    return _NAMED.get(module.kind, name)


def _group(name: str, module: Module) -> str:
    """The layers that must have a module: those of its block. "" if it has no layer number."""
    if "{L}" not in name:
        return ""
    if module.kind.routed or module.kind in _OF_EXPERTS:
        return "moe"
    parent, _, _ = name.rpartition(".")
    return f"{parent if '{L}' in parent else name} {module.layers}"


def _stated(family: Family, description: Description) -> Mapping[str, tuple[int, ...]]:
    """The layers of each group by the class itself, which builds no drafts."""
    found: dict[str, set[int]] = {}
    for role in family.roles:
        if role.layers and not role.name.startswith("mtp."):
            found.setdefault(role.layers, set()).update(description.layers.get(role.module, ()))
    return {group: tuple(sorted(layers)) for group, layers in found.items()}


def _found(family: Family, names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
    """The layers of each group that a checkpoint has any module of, those of drafts among them."""
    found: dict[str, set[int]] = {}
    for name in names:
        roles, layer, _, _ = family.candidates(name)
        if roles and layer is not None:
            for role in roles:
                found.setdefault(role.layers, set()).add(layer)
    return {group: tuple(sorted(layers)) for group, layers in found.items()}


def _dims(
    description: Description,
    groups: Mapping[str, tuple[int, ...]],
    counted: Collection[str],
    *,
    numbered_on: bool,
) -> Callable[[Config], Dims]:
    """`groups`: layers by group, of drafts and towers too; `counted`: those of the text model;
    `numbered_on`: layers of drafts follow the model's own, and a group of either has all that were
    counted."""
    own = [n for group, found in groups.items() for n in found if group in counted]
    layers = max(own, default=-1) + 1
    # No closure: a family is sent to the processes that calibrate.
    return partial(_read_dims, description.keys, description.sizes, groups, layers, numbered_on)


def _read_dims(
    keys: Mapping[str, str],
    sizes: Mapping[str, int],
    groups: Mapping[str, tuple[int, ...]],
    layers: int,
    numbered_on: bool,
    config: Config,
) -> Dims:
    found, text = generic_dims(config), text_config(config)
    experts = first_int(text, keys["num_experts"]) if "num_experts" in keys else 0
    width = first_int(text, keys.get("moe_intermediate_size", "")) if experts else 0
    number = found.num_layers or layers
    of = {
        group: tuple(n for n in all_of if not numbered_on or _draft(group) == (n >= number))
        for group, all_of in {**groups, "moe": groups.get("moe", ())}.items()
    }
    drafted = {n for group, all_of in of.items() if _draft(group) for n in all_of}
    return replace(
        found,
        num_layers=number,
        hidden_size=found.hidden_size or sizes.get("hidden_size", 0),
        num_experts=experts or sizes.get("num_experts", 0) or found.num_experts,
        moe_intermediate_size=width
        or sizes.get("moe_intermediate_size", 0)
        or found.moe_intermediate_size,
        mtp_layers=found.mtp_layers or len(drafted),
        groups=of,
    )


def _draft(group: str) -> bool:
    return group.startswith("mtp")


def described(description: Description, template: str) -> bool:
    module, _ = split_parameter(template)
    bare = template
    for suffix in ("_scale_inv", "_scale", "_blocks", "_scales"):
        bare = bare.removesuffix(suffix)
    return any(name in description.modules for name in (module, template, bare))


def without_prefix(description: Description) -> Description:
    """The description of checkpoints that the base model alone was saved as: GPT-2 is published as
    `h.0.attn`, which its class has as `transformer.h.0.attn`. transformers adds the prefix when it
    loads one (core_model_loading.py, rename_source_key). The head has none."""
    prefixes = {
        name.partition(".")[0] for name, module in description.modules.items()
        if "{L}" in name and not module.tower and not name.startswith("{L}")
    }  # fmt: skip
    if len(prefixes) != 1:
        return description
    (prefix,) = prefixes
    bare = {name.removeprefix(f"{prefix}."): m for name, m in description.modules.items()}
    return replace(description, modules=bare)


def is_computed(name: str) -> bool:
    """Return whether it is a buffer that classes compute, and that old repos hold all the same."""
    return name.endswith(".rotary_emb.inv_freq")


def unresolved(description: Description, names: Iterable[str], layers: int) -> list[str]:
    """A name of each module template that the description lacks, drafts left out."""
    found: dict[str, str] = {}
    for name in names:
        template, layer, _ = parse(name)
        if is_draft(template) or is_computed(name) or (layer is not None and layer >= layers > 0):
            continue
        if not described(description, template):
            found.setdefault(template, name)
    return list(found.values())
