"""kt-kernel's own converter on matrices from files, as a process: its import turns flush-to-zero on,
its aborts are C++'s, and its threads stay. Driven as its convert_cpu_weights.py drives it.

    python kt_convert.py METHOD NUMA FOLDER

FOLDER/L.npz holds gate, up [E, I, H] and down [E, H, I] of layer L as bf16 bits; results are left in
FOLDER/_layer_L/_numa_N/ as files of kt-kernel's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

from qconvert.validators.amx.kt_forward import ignore_pinning


def convert_layer(
    layer: int,
    method: str,
    numa: int,
    out: Path,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> None:
    """Quantize one layer's experts and save them below `out`."""
    from kt_kernel import KTMoEWrapper

    experts, intermediate, hidden = gate.shape
    wrapper = KTMoEWrapper(
        layer_idx=layer,
        num_experts=experts,
        num_experts_per_tok=1,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        gpu_experts_mask=torch.zeros(experts, dtype=torch.bool),
        cpuinfer_threads=max(numa, len(os.sched_getaffinity(0))),
        threadpool_count=numa,
        weight_path=str(out),
        chunked_prefill_size=512,
        cpu_save=True,
        method=method,
    )
    wrapper.load_weights_from_tensors(gate, up, down, torch.arange(experts, dtype=torch.int64))


def main(method: str, numa: str, folder: str) -> None:
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    ignore_pinning()
    for file in sorted(Path(folder).glob("*.npz"), key=lambda file: int(file.stem)):
        loaded = np.load(file)
        gate, up, down = (
            torch.from_numpy(loaded[name].view(np.int16)).view(torch.bfloat16)
            for name in ("gate", "up", "down")
        )
        convert_layer(int(file.stem), method, int(numa), Path(folder), gate, up, down)


if __name__ == "__main__":
    main(*sys.argv[1:])
