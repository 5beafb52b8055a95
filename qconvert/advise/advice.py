"""Advice for a model, a runtime and a machine: of several conversions, in the order of what they
lose, the first that the runtime loads whole and the machine holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from qconvert.advise.options import (
    FOR_WEIGHTS,
    Choice,
    Machine,
    candidates,
    considered,
    cpu_candidates,
    few_experts,
)
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError, UsageError
from qconvert.core.shown import count, exact_size, format_size
from qconvert.formats.amx.format import RUNTIME_NAME
from qconvert.passes.amx import ExpertsToAmx
from qconvert.runtimes.consumers import Consumer
from qconvert.runtimes.ktransformers import RUNTIME, launch_line, reads_as_it_is
from qconvert.runtimes.loader.ask import RuntimeLoader
from qconvert.runtimes.serving import SIMULATED, launch

# --- KTransformers --------------------------------------------------------------------------------


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
        cpu = out_of(source, self.command) if self.command else source
        line = launch_line(self.method, self.numa, cpu, source)
        line = line.replace("<experts>", str(self.gpu_experts))
        if hotness is not None:
            line += (
                f" --kt-expert-placement-strategy frequency --init-expert-location {quote(hotness)}"
            )
        return line

    def lines(self, source: str) -> Iterator[str]:
        """For people."""
        made = with_names(self.command, source)
        yield f"qconvert {made}" if made else "nothing: kt-kernel reads it as it is"
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
    planned = few_experts(checkpoint) or checkpoint
    known = reads_as_it_is(checkpoint)
    if known is not None:
        found.append(made("", known, routed, None))
    for candidate in cpu_candidates(numa):
        choice = considered(planned, candidate, (), machine)
        (step,) = candidate.passes
        assert isinstance(step, ExpertsToAmx)
        found.append(made(candidate.command, RUNTIME_NAME[step.method], choice.nbytes, choice))
    return found


RUNTIMES = (*SIMULATED, "ktransformers")

# --- Commands with the names of a model --------------------------------------------------------------


def out_of(source: str, command: str) -> str:
    """The folder that a command is said to make of a source: its name, and the command's."""
    return f"{Path(source).name.partition('@')[0]}-{command.partition(' ')[0]}"


def with_names(command: str, source: str, tp: int = 0, data: str | None = None) -> str:
    """A candidate's command with the names of its source and result, for the ranks that it is to load on
    (0: not said), and, where it rounds and there is data, calibrated by that."""
    if not command:
        return ""
    name, *words = command.split()
    names = {"SRC": quote(source), "OUT": quote(out_of(source, command))}
    made = [name, *(names.get(word, word) for word in words)]
    if data is not None and "--rtn" in made:
        at = made.index("--rtn")
        made[at : at + 1] = ["--gptq", "--data", quote(data)]
    if tp > 1 and name in _TAKES_TP:
        made += ["--tp", str(tp)]
    return " ".join(made)


_TAKES_TP = ("w4a16", "nvfp4")


def fit_line(found: Advice) -> str:
    """The command that chooses formats for the machine that was asked about, on the ranks of the advice;
    by the data, where there is some."""
    memory, data = exact_size(found.machine.gpu_memory).replace(" ", ""), found.data
    words = [
        "qconvert fit", quote(found.source), quote(out_of(found.source, "fit")),
        f"--gpus {found.tp} --gpu-memory {memory} --for {found.runtime}",
        "--rtn" if data is None else f"--data {quote(data)}",
    ]  # fmt: skip
    return " ".join(words)


_LEAST_HOPPER = 60 * 10**9  # bytes of the smallest GPU of capability 9.0, and some room


@dataclass(frozen=True)
class Advice:
    """`best` is what to do, None if nothing considered loads and fits; `others` what was considered too.
    `tp` is the tensor-parallel size to serve `best` at. `seen`: the loader that answered, "" for the
    simulator. The rest is as it was asked."""

    source: str
    runtime: str
    machine: Machine
    best: Choice | Hybrid | None
    others: tuple[Choice | Hybrid, ...]
    tp: int = 0
    seen: str = ""
    disaggregated: bool = False
    hotness: str | None = None
    data: str | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """Commands that start the server, one per role."""
        best = self.best
        if best is None:
            return ()
        if isinstance(best, Hybrid):
            return (best.line(self.source, self.hotness),)
        command = best.candidate.command
        folder = quote(out_of(self.source, command) if command else self.source)
        line = launch(self.runtime, folder, self.tp, option=best.answers[self.tp].required_flag)
        # sglang, server_args.py: each role is a server of its own over the same folder.
        roles = tuple(f"{line} --disaggregation-mode {role}" for role in ("prefill", "decode"))
        return roles if self.disaggregated else (line,)

    @property
    def not_known(self) -> str:
        """Why nothing can be said, "" where something is."""
        if self.best is not None:
            return ""
        return next((o.unknown for o in self.others if isinstance(o, Choice) and o.unknown), "")

    @property
    def assumes(self) -> str:
        """Return what the answer rests on."""
        one = self.machine
        small = ""
        if one.capability == (9, 0) and 10**9 < one.gpu_memory < _LEAST_HOPPER:
            small = (
                " (none of that capability has so little, and of others the runtime itself must be "
                "asked: --loader PYTHON --capability 8.9 for an L4, L40S or RTX 4090)"
            )
        memory = "" if one.cpu_memory is None else f", {format_size(one.cpu_memory)} of main memory"
        return (
            f"assumed: {count(one.gpus, 'GPU')} of capability {one.capability[0]}.{one.capability[1]} "
            f"with {format_size(one.gpu_memory)} each{small}{memory}; weights take at most "
            f"{FOR_WEIGHTS:.0%} of a GPU; a disk of {format_size(one.disk)}/s; no other options"
        )


def advise(
    checkpoint: Checkpoint,
    consumer: Consumer,
    machine: Machine,
    *,
    disaggregated: bool = False,
    numa: int = 2,
    hotness: str | None = None,
    data: str | None = None,
    loader: RuntimeLoader | None = None,
) -> Advice:
    """Advice for sglang, vLLM or KTransformers, from headers alone; a `loader` answers for the runtime
    in place of its simulator. Raises UsageError for another runtime, for disaggregated roles of vLLM,
    and where KTransformers' main memory is not said;
    PlanError where experts cannot be found."""
    source = checkpoint.name
    if consumer.name == "ktransformers":
        return _hybrid(checkpoint, machine, source, numa, hotness)
    if consumer.name not in SIMULATED:
        raise UsageError(
            f"the loader of {consumer.name} is not simulated; advice is for {', '.join(RUNTIMES)}"
        )
    if disaggregated and consumer.name != "sglang":
        raise UsageError(f"disaggregated roles are known of sglang, not of {consumer.name}")
    others: list[Choice] = []
    best: Choice | None = None
    # A loader of the runtime itself is asked about the files, which have all experts.
    planned = (few_experts(checkpoint) if loader is None else None) or checkpoint
    for number, candidate in enumerate(candidates(checkpoint, machine, consumer.name)):
        # What fits in small groups needs no larger ones, which lose more.
        fitting = [one for one in (best, *others) if one is not None and one.fits_at(machine)]
        if any(candidate.is_coarser(one.candidate) for one in fitting):
            continue
        # Once something fits, others are asked at its size and larger ones: a load of a large model
        # takes seconds.
        least = 1 if best is None else max(best.fits_at(machine))
        sizes = tuple(tp for tp in machine.sizes if tp >= least)
        choice = considered(planned, candidate, sizes, machine, consumer, loader, fitting=True)
        if best is None and choice.fits_at(machine):
            best = choice
        else:
            others.append(choice)
        if number == 0 and choice.unknown:
            break
    tp = 0 if best is None else max(best.fits_at(machine))
    seen = "" if loader is None else str(loader)
    return Advice(
        source, consumer.name, machine, best, tuple(others), tp, seen, disaggregated, data=data
    )


def _hybrid(
    checkpoint: Checkpoint, machine: Machine, source: str, numa: int, hotness: str | None
) -> Advice:
    if machine.cpu_memory is None:
        raise UsageError(
            "KTransformers keeps experts in main memory: say how much there is (--cpu-memory)"
        )
    found = hybrids(checkpoint, machine, numa)
    best = next((one for one in found if one.fits(machine)), None)
    others = tuple(one for one in found if one is not best)
    return Advice(source, "ktransformers", machine, best, others, machine.gpus, hotness=hotness)


def as_json(found: Advice) -> dict[str, Any]:
    """For programs: sizes in bytes."""
    return {
        "source": found.source,
        "runtime": found.runtime,
        "seen_in": found.seen,
        "assumed": found.assumes,
        "not_known": found.not_known,
        "best": None if found.best is None else _one(found.best, found.machine),
        "tp": found.tp,
        "lines": list(found.lines),
        "others": [_one(other, found.machine) for other in found.others],
    }


def _one(choice: Choice | Hybrid, machine: Machine) -> Mapping[str, Any]:
    if isinstance(choice, Hybrid):
        return {
            "command": choice.command, "kt_method": choice.method, "cpu_bytes": choice.cpu_bytes,
            "gpu_experts": choice.gpu_experts, "gpu_bytes": choice.gpu_bytes,
            "fits": choice.fits(machine), "refused": choice.refused, "loses": dict(choice.loses),
        }  # fmt: skip
    return {
        "command": choice.candidate.command, "refused": choice.refused, "unknown": choice.unknown,
        "loads_at": list(choice.loads_at), "fits_at": list(choice.fits_at(machine)),
        "rank_bytes": {str(tp): answer.nbytes for tp, answer in choice.answers.items()},
        "options": sorted({a.required_flag for a in choice.answers.values() if a.required_flag}),
        "why_not": {str(tp): why for tp, why in why_not(choice).items()},
        "nbytes": choice.nbytes, "read": choice.read, "written": choice.written,
        "loses": dict(choice.loses),
    }  # fmt: skip


def why_not(choice: Choice) -> dict[int, str]:
    """Why a size does not load."""
    found = {}
    for tp, answer in choice.answers.items():
        if answer.verdict == "loads":
            continue
        rank = answer.refused
        if rank is not None and rank.refused is not None:
            found[tp] = f"{rank.refused.where}: {rank.refused.why}"
        else:
            unread = [name for one in answer.ranks for name in (*one.missing, *one.empty)]
            misread = {name: why for one in answer.ranks for name, why in one.misread.items()}
            cure = f"; {answer.cure}" if answer.cure else ""
            if misread and not unread:
                name, why = next(iter(misread.items()))
                found[tp] = f"{name} is read wrong, without an error: {why}{cure}"
            else:
                first = next(iter([*unread, *answer.ignored]), "a tensor")
                found[tp] = f"{first} would not be read{cure}"
    return found


def lines_of(found: Advice) -> Iterator[str]:
    """For people."""
    best = found.best
    yield f"{found.source} for {found.runtime}{f' ({found.seen})' if found.seen else ''}"
    if isinstance(best, Hybrid):
        yield from best.lines(found.source)
    elif best is not None:
        yield from _said(best, found, found.tp)
    else:
        yield (
            f"{found.not_known}; --loader PYTHON asks the runtime itself, or start the server to try"
            if found.not_known
            else "nothing that was considered loads and fits"
        )
        yield from _missing_from_config(found)
    for line in found.lines:
        yield f"    {line}"
    if isinstance(best, Choice) and found.data is None and "--rtn" in best.candidate.command:
        yield "  with samples, of better quality: advise with --data FILE prints the command"
    if isinstance(best, Choice) and best.candidate.command.startswith("w4a16"):
        yield f"  a format for each part of each layer: {fit_line(found)}"
    if isinstance(best, Hybrid):
        yield RUNTIME
    if found.others:
        yield ""
        yield "also considered:"
    for other in found.others:
        yield from (f"  {line}" for line in (
            other.lines(found.source) if isinstance(other, Hybrid) else _said(other, found)
        ))  # fmt: skip
    yield ""
    yield found.assumes


def _missing_from_config(found: Advice) -> Iterator[str]:
    """Keys that the config lacks for the model as it is, whatever is done to its weights."""
    for one in found.others:
        if isinstance(one, Choice) and not one.candidate.command:
            whys = why_not(one)
            why = whys[min(whys)] if whys else ""
            if why.startswith("config.json: states no "):
                yield f"  {why}; then ask again"


def _said(choice: Choice, found: Advice, used: int = 0) -> Iterator[str]:
    """Lines about a candidate, which is the advice where it uses so many GPUs."""
    machine = found.machine
    command = with_names(choice.candidate.command, found.source, used, found.data)
    yield f"qconvert {command}" if command else "nothing: serve it as it is"
    if choice.refused:
        yield f"  refused: {choice.refused}"
        return
    if choice.unknown:
        yield f"  {choice.unknown}"
        return
    if choice.written:
        moved = choice.read + choice.written
        yield (
            f"  reads {format_size(choice.read)}, writes {format_size(choice.written)}: "
            f"{_time(moved / machine.disk)} at the disk's speed"
        )
    for tp in sorted(choice.answers):
        answer = choice.answers[tp]
        if tp not in choice.loads_at:
            yield f"  tp {tp}: does not load: {why_not(choice)[tp]}"
            continue
        room = "" if tp in choice.fits_at(machine) else ", too much for this GPU"
        option = f" with {answer.required_flag}" if answer.required_flag else ""
        yield f"  tp {tp}: loads{option}, {format_size(answer.nbytes)} on the fullest rank{room}"
    if 0 < used < machine.sizes[0]:
        yield f"  {used} of {machine.sizes[0]} GPUs are used: it does not load on more"
    for what, number in choice.loses.items():
        yield f"  loses: {what} ({count(number, 'tensor')})"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
