"""Side files: everything needed to load and upload the folder, nothing stale, and what the source has.

QC028 no tokenizer file.
QC029 a vision tower, but no processor file.
QC032 a side file of the source is missing.
QC056 weights that the index does not name: pickles, shards, another index.
QC057 no shard's metadata says `format: pt`.
QC058 config.json names code that is missing.
QC059 README.md's front matter is broken.
QC085 a side file differs from the source's.
QC098 a file is read instead of the weights that the index names, or on top of them.

The first ones are not checked in a folder with a receipt: QC020 and QC032 (conservation) compare it with
what was written and what its source has. Every runtime can do without generation_config.json, so only
the source says that it is missing (QC032); a README.md without front matter, or none, is
allowed. Without a receipt QC032 is a warning, because another tool may have left it out on purpose.

Files are compared byte by byte, and JSON by content, because tools rewrite it. Those that conversions
make themselves are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from reprlib import Repr
from typing import Any

from qconvert.checkpoint.checkpoint import INDEX, RECEIPT, Checkpoint
from qconvert.checkpoint.safetensors import read_header
from qconvert.core.errors import CheckpointError
from qconvert.core.family import vision_config
from qconvert.core.json_text import parse_json, parse_object
from qconvert.core.yaml_lines import load
from qconvert.validation.findings import Finding, OnlyRead, Proved, Severity
from qconvert.validation.runner import Folder, validator

_MADE = frozenset({"README.md", "hf_quant_config.json"})
_STARTS = (
    "tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece",
    "tekken", "chat_template", "preprocessor_config", "processor_config", "video_preprocessor_config",
)  # fmt: skip
_ENDS = (".tiktoken", "tiktoken.model", ".jinja", ".py")
_OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_GENERATION = "generation_config.json"
_CHUNK = 1 << 20
_MOST_JSON = 128 << 20  # tokenizer.json has up to 33 MB
_A_FEW = 8


@validator("side files in both folders are equal", "files", "source")
def files_kept(folder: Folder) -> Iterator[Finding]:
    """Reads what both folders have, and names what only the source has."""
    here, source = folder.checkpoint, folder.source
    assert source is not None
    ours = set(here.side_files)
    wanted = [file for file in source.side_files if file not in _MADE]
    for file in wanted:
        message = _difference(here, source, file) if file in ours else ""
        if message:
            severity: Severity = "error" if is_loaded(file) else "warning"
            yield Finding("QC085", severity, file, message)
    if folder.receipt is None:
        yield from _not_kept(here, source, [file for file in wanted if file not in ours])


def is_loaded(file: str) -> bool:
    """Tell whether runtimes read a file to make token ids, images or layers."""
    name = file.rpartition("/")[2]
    return name.startswith(_STARTS) or name.endswith(_ENDS)


def _not_kept(here: Checkpoint, source: Checkpoint, gone: list[str]) -> Iterator[Finding]:
    rules = (here.manifest or {}).get("dropped_files", {})
    no_tower = "vision_config" in source.config and "vision_config" not in here.config
    gone = [f for f in gone if f not in rules and not (no_tower and f in _OF_IMAGES)]
    loaded = [file for file in gone if is_loaded(file) or file == _GENERATION]
    for file in loaded:
        yield Finding("QC032", "warning", file, "a side file of the source is missing")
    others = [file for file in gone if file not in loaded]
    if others:
        more = f" and {len(others) - _A_FEW} more" if len(others) > _A_FEW else ""
        message = f"side files of the source are missing: {', '.join(others[:_A_FEW])}{more}"
        yield Finding("QC032", "warning", others[0], message)


def _difference(here: Checkpoint, source: Checkpoint, name: str) -> str:
    """Difference of two files, "" if they are equal."""
    try:
        same = _same_bytes(here, source, name) or (
            name.endswith(".json") and _same_json(here, source, name)
        )
    except CheckpointError as error:  # a dangling link, above all
        return f"cannot be compared with the source's: {error}"
    return "" if same else "differs from the source's file of this name"


def _same_bytes(here: Checkpoint, source: Checkpoint, name: str) -> bool:
    with here.open_file(name) as ours, source.open_file(name) as theirs:
        if os.fstat(ours.fileno()).st_size != os.fstat(theirs.fileno()).st_size:
            return False
        while chunk := ours.read(_CHUNK):
            if chunk != theirs.read(_CHUNK):
                return False
    return True


def _same_json(here: Checkpoint, source: Checkpoint, name: str) -> bool:
    """Tell whether both have the same content. Broken JSON is compared as bytes."""
    ours, theirs = (of.read(name, _MOST_JSON) or b"" for of in (here, source))
    try:
        return bool(parse_json(ours, name) == parse_json(theirs, name))
    except CheckpointError:
        return False


README = "README.md"
_SINGLE, _PICKLE, _PARAMS = "model.safetensors", "pytorch_model.bin", "params.json"
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "tekken.json", "sentencepiece.bpe.model",
)  # fmt: skip
_TIKTOKEN = (".tiktoken", "tiktoken.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_RELATIONS = ("adapter", "merge", "quantized", "finetune")
_TEXTS = ("library_name", "license", "license_name", "pipeline_tag", "base_model_relation")
_MOST_README = 1 << 20
# Front matter may repeat one value many times, by aliases.
_BRIEF = Repr()
_BRIEF.maxstring = _BRIEF.maxother = 120
_BRIEF.maxlevel = 2


@validator("tokenizer, processor and code are present, and no stale weights", "files")
def side_files(folder: Folder) -> Iterator[Finding | OnlyRead | Proved]:
    """Names of files, config.json's auto_map, and README.md's first lines."""
    checkpoint = folder.checkpoint
    if checkpoint.there(RECEIPT) is None:
        yield from _missing(checkpoint)
        first = list(_read_first(checkpoint))
        yield from first
        yield from (f for f in _stale(checkpoint) if f.where not in {one.where for one in first})
    else:
        yield from _read_first(checkpoint)
        if any(_missing(checkpoint)):
            # The source may not have had them: the receipt lists everything that it had.
            yield OnlyRead(f"no tokenizer, processor or code was left behind, says {RECEIPT}")
            yield Proved("shard metadata and README front matter are valid")
    if checkpoint.metadata.get("format") is None:
        name = checkpoint.shards[0].path.name
        message = "its metadata, and any other shard's, lacks format: pt"
        yield Finding("QC057", "warning", name, message)
    yield from _readme(checkpoint)


def _missing(checkpoint: Checkpoint) -> Iterator[Finding]:
    files = set(checkpoint.side_files)
    if not any(name in _TOKENIZERS or name.endswith(_TIKTOKEN) for name in files):
        message = f"no tokenizer file ({', '.join(_TOKENIZERS[:3])}, ...)"
        yield Finding("QC028", "warning", _TOKENIZERS[0], message)
    tower = any(p.role.vision for p in checkpoint.role_index.places.values())
    if vision_config(checkpoint.config) and tower and files.isdisjoint(_PROCESSORS):
        message = f"missing, but there is a vision tower (or {_PROCESSORS[1]})"
        yield Finding("QC029", "warning", _PROCESSORS[0], message)
    for file, key in _code(checkpoint.config):
        if file not in files:
            yield Finding(
                "QC058", "warning", file, f"missing: config.json's auto_map.{key} names it"
            )


def _code(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Code files, each with the key that names it first. `repo--file.Class` is in another repo."""
    found = config.get("auto_map")
    seen: set[str] = set()
    for key, value in found.items() if isinstance(found, Mapping) else ():
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, str) or "--" in one or "." not in one:
                continue
            file = one.rpartition(".")[0].replace(".", "/") + ".py"
            if file not in seen:
                seen.add(file)
                yield file, str(key)


def _stale(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Only at the root: folders below it are other forms of the model (original/, onnx/)."""
    for file in checkpoint.denied_files:
        if "/" in file:
            continue
        if file.endswith(".safetensors"):
            message = "a shard that the index does not name; not every loader loads it"
        elif file.lower().endswith(_PICKLES):
            message = "a pickle next to safetensors"
        elif file.endswith(".index.json"):
            message = "an index of weights that are not loaded"
        else:
            continue
        yield Finding("QC056", "warning", file, message)


def _read_first(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that a reader takes before those that were validated. Read in transformers
    (`modeling_utils.py`, `_get_resolved_checkpoint_files`; `integrations/peft.py`), vLLM
    (`default_loader.py`), sglang (`weight_utils.py`) and kt-kernel (`utils/loader.py`: all
    files below the folder, of which the last counts)."""
    files = {*checkpoint.denied_files, *checkpoint.side_files}
    shards = {shard.path.name for shard in checkpoint.shards}
    whole = checkpoint.indexed or shards == {_SINGLE}
    if checkpoint.indexed and _SINGLE in files:
        yield _first(_SINGLE, "transformers reads it instead of the shards that the index names")
    named = checkpoint.config.get("transformers_weights")
    if isinstance(named, str) and named not in (INDEX if checkpoint.indexed else "", *shards):
        yield _first("config.json", f"transformers_weights has transformers read {named!r} alone")
    pickle = next((file for file in (_PICKLE, f"{_PICKLE}.index.json") if file in files), None)
    if not whole and pickle is not None:
        message = f"transformers reads it: it finds neither {_SINGLE} nor {INDEX}"
        yield _first(pickle, message)
    if "adapter_config.json" in files:
        yield _first("adapter_config.json", "transformers applies this adapter to the weights")
    loose = sorted(f for f in files if f.endswith(".safetensors"))
    mistral = [f for f in loose if "/" not in f and f.startswith("consolidated")]
    if mistral and not _is_mistral(checkpoint):
        yield _first(
            mistral[0], "vLLM reads consolidated*.safetensors instead of all other weights"
        )
    drafts = checkpoint.role_index.dims.mtp_layers and checkpoint.family.name.startswith("glm4_moe")
    if drafts and "mtp.safetensors" in loose:
        yield _first(
            "mtp.safetensors", "sglang reads draft layers from it, whatever the index names"
        )
    for file in loose:
        both = () if file == _SINGLE else _names_again(checkpoint, file)
        if both:
            message = (
                f"holds {both[0]!r} again, which kt-kernel then reads from it or from the index's"
            )
            # A folder below may be another model, which is no runtime's --kt-weight-path.
            yield _first(file, message, "warning" if "/" in file else "error")


def _first(file: str, message: str, severity: Severity = "error") -> Finding:
    return Finding("QC098", severity, file, message)


def _is_mistral(checkpoint: Checkpoint) -> bool:
    """Tell whether the folder holds Mistral's own form of the model too, as Mistral publishes it: with
    its config, and quantized if this one is."""
    text = checkpoint.read(_PARAMS, _MOST_README) if _PARAMS in checkpoint.side_files else None
    if text is None or checkpoint.manifest is not None:
        return False
    try:
        own = parse_object(text, checkpoint.root / _PARAMS)
    except CheckpointError:
        return False
    return bool(own.get("quantization")) == bool(checkpoint.quantization_configs)


def _names_again(checkpoint: Checkpoint, file: str) -> list[str]:
    """Tensors of the model that a file which is not read holds as well."""
    if checkpoint.there(file) is None:
        return []
    try:
        header = read_header(checkpoint.root / file, checkpoint.real(file))
    except CheckpointError:
        return []
    return [entry.name for entry in header.entries if entry.name in checkpoint]


# --- README.md -----------------------------------------------------------------------------------


def _readme(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.there(README) is None:
        return
    with checkpoint.open_file(README) as stream:
        text = stream.read(_MOST_README).decode("utf-8", "replace").removeprefix("\ufeff")
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != "---":
        return
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        yield Finding("QC059", "error", README, "its front matter is not closed by a line of ---")
        return
    try:
        found = load("\n".join(lines[1:end]), "its front matter", error=CheckpointError)
    except CheckpointError as error:
        yield Finding("QC059", "error", README, str(error))
        return
    if found is None:
        return
    if not isinstance(found, dict):
        message = f"its front matter is a {type(found).__name__}, expected a mapping"
        yield Finding("QC059", "error", README, message)
        return
    quantized = bool(checkpoint.quantization_configs) or "amx" in (checkpoint.manifest or {})
    for message in _front_matter(found, quantized=quantized):
        yield Finding("QC059", "warning", README, message)


def _front_matter(found: dict[Any, Any], *, quantized: bool) -> Iterator[str]:
    for key in _TEXTS:
        value = found.get(key)
        if value is not None and not (isinstance(value, str) or (key == "license" and value)):
            yield f"{key}: expected a string, found {_BRIEF.repr(value)}"
    base = found.get("base_model")
    ids = base if isinstance(base, list) else [] if base is None else [base]
    for one in ids:
        if not isinstance(one, str) or one.count("/") != 1 or " " in one or one.startswith("http"):
            yield f"base_model: expected a repo id (OWNER/NAME), found {_BRIEF.repr(one)}"
    relation = found.get("base_model_relation")
    if relation is None:
        return
    if isinstance(relation, str) and relation not in _RELATIONS:
        yield f"base_model_relation: expected {', '.join(_RELATIONS)}, found {_BRIEF.repr(relation)}"
    if not ids:
        yield "base_model_relation without base_model: the Hub links it to no model"
    if relation == "quantized" and not quantized:
        yield "base_model_relation is quantized, but config.json states no quantization"
