"""Searches for scales on a GPU: what decides for one, and the kernels in Triton's interpreter."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import both_forms
import pytest
from checkpoints import run_cli
from models import numbers_only, qwen3_moe
from test_amx_validate import moe
from test_gdn_fused import interpreted

from qconvert.core.errors import PlanError
from qconvert.core.gpus import free_bytes
from qconvert.ops.gpu import choice
from qconvert.ops.gpu.choice import CORE_RATES, Decision

_SEARCHES = Path(__file__).parent / "gpu_searches.py"
_LONG = {"ints_search": 10**12}


def decide(searched: dict[str, int], asked: str | None, jobs: int) -> Decision | None:
    return choice.decide(searched, asked, jobs, compiled_loops=True)


@pytest.mark.peer
def test_kernels_make_numpys_bytes() -> None:
    done = interpreted(_SEARCHES)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert {line[0] for line in lines} == {"fits"}
    assert {line[4] for line in lines} == {"taken", "declined"}
    assert len({line[1] for line in lines}) >= len(CORE_RATES)


@pytest.mark.peer
def test_conversions_that_search_make_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own tests again, each op in the kernels too, whatever its size (both_forms.py)."""
    monkeypatch.setenv(both_forms.VARIABLE, "gpu")
    tests = Path(__file__).with_name("test_nvfp4_search.py")
    done = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.peer
def test_kernels_compile_for_a_gpu() -> None:
    """For compute capability 9.0, which needs no GPU, and without instructions that round otherwise than
    numpy: fused, flushing denormals, approximate."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, _SEARCHES, "compile"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = set(done.stdout.split())
    assert {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "add.rn.f64", "div.rn.f64"} <= found
    rounded = {f"{name}.rn.{kind}" for name in ("add", "mul", "div") for kind in ("f32", "f64")}
    assert found <= {"sub.rn.f32", *rounded}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this machine's GPUs are looked for."""
    monkeypatch.setattr("qconvert.core.gpus._NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_long_search_takes_a_gpu_where_there_is_one(gpus: Path) -> None:
    found = decide(_LONG, None, 4)
    assert found is not None
    assert found.device is None
    assert "no NVIDIA GPU" in found.why
    (gpus / "nvidia0").touch()
    (gpus / "nvidiactl").touch()
    found = decide(_LONG, None, 4)
    assert found is not None
    assert found.device == "cuda:0"
    assert found.why == (
        "searching scales of 1.00 TB takes 4 cores about 1786 s, a GPU 343 s with its start"
    )


def test_a_short_search_does_not(gpus: Path) -> None:
    (gpus / "nvidia0").touch()
    found = decide({"ints_search": 10**9}, None, 4)
    assert found == Decision(
        None, "searching scales of 1.0 GB takes 4 cores about 2 s, a GPU 10 s with its start"
    )
    assert decide({}, None, 4) is None
    in_numpy = choice.decide({"ints_search": 10**9}, None, 1, compiled_loops=False)
    assert in_numpy is not None
    assert in_numpy.device == "cuda:0"


def test_cores_do_what_they_do_sooner(gpus: Path) -> None:
    """AMX of 2 TB: 16 cores take longer than a GPU and its eight workers, and 96 do not."""
    (gpus / "nvidia0").touch()
    devices = [decide({"amx_search": 2 * 10**12}, None, jobs) for jobs in (16, 96)]
    assert [found and found.device for found in devices] == ["cuda:0", None]


class _Driver:
    """The functions of NVML that are asked, of a GPU with so much memory free."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[object] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: ctypes.c_uint, _: object) -> int:
        self.asked.append(number.value)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, _: object) -> int:
        self.asked.append(name)
        return 0 if name == b"GPU-8a" else 6

    def nvmlDeviceGetMemoryInfo(self, _: object, memory: Any) -> int:
        memory._obj.free = self.free
        return 0


@pytest.fixture
def driver(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> _Driver:
    """That of a machine with a GPU on which a byte less is free than eight workers take."""
    (gpus / "nvidia0").touch()
    made = _Driver(8 * choice.DEVICE_BYTES - 1)
    monkeypatch.setattr("ctypes.CDLL", lambda name: made)
    return made


def test_a_gpu_without_memory_is_left_alone(driver: _Driver) -> None:
    found = decide(_LONG, None, 16)
    assert found is not None
    assert found.device is None
    assert "cuda:0 has 8.6 GB of memory free, and 8 workers take 8.6 GB" in found.why
    driver.free += 1
    enough, asked = decide(_LONG, None, 16), decide(_LONG, "cuda:0", 16)
    assert enough is not None
    assert asked is not None
    assert enough.device == asked.device == "cuda:0"


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, 0), ("3", 3), ("GPU-8a,1", b"GPU-8a"), ("MIG-1", b"MIG-1")]
)
def test_the_driver_is_asked_of_the_gpu_that_torch_calls_the_first(
    visible: str | None, asked: object, driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that it does not know nothing is known."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert free_bytes(0) == (None if visible == "MIG-1" else driver.free)
    assert driver.asked == [asked]


def test_gpus_that_are_hidden_are_not_there(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = decide(_LONG, None, 4)
    assert found is not None
    assert found.device is None
    assert "CUDA_VISIBLE_DEVICES names no GPU" in found.why


def test_what_is_asked_for_is_done_or_refused(gpus: Path) -> None:
    with pytest.raises(PlanError, match="device cuda:0: this machine has no NVIDIA GPU"):
        decide(_LONG, "cuda:0", 4)
    (gpus / "nvidia0").touch()
    assert decide({"ints_search": 1}, "cuda:0", 1) is not None
    with pytest.raises(PlanError, match=r"device cuda:3: this machine has 1 GPU, cuda:0 to cuda:0"):
        decide(_LONG, "cuda:3", 4)
    with pytest.raises(PlanError, match=r"device 'tpu': expected cpu or cuda:N"):
        decide(_LONG, "tpu", 4)
    cpu = decide(_LONG, "cpu", 4)
    assert cpu is not None
    assert cpu.device is None
    idle = decide({}, "cuda:0", 4)
    assert idle is not None
    assert "none are searched for" in idle.why


def test_a_package_that_is_missing_is_named(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpus / "nvidia0").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        PlanError, match=r"torch and triton are not installed: pip install 'qconvert\[kernels\]'"
    ):
        decide(_LONG, "cuda:0", 1)


def test_the_plan_says_where(tmp_path: Path) -> None:
    numbers_only(qwen3_moe()).write(tmp_path / "source")
    words: list[str | Path] = [
        "w4a16",
        tmp_path / "source",
        tmp_path / "out",
        "--rtn",
        "--group-size",
        "32",
        "--dry-run",
    ]
    code, text, _ = run_cli(*words, "--scales", "search")
    assert code == 0
    assert "\ndevice  cpu: searching scales of " in text
    code, text, _ = run_cli(*words)
    assert code == 0
    assert "\ndevice " not in text
    amx_source = moe().write(tmp_path / "amx")
    amx: list[str | Path] = ["amx", amx_source, tmp_path / "out", "--method", "int8", "--numa", "1"]
    code, text, _ = run_cli(*amx, "--dry-run", "--rounding", "search")
    assert code == 0
    assert "\ndevice  cpu: searching scales of " in text
    code, text, _ = run_cli(*amx, "--dry-run")
    assert code == 0
    assert "\ndevice " not in text
    code, _, error = run_cli(*words, "--device", "cpu", "--device", "cuda:0")
    assert code == 2
    assert "several --device need --gptq" in error
