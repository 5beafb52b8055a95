"""Ray itself, with a cluster of processes on this machine: a node is killed, the bytes stay the same.

One test, because the cluster takes ten seconds to start."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faults
import pytest
from checkpoints import run_cli
from crews import Heard, interrupt
from faults import Tree, differing, plan_of, tree
from ray_clusters import add_node, anonymous_bytes, cluster, processes

from qconvert import __version__
from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.core.errors import RunError
from qconvert.run.engines import ray as ray_engine
from qconvert.run.engines.ray import connected
from qconvert.run.executor import execute
from qconvert.run.folder.prepare import prepare
from qconvert.run.work.cluster_node import NodeCheck, check_node
from qconvert.run.work.options import RunOptions
from qconvert.run.work.worker import WorkerSetup

_LAYERS = 24
_BAD = "model.layers.7.mlp.up_proj.weight"


def _tensors() -> faults.Tensors:
    tensors = dict(faults.small_tensors())
    for layer in range(2, _LAYERS):
        at = f"model.layers.{layer}"
        tensors |= faults.weight(f"{at}.mlp.up_proj.weight", (200, 256), layer)
        tensors[f"{at}.norm.weight"] = faults.plain((256,), layer)
    return tensors


def _overflowing(tensors: faults.Tensors) -> faults.Tensors:
    name = f"{_BAD}_scale_inv"
    kind = tensors[name][0]
    return {**tensors, name: (kind, b"\xff\xff\x7f\x7f" * kind.numel)}


@dataclass(frozen=True)
class Bench:
    """A cluster, a checkpoint, and what this process alone makes of it; each unit a batch of its own."""

    cluster: Any
    source: Path
    folder: Path
    here: Mapping[str, Tree]

    def ray(self, kind: str, **more: Any) -> RunOptions:
        how = replace(faults.options(kind), jobs=None)
        return replace(how, engine="ray", address=self.cluster.address, jobs=3, **more)

    def convert(self, out: Path, how: RunOptions, heard: Heard | None = None) -> Heard:
        heard = heard or Heard()
        execute(plan_of(self.source), out, how, events=heard)
        return heard


@pytest.mark.peer
def test_on_a_cluster(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="ray is not installed: make peers")
    source = faults.write_checkpoint(tmp_path / "source", _tensors(), shards=2)
    here = {}
    for kind in ("sharded", "single"):
        execute(plan_of(source), tmp_path / kind, faults.options(kind))
        here[kind] = tree(tmp_path / kind)
    with cluster() as made:
        bench = Bench(made, source, tmp_path, here)
        lasting = _a_node_is_killed(bench)
        _as_a_command(bench)
        handler = signal.getsignal(signal.SIGTERM)
        # A program that is connected stays so, and what Ray has started is used again.
        with connected(made.address) as ray:
            assert signal.getsignal(signal.SIGTERM) is handler
            _one_engine_finishes_what_another_began(bench)
            _errors_are_those_of_a_local_run(bench)
            _a_node_that_sees_another_folder_is_refused(bench)
            _workers_are_as_many_as_memory_holds(bench, ray, lasting)
            assert ray.is_initialized()
        assert signal.getsignal(signal.SIGTERM) is handler
        assert not ray.is_initialized()
        assert capfd.readouterr().out == "", "Ray tells of a lost node on stdout"
    assert processes(made.folder) == {}
    assert not Path(made.folder).exists()


def _a_node_is_killed(bench: Bench) -> Any:
    """The only one, once its first unit is done; another joins before. Meanwhile nothing is sent: its
    two workers have two batches each. Returns the node that lasts."""
    dying = add_node(bench.cluster, 2)
    lasting: list[Any] = []

    def exchange() -> None:
        found = processes(bench.cluster.folder).items()
        workers = [number for number, name in found if name.startswith("ray::NodeWorker")]
        assert workers, "one of the two has begun"
        assert max(map(anonymous_bytes, workers)) <= share.worker
        lasting.append(add_node(bench.cluster, 2))
        bench.cluster.remove_node(dying, allow_graceful=False)

    out = bench.folder / "killed"
    heard = Heard(exchange)
    share = prepare(plan_of(bench.source), bench.ray("single")).share
    bench.convert(out, bench.ray("single"), heard)
    assert differing(tree(out), bench.here["single"]) == []
    assert heard.done == heard.total
    assert any("was lost: its units are run again" in text for text in heard.phases), heard.phases
    return lasting[0]


def _one_engine_finishes_what_another_began(bench: Bench) -> None:
    by_ray, by_this = bench.ray("sharded"), faults.options("sharded")
    for name, first, second in (("ray-local", by_ray, by_this), ("local-ray", by_this, by_ray)):
        out = bench.folder / name
        with pytest.raises(KeyboardInterrupt):
            bench.convert(out, first, Heard(interrupt, after=500_000))
        assert os.listdir(out) == [WORK_DIR]
        assert sorted(os.listdir(out / WORK_DIR)) == ["journal.jsonl", "lock", "stage"]
        heard = bench.convert(out, second)
        assert heard.done == heard.total
        assert differing(tree(out), bench.here["sharded"]) == []


def _errors_are_those_of_a_local_run(bench: Bench) -> None:
    source = faults.write_checkpoint(bench.folder / "overflows", _overflowing(_tensors()), shards=2)
    said = []
    for how in (faults.options("single"), bench.ray("single")):
        with pytest.raises(RunError, match=_BAD) as caught:
            replace(bench, source=source).convert(bench.folder / f"bad-{how.engine}", how)
        said.append(str(caught.value))
    assert said[0] == said[1]


def _a_node_that_sees_another_folder_is_refused(bench: Bench) -> None:
    """All nodes are this machine: the folder is taken away before they look."""
    out = bench.folder / "unseen"

    def elsewhere(probe: NodeCheck) -> str | None:
        moved = [(path.parent / "elsewhere", wanted) for path, wanted in probe.files]
        return check_node(replace(probe, files=moved))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "check_node", elsewhere)
        with pytest.raises(RunError, match=r"node .* does not see the output folder .*/unseen"):
            bench.convert(out, bench.ray("single"))
    assert os.listdir(out) == [WORK_DIR]


def _as_a_command(bench: Bench) -> None:
    out = bench.folder / "command"
    size = ("--max-shard-size", str(faults.SHARD_BYTES))
    more = ("--engine", "ray", "--address", bench.cluster.address, "--jobs", "2", "--json")
    done = run_cli("dequant", bench.source, out, *size, *more, "--profile")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["published"] is True
    read = [row["bytes"] for row in told["profile"]["workers"]["steps"] if row["step"] == "read"]
    assert read == [told["profile"]["runs"][0]["bytes_to_read"]]
    here = bench.folder / "command-here"
    assert run_cli("dequant", bench.source, here, *size, "--jobs", "1").code == 0
    assert differing(tree(out), tree(here)) == []


def _workers_are_as_many_as_memory_holds(bench: Bench, ray: Any, node: Any) -> None:
    """A node of two cores, and one of four whose memory is small."""
    before = signal.getsignal(signal.SIGTERM)
    small = add_node(bench.cluster, cores=4, memory=300 << 20)
    signal.signal(signal.SIGTERM, before)  # the new node of Ray's has taken it
    big, less = node.node_id, small.node_id
    probe = NodeCheck(__version__, (), ())
    cases: list[tuple[int, int | None, dict[str, int]]] = [
        (200 << 20, None, {big: 2, less: 1}),
        (140 << 20, None, {big: 2, less: 2}),
        (140 << 20, 200 << 20, {big: 1, less: 1}),
        (400 << 20, None, {big: 2}),
    ]
    for worker, most, wanted in cases:
        sizes = ray_engine._Sizes(worker, 0, most)
        crew = ray_engine._RayWorkers(ray, WorkerSetup((), (), 0, 0), probe, sizes, Heard())
        assert {found.key: found.workers for found in crew.nodes()} == wanted
    sizes = ray_engine._Sizes(8 << 30, 0, None)
    crew = ray_engine._RayWorkers(ray, WorkerSetup((), (), 0, 0), probe, sizes, Heard())
    with pytest.raises(RunError, match=r"no node of the Ray cluster has a CPU and 8\.6 GB"):
        crew.nodes()
