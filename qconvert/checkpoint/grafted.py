"""A model with the draft of another folder beside it, as one checkpoint: what `mtp graft` reads.

Of the draft's folder only the tensors of its draft (MTP) layers are taken, wherever that folder is from:
the original model, or what `mtp extract` made of it. All else is the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import CheckpointError
from qconvert.core.family import MTP_COUNTS, Config, first_int, text_config
from qconvert.core.shown import shortened

# A draft reads hidden states, and writes tokens, of a model of these sizes and this arithmetic.
_FITTING = (
    "model_type", "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "num_experts", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "norm_topk_prob",
    "routed_scaling_factor", "scoring_func", "n_group", "topk_group",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Grafted(Checkpoint):
    """A model and the draft layers of `draft`: `names` are their tensors, of which `shards` holds the
    files behind the model's own. config.json counts the layers; all other files are the model's."""

    draft: Checkpoint | None = None
    names: frozenset[str] = frozenset()


def grafted(model: Checkpoint, draft: Checkpoint) -> Grafted:
    """Raises CheckpointError where the model has a draft already, the other folder has none, or the two
    are of different models: of another family, or of other sizes by their configs."""
    dims, family = draft.role_index.dims, draft.family
    names = [name for name in draft if family.is_mtp(name, dims)]
    if not names:
        raise CheckpointError(
            f"{draft.root}: no tensor is known as one of a draft (MTP) layer ({draft.model_line}); give "
            "the original model, or what `qconvert mtp extract` made of it"
        )
    _check_alike(model, draft)
    own = next((name for name in model if family.is_mtp(name, dims)), None)
    if own is not None:
        raise CheckpointError(
            f"{model.root}: {own!r} is of a draft already; drop that one first (qconvert mtp drop)"
        )
    used = sorted({draft[name].shard for name in names})
    place = {number: len(model.shards) + at for at, number in enumerate(used)}
    sources = {
        **model.sources,
        **{name: replace(draft[name], shard=place[draft[name].shard]) for name in names},
    }
    config = _counting(model.config, draft)
    inherited = {each.name: getattr(model, each.name) for each in fields(Checkpoint)}
    digest = sha256(f"{model.header_digest}{draft.header_digest}".encode()).hexdigest()
    return Grafted(
        **{
            **inherited,
            "shards": (*model.shards, *(draft.shards[number] for number in used)),
            "sources": sources,
            "config": config,
            "config_bytes": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
            "header_digest": digest,
            "warnings": (*model.warnings, *draft.warnings),
        },
        draft=draft,
        names=frozenset(names),
    )


def _check_alike(model: Checkpoint, draft: Checkpoint) -> None:
    if model.family.name != draft.family.name:
        raise CheckpointError(
            f"{draft.root}: expected a draft for {model.family.name}, which {model.root} is, found one "
            f"for {draft.family.name}"
        )
    ours, theirs = text_config(model.config), text_config(draft.config)
    for key in _FITTING:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            raise CheckpointError(
                f"{draft.root / 'config.json'}: {key} is {_shown(theirs[key])}, the model's is "
                f"{_shown(ours[key])} ({model.root}): the draft is of another model"
            )


def _shown(value: Any) -> str:
    return shortened(repr(value), 80)


def _counting(config: Config, draft: Checkpoint) -> dict[str, Any]:
    """The model's config with the draft's number of layers, under the keys that the draft's folder
    states. None: the class assumes a draft that is not stated."""
    found, nested = text_config(draft.config), config.get("text_config")
    stated = {key: found[key] for key in MTP_COUNTS if first_int(found, key)}
    root = {key: value for key, value in config.items() if key not in MTP_COUNTS or key in stated}
    if not isinstance(nested, Mapping):
        return {**root, **stated}
    kept = {key: value for key, value in nested.items() if key not in MTP_COUNTS}
    order = {key: stated.get(key, kept.get(key)) for key in nested if key in kept or key in stated}
    return {
        **{key: stated.get(key, value) for key, value in root.items()},
        "text_config": {**order, **stated},
    }
