"""Nodes that take one another's results: they run part by part, only what others take lives whole, and
each node's bytes go where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from checkpoints import Model, Tensor, read_tensors

from qconvert import api
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Output, Part, apply
from qconvert.ops.rowwise import row_parts
from qconvert.plan.plan import Plan
from qconvert.run.executor import execute
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.options import RunOptions
from qconvert.run.work.sink import Sink

ROWS, COLUMNS = 4096, 1024
SIZE = ROWS * COLUMNS


@dataclass(frozen=True)
class Turned:
    """Bytes [N, K] -> the same xor `mask`, row by row; `copies` of them, each of twice the mask."""

    mask: int
    copies: int = 1

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return (args[0],) * self.copies

    def row_step(self, *args: TensorType) -> int:
        return 1

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        cut = start * args[0].row_nbytes, args[0].with_rows(stop - start)
        return Part((cut,), (cut,) * self.copies)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        return row_parts(self, args[0].shape[0], 2 * args[0].row_nbytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        return 0

    def loss(self, *args: TensorType) -> str | None:
        return None

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        for port, out in enumerate(outs):
            out.data[:] = turned(bytes(ins[0].data), self.mask << port)
        return {}


def turned(data: bytes, mask: int) -> bytes:
    return data.translate(bytes(code ^ mask for code in range(256)))


DATA = bytes(range(251)) * (SIZE // 251) + bytes(SIZE % 251)


@pytest.fixture
def source(tmp_path: Path) -> Plan:
    config = {"model_type": "nobody", "num_hidden_layers": 1}
    model = Model(config, {"a": Tensor("U8", (ROWS, COLUMNS), DATA)})
    return Plan.identity(Checkpoint.open(model.write(tmp_path / "source", shards=1)))


def made(plan: Plan, tensors: dict[str, Output], out: Path, memory: int | None) -> dict[str, bytes]:
    options = RunOptions(memory=memory, jobs=1)
    execute(replace(plan, tensors=tensors).check(), out, options)
    return {name: value.data for name, value in read_tensors(out).items()}


def smallest(plan: Plan, tensors: dict[str, Output]) -> int:
    """The memory that the refusal of too little names, in bytes."""
    with pytest.raises(PlanError, match="give --memory") as caught:
        prepare(replace(plan, tensors=tensors).check(), RunOptions(memory=1, jobs=1))
    return int(str(caught.value).split("give --memory ")[1].split("MiB")[0]) << 20


def test_two_users_of_one_value_write_their_own(source: Plan, tmp_path: Path) -> None:
    """Both have one result, which is computed where it is written from."""
    (value,) = apply(Turned(1), source.tensors["a"])
    tensors = {
        "b": apply(Turned(2), value)[0],
        "c": apply(Turned(4), value)[0],
        "d": value,
    }
    wanted = {"b": turned(DATA, 3), "c": turned(DATA, 5), "d": turned(DATA, 1)}
    assert made(source, tensors, tmp_path / "much", None) == wanted
    least = smallest(source, tensors)
    assert least > SIZE, "the value lives whole"
    assert made(source, tensors, tmp_path / "little", least) == wanted


def test_several_results_are_gathered_or_written_in_turn(source: Plan, tmp_path: Path) -> None:
    (value,) = apply(Turned(1), source.tensors["a"])
    first, second = apply(Turned(2, 2), value)
    tensors = {"b": first, "c": second, "d": apply(Turned(4), value)[0]}
    wanted = {"b": turned(DATA, 3), "c": turned(DATA, 5), "d": turned(DATA, 5)}
    assert made(source, tensors, tmp_path / "much", None) == wanted
    assert made(source, tensors, tmp_path / "little", smallest(source, tensors)) == wanted


@pytest.mark.parametrize("names", [("b", "d"), ("d", "b")], ids=["in order", "the other first"])
@pytest.mark.parametrize("where", ["side by side", "apart", "too large", "one alone"])
def test_results_side_by_side_are_computed_where_they_are_written_from(
    names: tuple[str, str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink is asked once for both, whichever comes first in the file; and for each, where something
    lies between them, or both are more than it has room for, or one is not wanted."""
    few = DATA[: SIZE // 4]
    kind = Tensor("U8", (ROWS // 4, COLUMNS), few)
    config = {"model_type": "nobody", "num_hidden_layers": 1}
    model = Model(config, {"a": kind, "c": kind}).write(tmp_path / "source", shards=1)
    plan = Plan.identity(Checkpoint.open(model))
    results = apply(Turned(2, 2), plan.tensors["a"])
    tensors = dict(zip(names, results, strict=True))
    wanted = {names[0]: turned(few, 2), names[1]: turned(few, 4)}
    other = "c" if where == "apart" else "z"
    tensors[other], wanted[other] = plan.tensors["c"], few
    if where == "too large":
        monkeypatch.setattr("qconvert.run.work.memory.WINDOW_BYTES", len(few) + len(few) // 2)
    if where == "one alone":
        del tensors[names[1]], wanted[names[1]]
    asked: list[int] = []
    real = Sink.room

    def room(self: Sink, file: int, at: int, size: int) -> memoryview:
        asked.append(size)
        return real(self, file, at, size)

    monkeypatch.setattr(Sink, "room", room)
    assert made(plan, tensors, tmp_path / "out", None) == wanted
    assert (2 * len(few) in asked) == (where == "side by side")
    findings = api.validate(tmp_path / "out", tmp_path / "source", level="full").findings
    assert [found for found in findings if found.rule in ("QC022", "QC033")] == []


def test_what_nobody_takes_does_not_live_whole(source: Plan) -> None:
    tensors = {"b": apply(Turned(2), source.tensors["a"])[0]}
    alone = prepare(replace(source, tensors=tensors).check(), RunOptions(memory=1 << 30)).units[0]
    assert alone.peak < SIZE // 100
    chained = {"b": apply(Turned(4), tensors["b"])[0]}
    both = prepare(replace(source, tensors=chained).check(), RunOptions(memory=1 << 30)).units[0]
    assert SIZE < both.peak < SIZE + SIZE // 100
