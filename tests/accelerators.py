"""A CPU that calibrates as a GPU does: torch takes `cpu:0` for a CPU's name, and all that is not called
`cpu` goes the way of an accelerator. Products, streams and pinned memory of CUDA are not tried here."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from calibrate_models import samples

from qconvert.calibrate import background_writer, layers, work_dir
from qconvert.calibrate.engine import Event
from qconvert.calibrate.settings import Matrix, Settings
from qconvert.core.int_scheme import Codes, IntScheme

SCHEME = IntScheme(4, 32)
TOKENS = samples(6, 40)
# Batches of experts smaller than a process's share of them.
SETTINGS = Settings(min_tokens=1, propagated_error="correct", together=2)

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


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda of a machine whose GPU is the CPU, with 8 GiB; and sizes at which the little model has
    several batches, chunks, parts and pieces of its files."""
    place = contextlib.nullcontext()
    found: dict[str, Any] = {
        "Event": _Stream, "Stream": _Stream, "current_stream": _Stream, "synchronize": lambda *_: None,
        "device": lambda *_: place, "stream": lambda *_: place, "set_device": lambda *_: None,
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=8 << 30),
        "cudart": lambda: types.SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0
        ),
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
    monkeypatch.setattr(background_writer, "_ROWS", 70)
    monkeypatch.setattr(work_dir, "_ROWS", 50)


def codes_of(found: Iterable[Event]) -> dict[Place, Codes]:
    return {
        (one.layer, one.expert, one.kind): one.codes[0] for one in found if isinstance(one, Matrix)
    }


def assert_same(some: dict[Place, Codes], others: dict[Place, Codes]) -> None:
    assert some.keys() == others.keys()
    for place, one in some.items():
        assert (one.codes == others[place].codes).all(), place
        assert (one.scale == others[place].scale).all(), place
