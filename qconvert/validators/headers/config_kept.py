"""config.json must state what the source's states: a conversion changes weights, not the model.

QC083 a setting of config.json differs from the source's.
QC084 FP8 weights are the source's, but the quantization block describes them differently.

Settings are compared key by key, in every nested block. For another class of the same model (Qwen3.5's
text model as Qwen3-Next, and back) the settings of the text model are compared, flattened: a setting
that one class does not state is what that class always does. So are those of a draft in its two forms.
A rope is the same wherever its numbers are stored: transformers 4 has rope_theta and rope_scaling, 5
has rope_parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.ranks import parts_in
from qconvert.core.family import (
    ALWAYS,
    MTP_COUNTS,
    SAME_MODEL,
    text_config,
    text_model_type,
    without_quantization,
)
from qconvert.core.names import is_scale, scale_candidates
from qconvert.validation.findings import Finding, OnlyRead
from qconvert.validation.runner import Folder, NotChecked, validator
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.draft import draft_stated
from qconvert.validators.reading.pruned import pruned

CONFIG = "config.json"

# Which class saved a config, and how DeepSeek-V4's experts are stored: not settings of the model.
_NOT_COMPARED = frozenset(
    {
        "_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype",
        "expert_dtype",
    }
)  # fmt: skip
# For training, and for what a call returns: no output depends on them.
_OF_TRAINING = frozenset(
    {
        "attention_dropout", "aux_loss_alpha", "classifier_dropout", "embd_pdrop", "hidden_dropout",
        "id2label", "initializer_range", "label2id", "output_attentions", "output_hidden_states",
        "output_router_logits", "pretraining_tp", "resid_pdrop", "return_dict",
        "router_aux_loss_coef", "seq_aux", "use_cache",
    }
)  # fmt: skip
_TIED = "tie_word_embeddings"
_PRESHARDED = (
    "load_presharded_moe"  # whether experts are in parts of ranks (sglang's models/grok.py)
)
# Of a class, or of a multi-modal config's root, not of the text model.
_OF_CLASS = frozenset(
    {
        "architectures", "model_type", "text_config", "vision_config", "image_token_id",
        "video_token_id", "vision_start_token_id", "vision_end_token_id",
    }
)  # fmt: skip
_OF_IMAGES = frozenset({"rope_parameters.mrope_section", "rope_parameters.mrope_interleaved"})
_OF_MROPE = (("rope_parameters.rope_type", "mrope"), ("rope_parameters.type", "mrope"))
_SAME_MODEL = frozenset({"qwen3_5", "qwen3_next"})
_ROPE = ("rope_parameters", "rope_scaling")
_OF_ROPE = ("rope_theta", "partial_rotary_factor")
_LANGUAGE, _PLAIN = "model.language_model.", "model."
# Of FP8 blocks: the keys, and the runtimes' default if one is not stated.
_FP8_KEYS = {
    "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": None, "weight_block_size": None,
}  # fmt: skip
_INNER_KEYS = ("scale_fmt", "weight_block_size")
_MOST = 20

Settings = dict[str, Any]  # by dotted path


@validator("config.json has every setting of the source, changed only as its passes say", "source")
def config_kept(folder: Folder) -> Iterator[Finding | OnlyRead]:
    """The folder's config.json against the source's."""
    here, source = folder.checkpoint, folder.source
    assert source is not None
    identity = (here.manifest or {}).get("identity", {})
    if folder.receipt is not None and identity.get("source") != source.header_digest:
        raise NotChecked("QC031: the folder was not made from the given source")
    kind, theirs = here.config.get("model_type"), source.config.get("model_type")
    drafts = draft_stated(here.config), draft_stated(source.config)
    families = {here.family.name, source.family.name}
    if drafts[0] is not None and drafts[1] is not None:
        ours, wanted = settings(drafts[0]), settings(drafts[1])
    elif kind == theirs:
        ours, wanted = settings(here.config), settings(source.config)
    elif families == _SAME_MODEL or (
        len(families) == 1 and "generic" not in families and theirs in here.family.model_types
    ):
        ours, wanted = _of_text(here), _of_text(source)
    elif kind is not None and kind == text_model_type(source.config):
        ours, wanted = _of_text_alone(here, source)
    else:
        message = f"model_type is {kind!r}, the source's is {theirs!r}: another model"
        yield Finding("QC083", "error", CONFIG, message)
        return
    if (less := pruned(here, source)) is not None:
        wanted = {k: less.setting(k.rpartition(".")[2], v) for k, v in wanted.items()}
    if parts_in(source.sources) and not parts_in(here.sources):
        wanted = {**wanted, _PRESHARDED: False}  # else sglang's class ends the load
    found: list[Finding | OnlyRead] = [
        *_tied(here, source),
        *_differences(here, source, ours, wanted),
    ]
    yield from found[:_MOST]
    if len(found) > _MOST:
        message = f"{len(found) - _MOST} more settings differ from the source's"
        yield Finding("QC083", "error", CONFIG, message)
    yield from _fp8(here, source)


def settings(config: Mapping[str, Any]) -> Settings:
    """Every setting by its dotted path, without quantization blocks. A rope is kept in one
    spelling: `rope_theta`, `partial_rotary_factor`, `rope_parameters.*`; contradicting keys are kept."""
    return _flat(without_quantization(config), "")


def _flat(block: Mapping[str, Any], at: str) -> Settings:
    found: Settings = {}
    for key in _ROPE:  # the newer one first: it counts if both are present
        rope = block.get(key)
        for inner, value in _flat(rope, "").items() if isinstance(rope, Mapping) else ():
            inner = "rope_type" if inner == "type" else inner
            if (inner, value) == ("rope_type", "default"):
                continue
            name = at + (inner if inner in _OF_ROPE else f"rope_parameters.{inner}")
            if found.setdefault(name, value) != value:
                found[f"{at}{key}.{inner}"] = value
    for key, value in block.items():
        if key in _NOT_COMPARED or key == _TIED or key in _ROPE:
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{at}{key}.")
        elif found.setdefault(at + key, _plain_names(value)) != _plain_names(value):
            found[f"{at}{key} beside rope_parameters"] = value
    return found


def _plain_names(value: Any) -> Any:
    """Modules have one name, whether or not a text-only class has renamed them."""
    if isinstance(value, list):
        return [_plain_names(inner) for inner in value]
    if isinstance(value, str) and value.startswith(_LANGUAGE):
        return _PLAIN + value.removeprefix(_LANGUAGE)
    return value


def _of_text(checkpoint: Checkpoint) -> Settings:
    """The text model's settings, with what the classes of Qwen3.5 always do. Its Qwen3-Next counterpart
    states it: top-k weights normalized, experts in all layers or in none."""
    text = {k: v for k, v in text_config(checkpoint.config).items() if k not in _OF_CLASS}
    found = {k: v for k, v in settings(text).items() if k not in _OF_IMAGES}
    if checkpoint.family.name not in _SAME_MODEL:
        return found
    every = list(range(checkpoint.role_index.dims.num_layers))
    if checkpoint.family.name == "qwen3_5":
        dense = not found.get("num_experts")
        found |= {"norm_topk_prob": True, "decoder_sparse_step": 1}
        found["mlp_only_layers"] = every if dense else []
    else:
        always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        found = {**always, **found}
        if _has_drafts(checkpoint, checkpoint):
            found.setdefault("mtp_num_hidden_layers", checkpoint.role_index.dims.mtp_layers)
    if found["mlp_only_layers"] == every or not found.get("num_experts"):
        found |= {"mlp_only_layers": every, "num_experts": 0}
    return found


def _of_text_alone(here: Checkpoint, source: Checkpoint) -> tuple[Settings, Settings]:
    """The settings of a text model by itself, and those that the source states of it. What its root
    says, and what the class alone states and always does, is not new."""
    root = settings({k: v for k, v in source.config.items() if not isinstance(v, Mapping)})
    always = ALWAYS.get(str(here.config.get("model_type")), {})
    wanted, ours = (
        {k: v for k, v in settings(config).items() if k not in _OF_CLASS | _OF_IMAGES}
        for config in (source.config["text_config"], here.config)
    )
    if source.config["text_config"].get("model_type") in SAME_MODEL:
        ours = {k: v for k, v in ours.items() if k in wanted or always.get(k) != v}
        wanted = {k: v for k, v in wanted.items() if (k, v) not in _OF_MROPE}
    return {k: v for k, v in ours.items() if k in wanted or root.get(k) != v}, wanted


def _differences(
    here: Checkpoint, source: Checkpoint, ours: Settings, wanted: Settings
) -> Iterator[Finding | OnlyRead]:
    for key, value in wanted.items():
        name = key.rpartition(".")[2]
        if key in ours and ours[key] == value:
            continue
        of_drafts = name in MTP_COUNTS and not ours.get(key) and not _has_drafts(here, source)
        if of_drafts and _has_drafts(source, source):
            continue  # dropped by a rule, or QC030
        if of_drafts:
            yield OnlyRead(f"{key} is 0, and the source's {value!r}: neither has such layers")
            continue
        known = name not in _OF_TRAINING and (value is not None or key in ours)
        found = f"is {ours[key]!r}" if key in ours else "is missing"
        message = f"{key} {found}, the source's is {value!r}"
        yield Finding("QC083", "error" if known else "warning", CONFIG, message)
    new = [
        f"{key} ({value!r})"
        for key, value in ours.items()
        if key not in wanted
        if value is not None
        if value or key.rpartition(".")[2] not in MTP_COUNTS
    ]
    if new:
        more = f" and {len(new) - _MOST} more" if len(new) > _MOST else ""
        message = f"states settings that the source does not: {', '.join(new[:_MOST])}{more}"
        yield Finding("QC083", "warning", CONFIG, message)


def _has_drafts(here: Checkpoint, source: Checkpoint) -> bool:
    return any(source.family.is_mtp(name, source.role_index.dims) for name in here)


def _tied(here: Checkpoint, source: Checkpoint) -> Iterator[Finding]:
    """A stage has a separate head instead of the embeddings; a separate head of the source must stay."""
    known = source.role_index.dims.tied or _states_tied(source)
    if _states_tied(here) and not known:
        message = f"{_TIED} is true, but the source has a separate head"
        yield Finding("QC083", "error", CONFIG, message)
    if source.role_index.dims.tied and not here.role_index.dims.tied and not _may_be_untied(here):
        message = f"{_TIED} is not true as in the source, and no head is stored"
        yield Finding("QC083", "error", CONFIG, message)


def _states_tied(checkpoint: Checkpoint) -> bool:
    """Tell whether any block states it: loaders do not agree on which one applies."""
    blocks = [checkpoint.config, checkpoint.config.get("text_config")]
    return any(isinstance(block, Mapping) and block.get(_TIED) is True for block in blocks)


def _may_be_untied(here: Checkpoint) -> bool:
    head = here.family.tied[0] if here.family.tied is not None else "lm_head"
    return here.role_index.named(head) is not None or "stage" in (here.manifest or {})


# --- FP8 -----------------------------------------------------------------------------------------


def _fp8(here: Checkpoint, source: Checkpoint) -> Iterator[Finding]:
    """Tensors whose weights and scales have the source's types, so that they were only moved."""
    kinds = _fp8_types(here)
    steps = {step.get("name") for step in (here.manifest or {}).get("passes", [])}
    if not kinds or not kinds <= _fp8_types(source) or "fp8" in steps:
        return
    theirs = [config.block for config in source.quantization_configs if config.method == "fp8"]
    if not theirs:
        return
    for config in here.quantization_configs:
        if config.method == "fp8":
            yield from _block(config.where, config.block, theirs, tuple(_FP8_KEYS))
            continue
        inner = config.block.get("linear_fp8_config")
        if isinstance(inner, Mapping):
            yield from _block(f"{config.where}.linear_fp8_config", inner, theirs, _INNER_KEYS)


def _block(
    where: str, ours: Mapping[str, Any], theirs: list[Mapping[str, Any]], keys: tuple[str, ...]
) -> Iterator[Finding]:
    for key in keys:
        silent = _FP8_KEYS[key]
        wanted = [silent if block.get(key) is None else block[key] for block in theirs]
        found = silent if ours.get(key) is None else ours[key]
        if found not in wanted:
            message = f"{where}: {key} is {found!r}, the source's is {wanted[0]!r}"
            yield Finding("QC084", "error", where.partition(":")[0], message)


def _fp8_types(checkpoint: Checkpoint) -> set[tuple[str, ...]]:
    """The types of FP8 weights, each with the types of its scales."""
    return {
        (
            tensor.type.dtype,
            *(checkpoint[s].type.dtype for s in scale_candidates(name) if s in checkpoint),
        )
        for name, tensor in checkpoint.items()
        if tensor.type.dtype in FP8 and not is_scale(name)
    }
