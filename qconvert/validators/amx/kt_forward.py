"""One layer through kt-kernel's own client, as a process: its import turns on flush-to-zero for good,
its errors end a process without an exception, and its threads stay.

    python -m qconvert.validators.amx.kt_forward JOB.json

JOB.json is a `Job` (kt-kernel, `kt_kernel/experts.py`, KTMoEWrapper).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Exit code if kt-kernel cannot run on this machine, whatever the folder; `Job.reason` says why.
UNABLE = 75


@dataclass(frozen=True, slots=True)
class Job:
    """`weights` is the converted folder. `inputs` is an npz: `hidden` [T, H] as bf16 bits, `ids`
    int64 [T, k], `shares` float32 [T, k]. The result, float32 [T, H], goes to `output` (npy)."""

    weights: str
    layer: int
    experts: int
    hidden: int
    intermediate: int
    numa: int
    method: str
    threads: int
    inputs: str
    output: str
    reason: str

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")


def forward(job: Job) -> None:
    """Load the layer and compute. Exits with UNABLE if this machine cannot."""
    import numpy as np
    import torch

    ignore_pinning()
    inputs = np.load(job.inputs)
    hidden = torch.from_numpy(inputs["hidden"].view(np.int16)).view(torch.bfloat16)
    ids, shares = torch.from_numpy(inputs["ids"]), torch.from_numpy(inputs["shares"])
    try:
        from kt_kernel import KTMoEWrapper

        wrapper = KTMoEWrapper(
            layer_idx=job.layer,
            num_experts=job.experts,
            num_experts_per_tok=ids.shape[1],
            hidden_size=job.hidden,
            moe_intermediate_size=job.intermediate,
            gpu_experts_mask=torch.zeros(job.experts, dtype=torch.bool),
            cpuinfer_threads=job.threads,
            threadpool_count=job.numa,
            weight_path=job.weights,
            chunked_prefill_size=512,
            cpu_save=False,
            method=job.method,
        )
    except (
        ImportError,
        RuntimeError,
    ) as error:  # another CPU, or a missing import of its Python part
        Path(job.reason).write_text(" ".join(str(error).split()), encoding="utf-8")
        sys.exit(UNABLE)
    wrapper.load_weights(torch.arange(job.experts, dtype=torch.int64))
    result = wrapper.forward(hidden, ids, shares, 0)
    np.save(job.output, result.float().numpy())


def ignore_pinning() -> None:
    """Have torch ignore `pin_memory`, which needs a GPU."""
    import torch

    for name in ("zeros", "full", "empty"):
        original = getattr(torch, name)

        def plain(*args: Any, _original: Any = original, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return _original(*args, **options)

        setattr(torch, name, plain)


if __name__ == "__main__":
    # There is no stream of a GPU to wait for.
    os.environ["KT_FORCE_SYNC_SUBMIT"] = "1"
    forward(Job(**json.loads(Path(sys.argv[1]).read_bytes())))
    # The result is written; how its threads end says nothing about the folder.
    os._exit(0)
