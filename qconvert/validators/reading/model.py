"""A folder that holds a model, as header rules see it: which of its layers a pipeline stage has, and in
which of two forms a layer stores the same matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.family import Config, Dims, expert_inputs, first_int, text_config
from qconvert.core.manifest_keys import DRAFT
from qconvert.core.names import parse, split_parameter
from qconvert.validation.runner import NotChecked
from qconvert.validators.reading.forms import coded_weights
from qconvert.validators.reading.quantization import read_methods

# Parameters that are a matrix itself, not a part of one.
_MATRICES = ("", "weight", "weight_packed", "qweight")


def known_family(checkpoint: Checkpoint) -> None:
    """Raises NotChecked for a model that no family describes: only what every model has in common
    was checked."""
    if checkpoint.family.name == "generic":
        raise NotChecked(checkpoint.family.undescribed)


def unread_quantization(checkpoint: Checkpoint) -> str:
    """Why a quantization block's description of the weights is not understood, "" if it is."""
    for config in checkpoint.quantization_configs:
        if config.method not in read_methods():
            return f"{config.where}: quant_method {config.method!r} is not supported"
    return ""


def readable_quantization(checkpoint: Checkpoint) -> None:
    """Raises NotChecked for a model with a quantization block of an unsupported method."""
    why = unread_quantization(checkpoint)
    if why:
        raise NotChecked(why)


# --- Pipeline stages -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """The manifest's `stage`: the stage's number, how many layers each stage has, and the
    runtime variables it names."""

    number: int
    partition: tuple[int, ...]
    layers: range
    environment: dict[str, str]

    @property
    def last(self) -> bool:
        return self.number == len(self.partition) - 1


def stage_of(checkpoint: Checkpoint) -> Stage | None:
    """None for a folder that is not a stage; a draft's is as the last of two, behind all layers. Raises
    PlanError if the manifest's `stage` is broken or contradicts itself."""
    if DRAFT in (checkpoint.manifest or {}):
        layers = checkpoint.role_index.dims.num_layers
        return Stage(1, (layers, 0), range(layers, layers), {})
    found = (checkpoint.manifest or {}).get("stage")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise PlanError(f"expected `stage` to be an object, found {found!r}")
    number, of = (_count(found, key) for key in ("number", "of"))
    partition, owned = (_counts(found, key) for key in ("partition", "layers"))
    environment = found.get("environment", {})
    if not isinstance(environment, dict):
        raise PlanError(f"expected `environment` to be an object, found {environment!r}")
    if len(partition) != of or number >= of:
        raise PlanError(f"stage {number} of {of} does not fit a partition into {len(partition)}")
    start = sum(partition[:number])
    if owned != (start, start + partition[number]):
        raise PlanError(
            f"stage {number} of {_spell(partition)} owns layers [{start}, "
            f"{start + partition[number]}), but `layers` is {list(owned)}"
        )
    return Stage(number, partition, range(*owned), environment)


def _count(found: dict[str, Any], key: str) -> int:
    value = found.get(key)
    if type(value) is not int or value < 0:
        raise PlanError(f"expected `{key}` to be a number, found {value!r}")
    return value


def _counts(found: dict[str, Any], key: str) -> tuple[int, ...]:
    value = found.get(key)
    if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
        raise PlanError(f"expected `{key}` to be a list of numbers, found {value!r}")
    return tuple(value)


def _spell(partition: tuple[int, ...]) -> str:
    return ",".join(map(str, partition))


def holds(stage: Stage | None, layer: int | None, *, draft: bool) -> bool:
    """Tell whether a folder must hold a layer's tensors: a stage its own, the last one draft layers."""
    if stage is None:
        return True
    return stage.last if draft else layer is None or layer in stage.layers


# --- Drafts that stand alone -----------------------------------------------------------------------

# Classes of drafts in sglang and vLLM (`models/registry.py`), and keys that only their
# configs have (SpecForge, speculators).
_DRAFT_CLASS = re.compile(r"NextN|MTP|Eagle|EAGLE|Medusa|DFlash|Speculator|DraftModel")
_DRAFT_KEYS = ("draft_vocab_size", "eagle_config", "speculators_config", "dflash_config")
_OUTER = ("embed_tokens", "norm", "lm_head")


@lru_cache(maxsize=8)
def draft_alone(checkpoint: Checkpoint) -> bool:
    """Tell whether a folder holds a draft without the model that it drafts for: by its class or config,
    or because it has modules of a draft, and neither embeddings nor final norm nor head of a model."""
    config, role_index = checkpoint.config, checkpoint.role_index
    classes = config.get("architectures")
    if any(map(_DRAFT_CLASS.search, map(str, classes if isinstance(classes, list) else ()))):
        return True
    if any(config.get(key) is not None for key in _DRAFT_KEYS):
        return True
    if DRAFT in (checkpoint.manifest or {}) or any(role in role_index.present for role in _OUTER):
        return False
    return any(is_of_draft(checkpoint, name) for name in checkpoint)


def is_of_draft(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether nothing but a draft layer of the family has a module of this name, in whatever
    layer."""
    roles = checkpoint.family.candidates(name)[0]
    return bool(roles) and all(role.name.startswith("mtp.") for role in roles)


# --- Two forms of the same matrices --------------------------------------------------------------

Side = Literal["fused", "split"]


@dataclass(frozen=True, slots=True, eq=False)
class TwoForms:
    """The last components of the modules that hold the same rows: fused, and split."""

    what: str
    fused: frozenset[str]
    split: frozenset[str]

    def members(self, side: Side) -> frozenset[str]:
        return self.fused if side == "fused" else self.split


LINEAR_ATTENTION = TwoForms(
    "linear-attention projections",
    frozenset({"in_proj_qkvz", "in_proj_ba"}),
    frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}),
)
EXPERTS = TwoForms(
    "routed experts",
    frozenset({"gate_up_proj", "down_proj"}),
    frozenset({"gate_proj", "up_proj", "down_proj"}),
)
GATE_UP = TwoForms("gate and up", frozenset({"gate_up_proj"}), frozenset({"gate_proj", "up_proj"}))
QKV = TwoForms(
    "attention's qkv", frozenset({"qkv_proj"}), frozenset({"q_proj", "k_proj", "v_proj"})
)


# Lists of layers, and components before them that the decoder's have and towers have not alone. A number
# behind another name is that of a module in a sequence (nn.Sequential's `mlp1.3`), not of a layer.
_LISTS = ("layers", "blocks", "h", "layer", "block")
_DECODER = frozenset(
    {
        "model",
        "language_model",
        "text_model",
        "llm",
        "transformer",
        "decoder",
        "backbone",
        "thinker",
    }
)


@lru_cache(maxsize=4096)
def stack_of(template: str) -> tuple[str, str] | None:
    """The stack of layers that a module is in ("" for the decoder's, `mtp` for a draft's, a tower's by
    its name), and the rest of its template below its layer; None for a module of no layer."""
    before, found, below = template.partition(".{L}")
    *names, last = before.removeprefix("@").split(".")
    if not found or last not in _LISTS:
        return None
    return ".".join(name for name in names if name not in _DECODER), below


def layer_of(name: str) -> tuple[str, int | None] | None:
    """The stack and number of the layer that a tensor is in; None for one in no layer."""
    template, layer, _ = parse(name)
    found = stack_of(template)
    return None if found is None else (found[0], layer)


class Where(NamedTuple):
    """A module that has two forms: in which stack of layers, where it is below its layer
    (`.mlp.experts`), and the layer."""

    forms: TwoForms
    stack: str
    parent: str
    layer: int | None


@dataclass
class Present:
    """For one module, the members that are present, each with its first tensor."""

    fused: dict[str, str] = field(default_factory=dict)
    split: dict[str, str] = field(default_factory=dict)

    def side(self, side: Side) -> dict[str, str]:
        return self.fused if side == "fused" else self.split

    def whole(self, forms: TwoForms, side: Side) -> bool:
        return self.side(side).keys() == forms.members(side)


class Member(NamedTuple):
    """The meaning of a module's name template: of which forms, on which side it is a member."""

    forms: TwoForms
    stack: str
    parent: str
    side: Side
    name: str


@lru_cache(maxsize=4096)
def member_of(module: str) -> Member | None:
    """The member that a module template is (`model.layers.{L}.mlp.experts.{E}.up_proj`), None if its
    matrices have only one form, or are in no layer."""
    found = stack_of(module)
    if found is None:
        return None
    stack, below = found
    parent, _, last = below.rpartition(".")
    if parent.endswith(("experts.{E}", ".experts")):
        side: Side = "split" if parent.endswith(".{E}") else "fused"
        if last not in EXPERTS.members(side):
            return None
        return Member(EXPERTS, stack, parent.removesuffix(".{E}"), side, last)
    for forms in (LINEAR_ATTENTION, GATE_UP, QKV):
        for one in ("fused", "split"):
            if last in forms.members(one):
                return Member(forms, stack, parent, one, last)
    return None


def forms_in(checkpoint: Checkpoint) -> dict[Where, Present]:
    """Every module of every layer that has two forms, in the order of the tensors."""
    found: dict[Where, Present] = {}
    for name, module, layer in _matrices(checkpoint):
        member = member_of(module)
        if member is not None:
            where = Where(member.forms, member.stack, member.parent, layer)
            present = found.get(where)
            if present is None:
                present = found[where] = Present()
            present.side(member.side).setdefault(member.name, name)
    return found


def _matrices(checkpoint: Checkpoint) -> Iterator[tuple[str, str, int | None]]:
    """Name, module template and layer of every matrix."""
    role_index, coded = checkpoint.role_index, coded_weights(checkpoint)
    for name, place in role_index.places.items():
        if place.parameter in _MATRICES or name in coded:
            yield name, place.role.module, place.layer
    for name in role_index.unknown:
        template, layer, _ = parse(name)
        module, parameter = split_parameter(template)
        if parameter in _MATRICES:
            yield name, module, layer


def where_of(name: str) -> tuple[Where, Side] | None:
    """As `forms_in` has it, of a tensor's name."""
    template, layer, _ = parse(name)
    member = member_of(split_parameter(template)[0])
    if member is None:
        return None
    return Where(member.forms, member.stack, member.parent, layer), member.side


def other(side: Side) -> Side:
    return "split" if side == "fused" else "fused"


# --- Sizes ---------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Sizes = Callable[..., int]
# A size that is not checked.
ANY = -1


@lru_cache(maxsize=4)
def expected_shapes(checkpoint: Checkpoint) -> dict[str, Shape]:
    """The shape of each role's weight, -1 for a size that the config does not state. Roles of draft
    layers have those of the model's layers; undescribed roles are left out."""
    index, text = checkpoint.role_index, text_config(checkpoint.config)
    dims, family = index.dims, index.family.name

    def size(*keys: str) -> int:
        return first_int(text, *keys) or ANY

    hidden, each = dims.hidden_size or ANY, dims.moe_intermediate_size or ANY
    experts, dense = dims.num_experts or ANY, size("intermediate_size")
    vocab, twice = size("vocab_size"), _times(2, hidden)
    shared = size("shared_expert_intermediate_size")
    several = _times(first_int(text, "n_shared_experts") or ANY, each)
    inputs = expert_inputs(index, lambda name: checkpoint[name].type) or ANY
    found: dict[str, Shape] = {
        **dict.fromkeys(("embed_tokens", "shared_head.head"), (vocab, hidden)),
        # An EAGLE-3 draft answers in a part of the vocabulary.
        "lm_head": (size("draft_vocab_size", "vocab_size"), hidden),
        **dict.fromkeys(_NORMS, (hidden,)),
        **dict.fromkeys(("eh_proj", "fc"), (hidden, twice)),
        "router": (experts, hidden),
        "router.e_score_correction_bias": (experts,),
        "shared_expert_gate": (1, hidden),
        "stacked_experts.gate_up_proj": (experts, _times(2, each), inputs),
        **dict.fromkeys(
            ("stacked_experts.gate_proj", "stacked_experts.up_proj"), (experts, each, inputs)
        ),
        "stacked_experts.down_proj": (experts, inputs, each),
    }
    for prefix, rows, columns in (
        ("mlp.", dense, hidden), ("experts.", each, inputs), ("shared_expert.", shared, hidden),
        ("shared_experts.", several, hidden),
    ):  # fmt: skip
        found |= {f"{prefix}{name}": (rows, columns) for name in ("gate_proj", "up_proj")}
        found[f"{prefix}down_proj"] = (columns, rows)
    attention = _latent(text, hidden) or _grouped(hidden, size, _gates(text, family))
    if family == "draft" and "hidden_norm" in index.present:
        # EAGLE-3's first layer: embeddings and hidden states side by side.
        columns = twice if dims.num_layers == 1 else ANY
        attention |= {role: (attention[role][0], columns) for role in _INTO_ATTENTION}
    return found | attention | _linear_attention(dims, hidden, size)


_INTO_ATTENTION = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
_NORMS = (
    "norm", "input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm",
    "pre_fc_norm_embedding", "pre_fc_norm_hidden",
)  # fmt: skip


def _times(one: int, other: int) -> int:
    return one * other if one > 0 and other > 0 else ANY


def _gates(text: Config, family: str) -> int:
    """Rows of q_proj per query row: with an output gate, two."""
    if family not in ("qwen3_5", "qwen3_next"):
        return 1
    # transformers has the gate whatever the flag says, other runtimes follow the flag.
    return ANY if text.get("attn_output_gate") is False else 2


def _grouped(hidden: int, size: Sizes, gates: int) -> dict[str, Shape]:
    """Grouped-query attention (transformers, models/qwen3_moe/, glm4_moe/, qwen3_next/)."""
    each, heads = size("head_dim"), size("num_attention_heads")
    queries, keys = _times(heads, each), _times(size("num_key_value_heads"), each)
    return {
        "attn.q_proj": (_times(gates, queries), hidden),
        **dict.fromkeys(("attn.k_proj", "attn.v_proj"), (keys, hidden)),
        "attn.o_proj": (hidden, queries),
        **dict.fromkeys(("attn.q_norm", "attn.k_norm"), (each,)),
    }


def _latent(text: Config, hidden: int) -> dict[str, Shape]:
    """Multi-head latent attention (transformers, models/deepseek_v3/)."""
    low, kv, rope, nope, value, heads = (
        first_int(text, key) or ANY
        for key in (
            "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
            "num_attention_heads",
        )
    )  # fmt: skip
    if kv < 0:
        return {}
    query = nope + rope if nope > 0 and rope > 0 else ANY
    both = nope + value if nope > 0 and value > 0 else ANY
    return {
        "attn.q_a_proj": (low, hidden),
        "attn.q_a_layernorm": (low,),
        "attn.q_b_proj": (_times(heads, query), low),
        "attn.q_proj": (_times(heads, query), hidden),
        "attn.kv_a_proj_with_mqa": (kv + rope if rope > 0 else ANY, hidden),
        "attn.kv_a_layernorm": (kv,),
        "attn.kv_b_proj": (_times(heads, both), kv),
        "attn.o_proj": (hidden, _times(heads, value)),
    }


def _linear_attention(dims: Dims, hidden: int, size: Sizes) -> dict[str, Shape]:
    """Gated DeltaNet: K = nk * dk, V = nv * dv."""
    if dims.gdn is None:
        return {}
    nk, nv, dk, dv = dims.gdn
    keys, values = nk * dk, nv * dv
    rows = {
        "in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * nv, "in_proj_qkv": 2 * keys + values,
        "in_proj_z": values, "in_proj_b": nv, "in_proj_a": nv,
    }  # fmt: skip
    return {
        **{f"gdn.{name}": (count, hidden) for name, count in rows.items()},
        "gdn.conv1d": (2 * keys + values, 1, size("linear_conv_kernel_dim")),
        "gdn.A_log": (nv,),
        "gdn.dt_bias": (nv,),
        "gdn.norm": (dv,),
        "gdn.out_proj": (hidden, values),
    }
