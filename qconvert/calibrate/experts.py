"""Routed experts of one layer, some at a time: what they see, their codes, and what they then answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.activation_store import TokenRows, prefetched
from qconvert.calibrate.distributed import Communicator
from qconvert.calibrate.kernel_choice import linear
from qconvert.calibrate.memory import solved_together
from qconvert.calibrate.model import Layer
from qconvert.calibrate.progress import Clock, accumulation_cost, matrix_cost
from qconvert.calibrate.propagated_error import UnquantizedInputs, corrected, corrected_together
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.settings import ExpertSchemes, Matrix, Settings
from qconvert.calibrate.solve import Quantized, rounded, solved
from qconvert.calibrate.token_dispatch import TokenDispatch, add_answers, dispatch_of
from qconvert.core.errors import RunError
from qconvert.core.int_scheme import Codes
from qconvert.models.experts import PROJECTIONS, Projection

if TYPE_CHECKING:
    import torch


# Tokens of each group of experts that the class's own experts answer too.
_CHECKED = 16
NAMES = ("gate_up", "down")
_LENT = 1 << 28  # bytes of weights that are sent at once
# Bytes of inputs, products and answers of experts that an accelerator lets answer one after the other.
_ANSWERED = 1 << 30
# Rows of a product on an accelerator are a multiple of this: where their number is another one each
# time, cuBLAS takes 0.13 ms, and up to 4, to choose a kernel; an H100 multiplies in 0.05.
_TALL = 256
# Numbers of inputs of one expert that an accelerator looks at together: what is made of them there takes
# five times their bytes, and an expert may get most of a chunk.
_LOOKED = 1 << 28


@dataclass(frozen=True, eq=False)
class RoutedInputs:
    """Inputs of a layer's experts, by token: inputs [T, H], experts int32 [T, k], weights [T, k];
    `chunks` are the ranges of tokens that are looked at together, counts [E] the tokens routed to
    each."""

    inputs: TokenRows
    experts: TokenRows
    weights: TokenRows
    chunks: Sequence[tuple[int, int]]
    counts: Sequence[int]

    @property
    def tokens(self) -> int:
        return self.chunks[-1][1]


def tokens_together(hidden: int) -> int:
    """Tokens that an expert on an accelerator sees at a time."""
    return max(1, _LOOKED // hidden // _TALL) * _TALL


@dataclass(eq=False)
class InputStats:
    """Sums over the inputs of a matrix: Hessian float32 [K, K], being 2 x x^T, and absmax [K]; `cross`
    [K, K] is 2 dx x^T, dx being what the unquantized model's inputs have more, None where none are
    kept."""

    hessian: torch.Tensor
    absmax: torch.Tensor
    tokens: int = 0
    cross: torch.Tensor | None = None

    def add(
        self, rows: torch.Tensor, plain: torch.Tensor | None = None, tokens: int | None = None
    ) -> None:
        """Count in inputs BF16 [T, K], and what the unquantized model has for the same tokens: of so
        many, if that is said, and then rows of zeros."""
        import torch

        if not rows.shape[0]:
            return
        self.tokens += rows.shape[0] if tokens is None else tokens
        # The largest magnitude, without a copy of all magnitudes.
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=0)
        torch.maximum(self.absmax, largest.float(), out=self.absmax)
        if self.cross is not None and plain is not None:
            # Exact in BF16 where one is at most twice the other, and 0 where they are equal.
            off = (plain - rows).t()
            if self.cross.is_cuda:
                self.cross.add_(torch.mm(off, rows, out_dtype=torch.float32), alpha=2)
            else:
                self.cross.addmm_(off.float(), rows.float(), alpha=2)
        if self.hessian.is_cuda:
            # Products of BF16 numbers are exact in float32, where they are added up.
            self.hessian.add_(torch.mm(rows.t(), rows, out_dtype=torch.float32), alpha=2)
            return
        # To the last bit what llmcompressor adds up (modifiers/gptq/helpers.py,
        # accumulate_hessian), without its import.
        wide = math.sqrt(2) * rows.float()
        self.hessian.add_(wide.t().matmul(wide))

    def mean_square(self) -> torch.Tensor:
        return self.hessian.diagonal() / (2 * max(1, self.tokens))


def input_stats(columns: int, device: str, *, paired: bool = False) -> InputStats:
    """Nothing seen yet; `paired`, of the unquantized model neither."""
    import torch

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    cross = zeros(columns, columns) if paired else None
    return InputStats(zeros(columns, columns), zeros(columns), cross=cross)


@dataclass(eq=False)
class Expert:
    """One expert while it is in memory: weights BF16 gate_up [2I, H] and down [H, I], what each saw,
    whether it sees every token, and the sum, over tokens that the router gave it, of the router's weight
    times the L2 norm of its answer, float64."""

    number: int
    gate_up: torch.Tensor
    down: torch.Tensor
    every: bool
    sources: Mapping[str, Sequence[Mapping[str, Any]]]
    inputs: InputStats | None = None
    middle: InputStats | None = None
    weighed: torch.Tensor | None = None


def broadcast_experts(comm: Communicator, source: int, experts: Sequence[Expert]) -> None:
    """Give all processes the weights that experts have in this one, the team's `source`."""
    import torch

    for name in NAMES if experts else ():
        for first, last in _broadcast_together(len(experts), getattr(experts[0], name).nbytes):
            comm.send(torch.stack([getattr(one, name) for one in experts[first:last]]), source)


def receive_experts(
    comm: Communicator, source: int, numbers: Sequence[int], hidden: int, middle: int, device: str
) -> list[Expert]:
    """Experts with the weights that another process lends."""
    import torch

    found: dict[str, list[torch.Tensor]] = {}
    for name, shape in zip(NAMES, ((2 * middle, hidden), (hidden, middle)), strict=True):
        found[name] = []
        for first, last in _broadcast_together(len(numbers), 2 * shape[0] * shape[1]):
            stack = torch.empty(last - first, *shape, dtype=torch.bfloat16, device=device)
            comm.send(stack, source)
            found[name].extend(stack)
    weights = zip(numbers, *found.values(), strict=True)
    return [Expert(number, gate_up, down, False, {}) for number, gate_up, down in weights]


def _broadcast_together(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of matrices of `size` bytes that are sent at once."""
    step = max(1, _LENT // size)
    for first in range(0, count, step):
        yield first, min(first + step, count)


@dataclass(eq=False)
class ExpertSums:
    """Sums that a layer's statistics are made of, by expert."""

    rounded: list[int] = field(default_factory=list)
    fallbacks: list[tuple[int, str]] = field(default_factory=list)
    dead: dict[tuple[int, str], int] = field(default_factory=dict)
    rows: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    weighed: dict[int, float] = field(default_factory=dict)


def joined_sums(parts: Sequence[ExpertSums]) -> ExpertSums:
    """Return what several processes found, each of its own experts."""
    if len(parts) == 1:
        return parts[0]
    found = ExpertSums(sorted({expert for part in parts for expert in part.rounded}))
    for part in parts:
        found.fallbacks += part.fallbacks
        found.dead.update(part.dead)
        found.rows.update(part.rows)
        found.weighed.update(part.weighed)
    return found


@dataclass(frozen=True)
class ExpertQuantizer:
    """Place where some experts of a layer are solved: a device. `weighs`: their answers are measured
    too."""

    device: str
    layer: Layer
    middle: Callable[[torch.Tensor], torch.Tensor]
    targets: Sequence[ExpertSchemes]
    settings: Settings
    weights: Weights
    clock: Clock
    weighs: bool = False

    def take(self, numbers: Sequence[int], matrices: Mapping[tuple[int, str], Projection],
             every: frozenset[int]) -> list[Expert]:  # fmt: skip
        """Read experts."""
        import torch

        with self.clock("read", self.device) as tick, torch.no_grad():
            if self.device != "cpu":
                return self._take_there(numbers, matrices, every, tick)
            found = []
            for number in numbers:
                parts, sources = {}, {}
                for kind in PROJECTIONS:
                    one = matrices[number, kind]
                    parts[kind], sources[kind] = self.weights.matrix(one.module, one.weight)
                gate_up = torch.cat([parts["gate_proj"], parts["up_proj"]])
                down = parts["down_proj"]
                found.append(Expert(number, gate_up, down, number in every, sources))
                tick(2.0 * (gate_up.numel() + down.numel()))
            return found

    def _take_there(self, numbers: Sequence[int], matrices: Mapping[tuple[int, str], Projection],
                    every: frozenset[int], tick: Callable[[float], None]) -> list[Expert]:  # fmt: skip
        """Read experts into an accelerator's memory, each at once where it stays."""
        import torch

        down = matrices[numbers[0], "down_proj"].weight
        hidden, middle = down.rows, down.columns
        stacks = [
            torch.empty(len(numbers), *shape, dtype=torch.bfloat16, device=self.device)
            for shape in ((2 * middle, hidden), (hidden, middle))
        ]
        found = []
        for place, number in enumerate(numbers):
            whole, last = stacks[0][place], stacks[1][place]
            into = dict(zip(PROJECTIONS, (whole[:middle], whole[middle:], last), strict=True))
            sources = {
                kind: self.weights.into(into[kind], one.module, one.weight)
                for kind in PROJECTIONS
                for one in (matrices[number, kind],)
            }
            found.append(Expert(number, whole, last, number in every, sources))
            tick(2.0 * (whole.numel() + last.numel()))
        # One after the other: what that makes is two and a half times what it looks at.
        finite = [part.isfinite().all() for stack in stacks for part in stack]
        if not bool(torch.stack(finite).all()):
            self._refuse(numbers, matrices)
        return found

    def _refuse(
        self, numbers: Sequence[int], matrices: Mapping[tuple[int, str], Projection]
    ) -> None:
        """Say which matrix holds what is no number: as it is read on a CPU."""
        for number in numbers:
            for kind in PROJECTIONS:
                self.weights.matrix(matrices[number, kind].module, matrices[number, kind].weight)
        raise RunError(
            f"experts {numbers[0]} to {numbers[-1]} of layer {self.layer.number} hold NaN or infinity "
            f"on {self.device}, and none as they are read: its memory is broken"
        )

    def accumulate(
        self, experts: Sequence[Expert], routed: RoutedInputs, shared: InputStats | None,
        names: Sequence[str] = NAMES, plain: UnquantizedInputs | None = None,
    ) -> None:  # fmt: skip
        """Let experts see their tokens, and count what goes into each matrix of these names. `shared` is
        what those that see every token have in common. `plain` is the unquantized model, to be counted
        beside."""
        import torch

        with self.clock("hessian", self.device) as tick, torch.no_grad():
            into, paired = "gate_up" in names, plain is not None
            each = 0.0
            if experts:
                sides = experts[0].gate_up.shape[1], experts[0].down.shape[1]
                each = accumulation_cost(*sides, into=into, down="down" in names, paired=paired)
            for expert in experts:
                hidden, middle = expert.gate_up.shape[1], expert.down.shape[1]
                if into:
                    every = expert.every
                    expert.inputs = (
                        shared if every else input_stats(hidden, self.device, paired=paired)
                    )
                if into and self.weighs:
                    expert.weighed = torch.zeros((), dtype=torch.float64, device=self.device)
                if "down" in names:
                    expert.middle = input_stats(middle, self.device, paired=paired)
            if experts and into:
                self.check(experts[0], routed)
            given = [routed.experts, routed.weights, routed.inputs]
            if plain is not None:
                given.append(plain.inputs)
            for routes, shares, *both in prefetched(given, routed.chunks, self.device):
                slots = dispatch_of(routes, shares, len(routed.counts))
                for number, expert in enumerate(experts):
                    tokens = None if expert.every else slots.of(expert.number)
                    if into and self.weighs:
                        self._weigh(expert, both[0], slots)
                    for count, (mine, *theirs) in self._looked(tokens, both):
                        other = theirs[0] if theirs else None
                        if expert.inputs is not None and into and not expert.every:
                            expert.inputs.add(mine, other, count)
                        if expert.middle is not None:
                            if plain is not None and other is not None:
                                other = self._middle(plain.experts[number], other)
                                other[count:] = 0
                            within = self._middle(expert, mine)
                            within[count:] = 0
                            expert.middle.add(within, other, count)
                        tick(each * count)

    def _weigh(self, expert: Expert, inputs: torch.Tensor, slots: TokenDispatch) -> None:
        """Add the norms of what an expert answers to the tokens that the router gave it, each times the
        router's weight."""
        import torch

        assert expert.weighed is not None
        at = slots.starts[expert.number]
        for count, (rows,) in self._looked(slots.of(expert.number), [inputs]):
            made = linear(self._middle(expert, rows), expert.down)[:count]
            norms = torch.linalg.vector_norm(made, dim=1, dtype=torch.float32)
            weights = slots.weights[at : at + count]
            expert.weighed += (norms.double() * weights.double()).sum()
            at += count

    def check(self, expert: Expert, routed: RoutedInputs) -> None:
        """That the class's own experts answer what `answer` computes."""

        rows = routed.inputs.read(0, min(_CHECKED, routed.chunks[0][1])).to(self.device)
        made = linear(self._middle(expert, rows), expert.down)
        self.layer.check(made, rows, expert.gate_up, expert.down)

    def accumulate_all(
        self, routed: RoutedInputs, columns: int, plain: TokenRows | None = None
    ) -> InputStats:
        """Return what an expert sees that sees every token; `plain` is what goes into the unquantized
        one."""
        with self.clock("hessian", self.device):
            found = input_stats(columns, self.device, paired=plain is not None)
            given = [routed.inputs] if plain is None else [routed.inputs, plain]
            for both in prefetched(given, routed.chunks, self.device):
                for count, (mine, *theirs) in self._looked(None, both):
                    found.add(mine, theirs[0] if theirs else None, count)
            return found

    def quantize(self, experts: Sequence[Expert], calls: int, found: ExpertSums,
                 names: Sequence[str] = NAMES) -> Iterator[Matrix]:  # fmt: skip
        """Solve for codes of the matrices of these names, and put what the first target's mean in the
        place of the weights. `calls` is what llm-compressor divides Hessians by: how often each was
        added to."""
        with self.clock("solve", self.device):
            for expert in experts:
                self._note(expert, found, names)
                if expert.weighed is not None:
                    found.weighed[expert.number] = float(expert.weighed)
        for name in names if self.targets else ():
            todo = [e for e in experts if e.number not in found.rounded]
            for batch in self._batches(todo, name):
                for expert, made in zip(batch, self._solve(batch, name, calls, found), strict=True):
                    yield from self._matrices(expert, name, made)
            for expert in experts:
                if expert.number in found.rounded:
                    yield from self._matrices(expert, name, self._round(expert, name))

    def answer(
        self, experts: Sequence[Expert], rows: torch.Tensor, inputs: torch.Tensor, slots: TokenDispatch,
        tick: Callable[[float], None],
    ) -> None:  # fmt: skip
        """Add to `rows` [T, H] what experts answer to tokens with these inputs [T, H], in the order of
        their numbers, each weighted by the router. `tick` is of a clock for "forward"."""
        import torch

        if not experts:
            return
        (width, hidden), middle = experts[0].gate_up.shape, experts[0].down.shape[1]
        a_slot = 2 * (2 * hidden + 2 * width + middle)
        most = 1 if self.device == "cpu" else _ANSWERED // a_slot
        with torch.no_grad():
            for run in slots.runs([expert.number for expert in experts], most):
                first, last = run[0][1], run[-1][2]
                parts = [
                    (experts[place], slice(begin - first, begin - first + self._tall(end - begin)))
                    for place, begin, end in run
                ]
                # A product's rows beyond an expert's own are the next one's, made after it; beyond the
                # last one's they hold anything, and nobody reads them.
                made = inputs.new_empty(parts[-1][1].stop, hidden)
                torch.index_select(inputs, 0, slots.tokens[first:last], out=made[: last - first])
                both = made.new_empty(made.shape[0], width)
                for expert, part in parts:
                    linear(made[part], expert.gate_up, both[part])
                both = self.middle(both)
                for expert, part in parts:
                    linear(both[part], expert.down, made[part])
                add_answers(rows, made[: last - first], slots, first)
                tick(float(last - first) * 3 * hidden * middle)

    def _tall(self, count: int) -> int:
        """Rows that a product of so many has on this device."""
        return count if self.device == "cpu" else -(-count // _TALL) * _TALL

    def _looked(
        self, tokens: torch.Tensor | None, streams: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """Rows of some tokens, None for all, that are looked at together: how many, and those of each
        stream, then zeros up to what a product has."""
        import torch

        whole = streams[0].shape[0] if tokens is None else tokens.shape[0]
        step = max(1, whole) if self.device == "cpu" else tokens_together(streams[0].shape[1])
        for start in range(0, whole, step):
            count = min(step, whole - start)
            if tokens is None:
                yield count, [rows[start : start + count] for rows in streams]
                continue
            found = [rows.new_empty(self._tall(count), rows.shape[1]) for rows in streams]
            for rows, into in zip(streams, found, strict=True):
                torch.index_select(rows, 0, tokens[start : start + count], out=into[:count])
                into[count:] = 0
            yield count, found

    def _middle(self, expert: Expert, rows: torch.Tensor) -> torch.Tensor:
        """Return what goes into down_proj, as the class makes it of gate and up."""

        return self.middle(linear(rows, expert.gate_up))

    def _note(self, expert: Expert, found: ExpertSums, names: Sequence[str]) -> None:
        silent = False
        for name in names:
            inputs = _sums(expert, name)
            square, most = inputs.mean_square().cpu(), inputs.absmax.cpu()
            found.rows[expert.number, name] = square.numpy(), most.numpy()
            dead = int((square == 0).sum())
            silent = silent or dead == square.numel()
            for kind in () if expert.number in found.rounded else _kinds(name):
                found.dead[expert.number, kind] = dead
        # An all-zero Hessian is a weight of zeros to the solver, which says nothing of it.
        if silent and expert.number not in found.rounded:
            found.rounded.append(expert.number)

    def _batches(self, experts: Sequence[Expert], name: str) -> Iterator[Sequence[Expert]]:
        """Experts that are solved together: always the same, of however many processes, because a GPU
        adds up otherwise where there are more."""
        # On a CPU one by one, as llm-compressor does there.
        size = 1
        if experts and self.device != "cpu":
            columns = getattr(experts[0], name).shape[1]
            size = solved_together(self.settings.together, columns)
        for _, batch in groupby(experts, lambda expert: expert.number // size):
            yield list(batch)

    def _solve(
        self, batch: Sequence[Expert], name: str, calls: int, found: ExpertSums
    ) -> list[list[Quantized]]:
        """For each expert its results for each target. What propagated errors are corrected by is of
        the first target alone, whose answers go on: one calibration has one quantized stream."""
        import torch

        weights = [getattr(expert, name) for expert in batch]
        made: list[list[Quantized]] = [[] for _ in batch]
        kinds = _kinds(name)
        cost = sum(matrix_cost(*weight.shape) for weight in weights)
        with self.clock("solve", self.device) as tick, torch.no_grad():
            goals = self._goals(batch, name)
            for target in self.targets:
                stacked = torch.stack([_sums(e, name).hessian for e in batch]).div_(calls)
                results, failed = solved(goals, stacked, target.scheme(kinds[0]), self.settings)
                for number, (expert, result) in enumerate(zip(batch, results, strict=True)):
                    if failed[number]:
                        found.fallbacks += [(expert.number, kind) for kind in kinds]
                        if goals[number] is not weights[number]:
                            result = rounded(
                                weights[number], target.scheme(kinds[0]), self.settings
                            )
                    made[number].append(result)
                tick(cost)
        return made

    def _goals(self, batch: Sequence[Expert], name: str) -> list[torch.Tensor]:
        """Return what matrices are solved against: their weights, or what also corrects propagated
        errors."""
        weights: list[torch.Tensor] = [getattr(expert, name) for expert in batch]
        sums = [_sums(expert, name) for expert in batch]
        crosses = [one.cross for one in sums if one.cross is not None]
        if len(crosses) < len(batch):
            return weights
        hessians = [one.hessian for one in sums]
        if self.device != "cpu":
            return corrected_together(weights, hessians, crosses)
        return [corrected(*each) for each in zip(weights, hessians, crosses, strict=True)]

    def _round(self, expert: Expert, name: str) -> list[Quantized]:
        import torch

        weight, kind = getattr(expert, name), _kinds(name)[0]
        with self.clock("solve", self.device), torch.no_grad():
            return [rounded(weight, target.scheme(kind), self.settings) for target in self.targets]

    def _matrices(self, expert: Expert, name: str, made: Sequence[Quantized]) -> Iterator[Matrix]:
        kinds = _kinds(name)
        height = getattr(expert, name).shape[0] // len(kinds)
        whole = [one.numpy() for one in made]
        for number, kind in enumerate(kinds):
            codes = [_rows(one, number * height, (number + 1) * height) for one in whole]
            yield Matrix(self.layer.number, expert.number, kind, codes, expert.sources[kind])
        if self.device != "cpu" and not self.settings.corrects:
            getattr(expert, name).copy_(made[0].weight)  # a part of a stack, which it would keep
        else:
            setattr(expert, name, made[0].weight)


def _rows(codes: Codes, start: int, stop: int) -> Codes:
    zero = None if codes.zero is None else codes.zero[start:stop]
    return replace(codes, codes=codes.codes[start:stop], scale=codes.scale[start:stop], zero=zero)


def _kinds(name: str) -> tuple[str, ...]:
    return PROJECTIONS[:2] if name == "gate_up" else PROJECTIONS[2:]


def _sums(expert: Expert, name: str) -> InputStats:
    found = expert.inputs if name == "gate_up" else expert.middle
    assert found is not None
    return found
