"""What runs with the core requirements alone, and what says, while planning, which extra it needs.

The environment holds what the core requirements lead to and nothing else (tests/light_install.py), so a
requirement that is used and not declared is found here too. tests/test_wheel.py installs the wheel."""

from __future__ import annotations

from pathlib import Path

import light_install
import numpy as np
import pytest
from checkpoints import run_cli, tree
from light_install import (
    CALIBRATE,
    EXTRAS_PACKAGES,
    KERNELS,
    REFUSED,
    RUNS,
    Light,
    commands,
    light_python,
)
from safetensors.numpy import save_file

from qconvert.cli.demo import VOCAB, write_sample


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Light:
    folder = tmp_path_factory.mktemp("light")
    return light_install.light(light_python(folder / "environment"), folder)


def test_nothing_of_the_extras_is_there(light: Light) -> None:
    assert not light.imported & EXTRAS_PACKAGES
    assert {"numpy", "click", "huggingface_hub"} <= light.imported


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_with_the_core_alone(name: str, light: Light) -> None:
    said = light.said[name]
    assert said.code == 0, said.out + said.err
    if "full" in RUNS[name]:
        assert "0 errors, 0 warnings" in said.out


def test_the_results_are_those_of_any_install(light: Light, tmp_path: Path) -> None:
    """Byte for byte what this environment makes, with numba, torch and all."""
    for line in ("dequant fp8 bf16", "w4a16 fp8 w4 --rtn", "amx fp8 amx --method int4 --numa 1"):
        command, source, out, *options = line.split()
        done = run_cli(command, light.folder / source, tmp_path / out, *options)
        assert done.code == 0, done.err
        assert tree(tmp_path / out) == tree(light.folder / out)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("validate", f"Triton kernels against torch (give --kernels; {KERNELS})"),
        ("kernels", f"compute what the separate ones do ({KERNELS})"),
    ],
)  # fmt: skip
def test_what_was_not_proved_names_its_extra(name: str, said: str, light: Light) -> None:
    lines = light.said[name].out.splitlines()
    assert any(line.startswith("not checked: ") and said in line for line in lines), lines


def test_a_plan_of_a_calibration_warns(light: Light) -> None:
    """It can be planned here and run elsewhere."""
    said = light.said["plan a calibration"]
    assert f"warning calibration runs the model's own class, and {CALIBRATE}" in said.out


@pytest.mark.parametrize("line", REFUSED)
def test_what_needs_an_extra_is_refused_with_its_command(line: str, light: Light) -> None:
    said = light.said[line]
    assert said.code in (1, 2)
    assert REFUSED[line] in said.err
    assert "Traceback" not in said.err
    assert not (light.folder / "out").exists()


# --- Each extra alone --------------------------------------------------------------------------------


def alone(extra: str, folder: Path, *lines: str, **environment: str) -> set[str]:
    """Run command lines, from `fp8`, with the core requirements and one extra. What they imported."""
    write_sample(folder / "fp8")
    python = light_python(folder / "environment", extra)
    words = [line.split() for line in lines]
    said, imported = commands(python, words, folder, **environment)
    assert [one.err for one in said if one.code] == []
    assert "0 errors, 0 warnings" in said[-1].out
    return imported & EXTRAS_PACKAGES


def test_fast_alone(tmp_path: Path) -> None:
    """Compiled loops are asked for outright; without the extra that is refused."""
    line = "dequant fp8 bf16 --jobs 1 --validate full"
    alone("fast", tmp_path, line, QCONVERT_KERNELS="numba")
    python, words = light_python(tmp_path / "core"), [*line.replace("bf16", "other").split()]
    (said,), _ = commands(python, [words], tmp_path, QCONVERT_KERNELS="numba")
    assert said.code == 1
    assert "and numba is not installed: pip install 'qconvert[fast]'" in said.err


@pytest.mark.peer
def test_kernels_alone(tmp_path: Path) -> None:
    made = "w4a16 fp8 w4 --rtn"
    checked = "validate w4 --against fp8 --kernels"
    assert alone("kernels", tmp_path, made, checked) == {"torch", "triton"}


@pytest.mark.peer
def test_calibrate_alone(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 64))
    save_file({"input_ids": tokens}, tmp_path / "ids.safetensors")
    found = alone(
        "calibrate", tmp_path, "dequant fp8 bf16",
        "w4a16 bf16 w4 --gptq --data ids.safetensors",
        "w4a16 bf16 theirs --gptq --solver llmcompressor --data ids.safetensors",
        "eval w4 --against bf16 --data ids.safetensors",
        "eval w4 --against bf16 --synthetic --first-layers 2 --samples 1",
        "validate w4 --against bf16 --level full",
    )  # fmt: skip
    assert found == {"torch", "transformers", "llmcompressor", "datasets"}
