"""Pipeline stages: one folder a stage, each complete in itself, and the way back.

Stage s of a partition p owns layers [sum(p[:s]), sum(p[:s]) + p[s]). Layers keep their global numbers
and config.json keeps the global count: the runtime is told the partition by an environment variable.

Rules read in sglang 0.5.23 (`distributed/utils.py`, `get_pp_indices`; `SGLANG_PP_LAYER_PARTITION`) and
vLLM 0.33 (`distributed/utils.py`, `get_pp_indices`; `VLLM_PP_LAYER_PARTITION`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from qconvert.checkpoint.checkpoint import RECEIPT, WORK_DIR, Checkpoint, Shard
from qconvert.checkpoint.family import Census, Place
from qconvert.checkpoint.prepared import layout_of
from qconvert.checkpoint.receipt import parse_receipt
from qconvert.core.errors import CheckpointError, PlanError, UsageError
from qconvert.core.graph import Output, Source
from qconvert.core.links import resolved
from qconvert.core.shown import count
from qconvert.matrices.causes import check_experts
from qconvert.plan.plan import LASTING_FACTS, Plan, nodes
from qconvert.runtimes.consumers import parse_consumer

Runtime = Literal["sglang", "vllm"]
VARIABLE: dict[str, str] = {
    "sglang": "SGLANG_PP_LAYER_PARTITION",
    "vllm": "VLLM_PP_LAYER_PARTITION",
}
RUNTIMES: tuple[Runtime | None, ...] = (None, "sglang", "vllm")
FACT = "stage"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its number, the whole partition, and the folder it goes to."""

    number: int
    partition: tuple[int, ...]

    @property
    def folder(self) -> str:
        return f"stage-{self.number:02d}-of-{len(self.partition):02d}"

    @property
    def layers(self) -> range:
        """Global numbers of the layers it owns."""
        start = sum(self.partition[: self.number])
        return range(start, start + self.partition[self.number])


def default_partition(layers: int, stages: int, runtime: Runtime) -> tuple[int, ...]:
    """The partition a runtime makes where none is stated. L = q * stages + rem: sglang gives one
    more layer to the last rem stages; vLLM to rem stages counted backwards from the second-last
    (the last one has the head to carry). Raises PlanError for fewer layers than stages."""
    if not 1 <= stages <= layers:
        raise PlanError(f"{count(layers, 'layer')} cannot be cut into {count(stages, 'stage')}")
    share, rest = divmod(layers, stages)
    sizes = [share] * stages
    if runtime == "sglang":
        for i in range(stages - rest, stages):
            sizes[i] += 1
    else:
        for i in range(2, rest + 2):
            sizes[-i] += 1
    return tuple(sizes)


def check_partition(partition: Sequence[int], layers: int) -> tuple[int, ...]:
    """The partition, if a runtime would take it. Raises PlanError with the runtime's own condition:
    the sizes must add up to num_hidden_layers, and each stage needs a layer."""
    if sum(partition) != layers:
        raise PlanError(
            f"sum of the partition {','.join(map(str, partition))} is {sum(partition)}, it must "
            f"equal num_hidden_layers = {layers}"
        )
    if any(size < 1 for size in partition):
        raise PlanError(f"every stage needs a layer, found {','.join(map(str, partition))}")
    return tuple(partition)


def check_runtime(name: str | None) -> Runtime | None:
    """The runtime of `--for`, `NAME[==VERSION]`. Raises UsageError for one that has no stages here,
    PlanError for an unknown one."""
    plain = None if name is None else parse_consumer(name).name
    if plain not in (None, "sglang", "vllm"):
        raise UsageError(f"{name!r} is not a runtime with pipeline stages; choose sglang or vllm")
    return plain  # type: ignore[return-value]


def parse_partition(text: str) -> tuple[int, ...]:
    """`15,15,15,16`, the layers of each stage; or one number, of stages. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise UsageError(f"{text!r} is not a partition; write 15,15,15,16 or a number of stages")
    sizes = tuple(map(int, parts))
    if 0 in sizes:
        raise UsageError(
            f"{text!r} is not a partition: "
            + ("every stage needs a layer" if len(sizes) > 1 else "there must be a stage")
        )
    return sizes


def partition_of(text: str, layers: int, runtime: Runtime | None) -> tuple[int, ...]:
    """`15,15,15,16`, or a number of stages to cut as the runtime would. Raises UsageError for a text
    that is neither and for a number without a runtime, PlanError where the layers are others."""
    sizes = parse_partition(text)
    if len(sizes) > 1:
        return check_partition(sizes, layers)
    if runtime is None:
        raise UsageError(
            f"{text} stages are cut differently by each runtime: say --for sglang or --for vllm, or "
            "state the partition"
        )
    return default_partition(layers, sizes[0], runtime)


def split_plan(plan: Plan, partition: Sequence[int], runtime: Runtime | None) -> list[Plan]:
    """A plan for each stage. Together they hold every tensor; only embeddings, the vision tower and
    (where tied) the head are held more than once.

    Raises PlanError for a wrong partition, for a family the runtime gives one stage only, and for
    tensors nobody knows the place of.
    """
    census = plan.census
    sizes = check_partition(partition, census.dims.num_layers)
    if "amx" in (plan.checkpoint.manifest or {}) or layout_of(plan.config) is not None:
        check_experts(plan, "")
    if plan.family.name == "generic":
        raise PlanError(
            f"model_type {plan.config.get('model_type')!r} is not known, so no stage can be named for "
            "its tensors; see CONTRIBUTING.md, a model family"
        )
    if runtime != "vllm" and plan.family.name == "qwen3_next" and len(sizes) > 1:
        raise PlanError(
            "sglang's Qwen3-Next asserts that there is one pipeline stage; use vLLM (--for vllm), "
            "or one stage"
        )
    has_mtp = any(plan.family.is_mtp(name, census.dims) for name in plan.tensors)
    stages = [Stage(number, sizes) for number in range(len(sizes))]
    owned: list[dict[str, Output]] = [{} for _ in stages]
    for name, output in plan.tensors.items():
        for number in _owners(name, census, stages, runtime, has_mtp=has_mtp):
            owned[number][name] = output
    needs_head = runtime != "vllm" and _needs_head(plan, census)
    return [
        _stage_plan(plan, stage, owned[stage.number], census, runtime, needs_head=needs_head)
        for stage in stages
    ]


def owners_of(
    whole: Checkpoint, name: str, partition: Sequence[int], runtime: Runtime | None
) -> Sequence[int]:
    """Numbers of the stages that hold a tensor of a whole checkpoint, by a runtime's rules. Raises
    PlanError for one of no known place."""
    census = whole.census
    has_mtp = any(census.family.is_mtp(n, census.dims) for n in whole)
    stages = [Stage(number, tuple(partition)) for number in range(len(partition))]
    return _owners(name, census, stages, runtime, has_mtp=has_mtp)


def _owners(
    name: str,
    census: Census,
    stages: Sequence[Stage],
    runtime: Runtime | None,
    *,
    has_mtp: bool,
) -> Sequence[int]:
    last = len(stages) - 1
    place = census.places.get(name)
    if place is None:
        raise PlanError(
            f"{name!r}: family {census.family.name} knows no such tensor, so no stage can be named "
            "for it; drop it by a rule, or describe it in layouts/"
        )
    if census.family.is_mtp(name, census.dims):
        return [last]
    if place.role.name.startswith("vision."):
        return range(len(stages))  # runtimes build the tower without asking for their stage
    if place.role.name == "embed_tokens":
        if runtime != "sglang":  # vLLM builds them in every stage; unknown runtimes may
            return range(len(stages))
        return sorted({0, last}) if census.dims.tied or has_mtp else [0]
    if place.layer is not None:
        return [_owner_of_layer(name, place, stages)]
    if place.role.name in ("norm", "lm_head"):
        return [last]
    raise PlanError(f"{name!r}: its role {place.role.name!r} belongs to no stage qconvert knows of")


def _owner_of_layer(name: str, place: Place, stages: Sequence[Stage]) -> int:
    for stage in stages:
        if place.layer in stage.layers:
            return stage.number
    raise PlanError(f"{name!r} lies in no stage's layers")


def _stage_plan(
    plan: Plan,
    stage: Stage,
    tensors: Mapping[str, Output],
    census: Census,
    runtime: Runtime | None,
    *,
    needs_head: bool,
) -> Plan:
    """The plan of one stage, over a checkpoint that holds only what it reads."""
    last = stage.number == len(stage.partition) - 1
    held = dict(tensors)
    config = dict(plan.config)
    facts: dict[str, Any] = {
        "folder": stage.folder,
        "number": stage.number,
        "of": len(stage.partition),
        "partition": list(stage.partition),
        "layers": [stage.layers.start, stage.layers.stop],
        # Of the runtime it is cut for: others want embeddings in other stages.
        "environment": dict.fromkeys(
            VARIABLE.values() if runtime is None else [VARIABLE[runtime]],
            ",".join(map(str, stage.partition)),
        ),
    }
    embed = census.named("embed_tokens")
    aliases = plan.aliases
    if last and len(stage.partition) > 1 and needs_head and embed is not None:
        held[_HEAD] = plan.tensors[embed]
        aliases = aliases | {_HEAD}
        config = _untied(config)
        facts["head_from_embeddings"] = embed
    names = {source.name for source in _sources(held)}
    subset = {name: source for name, source in plan.checkpoint.items() if name in names}
    first = stage.number == 0
    dropped = dict(plan.dropped) if first else {}
    for name in dropped:
        subset[name] = plan.checkpoint[name]
    return replace(
        plan,
        checkpoint=replace(plan.checkpoint, sources=subset),
        tensors=held,
        config=config,
        dropped=dropped,
        aliases=aliases,
        linkable=_linkable(plan.checkpoint, held),
        facts={**plan.facts, FACT: facts},
    )


def _linkable(checkpoint: Checkpoint, held: Mapping[str, Output]) -> tuple[int, ...]:
    """Source shards whose every tensor is held as it is: their files can stand in as they are."""
    whole = {
        name
        for name, output in held.items()
        if name in checkpoint and output == checkpoint[name].output
    }
    spoiled = {source.shard for name, source in checkpoint.items() if name not in whole}
    return tuple(sorted({checkpoint[name].shard for name in whole} - spoiled))


def _needs_head(plan: Plan, census: Census) -> bool:
    """Tied embeddings of a text-only class: sglang's asks the last stage for a head of its own."""
    return census.dims.tied and "vision_config" not in plan.config and _HEAD not in plan.tensors


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    if isinstance(found.get("text_config"), Mapping):
        found["text_config"] = {**found["text_config"], "tie_word_embeddings": False}
    return {**found, "tie_word_embeddings": False}


def _sources(tensors: Mapping[str, Output]) -> list[Source]:
    found = [p.origin for o in tensors.values() for p in o.pieces if isinstance(p.origin, Source)]
    for node in nodes(tensors.values()):
        found += [p.origin for arg in node.args for p in arg.pieces if isinstance(p.origin, Source)]
    return found


def open_stages(folder: Path, *, follow_links: bool = False) -> Checkpoint:
    """All stages of a split checkpoint as the one it was, links as for Checkpoint.open. Raises
    CheckpointError where stages are missing, belong to different splits, or disagree about a tensor they
    share."""
    folders = stage_folders(folder)
    if not folders:
        raise CheckpointError(f"{folder}: no stage-NN-of-NN folder")
    for path in folders:
        if (path / WORK_DIR).is_dir():
            raise CheckpointError(f"{path} is unfinished; run the split's command again")
    for path in folders:
        resolved(folder, path.name, follow_links=follow_links)
    opened = [Checkpoint.open(path, follow_links=follow_links) for path in folders]
    facts = [_facts_of(checkpoint) for checkpoint in opened]
    partition = facts[0]["partition"]
    for checkpoint, fact in zip(opened, facts, strict=True):
        if fact["partition"] != partition or _parent(checkpoint) != _parent(opened[0]):
            raise CheckpointError(
                f"{checkpoint.root}: belongs to another split than {folders[0]}: its source, passes "
                "or partition are others"
            )
    numbers = [fact["number"] for fact in facts]
    for path, number in zip(folders, numbers, strict=True):
        if numbers.count(number) > 1:
            raise CheckpointError(f"{path}: stage {number} of {len(partition)} is there twice")
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
            if "head_from_embeddings" in fact and name == _HEAD:
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
    """Tensors that several stages hold must be one: their receipts have the same hash of them."""
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
                f"{checkpoint.root}: tensor {name!r} is another than in an earlier stage"
            )


def receipt_of(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], ...]:
    """The lines of a folder's receipt. Raises CheckpointError where it is missing or broken."""
    file = checkpoint.root / RECEIPT
    data = checkpoint.read(RECEIPT, checkpoint.receipt_limit)
    if data is None:
        raise CheckpointError(f"{file} is missing; run the split's command again")
    return parse_receipt(data, file).lines


def _facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    found = (checkpoint.manifest or {}).get(FACT)
    number = partition = None
    if isinstance(found, dict):
        number, partition = found.get("number"), found.get("partition")
    sizes = partition if isinstance(partition, list) else []
    sound = sizes and all(type(size) is int and size > 0 for size in sizes)
    if not sound or type(number) is not int or not 0 <= number < len(sizes):
        raise CheckpointError(
            f"{checkpoint.root}: its qconvert.json does not say which stage it is"
        )
    assert isinstance(found, dict)
    return found


def _parent(checkpoint: Checkpoint) -> list[Any]:
    """What all stages of one split have in common."""
    manifest = checkpoint.manifest or {}
    identity = manifest.get("identity", {})
    keys = ("source", "source_sample", "passes", "qconvert")
    return [*(identity.get(key) for key in keys), [manifest.get(key) for key in LASTING_FACTS]]


def open_source(where: str | Path, *, follow_links: bool = False) -> Checkpoint:
    """Any source: what Checkpoint.open takes, or a folder of pipeline stages as the one checkpoint
    they were. Raises CheckpointError."""
    if str(where) and stage_folders(Path(where)):
        return open_stages(Path(where), follow_links=follow_links)
    return Checkpoint.open(where, follow_links=follow_links)


def stage_folders(folder: Path) -> list[Path]:
    """Folders of pipeline stages in a folder that is no checkpoint itself; [] in any other."""
    if (folder / "config.json").exists():
        return []
    return sorted(path for path in folder.glob("stage-*-of-*") if path.is_dir())
