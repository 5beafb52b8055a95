"""Logits of a model and of others, a slice of the vocabulary at a time, and the memory of an evaluation.

For each token sums over the slices are kept, so that no row of logits is ever whole: of exp(l - m) for
each model and of exp(l_s - m_s) (l_s - l_r) for each other, with m the largest logit so far, by which
they are scaled anew as it grows (as in "Online normalizer calculation for softmax", Milakov and
Gimelshein, 2018).
Logits are float32 products of BF16 numbers, sums are float64, slices of 2048 rows in ascending order:
the memory given changes no figure but by what a matrix product's own order does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import starmap
from typing import TYPE_CHECKING, Generic, TypeVar

from qconvert.calibrate.activation_store import InFile
from qconvert.calibrate.memory import resident
from qconvert.core.errors import RunError
from qconvert.evaluate.side import LoadedSide

if TYPE_CHECKING:
    import torch


_MACHINE = 0.75  # of the machine's memory, where the user gives no number
_SLACK = 160 << 20  # what libraries take once they compute: threads, kernels, free lists
_DEVICE = 0.5  # of an accelerator's memory, for experts
# Rows of the head, and tokens, whose logits are in memory at a time: 8 MiB in float64 each.
SLICE, CHUNK = 2048, 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of a side, of the largest of several. Bytes: `layer` without routed experts, its largest
    `parameter`. Numbers: `hidden` and `middle` sizes of an expert (`middle` 0: a dense model), `widest`
    output of a linear layer, tokens of the `longest` sample, `models` that are run together."""

    layer: int
    parameter: int
    hidden: int
    middle: int
    widest: int
    longest: int
    models: int

    @property
    def expert(self) -> int:
        """One expert in BF16."""
        return 3 * self.hidden * self.middle * 2

    @property
    def one_layer(self) -> int:
        """A layer at work without its experts: weights, one of them being decoded, a sample's tokens."""
        passing = self.longest * (
            24 * self.hidden + 12 * (self.hidden + self.middle) + 12 * self.widest
        )
        # gate and up are put together, and a matrix is decoded through float32.
        decoding = max(4 * self.parameter, 14 * self.hidden * self.middle)
        return self.layer + decoding + passing + 8 * self.longest * self.longest

    def head(self, tokens: int) -> int:
        """Logits of two models at a time, of a slice of all, for hidden states of so many tokens."""
        slices = self.models * SLICE * self.hidden * (2 + 4)
        return slices + 8 * CHUNK * SLICE * 10 + self.models * tokens * self.hidden * 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: `memory` for the whole process, `base` what it took before."""

    memory: int
    base: int
    sizes: Sizes

    @classmethod
    def of(cls, memory: int | None, sizes: Sizes) -> Budget:
        """Raises RunError where a layer with one expert does not fit, or a slice of the logits, with the
        smallest number that is enough."""
        base = resident() + _SLACK
        if memory is None:
            memory = int(_MACHINE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        work = max(sizes.one_layer + sizes.expert, sizes.head(CHUNK))
        if base + work > memory:
            need = ((base + work) >> 20) + 16
            raise RunError(
                f"one decoder layer with an expert, or a slice of the logits, needs {work >> 20} MiB, "
                f"and libraries {base >> 20} MiB, more than this run may take; give --memory {need}MiB"
            )
        return cls(memory, base, sizes)

    def experts(self, device: str) -> int:
        """Return how many experts are in memory together."""
        if not self.sizes.expert:
            return 0
        if device != "cpu":
            import torch

            total = torch.cuda.get_device_properties(device).total_memory
            return max(1, int(_DEVICE * total) // self.sizes.expert)
        return max(1, (self.memory - self.base - self.sizes.one_layer) // self.sizes.expert)

    def tokens(self) -> int:
        """Return how many tokens' hidden states are in memory while the head is read once."""
        left = self.memory - self.base - self.sizes.head(0)
        return max(CHUNK, left // (self.sizes.models * self.sizes.hidden * 4) // CHUNK * CHUNK)


@dataclass(frozen=True)
class Scores:
    """Of each token that predicts one, float64 [P] in nats: KL(SRC || REPO), the negative log likelihood
    of what follows under SRC and REPO; and, bool [P], whether both prefer the same token, and whether
    what follows is the one that SRC and REPO prefer."""

    kl: torch.Tensor
    source: torch.Tensor
    repo: torch.Tensor
    agree: torch.Tensor
    source_first: torch.Tensor
    repo_first: torch.Tensor


class _Sum:
    """Sum of exp(logits - the largest) for some tokens, float64."""

    def __init__(self, count: int, device: torch.device | str) -> None:
        import torch

        self.total = torch.zeros(count, dtype=torch.float64, device=device)
        self.most = self.total - torch.inf

    def add(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Count in logits float64 [P, v] of the ids from `first` on. Returns exp(old - new largest)
        [P]."""
        import torch

        new = torch.maximum(self.most, logits.max(1).values)
        scale: torch.Tensor = torch.exp(self.most - new)
        self.total = self.total * scale + torch.exp(logits - new[:, None]).sum(1)
        self.most = new
        return scale

    @property
    def log(self) -> torch.Tensor:
        """The logarithm of the sum of exp(logits)."""
        return self.most + self.total.log()


class _Softmax(_Sum):
    """Sums over the logits of one model, for some tokens; and the logits of `targets` int64 [P, K], 0
    where an id is none."""

    def __init__(self, targets: torch.Tensor) -> None:
        import torch

        super().__init__(targets.shape[0], targets.device)
        self.targets = targets
        self.best = torch.zeros_like(targets[:, 0])
        self.target = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)

    def add(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        import torch

        most, place = logits.max(1)
        # The first of equal ones: a later slice's must be larger.
        self.best = torch.where(most > self.most, place + first, self.best)
        inside = (self.targets >= first) & (self.targets < first + logits.shape[1])
        at = (self.targets - first).clamp(0, logits.shape[1] - 1)
        self.target = torch.where(inside, logits.gather(1, at), self.target)
        return super().add(logits, first)


Kept = TypeVar("Kept", bound=_Sum)


class _Apart(Generic[Kept]):
    """Sums over the logits of a model and of others, for some tokens."""

    def __init__(self, source: Kept, others: Sequence[Kept]) -> None:
        import torch

        self.source, self.others = source, others
        self.apart = [torch.zeros_like(source.total) for _ in others]

    def add(self, source: torch.Tensor, others: Iterable[torch.Tensor], first: int) -> None:
        """Count in logits float64 [P, v] of the ids from `first` on."""
        import torch

        scale = self.source.add(source, first)
        shares = torch.exp(source - self.source.most[:, None])
        for number, (other, logits) in enumerate(zip(self.others, others, strict=True)):
            other.add(logits, first)
            self.apart[number] = self.apart[number] * scale + (shares * (source - logits)).sum(1)

    def divergences(self) -> list[torch.Tensor]:
        """KL(model || other) of each other, float64 [P] in nats."""
        return [
            # Rounding can make a zero negative.
            (apart / self.source.total - (self.source.log - other.log)).clamp(min=0)
            for apart, other in zip(self.apart, self.others, strict=True)
        ]


def _scores(sums: _Apart[_Softmax]) -> list[Scores]:
    """Scores of each of the others."""
    source = sums.source
    return [
        Scores(
            kl.cpu(),
            (source.log - source.target[:, 0]).cpu(),
            (repo.log - repo.target[:, 0]).cpu(),
            (source.best == repo.best).cpu(),
            (source.best == source.targets[:, 0]).cpu(),
            (repo.best == repo.targets[:, 0]).cpu(),
        )
        for kl, repo in zip(sums.divergences(), sums.others, strict=True)
    ]


def scored(
    models: Sequence[tuple[LoadedSide, InFile]], targets: torch.Tensor, together: int
) -> list[Scores]:
    """Scores of each model but the first, the source, for tokens whose final hidden states [P, H] are in
    a file of each, and which are followed by `targets` int64 [P]. `together` tokens are in memory while
    all heads are read once."""
    device = models[0][0].layers.device
    parts: list[list[Scores]] = []
    for start in range(0, targets.shape[0], together):
        stop = min(start + together, targets.shape[0])
        found = []
        for at in range(start, stop, CHUNK):
            there = targets[at : min(at + CHUNK, stop)].to(device)[:, None]
            found.append(_Apart(_Softmax(there), [_Softmax(there) for _ in models[1:]]))
        for number, first, made in _logits_of(models, start, stop):
            found[number].add(next(made), made, first)
        parts += map(_scores, found)
    return [joined(column) for column in zip(*parts, strict=True)]


def predicted(
    models: Sequence[tuple[LoadedSide, InFile]], ids: torch.Tensor, together: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each model the log-probabilities float64 [P, K] of ids int64 [P, K] (-1: none, any number), and
    the id that it prefers [P] with its own [P], after tokens whose final hidden states [P, H] are in a
    file; `together` as in `scored`."""
    import torch

    device = models[0][0].layers.device
    parts: list[list[_Softmax]] = []
    for start in range(0, ids.shape[0], together):
        stop = min(start + together, ids.shape[0])
        chunks = [ids[at : min(at + CHUNK, stop)].to(device) for at in range(start, stop, CHUNK)]
        found = [[_Softmax(chunk) for _ in models] for chunk in chunks]
        for number, first, made in _logits_of(models, start, stop):
            for sums, logits in zip(found[number], made, strict=True):
                sums.add(logits, first)
        parts += found
    return [
        (
            torch.cat([(one[n].target - one[n].log[:, None]).cpu() for one in parts]),
            torch.cat([one[n].best.cpu() for one in parts]),
            torch.cat([(one[n].most - one[n].log).cpu() for one in parts]),
        )
        for n in range(len(models))
    ]


def _logits_of(
    models: Sequence[tuple[LoadedSide, InFile]], start: int, stop: int
) -> Iterator[tuple[int, int, Iterator[torch.Tensor]]]:
    """Logits of each model, float64 [P, v], of a chunk of the tokens [start, stop) and a slice of the
    vocabulary: the chunk's number, the slice's first id, and the logits, made as they are asked for."""
    device = models[0][0].layers.device
    states = [file.read(start, stop).to(device).float() for _, file in models]
    rows = models[0][0].side.model.head.rows
    for first in range(0, rows, SLICE):
        last = min(first + SLICE, rows)
        slices = [one.side.model.head.slice(first, last, one.weights, device) for one, _ in models]
        for number, at in enumerate(range(0, stop - start, CHUNK)):
            hidden = (one[at : at + CHUNK] for one in states)
            sides = zip((one for one, _ in models), hidden, slices, strict=True)
            yield number, first, starmap(_logits, sides)


def divergences(
    opened: LoadedSide, clean: InFile, others: Sequence[InFile], together: int
) -> list[float]:
    """KL(clean || other) in nats a token, of other hidden states of the same model, files [P, H] each:
    the head is read once for `together` tokens of all, and the clean logits are computed once."""
    import torch

    device, rows = opened.layers.device, opened.side.model.head.rows
    count = clean.rows
    found = [0.0] * len(others)
    step = max(1, min(CHUNK, together // (1 + len(others))))
    with torch.no_grad():
        for start in range(0, count, step):
            stop = min(start + step, count)
            states = [file.read(start, stop).to(device).float() for file in (clean, *others)]
            clear, *sums = (_Sum(stop - start, device) for _ in states)
            apart = _Apart(clear, sums)
            for first in range(0, rows, SLICE):
                weight = opened.side.model.head.slice(
                    first, min(first + SLICE, rows), opened.weights, device
                )
                made = (_logits(opened, state, weight) for state in states)
                apart.add(next(made), made, first)
            for number, kl in enumerate(apart.divergences()):
                found[number] += float(kl.sum()) / count
    return found


def joined(parts: Sequence[Scores]) -> Scores:
    """Scores of some tokens after those of others."""
    import torch

    names = [one.name for one in fields(Scores)]
    return Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _logits(opened: LoadedSide, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits float64 [P, v] of hidden states and rows of the head, both float32."""
    logits = hidden @ weight.T
    model = opened.side.model
    return (model.shaped(logits) if model.shapes else logits).double()
