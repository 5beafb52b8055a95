"""What a journal says of a run that is not its own."""

from __future__ import annotations

from typing import Any

import pytest

from qconvert.run.journal import first_difference

HEADER: dict[str, Any] = {
    "source": "s", "passes": ["Dequant()"], "qconvert": "0.1.0", "sha256": False, "fingerprint": "a",
}  # fmt: skip


def test_a_plan_that_differs_in_nothing_else_points_to_the_card() -> None:
    said = first_difference(HEADER, {**HEADER, "fingerprint": "b"})
    assert said is not None
    assert said.startswith("the plan was a, now b")
    assert "--base-model" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"passes": ["Fuse()"]}, "pass 1 was `dequant`, now `fuse`"),
        ({"source": "t"}, "the source changed since that run began"),
        ({"sha256": True}, "--sha256 was False, now True"),
    ],
)
def test_what_else_differs_is_said_first(change: dict[str, Any], words: str) -> None:
    assert first_difference(HEADER, {**HEADER, "fingerprint": "b", **change}) == words


def test_the_same_run_differs_in_nothing() -> None:
    assert first_difference(HEADER, dict(HEADER)) is None
