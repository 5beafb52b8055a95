"""Model families: which tensor of a checkpoint has which role, in which layers.

A family is data, one file in `layouts/`. The engine asks it for three things: the model's dimensions,
the role of a tensor name, and which layers a role must cover. The last turns "35 of 36 layers
matched" from a silent accident into an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from qconvert.core.discovery import FAMILIES, discover
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.names import (
    apart_experts,
    around_expert,
    experts_module,
    is_number,
    layer_template,
    parse,
    split_parameter,
)
from qconvert.core.roles import EXPERT_COUNTS, Kind

Config = Mapping[str, Any]

# Config keys that count draft (MTP) layers.
MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# In a config of speculators: the config of the draft's own layers.
DRAFT_LAYERS = "transformer_layer_config"
_MOST = 65_536  # layers, or experts of a layer
_TOWER_LAYERS = ("depth", "vt_num_hidden_layers", "num_hidden_layers")


def text_config(config: Config) -> Config:
    """The language model's settings: nested under `text_config` in multi-modal configs, and those of a
    draft's layers in configs of speculators. Keys the nested block lacks (tie_word_embeddings in some
    releases) are looked up in the root."""
    nested = config.get("text_config", config.get(DRAFT_LAYERS))
    return {**config, **nested} if isinstance(nested, Mapping) else config


def draft_algorithm(config: Config) -> str:
    """The algorithm of a draft that stands alone, as speculators names it: `eagle3`, `dflash` or another
    one; "" for any other config."""
    stated, named = config.get("speculators_model_type"), config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    own = "eagle3" if "Eagle3" in first else "dflash" if first == "DFlashDraftModel" else ""
    return own if stated is None else str(stated)


def vision_config(config: Config) -> Config:
    """The vision tower's settings, empty if there are none. Raises CheckpointError for a block
    that is not an object, or that counts more layers than any tower has."""
    found = config.get("vision_config")
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: vision_config must be an object, found {found!r}")
    for key in _TOWER_LAYERS:
        counted(found, key)
    return found


@dataclass(frozen=True, slots=True)
class Dims:
    """The numbers a config states. `groups` maps a group name ("all", "moe", "mtp", ...) to the
    layer indices in it; `num_experts` is 0 for dense models; `gdn` are (nk, nv, dk, dv) of Gated
    DeltaNet layers, None where there are none."""

    hidden_size: int
    num_layers: int
    num_experts: int
    mtp_layers: int
    groups: Mapping[str, tuple[int, ...]]
    tied: bool = False
    moe_intermediate_size: int = 0
    gdn: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of module in the model.

    `module` is a name template without its parameter: `model.layers.{L}.self_attn.q_a_proj`, or,
    for bare parameters, `model.layers.{L}.linear_attn.A_log`. `kind` is what the module does, which
    decides how conversions treat it. `layers` names a group of Dims.groups
    that must all have it; "" means the module has no layer number, "*" that it may be in any
    layer and the number of layers is unknown. `optional` roles may be absent as a whole (a bias, an
    alternative expert form), never in part.
    """

    name: str
    module: str
    kind: Kind
    layers: str = ""
    optional: bool = False

    @property
    def per_expert(self) -> bool:
        return "{E}" in self.module

    @property
    def vision(self) -> bool:
        """Tell whether it is a part of a tower, of images or sound, beside the text model."""
        return self.name.startswith("vision.")


class Place(NamedTuple):
    """Place of a tensor: its role, layer, expert and parameter ("" for a bare parameter)."""

    role: Role
    layer: int | None
    expert: int | None
    parameter: str


@dataclass(frozen=True)
class Family:
    """A model family.

    `model_types` are the config's `model_type` values (root or text_config) it answers to, and
    `architectures` classes that state the model_type of another family, or none. `aliases` are other
    beginnings of names, and what these are in `roles`. `dims` reads a config (root). `prefixes` are
    tried in turn for the `@` that may open a role's module, so that one table serves text-only and
    multi-modal names. `mtp` are the first parts of name templates that mark multi-token-prediction
    (draft) tensors where a layer number does not. `tied` are the roles of the head and of the embeddings
    it may share. `stacked_transposed` says that 3-D expert stacks of published checkpoints hold
    [E, H, 2I] and [E, I, H], not [E, 2I, H] and [E, H, I].

    `expert_templates` are the modules of routed experts that the class reads, in either form, where
    they are known. `class_name` is the class of transformers that a derived family was read from.
    `experts_unread` says why its routed experts cannot be told apart into gate, up and down;
    `not_on_cpus` why kt-kernel's CPU kernels, down(silu(gate) * up), do not compute what they do;
    `not_run` why a calibration cannot run its class a layer at a time; `ungated` says that its experts
    are two matrices, down(act(up));
    `undescribed` why there is no description at all, in a generic family. "" where there is no such
    reason. `class_names` are the class's own names, by template, of modules that are published under
    others: runtimes that build the class, or name theirs so, ask for those.
    `layers_counted`: which layers have a block is read from the names, so that one which
    lacks it as a whole is not missed.
    """

    name: str
    model_types: tuple[str, ...]
    dims: Callable[[Config], Dims]
    roles: tuple[Role, ...]
    prefixes: tuple[str, ...] = ("",)
    tied: tuple[str, str] | None = None
    mtp: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    stacked_transposed: bool = False
    class_name: str = ""
    experts_unread: str = ""
    not_on_cpus: str = ""
    not_run: str = ""
    ungated: bool = False
    undescribed: str = ""
    layers_counted: bool = False
    expert_templates: Mapping[Kind, str] = field(default_factory=dict)
    class_names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _by_module(self) -> dict[str, tuple[Role, ...]]:
        table: dict[str, list[Role]] = {}
        for role in self.roles:
            modules = (
                [prefix + role.module[1:] for prefix in self.prefixes]
                if role.module.startswith("@")
                else [role.module]
            )
            for module in modules:
                table.setdefault(module, []).append(role)
        return {module: tuple(roles) for module, roles in table.items()}

    @cached_property
    def openings(self) -> frozenset[str]:
        """The first components of all names that the family describes."""
        return frozenset(module.partition(".")[0] for module in (*self._by_module, *self.aliases))

    @cached_property
    def expert_paths(self) -> tuple[str, ...]:
        """Return where routed experts are below their layer (`.mlp.experts`), also by the class's own
        name, () for a family without any and for one without a description."""
        routed = [
            role.module
            for role in self.roles
            if role.kind.routed and role.kind is not Kind.EXPERT_UNKNOWN
        ]
        own = [self.class_names[module] for module in routed if module in self.class_names]
        return tuple(dict.fromkeys(apart_experts(m).rpartition("{L}")[2] for m in (*routed, *own)))

    def expert_names(self) -> dict[Kind, str]:
        """The names of gate, up and down of a routed expert, and of the stacks of all experts."""
        return {
            role.kind: role.module.rpartition(".")[2] for role in self.roles if role.kind.routed
        }

    def candidates(self, name: str) -> tuple[tuple[Role, ...], int | None, int | None, str]:
        """Roles whose template fits, with the layer, expert and parameter read from the name."""
        for other, own in self.aliases.items():
            if name.startswith(other):
                name = own + name.removeprefix(other)
        template, layer, expert = parse(name)
        if "{I}" in template:
            template = layer_template(name)
        known = self._by_template.get(template)
        if known is None:
            known = self._by_template[template] = self._of_template(template)
        return known[0], layer, expert, known[1]

    @cached_property
    def _by_template(self) -> dict[str, tuple[tuple[Role, ...], str]]:
        """Return what `_of_template` found: a model has many names of few templates."""
        return {}

    def _of_template(self, template: str) -> tuple[tuple[Role, ...], str]:
        """Roles whose template fits, and the parameter."""
        module, parameter = split_parameter(template)
        roles = self._by_module.get(module, ())
        if not roles and parameter:
            roles, parameter = self._by_module.get(template, ()), ""
        if not roles and not parameter:
            # 3-D expert stacks carry their scale as a suffix, experts.gate_up_proj_scale_inv, and
            # MXFP4 ones have no tensor without: gate_up_proj_blocks, gate_up_proj_scales.
            for suffix in ("_scale_inv", "_scale", "_blocks", "_scales"):
                if template.endswith(suffix):
                    roles = self._by_module.get(template.removesuffix(suffix), ())
                    if roles:
                        return roles, "weight" + suffix
        return roles, parameter

    def describes(self, names: Iterable[str]) -> bool:
        """Return whether names of layers are this family's. transformers saves some models with another
        word for `layers` (`blocks` for Kimi-K2.5) than is published; such a checkpoint does not belong
        to it."""
        other = False
        seen: set[str] = set()
        openings = self.openings
        for name in names:
            opening = name.partition(".")[0]
            if opening not in openings and not opening.isdecimal():
                continue  # below, too, only names with the opening of a module would count
            template, layer, _ = parse(name)
            if layer is None or template in seen:
                continue
            seen.add(template)
            before, _, rest = split_parameter(template)[0].partition(".{L}.")
            if f"{before}.{{L}}.{rest}" in self._layered:
                return True
            around = before.rpartition(".")[0]
            other = other or f"{around}.layers.{{L}}.{rest}" in self._layered
        return not other

    @cached_property
    def _layered(self) -> frozenset[str]:
        """Modules that some decoder layer must have."""
        return frozenset(
            module
            for module, roles in self._by_module.items()
            if "{L}" in module and any(not role.optional for role in roles)
        )

    def place(self, name: str, dims: Dims) -> Place | None:
        """The role of a tensor, or None for a name this family does not know."""
        roles, layer, expert, parameter = self.candidates(name)
        for role in roles:
            if role.layers in ("", "*") or layer in dims.groups.get(role.layers, ()):
                return Place(role, layer, expert, parameter)
        return None

    def is_mtp(self, name: str, dims: Dims) -> bool:
        """Return whether a tensor belongs to the multi-token-prediction (draft) layers."""
        if name.startswith(self.mtp):
            return True
        if not dims.mtp_layers:
            return False
        # Most names are told by their first layer's number: 0.3 us instead of 1.3.
        number = _LAYER.search(name)
        if number is None or not 0 <= int(number[1]) - dims.num_layers < dims.mtp_layers:
            return False
        found = parse(name)
        return (
            found.layer is not None
            and ".layers.{L}." in f".{found.template}"
            and dims.num_layers <= found.layer < dims.num_layers + dims.mtp_layers
        )

    def any_mtp(self, names: Iterable[str], dims: Dims) -> bool:
        """Return whether any of these tensors belongs to the draft layers."""
        if not self.mtp and not dims.mtp_layers:
            return False
        return any(self.is_mtp(name, dims) for name in names)


_LAYER = re.compile(r"(?<![^.])layers\.([0-9]{1,9})\.")


@dataclass(frozen=True)
class RoleIndex:
    """Every tensor name sorted by role. `present[role][parameter]` holds (layer, expert) pairs."""

    family: Family
    dims: Dims
    places: Mapping[str, Place]
    unknown: tuple[str, ...]
    present: Mapping[str, Mapping[str, frozenset[tuple[int | None, int | None]]]] = field(
        repr=False
    )

    def ordered(self, names: Iterable[str]) -> RoleIndex:
        """The same names in another order."""
        order = list(names)
        places = {name: self.places[name] for name in order if name in self.places}
        unknown = tuple(name for name in order if name not in self.places)
        return replace(self, places=places, unknown=unknown)

    def kind(self, name: str) -> Kind:
        """Return what a tensor's module is. A name that fits no role is UNKNOWN, or EXPERT_UNKNOWN if
        the name says that it belongs to experts."""
        place = self.places.get(name)
        if place is not None:
            return place.role.kind
        return Kind.UNKNOWN if experts_module(name) is None else Kind.EXPERT_UNKNOWN

    def expected(
        self, role: Role, parameter: str = "weight"
    ) -> list[tuple[int | None, int | None]]:
        """The (layer, expert) pairs the config says this role has. If its layers are unknown
        ("*"), they are those that have the parameter: only missing experts can be detected."""
        layers: Iterable[int | None]
        if role.layers == "*":
            seen = self.present.get(role.name, {}).get(parameter, frozenset())
            layers = sorted({layer for layer, _ in seen if layer is not None})
        else:
            layers = self.dims.groups.get(role.layers, ()) if role.layers else (None,)
        if role.per_expert and role.vision:
            return []  # the config's count is of the text model; layers of a tower may differ (Dots 3)
        experts: Iterable[int | None] = range(self.dims.num_experts) if role.per_expert else (None,)
        return [(layer, expert) for layer in layers for expert in experts]

    def missing(self, role: Role, parameter: str) -> list[str]:
        """Names expected by the config that the checkpoint lacks, in order."""
        if self.dims.tied and self.family.tied and role.name == self.family.tied[0]:
            return []  # a tied head need not be stored
        have = self.present.get(role.name, {}).get(parameter, frozenset())
        lacking = [pair for pair in self.expected(role, parameter) if pair not in have]
        return self.names(role, parameter, lacking) if lacking else []

    def names(
        self, role: Role, parameter: str, pairs: Iterable[tuple[int | None, int | None]]
    ) -> list[str]:
        """The names of a role's tensors at (layer, expert) pairs."""
        bare = "" in self.present.get(role.name, {})
        suffix = f".{parameter}" if parameter else ""
        if bare:  # a 3-D stack without `.weight`: its scale is a suffix of its own name
            suffix = parameter.removeprefix("weight")
        template = self.module_of(role) + suffix
        return [
            template.replace("{L}", str(layer)).replace("{E}", str(expert))
            for layer, expert in pairs
        ]

    def module_of(self, role: Role) -> str:
        """The role's module under the prefix this checkpoint uses, also when the role is absent."""
        if not role.module.startswith("@"):
            return role.module
        for name, place in self.places.items():
            if place.role.module.startswith("@"):
                module, _ = split_parameter(parse(name).template)
                return module.removesuffix(place.role.module[1:]) + role.module[1:]
        return self.family.prefixes[0] + role.module[1:]

    def absent(self) -> list[str]:
        """Names of tensors the family requires and the checkpoint lacks, role by role."""
        return [
            name
            for role in self.family.roles
            if role.name in self.present or not role.optional
            for parameter in (self.present.get(role.name) or self._usual_parameter(role))
            if parameter != "bias"
            or not role.module.endswith(".{L}")  # of a list of unlike modules
            for name in self.missing(role, parameter)
        ]

    def _usual_parameter(self, role: Role) -> tuple[str, ...]:
        return ("",) if role.module.endswith(("A_log", "dt_bias")) else ("weight",)

    def named(self, role: str) -> str | None:
        """The first tensor with a role, None if there is none."""
        return next((name for name, place in self.places.items() if place.role.name == role), None)


def expert_inputs(index: RoleIndex, type_of: Callable[[str], TensorType]) -> int:
    """The width of what goes into a routed expert: hidden_size, unless two linears beside the experts
    project hidden states to another width and back (Nemotron 3)."""
    hidden = index.dims.hidden_size
    names = (*index.places, *index.unknown)
    experts = next((at for name in names if (at := experts_module(name)) is not None), "")
    block, rows = experts.removesuffix("experts"), dict[str, int]()
    for name in names if block else ():
        module, parameter = split_parameter(name)
        if not name.startswith(block) or "." in module.removeprefix(block):
            continue
        shape = type_of(name).shape if index.kind(name) in (Kind.LINEAR, Kind.UNKNOWN) else ()
        if parameter in _ROWS and len(shape) == 2:
            rows[module] = shape[_ROWS[parameter]]
    into, out = sorted(rows.values(), key=hidden.__eq__) if len(rows) == 2 else (0, 0)
    return into if out == hidden else hidden


# The axis of a linear's outputs, by the parameter that holds its codes.
_ROWS = {"weight": 0, "weight_packed": 0, "qweight": 1}


class _Alike(NamedTuple):
    """Properties that one expert's tensor shares with those of the others."""

    role: Role
    layer: int | None
    parameter: str
    pairs: set[tuple[int | None, int | None]]


def role_index(family: Family, config: Config, names: Iterable[str]) -> RoleIndex:
    """Sort names by role. One dict look-up per name: linear in the number of tensors.

    Names that fit no role are listed in `unknown`; they are copied unchanged.
    """
    dims = family.dims(config)
    if max(dims.num_layers, dims.num_experts, dims.mtp_layers) > _MOST:
        raise CheckpointError(
            f"config.json states {dims.num_layers} layers, {dims.num_experts} experts and "
            f"{dims.mtp_layers} MTP layers; expected at most {_MOST} of each; fix config.json"
        )
    places: dict[str, Place] = {}
    unknown: list[str] = []
    present: dict[str, dict[str, set[tuple[int | None, int | None]]]] = {}
    groups = {name: frozenset(layers) for name, layers in dims.groups.items()}
    candidates, openings = family.candidates, family.openings
    # One object for each expert, whose weights and scales are of six roles and parameters.
    known: dict[tuple[int | None, int | None], tuple[int | None, int | None]] = {}
    # Experts' names are alike but for the number: what stands around it decides.
    alike: dict[tuple[str, str], _Alike] = {}
    for name in names:
        before, found, after = name.partition(".experts.")
        number = after.partition(".")[0] if found else ""
        around = before, after[len(number) :]
        like = alike.get(around) if number else None
        if like is not None and is_number(number):
            of_expert = int(number)
            places[name] = Place(like.role, like.layer, of_expert, like.parameter)
            alone = like.layer if like.role.layers else None, of_expert
            like.pairs.add(known.setdefault(alone, alone))
            continue
        # What another program names (blk.0.ffn_up_exps.3.numa.0.weight) fits no template.
        opening, dotted, _ = name.partition(".")
        if dotted and opening not in openings and not opening.isdecimal():
            unknown.append(name)
            continue
        roles, layer, expert, parameter = candidates(name)
        for role in roles:
            if role.layers in ("", "*") or layer in groups.get(role.layers, ()):
                places[name] = Place(role, layer, expert, parameter)
                by_parameter = present.get(role.name)
                if by_parameter is None:
                    by_parameter = present[role.name] = {}
                pairs = by_parameter.get(parameter)
                if pairs is None:
                    pairs = by_parameter[parameter] = set()
                pair = layer if role.layers else None, expert
                pairs.add(known.setdefault(pair, pair))
                if is_number(number) and around_expert(*around)[0]:
                    alike[around] = _Alike(role, layer, parameter, pairs)
                break
        else:
            unknown.append(name)
    frozen = {
        role: {parameter: frozenset(pairs) for parameter, pairs in by_parameter.items()}
        for role, by_parameter in present.items()
    }
    return RoleIndex(family, dims, places, tuple(unknown), frozen)


def families() -> list[Family]:
    """Every family of `layouts/`, in file order, then those of other packages. Two that claim one
    model_type: PlanError."""
    modules = discover("qconvert.layouts", group=FAMILIES)
    found: list[Family] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    owner: dict[str, str] = {}
    for family in found:
        for model_type in family.model_types:
            if model_type in owner:
                raise PlanError(
                    f"model_type {model_type!r} is claimed by {owner[model_type]} and {family.name}"
                )
            owner[model_type] = family.name
    return found


def generic(names: Iterable[str], why: str = "") -> Family:
    """A family for an undescribed model_type, and why: a role per module template, named after it, of
    unknown kind, so that none of it is quantized.

    It knows no layer groups, so it cannot tell a missing layer from one that never existed; `inspect`
    and `plan` say so. Experts are still counted, against the config's expert count.
    """
    modules: dict[str, bool] = {}
    for name in names:
        modules.setdefault(split_parameter(parse(name).template)[0], True)
    roles = tuple(
        Role(module, module, _guessed(module), "*" if "{L}" in module else "", optional=True)
        for module in modules
    )
    return Family("generic", (), generic_dims, roles, undescribed=why)


def _guessed(module: str) -> Kind:
    """Names only tell whether a module belongs to routed experts: those are kept or dropped
    as a whole."""
    return Kind.UNKNOWN if experts_module(module) is None else Kind.EXPERT_UNKNOWN


def list_of(config: Config, key: str) -> list[Any]:
    """The list a config gives for a key, [] if it gives none. Raises CheckpointError for a value
    of another type."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CheckpointError(f"config.json: {key} must be a list, found {value!r}")
    return value


def first_int(config: Config, *keys: str) -> int:
    """The first of the keys that the config gives an integer for, else 0."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def counted(config: Config, *keys: str) -> int:
    """As `first_int`, for layers that are listed one by one. Raises CheckpointError for more than any
    model has, before memory is allocated for them."""
    found = first_int(config, *keys)
    if found > _MOST:
        raise CheckpointError(
            f"config.json: expected {' or '.join(keys)} to be at most {_MOST}, found {found}; fix "
            "config.json"
        )
    return found


def is_tied(config: Config) -> bool:
    """Return whether head and embeddings share one tensor. transformers uses the root's flag
    (modeling_utils.py, get_expanded_tied_weights_keys); a nested flag counts only if the root has
    none."""
    text = text_config(config)
    root = config.get("tie_word_embeddings")
    return bool(text.get("tie_word_embeddings", False) if root is None else root)


def generic_dims(config: Config) -> Dims:
    """Dims as far as the common config keys go, for families without a description."""
    text = text_config(config)
    layers = first_int(text, "num_hidden_layers", "n_layer", "num_layers")
    if not layers:  # transformers 5.24 lists the kinds of Nemotron-H's layers instead
        layers = len(list_of(text, "layers_block_type"))
    mtp = first_int(text, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    return Dims(
        hidden_size=first_int(text, "hidden_size", "n_embd", "d_model"),
        num_layers=layers,
        num_experts=first_int(text, *EXPERT_COUNTS),
        mtp_layers=mtp,
        groups={},
        tied=is_tied(config),
        moe_intermediate_size=first_int(text, "moe_intermediate_size", "intermediate_size"),
    )


def answering(config: Config) -> Family | None:
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    for family in families():
        if first in family.architectures:
            return family
    nested = config.get("text_config")
    wanted = [config.get("model_type")]
    if isinstance(nested, Mapping):
        wanted.append(nested.get("model_type"))
    for model_type in wanted:
        for family in families():
            if model_type in family.model_types:
                return family
    return None


# Keys of quantization blocks; the last is MLX's.
QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")


def is_mlx(block: Mapping[str, Any]) -> bool:
    """Return whether a block is MLX's, which states a group size and bits and no method."""
    return "quant_method" not in block and {"group_size", "bits"} <= block.keys()


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every quantization block taken out, nested ones too."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in QUANTIZATION_KEYS[:2] and isinstance(value, dict):
            continue
        if key in QUANTIZATION_KEYS and isinstance(value, dict) and is_mlx(value):
            continue
        nested = isinstance(value, dict) and key.endswith("_config")
        kept[key] = without_quantization(value) if nested else value
    return kept


# Text models that transformers has a class for under another name than the one in a multi-modal model.
# Read in transformers: for text, all three positions of a multi-modal rope are the same, so that
# Qwen2-VL's and Qwen2.5-VL's text model (models/qwen2_vl/, models/qwen2_5_vl/) computes what Qwen2
# does, and Qwen3-VL's (models/qwen3_vl/, models/qwen3_vl_moe/) what Qwen3 does:
# tests/families/test_text_only.py.

# By the model_type of a text_config.
SAME_MODEL: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
# What one class states and the other always does.
ALWAYS: Mapping[str, Mapping[str, Any]] = {"qwen3_moe": {"norm_topk_prob": True}}


def text_model_type(config: Mapping[str, Any]) -> str | None:
    """The model_type of a multi-modal config's text model by itself, None for another config."""
    nested = config.get("text_config")
    kind = nested.get("model_type") if isinstance(nested, Mapping) else None
    return SAME_MODEL.get(kind, kind) if isinstance(kind, str) else None
