"""The lazy graph: cutting and joining are ranges, and cost nothing."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Piece, Source, Value, apply, concat, stack
from qconvert.formats.fp8.decode import DequantFp8

_WEIGHT = Source("w", TensorType("F8_E4M3", (6, 256, 128)), 0, 4096)


def materialize(output: Output, sources: dict[str, bytes]) -> bytes:
    """The bytes of an output that is made of sources alone."""
    found = b""
    for origin, start, stop in output.pieces:
        assert isinstance(origin, Source)
        found += sources[origin.name][start:stop]
    return found


def test_taking_experts_apart_and_stacking_them_gives_back_one_piece() -> None:
    again = stack([_WEIGHT.output.index(e) for e in range(6)])
    assert again == _WEIGHT.output


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_type_of_another_process_is_found(seed: str) -> None:
    """Workers are sent types, and texts have another hash in each process."""
    kind = TensorType("F8_E4M3", (6, 256))
    program = (
        "import pickle, sys\n"
        "from qconvert.core.dtypes import TensorType\n"
        "kind = pickle.load(sys.stdin.buffer)\n"
        "assert {TensorType('F8_E4M3', (6, 256)): 1}[kind] == 1 and kind.nbytes == 1536\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", program], input=pickle.dumps(kind), env=env, check=True)


@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 3),
    cut=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_rows_of_a_whole_source_are_the_range_of_their_bytes(
    rows: int, columns: int, cut: tuple[int, int]
) -> None:
    source = Source("w", TensorType("BF16", (rows, columns)), 0, 4096).output
    start, stop = cut
    if not start <= stop <= rows:
        with pytest.raises(PlanError, match="lie outside"):
            source.rows(start, stop)
        return
    pieces = source.bytes_range(2 * columns * start, 2 * columns * stop)
    found = source.rows(start, stop)
    assert found.type == TensorType("BF16", (stop - start, columns))
    assert found.pieces == tuple(piece for piece in pieces if piece.nbytes)


def test_cutting_gate_from_up_in_every_expert() -> None:
    gates = [_WEIGHT.output.index(e).rows(0, 128) for e in range(6)]
    assert [gate.pieces[0].start for gate in gates] == [e * 256 * 128 for e in range(6)]
    assert all(gate.type == TensorType("F8_E4M3", (128, 128)) for gate in gates)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    dtype=st.sampled_from(sorted(d for d, bits in DTYPE_BITS.items() if bits >= 8)),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_any_cut_joined_again_is_the_same_bytes(
    rows: int, columns: int, dtype: str, cuts: list[int]
) -> None:
    source = Source("a", TensorType(dtype, (rows, columns)), 0, 0)
    data = {"a": bytes(i % 251 for i in range(source.type.nbytes))}
    edges = sorted({0, rows, *(c for c in cuts if c <= rows)})
    parts = [source.rows(a, b) for a, b in itertools.pairwise(edges)]
    assert concat(parts) == source.output
    backwards = concat(parts[::-1])
    assert materialize(backwards, data) == b"".join(materialize(p, data) for p in parts[::-1])


def test_rows_of_rows() -> None:
    source = Source("a", TensorType("BF16", (10, 4)), 0, 0)
    inner = concat([source.rows(8, 10), source.rows(0, 3)]).rows(1, 4)
    assert [(p.start, p.stop) for p in inner.pieces] == [(9 * 8, 10 * 8), (0, 2 * 8)]


def test_packed_rows_must_start_on_bytes() -> None:
    assert Source("a", TensorType("F4", (4, 6)), 0, 0).rows(1, 2).type.nbytes == 3
    with pytest.raises(PlanError, match="whole bytes"):
        Source("a", TensorType("F4", (4, 3)), 0, 0).rows(1, 2)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_rows_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match="outside"):
        _WEIGHT.rows(start, stop)


def test_joining_what_does_not_fit_is_refused() -> None:
    other = Source("b", TensorType("BF16", (1, 256, 128)), 0, 0)
    with pytest.raises(PlanError, match="cannot join"):
        concat([_WEIGHT.output, other.output])
    with pytest.raises(PlanError, match="cannot be reshaped"):
        _WEIGHT.output.reshape((5, 5))
    with pytest.raises(PlanError, match="no tensors to join"):
        concat([])


def test_results_can_be_cut_like_sources() -> None:
    scale = Source("s", TensorType("F32", (6, 2, 1)), 0, 0)
    (result,) = apply(DequantFp8((128, 128)), _WEIGHT.output, scale.output)
    expert = result.index(2)
    (piece,) = expert.pieces
    assert isinstance(piece.origin, Value)
    assert piece == Piece(piece.origin, 2 * 65536, 3 * 65536)
    assert stack([result.index(e) for e in range(6)]) == result


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("F4", (2, 3), 3),
        ("F6_E2M3", (4,), 3),
        ("BF16", (), 2),
        ("I64", (0, 5), 0),
        ("C64", (2,), 16),
    ],
)
def test_sizes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert TensorType(dtype, shape).nbytes == nbytes


def test_types_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="unknown dtype 'Q4'"):
        TensorType("Q4", (1,))
    with pytest.raises(PlanError, match="whole bytes"):
        TensorType("F4", (3,))
    with pytest.raises(PlanError, match="negative"):
        TensorType("BF16", (-1,))
