"""Dispatch of tokens to a layer's experts, and what they answer added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from qconvert.calibrate.kernel_choice import by_triton

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class TokenDispatch:
    """Each token and each expert that the router gives it is a slot: of T tokens with k experts each
    T k slots, in the order of experts, of one expert by place among the k and then by token, as
    llm-compressor orders them. `tokens` int64 [T k] and `weights` [T k] are the slots'; expert e has
    those from starts[e] to starts[e + 1]. `order` int64 [T k]: place times T plus token of each; `total`
    is T."""

    tokens: torch.Tensor
    weights: torch.Tensor
    starts: Sequence[int]
    order: torch.Tensor
    total: int

    @cached_property
    def of_token(self) -> torch.Tensor:
        """The slots of each token, int64 [T, k], ascending."""
        import torch

        found = torch.empty_like(self.order)
        found[self.order] = torch.arange(self.order.shape[0], device=found.device)
        return found.view(-1, self.total).t().sort(dim=1).values.contiguous()

    def of(self, expert: int) -> torch.Tensor:
        """The tokens of an expert."""
        return self.tokens[self.starts[expert] : self.starts[expert + 1]]

    def runs(self, experts: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
        """Experts, ascending, some at a time: neighbours with no more slots than `most`, or one. Of
        each its place in `experts`, and where its slots begin and end; without those that have none."""
        run: list[tuple[int, int, int]] = []
        for place, expert in enumerate(experts):
            start, stop = self.starts[expert], self.starts[expert + 1]
            if start == stop:
                continue
            if run and (run[-1][2] != start or stop - run[0][1] > most):
                yield run
                run = []
            run.append((place, start, stop))
        if run:
            yield run


def dispatch_of(routes: torch.Tensor, weights: torch.Tensor, experts: int) -> TokenDispatch:
    """Of routes int32 [T, k], the experts of each token, and the router's weights [T, k]."""
    import torch

    tokens = routes.shape[0]
    flat = routes.t().reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts).tolist()
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return TokenDispatch(order % tokens, weights.t().reshape(-1)[order], starts, order, tokens)


def add_answers(
    rows: torch.Tensor, answers: torch.Tensor, slots: TokenDispatch, start: int
) -> None:
    """Add to rows [T, H] what experts answer in the slots from `start` on, [S, H], each weighted by the
    router. Products are rounded to the rows' dtype, and so is each sum, in the order of slots: as
    transformers' own experts do it, one after the other."""
    import torch

    if rows.dtype == torch.bfloat16 and by_triton(rows):  # in float32 a measurement runs (`fit`)
        from qconvert.calibrate import triton_kernels as kernel

        kernel.add_answers(rows, answers, slots.of_token, slots.weights, start)
        return
    stop = start + answers.shape[0]
    for first, last in pairwise(_cuts(slots.starts, start, stop)):
        some = slice(first - start, last - start)
        weighted = answers[some] * slots.weights[first:last, None]
        rows.index_add_(0, slots.tokens[first:last], weighted.to(rows.dtype))


def _cuts(starts: Sequence[int], start: int, stop: int) -> list[int]:
    """Return where experts' slots begin within [start, stop], and its end."""
    return sorted({start, stop, *(at for at in starts if start < at < stop)})
