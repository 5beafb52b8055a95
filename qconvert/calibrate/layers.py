"""One layer of a calibration: attention and router over all samples, then its experts, some at a time,
and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.clock import Clock
from qconvert.calibrate.experts import (
    NAMES,
    Bench,
    Expert,
    Found,
    Inputs,
    Seen,
    joined_found,
    room_for,
)
from qconvert.calibrate.foreseen import Foreseen
from qconvert.calibrate.linears import Linear, LinearBench, Linears
from qconvert.calibrate.memory import Budget, group_sizes, solved_together, trim
from qconvert.calibrate.merged import merged
from qconvert.calibrate.model import Layer, Model
from qconvert.calibrate.propagated import Kept, Plain, States
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.rows import Rows, Scratch
from qconvert.calibrate.settings import ExpertSchemes, LayerStats, Matrix, Settings
from qconvert.calibrate.sharing import Sharing
from qconvert.calibrate.spread import in_turn, on_each, shares, use_device
from qconvert.calibrate.taken import Stream, Taken
from qconvert.calibrate.team import ALONE, Team, share
from qconvert.core.errors import PlanError
from qconvert.core.shown import count
from qconvert.layouts.derived.running import Call
from qconvert.matrices.experts import PROJECTIONS, Projection
from qconvert.matrices.stored import Stored
from qconvert.run.backend import Phase, Remark
from qconvert.run.exchange import Exchange
from qconvert.run.files import Files

if TYPE_CHECKING:
    import torch

# What an accelerator works on together, in experts and in attention: so many tokens, or more where their
# hidden states are of so many numbers. Few are many launches, for which the threads of several devices
# wait for one another.
_GATHER, _GATHER_NUMBERS = 262_144, 1 << 30
_ATTEND, _ATTEND_MOST, _ATTEND_NUMBERS = 16_384, 65_536, 1 << 27
# Matrices that accelerators may be ahead of their being taken. With one, a device waited for each to be
# taken, and 5 ms for Python's lock where another was launching kernels.
_AHEAD = 32

Matrices = Mapping[int, Mapping[tuple[int, str], Projection]]
# A stream, and the experts of each device that answer it.
Way = tuple[Stream, Sequence[Sequence[Expert]]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens [start, stop) of all, being `count` samples of one length from number `first` on."""

    start: int
    stop: int
    first: int
    count: int


def batches(
    lengths: Sequence[int], most: int | None, parts: Sequence[tuple[int, int]]
) -> Iterator[list[Batch]]:
    """For each part of the tokens samples that go through attention together: one by one, or as many
    neighbours of one length as have no more than `most` tokens."""
    at = 0
    number = 0
    for _, end in parts:
        found = []
        while at < end:
            length, count = lengths[number], 1
            while (
                most is not None
                and at + count * length < end
                and lengths[number + count] == length
                and (count + 1) * length <= most
            ):
                count += 1
            stop = at + count * length
            found.append(Batch(at, stop, number, count))
            at, number = stop, number + count
        yield found


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


def divided(
    numbers: Sequence[int], sizes: Sequence[int], batch: int = 1
) -> Iterator[list[list[int]]]:
    """Groups of numbers, in their order: of each group a device has as many as its size at the most,
    and no more than the others where there are fewer than all could have; whole batches of `batch`
    numbers where it has space for one."""
    at = 0
    while at < len(numbers):
        group = []
        for place, size in enumerate(sizes):
            fair = -(-(len(numbers) - at) // (len(sizes) - place))
            fair = -(-fair // batch) * batch
            size = max(size - size % batch, min(size, batch))
            mine = list(numbers[at : at + min(size, fair)])
            at += len(mine)
            if mine:
                group.append(mine)
        yield group


@dataclass(frozen=True)
class Layers:
    """Works on layers, one at a time. `models` and `readers` are one for each of `devices`; `matrices`
    are the routed experts by layer, `lengths` those of the samples, `folder` is for what does not fit
    in memory; `linears` are what is solved beside the experts, by layer, on the first device. Experts
    for which there is no target are looked at for `statistics`, or only answer. With an `exchange`
    experts are solved by several processes. `foreseen` experts are read before they are asked for. In a
    `team` each process has one device, and hidden states of its own samples."""

    models: tuple[Model, ...]
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
    foreseen: Foreseen | None = None
    team: Team = ALONE

    @property
    def model(self) -> Model:
        return self.models[0]

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
        cpu = self.devices[0] == "cpu"
        return None if cpu else max(_GATHER, _GATHER_NUMBERS // self.hidden)

    @property
    def attended(self) -> int | None:
        cpu = self.devices[0] == "cpu"
        return None if cpu else max(_ATTEND, min(_ATTEND_MOST, _ATTEND_NUMBERS // self.hidden))

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """Ranges of tokens, whole samples each, that go through attention and are answered on one
        device: the same ones, on however many."""
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
        for some in shares(self.parts, self.team.count):
            stop = some[-1][1] if some else at
            found.append((at, stop))
            at = stop
        return found

    @property
    def own(self) -> tuple[int, int]:
        """The tokens of this process."""
        return self.cuts[self.team.rank]

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
        placed = self._placed(number)
        layer = placed[0]
        if not layer.sparse:
            if linears := self.linears.get(number):
                yield from self._quantize(layer, linears, states.quantized)
            self._forward(placed, states, following, lambda _, one, hidden, call, batch: (
                one.forward(hidden, call)
            ))  # fmt: skip
            return None
        if number not in self.matrices:
            raise PlanError(
                f"layer {number}: {type(layer.module).__name__} has routed experts, and the checkpoint "
                "none there; calibrate the model as it was published"
            )
        scratch = Scratch(self.folder, self.budget.states, self.files)
        try:
            return (yield from self._sparse(placed, states, following, scratch))
        finally:
            scratch.close()

    def _placed(self, number: int) -> list[Layer]:
        """A layer on each device; on the first alone where linears of it are solved, which is done
        there."""
        devices = self.devices[:1] if number in self.linears else self.devices

        def read(place: int) -> Layer:
            return self.models[place].layer(number, self.readers[place], devices[place])

        with self.clock("read", self.devices[0]):
            return on_each(devices, read)

    def through(
        self, number: int, states: Kept, place: int = 0, of: int = 1, *, whole: bool = False
    ) -> Iterator[tuple[Batch, torch.Tensor, Call]]:
        """What goes into a layer: samples together [B, T, H], and what the layer is called with; the
        samples that device number `place` of the first `of` has of this process's, or of the `whole`
        team's."""
        device, reader = self.devices[place], self.readers[place]
        count, rank = (1, 0) if whole else (self.team.count, self.team.rank)
        mine = shares(shares(self.batches, count)[rank], of)[place]
        for batch in (batch for part in mine for batch in part):
            length = (batch.stop - batch.start) // batch.count
            call = self.models[place].calls(batch.count, length, device, reader)[number]
            rows = states.read(batch.start, batch.stop).to(device)
            yield batch, rows.reshape(batch.count, length, -1), call

    def _forward(
        self, placed: Sequence[Layer], states: States, following: States,
        run: Callable[[int, Layer, torch.Tensor, Call, Batch], torch.Tensor],
    ) -> None:  # fmt: skip
        """Compute what goes into the next layer. `run` has the number of a stream, the layer, and what
        goes into it."""
        own, devices = _own(placed[0]), self.devices[: len(placed)]

        def compute(place: int) -> None:
            one = placed[place]
            pairs = enumerate(zip(states.all, following.all, strict=True))
            with self.clock("forward", devices[place]) as tick:
                for number, (before, after) in pairs:
                    for batch, hidden, call in self.through(one.number, before, place, len(placed)):
                        after.write(
                            batch.start, run(number, one, hidden, call, batch).flatten(0, 1)
                        )
                        tick(own * (batch.stop - batch.start))

        on_each(devices, compute)

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
        states.gather(self.team, self.cuts)

        def run(most: int | None = None) -> None:
            for _, hidden, call in islice(self.through(layer.number, states, whole=True), most):
                if layer.sparse:
                    layer.routed(hidden, call)
                else:
                    layer.forward(hidden, call)

        longest = max(batch.stop - batch.start for part in self.batches for batch in part)
        bench = LinearBench(
            layer, self.devices[0], self.budget, self.settings, self.readers[0], self.clock,
            samples=len(self.lengths), tokens=self.total, chunk=longest,
        )  # fmt: skip
        for event in bench.quantize(
            linears, lambda: run(1), lambda: given.pop()() if given else run()
        ):
            if self.team.rank == 0:
                yield event

    def _sparse(
        self, placed: Sequence[Layer], states: States, following: States, scratch: Scratch
    ) -> Generator[Phase | Matrix | Remark, None, LayerStats | None]:
        import torch

        layer = placed[0]
        where = self._where(layer)
        yield Phase(f"{where}: attention")
        answers = scratch.rows("answers", self.total, self.hidden, torch.bfloat16, zero=True)
        looks = bool(self.targets) or self.statistics
        kept: list[Seen] = []

        def attend() -> None:
            kept.append(self.attend(placed, states.quantized, scratch))
            self._share(kept[0], kept[0].experts)

        if linears := self.linears.get(layer.number):
            # Experts are calibrated on what the layer gave them before it was quantized, and answer to
            # what it gives them then.
            alone = self.team.count == 1
            if looks and not alone:  # of its own samples, where linears are given all
                attend()
            first = attend if looks and alone else None
            yield from self._quantize(layer, linears, states.quantized, first)
            kept.append(self.attend(placed, states.quantized, scratch, "after."))
        else:
            attend()
        seen = kept[0]
        streams = [Stream(kept[-1], answers)]
        plain: Rows | None = None
        if states.plain is not None:
            answers = scratch.rows(
                "plain.answers", self.total, self.hidden, torch.bfloat16, zero=True
            )
            streams.append(Stream(self.attend(placed, states.plain, scratch, "plain."), answers))
            self._share(streams[1].seen)
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
            Bench(device, own, own.middle(device), self.targets, self.settings, reader, self.clock)
            for device, reader, own in zip(
                self.devices, self.readers, [*placed] * len(self.devices), strict=False
            )
        ]
        shared: list[Inputs | None] = on_each(
            self.devices,
            lambda n: benches[n].look_at_all(seen, self.hidden, plain) if every else None,
        )
        matrices = self.matrices[layer.number]

        def solving(group: Sequence[Sequence[int]], taken: Sequence[Taken]) -> Iterator[Matrix]:
            return merged(
                [
                    _work(bench, mine, matrices, every, seen, plain, common, found, experts)
                    for bench, mine, common, experts in zip(
                        benches, group, shared, taken, strict=False
                    )
                ],
                lambda place: use_device(self.devices[place]),
                1 if self.devices[0] == "cpu" else _AHEAD,
            )

        if self.exchange is not None:
            sharing = Sharing(self, layer, benches, matrices, every, found, solving)
            yield from sharing.run(streams)
        groups: list[list[list[int]]] = []
        if self.exchange is None:
            groups += self.groups(layer, matrices, every, seen)
        if self.foreseen is not None:
            self.foreseen.settle(layer.number, [self.here(group) for group in groups])
        for group in groups:
            yield Phase(f"{where}: experts {group[0][0]} to {group[-1][-1]} of {self.experts}")
            here = self.here(group)
            taken = [Taken() for _ in here]
            if looks:
                yield from solving(here, taken)
            else:
                for bench, mine, held in zip(benches, here, taken, strict=False):
                    held.experts.extend(bench.take(mine, matrices, every))
                if taken:
                    benches[0].check(taken[0].experts[0], seen)
            if self.team.count == 1:
                self.answer(benches, taken, streams)
            else:
                self._answer_all(benches[0], group, taken, streams, matrices)
            del taken
            trim()

        def joined(
            stream: int, one: Layer, hidden: torch.Tensor, call: Call, batch: Batch
        ) -> torch.Tensor:
            answer = streams[stream].answers.read(batch.start, batch.stop).to(hidden.device)
            return one.joined(hidden, call, answer)

        self._forward(placed, states, following, joined)
        found = joined_found(self.team.gathered(found))
        return _stats(seen.counts, few, found) if looks else None

    def here(self, group: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The experts of a group that each device of this process has."""
        if self.team.count == 1:
            return list(group)
        return list(group[self.team.rank : self.team.rank + 1])

    def _share(self, seen: Seen, routes: Rows | None = None) -> None:
        """Give all processes what goes into experts, and `routes`, which experts that are."""
        with self.clock("forward", self.devices[0]):
            for rows in (seen.inputs, routes):
                if rows is not None:
                    share(self.team, rows, self.cuts, self.devices[0])

    def _answer_all(
        self, bench: Bench, group: Sequence[Sequence[int]], taken: Sequence[Taken],
        streams: Sequence[Stream], matrices: Mapping[tuple[int, str], Projection],
    ) -> None:  # fmt: skip
        """Let the experts of all processes answer this one's tokens, in the order of their numbers."""
        down = matrices[0, "down_proj"].weight
        own = taken[0] if taken else Taken()
        for source, numbers in enumerate(group):
            held = [own.experts, own.plain][: len(streams)]
            if source != self.team.rank:
                held = [room_for(numbers, down.rows, down.columns, bench.device) for _ in streams]
            with self.clock("forward", bench.device):
                for expert in (expert for some in held for expert in some):
                    expert.lend(self.team, source)
            self.answer([bench], [Taken(*held)], streams)

    def answer(
        self, benches: Sequence[Bench], taken: Sequence[Taken], streams: Sequence[Stream]
    ) -> None:
        """Add what experts answer to the quantized stream, and as they were read to the plain one."""
        ways = [(streams[0], [mine.experts for mine in taken])]
        ways += [(stream, [mine.plain for mine in taken]) for stream in streams[1:]]
        mine = shares(self.parts, self.team.count)[self.team.rank]
        items = [(way, part) for way in ways for part in mine]
        used = benches[: len(taken)]
        if not used:
            return

        def begin(item: tuple[Way, tuple[int, int]]) -> torch.Tensor:
            (stream, _), part = item
            return stream.answers.read(*part)

        # In the order of the experts' numbers, whatever device they are on.
        def add(place: int, item: tuple[Way, tuple[int, int]], rows: torch.Tensor) -> torch.Tensor:
            (stream, experts), part = item
            return used[place].answer(experts[place], rows, stream.seen, *part)

        def end(item: tuple[Way, tuple[int, int]], rows: torch.Tensor) -> None:
            (stream, _), (start, _) = item
            stream.answers.write(start, rows)

        in_turn([bench.device for bench in used], items, begin, add, end)

    def attend(
        self, placed: Sequence[Layer], states: Kept, scratch: Scratch, prefix: str = ""
    ) -> Seen:
        """Run attention and router over all samples of this process. `prefix` is of the names of what is
        kept. Tokens that experts get are counted of all processes."""
        import torch

        inputs = scratch.rows(f"{prefix}inputs", self.total, self.hidden, torch.bfloat16)
        kept: list[Rows] = []
        form: list[tuple[int, torch.dtype]] = []
        lock = Lock()
        own, devices = _own(placed[0]), self.devices[: len(placed)]

        def routes(width: int, dtype: torch.dtype) -> list[Rows]:
            """What is kept of the router, once it is known how wide that is."""
            with lock:
                if not kept:
                    form.append((width, dtype))
                    kept.append(scratch.rows(f"{prefix}routes", self.total, width, torch.int32))
                    kept.append(scratch.rows(f"{prefix}shares", self.total, width, dtype))
                return kept

        def run(place: int) -> torch.Tensor:
            counts = torch.zeros(self.experts, dtype=torch.int64)
            one = placed[place]
            with self.clock("forward", devices[place]) as tick:
                for batch, hidden, call in self.through(one.number, states, place, len(placed)):
                    routed = one.routed(hidden, call)
                    tick(own * (batch.stop - batch.start))
                    inputs.write(batch.start, routed.inputs)
                    experts, weights = routed.experts, routed.weights
                    routing, shared = routes(experts.shape[-1], weights.dtype)
                    routing.write(batch.start, experts.to(torch.int32))
                    shared.write(batch.start, weights)
                    counts += torch.bincount(experts.reshape(-1), minlength=self.experts).cpu()
            return counts

        mine = torch.stack(on_each(devices, run)).sum(0).tolist()
        told = self.team.gathered((mine, form))
        counts = [sum(each) for each in zip(*(some for some, _ in told), strict=True)]
        # Others know it where this process has no tokens.
        routing, shared = routes(*next(one[0] for _, one in told if one))
        return Seen(inputs, routing, shared, chunks_of(self.lengths, self.gather), counts)

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
        # A process has one device; how many experts fit is known to each of its own.
        every_size = [size for sizes in self.team.gathered(sizes) for size in sizes]
        yield from divided(numbers, every_size, self.batch(down))

    def batch(self, down: Stored) -> int:
        """Experts of which all matrices are solved in the same batches wherever they are."""
        cpu, least = self.devices[0] == "cpu", min(down.rows, down.columns)
        return 1 if cpu else solved_together(self.settings.together, least)


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
