"""Which tokens experts get, and the sum of what they answer, against torch.where of the mask that
transformers makes, and against sums that are written out."""

from __future__ import annotations

import pytest
import torch

from qconvert.calibrate.token_dispatch import TokenDispatch, add_answers, dispatch_of


def routed(tokens: int, experts: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    some = [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    return torch.stack(some).int()


def test_slots_are_in_the_order_of_places() -> None:
    """Three tokens with two places each: expert 1 gets token 2 by its first place, then 0 and 1 by their
    second."""
    routes = torch.tensor([[0, 1], [2, 1], [1, 3]], dtype=torch.int32)
    slots = dispatch_of(routes, torch.tensor([[0.5, 0.25], [2.0, 3.0], [4.0, 5.0]]), 5)
    assert [slots.of(expert).tolist() for expert in range(5)] == [[0], [2, 0, 1], [1], [2], []]
    assert slots.weights.tolist() == [0.5, 4.0, 0.25, 3.0, 2.0, 5.0]
    assert slots.of_token.tolist() == [[0, 2], [3, 4], [1, 5]]


def test_slots_are_those_of_a_mask() -> None:
    routes = routed(50, 8, 3)
    weights = torch.rand(50, 3)
    slots = dispatch_of(routes, weights, 8)
    mask = torch.nn.functional.one_hot(routes.long(), 8).permute(2, 1, 0)
    for expert in range(8):
        places, tokens = torch.where(mask[expert])
        start, stop = slots.starts[expert : expert + 2]
        assert torch.equal(slots.of(expert), tokens)
        assert torch.equal(slots.weights[start:stop], weights[tokens, places])


def test_experts_run_together_with_their_neighbours_alone() -> None:
    """Expert 3 has no tokens and is left out; one that is not asked for parts those before and after."""
    starts = [0, 10, 30, 35, 35, 45, 145, 150]
    empty = torch.empty(0)
    slots = TokenDispatch(empty, empty, starts, empty, 0)
    assert list(slots.runs(range(7), 50)) == [
        [(0, 0, 10), (1, 10, 30), (2, 30, 35), (4, 35, 45)],
        [(5, 45, 145)],
        [(6, 145, 150)],
    ]
    assert list(slots.runs([0, 2, 3, 4], 50)) == [[(0, 0, 10)], [(1, 30, 35), (3, 35, 45)]]
    assert list(slots.runs(range(3), 1)) == [[(0, 0, 10)], [(1, 10, 30)], [(2, 30, 35)]]
    assert list(slots.runs([3], 50)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_added_one_after_the_other(dtype: torch.dtype) -> None:
    """Each product and each sum is rounded to BF16, in the order of experts: another order, or one
    rounding at the end, gives other bits."""
    torch.manual_seed(0)
    routes, weights = routed(40, 6, 3), torch.rand(40, 3).to(dtype)
    slots = dispatch_of(routes, weights, 6)
    answers = torch.randn(120, 16).bfloat16()
    before = torch.randn(40, 16).bfloat16()
    start, stop = slots.starts[1], slots.starts[5]
    wanted, at_once = before.clone(), before.double()
    for token in range(40):
        for expert, place in sorted((e, p) for p, e in enumerate(routes[token].tolist())):
            if 1 <= expert < 5:
                slot = slots.starts[expert] + slots.of(expert).tolist().index(token)
                weighted = (answers[slot].float() * weights[token, place].float()).bfloat16()
                wanted[token] = (wanted[token].float() + weighted.float()).bfloat16()
                at_once[token] += weighted.double()
    rows = before.clone()
    add_answers(rows, answers[start:stop], slots, start)
    assert torch.equal(rows, wanted)
    assert not torch.equal(rows, at_once.bfloat16())
