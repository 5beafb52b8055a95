"""Modules left unquantized next to packed weights: layers in bf16, which ignore lists name as
compressed-tensors or modelopt has them, and layers in block FP8."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from re import escape
from typing import Any

from qconvert.checkpoint.quantization_config import fp8_scheme
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import parse, split_parameter, with_fused_names
from qconvert.core.roles import SHARED
from qconvert.core.versions import SGLANG
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.registry import code_parameters
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.plan.plan import Plan

_VISION = "visual"
# sglang's class of Qwen3-VL-MoE (`models/qwen3_vl.py`) renames what a list names, and then asks
# for other names: only a pattern that begins with anything is found.
_RENAMING = ("qwen3_vl_moe",)
_ANY_ATTENTION = r"re:.*\.self_attn\..*"
# Families whose classes in sglang have no packed_modules_mapping, or a part of one: a fused
# module is looked up under its own name alone (`models/glm4_moe.py`, `models/deepseek_v2.py`).
_UNMAPPED = ("deepseek_v3", "glm4_moe", "kimi_k2")
# sglang builds layers of these without a prefix (`models/hunyuan.py`): all have the names below
# their layer, their shared expert's linears none but their own, and experts none but their numbers.
_WITHOUT_LAYERS = ("hunyuan_v1_moe", "hunyuan_v1_dense")
_SHARED_MLP = ".shared_mlp."
_NUMBERS_ALONE = r"re:\.[0-9]+\."
# Qwen3-Next's draft class in sglang calls its one layer `model.layers.0`
# (`models/qwen3_next_mtp.py`), which in the model itself has linear attention.
_DRAFT_AS_FIRST_LAYER = ("qwen3_next",)
_DRAFT_ATTENTION = r"re:model\.layers\.0\.self_attn\..*"
_FIRST_ATTENTION = "model.layers.0.self_attn."
# vLLM's draft class of DeepSeek (`models/deepseek_mtp.py`) has no mapping either, and its own name
# for what the model fuses.
_Q_A, _VLLM_QKV_A = ".self_attn.q_a_proj", ".self_attn.fused_qkv_a_proj"
_EXPONENTS = ("U8", "F8_E8M0")

OutputsByName = Mapping[str, Output]


def expert_targets(paths: Iterable[str]) -> list[str]:
    """Patterns of all modules of routed experts that hang at these paths below their layers
    (`.mlp.experts`)."""
    return [rf"re:.*{escape(path)}\..*" for path in paths]


def all_experts(paths: Iterable[str], begin: str = ".*") -> list[str]:
    """The same with the module that holds them, for lists of what is left; `begin` is the pattern of how
    names begin."""
    return [rf"re:{begin}{escape(path)}(\..*)?$" for path in paths]


def expert_beginnings(plan: Plan, modules: Iterable[str]) -> list[str]:
    """Patterns of how names of the layers begin whose routed experts these are (modules or tensors):
    `.*` where they are those of every layer but draft layers. Runtimes put other names before `layers`,
    and draft layers that are numbered on from the model's own have a name of their own in sglang. Raises
    PlanError for a part of the layers of a class that asks for experts by less than their layer."""
    every = _owners(plan, (n for n in plan.tensors if plan.role_index.kind(n).routed))
    mine = _owners(plan, modules)
    dims = plan.role_index.dims
    of_drafts = {one for one in every if plan.family.is_mtp(f"{one}.x", dims)}
    if mine >= every - of_drafts:
        return [".*"]
    if plan.family.name in _WITHOUT_LAYERS:
        raise PlanError(
            f"{SGLANG} asks for experts of {plan.family.name} without their layer, so that no config "
            "tells one layer's from another's: quantize the experts of all layers, or of none"
        )
    found, drafts = list[str](), sorted(mine & of_drafts)
    numbers = sorted(int(one.rpartition(".")[2]) for one in mine - of_drafts)
    if numbers:
        but = "".join(f"(?!{escape(prefix)})" for prefix in plan.family.mtp)
        found.append(rf"{but}.*\.layers\.(?:{'|'.join(map(str, numbers))})")
    if drafts:
        found += [escape(one) for one in drafts]
        if any(".layers." in one and not one.startswith(plan.family.mtp) for one in drafts):
            found.append(escape(_NUMBERED_ON[:-1]))
    return found


def _owners(plan: Plan, names: Iterable[str]) -> set[str]:
    """The layers whose experts these are, by the names of their modules."""
    found: set[str] = set()
    for name in names:
        parted = (name.partition(path) for path in plan.family.expert_paths)
        found |= {before for before, here, _ in parted if here}
    return found


def experts_of_class(plan: Plan) -> list[str]:
    """Patterns of routed experts that a runtime asks for by less than their path."""
    return [_NUMBERS_ALONE] if plan.family.name in _WITHOUT_LAYERS else []


def shared_paths(plan: Plan) -> list[str]:
    """Return where shared experts are below their layer, with a dot at the end (`.mlp.shared_expert.`,
    which their gate's name does not contain)."""
    found: dict[str, None] = {}
    for role in plan.family.roles:
        if role.kind in SHARED:
            found[role.module.rpartition("{L}")[2].rpartition(".")[0] + "."] = None
    return list(found)


def no_experts(paths: Iterable[str]) -> str:
    """A pattern, without `re:`, of all modules that are none of routed experts."""
    return rf"^(?!.*{_any_of(paths)}).*$"


def _draft_linears(paths: Iterable[str]) -> str:
    below = [path.removeprefix(".") for path in paths]
    return rf"re:model\.decoder\.(?!{_any_of(below)}\.).*" if below else r"re:model\.decoder\..*"


def _any_of(texts: Iterable[str]) -> str:
    found = [escape(text) for text in texts]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def ignored(
    plan: Plan,
    others: OutputsByName,
    *,
    experts: bool,
    shared: bool = False,
    drafts_too: bool = False,
) -> list[str]:
    """Every unquantized matrix beside the packed ones, by the module's name, linear or not: an extra
    name does no harm. Draft layers that are numbered on go by another name in sglang's draft model: one
    pattern, or their names where others of them are FP8. Runtimes name vision towers as they like;
    experts that stay are one pattern. `experts` and `shared`: the routed, and the shared ones of draft
    layers too, are packed; `drafts_too`: other linears of draft layers are, too."""
    role_index, dims = plan.role_index, plan.role_index.dims
    paths = plan.family.expert_paths
    found, kept = [], list[str]()
    towers: dict[str, None] = {}
    for name, output in others.items():
        place = role_index.places.get(name)
        if place is not None and place.role.vision:
            towers[tower_of(name)] = None
        routed = role_index.kind(name).routed
        # Those that stay where others are packed: of the model's own layers, and in numbers.
        beside = output.type.dtype in FLOAT_DTYPES and _is_matrix(plan, name, output)
        if routed and (not experts or (beside and not plan.family.is_mtp(name, dims))):
            kept.append(name)
            continue
        if not name.endswith(".weight") or len(output.type.shape) != 2:
            continue
        if output.type.dtype not in WEIGHT_DTYPES:
            found.append(split_parameter(name)[0])
    drafts = [m for m in found if ".layers." in m and plan.family.is_mtp(m, dims)]
    in_fp8 = any(
        output.type.dtype in WEIGHT_DTYPES and plan.family.is_mtp(name, dims)
        for name, output in others.items()
    )
    if plan.family.name in _UNMAPPED or plan.family.class_name:
        found = with_runtime_names(plan, others, with_fused_names(found))
        found += [f"{m[: -len(_Q_A)]}{_VLLM_QKV_A}" for m in drafts if m.endswith(_Q_A)]
    found += tied_head(plan)
    attention = {name for name, output in plan.tensors.items()
                 if ".self_attn." in name and len(output.type.shape) == 2}  # fmt: skip
    if renames_lists(plan) and attention <= others.keys():
        found.append(_ANY_ATTENTION)
    if drafts and (in_fp8 or drafts_too):
        numbered = [module for module in drafts if not module.startswith(plan.family.mtp)]
        found += [f"model.decoder.{_below_layer(module)}" for module in numbered]
    elif drafts:
        packed = [path[:-1] for path in shared_paths(plan)] if shared else []
        found.append(_draft_linears([*paths, *packed]))
    if _drafts_first_layer(plan, found):
        found.append(_DRAFT_ATTENTION)
    found += [rf"re:.*{escape(tower)}\..*" for tower in towers]
    if kept:
        begins = expert_beginnings(plan, kept)
        found += [entry for begin in begins for entry in all_experts(paths, begin)]
    return found


def with_runtime_names(
    plan: Plan, others: OutputsByName, modules: Iterable[str], *, start: str = ""
) -> list[str]:
    """The modules, and what else runtimes call them where their classes are not those of which names are
    known: the class's own names (vLLM and both runtimes' Transformers backends), and the names from
    `layers` on, which classes in sglang give no other beginning (`models/mixtral.py`,
    `models/internvl.py`), which `start` begins. None that a quantized module would answer to, too.
    Modules may be globs of what is below one, nothing of which is quantized."""
    family = plan.family
    known = list(modules)
    if not family.class_name:
        return known
    coded = {split_parameter(name)[0] for name in plan.tensors if name not in others}
    taken = {tail for module in with_fused_names(coded) for tail in _tails(plan, module)}
    within = {name.rpartition(".")[0] + ".*" for name in taken}
    found = dict.fromkeys(known)
    for module in known:
        place = plan.role_index.places.get(f"{module}.weight")
        if family.is_mtp(f"{module}.weight", plan.role_index.dims):
            continue
        if place is not None and place.role.vision:
            continue
        own = family.class_names.get(parse(module).template, "")
        more = [own.replace("{L}", _layer(module))] if own else []
        tails = [tail for name in (module, *more) for tail in _tails(plan, name)]
        tails = [tail for tail in tails if tail not in taken and tail not in within]
        found |= dict.fromkeys((*more, *(f"{start}{tail}" for tail in tails)))
    return list(found)


def tied_head(plan: Plan) -> list[str]:
    """The head of a checkpoint that has none because it is tied: runtimes that build one ask for it."""
    dims = plan.role_index.dims
    return ["lm_head"] if dims.tied and plan.role_index.named("lm_head") is None else []


def _tails(plan: Plan, module: str) -> list[str]:
    """A module's name from `layers` on, and below its layer where a runtime's class leaves that out."""
    _, layers, rest = module.rpartition(".layers.")
    if not layers:
        return []
    found = [f"layers.{rest}"]
    if plan.family.name in _WITHOUT_LAYERS:
        found.append(f".{rest.partition('.')[2]}")
        last = rest.rpartition(".")[2]
        if _SHARED_MLP in rest and last != "*":
            found.append(f".{last}")
    return found


def _layer(module: str) -> str:
    return module.rpartition(".layers.")[2].partition(".")[0]


def tower_of(name: str) -> str:
    """Return what a vision or audio tower is called in its tensor's name: runtimes put it elsewhere."""
    parts = name.split(".")
    return _VISION if _VISION in parts else next(part for part in parts if part != "model")


def renamed_towers(names: Iterable[str]) -> list[str]:
    """The towers of these tensors whose linears runtimes name otherwise: all but Qwen's."""
    return list(dict.fromkeys(tower for name in names if (tower := tower_of(name)) != _VISION))


def renames_lists(plan: Plan) -> bool:
    """Return whether sglang's class of the model does not find the names that a config lists."""
    return plan.family.name in _RENAMING


def _below_layer(module: str) -> str:
    return module.partition(".layers.")[2].partition(".")[2]


def draft_as_first_layer(plan: Plan) -> bool:
    """Return whether sglang's draft model calls its layer as the model calls its first: a config cannot
    tell the two apart."""
    dims, family = plan.role_index.dims, plan.family
    return family.name in _DRAFT_AS_FIRST_LAYER and any(
        family.is_mtp(name, dims) for name in plan.tensors
    )


def _drafts_first_layer(plan: Plan, left: Iterable[str]) -> bool:
    """Return whether attention of such a draft is unquantized, and the model has none of that name."""
    inside = any(
        ".self_attn." in module and plan.family.is_mtp(module, plan.role_index.dims)
        for module in left
    )
    named = any(name.startswith(_FIRST_ATTENTION) for name in plan.tensors)
    return inside and not named and draft_as_first_layer(plan)


def fp8_block(plan: Plan, linears: Mapping[str, bool]) -> tuple[int, int] | None:
    """The block size of the linears that are FP8, None where none is."""
    if not any(linears.values()):
        return None
    for config in plan.checkpoint.quantization_configs:
        if config.block.get("activation_scheme") == "static":
            raise PlanError(
                f"{config.where}: activation_scheme static; beside packed weights runtimes scale "
                "activations dynamically: dequantize the checkpoint first (qconvert dequant)"
            )
    for module, fp8 in linears.items():
        kind = plan.tensors[f"{module}.weight"].type
        if fp8 and kind.dtype != "F8_E4M3":
            raise PlanError(
                f"{module!r} is {kind}; beside packed weights runtimes take E4M3: dequantize the "
                "checkpoint first (qconvert dequant)"
            )
    first, *others = [module for module, fp8 in linears.items() if fp8]
    if f"{first}.scale" in plan.tensors:
        raise PlanError(
            f"{first!r} is FP8 under the name `scale`: its FP8 layers have the names of DeepSeek-V4, "
            "for which no other config has a place: dequantize the checkpoint first (a recipe of "
            "`dequant` and this step is one read), or relabel its MXFP4 experts (qconvert relabel --to "
            "fp8, or nvfp4)"
        )
    block = fp8_scheme(plan.checkpoint, first).block
    for module in others:
        if (other := fp8_scheme(plan.checkpoint, module).block) != block:
            raise PlanError(
                f"{first!r} is FP8 in blocks {block}, and {module!r} in blocks {other}; beside packed "
                "weights runtimes take one: dequantize the checkpoint first (qconvert dequant)"
            )
    if block is None:
        raise PlanError(
            f"{first!r} is FP8 without blocks; beside packed weights runtimes take block FP8 or bf16 "
            "linears: dequantize the checkpoint first (qconvert dequant)"
        )
    return block


def check_nothing_packed(others: OutputsByName) -> None:
    """The new config says one thing of packed weights. Raises PlanError for others that stay packed."""
    packed = tuple(f".{one}" for one in code_parameters() if one not in ("", "weight"))
    for name in others:
        if name.endswith(packed):
            raise PlanError(
                f"{name!r} is packed already and is no target, and the config has no place for two "
                "forms: target it too, or start from a source that is not quantized"
            )


def has_exponents(others: OutputsByName) -> bool:
    """Return whether block scales are exponents, not numbers."""
    return any(
        name.endswith(".weight_scale_inv") and output.type.dtype in _EXPONENTS
        for name, output in others.items()
    )


def with_weight_scales(others: OutputsByName) -> dict[str, Output]:
    """Tensors under compressed-tensors' names: it calls a block scale `weight_scale`. Raises PlanError
    for exponents: its float-quantized scales are numbers."""
    found = {}
    for name, output in others.items():
        renamed = name
        if name.endswith(".weight_scale_inv"):
            renamed = name.removesuffix("_inv")
            if output.type.dtype in _EXPONENTS:
                raise PlanError(
                    f"{name!r}: {output.type.dtype} exponents are no compressed-tensors scales: "
                    "dequantize the checkpoint first (qconvert dequant)"
                )
            if renamed in others:
                raise PlanError(f"{name!r} would become {renamed!r}, which already exists")
        found[renamed] = output
    return found


# --- Beside NVFP4, in either dialect --------------------------------------------------------------

# sglang's draft models call a layer so that checkpoints number on from the model's own.
_NUMBERED_ON = "model.decoder."
_DRAFT_HEAD = "model.shared_head.head"
_FIRST_OF_DRAFT = "mtp.layers.0.self_attn."
_DRAFT_ATTENTION_GLOB = "model.layers.0.self_attn.*"


def draft_prefixes(plan: Plan) -> list[str]:
    """Return how names of draft layers begin, [] where there is none."""
    dims, family = plan.role_index.dims, plan.family
    found: dict[str, None] = {}
    for name in plan.tensors:
        if not family.is_mtp(name, dims):
            continue
        named = [prefix for prefix in family.mtp if name.startswith(prefix)]
        at, layers, rest = name.partition(".layers.")
        found[named[0] if named else f"{at}{layers}{rest.partition('.')[0]}."] = None
    return list(found)


def draft_patterns(plan: Plan) -> list[str]:
    """The same as regular expressions, with what runtimes call them."""
    prefixes = draft_prefixes(plan)
    if any(".layers." in prefix for prefix in prefixes):
        prefixes.append(_NUMBERED_ON)
    return [escape(prefix) for prefix in prefixes]


def ignored_names(plan: Plan, others: OutputsByName, *, drafts: bool) -> list[str]:
    """compressed-tensors' list: every unquantized matrix beside the packed ones by name; draft layers,
    where nothing of them is FP8, by a pattern each. `drafts`: experts of theirs are packed too."""
    if drafts:
        return ignored(plan, others, experts=True)
    draft_names = tuple(draft_prefixes(plan))
    found = ignored(
        plan, {n: o for n, o in others.items() if not n.startswith(draft_names)}, experts=True
    )
    inside = {name: o for name, o in others.items() if name.startswith(draft_names)}
    plain = [name for name, o in inside.items() if _is_matrix(plan, name, o)]
    if not plain:
        return found
    if any(output.type.dtype in WEIGHT_DTYPES for output in inside.values()):
        return found + [split_parameter(name)[0] for name in plain]
    return found + [f"re:{pattern}.*" for pattern in draft_patterns(plan)]


def ignored_globs(plan: Plan, others: OutputsByName, quantized: Collection[str]) -> list[str]:
    """modelopt's list: a glob for each module under which nothing is quantized, or else the linear's
    own name. Runtimes find fused modules by the glob of what they are in, and sglang's draft model asks
    for its head as `model.shared_head.head`."""
    parents = {parent for module in quantized for parent in _parents(module)}
    drafts = [] if _any_draft(plan, quantized) else draft_prefixes(plan)
    found: dict[str, None] = {}
    for name, output in others.items():
        if not _is_matrix(plan, name, output):
            continue
        draft = next((prefix for prefix in drafts if name.startswith(prefix)), None)
        place = plan.role_index.places.get(name)
        module, _ = split_parameter(name)
        above = module.rpartition(".")[0]
        if draft is not None:
            found |= dict.fromkeys(_draft_globs(draft))
        elif place is not None and place.role.vision:
            tower = tower_of(name)
            found[f"{module.partition(tower)[0]}{tower}*"] = None
            found |= {f"{other}*": None for other in renamed_towers([name])}
        else:
            entry = module if not above or above in parents else f"{above}.*"
            found |= dict.fromkeys(with_runtime_names(plan, others, [entry], start="*"))
    found |= dict.fromkeys(tied_head(plan))
    packed_drafts = not drafts and draft_as_first_layer(plan)
    if packed_drafts or any(".layers." in prefix for prefix in drafts):
        found[_DRAFT_HEAD] = None
    if packed_drafts:
        found[_DRAFT_ATTENTION_GLOB] = None
    if renames_lists(plan) and not any(".self_attn." in module for module in quantized):
        found["*.self_attn.*"] = None
    return list(found)


def ignored_linears(plan: Plan, others: OutputsByName) -> list[str]:
    """FP8's list, and modelopt's beside FP8 layers: the name of every unquantized linear, and of a
    tower whose linears runtimes name otherwise."""
    names = [name for name, output in others.items() if _is_matrix(plan, name, output)]
    places = plan.role_index.places
    towers = [n for n in names if n in places and places[n].role.vision]
    linears = [split_parameter(name)[0] for name in names]
    found = with_runtime_names(plan, others, [*linears, *tied_head(plan)])
    return [*found, *renamed_towers(towers)]


def with_draft_names(plan: Plan, modules: Iterable[str]) -> list[str]:
    """The modules, those of draft layers also as sglang's draft model calls them: `model.decoder` where
    they are numbered on, `model.layers.0` in Qwen3-Next, whose experts are so called in both."""
    dims, family = plan.role_index.dims, plan.family
    found: list[str] = []
    for module in modules:
        found.append(module)
        _, layers, rest = module.partition(".layers.")
        numbered = layers and not module.startswith(family.mtp)
        if _FIRST_OF_DRAFT in module and draft_as_first_layer(plan):
            found.append(f"model{module.removeprefix('mtp')}")
        if numbered and family.is_mtp(f"{module}.weight", dims):
            found.append(_NUMBERED_ON + rest.partition(".")[2])
    return found


def _any_draft(plan: Plan, modules: Iterable[str]) -> bool:
    dims = plan.role_index.dims
    return any(plan.family.is_mtp(f"{module}.weight", dims) for module in modules)


def _draft_globs(prefix: str) -> list[str]:
    return [f"{prefix}*", f"{_NUMBERED_ON}*"] if ".layers." in prefix else [f"{prefix}*"]


def _parents(module: str) -> Iterable[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _is_matrix(plan: Plan, name: str, output: Output) -> bool:
    """Return whether it is an unquantized linear's weight, or a stack of experts'."""
    kind = output.type
    if kind.dtype in WEIGHT_DTYPES:
        return False
    return (name.endswith(".weight") and len(kind.shape) == 2) or (
        plan.role_index.kind(name).routed and len(kind.shape) == 3
    )


def fp8_own_block(plan: Plan) -> Mapping[str, Any]:
    """The source's own block, where it is one of block FP8 under the names of DeepSeek and Qwen, whose
    layers can stay as they are. Raises PlanError for another."""
    for config in plan.checkpoint.quantization_configs:
        if config.method == "fp8" and config.block.get("weight_block_size"):
            return config.block
    raise PlanError(
        "FP8 layers stay as they are beside NVFP4 experts only with quant_method fp8 and a "
        "weight_block_size: take dialect compressed-tensors, or dequantize the checkpoint first "
        "(qconvert dequant)"
    )
