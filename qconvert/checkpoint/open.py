"""Any source opened as one checkpoint: a folder, a file, a repo on the Hub or in its client's cache, a
folder in a store, or the folders of pipeline stages that a split made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import (
    ADAPTER_CONFIG,
    INDEX,
    RECEIPT,
    WORK_DIR,
    Checkpoint,
    Shard,
    extended,
    index_limit,
)
from qconvert.checkpoint.gguf.header import SUFFIX
from qconvert.checkpoint.gguf.source import open_gguf
from qconvert.checkpoint.hub_cache import Repo, cached_folder, parse_repo, snapshot
from qconvert.checkpoint.ranks import is_of_ranks
from qconvert.checkpoint.receipt import parse_receipt
from qconvert.checkpoint.store import is_url, named, store_of
from qconvert.checkpoint.torchao import translated
from qconvert.core.errors import CheckpointError
from qconvert.core.family import MTP_COUNTS, Config, first_int, text_config
from qconvert.core.graph import Source
from qconvert.core.json_text import parse_object
from qconvert.core.links import read_inside, resolved
from qconvert.core.manifest_keys import LASTING_FACTS
from qconvert.core.profiling import phase
from qconvert.core.shown import shortened

_STAGE = re.compile(r"stage-\d{1,6}-of-(\d{1,6})")
_SHARD = re.compile(r"-\d{1,6}-of-(\d{1,6})\.safetensors$")

STAGE_FACT = "stage"
HEAD = "lm_head.weight"


def open_stages(folder: Path, *, follow_links: bool = False) -> Checkpoint:
    """All stages of a split checkpoint as the one it was, links as for Checkpoint.open. Raises
    CheckpointError if stages are missing, belong to different splits, or disagree about a shared
    tensor."""
    folders = stage_folders(folder)
    if not folders and any(folder.glob("rank-*-of-*")):
        raise CheckpointError(
            f"{folder}: holds ranks that were cut for vLLM, which are not joined to a checkpoint; "
            "use the one that they were cut from"
        )
    if not folders:
        raise CheckpointError(f"{folder}: expected folders named stage-NN-of-NN, found none")
    for path in folders:
        if (path / WORK_DIR).is_dir():
            raise CheckpointError(f"{path} is unfinished; run the split command again")
    for path in folders:
        resolved(folder, path.name, follow_links=follow_links)
    opened = [Checkpoint.open(path, follow_links=follow_links) for path in folders]
    facts = [_facts_of(checkpoint) for checkpoint in opened]
    partition = facts[0]["partition"]
    for checkpoint, fact in zip(opened, facts, strict=True):
        if fact["partition"] != partition or _parent(checkpoint) != _parent(opened[0]):
            raise CheckpointError(
                f"{checkpoint.root}: belongs to another split than {folders[0]}: source, passes or "
                "partition differ"
            )
    numbers = [fact["number"] for fact in facts]
    for path, number in zip(folders, numbers, strict=True):
        if numbers.count(number) > 1:
            raise CheckpointError(f"{path}: stage {number} of {len(partition)} is present twice")
    missing = sorted(set(range(len(partition))) - set(numbers))
    if missing:
        raise CheckpointError(f"{folder}: stage {missing[0]} of {len(partition)} is missing")
    shards: list[Shard] = []
    sources: dict[str, Source] = {}
    shared: list[tuple[str, Checkpoint]] = []
    for checkpoint, fact in zip(opened, facts, strict=True):
        base = len(shards)
        shards += checkpoint.shards
        for name, source in checkpoint.items():
            if "head_from_embeddings" in fact and name == HEAD:
                continue
            known = sources.get(name)
            if known is None:
                sources[name] = replace(source, shard=base + source.shard)
            else:
                shared.append((name, checkpoint))
    _check_shared(shared, opened)
    first = opened[numbers.index(0)]
    digest = sha256("".join(checkpoint.header_digest for checkpoint in opened).encode())
    return replace(first, shards=tuple(shards), sources=sources, header_digest=digest.hexdigest())


def _check_shared(shared: Sequence[tuple[str, Checkpoint]], opened: Sequence[Checkpoint]) -> None:
    """Tensors that several stages hold must be equal: their receipts have the same hash for them."""
    if not shared:
        return
    names = {name for name, _ in shared}
    hashes: dict[str, set[str]] = {}
    for checkpoint in opened:
        for record in receipt_of(checkpoint):
            if record.get("name") in names and record["name"] in checkpoint:
                hashes.setdefault(record["name"], set()).add(str(record.get("xxh3")))
    for name, checkpoint in shared:
        if len(hashes.get(name, ())) != 1:
            raise CheckpointError(
                f"{checkpoint.root}: tensor {name!r} differs from the one in an earlier stage"
            )


def receipt_of(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], ...]:
    """The lines of a folder's receipt. Raises CheckpointError if it is missing or broken."""
    file = checkpoint.root / RECEIPT
    data = checkpoint.read(RECEIPT, checkpoint.receipt_limit)
    if data is None:
        raise CheckpointError(f"{file} is missing; run the split command again")
    return parse_receipt(data, file).lines


def _facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    found = (checkpoint.manifest or {}).get(STAGE_FACT)
    number = partition = None
    if isinstance(found, dict):
        number, partition = found.get("number"), found.get("partition")
    sizes = partition if isinstance(partition, list) else []
    sound = sizes and all(type(size) is int and size > 0 for size in sizes)
    if not sound or type(number) is not int or not 0 <= number < len(sizes):
        raise CheckpointError(
            f"{checkpoint.root}: its qconvert.json does not state which stage it is"
        )
    assert isinstance(found, dict)
    return found


def _parent(checkpoint: Checkpoint) -> list[Any]:
    """Return what all stages of one split have in common."""
    manifest = checkpoint.manifest or {}
    identity = manifest.get("identity", {})
    keys = ("source", "source_sample", "passes", "qconvert")
    return [*(identity.get(key) for key in keys), [manifest.get(key) for key in LASTING_FACTS]]


@phase("open")
def open_source(where: str | Path, *, follow_links: bool = False) -> Checkpoint:
    """Any source: what Checkpoint.open takes, a GGUF file, a repo on the Hub by its id, a folder in a
    store by its URL, or a folder of pipeline stages as the one checkpoint they were. Raises
    CheckpointError, and RunError where the Hub or the store fails for too long."""
    folder = local(where)
    try:
        if str(where) and stage_folders(folder):
            return open_stages(folder, follow_links=follow_links)
        if folder.suffix.lower() == SUFFIX and folder.is_file():
            return open_gguf(folder, follow_links=follow_links)
        found = Checkpoint.open(folder if str(where) else where, follow_links=follow_links)
        return translated(found)
    except CheckpointError as error:
        raise CheckpointError(named(str(error))) from error


def local(where: str | Path) -> Path:
    """A folder or file, or the folder on this machine that stands for what lies elsewhere: of a repo
    its snapshot in the client's cache, if that is finished or the Hub cannot be asked, else a mirror of
    the commit that its revision stands for. Raises as the store does."""
    if is_url(where):
        from qconvert.checkpoint.mirror import mirror

        return mirror(store_of(str(where))).folder
    repo = named_repo(where)
    if repo is None:
        return Path(where)
    found = snapshot(repo)
    if found is not None and _is_finished(found):
        return found
    from qconvert.checkpoint.hub_store import store_of_repo
    from qconvert.checkpoint.mirror import mirror

    store = store_of_repo(repo, str(where))
    return cached_folder(repo, str(where)) if store is None else mirror(store).folder


def named_repo(where: str | Path) -> Repo | None:
    """The repo that a user named, None for what is a file or folder of this machine, or cannot be a
    repo's name. Raises UsageError as `parse_repo` does."""
    with suppress(OSError):  # a name too long for a file: who opens it says so
        if not str(where) or Path(where).exists():
            return None
    return parse_repo(str(where))


def _is_finished(snapshot: Path) -> bool:
    """Return whether a snapshot in the client's cache has its config and every file of weights that its
    index, or the shards' names, speak of. Of one that is broken otherwise, who opens it says so."""
    if not any((snapshot / name).exists() for name in ("config.json", ADAPTER_CONFIG)):
        counts = [_STAGE.fullmatch(path.name) for path in stage_folders(snapshot)]
        return bool(counts) and all(n is not None and int(n[1]) == len(counts) for n in counts)
    try:
        limit = index_limit(snapshot, follow_links=False)
        index = parse_object(read_inside(snapshot, INDEX, limit), snapshot / INDEX)
    except FileNotFoundError:
        shards = [path.name for path in snapshot.glob("*.safetensors")]
        if is_of_ranks(snapshot):
            return False  # how many files each rank has is not in their names
        of = [int(found[1]) for name in shards if (found := _SHARD.search(name))]
        return bool(shards) and all(count == len(of) for count in of)
    except CheckpointError:
        return True
    files = index.get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    return all((snapshot / name).exists() for name in names)


def stage_folders(folder: Path) -> list[Path]:
    """Folders of pipeline stages in a folder that is not a checkpoint itself; [] for any other
    folder."""
    if (folder / "config.json").exists():
        return []
    return sorted(path for path in folder.glob("stage-*-of-*") if path.is_dir())


# A model with the draft of another folder beside it, as one checkpoint: what `mtp graft` reads. Of the
# draft's folder only the tensors of its draft (MTP) layers are taken, wherever that folder is from:
# the original model, or what `mtp extract` made of it. All else is the model's own.

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

    @property
    def added(self) -> str:
        return " and the draft"


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
    config = _counting(model.config, draft)
    return extended(
        Grafted,
        model,
        [draft.shards[number] for number in used],
        {name: replace(draft[name], shard=place[draft[name].shard]) for name in names},
        [draft.header_digest],
        config=config,
        config_bytes=(json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        warnings=(*model.warnings, *draft.warnings),
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
