"""Every command with hostile inputs: refused in one message that names the culprit, safely, in time.

A bounded sample in `make test`; `-m hostile` plays what `make check` asks for, 600 cases, or 1000 with
QCONVERT_ALL=1, and tests/hostile/run.py all there is, with a table. QCONVERT_HOSTILE_SEED draws others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile.bases import Bases
from hostile.case import Case
from hostile.catalogue import cases, sample
from hostile.oracle import described, faults
from hostile.play import Stage
from qconvert.cli.main import cli

SEED = int(os.environ.get("QCONVERT_HOSTILE_SEED", "1"))
BOUNDED, CHECKED = 24, 1000 if os.environ.get("QCONVERT_ALL") == "1" else 600
_PARTS, _CHECKED_PARTS = 1, 30


def _bounded() -> list[Case]:
    return sample(cases(SEED), BOUNDED, SEED, heavy=False)


def _checked() -> list[Case]:
    return sample(cases(SEED), CHECKED, SEED)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Bases are made once, for all processes of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with Stage(Bases(root / "hostile-bases")) as made:
        yield made


def _play(stage: Stage, chosen: list[Case]) -> set[str]:
    """Play cases; fails with all that is wrong. Returns the inputs."""
    wrong: list[str] = []
    inputs: set[str] = set()
    for case in chosen:
        outcome = stage.play(case)
        inputs.add(outcome.input)
        found = faults(case, outcome.played)
        if found:
            told = "\n".join(f"  {fault.kind}: {fault.detail}" for fault in found)
            wrong.append(
                f"{case.name}\n{told}\n{described(outcome.played)}\n  again: .venv/bin/python "
                f"tests/hostile/run.py --seed {SEED} --case {case.name!r} --keep DIR"
            )
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(chosen)} cases:\n\n" + "\n\n".join(wrong), pytrace=False)
    return inputs


@pytest.mark.parametrize("part", range(_PARTS))
def test_a_sample(part: int, stage: Stage) -> None:
    chosen = _bounded()[part::_PARTS]
    assert len(_play(stage, chosen)) == len(chosen), "inputs are not distinct"


@pytest.mark.hostile
@pytest.mark.parametrize("part", range(_CHECKED_PARTS))
def test_all(part: int, stage: Stage) -> None:
    # Neighbours in the list are of one class and need the same bases; those with torch stay together.
    every = _checked()
    heavy = [case for case in every if case.scene.heavy]
    light = [case for case in every if not case.scene.heavy]
    parts = [heavy, *(light[n :: _CHECKED_PARTS - 1] for n in range(_CHECKED_PARTS - 1))]
    assert len(_play(stage, parts[part])) == len(parts[part]), "inputs are not distinct"


def _commands() -> set[str]:
    found = set(cli.commands) - {"experts", "mtp", "recipes", "prepare"}
    return found | {
        "experts stack",
        "experts unstack",
        "mtp drop",
        "mtp extract",
        "mtp graft",
        "recipes show",
        "prepare",
    }


@pytest.mark.parametrize("count", [BOUNDED, CHECKED])
def test_samples_reach_every_class_and_command(count: int) -> None:
    every = cases(SEED)
    chosen = sample(every, count, SEED, heavy=False)
    assert len(chosen) == count
    groups = {case.mutation.group for case in every}
    assert {case.mutation.group for case in chosen} >= groups - {"calibration", "sound"}
    reached = {case.scene.command for case in chosen}
    missing = {name for name in _commands() if not any(r.startswith(name) for r in reached)}
    assert missing == set() or count == BOUNDED  # fewer cases than classes and commands
    assert len(reached) >= 20


def test_a_seed_gives_the_same_cases_again() -> None:
    names = [case.name for case in cases(SEED)]
    assert len(names) >= 1000
    assert names == [case.name for case in cases(SEED)]
    assert [case.name for case in sample(cases(7), 50, 7)] != [
        case.name for case in sample(cases(8), 50, 8)
    ]


def test_what_a_case_leaves_can_be_looked_at(tmp_path: Path, stage: Stage) -> None:
    case = next(c for c in cases(SEED) if c.name.startswith("config/form list/"))
    with Stage(stage.bases, tmp_path / "kept") as keeping:
        outcome = keeping.play(case)
    assert outcome.folder is not None
    assert {"case", "stdout", "stderr"} <= {path.name for path in outcome.folder.iterdir()}
