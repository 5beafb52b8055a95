"""Statistics of a calibration as `--save-stats` leaves them: as much as input scales are taken from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoints import Tensor, write_shard


def write_stats(folder: Path, layers: list[int], *, experts: int = 2, hidden: int = 128) -> Path:
    """Largest inputs of expert e: 21 * (e + 1) for gate and up, 42 for down; expert 1 saw nothing in
    the last layer."""
    folder.mkdir()
    for layer in layers:
        gate = np.zeros((experts, hidden), np.float32)
        gate[:, 5] = 21 * (np.arange(experts) + 1)
        down = np.zeros((experts, 256), np.float32)
        down[:, 7] = 42
        if layer == layers[-1]:
            gate[1] = down[1] = 0
        tensors = {
            f"layers.{layer}.gate_up.absmax": Tensor("F32", gate.shape, gate.tobytes()),
            f"layers.{layer}.down.absmax": Tensor("F32", down.shape, down.tobytes()),
        }
        write_shard(folder / f"layer-{layer:05d}.safetensors", tensors)
    return folder
