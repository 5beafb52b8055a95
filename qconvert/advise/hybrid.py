"""KTransformers: routed experts on the CPU, all else and some experts of each layer on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from shlex import quote

from qconvert.advise.machine import Machine
from qconvert.advise.options import Choice, considered, cpu_candidates
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.shown import count
from qconvert.core.sizes import format_size
from qconvert.formats.amx.limits import RUNTIME_NAME
from qconvert.passes.amx import ExpertsToAmx
from qconvert.runtimes.ktransformers import launch_line, reads_as_it_is

# Of main memory for experts: the operating system, the page cache that they are read through, and the
# server itself need the rest.
_FOR_EXPERTS = 0.9


@dataclass(frozen=True)
class Hybrid:
    """One way to keep experts on the CPU. `method` is `--kt-method`, `command` makes the CPU folder (""
    for the model as it is). `cpu_bytes` lie in main memory, `gpu_bytes` on all GPUs together, of which
    `gpu_experts` experts of each of `layers` layers; -1: not even the other layers fit."""

    command: str
    method: str
    numa: int
    cpu_bytes: int
    gpu_bytes: int
    gpu_experts: int
    layers: int
    experts: int
    refused: str = ""
    loses: Mapping[str, int] = field(default_factory=dict)

    def fits(self, machine: Machine) -> bool:
        assert machine.cpu_memory is not None
        held = self.cpu_bytes <= machine.cpu_memory * _FOR_EXPERTS
        return not self.refused and held and self.gpu_experts >= 0

    def line(self, source: str, hotness: str | None) -> str:
        """The command that starts the server."""
        cpu = "OUT" if self.command else source
        line = launch_line(self.method, self.numa, cpu, source)
        line = line.replace("<experts>", str(self.gpu_experts))
        if hotness is not None:
            line += (
                f" --kt-expert-placement-strategy frequency --init-expert-location {quote(hotness)}"
            )
        return line

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"qconvert {self.command}" if self.command else "nothing: kt-kernel reads it as it is"
        if self.refused:
            yield f"  refused: {self.refused}"
            return
        yield f"  main memory: {format_size(self.cpu_bytes)} of experts ({self.method})"
        if self.gpu_experts < 0:
            yield f"  GPUs: the other layers alone take {format_size(self.gpu_bytes)}, too much"
        else:
            yield (
                f"  GPUs: {format_size(self.gpu_bytes)} with {self.gpu_experts} of {self.experts} "
                f"experts in each of {self.layers} layers"
            )
        for what, number in self.loses.items():
            yield f"  loses: {what} ({count(number, 'tensor')})"


def hybrids(checkpoint: Checkpoint, machine: Machine, numa: int) -> list[Hybrid]:
    """The model as it is, if kt-kernel reads it, then each AMX method, in the order of what is lost.
    Raises PlanError for a model without experts."""
    dims, index = checkpoint.role_index.dims, checkpoint.role_index
    if not dims.num_experts:
        raise PlanError(
            f"{checkpoint.name}: has no routed experts, and KTransformers keeps nothing else on the CPU"
        )
    routed = sum(s.type.nbytes for name, s in checkpoint.items() if index.kind(name).routed)
    layers = dims.groups.get("moe", ())
    drafts = sum(
        s.type.nbytes
        for name, s in checkpoint.items()
        if index.kind(name).routed and index.family.is_mtp(name, dims)
    )
    rest, each = checkpoint.nbytes - routed, (routed - drafts) // dims.num_experts
    room = machine.gpus * machine.for_weights - rest
    on_gpu = min(dims.num_experts, room // max(1, each)) if room >= 0 else -1
    gpu_bytes = rest + max(0, on_gpu) * each

    def made(command: str, method: str, nbytes: int, choice: Choice | None) -> Hybrid:
        return Hybrid(
            command, method, numa, nbytes, gpu_bytes, on_gpu, len(layers), dims.num_experts,
            "" if choice is None else choice.refused, {} if choice is None else choice.loses,
        )  # fmt: skip

    found = []
    known = reads_as_it_is(checkpoint)
    if known is not None:
        found.append(made("", known, routed, None))
    for candidate in cpu_candidates(numa):
        choice = considered(checkpoint, candidate, (), machine)
        (step,) = candidate.passes
        assert isinstance(step, ExpertsToAmx)
        found.append(made(candidate.command, RUNTIME_NAME[step.method], choice.nbytes, choice))
    return found
