"""Front matter of a model card, which the Hub reads.

Keys are the Hub's (huggingface_hub, repocard_data.py); those of the source are kept that remain
true of the same model in another format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qconvert.checkpoint.hub_cache import cached_id, is_id
from qconvert.checkpoint.store import mirrored_repo
from qconvert.core.family import vision_config
from qconvert.hub.card.loaders import (
    TRANSFORMERS,
    Loads,
    amx_of,
    consumer_of,
    library,
    quantization_of,
    takers,
)

# Keys of the source's front matter that remain true of the same model in another format. Evaluation
# results, widgets and its own base model do not.
_INHERITED = (
    "license", "license_name", "license_link", "language", "pipeline_tag", "library_name", "tags",
)  # fmt: skip
# Tags of the source on how weights are stored, which may no longer be true.
_STORAGE_TAGS = frozenset(
    {"fp8", "bf16", "int4", "int8", "nvfp4", "mxfp4", "awq", "gptq", "compressed-tensors", "modelopt",
     "4-bit", "8-bit", "quantized", "amxint4", "amxint8", "ktransformers", "sglang", "vllm", "qconvert"}
)  # fmt: skip


def front_matter(
    manifest: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    source: Mapping[str, Any],
    existing: Mapping[str, Any],
    base_model: str | None,
    said: Loads,
) -> dict[str, Any]:
    """Keys of the existing card take precedence: somebody may have edited them."""
    found = dict(existing)
    for key in _INHERITED:
        value = source.get(key)
        if key not in found and key != "tags" and _is_text(value):
            found[key] = value if isinstance(value, str) else _texts(value)
    amx = amx_of(manifest)
    if manifest is not None:
        found.setdefault("pipeline_tag", _pipeline(config))
        # A runtime that loads the source may not load this.
        loaded_by = library(manifest, said)
        if "library_name" not in existing:
            of_source = found.pop("library_name", None)
            if loaded_by == TRANSFORMERS:
                found["library_name"] = of_source or loaded_by
            elif loaded_by is not None:
                found["library_name"] = loaded_by
    base = base_model or found.get("base_model") or base_model_of(source)
    if base:
        found["base_model"] = base
        # None of the Hub's four relations (adapter, merge, quantized, finetune) says that the weights
        # are the same in another layout. Without the key the Hub infers it from the repo.
        if amx is not None or quantization_of(config) is not None:
            found.setdefault("base_model_relation", "quantized")
    tags = [*_texts(existing.get("tags")), *_storage_free(_texts(source.get("tags")))]
    found["tags"] = list(dict.fromkeys([*tags, *_tags(manifest, config, said)]))
    first = ("base_model", "base_model_relation", *_INHERITED)
    return {
        **{key: found[key] for key in first if key in found},
        **{key: value for key, value in found.items() if key not in first},
    }


def _is_text(value: Any) -> bool:
    return bool(value) and (
        isinstance(value, str) or (isinstance(value, list) and bool(_texts(value)))
    )


def _texts(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [text for text in listed if isinstance(text, str)]


def _storage_free(tags: Sequence[str]) -> list[str]:
    return [tag for tag in tags if tag.lower() not in _STORAGE_TAGS]


def _tags(
    manifest: Mapping[str, Any] | None, config: Mapping[str, Any], said: Loads
) -> Iterator[str]:
    if manifest is None:
        return
    yield "qconvert"
    amx, block = amx_of(manifest), quantization_of(config)
    if amx is not None:
        yield "ktransformers"
        yield str(amx["method"]).lower()
    elif block is not None and isinstance(block.get("quant_method"), str):
        yield block["quant_method"]
    consumer = consumer_of(manifest)
    if consumer in ("sglang", "vllm") and consumer in takers(manifest, said):
        yield consumer


def _pipeline(config: Mapping[str, Any]) -> str:
    return "image-text-to-text" if vision_config(config) else "text-generation"


def base_model_of(front: Mapping[str, Any]) -> str | None:
    """The first base model, if it is a repo's id."""
    said = front.get("base_model")
    first = said[0] if isinstance(said, list) and said else said
    return str(first) if is_id(first) else None


def base_of(root: Path, source: Mapping[str, Any]) -> str | None:
    """The repo of a source: the one that its folder is a snapshot or a mirror of, else the base_model of
    its README; None if neither is known. `_name_or_path` of config.json is not used: after training it
    is often a local path, and `checkpoints/final` looks like a repo."""
    name = cached_id(root) or mirrored_repo(root)
    return name if is_id(name) else base_model_of(source)
