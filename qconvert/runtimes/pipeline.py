"""Layers that a pipeline stage owns, and which stages hold a tensor, by each runtime's rules.

Stage s of a partition p owns layers [sum(p[:s]), sum(p[:s]) + p[s]). Layers keep their global numbers
and config.json keeps the global count: the runtime is told the partition by an environment variable.

Rules read in sglang (`distributed/utils.py`, `get_pp_indices`; `SGLANG_PP_LAYER_PARTITION`) and
vLLM (`distributed/utils.py`, `get_pp_indices`; `VLLM_PP_LAYER_PARTITION`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError, UsageError
from qconvert.core.family import Place, RoleIndex
from qconvert.core.shown import count
from qconvert.runtimes.classes.expressions import Sizes
from qconvert.runtimes.classes.modules import stage_of
from qconvert.runtimes.classes.record import architecture_of, recorded
from qconvert.runtimes.consumers import parse_consumer
from qconvert.runtimes.loading.building import text_config

Runtime = Literal["sglang", "vllm"]
VARIABLE: dict[str, str] = {
    "sglang": "SGLANG_PP_LAYER_PARTITION",
    "vllm": "VLLM_PP_LAYER_PARTITION",
}
RUNTIMES: tuple[Runtime | None, ...] = (None, "sglang", "vllm")
# Families whose class in vLLM builds the last norm in every stage, and refuses a stage without it
# (models/qwen3_moe.py and others; default_loader.py, track_weights_loading).
NORM_EVERYWHERE = frozenset((
    "bloom", "cohere", "cohere2", "cohere2_moe", "dbrx", "falcon", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gpt2", "gpt_oss", "gptj", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "hy_v3", "jamba", "mamba", "mixtral", "nemotron_h", "olmo_hybrid", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "stablelm",
))  # fmt: skip
# Classes without a table that run in one stage only: sglang asks whether a class's `forward` takes
# `pp_proxy_tensors` (`model_executor/model_runner.py`), vLLM for `SupportsPP` (`config/model.py`).
_ONE_STAGE: dict[str, frozenset[str]] = {
    "sglang": frozenset((
        "Cohere2VisionForConditionalGeneration", "DbrxForCausalLM",
        "Ernie4_5_VLMoeForConditionalGeneration", "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration", "InklingForConditionalGeneration",
        "LongcatFlashForCausalLM", "MuseGlimmerForConditionalGeneration",
        "Step3p7ForConditionalGeneration",
    )),
    "vllm": frozenset((
        "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration",
    )),
}  # fmt: skip
# Families whose class in sglang builds the head in every stage and reads it in the last
# (models/glm4_moe.py, models/qwen3_moe.py): it takes memory in all.
HEAD_EVERYWHERE = ("glm4_moe", "qwen3_moe")


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
    """The partition a runtime makes if none is stated. L = q * stages + rem: sglang gives one
    more layer to the last rem stages; vLLM to rem stages counted backwards from the second-last
    (the last one also runs the head). Raises PlanError for fewer layers than stages."""
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
    """The runtime of `--for`, `NAME[==VERSION]`. Raises UsageError for one without pipeline stages here,
    PlanError for an unknown one."""
    plain = None if name is None else parse_consumer(name).name
    if plain not in (None, "sglang", "vllm"):
        raise UsageError(f"{name!r} is not a runtime with pipeline stages; choose sglang or vllm")
    return plain  # type: ignore[return-value]


def one_stage(runtime: str, config: Mapping[str, Any], version: str | None = None) -> bool:
    """Return whether a runtime's class of a model runs in one stage only."""
    name = architecture_of(config)
    table = recorded(runtime, name, version) if runtime in _ONE_STAGE else None
    if table is None:
        return name in _ONE_STAGE.get(runtime, ())
    values = {**config, **text_config(config).values}
    return table.under(Sizes(values, table.defaults, table.also)).one_stage


def parse_partition(text: str) -> tuple[int, ...]:
    """`15,15,15,16`, the layers of each stage; or one number, of stages. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in parts):
        raise UsageError(
            f"{text!r} is not a valid partition; write 15,15,15,16 or a number of stages"
        )
    sizes = tuple(map(int, parts))
    if 0 in sizes:
        raise UsageError(
            f"{text!r} is not a valid partition: "
            + ("every stage needs a layer" if len(sizes) > 1 else "expected at least one stage")
        )
    return sizes


def partition_of(text: str, layers: int, runtime: Runtime | None) -> tuple[int, ...]:
    """`15,15,15,16`, or a number of stages to cut as the runtime would. Raises UsageError for a text
    that is neither and for a number without a runtime, PlanError if the layers do not match."""
    sizes = parse_partition(text)
    if len(sizes) > 1:
        return check_partition(sizes, layers)
    if runtime is None:
        raise UsageError(
            f"each runtime cuts {text} stages differently: give --for sglang or --for vllm, or "
            "state the partition"
        )
    return default_partition(layers, sizes[0], runtime)


def owners_of(
    whole: Checkpoint, name: str, partition: Sequence[int], runtime: Runtime | None
) -> Sequence[int]:
    """Numbers of the stages that hold a tensor of a whole checkpoint, by a runtime's rules. Raises
    PlanError for a tensor whose place is unknown."""
    role_index = whole.role_index
    has_mtp = any(role_index.family.is_mtp(n, role_index.dims) for n in whole)
    stages = [Stage(number, tuple(partition)) for number in range(len(partition))]
    of = architecture_of(whole.config)
    return stages_of(name, role_index, stages, runtime, of, has_mtp=has_mtp)


def stages_of(
    name: str,
    role_index: RoleIndex,
    stages: Sequence[Stage],
    runtime: Runtime | None,
    architecture: str,
    *,
    has_mtp: bool,
) -> Sequence[int]:
    """Numbers of the stages that hold a tensor. Raises PlanError for one that the family does not
    describe."""
    last = len(stages) - 1
    place = role_index.places.get(name)
    if place is None:
        raise PlanError(
            f"{name!r}: not described by family {role_index.family.name}, so its stage is unknown; "
            "drop it by a rule, or describe it in layouts/"
        )
    if role_index.family.is_mtp(name, role_index.dims):
        return [last]
    if place.role.vision:
        return range(len(stages))  # runtimes build the tower without asking for their stage
    if place.role.name == "embed_tokens":
        if runtime != "sglang":  # vLLM builds them in every stage; unknown runtimes may
            return range(len(stages))
        return sorted({0, last}) if role_index.dims.tied or has_mtp else [0]
    if place.layer is not None:
        return [_owner_of_layer(name, place, stages)]
    if place.role.name in ("norm", "lm_head") or place.role.name.startswith("hc_head_"):
        everywhere = place.role.name == "norm" and role_index.family.name in NORM_EVERYWHERE
        return range(len(stages)) if everywhere and runtime != "sglang" else [last]
    # Beside the layers: where the class builds it, else in every stage.
    stage = stage_of(architecture, runtime or "", name)
    return {"first": [0], "last": [last]}.get(stage, range(len(stages)))


def _owner_of_layer(name: str, place: Place, stages: Sequence[Stage]) -> int:
    for stage in stages:
        if place.layer in stage.layers:
            return stage.number
    raise PlanError(f"{name!r} is in no stage's layers")


# Pipeline stages cut so that the fullest one holds least. A runtime is told how many layers each stage
# owns and nothing else (runtimes/pipeline.py, VARIABLE), so a cut is a list of counts; what lies
# beside the layers stays where the runtime builds it: embeddings, head, draft, tower.


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Bytes of a model's layers, and of what each stage holds beside them."""

    layers: tuple[int, ...]
    beside: tuple[int, ...]

    def held(self, partition: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each stage."""
        ends = list(accumulate(partition))
        starts = [0, *ends[:-1]]
        return tuple(
            more + sum(self.layers[start:end])
            for more, start, end in zip(self.beside, starts, ends, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PipelineCut:
    """A partition, and the bytes of each of its stages."""

    partition: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def fullest(self) -> int:
        return max(self.held)


def balanced(weights: StageWeights) -> PipelineCut:
    """The partition whose fullest stage holds least; among those, the one whose stages differ least (in
    the sum of their squares). Every stage owns a layer: there must be as many layers as stages."""
    starts = tuple(accumulate(weights.layers, initial=0))
    first = _best(weights, starts, max, None)
    cap = weights.held(first)
    partition = _best(weights, starts, lambda so_far, here: so_far + here * here, max(cap))
    return PipelineCut(partition, weights.held(partition))


def _best(
    weights: StageWeights,
    starts: Sequence[int],
    joined: Callable[[int, int], int],
    cap: int | None,
) -> tuple[int, ...]:
    """The cut of least cost, by dynamic programming over how many layers the first stages own. `joined`
    adds a stage's bytes to the cost of those before it, and grows with both; no stage may hold more than
    `cap`."""
    layers, stages = len(weights.layers), len(weights.beside)
    costs: dict[int, int] = {0: 0}
    cuts: list[dict[int, int]] = []
    for number, beside in enumerate(weights.beside):
        now: dict[int, int] = {}
        came: dict[int, int] = {}
        ends = (
            (layers,) if number == stages - 1 else range(number + 1, layers - stages + number + 2)
        )
        for end in ends:
            for start in range(end - 1, number - 1, -1):
                here = beside + starts[end] - starts[start]
                past = cap is not None and here > cap
                if past or (end in now and joined(0, here) >= now[end]):
                    break  # what an earlier start would hold is more
                if start not in costs:
                    continue
                cost = joined(costs[start], here)
                if end not in now or cost < now[end]:
                    now[end], came[end] = cost, start
        costs = now
        cuts.append(came)
    sizes = list[int]()
    end = layers
    for came in reversed(cuts):
        sizes.append(end - came[end])
        end = came[end]
    return tuple(reversed(sizes))
