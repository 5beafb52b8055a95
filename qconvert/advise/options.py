"""Conversions that a model may need, and what each would give, from headers alone.

A model with few of its experts, which stands for all of it in advice.

Experts that are alike are planned, and loaded by a simulator, alike: whether a conversion can be made
and loads is the same with 8 of 256, and sizes grow by the same bytes with each. So a candidate is
considered at two counts of experts, from which its sizes follow, in a small part of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType, TypesOf
from qconvert.core.errors import PlanError, QConvertError, UsageError
from qconvert.core.names import is_number
from qconvert.core.parameter_names import Dialect
from qconvert.core.roles import ALL_EXPERTS, EXPERT_COUNTS, Kind
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.registry import encoded
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.dequant import Dequant
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.fuse import Fuse
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.pass_options import EXPERTS
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.run.folder.prepare import Prepared, disk_bytes, prepare
from qconvert.run.work.options import RunOptions
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loader.ask import RuntimeLoader
from qconvert.runtimes.loading.load_weights import Tensors
from qconvert.runtimes.loading.setting import BLACKWELL, Setting
from qconvert.runtimes.serving import Answer, NotKnown, Offered, asked
from qconvert.validation import judgement
from qconvert.validators.reading.matrices import gdn_groups_here

_COUNTS = (4, 8)
_WORTH = 64  # experts from which two small models cost less than the one
_BY_EXPERT = (Kind.ROUTER, Kind.BUFFER)  # may have a row or a number for each expert


@dataclass(frozen=True)
class FewExperts:
    """Two models that are the whole one, with `number` experts, but for the experts that they lack."""

    whole: Checkpoint
    fewer: Checkpoint
    more: Checkpoint
    number: int

    def all(self, fewer: int, more: int) -> int:
        """A size of the model with all experts, from those of the two."""
        low, high = _COUNTS
        return fewer + (more - fewer) * (self.number - low) // (high - low)


def few_experts(checkpoint: Checkpoint) -> FewExperts | None:
    """The two models; None where there is no gain, or experts are not all alike."""
    number = _alike(checkpoint)
    if number < _WORTH:
        return None
    fewer, more = (_with(checkpoint, number, most) for most in _COUNTS)
    if (fewer.role_index.dims.num_experts, more.role_index.dims.num_experts) != _COUNTS:
        return None
    return FewExperts(checkpoint, fewer, more, number)


def _split(name: str) -> tuple[str, int, str] | None:
    """The name of an expert's tensor before, at and after the expert's number."""
    before, found, after = name.partition(".experts.")
    digits = after.partition(".")[0] if found else ""
    return (before, int(digits), after[len(digits) :]) if is_number(digits) else None


def _alike(checkpoint: Checkpoint) -> int:
    """Number of experts of each layer, if all have tensors of the same types; else 0."""
    types: dict[tuple[str, str], TensorType] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, source in checkpoint.items():
        if (parts := _split(name)) is not None:
            key = (parts[0], parts[2])
            counts[key] += 1
            if types.setdefault(key, source.type) != source.type:
                return 0
    found = set(counts.values())
    return found.pop() if len(found) == 1 else 0


def _with(checkpoint: Checkpoint, number: int, most: int) -> Checkpoint:
    """The checkpoint with the first `most` of `number` experts of each layer."""
    kept = {
        name: source
        for name, source in checkpoint.items()
        if (parts := _split(name)) is None or parts[1] < most
    }
    found = replace(checkpoint, sources=kept, config=_counting(checkpoint.config, number, most))
    owners = {parts[0] for name in kept if (parts := _split(name)) is not None}
    kinds = found.role_index
    for name, source in kept.items():
        shape = source.type.shape
        if number in shape[:1] and kinds.kind(name) in _BY_EXPERT and _within(name, owners):
            kind = replace(source.type, shape=(most, *shape[1:]))
            kept[name] = replace(source, type=kind)
    return replace(found, sources=kept)


def _within(name: str, owners: set[str]) -> bool:
    """Return whether a tensor is of a module that has experts."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in owners:
            return True
    return False


def _counting(value: Any, number: int, most: int) -> Any:
    """A config with another count of experts."""
    if not isinstance(value, Mapping):
        return value
    counts = [key for key in EXPERT_COUNTS if value.get(key) == number]
    made = {key: _counting(one, number, most) for key, one in value.items()}
    return {**made, **dict.fromkeys(counts, most), ALL_EXPERTS: number} if counts else made


# --- The machine that a model is to be served on --------------------------------------------------


# Of a GPU's memory for weights: sglang takes 0.8 to 0.9 for weights and KV cache together
# (`--mem-fraction-static`), and a cache that holds nothing serves nobody.
FOR_WEIGHTS = 0.75
_H200 = 141_000_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, the bytes of memory of each, the bytes of main memory (None: not said), bytes a second of
    the disk. By default eight H200 and 1 GB/s."""

    gpus: int = 8
    gpu_memory: int = _H200
    cpu_memory: int | None = None
    disk: int = 1_000_000_000
    capability: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UsageError(f"expected at least one GPU, found {self.gpus}")

    @property
    def for_weights(self) -> int:
        """Bytes of weights that one GPU is to hold."""
        return int(self.gpu_memory * FOR_WEIGHTS)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes to try, largest first: powers of two."""
        return tuple(1 << power for power in reversed(range(self.gpus.bit_length())))


SGLANG = Consumer("sglang")


@dataclass(frozen=True)
class Candidate:
    """A conversion to consider: the command after `qconvert`, with SRC and OUT, and its passes; no
    command for the model as it is."""

    command: str
    passes: tuple[Pass, ...] = ()

    def is_coarser(self, other: Candidate) -> bool:
        """Return whether it is another's conversion in larger groups."""
        mine, theirs = self.passes, other.passes
        pairs = zip(mine, theirs, strict=False)
        return bool(mine) and len(mine) == len(theirs) and all(type(a) is type(b) for a, b in pairs)


@dataclass(frozen=True)
class Choice:
    """Result of a candidate. `refused`: why it cannot be made. `answers`: what the runtime's loader
    would do, by tensor-parallel size; `unknown`: why it was not asked. `read` and `written` are bytes of
    the conversion, `loses` what it rounds, by number of times."""

    candidate: Candidate
    refused: str = ""
    answers: Mapping[int, Answer] = field(default_factory=dict)
    unknown: str = ""
    nbytes: int = 0
    read: int = 0
    written: int = 0
    loses: Mapping[str, int] = field(default_factory=dict)

    @property
    def loads_at(self) -> tuple[int, ...]:
        """Tensor-parallel sizes at which it loads whole, with an option of the runtime or without."""
        return tuple(sorted(tp for tp, one in self.answers.items() if one.verdict == "loads"))

    def fits_at(self, machine: Machine) -> tuple[int, ...]:
        """Those at which the fullest rank's weights leave room for a KV cache."""
        return tuple(tp for tp in self.loads_at if self.answers[tp].nbytes <= machine.for_weights)


def candidates(
    checkpoint: Checkpoint, machine: Machine, runtime: str = "sglang"
) -> tuple[Candidate, ...]:
    """In the order of what they lose: nothing, rounding to bf16, to FP8 by row, to 4 bits in small and
    larger groups."""
    found = [Candidate("")]
    if runtime == "sglang" and checkpoint.role_index.dims.gdn is not None:
        found.append(Candidate("fuse SRC OUT --for sglang", (Fuse("sglang"),)))
    if _is_encoded(checkpoint):
        found.append(Candidate("dequant SRC OUT", (Dequant(),)))
    if any(source.type.dtype == "F8_E4M3" for source in checkpoint.values()):
        # Blocks may be what ranks cut, and BF16 too much.
        rows = ToFp8("compressed-tensors", None)
        found.append(Candidate("fp8 SRC OUT --channel", (rows,)))
    if machine.capability >= BLACKWELL:
        # Beside block FP8 vLLM reads compressed-tensors' names alone.
        dialect: Dialect = "compressed-tensors" if runtime == "vllm" else "modelopt"
        found.append(Candidate(f"nvfp4 SRC OUT --dialect {dialect}", (ToNvfp4(dialect),)))
    sparse = checkpoint.role_index.dims.num_experts > 0
    targets = (EXPERTS,) if sparse else ("Linear",)
    words = "" if sparse else " --targets Linear"
    for group in (32, 128):
        step = ExpertsToW4A16(group_size=group, targets=targets)
        found.append(Candidate(f"w4a16 SRC OUT --rtn --group-size {group}{words}", (step,)))
    return tuple(found)


def _is_encoded(checkpoint: Checkpoint) -> bool:
    """Tell whether there is something to dequantize; what cannot be read is, for the candidate to say
    why."""
    if any(source.type.dtype in WEIGHT_DTYPES for source in checkpoint.values()):
        return True
    try:
        return next(encoded(Plan.identity(checkpoint)), None) is not None
    except PlanError:
        return True


def cpu_candidates(numa: int) -> tuple[Candidate, ...]:
    """For KTransformers' kernels, in the order of what they lose."""
    return tuple(
        Candidate(f"amx SRC OUT --method {method} --numa {numa}", (ExpertsToAmx(method, numa),))
        for method in ("int8", "int4")
    )


def considered(
    checkpoint: Checkpoint | FewExperts,
    candidate: Candidate,
    sizes: Sequence[int],
    machine: Machine,
    consumer: Consumer = SGLANG,
    loader: RuntimeLoader | None = None,
    *,
    fitting: bool = False,
) -> Choice:
    """Plan a candidate, and ask the simulator of the runtime's loader, or that loader itself, at each
    size (no size: it is not asked); with `fitting`, up to the first that loads and is too much for a
    GPU, of sizes with the largest first. Nothing but headers is read. Of a model with few of its experts
    the bytes are those with all."""
    few = checkpoint if isinstance(checkpoint, FewExperts) else None
    whole = checkpoint.whole if isinstance(checkpoint, FewExperts) else checkpoint
    models = (whole,) if few is None else (few.fewer, few.more)
    try:
        made = [_planned(one, candidate, loader) for one in models]
    except QConvertError as error:
        if not isinstance(checkpoint, Checkpoint):  # a message may count tensors
            return considered(
                checkpoint.whole, candidate, sizes, machine, consumer, fitting=fitting
            )
        return Choice(candidate, refused=str(error))

    def every(*found: int) -> int:
        return found[0] if few is None else few.all(*found)

    answers: dict[int, Answer] = {}
    unknown = ""
    for tp in sizes:
        setting = Setting(tp=tp, capability=machine.capability)
        asked_of = [asked(consumer, one.offered, setting, loader=loader) for one in made]
        answer = asked_of[-1]
        if isinstance(answer, NotKnown):
            unknown = str(answer)
            break
        ranks = zip(*(one.ranks for one in asked_of if isinstance(one, Answer)), strict=True)
        sized = [replace(same[-1], nbytes=every(*(one.nbytes for one in same))) for same in ranks]
        answers[tp] = answer = replace(answer, ranks=tuple(sized))
        if fitting and answer.verdict == "loads" and answer.nbytes > machine.for_weights:
            break  # of fewer ranks each holds more
    written = every(*(one.written for one in made))
    return Choice(
        candidate, "", answers, unknown, every(*(one.plan.bytes_out for one in made)),
        whole.nbytes if written else 0, written,
        {what: every(*(one.losses.get(what, 0) for one in made)) for what in made[-1].losses},
    )  # fmt: skip


@dataclass(frozen=True)
class _Planned:
    """A candidate's plan, the folder that it would make, and the bytes of its files, 0 where none is
    made."""

    plan: Plan
    offered: Offered
    written: int
    losses: Mapping[str, int]


def considered_plan(plan: Plan) -> Prepared:
    """A plan with its files, none of which is to be made."""
    return prepare(plan, RunOptions())


def _planned(
    checkpoint: Checkpoint, candidate: Candidate, loader: RuntimeLoader | None
) -> _Planned:
    """Raises QConvertError for a plan that is refused."""
    plan = run_passes(Plan.identity(checkpoint), candidate.passes)
    ready = considered_plan(plan) if candidate.passes else None
    if ready is not None:
        judgement.judged([ready], checkpoint, serving=False)
    folder = checkpoint if ready is None else judgement.planned_checkpoint(ready)
    tensors = Tensors.of(TypesOf(folder.sources))
    files = {} if loader is None else judgement.read_by_runtimes(plan)
    offered = Offered(folder.config, tensors, gdn_groups_here(folder), files=files)
    return _Planned(plan, offered, 0 if ready is None else disk_bytes(ready), plan.losses())
