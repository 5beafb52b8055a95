"""Logits of two models compared, a slice of the vocabulary at a time.

For each token sums over the slices are kept, so that no row of logits is ever whole: of exp(l - m) for
both models and of exp(l_s - m_s) (l_s - l_r), with m the largest logit so far, by which they are scaled
anew as it grows (as in "Online normalizer calculation for softmax", Milakov and Gimelshein, 2018).
Logits are float32 products of BF16 numbers, sums are float64, slices of 2048 rows in ascending order:
the memory given changes no figure but by what a matrix product's own order does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.calibrate.activation_store import InFile
from qconvert.evaluate.memory import CHUNK, SLICE
from qconvert.evaluate.side import LoadedSide

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Scores:
    """Of each token that predicts one, float64 [P] in nats: KL(SRC || REPO), the negative log likelihood
    of what follows under SRC and REPO; and whether both prefer the same token, bool [P]."""

    kl: torch.Tensor
    source: torch.Tensor
    repo: torch.Tensor
    agree: torch.Tensor


class _Softmax:
    """Sums over the logits of one model, for some tokens."""

    def __init__(self, count: int, device: str) -> None:
        import torch

        self.total = torch.zeros(count, dtype=torch.float64, device=device)
        self.most = self.total - torch.inf
        self.best = torch.zeros(count, dtype=torch.int64, device=device)
        self.target = torch.zeros_like(self.total)

    def add(self, logits: torch.Tensor, first: int, targets: torch.Tensor) -> torch.Tensor:
        """Count in logits float64 [P, v] of the ids from `first` on. Returns exp(old - new largest)
        [P]."""
        import torch

        most, place = logits.max(1)
        # The first of equal ones: a later slice's must be larger.
        self.best = torch.where(most > self.most, place + first, self.best)
        new = torch.maximum(self.most, most)
        scale: torch.Tensor = torch.exp(self.most - new)
        self.total = self.total * scale + torch.exp(logits - new[:, None]).sum(1)
        self.most = new
        inside = (targets >= first) & (targets < first + logits.shape[1])
        at = (targets - first).clamp(0, logits.shape[1] - 1)
        found = logits.gather(1, at[:, None])[:, 0]
        self.target = torch.where(inside, found, self.target)
        return scale

    @property
    def log(self) -> torch.Tensor:
        """The logarithm of the sum of exp(logits)."""
        return self.most + self.total.log()


class _Pair:
    """Sums over the logits of both models, for some tokens."""

    def __init__(self, targets: torch.Tensor, device: str) -> None:
        import torch

        count = targets.shape[0]
        self.targets = targets.to(device)
        self.source, self.repo = _Softmax(count, device), _Softmax(count, device)
        self.apart = torch.zeros(count, dtype=torch.float64, device=device)

    def add(self, source: torch.Tensor, repo: torch.Tensor, first: int) -> None:
        import torch

        scale = self.source.add(source, first, self.targets)
        self.repo.add(repo, first, self.targets)
        shares = torch.exp(source - self.source.most[:, None])
        self.apart = self.apart * scale + (shares * (source - repo)).sum(1)

    def scores(self) -> Scores:
        kl = self.apart / self.source.total - (self.source.log - self.repo.log)
        return Scores(
            # Rounding can make a zero negative.
            kl.clamp(min=0).cpu(),
            (self.source.log - self.source.target).cpu(),
            (self.repo.log - self.repo.target).cpu(),
            (self.source.best == self.repo.best).cpu(),
        )


def scored(
    source: tuple[LoadedSide, InFile],
    repo: tuple[LoadedSide, InFile],
    targets: torch.Tensor,
    together: int,
) -> Scores:
    """Scores of tokens whose final hidden states [P, H] are in two files, and which are followed by
    `targets` int64 [P]. `together` tokens are in memory while both heads are read once."""
    import torch

    device = source[0].layers.device
    parts: list[Scores] = []
    with torch.no_grad():
        for start in range(0, targets.shape[0], together):
            stop = min(start + together, targets.shape[0])
            states = [file.read(start, stop).to(device).float() for _, file in (source, repo)]
            pairs = [
                _Pair(targets[at : min(at + CHUNK, stop)], device)
                for at in range(start, stop, CHUNK)
            ]
            rows = source[0].side.model.head.rows
            for first in range(0, rows, SLICE):
                last = min(first + SLICE, rows)
                slices = [
                    one.side.model.head.slice(first, last, one.weights, device)
                    for one, _ in (source, repo)
                ]
                for number, pair in enumerate(pairs):
                    at = slice(number * CHUNK, (number + 1) * CHUNK)
                    made = [
                        _logits(one, hidden[at], weight)
                        for (one, _), hidden, weight in zip(
                            (source, repo), states, slices, strict=True
                        )
                    ]
                    pair.add(made[0], made[1], first)
            parts += [pair.scores() for pair in pairs]
            del states, pairs
    return joined(parts)


def joined(parts: Sequence[Scores]) -> Scores:
    """Scores of some tokens after those of others."""
    import torch

    columns = [(part.kl, part.source, part.repo, part.agree) for part in parts]
    return Scores(*(torch.cat(column) for column in zip(*columns, strict=True)))


def _logits(opened: LoadedSide, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits float64 [P, v] of hidden states and rows of the head, both float32."""
    logits = hidden @ weight.T
    model = opened.side.model
    return (model.shaped(logits) if model.shapes else logits).double()
