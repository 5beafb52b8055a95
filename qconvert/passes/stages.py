"""Pipeline stages: one folder per stage, each complete in itself. The inverse: checkpoint/open.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.open import HEAD, STAGE_FACT
from qconvert.checkpoint.prepared import layout_of
from qconvert.core.errors import PlanError
from qconvert.core.family import RoleIndex
from qconvert.core.graph import Output, Source, nodes
from qconvert.models.skip_reasons import DESCRIBE, check_experts
from qconvert.plan.plan import Plan
from qconvert.runtimes.classes.record import architecture_of
from qconvert.runtimes.pipeline import (
    HEAD_EVERYWHERE,
    VARIABLE,
    Runtime,
    Stage,
    StageWeights,
    check_partition,
    default_partition,
    one_stage,
    stages_of,
)
from qconvert.runtimes.serving import class_of


def split_plan(plan: Plan, partition: Sequence[int], runtime: Runtime | None) -> list[Plan]:
    """A plan for each stage. Together they hold every tensor; only embeddings, the vision tower and
    (where tied) the head are held more than once.

    Raises PlanError for a wrong partition, for a family that the runtime runs in one stage only, and for
    tensors whose stage is unknown.
    """
    role_index = plan.role_index
    sizes = check_partition(partition, role_index.dims.num_layers)
    if "amx" in (plan.checkpoint.manifest or {}) or layout_of(plan.config) is not None:
        check_experts(plan, "")
    if plan.family.name == "generic":
        raise PlanError(
            f"model_type {plan.config.get('model_type')!r} is not known, so the stage of its tensors is "
            f"unknown; {DESCRIBE}"
        )
    refusing = [name for name in VARIABLE if one_stage(name, plan.config)]
    if len(sizes) > 1 and (runtime in refusing or len(refusing) == len(VARIABLE)):
        others = [f"{name} (--for {name}), or " for name in VARIABLE if name not in refusing]
        raise PlanError(
            f"{class_of(plan.config)} runs in one pipeline stage only in {' and '.join(refusing)}; "
            f"use {''.join(others)}one stage"
        )
    has_mtp = any(plan.family.is_mtp(name, role_index.dims) for name in plan.tensors)
    stages = [Stage(number, sizes) for number in range(len(sizes))]
    owned: list[dict[str, Output]] = [{} for _ in stages]
    of = architecture_of(plan.config)
    for name, output in plan.tensors.items():
        for number in stages_of(name, role_index, stages, runtime, of, has_mtp=has_mtp):
            owned[number][name] = output
    needs_head = runtime != "vllm" and _needs_head(plan, role_index)
    return [
        _stage_plan(plan, stage, owned[stage.number], role_index, runtime, needs_head=needs_head)
        for stage in stages
    ]


def weights_of(plan: Plan, stages: int, runtime: Runtime) -> StageWeights:
    """Bytes of each layer, and of what each of so many stages holds beside its layers for a runtime: all
    that its folder holds, and a head that its class builds there for nothing. Raises PlanError as
    `split_plan` does."""
    role_index = plan.role_index
    layers = [0] * role_index.dims.num_layers
    inside: set[str] = set()
    for name, output in plan.tensors.items():
        place = role_index.places.get(name)
        if place is None or place.layer is None or place.role.vision:
            continue  # a tower has layers of its own, and is in every stage
        if not plan.family.is_mtp(name, role_index.dims):
            layers[place.layer] += output.type.nbytes
            inside.add(name)
    parts = split_plan(plan, default_partition(len(layers), stages, runtime), runtime)
    beside = [
        sum(output.type.nbytes for name, output in part.tensors.items() if name not in inside)
        for part in parts
    ]
    head = role_index.named("lm_head")
    if runtime == "sglang" and head is not None and plan.family.name in HEAD_EVERYWHERE:
        for number in range(stages - 1):
            beside[number] += plan.tensors[head].type.nbytes
    return StageWeights(tuple(layers), tuple(beside))


def _stage_plan(
    plan: Plan,
    stage: Stage,
    tensors: Mapping[str, Output],
    role_index: RoleIndex,
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
        # For the runtime it is cut for: others expect embeddings in other stages.
        "environment": dict.fromkeys(
            VARIABLE.values() if runtime is None else [VARIABLE[runtime]],
            ",".join(map(str, stage.partition)),
        ),
    }
    embed = role_index.named("embed_tokens")
    aliases = plan.aliases
    if last and len(stage.partition) > 1 and needs_head and embed is not None:
        held[HEAD] = plan.tensors[embed]
        aliases = aliases | {HEAD}
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
        facts={**plan.facts, STAGE_FACT: facts},
    )


def _linkable(checkpoint: Checkpoint, held: Mapping[str, Output]) -> tuple[int, ...]:
    """Source shards whose every tensor is kept unchanged: their files can be linked as they are."""
    whole = {
        name
        for name, output in held.items()
        if name in checkpoint and output == checkpoint[name].output
    }
    spoiled = {source.shard for name, source in checkpoint.items() if name not in whole}
    return tuple(sorted({checkpoint[name].shard for name in whole} - spoiled))


def _needs_head(plan: Plan, role_index: RoleIndex) -> bool:
    """Tied embeddings of a text-only class: sglang's expects a separate head in the last stage."""
    return role_index.dims.tied and "vision_config" not in plan.config and HEAD not in plan.tensors


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
