"""The order in which files are finished, and the disk that takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoints import fp8_moe

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.plan.units import Unit
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.file_layout import (
    OutFile,
    ShardLayout,
    disk_room,
    files_of,
    in_file_order,
    peak,
    places_of,
)
from qconvert.run.work.options import RunOptions


def layout(*files: tuple[str, ...]) -> ShardLayout:
    """Files of tensors of 10 bytes each."""
    kind = TensorType("U8", (10,))
    return ShardLayout(
        tuple(
            OutFile(
                f"{number}.safetensors",
                tuple(Source(name, kind, number, 10 * n) for n, name in enumerate(names)),
                10 * len(names),
                {},
            )
            for number, names in enumerate(files)
        )
    )


def unit(*names: str) -> Unit:
    kind = TensorType("U8", (10,))
    return Unit(tuple(names), tuple(Output(kind, ()) for _ in names), (), 10, 10 * len(names), 0)


def test_one_file_at_a_time() -> None:
    files = layout(("a", "b"), ("c",), ("d", "e", "f"))
    units = [unit(name) for name in "fedcba"]
    assert peak(units, [files]) == 30
    room = disk_room(units, [files], 5, None)
    assert (room.least, room.takes, room.rest) == (60 + 5, 65, 5), "no more than all of them"
    ordered = in_file_order(list(enumerate(units)), places_of([files]))
    assert [unit.names[0] for _, unit in ordered] == list("abcdef")


def test_a_unit_that_writes_to_several_files_keeps_them_here() -> None:
    files = layout(("a",), ("b",), ("c",), ("d",), ("e",))
    units = [unit("a", "d"), unit("b"), unit("c"), unit("e")]
    # The fourth file waits, from the first unit on, for the file before it.
    assert peak(units, [files]) == 20
    assert peak([unit("a", "e"), unit("b", "e"), unit("c", "d", "e")], [files]) == 30


def test_several_folders_are_one_run() -> None:
    layouts = [layout(("a",), ("b",)), layout(("x", "y"))]
    places = places_of(layouts)
    assert places == {"a": (0, 0), "b": (1, 0), "x": (2, 0), "y": (2, 10)}
    assert files_of(unit("b", "y"), places) == {1, 2}
    # The second folder's file is begun with the first of the first, and done with its last.
    both = [unit("a", "x"), unit("b", "y")]
    assert peak(both, layouts) == 30


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_what_a_run_comes_to(seed: int) -> None:
    """Random files and units, run unit by unit in that order."""
    chance = random.Random(seed)
    names = [f"t{n}" for n in range(40)]
    cuts = sorted(chance.sample(range(1, 40), 9))
    files = layout(*(tuple(names[a:b]) for a, b in zip([0, *cuts], [*cuts, 40], strict=True)))
    chance.shuffle(names)
    units = []
    while names:
        size = chance.choice((1, 1, 1, 2, 3))
        units.append(unit(*names[:size]))
        del names[:size]
    places = places_of([files])
    left = {n: {t.name for t in file.tensors} for n, file in enumerate(files.files)}
    here: set[int] = set()
    most = 0
    for _, each in in_file_order(list(enumerate(units)), places):
        here |= files_of(each, places)
        most = max(most, sum(files.files[n].size for n in here))
        for name in each.names:
            left[places[name][0]].discard(name)
        here = {n for n in here if left[n]}
    assert most <= peak(units, [files])


def test_a_budget_of_two_shards(tmp_path: Path) -> None:
    source = fp8_moe().write(tmp_path / "source")
    plan = run_passes(Plan.identity(Checkpoint.open(source)), (Dequant(),))
    ready = prepare(plan, RunOptions(jobs=1, max_shard_size=1000, streamed=True))
    assert ready.room is not None
    largest = max(file.size for file in ready.layout.files)
    assert ready.room.least >= 2 * largest + ready.room.rest
    with pytest.raises(PlanError, match=f"give {ready.room.least} B or more"):
        prepare(plan, RunOptions(jobs=1, max_shard_size=1000, streamed=True, disk_budget=1000))
