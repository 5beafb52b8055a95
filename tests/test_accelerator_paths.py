"""What a calibration does on a GPU, done on a CPU (tests/accelerators.py): it ends and goes on."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerators import SCHEME, SETTINGS, TOKENS, Place, assert_same, codes_of, pretend
from calibrate_models import qwen3_moe, saved

from qconvert.calibrate import engine, experts, layers, memory, work_dir
from qconvert.calibrate.background_writer import BackgroundWriter
from qconvert.calibrate.engine import Event, calibrate
from qconvert.calibrate.layers import Layers
from qconvert.calibrate.settings import LayerDone, Matrix
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.int_scheme import Codes
from qconvert.plan.plan import Plan
from qconvert.run.work.backend import PausedAt
from qconvert.run.work.options import Pace


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = qwen3_moe(num_hidden_layers=3, num_experts=8, hidden_size=64, moe_intermediate_size=64)
    folder = saved(config, tmp_path_factory.mktemp("model") / "model")
    return Plan.identity(Checkpoint.open(folder))


def events(plan: Plan, folder: Path) -> Generator[Event]:
    return calibrate(
        plan, TOKENS, [SCHEME], SETTINGS, work_dir=folder, memory=None, device="cpu:0", key="k"
    )


def places(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Where runs from now on hold hidden states: None is in files."""
    found: list[str | None] = []
    holding = engine._holding

    def told(layers: Layers) -> tuple[Layers, BackgroundWriter | None, str]:
        made = holding(layers)
        found.append(made[2] if made[1] is not None else None)
        return made

    monkeypatch.setattr(engine, "_holding", told)
    return found


@pytest.fixture(scope="module")
def whole(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[Place, Codes]:
    """The codes of an undisturbed run, all in the accelerator's memory."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        held = places(patch)
        codes = codes_of(events(plan, tmp_path_factory.mktemp("whole")))
    assert held == ["cpu:0"]
    assert {layer for layer, _, _ in codes} == {0, 1, 2}
    return codes


@pytest.mark.parametrize("every", [0.0, 1e9], ids=["kept each time", "kept where it pauses"])
def test_a_paused_run_goes_on_to_the_same_codes(
    every: float, plan: Plan, whole: dict[Place, Codes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(work_dir, "_EVERY", every)
    another = Pace.another
    monkeypatch.setattr(Pace, "another", lambda self: False)
    first = [*events(plan, tmp_path / "room")]
    assert first[-1] == PausedAt(1, 3)
    monkeypatch.setattr(Pace, "another", another)
    second = codes_of(events(plan, tmp_path / "room"))
    assert {layer for layer, _, _ in second} == {1, 2}
    assert_same({**codes_of(first), **second}, whole)


def test_a_killed_run_does_the_layers_since_again(
    plan: Plan, whole: dict[Place, Codes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_dir, "_EVERY", 1e9)
    running = events(plan, tmp_path / "room")
    for event in running:
        if isinstance(event, Matrix) and event.layer == 2:
            break
    running.close()
    assert_same(codes_of(events(plan, tmp_path / "room")), whole)


@pytest.mark.parametrize(("share", "place"), [(0.75, "cpu"), (0.0, None)], ids=["host", "files"])
def test_codes_are_the_same_wherever_hidden_states_lie(
    share: float, place: str | None, plan: Plan, whole: dict[Place, Codes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the accelerator's memory; where that has no room in the host's, or in files."""
    found = places(monkeypatch)
    monkeypatch.setattr(memory, "_DEVICE_STATES", 0.0)
    monkeypatch.setattr(memory, "_STATES_BESIDE", share)
    assert_same(codes_of(events(plan, tmp_path / "here")), whole)
    assert found == [place]


def test_codes_are_the_same_however_many_experts_are_in_memory(
    plan: Plan, whole: dict[Place, Codes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together, or two at a time, which pass their answers on to the next."""
    monkeypatch.setattr(layers, "experts_together", lambda *_, **__: 2)
    assert_same(codes_of(events(plan, tmp_path / "groups")), whole)


def test_an_expert_sees_its_tokens_some_at_a_time(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of squares are the same but for their order, in the layer whose inputs do not depend on
    codes. Of what goes into down some are, which a product of other rows rounds otherwise."""
    found = []
    for most in (1 << 20, 9):
        monkeypatch.setattr(experts, "tokens_together", lambda _, most=most: most)
        done = [one for one in events(plan, tmp_path / str(most)) if isinstance(one, LayerDone)]
        stats = done[0].stats
        assert stats is not None
        found.append(stats)
    assert max(found[0].counts) > 2 * 9
    for name in ("gate_up_mean_square", "gate_up_absmax"):
        np.testing.assert_allclose(getattr(found[1], name), getattr(found[0], name), rtol=1e-5)
    off = np.abs(found[1].down_mean_square - found[0].down_mean_square)
    assert off.mean() < 0.01 * found[0].down_mean_square.mean()


def test_room_is_kept_for_what_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many of an expert's tokens as its hidden size says, and those of both streams that come
    from the host; experts get what tokens leave of the accelerator."""
    asked: list[dict[str, Any]] = []
    fits = memory.experts_together

    def spy(budget: memory.Budget, *args: Any, **more: Any) -> int:
        asked.append({"device": budget.device, **more})
        return fits(budget, *args, **more)

    monkeypatch.setattr(layers, "experts_together", spy)
    monkeypatch.setattr(layers, "tokens_together", lambda hidden: hidden)
    folder = saved(qwen3_moe(num_hidden_layers=1, moe_intermediate_size=64), tmp_path / "model")
    model = Plan.identity(Checkpoint.open(folder))
    stream = 240 * 128 * 2  # bytes of what goes into experts
    for share in (20.0, 1.5, 0.5):
        monkeypatch.setattr(memory, "_DEVICE_STATES", share * stream / (8 << 30))
        list(events(model, tmp_path / str(share)))
    assert [one["most"] for one in asked] == [128] * 3
    assert [one["hosted"] for one in asked] == [0, 1, 2]
    left = [(one["device"] - (4 << 30)) / stream for one in asked]
    assert left == pytest.approx([20 - 6, 1.5 - 1, 0.5], abs=0.2)  # routes take a little


def test_layers_are_nearly_given_what_they_are_on_a_cpu(plan: Plan, tmp_path: Path) -> None:
    """There experts answer one by one, and no product has rows beside an expert's own. Codes are found
    from sums in another order, so a few are others, and what follows from them is."""
    found = []
    for device in ("cpu", "cpu:0"):
        events = calibrate(
            plan, TOKENS, [SCHEME], SETTINGS, work_dir=tmp_path / device, memory=None, device=device,
            key="k",
        )  # fmt: skip
        found.append([event.stats for event in events if isinstance(event, LayerDone)])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        for name in ("gate_up_mean_square", "down_mean_square"):
            mine, theirs = getattr(one, name), getattr(other, name)
            off = np.linalg.norm(mine - theirs) / np.linalg.norm(mine)
            assert off < 0.05
