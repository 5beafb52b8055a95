"""Processes of a calibration: they find what one finds, and what befalls one of them is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrate_models import llama, qwen3_moe, samples, saved
from safetensors.numpy import save_file

from qconvert.calibrate import kernel_choice
from qconvert.calibrate.engine import Event
from qconvert.calibrate.gpu_workers import CalibrationArgs, WorkerPool, calibrate_with
from qconvert.calibrate.packing import Packed, Packers
from qconvert.calibrate.progress import Clock, Work
from qconvert.calibrate.settings import LayerDone, Matrix, Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import RunError
from qconvert.core.int_scheme import IntScheme
from qconvert.formats.int_packed.packers import PackQuantized

TOKENS = samples(4, 30)
TWO = ("cpu", "cpu")
SCHEME = IntScheme(4, 32)
PLACES = [(layer, kind) for layer in range(2) for kind in ("gate_proj", "up_proj", "down_proj")]
PACKERS = Packers(dict.fromkeys(PLACES, (PackQuantized(SCHEME),)), {})

# Each starts processes that import torch and transformers, 6 s of a core each.
pytestmark = pytest.mark.crash

Place = tuple[int, int | None, str]


@pytest.fixture(autouse=True)
def as_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of BF16 as this CPU makes them, which tests else do as torch does (conftest.py)."""
    decides: Any = kernel_choice.bf16_is_slow
    monkeypatch.setattr(kernel_choice, "bf16_is_slow", decides.__wrapped__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(qwen3_moe(num_hidden_layers=2), tmp_path_factory.mktemp("model") / "model")


def given(folder: Path, work_dir: Path) -> CalibrationArgs:
    settings = Settings(min_tokens=1, refit=1, descent=1)
    return CalibrationArgs(
        Checkpoint.open(folder), TOKENS, [SCHEME], settings, work_dir, 8 << 30, "k"
    )


def together(
    given: CalibrationArgs, clock: Clock, works: Sequence[Work] = ()
) -> Iterator[Event | Packed]:
    """What two processes find."""
    mates = WorkerPool(TWO)
    try:
        yield from mates.calibrate(given, PACKERS, clock, works)
    finally:
        mates.end()


def packed_of(found: Iterable[Event | Packed]) -> dict[Place, list[bytes]]:
    made: dict[Place, list[bytes]] = {}
    for one in found:
        packed = PACKERS.pack(one) if isinstance(one, Matrix) else one
        if isinstance(packed, Packed):
            place = packed.layer, packed.expert, packed.kind
            assert place not in made
            made[place] = [bytes(buffer.data) for buffer in packed.buffers()]
    return made


def test_two_processes_find_the_same_codes(folder: Path, tmp_path: Path) -> None:
    alone = packed_of(calibrate_with(given(folder, tmp_path / "one"), "cpu"))
    clock = Clock()
    planned = [{"forward": 7.0}, {"forward": 9.0}]
    found = list(together(given(folder, tmp_path / "two"), clock, planned))
    assert packed_of(found) == alone
    # A layer is done once, after all its matrices.
    kinds = [
        f"layer {one.layer}" if isinstance(one, LayerDone) else str(one.layer)
        for one in found if isinstance(one, Packed | LayerDone)
    ]  # fmt: skip
    matrices = len(alone) // 2
    assert kinds == [*["0"] * matrices, "layer 0", *["1"] * matrices, "layer 1"]
    assert clock.work["forward"] == pytest.approx(16.0)
    assert clock.seconds["solve"] > 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes that are started from now on."""
    found: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def popen(*args: Any, **named: Any) -> subprocess.Popen[bytes]:
        found.append(begin(*args, **named))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return found


def test_an_error_of_one_is_raised_and_all_are_ended(
    folder: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    work_dir = tmp_path / "room"
    work_dir.mkdir()
    (work_dir / "state.json").write_text('{"key": "another", "layer": 1}')
    with pytest.raises(RunError, match="holds another calibration"):
        list(together(given(folder, work_dir), Clock()))
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_a_killed_one_is_told_of_and_another_run_goes_on(
    folder: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    alone = packed_of(calibrate_with(given(folder, tmp_path / "one"), "cpu"))
    work_dir = tmp_path / "room"
    running = together(given(folder, work_dir), Clock())
    before: list[Event | Packed] = []

    def run() -> None:
        for event in running:
            before.append(event)
            if isinstance(event, Packed) and event.layer == 1:
                started[1].kill()

    told = r"the process that calibrates on cpu was killed by signal 9 .*run the same command again"
    with pytest.raises(RunError, match=told):
        run()
    assert all(process.poll() is not None for process in started)
    # What goes into layer 1 was kept by both.
    after = list(together(given(folder, work_dir), Clock()))
    assert {event.layer for event in after if isinstance(event, Packed)} == {1}
    assert {**packed_of(before), **packed_of(after)} == alone


def test_processes_end_with_the_one_that_started_them(folder: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CALIBRATING, str(folder), str(tmp_path / "room")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    line = child.stdout.readline()
    numbers = [int(number) for number in line.split()]
    assert len(numbers) == 2, line
    child.kill()
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 60
    while any(_lives(number) for number in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("model", ["qwen3_moe", "llama"])
def test_a_conversion_by_processes_writes_the_same_bytes(
    model: str, folder: Path, tmp_path: Path
) -> None:
    """Of experts, and all linears of a class whose layout is found in transformers. One starts a process
    for a GPU that torch then does not find, and computes itself."""
    targets: tuple[str, ...] = ()
    if model == "llama":
        folder = saved(llama(num_hidden_layers=2), tmp_path / "llama")
        targets = ("--targets", "Linear")
    save_file({"input_ids": np.stack(TOKENS)}, tmp_path / "tokens.safetensors")
    options = ("--gptq", "--data", str(tmp_path / "tokens.safetensors"), "--samples", "4")
    words = ("--length", "30", "--group-size", "32", "--log-json", "-", *options, *targets)
    found: list[dict[str, bytes]] = []
    for count in (1, 2):
        out = tmp_path / str(count)
        cpus = ["--device", "cpu"] * count if count > 1 else []
        done = subprocess.run(
            [sys.executable, "-c", _CONVERTING, "w4a16", str(folder), str(out), *words, *cpus],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        *lines, imported = [json.loads(s) for s in done.stderr.splitlines() if s.startswith("{")]
        # Where others compute, the one that writes need not import what does. Those that were started
        # before there was a plan are the only ones.
        assert imported["started"] == count
        assert imported["transformers"] == (count == 1) or model == "llama"
        for kind in ("forward", "hessian", "solve"):
            work = lines[-1]["work"][kind]
            assert work["done"] == pytest.approx(work["planned"]), kind
        found.append({path.name: path.read_bytes() for path in out.glob("*.safetensors")})
    assert found[0]
    assert found[0] == found[1]


_CONVERTING = """
import json, sys
from qconvert.calibrate import gpu_workers
from qconvert.cli.main import main
begin, started = gpu_workers._Worker, []
gpu_workers._Worker = lambda *given: started.append(begin(*given)) or started[-1]
cpus = ["cpu"] * sys.argv.count("cpu")
try:
    with gpu_workers.started_early(cpus or ["cuda:0"]):
        main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
said = {"transformers": "transformers" in sys.modules, "started": len(started)}
print(json.dumps(said), file=sys.stderr)
"""

_CALIBRATING = """
import subprocess
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_gpu_workers import Clock, given, together
begin, found = subprocess.Popen, []
subprocess.Popen = lambda *a, **n: found.append(begin(*a, **n)) or found[-1]
for _ in together(given(Path(sys.argv[1]), Path(sys.argv[2])), Clock()):
    print(*(one.pid for one in found), flush=True)
"""


def _lives(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
