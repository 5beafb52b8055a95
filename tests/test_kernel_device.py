"""Kernels are launched on the device that has their tensors."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator

import pytest
import torch

from qconvert.calibrate.kernels.choice import there


def test_what_launches_kernels_runs_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def of(tensor: torch.Tensor) -> Iterator[None]:
        log.append(f"on {tensor.shape[0]}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "device_of", of)

    @there
    def launch(rows: torch.Tensor, other: torch.Tensor, *, more: int) -> int:
        log.append("launch")
        return rows.shape[0] + more

    assert launch(torch.empty(3), torch.empty(2), more=4) == 7
    assert log == ["on 3", "launch", "back"]


@pytest.mark.peer
def test_all_that_launches_kernels_does_so() -> None:
    """Every public function that has a kernel of its module in its code."""
    from qconvert.calibrate.kernels import answers, columns, product

    found = []
    for module in (answers, columns, product):
        for name, one in inspect.getmembers(module, inspect.isfunction):
            plain = inspect.unwrap(one)
            launches = re.search(r"^    \w+\[", inspect.getsource(plain), re.MULTILINE)
            if one.__module__ == module.__name__ and launches:
                found.append(name)
                assert plain is not one, f"{module.__name__}.{name} is not decorated with `there`"
    assert len(found) == 7, found
