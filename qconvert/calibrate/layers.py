"""One layer of a calibration: attention and router over all samples, then its experts, some at a time,
and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.clock import Clock
from qconvert.calibrate.experts import NAMES, Bench, Expert, Found, Inputs, Seen
from qconvert.calibrate.linears import Linear, LinearBench, Linears
from qconvert.calibrate.memory import Budget, group_sizes, trim
from qconvert.calibrate.merged import merged
from qconvert.calibrate.model import Layer, Model
from qconvert.calibrate.propagated import Kept, Plain, States
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.rows import Rows, Scratch
from qconvert.calibrate.settings import ExpertSchemes, LayerStats, Matrix, Settings
from qconvert.calibrate.sharing import Sharing
from qconvert.calibrate.taken import Stream, Taken
from qconvert.core.errors import PlanError
from qconvert.core.shown import count
from qconvert.layouts.derived.running import Call
from qconvert.matrices.experts import PROJECTIONS, Projection
from qconvert.run.backend import Phase, Remark
from qconvert.run.exchange import Exchange
from qconvert.run.files import Files

if TYPE_CHECKING:
    import torch

# Tokens that an accelerator works on together, in experts and in attention.
_GATHER, _ATTEND = 262_144, 16_384

Matrices = Mapping[int, Mapping[tuple[int, str], Projection]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens [start, stop) of all, being `count` samples of one length."""

    start: int
    stop: int
    count: int


def batches(lengths: Sequence[int], most: int | None) -> Iterator[Batch]:
    """Samples that go through attention together: one by one, or as many neighbours of one length as
    have no more than `most` tokens."""
    at = 0
    number = 0
    while number < len(lengths):
        count = 1
        while (
            most is not None
            and number + count < len(lengths)
            and lengths[number + count] == lengths[number]
            and (count + 1) * lengths[number] <= most
        ):
            count += 1
        stop = at + count * lengths[number]
        yield Batch(at, stop, count)
        at, number = stop, number + count


def chunks_of(lengths: Sequence[int], most: int | None) -> list[tuple[int, int]]:
    """Ranges of tokens whose expert inputs are worked on together: a sample each, or whole samples of
    no more than `most` tokens."""
    found: list[tuple[int, int]] = []
    at = 0
    for length in lengths:
        if found and most is not None and at + length - found[-1][0] <= most:
            found[-1] = found[-1][0], at + length
        else:
            found.append((at, at + length))
        at += length
    return found


@dataclass(frozen=True)
class Layers:
    """Works on layers, one at a time. `matrices` are the routed experts by layer, `lengths` those of the
    samples, `folder` is for what does not fit in memory, `readers` one for each of `devices`; `linears`
    are what is solved beside the experts, by layer, on the first device. Experts for which there is no
    target are looked at for `statistics`, or only answer. With an `exchange` experts are solved by
    several processes. `ahead` bytes of them are read before they are asked for."""

    model: Model
    matrices: Matrices
    lengths: Sequence[int]
    targets: Sequence[ExpertSchemes]
    settings: Settings
    folder: Path
    budget: Budget
    devices: tuple[str, ...]
    files: Files
    readers: tuple[Weights, ...]
    clock: Clock
    experts: int
    linears: Linears = field(default_factory=dict)
    statistics: bool = True
    exchange: Exchange | None = None
    ahead: int = 0

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
        return None if self.devices[0] == "cpu" else _GATHER

    @property
    def attended(self) -> int | None:
        return None if self.devices[0] == "cpu" else _ATTEND

    @property
    def corrects(self) -> bool:
        """Whether hidden states of the unquantized model are kept too: where experts alone are
        quantized, because the rest of a layer then is the unquantized model's as well."""
        return bool(self.targets) and self.settings.corrects and not self.linears

    def run(
        self, number: int, states: States, following: States
    ) -> Generator[Phase | Matrix | Remark, None, LayerStats | None]:
        """Compute `following`, what goes into the next layer, and yield the matrices of this one.
        Returns statistics of its experts, None for a dense layer and where they only answer."""
        with self.clock("read", self.devices[0]):
            layer = self.model.layer(number, self.readers[0], self.devices[0])
        if not layer.sparse:
            if linears := self.linears.get(number):
                yield from self._quantize(layer, linears, states.quantized)
            own = _own(layer)
            with self.clock("forward", self.devices[0]) as tick:
                for before, after in zip(states.all, following.all, strict=True):
                    for batch, hidden, call in self.through(number, before):
                        after.write(batch.start, layer.forward(hidden, call).flatten(0, 1))
                        tick(own * (batch.stop - batch.start))
            return None
        if number not in self.matrices:
            raise PlanError(
                f"layer {number}: {type(layer.module).__name__} has routed experts, and the checkpoint "
                "none there; calibrate the model as it was published"
            )
        scratch = Scratch(self.folder, self.budget.states, self.files)
        try:
            return (yield from self._sparse(layer, states, following, scratch))
        finally:
            scratch.close()

    def through(self, number: int, states: Kept) -> Iterator[tuple[Batch, torch.Tensor, Call]]:
        """What goes into a layer: samples together [B, T, H], and what the layer is called with."""
        for batch in batches(self.lengths, self.attended):
            length = (batch.stop - batch.start) // batch.count
            call = self.model.calls(batch.count, length, self.devices[0], self.readers[0])[number]
            rows = states.read(batch.start, batch.stop).to(self.devices[0])
            yield batch, rows.reshape(batch.count, length, -1), call

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

        def run(most: int | None = None) -> None:
            for _, hidden, call in islice(self.through(layer.number, states), most):
                if layer.sparse:
                    layer.routed(hidden, call)
                else:
                    layer.forward(hidden, call)

        longest = max(batch.stop - batch.start for batch in batches(self.lengths, self.attended))
        bench = LinearBench(
            layer, self.devices[0], self.budget, self.settings, self.readers[0], self.clock,
            samples=len(self.lengths), tokens=self.total, chunk=longest,
        )  # fmt: skip
        yield from bench.quantize(
            linears, lambda: run(1), lambda: given.pop()() if given else run()
        )

    def _sparse(
        self, layer: Layer, states: States, following: States, scratch: Scratch
    ) -> Generator[Phase | Matrix | Remark, None, LayerStats | None]:
        import torch

        where = self._where(layer)
        yield Phase(f"{where}: attention")
        answers = scratch.rows("answers", self.total, self.hidden, torch.bfloat16, zero=True)
        looks = bool(self.targets) or self.statistics
        kept: list[Seen] = []

        def attend() -> None:
            kept.append(self.attend(layer, states.quantized, scratch))

        if linears := self.linears.get(layer.number):
            # Experts are calibrated on what the layer gave them before it was quantized, and answer to
            # what it gives them then.
            yield from self._quantize(layer, linears, states.quantized, attend if looks else None)
            kept.append(self.attend(layer, states.quantized, scratch, "after."))
        else:
            attend()
        seen = kept[0]
        streams = [Stream(kept[-1], answers)]
        plain: Rows | None = None
        if states.plain is not None:
            answers = scratch.rows(
                "plain.answers", self.total, self.hidden, torch.bfloat16, zero=True
            )
            streams.append(Stream(self.attend(layer, states.plain, scratch, "plain."), answers))
            plain = streams[1].seen.inputs
        found = Found()
        few = [e for e, count in enumerate(seen.counts) if count < self.settings.min_tokens]
        every: frozenset[int] = frozenset()
        if not looks:
            few = []
        elif self.settings.experts == "all":
            every, few = frozenset(range(self.experts)), []
        elif self.settings.few == "all":
            every = frozenset(few)
        else:
            found.rounded += few
        benches = [
            Bench(
                device, layer, layer.middle(device), self.targets, self.settings, reader, self.clock
            )
            for device, reader in zip(self.devices, self.readers, strict=True)
        ]
        shared: list[Inputs | None] = [
            bench.look_at_all(seen, self.hidden, plain) if every else None for bench in benches
        ]
        matrices = self.matrices[layer.number]

        def solving(group: Sequence[Sequence[int]], taken: Sequence[Taken]) -> Iterator[Matrix]:
            return merged(
                [
                    _work(bench, mine, matrices, every, seen, plain, common, found, experts)
                    for bench, mine, common, experts in zip(
                        benches, group, shared, taken, strict=False
                    )
                ]
            )

        if self.exchange is not None:
            sharing = Sharing(self, layer, benches, matrices, every, found, solving)
            yield from sharing.run(streams)
        alone = self.exchange is None
        for group in self.groups(layer, matrices, every, seen) if alone else ():
            yield Phase(f"{where}: experts {group[0][0]} to {group[-1][-1]} of {self.experts}")
            taken = [Taken() for _ in group]
            if looks:
                yield from solving(group, taken)
            else:
                for bench, mine, held in zip(benches, group, taken, strict=False):
                    held.experts.extend(bench.take(mine, matrices, every))
                benches[0].check(taken[0].experts[0], seen)
            self.answer(benches, taken, streams)
            del taken
            trim()
        own = _own(layer)
        with self.clock("forward", self.devices[0]) as tick, torch.no_grad():
            for stream, before, after in zip(streams, states.all, following.all, strict=True):
                for batch, hidden, call in self.through(layer.number, before):
                    answer = stream.answers.read(batch.start, batch.stop).to(self.devices[0])
                    after.write(batch.start, layer.joined(hidden, call, answer).flatten(0, 1))
                    tick(own * (batch.stop - batch.start))
        return _stats(seen.counts, few, found) if looks else None

    def answer(
        self, benches: Sequence[Bench], taken: Sequence[Taken], streams: Sequence[Stream]
    ) -> None:
        """Add what experts answer to the quantized stream, and as they were read to the plain one."""
        self._answer(benches, [mine.experts for mine in taken], streams[0])
        for stream in streams[1:]:
            self._answer(benches, [mine.plain for mine in taken], stream)

    def _answer(
        self, benches: Sequence[Bench], experts: Sequence[Sequence[Expert]], stream: Stream
    ) -> None:
        """Add what experts answer, in the order of their numbers whatever device they are on."""
        for start, stop in stream.seen.chunks:
            rows = stream.answers.read(start, stop)
            for bench, mine in zip(benches, experts, strict=False):
                rows = bench.answer(mine, rows, stream.seen, start, stop)
            stream.answers.write(start, rows)

    def attend(self, layer: Layer, states: Kept, scratch: Scratch, prefix: str = "") -> Seen:
        """Run attention and router over all samples. `prefix` is of the names of what is kept."""
        import torch

        inputs = scratch.rows(f"{prefix}inputs", self.total, self.hidden, torch.bfloat16)
        routes, shares = None, None
        counts = torch.zeros(self.experts, dtype=torch.int64)
        own = _own(layer)
        with self.clock("forward", self.devices[0]) as tick:
            for batch, hidden, call in self.through(layer.number, states):
                routed = layer.routed(hidden, call)
                tick(own * (batch.stop - batch.start))
                inputs.write(batch.start, routed.inputs)
                experts, weights = routed.experts, routed.weights
                if routes is None or shares is None:
                    width = experts.shape[-1]
                    routes = scratch.rows(f"{prefix}routes", self.total, width, torch.int32)
                    shares = scratch.rows(f"{prefix}shares", self.total, width, weights.dtype)
                routes.write(batch.start, experts.to(torch.int32))
                shares.write(batch.start, weights)
                counts += torch.bincount(experts.reshape(-1), minlength=self.experts).cpu()
        assert routes is not None
        assert shares is not None
        chunks = chunks_of(self.lengths, self.gather)
        return Seen(inputs, routes, shares, chunks, counts.tolist())

    def groups(
        self,
        layer: Layer,
        matrices: Mapping[tuple[int, str], Projection],
        every: frozenset[int],
        seen: Seen,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[list[list[int]]]:
        """Numbers of experts that are in memory together, by device, in their order: all of the layer's,
        or these."""
        numbers = range(self.experts) if numbers is None else numbers
        down = matrices[0, "down_proj"].weight
        chunk = max(stop - start for start, stop in seen.chunks)
        most = None
        if self.devices[0] != "cpu":
            most = chunk if every else min(chunk, max(seen.counts))
        sizes = group_sizes(
            self.budget, self.devices, hidden=down.rows, middle=down.columns,
            own_hessians=len(every) < self.experts, schemes=len(self.targets),
            solver=self.settings.solver,
            together=self.settings.together,
            layer_bytes=sum(p.nbytes for p in layer.module.parameters()),
            chunk=chunk,
            corrects=self.corrects,
            most=most,
        )  # fmt: skip
        at = 0
        while at < len(numbers):
            group = []
            for size in sizes:
                mine = list(numbers[at : at + size])
                at += len(mine)
                if mine:
                    group.append(mine)
            yield group


def _own(layer: Layer) -> float:
    """Parameters of a layer beside its routed experts, which are never in it."""
    return float(sum(p.numel() for p in layer.module.parameters() if not p.is_meta))


def _work(bench: Bench, numbers: Sequence[int], matrices: Mapping[tuple[int, str], Projection],
          every: frozenset[int], seen: Seen, plain: Rows | None, shared: Inputs | None, found: Found,
          taken: Taken) -> Iterator[Matrix]:  # fmt: skip
    """Read some experts, let them see their tokens, and solve them. They are added to `taken`. `plain`
    is what goes into the unquantized experts, where propagated errors are corrected."""
    experts = taken.experts
    experts += bench.take(numbers, matrices, every)
    beside: Plain | None = None
    stages: list[tuple[str, ...]] = [NAMES]
    if plain is not None:
        taken.plain.extend(replace(expert) for expert in experts)
        # What goes into down follows from the codes of gate and up.
        beside, stages = Plain(plain, taken.plain), [(name,) for name in NAMES]
    for names in stages:
        bench.look(experts, seen, shared, names, beside)
        yield from bench.quantize(experts, len(seen.chunks), found, names)
        for expert in experts:
            expert.inputs = expert.middle = None


def _stats(counts: Sequence[int], few: Sequence[int], found: Found) -> LayerStats:
    import numpy as np

    def stacked(name: str, which: int) -> Any:
        return np.stack([found.rows[expert, name][which] for expert in range(len(counts))])

    return LayerStats(
        np.array(counts, np.int64),
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
