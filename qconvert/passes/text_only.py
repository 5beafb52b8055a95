"""text_only: the text model of a multi-modal checkpoint, under its own class.

Which class that is says transformers: the one with the model_type of config.json's text_config. What its
tensors are called says the description of that class (layouts/derived): of a name as many parts are left
out at its front, and `model.` put in their place, as make it one of the class's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from re import escape
from typing import Any, ClassVar

from qconvert.checkpoint.quantization_config import renamed_modules
from qconvert.core.errors import PlanError
from qconvert.core.family import ALWAYS, SAME_MODEL, is_tied, text_model_type
from qconvert.core.graph import Output
from qconvert.core.names import parse
from qconvert.core.roles import Kind
from qconvert.core.shown import shortened
from qconvert.layouts.derived.description import Description, described
from qconvert.layouts.derived.find import class_of
from qconvert.models.experts import is_transposed
from qconvert.passes.as_class import MROPE, VISION_FILES
from qconvert.passes.experts import Unstack
from qconvert.passes.replace_weights import sources_of
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

TOWER_RULE = "text_only: of a tower, or of what joins one to the text model"
# Of a multi-modal config's root, what is true of the text model too.
_OF_TEXT = (
    "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config",
    "compression_config", "transformers_version",
)  # fmt: skip
# Text models whose classes in sglang and vLLM read stacks, which their releases have.
_READ_STACKS = ("qwen3_5_moe_text",)
_TIE = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class TextOnly:
    """Write a multi-modal model's text model.

    Vision and audio towers and what joins them are dropped, the rest is renamed, the config flattened,
    and routed experts are stored as one matrix each where the text model's class reads them so.

    Raises PlanError for a model without text_config, where transformers has no class for the text model
    alone, for a tensor that is of no tower and that the class does not have, and for stacks of experts
    that the class takes the other way round.
    """

    name: ClassVar[str] = "text_only"

    def __call__(self, plan: Plan) -> Plan:
        nested, kind = plan.config.get("text_config"), text_model_type(plan.config)
        if not isinstance(nested, Mapping) or kind is None:
            raise PlanError(
                "config.json has no text_config with a model_type, so that no text model is known "
                f"apart: model_type is {_shown(plan.config.get('model_type'))}"
            )
        text = {**nested, "model_type": kind}
        found = class_of(text, plan.tensors)
        if not isinstance(found, Description) or not found.class_name.endswith("ForCausalLM"):
            why = f": {found}" if isinstance(found, str) else f", only {found.class_name}"
            raise PlanError(
                f"transformers has no class for a text model {_shown(kind)} by itself{why}"
            )
        towers = [name for name in plan.tensors if _is_tower(plan, name)]
        if not towers:
            raise PlanError("no tensor is known as one of a vision or audio tower")
        _check_stacks(plan, found)
        gone = set(towers)
        left = [name for name in plan.tensors if name not in gone]
        try:
            names = _names(plan, found, left)
        except PlanError:
            # A config may give its class modules that the usual one lacks: Nemotron 3's latent experts.
            built = class_of(text, plan.tensors, built=True)
            if not isinstance(built, Description):
                raise
            found = built
            names = _names(plan, found, left)
        tensors: dict[str, Output] = {}
        for old, new in names.items():
            if new in tensors:
                raise PlanError(f"{old!r} would become {new!r}, which already exists")
            tensors[new] = plan.tensors[old]
        files = [file for file in plan.side_files if file in VISION_FILES]
        config = _flat(plan.config, nested, kind, found.class_name, head=_has_head(plan))
        for old, new in _prefixes(names):
            config = renamed_modules(config, old, new)
            config = renamed_modules(config, f"re:{escape(old)}", f"re:{escape(new)}")
            config = renamed_modules(config, f"re:^{escape(old)}", f"re:^{escape(new)}")
        made = plan.logged(
            LogEntry(self.name, options_of(self), len(tensors), None),
            tensors=tensors,
            config=config,
            dropped={**plan.dropped, **sources_of(plan, towers, TOWER_RULE)},
            side_files=tuple(file for file in plan.side_files if file not in files),
            dropped_files={**plan.dropped_files, **dict.fromkeys(files, TOWER_RULE)},
        )
        return _apart(made, found, kind)


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)


def _is_tower(plan: Plan, name: str) -> bool:
    place = plan.role_index.places.get(name)
    return place is not None and place.role.vision


def _has_head(plan: Plan) -> bool:
    return plan.role_index.named("lm_head") is not None


def _check_stacks(plan: Plan, found: Description) -> None:
    if is_transposed(plan) == found.stacked_transposed:
        return
    for name, output in plan.tensors.items():
        if plan.role_index.kind(name).routed and len(output.type.shape) == 3:
            raise PlanError(
                f"{name!r}: {found.class_name} takes stacks of experts the other way round, and "
                "these are no byte ranges of one another; keep the multi-modal class, or take a release "
                "with one matrix per expert"
            )


def _apart(plan: Plan, found: Description, kind: str) -> Plan:
    """The plan with one matrix per expert, where the text class reads those: transformers takes either
    form, and a runtime's class of the text model alone may read no stacks."""
    own = {module.kind for module in found.modules.values()}
    if Kind.EXPERT_GATE not in own or found.stacks_alone or kind in _READ_STACKS:
        return plan
    stacked = (Kind.STACKED_GATE_UP, Kind.STACKED_DOWN)
    if not any(plan.role_index.kind(name) in stacked for name in plan.tensors):
        return plan
    return Unstack()(plan)


# --- Names ---------------------------------------------------------------------------------------


def _names(plan: Plan, found: Description, names: Iterable[str]) -> dict[str, str]:
    """Return what each tensor of the text model is called in its class. Drafts, and buffers that the
    class does not have, follow the names that begin alike; drafts stay where none does. Raises PlanError
    for any other name, and where layers of two blocks would be one."""
    dims, family = plan.role_index.dims, plan.family
    cut: dict[str, tuple[int, str] | None] = {}
    known: dict[str, str] = {}
    later: list[str] = []
    for name in names:
        template = parse(name).template
        if template not in cut:
            cut[template] = _cut(found, template)
        how = None if family.is_mtp(name, dims) else cut[template]
        if how is None:
            later.append(name)
        else:
            known[name] = how[1] + ".".join(name.split(".")[how[0] :])
    prefixes = _prefixes(known)
    if len({new for _, new in prefixes}) < len(prefixes):
        blocks = " and ".join(repr(old) for old, _ in prefixes)
        raise PlanError(f"layers of {blocks} would be layers of one block")
    for name in later:
        match = next(((old, new) for old, new in prefixes if name.startswith(old)), None)
        draft = family.is_mtp(name, dims)
        if match is not None and (draft or len(plan.tensors[name].type.shape) < 2):
            known[name] = match[1] + name.removeprefix(match[0])
        elif draft:
            known[name] = name
        else:
            raise PlanError(
                f"{name!r} is of no tower that is known, and {found.class_name} has no parameter of "
                "that name"
            )
    return {name: known[name] for name in plan.tensors if name in known}


def _cut(found: Description, template: str) -> tuple[int, str] | None:
    """Return how many parts of a name are left out at its front, and what is put there."""
    parts = template.split(".")
    for start in range(len(parts) - 1):
        rest = ".".join(parts[start:])
        for front in ("", "model."):
            if described(found, front + rest):
                return start, front
    return None


def _prefixes(names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return how names began before and after, without what is alike, longest first."""
    found: dict[tuple[str, str], None] = {}
    for old, new in names.items():
        if old == new or ".layers." not in old:
            continue
        a, b = old.split("."), new.split(".")
        while a and b and a[-1] == b[-1]:
            a, b = a[:-1], b[:-1]
        found["".join(f"{p}." for p in a), "".join(f"{p}." for p in b)] = None
    return sorted(found, key=lambda pair: -len(pair[0]))


# --- Config --------------------------------------------------------------------------------------


def _flat(
    config: Mapping[str, Any], nested: Mapping[str, Any], kind: str, name: str, *, head: bool
) -> dict[str, Any]:
    """The text_config as a config of its own, with what the root says of the whole model. A flag of tied
    embeddings is always stated: the two classes may differ in what they take for granted."""
    root = {key: config[key] for key in _OF_TEXT if config.get(key) is not None}
    own = {k: v for k, v in nested.items() if k not in ("architectures", "model_type", _TIE)}
    stated = any(level.get(_TIE) is not None for level in (config, nested))
    merged = {
        "architectures": [name], "model_type": kind, **root,
        **{key: value for key, value in own.items() if value is not None or key not in root},
        _TIE: is_tied(config) if stated else not head,
    }  # fmt: skip
    if nested.get("model_type") in SAME_MODEL:
        merged |= ALWAYS.get(kind, {})
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(merged.get(key), Mapping):
                merged[key] = _one_position(merged[key])
                if not merged[key]:
                    del merged[key]
    return merged


def _one_position(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope without the sections of a multi-modal one; {} where nothing else is said."""
    kept = {key: value for key, value in rope.items() if key not in MROPE}
    for key in ("type", "rope_type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return {} if set(kept) <= {"type", "rope_type"} and "default" in kept.values() else kept


PASSES = (TextOnly,)
