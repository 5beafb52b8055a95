"""Which extra installs what, and what is said where it is missing."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from checkpoints import run_cli
from light_install import ROOT, project

from qconvert.core.errors import DataError, PlanError
from qconvert.core.extras import (
    EXTRAS,
    extra_of,
    failed_import,
    is_installed,
    lacking,
    pip_line,
    require,
)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have some packages not be found."""
    find = importlib.util.find_spec

    def hide(*names: str) -> None:
        def found(name: str, package: str | None = None) -> Any:
            return None if name in names else find(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return hide


def test_pyproject_declares_the_same() -> None:
    extras = project()["optional-dependencies"]
    declared = {name: {re.split(r"[^\w-]", text)[0] for text in extras[name]} for name in EXTRAS}
    assert declared == {name: set(packages) for name, packages in EXTRAS.items()}
    assert extras["all"] == [f"qconvert[{','.join(EXTRAS)}]"]
    core = {re.split(r"[^\w-]", text)[0] for text in project()["dependencies"]}
    assert not core & set().union(*EXTRAS.values())


def test_nothing_is_lacking_where_all_is_installed() -> None:
    assert [lacking(extra) for extra in ("calibrate", "kernels", "fast")] == ["", "", ""]
    require("calibrate", "a calibration")


@pytest.mark.parametrize(
    ("hidden", "asked", "said"),
    [
        (("torch",), (), "torch is not installed"),
        (("torch", "transformers"), (), "torch and transformers are not installed"),
        (EXTRAS["calibrate"], (), "torch, transformers and llmcompressor are not installed"),
        (("torch", "llmcompressor"), ("llmcompressor",), "llmcompressor is not installed"),
    ],
)
def test_what_is_missing_is_named_with_its_command(
    hidden: tuple[str, ...], asked: tuple[str, ...], said: str, without: Callable[..., None]
) -> None:
    without(*hidden)
    assert lacking("calibrate", *asked) == f"{said}: pip install 'qconvert[calibrate]'"


def test_it_is_refused_as_the_caller_says(without: Callable[..., None]) -> None:
    without("datasets")
    with pytest.raises(DataError, match=r"^a.jsonl is read, and datasets is not installed: pip "):
        require("calibrate", "a.jsonl is read", "datasets", error=DataError)
    without("ray")
    with pytest.raises(PlanError, match=r"^an engine, and ray is not installed: pip install "):
        require("ray", "an engine")


def test_the_first_cause_of_an_import_that_failed() -> None:
    """Behind what transformers raises for it; other errors have none."""
    hidden = ModuleNotFoundError("Could not import module 'ThatModel'")
    hidden.__cause__ = RuntimeError("libnothing.so:\n no such file")
    assert failed_import(hidden) == "RuntimeError: libnothing.so: no such file"
    assert failed_import(ImportError("no module")) == "ImportError: no module"
    assert failed_import(ValueError("hidden_size")) is None


def test_a_module_that_no_file_made_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests, and other programs, put such modules into sys.modules; find_spec raises on them."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not is_installed("ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert not is_installed("ray")


def test_one_module_knows_the_command() -> None:
    """A message with a command of its own would name what no extra has."""
    files = [*(ROOT / "qconvert").rglob("*.py")]
    own = [file for file in files if "pip install 'qconvert[" in file.read_text(encoding="utf-8")]
    assert own == [ROOT / "qconvert/core/extras.py"]


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch.nn.functional", "calibrate"),
        ("triton", "kernels"),
        ("compressed_tensors.quantization", "calibrate"),
        ("numba", "fast"),
        ("s3fs", "s3"),
        ("numpy", None),
        ("", None),
    ],
)
def test_the_extra_of_a_module(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra


def test_an_import_that_nobody_foresaw_is_named_too(
    without: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last resort of the command line: no `reinstall it` for what was never installed."""

    def demo(folder: object) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton.language")

    monkeypatch.setattr("qconvert.cli.demo.run_demo", demo)
    without("triton")
    done = run_cli("demo")
    assert done.code == 1
    assert done.err == (
        "qconvert: error: this command needs triton, and triton is not installed: "
        f"{pip_line('kernels')}\n"
    )
