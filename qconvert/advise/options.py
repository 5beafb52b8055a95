"""Conversions that a model may need, and what each would give, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TypesOf
from qconvert.core.errors import QConvertError, UsageError
from qconvert.core.parameter_names import Dialect
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.dequant import Dequant
from qconvert.passes.fuse import Fuse
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.pass_options import EXPERTS
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.run.folder.prepare import disk_bytes, prepare
from qconvert.run.work.options import RunOptions
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.loader.ask import RuntimeLoader
from qconvert.runtimes.loading.load_weights import Tensors
from qconvert.runtimes.loading.setting import BLACKWELL, Setting
from qconvert.runtimes.serving import Answer, NotKnown, Offered, asked
from qconvert.validation import judgement
from qconvert.validators.reading.matrices import gdn_groups_here

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
    """In the order of what they lose: nothing, rounding to bf16, 4 bits in small and larger groups."""
    found = [Candidate("")]
    if runtime == "sglang" and checkpoint.role_index.dims.gdn is not None:
        found.append(Candidate("fuse SRC OUT --for sglang", (Fuse("sglang"),)))
    if any(source.type.dtype in WEIGHT_DTYPES for source in checkpoint.values()):
        found.append(Candidate("dequant SRC OUT", (Dequant(),)))
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


def cpu_candidates(numa: int) -> tuple[Candidate, ...]:
    """For KTransformers' kernels, in the order of what they lose."""
    return tuple(
        Candidate(f"amx SRC OUT --method {method} --numa {numa}", (ExpertsToAmx(method, numa),))
        for method in ("int8", "int4")
    )


def considered(
    checkpoint: Checkpoint,
    candidate: Candidate,
    sizes: Sequence[int],
    machine: Machine,
    consumer: Consumer = SGLANG,
    loader: RuntimeLoader | None = None,
) -> Choice:
    """Plan a candidate, and ask the simulator of the runtime's loader, or that loader itself, at each
    size (no size: it is not asked). Nothing but headers is read."""
    try:
        plan = run_passes(Plan.identity(checkpoint), candidate.passes)
        ready = prepare(plan, RunOptions()) if candidate.passes else None
        if ready is not None:
            judgement.judged([ready], checkpoint, serving=False)
    except QConvertError as error:
        return Choice(candidate, refused=str(error))
    folder = checkpoint if ready is None else judgement.planned_checkpoint(ready)
    tensors = Tensors.of(TypesOf(folder.sources))
    files = {} if loader is None else judgement.read_by_runtimes(plan)
    offered = Offered(folder.config, tensors, gdn_groups_here(folder), files=files)
    answers: dict[int, Answer] = {}
    unknown = ""
    for tp in sizes:
        setting = Setting(tp=tp, capability=machine.capability)
        answer = asked(consumer, offered, setting, loader=loader)
        if isinstance(answer, NotKnown):
            unknown = str(answer)
            break
        answers[tp] = answer
        if answer.cure:
            break  # whatever the size
    written = 0 if ready is None else disk_bytes(ready)
    return Choice(
        candidate, "", answers, unknown, plan.bytes_out, checkpoint.nbytes if written else 0, written,
        plan.losses(),
    )  # fmt: skip
