"""Logits of two models compared, a slice of the vocabulary at a time, and the memory of an evaluation.

For each token sums over the slices are kept, so that no row of logits is ever whole: of exp(l - m) for
both models and of exp(l_s - m_s) (l_s - l_r), with m the largest logit so far, by which they are scaled
anew as it grows (as in "Online normalizer calculation for softmax", Milakov and Gimelshein, 2018).
Logits are float32 products of BF16 numbers, sums are float64, slices of 2048 rows in ascending order:
the memory given changes no figure but by what a matrix product's own order does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

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
    """Memory of a side, of the larger one of both. Bytes: `layer` without routed experts, its largest
    `parameter`. Numbers: `hidden` and `middle` sizes of an expert (`middle` 0: a dense model), `widest`
    output of a linear layer, tokens of the `longest` sample."""

    layer: int
    parameter: int
    hidden: int
    middle: int
    widest: int
    longest: int

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
        """Logits of a slice of both models, for hidden states of so many tokens."""
        slices = 2 * SLICE * self.hidden * (2 + 4)
        return slices + 8 * CHUNK * SLICE * 10 + 2 * tokens * self.hidden * 4


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
        return max(CHUNK, left // (2 * self.sizes.hidden * 4) // CHUNK * CHUNK)


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

    def add(self, logits: torch.Tensor) -> torch.Tensor:
        """Count in logits float64 [P, v]. Returns exp(old - new largest) [P]."""
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

    def add_from(self, logits: torch.Tensor, first: int) -> torch.Tensor:
        """Count in logits float64 [P, v] of the ids from `first` on. Returns exp(old - new largest)
        [P]."""
        import torch

        most, place = logits.max(1)
        # The first of equal ones: a later slice's must be larger.
        self.best = torch.where(most > self.most, place + first, self.best)
        inside = (self.targets >= first) & (self.targets < first + logits.shape[1])
        at = (self.targets - first).clamp(0, logits.shape[1] - 1)
        self.target = torch.where(inside, logits.gather(1, at), self.target)
        return self.add(logits)


class _Pair:
    """Sums over the logits of both models, for some tokens."""

    def __init__(self, targets: torch.Tensor, device: str) -> None:
        import torch

        there = targets.to(device)[:, None]
        self.source, self.repo = _Softmax(there), _Softmax(there)
        self.apart = torch.zeros(targets.shape[0], dtype=torch.float64, device=device)

    def add(self, source: torch.Tensor, repo: torch.Tensor, first: int) -> None:
        import torch

        scale = self.source.add_from(source, first)
        self.repo.add_from(repo, first)
        shares = torch.exp(source - self.source.most[:, None])
        self.apart = self.apart * scale + (shares * (source - repo)).sum(1)

    def scores(self) -> Scores:
        kl = self.apart / self.source.total - (self.source.log - self.repo.log)
        return Scores(
            # Rounding can make a zero negative.
            kl.clamp(min=0).cpu(),
            (self.source.log - self.source.target[:, 0]).cpu(),
            (self.repo.log - self.repo.target[:, 0]).cpu(),
            (self.source.best == self.repo.best).cpu(),
            (self.source.best == self.source.targets[:, 0]).cpu(),
            (self.repo.best == self.repo.targets[:, 0]).cpu(),
        )


def scored(
    source: tuple[LoadedSide, InFile],
    repo: tuple[LoadedSide, InFile],
    targets: torch.Tensor,
    together: int,
) -> Scores:
    """Scores of tokens whose final hidden states [P, H] are in two files, and which are followed by
    `targets` int64 [P]. `together` tokens are in memory while both heads are read once."""
    device = source[0].layers.device
    parts: list[Scores] = []
    for start in range(0, targets.shape[0], together):
        stop = min(start + together, targets.shape[0])
        pairs = [
            _Pair(targets[at : min(at + CHUNK, stop)], device) for at in range(start, stop, CHUNK)
        ]
        for number, first, made in _logits_of((source, repo), start, stop):
            pairs[number].add(made[0], made[1], first)
        parts += [pair.scores() for pair in pairs]
    return joined(parts)


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
                sums.add_from(logits, first)
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
) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Logits of each model, float64 [P, v], of a chunk of the tokens [start, stop) and a slice of the
    vocabulary: the chunk's number, the slice's first id, and the logits."""
    device = models[0][0].layers.device
    states = [file.read(start, stop).to(device).float() for _, file in models]
    rows = models[0][0].side.model.head.rows
    for first in range(0, rows, SLICE):
        last = min(first + SLICE, rows)
        slices = [one.side.model.head.slice(first, last, one.weights, device) for one, _ in models]
        for number, at in enumerate(range(0, stop - start, CHUNK)):
            made = [
                _logits(one, hidden[at : at + CHUNK], weight)
                for (one, _), hidden, weight in zip(models, states, slices, strict=True)
            ]
            yield number, first, made


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
            sums = [_Sum(stop - start, device) for _ in states]
            apart = torch.zeros(len(others), stop - start, dtype=torch.float64, device=device)
            for first in range(0, rows, SLICE):
                weight = opened.side.model.head.slice(
                    first, min(first + SLICE, rows), opened.weights, device
                )
                source = _logits(opened, states[0], weight)
                scale = sums[0].add(source)
                shares = torch.exp(source - sums[0].most[:, None])
                for number, state in enumerate(states[1:]):
                    logits = _logits(opened, state, weight)
                    sums[number + 1].add(logits)
                    apart[number] = apart[number] * scale + (shares * (source - logits)).sum(1)
            for number, one in enumerate(sums[1:]):
                kl = apart[number] / sums[0].total - (sums[0].log - one.log)
                found[number] += float(kl.clamp(min=0).sum()) / count
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
