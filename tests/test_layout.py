"""The grouped-segment rule against a loop that knows nothing of it, and against torch's own views."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source
from qconvert.core.row_order import RowOrder

Rows = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
DTYPES = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits >= 8)


def rows_of(output: Output, sources: dict[str, Rows]) -> bytes:
    found = b""
    for origin, start, stop in output.pieces:
        assert isinstance(origin, Source)
        found += sources[origin.name].tobytes()[start:stop]
    return found


@st.composite
def gdn(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """nk, r, dk, dv and a number of groups that divides nk."""
    nk = draw(st.sampled_from([1, 2, 4, 6, 16]))
    groups = draw(st.sampled_from([g for g in range(1, nk + 1) if nk % g == 0]))
    r = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return nk, r, draw(st.integers(1, 4)), draw(st.integers(1, 4)), groups


@settings(max_examples=150)
@given(dims=gdn(), dtype=st.sampled_from(DTYPES), columns=st.integers(1, 3))
def test_fusing_equals_an_independent_loop_and_splits_back(
    dims: tuple[int, int, int, int, int], dtype: str, columns: int
) -> None:
    nk, r, dk, dv, groups = dims
    segments = (nk * dk, nk * dk, nk * r * dv, nk * r * dv)
    random = np.random.default_rng(0)
    width = columns * DTYPE_BITS[dtype] // 8
    data = {
        name: random.integers(0, 256, (rows, width), dtype=np.uint8)
        for name, rows in zip("qkvz", segments, strict=True)
    }
    parts = [
        Source(name, TensorType(dtype, (rows, columns)), 0, 0).output
        for name, rows in zip("qkvz", segments, strict=True)
    ]
    layout = RowOrder(segments, groups)
    fused = layout.fuse(parts)

    heads = nk // groups  # key heads of a group
    expected = []
    for group in range(groups):
        for name, per_head in (("q", dk), ("k", dk), ("v", r * dv), ("z", r * dv)):
            for head in range(group * heads, (group + 1) * heads):
                for row in range(per_head):
                    expected.append(data[name][head * per_head + row].tobytes())
    assert rows_of(fused, data) == b"".join(expected)
    assert fused.type == TensorType(dtype, (sum(segments), columns))
    assert layout.split(fused) == tuple(parts)


def test_interleaved_is_how_qwen3_next_reads_it() -> None:
    """Its forward views the projection as [nk, 2*dk + 2*r*dv] and splits that (transformers 5.17)."""
    nk, r, dk, dv, hidden = 4, 3, 2, 5, 7
    q, k = (torch.randn(nk * dk, hidden) for _ in range(2))
    v, z = (torch.randn(nk * r * dv, hidden) for _ in range(2))
    layout = RowOrder((nk * dk, nk * dk, nk * r * dv, nk * r * dv), nk)
    names = dict(zip("qkvz", (q, k, v, z), strict=True))
    parts = [
        Source(name, TensorType("F32", (t.shape[0], hidden)), 0, 0).output
        for name, t in names.items()
    ]
    raw = rows_of(
        layout.fuse(parts),
        {name: t.contiguous().view(torch.uint8).numpy() for name, t in names.items()},
    )
    fused = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, hidden)
    view = fused.view(nk, 2 * dk + 2 * r * dv, hidden)
    found = torch.split(view, [dk, dk, r * dv, r * dv], dim=1)
    for piece, whole in zip(found, (q, k, v, z), strict=True):
        assert torch.equal(piece.reshape(whole.shape), whole)


@pytest.mark.parametrize(
    ("segments", "groups", "may"),
    [
        ((2048, 2048, 4096, 4096), 1, True),
        ((2048, 2048, 4096, 4096), 16, True),  # dk = 128: a run is one block
        ((2048, 2048, 2048, 2048), 16, True),
        ((1024, 1024, 2048, 2048), 16, False),  # dk = 64 interleaved: a block spans q and k
        ((1024, 1024, 2048, 2048), 1, True),
        ((64, 64), 1, False),  # b and a: below one block
    ],
)
def test_when_block_scales_may_move(segments: tuple[int, ...], groups: int, may: bool) -> None:
    layout = RowOrder(segments, groups)
    assert layout.scales_may_move(128) is may
    if may:
        assert layout.of_blocks(128) == RowOrder(tuple(s // 128 for s in segments), groups)
    else:
        with pytest.raises(PlanError, match="not whole blocks of 128"):
            layout.of_blocks(128)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="3 groups do not divide"):
        RowOrder((4, 4), 3)
    a = Source("a", TensorType("BF16", (4, 2)), 0, 0).output
    with pytest.raises(PlanError, match="expected a segment of 6 rows"):
        RowOrder((4, 6), 1).fuse([a, a])
    with pytest.raises(PlanError, match="expected 10 fused rows"):
        RowOrder((4, 6), 1).split(a)
