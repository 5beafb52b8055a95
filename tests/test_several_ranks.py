"""Processes that calibrate together, a device each: the same codes as one alone finds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerators import SCHEME, SETTINGS, TOKENS, assert_same, codes_of, pretend
from calibrate_models import qwen3_moe, samples, saved
from thread_ranks import run_ranks

from qconvert.calibrate import engine, work_dir
from qconvert.calibrate.distributed import Communicator
from qconvert.calibrate.engine import Event, calibrate
from qconvert.calibrate.model import Model
from qconvert.calibrate.settings import LayerDone, Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import RunError
from qconvert.models.linears import quantizable
from qconvert.plan.plan import Plan
from qconvert.run.work.backend import PausedAt
from qconvert.run.work.options import Pace

# Several CPUs are a team only in tests: its way through a layer, sample by sample, is tested alone.
CPU = pytest.param("cpu", marks=pytest.mark.rest)
# Several batches for each of three processes.
EXPERTS = 8


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = qwen3_moe(
        num_hidden_layers=3, num_experts=EXPERTS, hidden_size=64, moe_intermediate_size=64
    )
    folder = saved(config, tmp_path_factory.mktemp("model") / "model")
    return Plan.identity(Checkpoint.open(folder))


@pytest.fixture(autouse=True)
def built(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share torch's default dtype, which transformers changes while it builds a class."""
    pretend(monkeypatch)
    made = Model(plan, SETTINGS.attention)
    monkeypatch.setattr(engine, "Model", lambda *_: copy.deepcopy(made, {id(plan): plan}))


def events(
    plan: Plan, folder: Path, device: str, settings: Settings = SETTINGS, tokens: Any = TOKENS,
    **more: Any,
) -> Callable[[Communicator], Generator[Event]]:  # fmt: skip
    def of(comm: Communicator) -> Generator[Event]:
        return calibrate(
            plan, tokens, [SCHEME], settings, work_dir=folder, memory=None, device=device, key="k",
            comm=comm, **more,
        )  # fmt: skip

    return of


SingleProcess = Callable[..., list[Event]]


@pytest.fixture(scope="module")
def alone(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> SingleProcess:
    """What one process tells, which finds it once for each device and settings."""

    @cache
    def found(device: str, settings: Settings = SETTINGS) -> list[Event]:
        folder = tmp_path_factory.mktemp("alone")
        return run_ranks(1, events(plan, folder, device, settings))[0]

    return found


def all_of(found: list[list[Event]]) -> list[Event]:
    return [event for some in found for event in some]


@pytest.mark.parametrize(
    ("device", "count", "solver"),
    [
        pytest.param("cpu", 2, "best", marks=pytest.mark.rest),
        ("cpu:0", 2, "best"),
        ("cpu:0", 3, "best"),
        ("cpu:0", 2, "llmcompressor"),
    ],
)
def test_a_team_finds_the_same_codes(
    device: str, count: int, solver: Any, plan: Plan, alone: SingleProcess, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, solver=solver)
    whole = codes_of(alone(device, settings))
    assert {layer for layer, _, _ in whole} == {0, 1, 2}
    found = run_ranks(count, events(plan, tmp_path / "several", device, settings))
    for some in found:  # each has some, and none has another's
        assert any(isinstance(event, Matrix) for event in some)
    assert sum(isinstance(e, Matrix) for e in all_of(found)) == len(whole)
    assert_same(codes_of(all_of(found)), whole)


@pytest.mark.parametrize("device", ["cpu:0", CPU])
def test_a_process_without_tokens_solves_experts(device: str, plan: Plan, tmp_path: Path) -> None:
    """Of one part of tokens, or of six, more processes than parts."""
    tokens = samples(2, 40) if device == "cpu:0" else samples(1, 40)
    whole = codes_of(run_ranks(1, events(plan, tmp_path / "one", device, tokens=tokens))[0])
    found = run_ranks(3, events(plan, tmp_path / "several", device, tokens=tokens))
    assert_same(codes_of(all_of(found)), whole)


def test_scales_of_a_cache_are_of_all_samples(plan: Plan, tmp_path: Path) -> None:
    caches = {number: f"model.layers.{number}.self_attn" for number in range(3)}

    def found(count: int) -> dict[str, Any]:
        room = tmp_path / str(count)
        every = all_of(run_ranks(count, events(plan, room, "cpu:0", caches=caches)))
        own = [e for e in every if isinstance(e, Matrix) and e.expert is None]
        assert len(own) == 3
        return {one.kind: one.codes[0].scale.tolist() for one in own}

    assert found(1) == found(3)


def test_samples_of_any_length_are_cut_into_the_same_parts(plan: Plan, tmp_path: Path) -> None:
    lengths = (40, 40, 33, 7, 50, 50, 20)
    tokens = [samples(1, length, seed=n)[0] for n, length in enumerate(lengths)]
    whole = codes_of(run_ranks(1, events(plan, tmp_path / "one", "cpu:0", tokens=tokens))[0])
    found = run_ranks(2, events(plan, tmp_path / "several", "cpu:0", tokens=tokens))
    assert_same(codes_of(all_of(found)), whole)


@pytest.mark.parametrize("device", ["cpu:0", CPU])
@pytest.mark.parametrize("every", [0.0, 1e9], ids=["kept each time", "kept where it pauses"])
def test_a_paused_team_goes_on_in_another_number(
    every: float, device: str, plan: Plan, alone: SingleProcess, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole = codes_of(alone(device))
    monkeypatch.setattr(work_dir, "_EVERY", every)
    found: list[Event] = []
    another = Pace.another
    for at, count in enumerate((3, 2, 1)):
        monkeypatch.setattr(Pace, "another", (lambda _: False) if at < 2 else another)
        made = run_ranks(count, events(plan, tmp_path / "room", device))
        for some in made:
            assert (some[-1] == PausedAt(at + 1, 3)) == (at < 2)
        assert {e.layer for e in all_of(made) if isinstance(e, Matrix)} == {at}
        found += all_of(made)
    assert_same(codes_of(found), whole)


def test_a_folder_that_is_not_shared_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_dir, "_LISTED_AFTER", 0.0)

    def of(comm: Communicator) -> Generator[Event]:
        return events(plan, tmp_path / str(comm.rank), "cpu:0")(comm)

    with pytest.raises(RunError, match=r"processes \[1\] of 2 do not see what the first one made"):
        run_ranks(2, of)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"experts": "all"}, marks=pytest.mark.rest),
        pytest.param({"min_tokens": 30, "undersampled": "rtn"}, marks=pytest.mark.big),
        {"min_tokens": 30},
    ],
)
def test_statistics_are_of_all_experts(
    more: dict[str, Any], plan: Plan, alone: SingleProcess, tmp_path: Path
) -> None:
    device = "cpu:0"
    settings = replace(SETTINGS, **more)
    one = alone(device, settings)
    found = run_ranks(2, events(plan, tmp_path / "several", device, settings))
    assert_same(codes_of(all_of(found)), codes_of(one))
    assert_told(found, one)


def assert_told(found: list[list[Event]], alone: list[Event]) -> None:
    """Each process tells the same of layers as one alone."""
    wanted = [event for event in alone if isinstance(event, LayerDone)]
    for some in found:
        got = [event for event in some if isinstance(event, LayerDone)]
        assert [one.layer for one in got] == [0, 1, 2]
        for one, other in zip(got, wanted, strict=True):
            assert one.stats is not None
            assert other.stats is not None
            for name in ("counts", "saliency", "gate_up_mean_square", "gate_up_absmax",
                         "down_mean_square"):  # fmt: skip
                assert np.array_equal(getattr(one.stats, name), getattr(other.stats, name)), name
            for name in ("few", "rounded", "dead_columns", "fallbacks"):
                assert getattr(one.stats, name) == getattr(other.stats, name), name


@pytest.mark.parametrize("device", ["cpu:0", CPU])
def test_linears_are_solved_once_and_put_into_all_layers(
    device: str, plan: Plan, tmp_path: Path
) -> None:
    asked = {m: [SCHEME] for m, _ in quantizable(plan, ()) if ".self_attn." in m}
    assert asked
    (one,) = run_ranks(1, events(plan, tmp_path / "one", device, linears=asked))
    found = run_ranks(2, events(plan, tmp_path / "several", device, linears=asked))
    assert sum(isinstance(e, Matrix) for e in all_of(found)) == sum(
        isinstance(e, Matrix) for e in one
    )
    assert_same(codes_of(all_of(found)), codes_of(one))
    assert any(isinstance(e, Matrix) and e.expert is None for e in found[0])
