"""Draft (MTP) layers alone, and put into a model that has none.

What a draft's folder holds beside its layers was read in sglang (`models/deepseek_nextn.py`,
`glm4_moe_nextn.py`, `qwen3_next_mtp.py`, `qwen3_5_mtp.py`) and vLLM (`models/deepseek_mtp.py`,
`qwen3_next_mtp.py`): both build embeddings and a head of their own before they share the model's; vLLM
refuses a folder that leaves either unwritten. They know the draft by the model's own architecture
(sglang: `configs/model_config.py`, _config_draft_model) and look for its layer behind the model's last,
so that names and config stay the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG, Checkpoint
from qconvert.checkpoint.open import Grafted
from qconvert.checkpoint.quantization_config import Entries
from qconvert.core.errors import PlanError
from qconvert.core.family import without_quantization
from qconvert.core.graph import Output
from qconvert.core.json_text import parse_object
from qconvert.core.manifest_keys import DRAFT
from qconvert.core.names import split_parameter, with_fused_names
from qconvert.core.roles import Kind
from qconvert.models.unquantized import ignored_globs, ignored_names
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.passes.replace_weights import sources_of
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

MODEL_RULE = "extract_draft: of the model, not of its draft"
_NOTHING_QUANTIZED = "extract_draft: nothing of the draft is quantized"
_ENDS = {"embed_tokens": Kind.EMBEDDING, "lm_head": Kind.HEAD}
# What a block says of single modules; all else must be equal where both folders are quantized.
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "producer",
          "quantization_status", "version")  # fmt: skip
_KEY = "quantization_config"


@dataclass(frozen=True, slots=True)
class ExtractDraft:
    """Keep the draft layers, and embeddings and head where they have none of their own.

    Raises PlanError for a model without draft layers, and for one without embeddings.
    """

    name: ClassVar[str] = "extract_draft"

    def __call__(self, plan: Plan) -> Plan:
        index, family = plan.role_index, plan.family
        drafts = [name for name in plan.tensors if family.is_mtp(name, index.dims)]
        if not drafts:
            raise PlanError(
                f"no tensor is known as one of a draft (MTP) layer: {plan.checkpoint.model_line}"
            )
        own = {index.kind(name) for name in drafts}
        ends = {role for role, kind in _ENDS.items() if kind not in own}
        shared = [
            name
            for name, place in index.places.items()
            if place.role.name in ends and name not in drafts
        ]
        if "embed_tokens" in ends and index.named("embed_tokens") is None:
            raise PlanError("the draft has no embeddings, and no tensor is known as the model's")
        kept = {*drafts, *shared}
        tensors = {name: output for name, output in plan.tensors.items() if name in kept}
        others = [name for name in plan.tensors if name not in kept]
        changes: dict[str, Any] = {}
        if not any(_is_quantized(name, plan) for name in kept):
            files = {f: _NOTHING_QUANTIZED for f in (HF_QUANT_CONFIG,) if f in plan.side_files}
            changes["config"] = without_quantization(plan.config)
            changes["side_files"] = tuple(f for f in plan.side_files if f not in files)
            changes["dropped_files"] = {**plan.dropped_files, **files}
        return plan.logged(
            LogEntry(self.name, options_of(self), len(drafts), None),
            tensors=tensors,
            dropped={**plan.dropped, **sources_of(plan, others, MODEL_RULE)},
            facts={**plan.facts, DRAFT: {"shared": sorted(shared)}},
            **changes,
        )


@dataclass(frozen=True, slots=True)
class GraftDraft:
    """The draft that `checkpoint.grafted` put beside the model becomes a part of it: its encoding must
    be the model's, and what of it is not quantized is listed as such. No recipe has this pass: it needs
    two folders.

    Raises PlanError for a draft of another encoding, and for a quantized model whose method has no list
    that is known here.
    """

    name: ClassVar[str] = "graft_draft"

    def __call__(self, plan: Plan) -> Plan:
        both = plan.checkpoint
        if not isinstance(both, Grafted) or both.draft is None:
            raise PlanError("no folder of a draft is given: qconvert mtp graft SRC DRAFT OUT")
        entry = LogEntry(self.name, options_of(self), len(both.names), None)
        coded = next((n for n in sorted(both.names) if _is_quantized(n, plan)), None)
        if coded is not None:
            _check_encoding(both, both.draft, coded)
        block = plan.config.get(_KEY)
        if not isinstance(block, Mapping):
            other = next((c.where for c in both.quantization_configs), None)
            if other is not None:
                raise PlanError(f"{other}: expected the model's one block in config.json's {_KEY}")
            return plan.logged(entry, facts=_whole(plan))
        plain = _plain_modules(plan, both.names)
        if not plain:
            return plan.logged(entry, facts=_whole(plan))
        files = {}
        listed = _listing(plan, block, plain)
        modelopt = both.read(HF_QUANT_CONFIG) if HF_QUANT_CONFIG in plan.side_files else None
        if modelopt is not None:
            files[HF_QUANT_CONFIG] = _modelopt_text(plan, modelopt, plain)
        return plan.logged(
            entry,
            config={**plan.config, _KEY: listed},
            facts=_whole(plan),
            side_files=tuple(f for f in plan.side_files if f not in files),
            new_files={**plan.new_files, **files},
        )


def _whole(plan: Plan) -> dict[str, Any]:
    """Facts of a model that has its draft again."""
    return {key: value for key, value in plan.facts.items() if key != DRAFT}


def _is_quantized(name: str, plan: Plan) -> bool:
    """Return whether a tensor is a weight in codes, or a part of one that is no number."""
    return plan.tensors[name].type.dtype not in (*FLOAT_DTYPES, "F64", "I64", "BOOL")


def _plain_modules(plan: Plan, names: Iterable[str]) -> list[str]:
    """Modules of the draft that runtimes build as linears, or as experts, and that are not quantized."""
    places = plan.role_index.places
    return [
        split_parameter(name)[0]
        for name in sorted(names)
        if name in places
        and places[name].role.kind.linear
        and places[name].parameter in ("", "weight")
        and plan.tensors[name].type.dtype in FLOAT_DTYPES
    ]


# --- Encodings -----------------------------------------------------------------------------------


def _check_encoding(model: Checkpoint, draft: Checkpoint, coded: str) -> None:
    """Both folders must state the same of quantized weights."""
    ours, theirs = _statement(model), _statement(draft)
    if ours == theirs:
        return
    said = " and ".join(c.method or c.where for c in model.quantization_configs) or "none"
    stated = " and ".join(c.method or c.where for c in draft.quantization_configs) or "none"
    differ = ""
    if said == stated:
        keys = sorted(
            {k for mine in ours for k in mine if all(mine[k] != y.get(k) for y in theirs)}
            | {k for y in theirs for k in y if all(k not in mine for mine in ours)}
        )
        differ = f", which differ in {', '.join(keys)}" if keys else ""
    raise PlanError(
        f"the draft's {coded!r} is quantized as its own config states ({stated}), and the model's "
        f"config states {said}{differ}; dequantize the draft first: qconvert mtp extract, then qconvert "
        "dequant"
    )


def _statement(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in config.block.items() if key not in _LISTS}
        for config in checkpoint.quantization_configs
    ]


# --- Lists of what is not quantized --------------------------------------------------------------


def _listing(plan: Plan, block: Mapping[str, Any], plain: list[str]) -> dict[str, Any]:
    """The block with the draft's unquantized modules in its list. Raises PlanError for a method whose
    list is not known here."""
    method = str(block.get("quant_method", ""))
    if method == "compressed-tensors":
        entries = _texts(block.get("ignore"))
        found = Entries.of(dict.fromkeys(entries, True))
        if all(found.names.get(m) or any(p.match(m) for p, _ in found.patterns) for m in plain):
            return dict(block)
        return {**block, "ignore": [*entries, *_new(entries, _patterns(plan, plain))]}
    if method == "fp8":
        key = "ignored_layers" if "ignored_layers" in block else "modules_to_not_convert"
        entries = _texts(block.get(key))
        if set(plain) <= set(entries):
            return dict(block)
        return {**block, key: [*entries, *_new(entries, _names(plan, plain))]}
    if method == "modelopt":
        key = "exclude_modules" if "exclude_modules" in block else "ignore"
        return {**block, key: _with_globs(plan, _texts(block.get(key)), plain)}
    raise PlanError(
        f"config.json: the model is quantized by {method!r}, the draft's {plain[0]!r} is not, and how "
        "that method lists such modules is not known here; supported: compressed-tensors, fp8, modelopt"
    )


def _modelopt_text(plan: Plan, data: bytes, plain: list[str]) -> str:
    """hf_quant_config.json with the same list."""
    import json

    found = parse_object(data, HF_QUANT_CONFIG)
    inner = found.get("quantization")
    nested = inner if isinstance(inner, Mapping) else found
    key = "exclude_modules" if "exclude_modules" in nested or "ignore" not in nested else "ignore"
    changed = {**nested, key: _with_globs(plan, _texts(nested.get(key)), plain)}
    whole = {**found, "quantization": changed} if isinstance(inner, Mapping) else changed
    return json.dumps(whole, indent=4) + "\n"


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _new(entries: list[str], wanted: Iterable[str]) -> list[str]:
    return [entry for entry in dict.fromkeys(wanted) if entry not in entries]


def _patterns(plan: Plan, plain: list[str]) -> list[str]:
    """For compressed-tensors: a pattern for each prefix of the draft if nothing of it is quantized,
    else names."""
    coded = any(_is_quantized(name, plan) for name in _inside(plan))
    return _names(plan, plain) if coded else ignored_names(plan, _inside(plan), drafts=False)


def _inside(plan: Plan) -> dict[str, Output]:
    both = plan.checkpoint
    assert isinstance(both, Grafted)
    return {name: plan.tensors[name] for name in sorted(both.names)}


def _names(plan: Plan, plain: list[str]) -> list[str]:
    """Modules by name, fused ones and the experts' own module too; layers that are numbered on also as
    sglang's draft classes call theirs."""
    paths = plan.family.expert_paths
    found: dict[str, None] = {}
    for module in with_fused_names(plain):
        found[module] = None
        for path in paths:
            before, inside, _ = module.partition(path + ".")
            if inside:
                found[before + path] = None
    numbered = [module for module in found if not module.startswith(plan.family.mtp or ("mtp.",))]
    below = [m.partition(".layers.")[2].partition(".")[2] for m in numbered if ".layers." in m]
    return [*found, *(f"model.decoder.{rest}" for rest in below)]


def _with_globs(plan: Plan, entries: list[str], plain: list[str]) -> list[str]:
    if all(any(fnmatchcase(module, entry) for entry in entries) for module in plain):
        return entries
    inside = _inside(plan)
    coded = {split_parameter(name)[0] for name in inside if _is_quantized(name, plan)}
    return [*entries, *_new(entries, ignored_globs(plan, inside, coded))]


PASSES = (ExtractDraft,)
