"""One layer of a calibration: attention and router over all samples, then its experts, some at a time,
and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from qconvert.calibrate.activation_store import Rows, ScratchRows, TokenRows, prefetched
from qconvert.calibrate.distributed import (
    SINGLE_PROCESS,
    Batch,
    Communicator,
    ExpertReadOrder,
    batches,
    chunks_of,
    divided,
    share,
    shares,
)
from qconvert.calibrate.experts import (
    NAMES,
    Expert,
    ExpertQuantizer,
    ExpertSums,
    InputStats,
    RoutedInputs,
    broadcast_experts,
    joined_sums,
    receive_experts,
    tokens_together,
)
from qconvert.calibrate.kv_cache import CacheMaxima, joined_maxima
from qconvert.calibrate.linears import Linear, LinearQuantizer, Linears
from qconvert.calibrate.memory import Budget, experts_together, solved_together, trim
from qconvert.calibrate.model import Layer, Model
from qconvert.calibrate.progress import Clock
from qconvert.calibrate.propagated_error import HiddenStates, Kept, UnquantizedInputs
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.settings import ExpertSchemes, LayerStats, Matrix, Settings
from qconvert.calibrate.token_dispatch import dispatch_of
from qconvert.core.errors import PlanError
from qconvert.core.shown import count
from qconvert.formats.base import Stored
from qconvert.layouts.derived.running import Call
from qconvert.models.experts import PROJECTIONS, Projection
from qconvert.run.work.backend import Phase, Remark
from qconvert.run.work.files import Files

if TYPE_CHECKING:
    import torch

# What an accelerator works on together, in experts and in attention: so many tokens, or more where their
# hidden states are of so many numbers. Few are many launches of kernels.
_GATHER, _GATHER_NUMBERS = 262_144, 1 << 30
_ATTEND, _ATTEND_MOST, _ATTEND_NUMBERS = 16_384, 65_536, 1 << 27

T = TypeVar("T")
Matrices = Mapping[int, Mapping[tuple[int, str], Projection]]
Targets = Mapping[int, Sequence[ExpertSchemes]]  # of layers in which there are any


@dataclass(frozen=True, eq=False)
class LayerStream:
    """A model's way through a layer: what goes into its experts, and what they answer [T, H]."""

    routed: RoutedInputs
    answers: TokenRows


@dataclass(frozen=True, eq=False)
class LoadedExperts:
    """Experts of one device in memory, and as they were read where the unquantized model runs too."""

    experts: list[Expert] = field(default_factory=list)
    plain: list[Expert] = field(default_factory=list)


@dataclass(frozen=True)
class Layers:
    """Works on layers, one at a time. `matrices` are the routed experts by layer, `lengths` those of the
    samples, `folder` is for what does not fit in memory; `linears` are what is solved beside the
    experts, by layer, `caches` modules of attention whose keys and values are looked at. Experts of
    a layer without `targets` are looked at for `statistics`, or only answer. `read_order`
    experts are read before they are asked for. A process of `comm` has hidden states of its own
    samples, and its part of each group of experts."""

    model: Model
    matrices: Matrices
    lengths: Sequence[int]
    targets: Targets
    settings: Settings
    folder: Path
    budget: Budget
    device: str
    files: Files
    reader: Weights
    clock: Clock
    experts: int
    linears: Linears = field(default_factory=dict)
    caches: Mapping[int, str] = field(default_factory=dict)
    statistics: bool = True
    read_order: ExpertReadOrder | None = None
    comm: Communicator = SINGLE_PROCESS

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def hidden(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def gather(self) -> int | None:
        if self.settings.gather is not None:
            return self.settings.gather
        cpu = self.device == "cpu"
        return None if cpu else max(_GATHER, _GATHER_NUMBERS // self.hidden)

    @property
    def attended(self) -> int | None:
        cpu = self.device == "cpu"
        return None if cpu else max(_ATTEND, min(_ATTEND_MOST, _ATTEND_NUMBERS // self.hidden))

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """Ranges of tokens, whole samples each, that go through attention and are answered in one
        process: the same ones, of however many."""
        return chunks_of(self.lengths, self.attended)

    @cached_property
    def batches(self) -> list[list[Batch]]:
        """Batches of each part."""
        return list(batches(self.lengths, self.attended, self.parts))

    @cached_property
    def cuts(self) -> list[tuple[int, int]]:
        """The tokens of each process of the team."""
        found = []
        at = 0
        for some in shares(self.parts, self.comm.count):
            stop = some[-1][1] if some else at
            found.append((at, stop))
            at = stop
        return found

    @property
    def own(self) -> tuple[int, int]:
        """The tokens of this process."""
        return self.cuts[self.comm.rank]

    @property
    def corrects(self) -> bool:
        """Return whether hidden states of the unquantized model are kept too: where experts alone are
        quantized, because the rest of a layer then is the unquantized model's as well."""
        return bool(self.targets) and self.settings.corrects and not self.linears

    @property
    def most_targets(self) -> int:
        """Formats that a layer's experts are solved for at once, at the most."""
        return max(map(len, self.targets.values()), default=0)

    def run(
        self, number: int, states: HiddenStates, following: HiddenStates
    ) -> Generator[Phase | Matrix | Remark, None, LayerStats | None]:
        """Compute `following`, what goes into the next layer, and yield the matrices of this one.
        Returns statistics of its experts, None for a dense layer and where they only answer."""
        with self.clock("read", self.device):
            layer = self.model.layer(number, self.reader, self.device)
        if not layer.sparse:
            if linears := self.linears.get(number):
                yield from self._quantize(layer, linears, states.quantized)
            yield from self._forward(layer, states, following, lambda _, hidden, call, batch: (
                layer.forward(hidden, call)
            ))  # fmt: skip
            return None
        if number not in self.matrices:
            raise PlanError(
                f"layer {number}: {type(layer.module).__name__} has routed experts, and the checkpoint "
                "none there; calibrate the model as it was published"
            )
        scratch = ScratchRows(self.folder, self.budget.states, self.files, self.comm.rank)
        try:
            return (yield from self._sparse(layer, states, following, scratch))
        finally:
            scratch.close()

    def through(
        self, number: int, states: Rows, *, whole: bool = False
    ) -> Iterator[tuple[Batch, torch.Tensor, Call]]:
        """Return what goes into a layer: samples together [B, T, H], and what the layer is called with;
        this process's samples, or the `whole` team's."""
        mine = self.batches if whole else self.mine(shares(self.batches, self.comm.count))
        for batch in (batch for part in mine for batch in part):
            length = (batch.stop - batch.start) // batch.count
            call = self.model.calls(batch.count, length, self.device, self.reader)[number]
            rows = states.read(batch.start, batch.stop).to(self.device)
            yield batch, rows.reshape(batch.count, length, -1), call

    def mine(self, parts: Sequence[Sequence[T]]) -> Sequence[T]:
        """This process's of some parts, one for each process of the team or fewer."""
        return parts[self.comm.rank] if self.comm.rank < len(parts) else ()

    def _forward(
        self, layer: Layer, states: HiddenStates, following: HiddenStates,
        run: Callable[[int, torch.Tensor, Call, Batch], torch.Tensor],
    ) -> Iterator[Matrix]:  # fmt: skip
        """Compute what goes into the next layer. `run` has the number of a stream, and what goes into
        the layer. Keys and values of the quantized stream are those that a runtime will keep."""
        own = _own(layer)
        attention = self.caches.get(layer.number)
        seen = None if attention is None else CacheMaxima(attention)
        pairs = enumerate(zip(states.all, following.all, strict=True))
        with self.clock("forward", self.device) as tick:
            for number, (before, after) in pairs:
                for batch, hidden, call in self.through(layer.number, before):
                    if seen is not None and number == 0:
                        call = seen.watched(call)
                    after.write(batch.start, run(number, hidden, call, batch).flatten(0, 1))
                    tick(own * (batch.stop - batch.start))
        if seen is not None:
            found = joined_maxima(layer.number, seen.module, self.comm.gathered(seen.found))
            if self.comm.rank == 0:
                yield found

    def _where(self, layer: Layer) -> str:
        return f"calibrating layer {layer.number} of {self.model.layers}"

    def _quantize(
        self, layer: Layer, linears: Sequence[Linear], states: Kept,
        first: Callable[[], None] | None = None,
    ) -> Iterator[Phase | Matrix | Remark]:  # fmt: skip
        """Solve a layer's linears, and put what their codes mean into it. `first`, if given, runs it
        over all samples the first time."""
        yield Phase(f"{self._where(layer)}: {count(len(linears), 'linear')}")
        given = [] if first is None else [first]
        # All processes solve them, and put what their codes mean into their own layer.
        states.gather(self.comm, self.cuts)

        def run(most: int | None = None) -> None:
            for _, hidden, call in islice(self.through(layer.number, states, whole=True), most):
                if layer.sparse:
                    layer.routed(hidden, call)
                else:
                    layer.forward(hidden, call)

        longest = max(batch.stop - batch.start for part in self.batches for batch in part)
        quantizer = LinearQuantizer(
            layer, self.device, self.budget, self.settings, self.reader, self.clock,
            samples=len(self.lengths), tokens=self.total, chunk=longest,
        )  # fmt: skip
        for event in quantizer.quantize(
            linears, lambda: run(1), lambda: given.pop()() if given else run()
        ):
            if self.comm.rank == 0:
                yield event

    def _sparse(
        self, layer: Layer, states: HiddenStates, following: HiddenStates, scratch: ScratchRows
    ) -> Generator[Phase | Matrix | Remark, None, LayerStats | None]:
        import torch

        where = self._where(layer)
        yield Phase(f"{where}: attention")
        targets = self.targets.get(layer.number, ())
        looks = bool(targets) or self.statistics
        kept: list[RoutedInputs] = []

        def attend() -> None:
            kept.append(self.attend(layer, states.quantized, scratch))
            more = [kept[0].weights] if self.statistics else []
            self._share(kept[0], kept[0].experts, *more)

        if linears := self.linears.get(layer.number):
            # Experts are calibrated on what the layer gave them before it was quantized, and answer to
            # what it gives them then.
            alone = self.comm.count == 1
            if looks and not alone:  # of its own samples, where linears are given all
                attend()
            first = attend if looks and alone else None
            yield from self._quantize(layer, linears, states.quantized, first)
            kept.append(self.attend(layer, states.quantized, scratch, "after."))
        else:
            attend()
        routed = kept[0]
        plain: TokenRows | None = None
        given = [kept[-1]]
        if states.plain is not None:
            given.append(self.attend(layer, states.plain, scratch, "plain."))
            self._share(given[1])
            plain = given[1].inputs
        # After what goes into experts, where room is short: each group of them reads that more often.
        answers = [
            scratch.rows(name, self.total, self.hidden, torch.bfloat16)
            for name in ("answers", "plain.answers")[: len(given)]
        ]
        streams = [LayerStream(*both) for both in zip(given, answers, strict=True)]
        found = ExpertSums()
        few = [e for e, count in enumerate(routed.counts) if count < self.settings.min_tokens]
        every: frozenset[int] = frozenset()
        if not looks:
            few = []
        elif self.settings.experts == "all":
            every, few = frozenset(range(self.experts)), []
        elif self.settings.undersampled == "all":
            every = frozenset(few)
        else:
            found.rounded += few
        quantizer = ExpertQuantizer(
            self.device, layer, layer.middle(self.device), targets, self.settings, self.reader,
            self.clock, self.statistics,
        )  # fmt: skip
        common = quantizer.accumulate_all(routed, self.hidden, plain) if every else None
        matrices = self.matrices[layer.number]

        left = scratch.left(self.device)
        roomy = replace(self, budget=self.budget.with_rest(self.device, left))
        groups = list(roomy.groups(layer, matrices, every, streams))
        if self.read_order is not None:
            self.read_order.set_experts(
                layer.number, [e for group in groups for e in self.mine(group)]
            )
        for group in groups:
            yield Phase(f"{where}: experts {group[0][0]} to {group[-1][-1]} of {self.experts}")
            mine, loaded = self.mine(group), LoadedExperts()
            if mine and looks:
                yield from _quantize_experts(
                    quantizer, mine, matrices, every, routed, plain, common, found, loaded
                )
            elif mine:
                loaded.experts.extend(quantizer.take(mine, matrices, every))
                loaded.plain.extend(loaded.experts)  # for both streams alike
                quantizer.check(loaded.experts[0], routed)
            self._answer(quantizer, group, loaded, streams, matrices, first=group is groups[0])
            del loaded
            trim()

        def joined(stream: int, hidden: torch.Tensor, call: Call, batch: Batch) -> torch.Tensor:
            answer = streams[stream].answers.read(batch.start, batch.stop).to(hidden.device)
            return layer.joined(hidden, call, answer)

        yield from self._forward(layer, states, following, joined)
        found = joined_sums(self.comm.gathered(found))
        return _stats(routed.counts, few, found) if looks else None

    def _share(self, routed: RoutedInputs, *others: TokenRows) -> None:
        """Give all processes what goes into experts, and `others`: which experts that are, and their
        weights."""
        with self.clock("forward", self.device):
            for rows in (routed.inputs, *others):
                share(self.comm, rows, self.cuts, self.device)

    def _answer(
        self, quantizer: ExpertQuantizer, group: Sequence[Sequence[int]], loaded: LoadedExperts,
        streams: Sequence[LayerStream], matrices: Mapping[tuple[int, str], Projection], *, first: bool,
    ) -> None:  # fmt: skip
        """Let a group's experts answer this process's tokens, in the order of their numbers: add that to
        the quantized stream, and what they answer as they were read to the plain one. Before the `first`
        group there is nothing to add to. `loaded` are this process's of them, which the others
        receive."""
        parts = self.mine(shares(self.parts, self.comm.count))
        for source in range(len(group)):
            held = self._broadcast(quantizer, group, source, loaded, matrices, len(streams))
            with self.clock("forward", quantizer.device) as tick:
                for stream, experts in zip(streams, held, strict=True):
                    self._add(quantizer, experts, stream, parts, tick, new=first and source == 0)
            del held, experts  # before the next ones are received

    def _broadcast(
        self, quantizer: ExpertQuantizer, group: Sequence[Sequence[int]], source: int,
        loaded: LoadedExperts, matrices: Mapping[tuple[int, str], Projection], streams: int,
    ) -> Sequence[Sequence[Expert]]:  # fmt: skip
        """For one or two streams the experts of a process of the team, and as they were read: this
        one's, which it sends the others, or what it receives."""
        own = [loaded.experts, loaded.plain][:streams]
        if self.comm.count == 1:
            return own
        down = matrices[0, "down_proj"].weight
        sides = down.rows, down.columns, quantizer.device
        with self.clock("forward", quantizer.device):
            if source == self.comm.rank:
                for experts in own:
                    broadcast_experts(self.comm, source, experts)
                return own
            return [receive_experts(self.comm, source, group[source], *sides) for _ in own]

    def _add(
        self, quantizer: ExpertQuantizer, experts: Sequence[Expert], stream: LayerStream,
        parts: Sequence[tuple[int, int]], tick: Callable[[float], None], *, new: bool,
    ) -> None:  # fmt: skip
        """Add what some experts answer to a stream's tokens; `new`: nothing answers before them."""
        import torch

        routed = stream.routed
        given = [routed.experts, routed.weights, routed.inputs] + ([] if new else [stream.answers])
        for (start, _), (routes, weights, inputs, *answers) in zip(
            parts, prefetched(given, parts, quantizer.device), strict=True
        ):
            rows = answers[0] if answers else torch.zeros_like(inputs)
            slots = dispatch_of(routes, weights, len(routed.counts))
            quantizer.answer(experts, rows, inputs, slots, tick)
            stream.answers.write(start, rows)

    def attend(
        self, layer: Layer, states: Rows, scratch: ScratchRows, prefix: str = ""
    ) -> RoutedInputs:
        """Run attention and router over all samples of this process. `prefix` is of the names of what is
        kept. Tokens that experts get are counted of all processes."""
        import torch

        def routes(width: int, dtype: torch.dtype) -> tuple[TokenRows, TokenRows]:
            """Return what is kept of the router, once it is known how wide that is."""
            return (
                scratch.rows(f"{prefix}routes", self.total, width, torch.int32),
                scratch.rows(f"{prefix}shares", self.total, width, dtype),
            )

        inputs = scratch.rows(f"{prefix}inputs", self.total, self.hidden, self.model.dtype)
        form: tuple[int, torch.dtype] | None = None
        kept: tuple[TokenRows, TokenRows] | None = None
        counts = torch.zeros(self.experts, dtype=torch.int64)
        own = _own(layer)
        with self.clock("forward", self.device) as tick:
            for batch, hidden, call in self.through(layer.number, states):
                routed = layer.routed(hidden, call)
                tick(own * (batch.stop - batch.start))
                inputs.write(batch.start, routed.inputs)
                experts, weights = routed.experts, routed.weights
                if kept is None:
                    form = experts.shape[-1], weights.dtype
                    kept = routes(*form)
                kept[0].write(batch.start, experts.to(torch.int32))
                kept[1].write(batch.start, weights)
                counts += torch.bincount(experts.reshape(-1), minlength=self.experts).cpu()
        told = self.comm.gathered((counts.tolist(), form))
        # Others know it where this process has no tokens.
        routing, shared = kept or routes(*next(form for _, form in told if form))
        total = [sum(each) for each in zip(*(some for some, _ in told), strict=True)]
        return RoutedInputs(inputs, routing, shared, chunks_of(self.lengths, self.gather), total)

    def groups(
        self,
        layer: Layer,
        matrices: Mapping[tuple[int, str], Projection],
        every: frozenset[int],
        streams: Sequence[LayerStream],
    ) -> Iterator[list[list[int]]]:
        """Numbers of experts that are in memory together, by process, in their order."""
        down = matrices[0, "down_proj"].weight
        chunk = max(stop - start for start, stop in streams[0].routed.chunks)
        most, device = None, self.device
        if device != "cpu":
            most = min(chunk, tokens_together(down.rows))
        size = experts_together(
            self.budget, self.device, hidden=down.rows, middle=down.columns,
            own_hessians=len(every) < self.experts, schemes=self.most_targets,
            solver=self.settings.solver,
            together=self.settings.together,
            layer_bytes=sum(p.nbytes for p in layer.module.parameters()),
            chunk=chunk,
            corrects=self.corrects,
            most=most,
            hosted=sum(one.routed.inputs.device != device for one in streams),
            receives=self.comm.count > 1,
        )  # fmt: skip
        # How many experts fit is known to each process of its own device.
        yield from divided(range(self.experts), self.comm.gathered(size), self.batch(down))

    def batch(self, down: Stored) -> int:
        """Experts of which all matrices are solved in the same batches wherever they are."""
        cpu, least = self.device == "cpu", min(down.rows, down.columns)
        return 1 if cpu else solved_together(self.settings.together, least)


def _own(layer: Layer) -> float:
    """Parameters of a layer beside its routed experts, which are never in it."""
    return float(sum(p.numel() for p in layer.module.parameters() if not p.is_meta))


def _quantize_experts(
    quantizer: ExpertQuantizer, numbers: Sequence[int],
    matrices: Mapping[tuple[int, str], Projection], every: frozenset[int], routed: RoutedInputs,
    plain: TokenRows | None, shared: InputStats | None, found: ExpertSums, loaded: LoadedExperts,
) -> Iterator[Matrix]:  # fmt: skip
    """Read some experts, let them see their tokens, and solve them. They are added to `loaded`. `plain`
    is what goes into the unquantized experts, where propagated errors are corrected."""
    experts = loaded.experts
    experts += quantizer.take(numbers, matrices, every)
    beside: UnquantizedInputs | None = None
    stages: list[tuple[str, ...]] = [NAMES]
    if plain is not None:
        loaded.plain.extend(replace(expert) for expert in experts)
        # What goes into down follows from the codes of gate and up.
        beside, stages = UnquantizedInputs(plain, loaded.plain), [(name,) for name in NAMES]
    for names in stages:
        quantizer.accumulate(experts, routed, shared, names, beside)
        yield from quantizer.quantize(experts, len(routed.chunks), found, names)
        for expert in experts:
            expert.inputs = expert.middle = None


def _stats(counts: Sequence[int], few: Sequence[int], found: ExpertSums) -> LayerStats:
    import numpy as np

    def stacked(name: str, which: int) -> Any:
        return np.stack([found.rows[expert, name][which] for expert in range(len(counts))])

    return LayerStats(
        np.array(counts, np.int64),
        np.array([found.weighed.get(e, 0.0) / max(1, n) for e, n in enumerate(counts)], np.float32),
        stacked("gate_up", 0),
        stacked("gate_up", 1),
        stacked("down", 0),
        stacked("down", 1),
        tuple(few),
        tuple(sorted(found.rounded)),
        {
            kind: sum(n for (_, each), n in found.dead.items() if each == kind)
            for kind in PROJECTIONS
        },
        tuple(sorted(found.fallbacks)),
    )
