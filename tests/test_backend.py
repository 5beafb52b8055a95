"""Units that a backend solves: their bytes lie where the plan says, a receipt tells of them, and what
was solved before an interruption is not asked for again."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrated_plans import SYNTHETIC, MadeUp, amx_plan, made_up, shape_of
from checkpoints import read_tensors
from faults import differing, tree
from models import qwen3_moe

from qconvert.calibrate.backend import backend_for
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import OutputError, PlanError, RunError
from qconvert.core.graph import nodes
from qconvert.models.calibrated import Calibrated, calibrated_op
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run import executor
from qconvert.run.executor import execute
from qconvert.run.folder.journal import read_journal
from qconvert.run.work.backend import BackendJob, Barrier, Item
from qconvert.run.work.events import NoEvents
from qconvert.run.work.options import RunOptions
from qconvert.samples.request import Calibration
from qconvert.validators.reading.amx import tile_codes

HIDDEN, INTERMEDIATE = 128, 256


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = qwen3_moe("bf16", hidden=HIDDEN, intermediate=INTERMEDIATE)
    model.config["vocab_size"] = 8
    return model.write(tmp_path_factory.mktemp("outside") / "source")


def backend(stop: int | None = None) -> MadeUp:
    return MadeUp(HIDDEN, INTERMEDIATE, stop)


def ops(plan: object) -> list[Calibrated]:
    found = [calibrated_op(node) for node in nodes(plan.tensors.values())]  # type: ignore[attr-defined]
    return [op for op in found if op is not None]


@pytest.mark.parametrize("numa", [1, 2])
def test_codes_are_read_back_as_they_were_solved(source: Path, tmp_path: Path, numa: int) -> None:
    plan = amx_plan(source, numa=numa)
    receipt = execute(plan, tmp_path / "out", backend=backend())
    assert receipt.remarks == ("made up",)
    stored = read_tensors(tmp_path / "out")
    for op in ops(plan):
        rows, columns = shape_of(op, HIDDEN, INTERMEDIATE)
        codes = made_up(op, rows, columns)
        down = op.kind == "down_proj"
        for shard in range(numa):
            at = f"blk.{op.layer}.ffn_{op.kind[:-5]}_exps.{op.expert}.numa.{shard}"
            scale = np.frombuffer(stored[f"{at}.scale"].data, np.float32)
            packed = np.frombuffer(stored[f"{at}.weight"].data, np.uint8)
            width, height = (columns // numa, rows) if down else (columns, rows // numa)
            part = codes.codes[:, shard * width :][:, :width] if down else (
                codes.codes[shard * height :][:height]
            )  # fmt: skip
            step = codes.scale[:, min(shard, codes.scale.shape[1] - 1)] if down else (
                codes.scale[shard * height :][:height, 0]
            )  # fmt: skip
            assert np.array_equal(tile_codes("int4", packed, height, width), part)
            # A weight is code * 16 * stored scale.
            assert np.array_equal(scale * np.float32(16), step)


def test_the_receipt_says_what_was_read_for_it(source: Path, tmp_path: Path) -> None:
    execute(amx_plan(source), tmp_path / "out", backend=backend())
    lines = (tmp_path / "out" / "qconvert.receipt.jsonl").read_text().splitlines()
    experts = [line for line in map(json.loads, lines) if "xxh3" in line and "name" in line]
    assert experts
    # The backend says it read tensor `x`, which is none of the plan's: only true ranges are kept.
    assert all(line["sources"] == [] for line in experts)


def test_without_a_backend_nothing_is_touched(source: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no backend"):
        execute(amx_plan(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_backend_that_needs_more_memory_than_there_is_touches_nothing(
    source: Path, tmp_path: Path
) -> None:
    needy = MadeUp(HIDDEN, INTERMEDIATE, memory=300 << 20)
    with pytest.raises(PlanError, match=r"more than 300 MiB .* \(given: 256 MiB\)"):
        execute(amx_plan(source), tmp_path / "out", RunOptions(256 << 20), backend=needy)
    assert not (tmp_path / "out").exists()
    assert not needy.made
    execute(amx_plan(source), tmp_path / "out", RunOptions(512 << 20), backend=needy)
    assert needy.made


def test_a_unit_that_a_backend_leaves_out_is_named(source: Path, tmp_path: Path) -> None:
    class Forgetful(MadeUp):
        def solve(self, job: BackendJob) -> Generator[Item]:
            yield from super().solve(replace(job, units=job.units[1:]))

    plan = amx_plan(source)
    with pytest.raises(PlanError, match=r"layer 0: .*_proj of expert 0 was not calibrated"):
        execute(plan, tmp_path / "out", backend=Forgetful(HIDDEN, INTERMEDIATE))
    rest = backend()
    execute(plan, tmp_path / "out", backend=rest)
    assert len(rest.made) == 1  # what was solved had been kept


def test_it_gets_ready_before_workers_begin(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    cut: Any = vars(executor)["cut_batches"]

    def looked(*given: Any) -> Any:
        seen.append("workers")
        return cut(*given)

    class Looking(MadeUp):
        def get_ready(self, job: BackendJob) -> None:
            seen.append(f"ready for {len(job.units)}")

        def solve(self, job: BackendJob) -> Generator[Item]:
            seen.append("solved")
            yield from super().solve(job)

    monkeypatch.setattr(executor, "cut_batches", looked)
    plan = amx_plan(source)
    execute(plan, tmp_path / "out", backend=Looking(HIDDEN, INTERMEDIATE))
    assert seen == [f"ready for {len(ops(plan))}", "workers", "solved"]


def test_after_a_barrier_everything_before_it_is_in_the_journal(
    source: Path, tmp_path: Path
) -> None:
    counts: list[tuple[int, int]] = []

    class Looking(MadeUp):
        def solve(self, job: BackendJob) -> Generator[Item]:
            for item in super().solve(job):
                yield item
                if isinstance(item, Barrier):
                    found = read_journal(tmp_path / "out" / ".qconvert" / "journal.jsonl")
                    assert found is not None
                    mine = {unit.number for unit in job.units} & set(found.units)
                    counts.append((len(mine), len(self.made)))

    execute(amx_plan(source), tmp_path / "out", backend=Looking(HIDDEN, INTERMEDIATE))
    assert counts
    assert all(kept == made > 0 for kept, made in counts)


def test_the_op_alone_says_what_is_needed(source: Path) -> None:
    with pytest.raises(RunError, match="calibration"):
        ops(amx_plan(source))[0].run([], [], memoryview(b""))


def test_interrupted_in_the_second_layer_the_first_is_not_made_again(
    source: Path, tmp_path: Path
) -> None:
    plan = amx_plan(source)
    execute(plan, tmp_path / "undisturbed", backend=backend())
    total = len(ops(plan))
    first, second = backend(stop=total // 2 + 1), backend()
    with pytest.raises(KeyboardInterrupt):
        execute(plan, tmp_path / "out", backend=first)
    assert not (tmp_path / "out" / "config.json").exists()
    execute(plan, tmp_path / "out", backend=second)
    # What was on its way when it stopped is made again, what was committed is not.
    assert {layer for layer, _, _ in second.made} == {1}
    assert len(second.made) == total // 2
    assert differing(tree(tmp_path / "out"), tree(tmp_path / "undisturbed")) == []


def test_what_a_calibration_remembers_goes_with_the_work_folder(
    source: Path, tmp_path: Path
) -> None:
    class Remembering(MadeUp):
        def solve(self, job: BackendJob) -> Generator[Item]:
            job.work_dir.mkdir(exist_ok=True)
            (job.work_dir / "hidden").write_bytes(b"states")
            yield from super().solve(job)

    execute(amx_plan(source), tmp_path / "out", backend=Remembering(HIDDEN, INTERMEDIATE))
    assert not (tmp_path / "out" / ".qconvert").exists()


@pytest.mark.parametrize("over", [{"solver": "llmcompressor"}, {"dampening_frac": 0.02},
                                  {"scales": "amax"},
                                  {"order": "stored"}, {"refit": 1}, {"descent": 0},
                                  {"propagated_error": "ignore"}, {"signs": "positive"}])  # fmt: skip
def test_another_solver_is_another_plan(over: Any, source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(amx_plan(source), tmp_path / "out", backend=backend(stop=2))
    other = amx_plan(source, Calibration(synthetic=True, samples=2, length=8, **over))
    ((name, value),) = over.items()
    with pytest.raises(OutputError, match=rf"now `amx: .*{name}: {value}[,}}]"):
        execute(other, tmp_path / "out", backend=backend())


def test_where_data_lies_is_not_part_of_the_plan(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    plans = [
        amx_plan(source, Calibration(data=str(tmp_path / name / "data.jsonl"), samples=1))
        for name in ("a", "b")
    ]
    assert plans[0].fingerprint() == plans[1].fingerprint()
    assert plans[0].log == plans[1].log
    assert str(tmp_path) not in str(plans[0].log[-1].options)


def test_bytes_are_counted_once(source: Path, tmp_path: Path) -> None:
    class Listening(NoEvents):
        total = wrote_bytes = 0

        def start(self, total: int, done: int) -> None:
            self.total = total

        def wrote(self, nbytes: int) -> None:
            self.wrote_bytes += nbytes

    events = Listening()
    execute(
        amx_plan(source), tmp_path / "out", RunOptions(jobs=1), events=events, backend=backend()
    )
    assert events.wrote_bytes == events.total > 0


def test_what_is_left_may_be_of_one_kind_only(source: Path) -> None:
    """A run stopped within its last layer wants down projections alone."""
    plan = amx_plan(source)
    made = backend_for([plan])
    assert made is not None
    assert {kind for _, kind in made.packers} == {"gate_proj", "up_proj", "down_proj"}


def test_a_weight_that_an_earlier_pass_computes_is_refused(tmp_path: Path) -> None:
    model = qwen3_moe("fp8", hidden=HIDDEN, intermediate=INTERMEDIATE)
    model.config["vocab_size"] = 8
    start = Plan.identity(Checkpoint.open(model.write(tmp_path / "fp8")))
    steps = (Dequant(dtype="f16"), ExpertsToAmx("int4", 1, calibrate=SYNTHETIC))
    with pytest.raises(PlanError, match="conversion of its own"):
        run_passes(start, steps)
