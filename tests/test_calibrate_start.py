"""What a calibration imports: llm-compressor, and what that brings along, for its own codes alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calibrate_models import VOCAB, qwen3_moe, saved
from safetensors.numpy import save_file

from qconvert.calibrate import devices

SLOW = {"llmcompressor", "compressed_tensors", "datasets", "pandas", "pyarrow", "loguru"}

_CHILD = """
import json, sys
from qconvert.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
json.dump(sorted({name.partition(".")[0] for name in sys.modules}), sys.stderr)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, with tokens beside it."""
    folder = tmp_path_factory.mktemp("start")
    saved(qwen3_moe(num_hidden_layers=1), folder / "model")
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 24))
    save_file({"input_ids": tokens}, folder / "tokens.safetensors")
    return folder


def imported(source: Path, out: Path, command: str, *options: str) -> set[str]:
    """Packages that a calibration's process has imported at its end."""
    data = ("--data", str(source / "tokens.safetensors"), "--samples", "2", "--length", "24")
    words = [command, str(source / "model"), str(out), *data, "--device", "cpu", "-q", *options]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *words], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stderr[done.stderr.rindex("[") :]))


@pytest.mark.parametrize(
    "options", [("w4a16",), ("nvfp4", "--dialect", "modelopt")], ids=lambda words: words[0]
)
def test_the_best_solver_takes_no_llm_compressor(
    options: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    found = imported(source, tmp_path / "out", *options, "--gptq")
    assert {"torch", "transformers"} <= found
    assert not found & SLOW


def test_its_own_codes_do(source: Path, tmp_path: Path) -> None:
    found = imported(source, tmp_path / "out", "w4a16", "--gptq", "--solver", "llmcompressor")
    assert {"llmcompressor", "compressed_tensors"} <= found


def test_gpus_get_ready_beside() -> None:
    """A CPU needs nothing; what fails is left to who computes there next."""
    assert devices.get_ready(["cpu"]) is None
    made = devices.get_ready(["no such device"])
    assert made is not None
    made.join(60)
    assert not made.is_alive()
    devices._begin_on(["cpu"])
