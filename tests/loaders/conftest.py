"""Loaders are imported once for all files and processes: an import of sglang takes 15 to 60 s, a load
in a fork of it a second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaders.client import PYTHON, Server

# Files of which `make check` runs every so-manieth cell; QCONVERT_ALL=1 runs all.
_SAMPLED = {
    "test_simulator_sglang.py": 12, "test_simulator_sglang_drafts.py": 41,
    "test_launch_lines.py": 13, "test_simulator_vllm.py": 37, "test_relabelled.py": 4,
    "test_fused_packed.py": 3, "test_extracted_drafts.py": 2, "test_class_matrix.py": 97,
    "test_runtime_names.py": 5, "test_misreadings.py": 2, "test_recorded_classes.py": 112,
    "test_sglang.py": 3, "test_sglang_quantized.py": 2, "test_vllm.py": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """sglang on what it takes for an H200."""
    yield from _serving(tmp_path_factory, "sglang", "9.0")


@pytest.fixture(scope="session")
def blackwell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """sglang on what it takes for a B200."""
    yield from _serving(tmp_path_factory, "sglang", "10.0")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serving(tmp_path_factory, "vllm", "9.0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def _serving(folders: pytest.TempPathFactory, runtime: str, capability: str) -> Iterator[Server]:
    """Of one room for all processes of pytest-xdist."""
    room = folders.getbasetemp()
    server = Server(
        PYTHON, room.parent if "PYTEST_XDIST_WORKER" in os.environ else room, runtime, capability
    )
    yield server
    server.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("QCONVERT_ALL") == "1":
        return
    kept, left = list[pytest.Item](), list[pytest.Item]()
    met: dict[str, int] = {}
    for item in items:
        every = _SAMPLED.get(item.path.name, 1)
        number = met[item.path.name] = met.get(item.path.name, -1) + 1
        (left if number % every else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
