"""Calibrated GPTQ, a decoder layer in memory at a time.

For each layer: attention and router run over all samples; its linears are solved, if they are asked
for; the experts are read some at a time, see their tokens, are solved and yielded; what the layer then
answers goes on to the next one, as it will when the result is served. Between layers the hidden states
lie in a file of the work folder, from which an interrupted calibration goes on.

Inputs and the order of sums are those of llm-compressor's `oneshot` with GPTQModifier: on a CPU,
sample by sample and with eager attention, the solver "llmcompressor" finds its very codes. What it
cannot do is keep to a memory budget.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.calibrate import llmcompressor_backend
from qconvert.calibrate.activation_store import PAGE_LOCKED
from qconvert.calibrate.background_writer import BackgroundWriter
from qconvert.calibrate.devices import use_device
from qconvert.calibrate.distributed import (
    SINGLE_PROCESS,
    Communicator,
    ExpertReadOrder,
    broadcast_from_rank0,
    divided,
    shares,
)
from qconvert.calibrate.layers import Layers, Matrices, Targets
from qconvert.calibrate.linears import linears_of
from qconvert.calibrate.memory import Budget, keep_nothing_freed, together_on
from qconvert.calibrate.model import Model
from qconvert.calibrate.progress import Clock
from qconvert.calibrate.propagated_error import HiddenStates
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.settings import (
    ExpertSchemes,
    LayerDone,
    LayerStats,
    Matrix,
    Schemes,
    Settings,
)
from qconvert.calibrate.work_dir import CalibrationDir
from qconvert.core.errors import PlanError
from qconvert.core.int_scheme import IntScheme
from qconvert.core.shown import count
from qconvert.models.experts import Projection, routed_experts
from qconvert.plan.plan import Plan
from qconvert.run.work.backend import PausedAt, Phase, Remark
from qconvert.run.work.files import Files
from qconvert.run.work.options import Pace, Until

if TYPE_CHECKING:
    import numpy as np

    Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


_HELD = 0.7  # of what an accelerator or the host has for rows of tokens, at the most
# Bytes of matrices that are read ahead, at the most.
_AHEAD = 2 << 30

Event = Matrix | LayerDone | Phase | Remark | PausedAt


def calibrate(
    plan: Plan,
    tokens: Sequence[Tokens],
    schemes: Schemes | Mapping[int, Schemes],
    settings: Settings,
    *,
    work_dir: Path,
    memory: int | None,
    device: str = "cpu",
    key: str,
    last: int | None = None,
    files: Files | None = None,
    clock: Clock | None = None,
    linears: Mapping[str, Sequence[IntScheme]] | None = None,
    caches: Mapping[int, str] | None = None,
    statistics: bool = True,
    until: Until | None = None,
    works: Sequence[Mapping[str, float]] = (),
    comm: Communicator = SINGLE_PROCESS,
) -> Generator[Event]:
    """Solve for every routed expert of the plan's source but those of draft (MTP) layers, and yield
    their codes, one `Codes` a scheme; the first scheme's weights go on to the next layer. `schemes` are
    those of all layers, or of each by its number. Where there is none experts run as they are, and only
    statistics of them are yielded, or not even these without `statistics`. `linears` are schemes for
    modules of the source beside routed experts, such as `model.layers.0.self_attn.q_proj`: each is
    solved for what the layer gives it before any of its matrices is quantized. `caches` are modules of
    attention by layer, whose largest key and value are yielded as the scales of a matrix [2, 1].

    `tokens` are samples of token ids, each int64 [length]. `work_dir` keeps what an interrupted
    calibration needs, `memory` is what this process may take (None: three quarters of the machine).
    `device` is torch's name of one. `key` names data, settings and plan. `last` is the last layer to
    run, None for all. `clock` adds up what the time was spent on. Where `until` has no room for another
    layer as long as the longest so far, the last event is Paused; one is always done. `works` are what
    each layer takes, by kind: what the clock is told of one comes to that. Each process of
    `comm` yields what it has solved; all else is told by each.

    Raises PlanError for a model that cannot be run here, RunError for a `work_dir` of another key, too
    little memory or broken data.
    """
    if not tokens or any(sample.ndim != 1 or not sample.size for sample in tokens):
        raise PlanError("calibration takes one or more samples of one or more token ids each")
    keep_nothing_freed()
    PAGE_LOCKED.clear()  # of a calibration before, in this process
    source = Plan.identity(plan.checkpoint)
    sparse = bool(source.role_index.dims.num_experts)
    found = routed_experts(source).projections if sparse else ()
    matrices = _by_layer(found)
    targets = _targets(schemes, matrices)
    clock = clock or Clock()
    reader = Weights(source, clock)
    model = Model(source, settings.attention)
    use_device(device)
    if llmcompressor_backend.are_asked(settings.solver, device):
        llmcompressor_backend.load()  # before what this process takes is counted
    lengths = [sample.size for sample in tokens]
    layers = Layers(
        model=model,
        matrices=matrices,
        lengths=lengths,
        targets=targets,
        settings=settings,
        folder=work_dir,
        budget=Budget.of(memory, device),
        device=device,
        files=files or Files(),
        reader=reader,
        clock=clock,
        experts=source.role_index.dims.num_experts,
        linears=linears_of(source, model, linears or {}),
        caches=caches or {},
        statistics=statistics,
        comm=comm,
    )
    _check_shapes(matrices, targets)
    layers = _solving_together(layers)
    # What is left is known to the process that writes.
    stop = broadcast_from_rank0(comm, model.layers if last is None else last + 1)
    layers, behind, held = _holding(layers)
    layers = _reading_ahead(layers, stop)
    kept = CalibrationDir(
        work_dir,
        key,
        sum(lengths),
        layers.hidden,
        layers.files,
        layers.corrects,
        held,
        behind,
        comm,
        layers.cuts,
    )
    try:
        if layers.read_order is not None:
            first = kept.layer() or 0
            down = next((found[0, "down_proj"] for found in layers.matrices.values()), None)
            batch = 1 if down is None else layers.batch(down.weight)
            fair = divided(range(layers.experts), [layers.experts] * comm.count, batch)
            layers.read_order.set_experts(first, [e for group in fair for e in layers.mine(group)])
        yield from _run(layers, kept, tokens, stop, Pace(until), works)
    finally:
        if behind is not None:
            behind.close()
        reader.close()


def _solving_together(layers: Layers) -> Layers:
    """As many experts at a time as every accelerator of the team has space for."""
    down = next((found[0, "down_proj"] for found in layers.matrices.values()), None)
    if layers.device == "cpu" or down is None or not layers.targets:
        return layers
    together = together_on(
        layers.budget.device, layers.settings.together,
        hidden=down.weight.rows, middle=down.weight.columns, schemes=layers.most_targets,
        solver=layers.settings.solver, corrects=layers.corrects,
    )  # fmt: skip
    least = min(layers.comm.gathered(together))
    return replace(layers, settings=replace(layers.settings, together=least))


def _holding(layers: Layers) -> tuple[Layers, BackgroundWriter | None, str]:
    """Hidden states are held on an accelerator that has space for them, or in the host's memory, which
    is then not given to others. Where they are held."""
    streams, size = 2 if layers.corrects else 1, layers.total * layers.hidden * 2
    for device, share in layers.budget.states.items() if layers.device != "cpu" else ():
        if all(layers.comm.gathered(streams * size <= _HELD * share)):
            left = {**layers.budget.states, device: share - streams * size}
            return (
                replace(layers, budget=replace(layers.budget, states=left)),
                BackgroundWriter(),
                device,
            )
    return layers, None, layers.device


def _reading_ahead(layers: Layers, stop: int) -> Layers:
    """Matrices are read ahead for accelerators."""
    if layers.device == "cpu":
        return layers
    share = layers.budget.states.get("cpu", 0)
    room = min(_AHEAD, share // 4)
    left = {**layers.budget.states, "cpu": share - room}
    budget = replace(layers.budget, states=left)
    read_order = ExpertReadOrder(layers.matrices, layers.reader, room, stop)
    return replace(layers, budget=budget, read_order=read_order)


def disk_bytes(tokens: int, hidden: int, *, linears: bool = False, corrects: bool = False) -> int:
    """Bytes of `work_dir` at the most: hidden states of this layer and the next, what experts get and
    answer, all BF16; routes of up to 16 experts a token. Where `linears` are solved beside experts, what
    these get is kept twice; all of it is, of the unquantized model too, where propagated errors are
    corrected."""
    asked = 2 * hidden + 16 * 8
    a_token = 3 * 2 * hidden + asked * (2 if linears else 1)
    return (2 if corrects else 1) * tokens * a_token + (1 << 16)


def _by_layer(projections: Sequence[Projection]) -> Matrices:
    found: dict[int, dict[tuple[int, str], Projection]] = {}
    for one in projections:
        if not one.draft:
            found.setdefault(one.layer, {})[one.expert, one.kind] = one
    return found


def _targets(schemes: Schemes | Mapping[int, Schemes], matrices: Matrices) -> Targets:
    """Schemes to solve for, by layer: of those with experts that have any."""
    given = schemes if isinstance(schemes, Mapping) else dict.fromkeys(matrices, schemes)
    found = {
        layer: tuple(
            s if isinstance(s, ExpertSchemes) else ExpertSchemes(s, s) for s in given[layer]
        )
        for layer in matrices
        if layer in given
    }
    return {layer: some for layer, some in found.items() if some}


def _check_shapes(matrices: Matrices, targets: Targets) -> None:
    for number, some in targets.items():
        for (_, kind), one in matrices[number].items():
            for target in some:
                try:
                    target.scheme(kind).groups(one.weight.columns)
                except PlanError as error:
                    raise PlanError(f"{one.module}: {error}") from error


def _run(
    layers: Layers,
    kept: CalibrationDir,
    tokens: Sequence[Tokens],
    stop: int,
    pace: Pace,
    works: Sequence[Mapping[str, float]],
) -> Iterator[Event]:
    first = kept.layer()
    if first is None:
        states = _embedded(layers, kept, tokens)
        first = 0
    else:
        states = kept.states(first, new=False)
    try:
        for number in range(first, stop):
            # Nothing goes on from the last.
            keeps = kept.due() and (number + 1 < stop or kept.behind is None)
            following = kept.states(number + 1, new=True, before=states, keeps=keeps)
            before = dict(layers.clock.work)
            try:
                stats = yield from layers.run(number, states, following)
            finally:
                kept.let_go(states)
                states = following
            if stats is not None and number in layers.targets:
                yield from map(Remark, _remarks(number, stats, layers.settings))
            if stats is not None or number in layers.linears or number in layers.caches:
                yield LayerDone(number, stats)
            if keeps:
                kept.remember(number + 1, states)
            if works:
                layers.clock.layer_done(works[number], before)
            if number + 1 < stop and not broadcast_from_rank0(layers.comm, pace.another()):
                kept.keep(number + 1, states)
                kept.flush()
                yield PausedAt(number + 1, stop)
                return
        kept.flush()
    finally:
        kept.let_go(states)


def _embedded(layers: Layers, kept: CalibrationDir, tokens: Sequence[Tokens]) -> HiddenStates:
    """Return what goes into the first layer."""
    import numpy as np

    states = kept.states(0, new=True)
    device, own = layers.device, layers.mine(shares(layers.batches, layers.comm.count))
    with layers.clock("read", device):
        embed = None
        if device != "cpu":  # a CPU keeps to one sample's rows of the table
            embed = layers.model.embedder(tokens, layers.reader, device)
        for batch in (batch for part in own for batch in part):
            some = tokens[batch.first : batch.first + batch.count]
            make = embed or layers.model.embedder(some, layers.reader, device)
            states.write(batch.start, make(np.stack(some)))
    kept.remember(0, states)
    return states


def _remarks(layer: int, stats: LayerStats, settings: Settings) -> Iterator[str]:
    """Return what the user must know of a layer."""
    if stats.few:
        shown = ", ".join(map(str, stats.few[:16])) + (", ..." if len(stats.few) > 16 else "")
        what = (
            "calibrated with every token"
            if settings.undersampled == "all"
            else "rounded to nearest"
        )
        yield (
            f"layer {layer}: {count(len(stats.few), 'expert')} with fewer than "
            f"{count(settings.min_tokens, 'token')} {what}: {shown}"
        )
    silent = sorted(set(stats.rounded) - set(stats.few))
    if silent:
        yield f"layer {layer}: inputs of experts {silent} were all zero; rounded these to nearest"
    dead = {kind: number for kind, number in stats.dead_columns.items() if number}
    if dead:
        what = (
            "rounded their weights to nearest"
            if settings.solver == "best"
            else "zeroed their weights"
        )
        yield f"layer {layer}: input columns that were zero throughout; {what}: {dead}"
    if stats.fallbacks:
        shown = ", ".join(f"{expert} {kind}" for expert, kind in stats.fallbacks[:16])
        yield (
            f"layer {layer}: {count(len(stats.fallbacks), 'matrix', 'matrices')} rounded to nearest, "
            f"because their Hessian cannot be factorized: {shown}"
        )
