"""What a calibration does on GPUs, done on a CPU: torch takes `cpu:0` for a CPU's name, and all that is
not called `cpu` goes the way of an accelerator. Products, streams and pinned memory of CUDA are not
tried here."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate_models import qwen3_moe, samples, saved

from qconvert.calibrate import behind, layers, work_dir
from qconvert.calibrate.engine import Event, calibrate
from qconvert.calibrate.settings import Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.int_scheme import Codes, IntScheme
from qconvert.plan.plan import Plan
from qconvert.run.backend import Paused
from qconvert.run.until import Pace

SCHEME = IntScheme(4, 32)
TOKENS = samples(6, 40)
# Batches of experts smaller than a device's share of them.
SETTINGS = Settings(min_tokens=1, propagated_error="correct", together=2)
ONE = ("cpu:0",)

Place = tuple[int, int | None, str]


class _Stream:
    """A CUDA event or stream: on a CPU everything is done in order."""

    def __init__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda of a machine whose GPU is the CPU, with 8 GiB; and sizes at which the little model has
    several batches, chunks, parts and pieces of its files."""
    place = contextlib.nullcontext()
    found: dict[str, Any] = {
        "Event": _Stream, "Stream": _Stream, "current_stream": _Stream, "synchronize": lambda *_: None,
        "device": lambda *_: place, "stream": lambda *_: place, "set_device": lambda *_: None,
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=8 << 30),
    }  # fmt: skip
    for name, made in found.items():
        monkeypatch.setattr(torch.cuda, name, made)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name in ("_ATTEND", "_ATTEND_MOST"):
        monkeypatch.setattr(layers, name, 80)
    monkeypatch.setattr(layers, "_GATHER", 160)
    for name in ("_ATTEND_NUMBERS", "_GATHER_NUMBERS"):
        monkeypatch.setattr(layers, name, 1)
    monkeypatch.setattr(behind, "_ROWS", 70)
    monkeypatch.setattr(work_dir, "_ROWS", 50)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = saved(qwen3_moe(num_hidden_layers=3), tmp_path_factory.mktemp("model") / "model")
    return Plan.identity(Checkpoint.open(folder))


def events(
    plan: Plan, folder: Path, devices: tuple[str, ...], settings: Settings
) -> Iterator[Event]:
    return calibrate(
        plan, TOKENS, [SCHEME], settings, work_dir=folder, memory=None, devices=devices, key="k"
    )


def codes_of(found: Iterator[Event]) -> dict[Place, Codes]:
    return {
        (one.layer, one.expert, one.kind): one.codes[0] for one in found if isinstance(one, Matrix)
    }


def assert_same(some: dict[Place, Codes], others: dict[Place, Codes]) -> None:
    assert some.keys() == others.keys()
    for place, one in some.items():
        assert (one.codes == others[place].codes).all(), place
        assert (one.scale == others[place].scale).all(), place


@pytest.mark.parametrize("solver", ["best", "llmcompressor"])
def test_any_number_of_devices_finds_the_same_codes(
    solver: Any, plan: Plan, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, solver=solver)
    alone = codes_of(events(plan, tmp_path / "one", ONE, settings))
    assert {layer for layer, _, _ in alone} == {0, 1, 2}
    for count in (2, 3):
        several = codes_of(events(plan, tmp_path / f"{count}", ONE * count, settings))
        assert_same(several, alone)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("every", [0.0, 1e9], ids=["kept each time", "kept where it pauses"])
def test_a_paused_run_goes_on_to_the_same_codes(
    every: float, count: int, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_dir, "_EVERY", every)
    whole = codes_of(events(plan, tmp_path / "whole", ONE, SETTINGS))
    another = Pace.another
    monkeypatch.setattr(Pace, "another", lambda self: False)
    first = [*events(plan, tmp_path / "room", ONE * count, SETTINGS)]
    assert first[-1] == Paused(1, 3)
    monkeypatch.setattr(Pace, "another", another)
    second = codes_of(events(plan, tmp_path / "room", ONE * count, SETTINGS))
    assert {layer for layer, _, _ in second} == {1, 2}
    assert_same({**codes_of(iter(first)), **second}, whole)


def test_a_killed_run_does_the_layers_since_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_dir, "_EVERY", 1e9)
    whole = codes_of(events(plan, tmp_path / "whole", ONE, SETTINGS))
    running = events(plan, tmp_path / "room", ONE * 2, SETTINGS)
    for event in running:
        if isinstance(event, Matrix) and event.layer == 2:
            break
    running.close()  # type: ignore[attr-defined]
    assert_same(codes_of(events(plan, tmp_path / "room", ONE * 2, SETTINGS)), whole)
