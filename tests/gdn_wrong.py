"""Run by tests/test_gdn_fused.py in a process of its own, in Triton's interpreter: fused weights that
are wrong in known ways, as JSON {what: names of cases that do not fit}."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch

from qconvert.validators.kernels.triton import gdn

HEADS = gdn.Heads(4, 12, 16, 16)  # three value heads a key head, as in Qwen3.5-27B
HIDDEN, TOKENS = 64, 7
Pair = tuple[torch.Tensor, torch.Tensor]


def weights() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    rows = (*HEADS.segments, HEADS.values, HEADS.values)
    return [torch.randn(n, HIDDEN, generator=random).bfloat16() for n in rows]


def fused(apart: Sequence[torch.Tensor], groups: int) -> Pair:
    return gdn.fuse_rows(apart[:4], groups), gdn.fuse_rows(apart[4:], groups)


def misfits(pair: Pair, apart: Sequence[torch.Tensor], groups: int) -> list[str]:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    cases = gdn.agree("", x, apart, pair, HEADS, groups, padding=8)
    return [case.name for case in cases if not case.fits]


def dense_rows(tokens: int) -> list[str]:
    """A kernel that takes b and a, rows of a wider tensor, for dense."""
    columns = sum(HEADS.segments)
    qkvz = torch.randn(tokens, columns).bfloat16()
    wide = torch.randn(tokens, 2 * HEADS.values + 8).bfloat16()
    ba = wide[:, : 2 * HEADS.values]
    expected = gdn.split_reference(qkvz, ba, HEADS, 1)
    taken = torch.as_strided(wide, ba.shape, (2 * HEADS.values, 1))
    found = gdn.split(qkvz, taken, HEADS, 1)
    return [part for part in "ba" if not torch.equal(getattr(found, part), getattr(expected, part))]


def main() -> None:
    apart = weights()
    q, k, v, z, b, a = apart
    contiguous, interleaved = fused(apart, 1), fused(apart, HEADS.keys)
    half = HEADS.values
    shuffled = torch.cat([interleaved[1][half:], interleaved[1][:half]])
    found = {
        "contiguous": misfits(contiguous, apart, 1),
        "interleaved": misfits(interleaved, apart, HEADS.keys),
        "rank-major": misfits(fused(apart, 2), apart, 2),
        "interleaved, said to be contiguous": misfits(interleaved, apart, 1),
        "contiguous, said to be interleaved": misfits(contiguous, apart, HEADS.keys),
        "rank-major, said to be contiguous": misfits(fused(apart, 2), apart, 1),
        "k before q": misfits(fused([k, q, v, z, b, a], 1), apart, 1),
        "a before b": misfits((contiguous[0], fused([q, k, v, z, a, b], 1)[1]), apart, 1),
        "ba cut at its midpoint": misfits((interleaved[0], shuffled), apart, HEADS.keys),
        "dense rows, one token": dense_rows(1),
        "dense rows, two tokens": dense_rows(2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
