"""Front matter of a model card, which the Hub reads.

Keys are the Hub's (huggingface_hub, repocard_data.py); those of the source are kept that remain
true of the same model in another format.

Runtimes that load a folder, and their launch lines: as runtimes/serving.py says, for the
class and the version. A runtime that is known to load it whole at some size is started as it does at the
smallest; of one whose loader nobody simulated for the class, the line is there to try. KTransformers'
line: runtimes/ktransformers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qconvert.checkpoint.hub_cache import cached_id, is_id
from qconvert.checkpoint.store import mirrored_repo
from qconvert.core.family import vision_config
from qconvert.core.manifest_keys import MERGED
from qconvert.runtimes.consumers import CHECKED, RUNTIMES, consumer_in
from qconvert.runtimes.pipeline import VARIABLE
from qconvert.runtimes.serving import Loading, Verdict, launch
from qconvert.runtimes.shared_experts import NO_FUSION, loses_shared

# --- Facts that cards need from a manifest and a config -------------------------------------------


def amx_of(manifest: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The manifest's entry on AMX experts, None if the folder has none."""
    return (manifest or {}).get("amx")


def consumer_of(manifest: Mapping[str, Any]) -> str | None:
    """The runtime that a step was told to convert for, or that a stage was cut for alone."""
    found = consumer_in(manifest)
    if found is not None:
        return found.name
    variables = (manifest.get("stage") or {}).get("environment", ())
    cut_for = [name for name, variable in VARIABLE.items() if variable in variables]
    return cut_for[0] if len(cut_for) == 1 else None


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config's quantization block, or that of its text model."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(level.get(key), Mapping):
                block: Mapping[str, Any] = level[key]
                return block
    return None


def has_signed_scales(manifest: Mapping[str, Any]) -> bool:
    """Return whether scales of its INT4 weights were searched for below 0, too."""
    for step in manifest["passes"]:
        options = step["options"]
        searched = options.get("calibrate") or options
        signed = (searched.get("scales"), searched.get("signs")) == ("search", "both")
        codes = options.get("bits"), options.get("symmetric")
        if step["name"] == "w4a16" and signed and codes == (4, True):
            return True
    return False


TRANSFORMERS, KTRANSFORMERS = "transformers", "ktransformers"

Loads = Mapping[str, Loading]
NOT_ASKED: Loads = MappingProxyType({})


def takers(
    manifest: Mapping[str, Any], said: Loads = NOT_ASKED, verdict: Verdict = "loads"
) -> tuple[str, ...]:
    """Released runtimes of which it is said that they load the folder, or that this is not known; the
    one that it was made for first. `said`: what is said of each."""
    if amx_of(manifest) is not None:
        return (KTRANSFORMERS,) if verdict == "not known" else ()
    if manifest.get("trtllm_gen") is not None or manifest.get("draft") is not None:
        return ()  # no server loads either by itself
    found = [name for name in RUNTIMES if said_of(name, said).verdict == verdict]
    stage = manifest.get("stage")
    if stage is not None:  # transformers would initialize the missing layers at random
        found = [name for name in found if VARIABLE.get(name) in stage.get("environment", ())]
    made_for = consumer_of(manifest)
    return tuple(sorted(found, key=lambda name: name != made_for))


def said_of(runtime: str, said: Loads) -> Loading:
    """Return what is said of a runtime, or that nobody asked."""
    nobody = "not known: its headers were not read"
    return said.get(runtime) or Loading(runtime, CHECKED[runtime], {}, unknown=nobody)


def library(manifest: Mapping[str, Any], said: Loads = NOT_ASKED) -> str | None:
    """The Hub's library_name: transformers unless it is known not to load the folder, else a runtime
    that does, or may."""
    found = [name for verdict in _MAY for name in takers(manifest, said, verdict)]
    return TRANSFORMERS if TRANSFORMERS in found else next(iter(found), None)


_MAY: tuple[Verdict, ...] = ("loads", "not known")


def command(
    runtime: str, manifest: Mapping[str, Any], config: Mapping[str, Any], said: Loads = NOT_ASKED
) -> str:
    """The command that starts a runtime on the folder REPO."""
    stages = manifest["stage"]["of"] if manifest.get("stage") is not None else 1
    one = said_of(runtime, said)
    tp, option = one.least if one.sizes else (0, "")
    asked = (step["options"].get("tp") for step in manifest.get("passes", ()))
    held = one.sizes.get(option, {})
    tp = next((size for size in asked if type(size) is int and size in held), tp)
    if runtime == "sglang" and not tp and loses_shared(config, quantization_of(config)):
        # sglang would fuse the shared expert into the routed experts, with their scheme, and skip its
        # weights if they are stored in another format.
        option = NO_FUSION
    return launch(runtime, "REPO", tp, stages, option)


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
        if manifest is not None and MERGED in manifest:
            found.setdefault("base_model_relation", "finetune")
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
