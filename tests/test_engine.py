"""Engines: one protocol, one journal, and the same bytes whichever runs the units."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
from checkpoints import run_cli
from crews import CrewEngine, Heard, interrupt
from faults import InTurn, Tree, convert, differing, plan_of, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from models import qwen3_moe

from qconvert import __version__, api
from qconvert.checkpoint.checkpoint import WORK_DIR, Checkpoint
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, QConvertError, RunError, UsageError
from qconvert.core.graph import Output
from qconvert.plan.units import Unit
from qconvert.run import executor
from qconvert.run.engines import ray
from qconvert.run.engines.base import Engine
from qconvert.run.engines.local import LocalEngine
from qconvert.run.engines.ray import Node, RayEngine, WorkerLost, WorkerReady
from qconvert.run.engines.shard import ShardEngine
from qconvert.run.executor import engine_of, execute
from qconvert.run.folder.prepare import prepare
from qconvert.run.work import cluster_node
from qconvert.run.work.cluster_node import (
    BatchResult,
    BlockSink,
    NodeCheck,
    aligned_blocks,
    check_node,
    parts_of,
)
from qconvert.run.work.division import BLOCK_BYTES, Shard
from qconvert.run.work.files import Files
from qconvert.run.work.memory import RAY_PROCESS_BYTES
from qconvert.run.work.options import RunOptions
from qconvert.run.work.unit_runner import Place
from qconvert.run.work.worker import Batch, WorkerSetup

KINDS = sorted(faults.SHARD_SIZES)
MACHINES = (Node("a", "machine a", 1), Node("b", "machine b", 2), Node("c", "machine c", 1))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("engine") / "source")


@pytest.fixture(scope="module")
def one(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    """What this process alone makes, in every way files are made."""
    made = {}
    for kind in KINDS:
        out = tmp_path_factory.mktemp("one") / "out"
        convert(source, out, faults.options(kind))
        made[kind] = tree(out)
    return made


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the small checkpoint has hundreds of."""
    monkeypatch.setattr(cluster_node, "BLOCK_BYTES", 4096)


# --- one protocol ---------------------------------------------------------------------------------


def test_options_say_which_engine() -> None:
    found: list[Engine] = [
        engine_of(RunOptions()),
        engine_of(RunOptions(shard=Shard(1, 3))),
        engine_of(RunOptions(engine="ray", address="head:6379", memory=1 << 30, jobs=4)),
    ]
    assert found == [
        found[0], ShardEngine(Shard(1, 3)), RayEngine("head:6379", 1 << 30, 4),
    ]  # fmt: skip
    assert isinstance(found[0], LocalEngine)
    assert [engine.publishes for engine in found] == [True, False, True]


def _by(engine: CrewEngine, monkeypatch: pytest.MonkeyPatch) -> CrewEngine:
    monkeypatch.setattr(executor, "engine_of", lambda *_: engine)
    return engine


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_machines_that_are_lost_leave_the_same_bytes(
    kind: str, source: Path, one: dict[str, Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(8):
        out = tmp_path / f"out{seed}"
        engine = _by(CrewEngine(MACHINES, seed, losses=2), monkeypatch)
        convert(source, out, faults.options(kind))
        assert differing(tree(out), one[kind]) == [], seed
        assert engine.crew is not None
        assert engine.crew.losses < 2
        assert engine.crew.most_sent <= 2
        assert all(engine.crew.most_on[node.key] <= node.workers for node in MACHINES)


_PAIR = ("kt", "{s}", "--cpu-out", "{o}/cpu", "--cpu", "int8", "--numa", "1", "--gpu", "w4a16",
         "--gpu-out", "{o}/gpu")  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("words", [_PAIR, ("experts", "stack", "{s}", "{o}/out")])
def test_units_of_several_nodes_files_and_folders(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of many units, which write to files of both sides, or to the same one."""
    source = qwen3_moe(layers=1).write(tmp_path / "source")
    for by in ("here", "there"):
        if by == "there":
            _by(CrewEngine(MACHINES, losses=1), monkeypatch)
        given = [word.format(s=source, o=tmp_path / by) for word in words]
        done = run_cli(*given, "--jobs", "1", "--max-shard-size", "300KB")
        assert done.code == 0, done.err
    assert differing(tree(tmp_path / "there"), tree(tmp_path / "here")) == []


@pytest.mark.usefixtures("small_blocks")
def test_events_are_those_of_a_local_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Heard(), Heard()
    execute(plan_of(source), tmp_path / "one", faults.options("single"), events=here)
    engine = _by(CrewEngine(MACHINES, most=3), monkeypatch)
    execute(plan_of(source), tmp_path / "out", faults.options("single"), events=there)
    assert here.done == here.total == there.done == there.total
    assert there.phases == here.phases
    assert engine.crew is not None
    assert len(engine.crew.where) == 3, "no more workers than asked for"


def test_what_workers_spend_is_in_the_profile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same reads, ops, hashes and writes, and time that workers waited for batches."""
    monkeypatch.setattr("qconvert.run.executor.BATCH_BYTES", 100_000)
    here = api.run("dequant-fp8", source, tmp_path / "one", jobs=1, profile=True).profile
    _by(CrewEngine(MACHINES, most=2), monkeypatch)
    there = api.run("dequant-fp8", source, tmp_path / "out", jobs=1, profile=True).profile
    assert here is not None
    assert there is not None
    work = ("read", "DequantFp8", "hash", "write")
    for profile in (here, there):
        assert {row.step for row in profile.workers} >= set(work)
    bytes_of = [{r.step: r.bytes for r in p.workers if r.step in work} for p in (here, there)]
    assert bytes_of[0] == bytes_of[1]
    assert there.processes == 2
    (waited,) = (row for row in there.workers if row.step == "wait for work")
    assert waited.times > 2


def test_one_engine_finishes_what_another_began(
    source: Path, one: dict[str, Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = faults.options("sharded")
    for crew_first in (True, False):
        out = tmp_path / f"out{crew_first}"
        with monkeypatch.context() as patch:
            if crew_first:
                _by(CrewEngine(MACHINES), patch)
            heard = Heard(interrupt, 200_000)
            with pytest.raises(KeyboardInterrupt):
                execute(plan_of(source), out, how, events=heard, files=InTurn())
        assert os.listdir(out) == [WORK_DIR]
        with monkeypatch.context() as patch:
            if not crew_first:
                _by(CrewEngine(MACHINES), patch)
            done = execute(plan_of(source), out, how)
        assert 0 < done.resumed_units < len(plan_of(source).tensors)
        assert differing(tree(out), one["sharded"]) == []


class _LateRay:
    """Ray's calls of a worker, with the answers that are there given last one first, and those of
    `lost` gone with their node."""

    def __init__(self, lost: Sequence[str]) -> None:
        self.exceptions = SimpleNamespace(RayTaskError=KeyError, RayError=OSError)
        self._lost, self._asked = lost, 0

    def put(self, setup: WorkerSetup) -> WorkerSetup:
        return setup

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def remote(self, _: type) -> Any:
        called = SimpleNamespace(remote=self._ask)
        actor = SimpleNamespace(begin=called, run=called)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    def _ask(self, _: object) -> str:
        self._asked += 1
        return f"answer {self._asked}"

    def wait(
        self, refs: list[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        return refs[-num_returns:], refs[:-num_returns]

    def get(self, ref: str) -> BatchResult | None:
        if ref in self._lost:
            raise OSError("its node is gone")
        return None if ref == "answer 1" else BatchResult(made=int(ref.split()[1]))

    def kill(self, _: object) -> None: ...


def test_answers_of_a_ray_worker_come_in_the_order_of_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that Ray holds does not come before one that is lost with its node: that one's batch
    would count as done."""
    for lost, wanted in (
        ((), [WorkerReady(), BatchResult(made=2), BatchResult(made=3)]),
        (("answer 2",), [WorkerReady(), WorkerLost("OSError: its node is gone")]),
    ):
        setup, sizes = WorkerSetup((), (), 0, 0), ray._Sizes(1, 0, None)
        workers = ray._RayWorkers(
            _LateRay(lost), setup, NodeCheck(__version__, (), ()), sizes, Heard()
        )
        monkeypatch.setattr(workers, "_on", lambda node: node.key)
        assert workers.start_worker(MACHINES[0]) == 1
        for _ in range(2):
            workers.send(1, Batch(0, (), {}))
        assert [workers.next(1.0) for _ in wanted] == [(1, each) for each in wanted]
        assert workers._awaited.get(1, ()) == (() if lost else deque())


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_engine_that_ends_too_early_publishes_nothing(
    source: Path, one: dict[str, Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, how = tmp_path / "out", faults.options("single")
    engine = CrewEngine(MACHINES)
    whole = engine.run
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run", lambda work: (yield from islice(whole(work), 3)))
        _by(engine, patch)
        with pytest.raises(RunError, match=r"workers ended before 'model.* more units were made"):
            execute(plan_of(source), out, how)
    assert os.listdir(out) == [WORK_DIR]
    execute(plan_of(source), out, how)
    assert differing(tree(out), one["single"]) == []


def _broken(folder: Path) -> Path:
    """A checkpoint with one weight that exceeds BF16."""
    tensors = dict(faults.small_tensors())
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    kind = tensors[name][0]
    assert kind.dtype == "F32"
    tensors[name] = kind, b"\xff\xff\x7f\x7f" * kind.numel
    return faults.write_checkpoint(folder, tensors, shards=2)


def _refusal(run: Callable[[], object]) -> QConvertError:
    with pytest.raises(QConvertError) as caught:
        run()
    return caught.value


def test_a_units_error_is_that_of_a_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _broken(tmp_path / "source")
    how = faults.options("single")
    here = _refusal(lambda: convert(source, tmp_path / "one", how))
    _by(CrewEngine(MACHINES), monkeypatch)
    there = _refusal(lambda: convert(source, tmp_path / "out", how))
    assert (type(there), str(there)) == (type(here), str(here))
    assert "'model.layers.1.mlp.up_proj.weight'" in str(there)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "single",
            "were lost with their worker 3 times, the last time on machine a: it was unplugged",
        ),
        # Of several files a worker begins each time with another.
        ("sharded", "the last worker was lost, on machine a: it was unplugged"),
    ],
)
def test_workers_that_are_lost_again_and_again(
    kind: str,
    said: str,
    source: Path,
    one: dict[str, Tree],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how, out = faults.options(kind), tmp_path / "out"
    with monkeypatch.context() as patch:
        engine = _by(CrewEngine(MACHINES[:1], losses=9, chance=1.0), patch)
        error = _refusal(lambda: convert(source, out, how))
    assert isinstance(error, RunError)
    assert f"{said}; run the same command again to go on" in str(error)
    assert engine.crew is not None
    assert engine.crew.losses == 6
    convert(source, out, how)
    assert differing(tree(out), one[kind]) == []


def test_no_machine_has_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _by(CrewEngine([Node("a", "machine a", 0)]), monkeypatch)
    error = _refusal(lambda: convert(source, tmp_path / "out", faults.options("single")))
    assert str(error) == "no machine of the cluster has room for a worker"


# --- refused while planning -----------------------------------------------------------------------


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "ray" else real(name, *more),
    )


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--address", "head:6379")])
def test_without_ray_it_is_refused(more: Sequence[str], source: Path, tmp_path: Path) -> None:
    done = run_cli("dequant", source, tmp_path / "out", "--engine", "ray", *more)
    assert (done.code, done.out) == (1, "")
    assert "pip install 'qconvert[ray]'" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "ray", "shard": "0/2"}, "exclude one another"),
        ({"address": "head:6379"}, "give --engine ray"),
        ({"engine": "slurm"}, "expected one of local, ray"),
        ({"engine": "ray", "address": "ray://head:10001"}, "outside of the cluster"),
        ({"engine": "ray", "address": "head"}, "write HOST:PORT, auto or local"),
    ],
)
def test_options_that_exclude_one_another(options: Any, said: str, source: Path) -> None:
    with pytest.raises(UsageError, match=said):
        api.plan("copy", source, **options)


def _with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qconvert.run.folder.prepare.check_installed", lambda: None)


def test_the_plan_says_what_a_worker_needs(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_ray(monkeypatch)
    words = "dequant", source, tmp_path / "out", "--engine", "ray", "--dry-run"
    shown = json.loads(run_cli(*words, "--json").out)
    assert (shown["engine"], shown["jobs"]) == ("ray", 0)
    assert shown["worker_memory"] > RAY_PROCESS_BYTES
    assert "for each worker on Ray" in run_cli(*words).out
    assert "for each of 7 workers on Ray" in run_cli(*words, "--jobs", "7").out


def test_the_smallest_memory_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_ray(monkeypatch)
    plan = plan_of(source)
    with pytest.raises(
        PlanError, match=r"give --memory (\d+)MiB or more, which each machine"
    ) as no:
        prepare(plan, RunOptions(engine="ray", memory=1 << 20))
    least = int(str(no.value).partition("give --memory ")[2].partition("MiB")[0]) << 20
    share = prepare(plan, RunOptions(engine="ray", memory=least)).share
    assert share.total + share.worker <= least
    with pytest.raises(PlanError):
        prepare(plan, RunOptions(engine="ray", memory=least - (1 << 20)))


def test_nobody_listens_at_the_address() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError):
            ray._knock(address)
    ray._knock("auto")


# --- what a node looks for ------------------------------------------------------------------------


@pytest.fixture
def probe(source: Path, tmp_path: Path) -> NodeCheck:
    file = tmp_path / "out" / WORK_DIR / "probe"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"this very folder")
    shards = Checkpoint.open(source).shards
    return NodeCheck(__version__, [(file, b"this very folder")], shards)


def test_a_node_that_sees_all(probe: NodeCheck) -> None:
    assert check_node(probe) is None


def test_a_node_with_another_version(probe: NodeCheck) -> None:
    assert "expected 9.9: install the same" in str(check_node(replace(probe, version="9.9")))


def test_a_node_that_does_not_see_the_folder(probe: NodeCheck, tmp_path: Path) -> None:
    ((path, wanted),) = probe.files
    path.write_bytes(b"that very folder")
    assert f"sees another folder as {tmp_path / 'out'}" in str(check_node(probe))
    path.write_bytes(wanted + b", longer")
    assert f"sees another folder as {tmp_path / 'out'}" in str(check_node(probe))
    path.unlink()
    said = str(check_node(probe))
    assert f"does not see the output folder {tmp_path / 'out'}" in said
    assert "on a file system that all share" in said
    path.symlink_to(tmp_path)
    assert "cannot write in" in str(check_node(probe))


def test_a_node_that_does_not_see_the_source(probe: NodeCheck, tmp_path: Path) -> None:
    first, *rest = probe.shards
    gone = replace(first, path=tmp_path / "gone", real=None)
    assert "cannot read" in str(check_node(replace(probe, shards=[gone, *rest])))
    other = replace(first, mtime_ns=first.mtime_ns + 1)
    assert "sees another file as" in str(check_node(replace(probe, shards=[*rest, other])))


# --- blocks ---------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 3 * BLOCK_BYTES), min_size=1, max_size=30),
    owners=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    header=st.integers(0, BLOCK_BYTES),
)
def test_no_block_is_written_by_two(sizes: list[int], owners: list[int], header: int) -> None:
    """And what batches write, with the ends that they hand over, is everything, once."""
    at, parts = header, []
    for number, size in enumerate(sizes):
        output = Output(TensorType("U8", (size,)), ())
        unit = Unit((str(number),), (output,), (), read=size, write=size, peak=0)
        parts.append((number, unit, Place(0, at)))
        at += size
    covered: list[tuple[int, int]] = []
    touched: dict[int, int] = {}
    for owner in range(4):
        mine = [part for part in parts if owners[part[0]] == owner]
        batch = Batch(
            0, [(n, unit) for n, unit, _ in mine], {str(n): place for n, _, place in mine}
        )
        own = aligned_blocks(batch).get(0, [])
        for number, _, place in mine:
            for start, stop, written in parts_of(place.offset, place.offset + sizes[number], own):
                covered.append((start, stop))
                assert start < stop
                for block in (
                    range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if written else ()
                ):
                    assert touched.setdefault(block, owner) == owner
        assert all(low % BLOCK_BYTES == high % BLOCK_BYTES == 0 for low, high in own)
        whole = sum(high - low for low, high in own)
        assert whole <= sum(sizes[n] for n, _, _ in mine)
    covered.sort()
    assert sum(stop - start for start, stop in covered) == sum(sizes)
    assert all(a[1] <= b[0] for a, b in pairwise(covered))


@settings(max_examples=30)
@given(data=st.data())
def test_a_sink_of_blocks_writes_its_own_and_keeps_the_rest(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = 5 * BLOCK_BYTES
    folder = tmp_path_factory.mktemp("sink")
    path = folder / "file"
    path.write_bytes(bytes(size))
    low = data.draw(st.integers(0, 4))
    own = (low * BLOCK_BYTES, data.draw(st.integers(low + 1, 5)) * BLOCK_BYTES)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    wanted = random.Random(start).randbytes(stop - start)
    sink = BlockSink(Files(), [path], 16 * 4096)
    try:
        sink.own({0: [own]})
        for at in range(start, stop, 10_000):
            chunk = wanted[at - start : at - start + 10_000]
            sink.room(0, at, len(chunk))[:] = chunk
        sink.flush()
        assert sink.read(0, start, stop - start) == wanted, "kept or written, it is read back"
        found = path.read_bytes()
        inside = slice(max(start, own[0]), max(min(stop, own[1]), max(start, own[0])))
        assert found[inside] == wanted[inside.start - start : inside.stop - start]
        assert not any(found[: inside.start])
        assert not any(found[inside.stop :])
        whole = bytearray(found)
        for end in sink.ends():
            whole[end.offset : end.offset + len(end.data)] = end.data
        assert whole[start:stop] == wanted
        assert sink.ends() == ()
    finally:
        sink.close()
    path.unlink()
