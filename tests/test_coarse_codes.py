"""Codes within half a step of the source, and a step far larger than its weights ask for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensor, copied, read_tensors, write_shard
from data_folders import maker
from gdn_models import bf16

from qconvert.validation.runner import Request, validate_folder

GROUP = 16


def floats(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(tensor.shape)


def coarsened(source: Path, out: Path, times: float) -> None:
    """Every packed matrix quantized again, from the source, with scales so many times as large."""
    real = read_tensors(source)
    (file,) = out.glob("*.safetensors")
    tensors = read_tensors(out)
    for name, packed in tensors.items():
        if not name.endswith(".weight_packed"):
            continue
        module = name.removesuffix("_packed")
        scale = bf16(floats(tensors[f"{module}_scale"]) * times)
        steps = np.repeat(floats(scale), GROUP, axis=1)
        codes = np.clip(np.rint(floats(real[module]) / steps), -8, 7).astype(np.int64) + 8
        shifts = 4 * np.arange(8)
        words = (codes.reshape(len(codes), -1, 8) << shifts).sum(axis=2).astype(np.uint32)
        tensors[name] = Tensor(packed.dtype, packed.shape, words.tobytes())
        tensors[f"{module}_scale"] = scale
    write_shard(file, tensors)
    (out / "qconvert.receipt.jsonl").unlink()  # it would notice any change


@pytest.mark.parametrize(("times", "rules"), [(1, set()), (2, {"QC060"}), (8, {"QC060"})])
def test_steps_larger_than_the_weights_ask_for(
    times: float, rules: set[str], tmp_path: Path
) -> None:
    source, sound = maker(tmp_path)("w4a16")
    out = copied(sound, tmp_path / "broken")
    coarsened(source, out, times)
    report = validate_folder(out, str(source), request=Request("full", jobs=1))
    found = [finding for finding in report.findings if finding.rule in ("QC060", "QC067")]
    assert {finding.rule for finding in found} == rules
    for finding in found:
        assert "expected a step of at most" in finding.message
