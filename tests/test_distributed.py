"""A calibration of several hosts, which are two commands of one: the bytes of one process, whoever is
lost on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from calibrate_models import EXPERTS, qwen3_moe, samples, saved
from checkpoints import run_cli
from safetensors.numpy import save_file

from qconvert.calibrate.distributed import Launched, launched
from qconvert.calibrate.gpu_workers import CalibrationArgs, WorkerPool
from qconvert.calibrate.packing import Packed, Packers
from qconvert.calibrate.progress import Clock
from qconvert.calibrate.settings import Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import UsageError
from qconvert.core.int_scheme import IntScheme
from qconvert.formats.int_packed.packers import PackQuantized
from qconvert.run.work.backend import PausedAt, Phase
from qconvert.run.work.options import Until

SAMPLES, LENGTH = 6, 40
SCHEME = IntScheme(4, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distributed")
    saved(qwen3_moe(num_hidden_layers=3), made / "model")
    save_file({"input_ids": np.stack(samples(SAMPLES, LENGTH))}, made / "tokens.safetensors")
    return made


def words(folder: Path, out: Path) -> list[str]:
    given = ["w4a16", folder / "model", out, "--gptq", "--data", folder / "tokens.safetensors"]
    more = ["--samples", SAMPLES, "--length", LENGTH, "--group-size", 32, "--device", "cpu"]
    return [str(word) for word in (*given, *more)]


# --- what launchers say ---------------------------------------------------------------------------

_MET = {"MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **_MET,
          "MASTER_PORT": "1234"}, Launched(3, 4, 1, 2, "10.0.0.1", 1234)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
          "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **_MET}, Launched(0, 2, 0, 1, "10.0.0.1", 29500)),
        ({"SLURM_PROCID": "7", "SLURM_NTASKS": "16", "SLURM_LOCALID": "7",
          "SLURM_STEP_TASKS_PER_NODE": "8(x2)", **_MET}, Launched(7, 16, 7, 8, "10.0.0.1", 29500)),
        # torchrun within a step of Slurm.
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", **_MET},
         Launched(1, 2, 0, 1, "10.0.0.1", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)  # fmt: skip
def test_what_a_launcher_says(environment: Mapping[str, str], found: Launched | None) -> None:
    assert launched(environment) == found


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "neither RANK with WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", **_MET}, "RANK is 2, and WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "x", **_MET}, "WORLD_SIZE is 'x', expected a number"),
        ({"SLURM_PROCID": "0", **_MET}, "SLURM_NTASKS is '', expected a number"),
    ],
)
def test_what_no_launcher_says_is_refused(environment: Mapping[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        launched(environment)


def test_a_process_that_is_not_alone_on_its_host_has_one_gpu_of_it() -> None:
    gpus = ("cuda:0", "cuda:1")
    assert Launched(2, 4, 0, 1, "a", 1).devices(gpus) == gpus
    assert Launched(3, 4, 1, 2, "a", 1).devices(gpus) == ("cuda:1",)
    # A launcher that shows each process its own.
    assert Launched(3, 4, 1, 2, "a", 1).devices(("cuda:0",)) == ("cuda:0",)


def test_shards_of_a_calibration_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_cli(*words(folder, tmp_path / "out"), "--shard", "0/2")
    assert (done.code, "start the same command with --distributed" in done.err) == (1, True)
    assert not (tmp_path / "out").exists()
    rounded = run_cli(*words(folder, tmp_path / "out")[:3], "--rtn", "--distributed")
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    alone = run_cli(*words(folder, tmp_path / "out"), "--distributed")
    assert (alone.code, "neither RANK with WORLD_SIZE" in alone.err) == (2, True), alone.err
    assert not (tmp_path / "out").exists()
    assert (rounded.code, "--distributed needs --gptq" in rounded.err) == (2, True), rounded.err


# --- two commands ---------------------------------------------------------------------------------

# The command itself, or one that is killed, as with its host, where a layer begins.
_RUN = """
import os, signal, sys
from qconvert.cli.main import main
from qconvert.cli.progress import Bar
shown, dies = Bar.phase, sys.argv.pop(1)
def phase(self, text):
    shown(self, text)
    if dies and dies in text:
        os.kill(os.getpid(), signal.SIGKILL)
Bar.phase = phase
main(sys.argv[1:])
"""

Ended = tuple[int, str]
ADDRESS = "127.0.0.2"  # the others come from 127.0.0.1


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def run(
    commands: Sequence[Sequence[str]], dies: Mapping[int, str] | None = None, seconds: float = 300
) -> list[Ended]:
    """How commands end that a launcher starts together."""
    port = free_port()
    begun = []
    for number, command in enumerate(commands):
        there = {
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": str(number),
            "WORLD_SIZE": str(len(commands)), "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", _RUN, (dies or {}).get(number, ""), *command, "--distributed"],
                env={**os.environ, **there}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        return [
            (one.wait(), said) for one in begun for said in [one.communicate(timeout=seconds)[0]]
        ]
    finally:
        for one in begun:
            one.kill()


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, bytes]:
    ((code, said),) = run([words(folder, folder / "one")])
    assert code == 0, said
    return files(folder / "one")


def assert_one_error(ended: Ended, *parts: str) -> None:
    code, said = ended
    errors = [line for line in said.splitlines() if "error: " in line]
    assert (code, len(errors)) == (1, 1), said
    assert "Traceback" not in said
    for part in parts:
        assert part in errors[0]


@pytest.mark.crash
def test_two_commands_make_what_one_makes(
    folder: Path, wanted: Mapping[str, bytes], tmp_path: Path
) -> None:
    both = [words(folder, tmp_path / "out")] * 2
    (code, said), (other, told) = run([[*both[0], "--until", "1s"], both[1]])
    assert (code, other) == (4, 0), said + told
    assert "as --until asks" in said
    (code, said), (other, told) = run(both)
    assert (code, other) == (0, 0), said + told
    assert "took part in calibrating" in told
    assert files(tmp_path / "out") == wanted
    # Again: nothing is left, which the second one is told.
    (code, said), (other, told) = run(both)
    assert (code, other) == (0, 0), said + told
    assert "already holds this result" in said


@pytest.mark.crash
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_ends_the_run_and_another_number_goes_on(
    lost: int, folder: Path, wanted: Mapping[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = run([words(folder, out)] * 2, {lost: "layer 1 of"})
    assert ended[lost][0] == -signal.SIGKILL
    who = ["the process that leads", "process 1 of the calibration, on cpu of"][lost]
    assert_one_error(ended[1 - lost], who, "is lost", "run the same command again to go on")
    assert (out / ".qconvert" / "calibration" / "state.json").is_file()
    for code, said in run([words(folder, out)] * (2 - lost)):
        assert code == 0, said
        assert not any(f"layer 0 of 3: {what}" in said for what in ("attention", "experts"))
    assert files(out) == wanted


@pytest.mark.crash
def test_time_that_is_over_ends_the_processes_of_all_hosts(folder: Path, tmp_path: Path) -> None:
    given = CalibrationArgs(
        Checkpoint.open(folder / "model"), samples(SAMPLES, LENGTH), [SCHEME], Settings(min_tokens=1),
        tmp_path, 8 << 30, "k", until=Until(0.001, time.monotonic()),
    )  # fmt: skip
    packed = (PackQuantized(SCHEME),)
    places = [(layer, kind) for layer in range(3) for kind in ("gate_proj", "up_proj", "down_proj")]
    packers = Packers(dict.fromkeys(places, packed), {})
    port = free_port()
    pools = [WorkerPool(("cpu",), Launched(n, 2, 0, 1, ADDRESS, port), 1) for n in range(2)]
    try:
        with ThreadPoolExecutor(2) as threads:
            first, other = threads.map(
                lambda pool: list(pool.calibrate(given, packers, Clock(), ())), pools
            )
    finally:
        for pool in pools:
            pool.end()
    assert first[-1] == PausedAt(1, 3)
    assert sum(isinstance(event, Packed) for event in first) == 3 * EXPERTS
    assert all(isinstance(event, Phase) for event in other)


@pytest.mark.crash
def test_commands_that_differ_are_refused_by_both(folder: Path, tmp_path: Path) -> None:
    first = words(folder, tmp_path / "out")
    for one in run([first, [*first, "--set", "descent=1"]]):
        assert_one_error(one, "plan, data and devices of process 1")
